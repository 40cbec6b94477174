"""What is asked of a file that somebody names, before it is opened."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable


def check_given_file(
    path: str | os.PathLike[str], most_bytes: int, refused: Callable[[str, str], Exception]
) -> None:
    """Refuse what is no regular file, or larger than ``most_bytes``.

    Args:
        path: of the file.
        most_bytes: the limit.
        refused: makes the error of what was got and what is allowed.

    Raises:
        OSError: there is no such file, or it cannot be looked at.
        ValueError: the path is none.
    """
    # Why asked first: to open a pipe waits for its writer.
    status = os.stat(path)
    if not stat.S_ISREG(status.st_mode):
        raise refused("a directory, pipe or device", "a regular file")
    if status.st_size > most_bytes:
        raise refused(f"{status.st_size} bytes", f"up to {most_bytes}")
