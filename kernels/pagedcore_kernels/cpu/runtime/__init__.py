"""Running compiled kernels on threads: the kernel's entry and parameters, the team of helpers, the cores there are.

Read ``kernel.py`` for what a kernel is, ``team.py`` for who runs it, ``team_loop.py`` for how the team works together.
"""
