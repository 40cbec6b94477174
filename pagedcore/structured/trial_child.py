"""The program of the child process that tries a grammar: an interpreter with the grammar library and nothing else.

Is told its parent and where the library lies, reads one line of JSON, writes ``READY`` when only the grammar is left
to do, and ``DONE`` when it was compiled or refused within the memory that it may take. Imported, it does nothing.
"""

from __future__ import annotations

import json
import os
import select
import sys
import threading
from typing import Any, Final

READY: Final = b"ready\n"
DONE: Final = b"done\n"


def _die_with_parent(parent: int) -> None:
    """Ask the kernel for it, and watch the pipe too: the parent may have been replaced, or may have ended already."""
    import ctypes

    # Why 1 and 9: PR_SET_PDEATHSIG and SIGKILL.
    ctypes.CDLL(None).prctl(1, 9, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)
    broken = select.poll()
    broken.register(1, 0)

    def watch() -> None:
        broken.poll()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _limit_memory(num_bytes: int) -> None:
    """Let the process take so many bytes of address space more than it has."""
    import resource

    with open("/proc/self/statm") as file:
        present = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (present + num_bytes,) * 2)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


class _Bytes:
    """A vocabulary of all bytes, and of the special tokens that grammars name, in a vocabulary of the same size.

    The larger part of a real one is not needed: the library comes to it when its own limits hold.
    """

    is_tokenizer_wrapper, bos_token_id = True, None

    def __init__(self, size: int, special: dict[str, str]) -> None:
        self.tokens = [b""] * size + [bytes([one]) for one in range(256)]
        for token_id, text in special.items():
            self.tokens[int(token_id)] = text.encode()
        self.special_token_ids = sorted(map(int, special))
        self.eos_token_id = self.special_token_ids[0]

    def __call__(self, text: str | bytes) -> list[int]:
        data = text.encode() if isinstance(text, str) else text
        return [len(self.tokens) - 256 + one for one in data]


def _try(request: dict[str, Any]) -> None:
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer

    tokens = LLTokenizer(_Bytes(request["vocab_size"], request["special"]), slices=[])

    def compile_it() -> None:
        _limit_memory(request["num_bytes"])
        os.write(1, READY)
        matcher = LLMatcher(tokens, request["grammar"], log_level=0, limits=LLParserLimits(**request["limits"]))
        if not matcher.is_error():
            matcher.compute_bitmask()
        os.write(1, DONE)

    threading.stack_size(request["stack_bytes"])
    thread = threading.Thread(target=compile_it)
    thread.start()
    thread.join()


if __name__ == "__main__":
    # Why first: a parent that ends before it has asked would leave this waiting.
    _die_with_parent(int(sys.argv[1]))
    sys.path.append(sys.argv[2])
    _try(json.loads(sys.stdin.buffer.readline()))
    # Why so: what the grammar took need not be given back piece by piece.
    os._exit(0)
