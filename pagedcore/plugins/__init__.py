"""How code outside the core gets in: named tables of implementations and a few observing hooks.

Owns the hook specifications, the registry of named implementations, the plugin manager and ``expose``; never
the implementations themselves, which are imported on first use. Read ``hookspecs.py`` first, then
``manager.py``.
"""
