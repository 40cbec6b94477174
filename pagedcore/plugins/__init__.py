"""How code outside the core gets in: named tables of implementations and observing hooks; see ``hookspecs.py``."""
