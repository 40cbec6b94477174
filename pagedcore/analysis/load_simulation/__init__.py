"""Load on a virtual clock: the engine's own scheduler and block manager, and a step-time model instead of a model."""
