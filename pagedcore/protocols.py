"""The ports of the core, as protocols: model, tokenizer, clock, and those of the kernels. Imports no framework.

``models/`` implements ``ModelBackend`` and ``pagedcore_kernels`` implements ``AttentionBackend``; anything of yours
that has the same members can take their place.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from pagedcore_kernels.interface import AttentionBackend as AttentionBackend
from pagedcore_kernels.interface import FloatArray as FloatArray
from pagedcore_kernels.interface import Int32Array as Int32Array
from pagedcore_kernels.interface import Int64Array as Int64Array
from pagedcore_kernels.interface import RaggedRows as RaggedRows

if TYPE_CHECKING:
    import torch

ChatMessage = Mapping[str, Any]


@runtime_checkable
class ModelBackend(Protocol):
    """A model that computes logits for ragged rows and keeps K/V in slots it owns.

    ``is_schedule_invariant`` declares that a row's logits are the same bits whatever else is in the batch and however
    its prompt was chunked; only then does preemption by recompute leave answers unchanged bit for bit.
    """

    @property
    def vocab_size(self) -> int:
        """Token ids are below this."""
        ...

    @property
    def max_model_len(self) -> int:
        """Positions the model was made for."""
        ...

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """Tokens that end an answer."""
        ...

    @property
    def block_size(self) -> int:
        """Preferred tokens per KV block."""
        ...

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of K and V of one token over all layers."""
        ...

    @property
    def is_schedule_invariant(self) -> bool:
        """See the class docstring."""
        ...

    def allocate_kv(self, num_blocks: int, block_size: int) -> None:
        """Make room for ``num_blocks`` blocks; called once, before the first forward."""
        ...

    def forward(self, batch: RaggedRows) -> FloatArray | torch.Tensor:
        """Compute the batch, write its K/V to the slots, and return float32 logits of shape [S, vocab_size].

        The caller may overwrite the returned array until the next call.
        """
        ...


class CacheStore(Protocol):
    """Moves whole KV blocks: on the device, and between the device and a slab of host memory.

    A ``ModelBackend`` that has one offers it as ``cache_store``, from ``allocate_kv`` on. Without it, blocks are
    shared but never copied, and there is no host tier. Bytes move after everything that was computed before the call
    and before everything that is computed after it, so a block that a transfer writes to is used again once that is
    reported complete, and not earlier. One that it only reads may be overwritten if it takes too long; what it brings
    then is used by nobody.
    """

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all layers."""
        ...

    def allocate_host(self, num_blocks: int) -> None:
        """Make room for so many blocks on the host; called at most once, before any transfer."""
        ...

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy device blocks (source, destination); no destination is also a source."""
        ...

    def start_swap_out(self, transfer_id: int, pairs: Sequence[tuple[int, int]]) -> None:
        """Begin to copy device blocks to host blocks."""
        ...

    def start_swap_in(self, transfer_id: int, pairs: Sequence[tuple[int, int]]) -> None:
        """Begin to copy host blocks to device blocks."""
        ...

    def poll_transfers(self, *, wait: bool) -> Sequence[tuple[int, bool]]:
        """Return (transfer id, success) of every transfer that ended since the last call, each once.

        Args:
            wait: stand still until there is at least one, for a twentieth of a second at most; whoever waits looks
                at its clock then. Without any in flight, return at once.
        """
        ...

    def read_blocks(self, block_ids: Sequence[int]) -> npt.NDArray[np.uint8]:
        """Return the bytes of device blocks, shape [N, block_bytes]."""
        ...

    def read_host_blocks(self, block_ids: Sequence[int]) -> npt.NDArray[np.uint8]:
        """Return the bytes of host blocks, shape [N, block_bytes]."""
        ...

    def write_blocks(self, block_ids: Sequence[int], contents: npt.NDArray[np.uint8]) -> None:
        """Overwrite device blocks with bytes that ``read_blocks`` returned."""
        ...


class Detokenizer(Protocol):
    """Turns one sequence's tokens into text, piece by piece.

    Law: the concatenation of everything returned, ``finish`` included, is the one-shot decoding of all tokens; what
    was returned is never taken back, and no replacement character appears before it is certain.
    """

    def push(self, token_ids: Sequence[int]) -> str:
        """Return the text that has become certain."""
        ...

    def finish(self) -> str:
        """Return what was held back; call it once, at the end."""
        ...


class Tokenizer(Protocol):
    """Text to token ids and back, for one model."""

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """Special tokens that end a turn, as far as the tokenizer knows."""
        ...

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Tokenise plain text."""
        ...

    def encode_chat(self, messages: Sequence[ChatMessage]) -> list[int]:
        """Render the chat template, ending where the assistant's answer begins, and tokenise it."""
        ...

    def encode_chat_turn(self, messages: Sequence[ChatMessage], known_token_ids: Sequence[int]) -> list[int]:
        """Tokenise what the chat template puts between a conversation so far and the answer to ``messages``.

        Args:
            messages: the new messages only.
            known_token_ids: everything before them; tells whether the last turn was closed by its end token.
        """
        ...

    def decode(self, token_ids: Sequence[int]) -> str:
        """Decode at once, special tokens left out."""
        ...

    def new_detokenizer(self) -> Detokenizer:
        """Start an incremental decoding."""
        ...


class Clock(Protocol):
    """Seconds that never go backwards; the origin means nothing."""

    def now(self) -> float:
        """Return the current time in seconds."""
        ...


class MonotonicClock:
    """The process's monotonic clock."""

    def now(self) -> float:
        """Return ``time.monotonic()``, in seconds."""
        return time.monotonic()
