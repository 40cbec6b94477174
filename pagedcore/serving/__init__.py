"""An engine on a thread of its own, for callers on any event loop or none."""
