"""Tries a grammar in a child process before it is compiled here, where nothing could stop it.

What the child has compiled cannot come here: a grammar that passes is compiled once more. The child has an interpreter
of its own with the grammar library alone, none of this process's handles, and no terminal; it is killed when its time
is over, when it takes too much memory, and when this process or the thread that waits for it ends.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from pagedcore.errors import GrammarsBusy
from pagedcore.structured import trial_child

_KEPT: Final = ("LD_LIBRARY_PATH",)
"""Of the environment: where some interpreters have their own library."""


def interpreter() -> str | None:
    """Return the path of a Python that can be started; ``None`` where the program is something else, or has none."""
    if "frozen" in vars(sys):
        return None
    usual = Path(sys.base_exec_prefix, "bin", f"python{sys.version_info.major}.{sys.version_info.minor}")
    for path in (sys.executable, str(usual)):
        # Why the name: an embedding program may stand there, and must not be started once more.
        if path and re.fullmatch(r"python[\d.]*\w?", Path(path).name) and os.access(path, os.X_OK):
            return path
    return None


def try_grammar(request: Mapping[str, Any], limit_s: float) -> str | None:
    """Compile a grammar in a child; return what is too much about it, or ``None`` for nothing.

    Args:
        request: what ``trial_child`` reads.
        limit_s: seconds from here to its end.

    Raises:
        OSError: no child could be started, or it did not get as far as the grammar.
        GrammarsBusy: that took all the time.
    """
    import llguidance

    python = interpreter()
    if python is None:
        raise FileNotFoundError("no interpreter")
    library = str(Path(llguidance.__file__).parents[1])
    command = [python, "-I", "-S", "-B", trial_child.__file__, str(os.getpid()), library]
    environment = {name: os.environ[name] for name in _KEPT if name in os.environ}
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, cwd="/",
        start_new_session=True,
        # Why: each thread has an arena of malloc's otherwise, tens of MiB of address space.
        env={**environment, "MALLOC_ARENA_MAX": "1"},
    ) as child:
        is_late = False
        try:
            said, _ = child.communicate(json.dumps(request).encode() + b"\n", limit_s)
        except subprocess.TimeoutExpired:
            is_late = True
            child.kill()
            said, _ = child.communicate()
        except BaseException:
            child.kill()
            raise
    # Why not the exit status: whoever ignores SIGCHLD in this process, or waits for every child, takes it away.
    if said.endswith(trial_child.DONE):
        return None
    if not said.startswith(trial_child.READY):
        raise GrammarsBusy("no child process started in time") if is_late else ChildProcessError("the child has ended")
    return f"compiling takes over {limit_s:g} s" if is_late else "compiling takes too much memory"
