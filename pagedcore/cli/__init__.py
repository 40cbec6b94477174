"""The command line: one module per command, each importing what it needs only when it runs.

Owns terminals, options and exit codes; the engine below knows nothing of them. Read ``main.py`` next.
"""
