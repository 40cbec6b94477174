"""The ports of the core, as protocols: model, attention backend, tokenizer, clock. No framework is imported here.

``pagedcore_kernels`` implements ``AttentionBackend``; ``execution/models`` implements ``ModelBackend``; anything of
yours that has these members can take their place.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    import torch

Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float32]
ChatMessage = Mapping[str, Any]


class RaggedRows(Protocol):
    """One step's work, flattened: T tokens of R sequences, no padding between them.

    Row ``r`` owns tokens ``query_start[r] : query_start[r + 1]``; they are the last ones of its ``kv_lens[r]`` known
    positions. Tokens from ``query_start[R]`` to T, if any, are padding: their slot is -1 and their result is unused.
    """

    @property
    def token_ids(self) -> Int64Array:
        """Shape [T]."""
        ...

    @property
    def positions(self) -> Int64Array:
        """Shape [T]; absolute position of each token in its sequence."""
        ...

    @property
    def seq_ids(self) -> Int64Array:
        """Shape [R]; the engine's number of each row's sequence."""
        ...

    @property
    def slot_mapping(self) -> Int64Array:
        """Shape [T]; ``block_id * block_size + offset`` where the token's K and V go, -1 for nowhere."""
        ...

    @property
    def query_start(self) -> Int64Array:
        """Shape [R + 1]; first token of each row."""
        ...

    @property
    def kv_lens(self) -> Int64Array:
        """Shape [R]; positions readable by the row's last token, itself included."""
        ...

    @property
    def block_tables(self) -> Int32Array:
        """Shape [R, W], C-contiguous; block ids of each row in order, -1 past its end."""
        ...

    @property
    def logits_rows(self) -> Int64Array:
        """Shape [S]; indices into the T tokens whose logits are wanted."""
        ...


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


class AttentionBackend(Protocol):
    """Paged attention over a KV pool of one layout: ``plan`` once a step, the rest once per layer.

    All tensors live on the backend's device; T, R, W as in ``RaggedRows``.
    """

    @property
    def name(self) -> str:
        """As in the plugin table ``attention``."""
        ...

    def plan(self, batch: RaggedRows) -> None:
        """Prepare everything that all layers of this step share."""
        ...

    def write_kv(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        """Store key [T, KVH, D] and value [T, KVH, Dv] in the planned slots; strides are free except the last."""
        ...

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        *,
        scale: float,
        window: int = 0,
        chunk: int = 0,
        softcap: float = 0.0,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Causal attention of query [T, H, D] over each row's own K/V; returns [T, H, Dv] in the query's dtype.

        Args:
            layer: index into the layout's layers.
            query: last dimension contiguous.
            scale: factor of the scores.
            window: if positive, a position sees only the last ``window`` positions, itself included.
            chunk: if positive, a position sees only its own aligned chunk of this many positions.
            softcap: if positive, scores become ``softcap * tanh(score / softcap)``.
            sinks: [H] float32 logits that take part in the softmax without a value.
        """
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

    now = staticmethod(time.monotonic)
