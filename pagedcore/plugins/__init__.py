"""How code outside the core gets in: named tables of implementations, imported on first use, and observing hooks.

Read ``hookspecs.py`` first, then ``manager.py``.
"""
