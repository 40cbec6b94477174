"""Python imports this first in every process that has the tests on its path: one looks for no garbage at its end, nor
often while it imports, which together take a third of the time of one that imports torch.
"""

from __future__ import annotations

import atexit
import gc

gc.set_threshold(100_000, 20, 100)
# Why first: what is registered first is called last, when only Python's own collections are left to come.
atexit.register(gc.freeze)
