"""The engine: the step loop, and how an engine is built."""
