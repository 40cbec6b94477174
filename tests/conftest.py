"""One compute thread for all tests and what they start, unless the caller says otherwise.

Tiny models gain nothing from threads, and processes side by side whose threads wait for each other lose much to them.
"""

from __future__ import annotations

import os

# Why here: OpenMP reads it once, when torch is imported, which no test has done yet.
os.environ.setdefault("OMP_NUM_THREADS", "1")
