"""An engine on its own thread, for callers on any event loop or none."""
