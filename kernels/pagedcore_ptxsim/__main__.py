"""``python -m pagedcore_ptxsim``: list, run and mutate the kernels of a PTX file."""

from __future__ import annotations

import sys

from pagedcore_ptxsim.command import main

if __name__ == "__main__":
    sys.exit(main())
