"""Attention, sampling and elementwise kernels, and the layout of the KV pool they share."""

from pagedcore_kernels.errors import UnsupportedPlatform

try:
    import fcntl as _fcntl  # noqa: F401  # Why: it says whether this is a POSIX system, before anything else needs one.
except ImportError as error:
    raise UnsupportedPlatform(
        "pagedcore does not run on this system. It is tested on Linux (x86-64) and may run on other POSIX systems; on "
        "Windows it runs inside WSL 2 or a Linux container."
    ) from error
