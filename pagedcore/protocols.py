"""The ports of the core, as protocols: model, tokenizer, clock, and those of the kernels. Imports no framework.

Anything of yours that has the same members can take the place of the shipped implementations. What a model backend,
tokenizer or attention factory may offer beyond is one protocol for each ability, looked for with ``isinstance``:

    ModelBackend    MovesKVBlocks  HostsKVPool  HasFingerprint  DescribesItself  UsesTorchThreads
                    NamesVariablePart  DecodesGreedily  HasGenerationConfig  ReturnsHidden
                    HasEmbeddingDefaults  HasTextHead  TakesPositionsBack
                    MayLoseDevice  MeasuresSteps  RecordsSteps  TakesAdapters
                    KeepsStates  KeepsWindows
    Tokenizer       NamesTokens  HasVocabulary  EncodesPairs
    attention       AttentionRequirements  StoresScaledKV, ChecksAhead, TakesKernels, ReadsWindowsAlone (the factory)
                    ShowsKVPool (the backend)
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from pagedcore.embedding_defaults import EmbeddingDefaults
from pagedcore.outputs import TokenText
from pagedcore.text_head import PairDefaults, TextHead
from pagedcore_kernels.interface import AttentionBackend as AttentionBackend
from pagedcore_kernels.interface import AttentionFactory as AttentionFactory
from pagedcore_kernels.interface import AttentionRequirements as AttentionRequirements
from pagedcore_kernels.interface import ChecksAhead as ChecksAhead
from pagedcore_kernels.interface import FloatArray as FloatArray
from pagedcore_kernels.interface import Int32Array as Int32Array
from pagedcore_kernels.interface import Int64Array as Int64Array
from pagedcore_kernels.interface import LinearFactory as LinearFactory
from pagedcore_kernels.interface import Matmul as Matmul
from pagedcore_kernels.interface import PicksLargest as PicksLargest
from pagedcore_kernels.interface import RaggedRows as RaggedRows
from pagedcore_kernels.interface import ReadsWindowsAlone as ReadsWindowsAlone
from pagedcore_kernels.interface import RecordableAttention as RecordableAttention
from pagedcore_kernels.interface import RecordableMatmul as RecordableMatmul
from pagedcore_kernels.interface import ShowsKVPool as ShowsKVPool
from pagedcore_kernels.interface import StoresScaledKV as StoresScaledKV
from pagedcore_kernels.interface import TakesKernels as TakesKernels

if TYPE_CHECKING:
    import torch

ChatMessage = Mapping[str, Any]


@runtime_checkable
class ModelBackend(Protocol):
    """A model that computes logits for ragged rows and keeps K/V in slots it owns."""

    @property
    def vocab_size(self) -> int:
        """Token ids are below this."""

    @property
    def max_model_len(self) -> int:
        """Positions the model was made for."""

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """Tokens that end a completion."""

    @property
    def block_size(self) -> int:
        """Preferred tokens per KV block."""

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of K and V of one token over all layers."""

    @property
    def is_schedule_invariant(self) -> bool:
        """Whether a row's logits are the same bits in any batch and for any chunks of its prompt: only then does
        preemption by recompute leave completions unchanged bit for bit.
        """

    def allocate_kv(self, num_blocks: int, block_size: int) -> None:
        """Make room for ``num_blocks`` blocks; called once, before the first forward."""

    def forward(self, batch: RaggedRows) -> FloatArray | torch.Tensor:
        """Compute the batch, write its K/V to the slots, and return logits of shape [S, vocab_size], float32 or, as a
        torch tensor, bfloat16.

        The caller may overwrite the returned array until the next call.
        """


@runtime_checkable
class ReturnsHidden(Protocol):
    """A model backend that returns hidden states of tokens too; of others there are no embeddings."""

    @property
    def hidden_size(self) -> int:
        """Numbers of one hidden state; 0 if there are none after all."""

    def forward_hidden(
        self, batch: RaggedRows, hidden_rows: Int64Array
    ) -> tuple[FloatArray | torch.Tensor, FloatArray]:
        """Compute the batch as ``ModelBackend.forward`` does, with the same logits, and return more of it.

        Args:
            batch: its ``logits_rows`` may be none.
            hidden_rows: [H] indices into its tokens, one at least.

        Returns:
            The logits as from ``forward``, and what the output layer would be given for the tokens of ``hidden_rows``:
            float32 [H, hidden_size].
        """


class CacheStore(Protocol):
    """Moves whole KV blocks: on the device, and between the device and a slab of host memory.

    Bytes move after everything that was computed before the call and before everything that is computed after it. A
    block that a transfer writes to is used again once the transfer is reported complete, and not earlier. A block that
    it only reads may be overwritten if the transfer takes too long; the copy is not used then.
    """

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all layers."""

    def allocate_host(self, num_blocks: int) -> None:
        """Make room for so many blocks on the host; called at most once, before any transfer."""

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy device blocks (source, destination); no destination is also a source."""

    def start_swap_out(self, transfer_id: int, pairs: Sequence[tuple[int, int]]) -> None:
        """Begin to copy device blocks to host blocks."""

    def start_swap_in(self, transfer_id: int, pairs: Sequence[tuple[int, int]]) -> None:
        """Begin to copy host blocks to device blocks."""

    def poll_transfers(self, *, wait: bool) -> Sequence[tuple[int, bool]]:
        """Return (transfer id, success) of every transfer that ended since the last call, each once.

        With ``wait``, block until there is at least one, for a twentieth of a second at most, so that the caller can
        look at its clock. Without any in flight, return at once.
        """

    def read_blocks(self, block_ids: Sequence[int]) -> npt.NDArray[np.uint8]:
        """Return the bytes of device blocks, shape [N, block_bytes]."""

    def read_host_blocks(self, block_ids: Sequence[int]) -> npt.NDArray[np.uint8]:
        """Return the bytes of host blocks, shape [N, block_bytes]."""

    def write_blocks(self, block_ids: Sequence[int], contents: npt.NDArray[np.uint8]) -> None:
        """Overwrite device blocks with bytes that ``read_blocks`` returned."""


@runtime_checkable
class PopulatesBlocks(Protocol):
    """A ``CacheStore`` of memory whose first use takes time, so that it had better be used before a step does.

    Blocks that were never used are used in the order of their numbers.
    """

    def populate(self, num_blocks: int) -> bool:
        """Use a piece of the first ``num_blocks`` device blocks that was never used, a few milliseconds' worth at most;
        contents stay. Return whether there is another one.
        """


@runtime_checkable
class MovesKVBlocks(Protocol):
    """A model backend whose KV blocks can be copied. Without it they are shared only, and there is no host tier."""

    @property
    def cache_store(self) -> CacheStore | None:
        """What moves the blocks, from ``allocate_kv`` on; ``None`` if there is nothing."""


@runtime_checkable
class HostsKVPool(Protocol):
    """A model backend that knows the memory of its KV pool and can free it, so that it may serve another engine.

    Of others it is assumed that the pool is in this machine's memory and has no padding.
    """

    def free_kv_bytes(self) -> int:
        """Return the bytes that a pool could take now."""

    def kv_block_bytes(self, block_size: int) -> int:
        """Return the bytes of one block of so many tokens, padding included."""

    def release_kv(self) -> None:
        """Free the pool, if there is one."""


class StateStore(Protocol):
    """Moves whole state blocks, between two forwards; what a call moves has been moved when it returns."""

    def allocate_host(self, num_states: int) -> None:
        """Make room for so many state blocks on the host; called at most once, before anything is swapped."""

    def swap_out(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy state blocks of the device to those of the host: (source, destination)."""

    def swap_in(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy state blocks of the host to those of the device."""

    def read_host_states(self, state_ids: Sequence[int]) -> npt.NDArray[np.uint8]:
        """Return the bytes of state blocks of the host, shape [N, state_bytes]."""

    def read_states(self, state_ids: Sequence[int]) -> npt.NDArray[np.uint8]:
        """Return the bytes of state blocks, shape [N, state_bytes]."""

    def write_states(self, state_ids: Sequence[int], contents: npt.NDArray[np.uint8]) -> None:
        """Overwrite state blocks with bytes that ``read_states`` returned."""


@runtime_checkable
class KeepsStates(Protocol):
    """A model backend whose layers keep a state of fixed size of each sequence, beside K and V.

    A forward begins each row from the state block in ``state_reads`` of its batch and leaves the state after the row's
    last token in the one in ``state_writes``. What it reads stays as it is, so that a forward that broke off can be
    computed again, and the state after a position has the same bits however its tokens came in rows.
    """

    @property
    def state_bytes(self) -> int:
        """Bytes of one state block, which has the states of all layers; 0: none of them keeps one after all."""

    def allocate_states(self, num_states: int) -> None:
        """Make room for so many state blocks; called once, next to ``allocate_kv``, and freed by ``release_kv``."""

    @property
    def state_store(self) -> StateStore | None:
        """What moves the blocks, from ``allocate_states`` on; ``None`` if there is nothing, and no host tier then."""


@runtime_checkable
class KeepsWindows(Protocol):
    """A model backend some layers of which read no further back than a window, and can have memory of their own.

    A forward over such memory reads and writes what these layers keep in the ``window_tables`` and ``window_slots`` of
    its batch, everything else in its ``block_tables``.
    """

    @property
    def windows(self) -> HasWindows:
        """These layers."""


class HasWindows(Protocol):
    """Layers that can have window blocks."""

    @property
    def window(self) -> int:
        """Positions that they read at most, the own one included; 0: there are none after all."""

    def block_bytes(self, block_size: int) -> int:
        """Return their bytes in one block of so many tokens, padding included."""

    def use(self, num_windows: int) -> None:
        """Let the next ``allocate_kv`` make so many window blocks, until ``release_kv``."""

    @property
    def store(self) -> WindowStore | None:
        """What moves them, from then on."""


class WindowStore(Protocol):
    """Moves whole window blocks, between two forwards."""

    @property
    def block_bytes(self) -> int:
        """Bytes of one window block."""

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy window blocks (source, destination)."""

    def read_blocks(self, block_ids: Sequence[int]) -> npt.NDArray[np.uint8]:
        """Return the bytes of window blocks, shape [N, block_bytes]."""

    def write_blocks(self, block_ids: Sequence[int], contents: npt.NDArray[np.uint8]) -> None:
        """Overwrite window blocks with bytes that ``read_blocks`` returned."""

    def divide(self, blocks: npt.NDArray[np.uint8]) -> Sequence[npt.NDArray[np.uint8]]:
        """Divide the bytes [N, B] of blocks of one kind into those of blocks and of window blocks."""


@dataclass(frozen=True, slots=True)
class ModelFingerprint:
    """What tells one model from another.

    The weights' digest covers every name, shape and number format, and a sample of every tensor's numbers: another
    training or another number format shows, a change of a few single weights may not.
    """

    architecture: str
    config: str
    """Digest, 64 hexadecimal digits."""
    weights: str
    """Digest, 64 hexadecimal digits."""

    def __str__(self) -> str:
        return f"{self.architecture} (config {self.config[:8]}, weights {self.weights[:8]})"


@runtime_checkable
class HasFingerprint(Protocol):
    """A model backend that says which model it is; of others, type and limits have to do.

    A backend whose weights can change should have this: exported sessions are compared by it.
    """

    @property
    def fingerprint(self) -> ModelFingerprint:
        """Which model."""


@runtime_checkable
class HasGenerationConfig(Protocol):
    """A model backend whose model comes with sampling parameters of its own; of others it is assumed that there are
    none.
    """

    @property
    def generation_config(self) -> Mapping[str, Any]:
        """The fields of ``generation_config.json``, as transformers calls them."""


@runtime_checkable
class HasEmbeddingDefaults(Protocol):
    """A model backend whose model comes with a way to make vectors of texts; of others it is the usual one."""

    @property
    def embedding_defaults(self) -> EmbeddingDefaults:
        """Pooling, prompts and the like."""


@runtime_checkable
class HasTextHead(Protocol):
    """A model backend whose model classifies texts, or says how relevant documents are; of others there is neither.

    Its hidden states are those of ``ReturnsHidden``.
    """

    @property
    def text_head(self) -> TextHead | None:
        """What turns a text's last hidden state into numbers; ``None``: nothing does."""

    @property
    def pair_defaults(self) -> PairDefaults:
        """How a query and a document become one text."""


@runtime_checkable
class HasShortContext(Protocol):
    """A model backend that computes sequences otherwise that are longer than its short context: those rows of a batch
    have ``is_long``, and a sequence that passes the border is computed again. Of others it is assumed that a position
    is computed in the same way whatever follows it.
    """

    @property
    def num_short_tokens(self) -> int | None:
        """Tokens of the longest sequence that is not long; ``None``: none is."""


@runtime_checkable
class DescribesItself(Protocol):
    """A model backend that says how it computes: for people, and because other kernels give K and V other bits."""

    @property
    def dtype(self) -> object:
        """Number format of weights, and of KV unless the layout says otherwise."""

    @property
    def attention_name(self) -> str:
        """As in the plugin table ``attention``."""

    @property
    def linear_name(self) -> str:
        """As in the plugin table ``linears``; "auto" for the fastest of those that come with pagedcore."""

    @property
    def device_name(self) -> str:
        """What the GPU is called; empty for the CPU."""

    def layout(self, block_size: int) -> object:
        """Return something whose ``repr`` says how the bytes of a block lie."""


@runtime_checkable
class UsesTorchThreads(Protocol):
    """A model backend that may compute on torch's CPU threads; of others it is assumed that they do not."""

    @property
    def computes_in_torch(self) -> bool:
        """Whether it does; the engine then uses the same number of threads in every step."""


@runtime_checkable
class NamesVariablePart(Protocol):
    """A model backend that says why it is not schedule invariant."""

    @property
    def variable_part(self) -> str:
        """What makes results depend on the schedule; empty if nothing does."""


@runtime_checkable
class TakesPositionsBack(Protocol):
    """A model backend that can compute tokens of a sequence that then do not follow; of others it is assumed that they
    cannot, and there are no drafts.
    """

    @property
    def takes_positions_back(self) -> bool:
        """Whether the last positions of a sequence may be computed again with other tokens, with the same results as if
        they had been computed once, and logits of several tokens of one sequence are returned.
        """


@runtime_checkable
class MayLoseDevice(Protocol):
    """A model backend whose device can fail for good, for this process and all that it has there."""

    @property
    def has_lost_device(self) -> bool:
        """Whether it has; asked after a forward that raised."""


class Adapter(Protocol):
    """A LoRA adapter that was read and checked, in memory of its own."""

    @property
    def digest(self) -> bytes:
        """32 bytes over its configuration and all of its numbers; the same wherever its files are."""

    @property
    def num_bytes(self) -> int:
        """What it takes of memory."""

    @property
    def max_rank(self) -> int:
        """The largest rank of its matrices."""


@runtime_checkable
class TakesAdapters(Protocol):
    """A model backend that can compute rows of a batch with LoRA adapters, each row with its own or with none.

    ``adapter_slots`` of a batch says for each of its sequences in which slot its adapter is; 0: it has none.
    """

    @property
    def why_no_adapters(self) -> str:
        """Why this model takes none after all; empty if it does."""

    def use_adapters(self, max_adapters: int, max_rank: int) -> None:
        """Make so many slots, from 1 on, for adapters of up to this rank; called once at most, before ``allocate_kv``.
        """

    def adapter_bytes(self, directory: str) -> int:
        """Return ``Adapter.num_bytes`` of a directory by the heads of its files; callable on any thread.

        Raises ``InvalidAdapter``, and ``OSError``.
        """

    def read_adapter(self, directory: str) -> Adapter:
        """Read and check a directory; callable on any thread. Raises as ``adapter_bytes``."""

    def put_adapter(self, slot: int, adapter: Any) -> None:
        """Use an adapter that ``read_adapter`` has returned in an empty slot, from the next forward on."""

    def drop_adapter(self, slot: int) -> None:
        """Empty a slot."""


@runtime_checkable
class MeasuresSteps(Protocol):
    """A model backend that finds out how much of its device's memory a KV pool may have."""

    def fitting_kv_bytes(self, num_tokens: int, num_rows: int) -> int | None:
        """Return the bytes of a pool that leaves room for steps of at most so many tokens and rows; ``None``: the
        engine decides, by what ``HostsKVPool`` says.

        Raises:
            InvalidConfig: no such step fits, even without a pool.
        """


@runtime_checkable
class RecordsSteps(Protocol):
    """A model backend that makes its decode steps faster by work that is done before the first of them."""

    def record_steps(self, num_rows: int, num_tokens: int) -> None:
        """Do that work for steps of at most so many rows with at most so many tokens each; called once, when there is
        a pool with nothing in it yet.
        """


@runtime_checkable
class DecodesGreedily(Protocol):
    """A model backend that may choose the most likely tokens itself, so that nothing writes and reads their logits."""

    @property
    def decodes_greedily(self) -> bool:
        """Whether it does for this model; asked before every step."""

    def forward_greedily(self, batch: RaggedRows, barred: Int64Array) -> Int64Array:
        """Compute the batch, write its K/V to the slots, and return the [S] most likely tokens, S at least 1.

        They are those that ``ModelBackend.forward`` gives the largest logits, the lowest id of equal ones; -1 where a
        logit is NaN or plus infinity, or none is finite. ``barred`` [B, 2] are pairs of row, below S, and token id:
        what they have of finite logits counts as minus infinity.
        """


class Detokenizer(Protocol):
    """Turns one sequence's tokens into text, piece by piece.

    Law: the concatenation of everything returned, ``finish`` included, is the one-shot decoding of all tokens; what
    was returned is never taken back, and no replacement character appears before it is certain.
    """

    def push(self, token_ids: Sequence[int]) -> str:
        """Return the text that has become certain."""

    def finish(self) -> str:
        """Return what was held back; call it once, at the end."""


@runtime_checkable
class DecodesTokens(Protocol):
    """The half of ``Tokenizer`` that an engine needs whose prompts are all token ids."""

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """Special tokens that end a turn, as far as the tokenizer knows."""

    def decode(self, token_ids: Sequence[int]) -> str:
        """Decode at once, special tokens left out."""

    def new_detokenizer(self) -> Detokenizer:
        """Start an incremental decoding."""


class Tokenizer(DecodesTokens, Protocol):
    """Text to token ids and back, for one model."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Tokenise plain text."""

    def encode_chat(self, messages: Sequence[ChatMessage]) -> list[int]:
        """Render the chat template, ending where the assistant's turn begins, and tokenise it."""

    def encode_chat_turn(self, messages: Sequence[ChatMessage], known_token_ids: Sequence[int]) -> list[int]:
        """Tokenise what the chat template puts between a conversation so far and the reply to the new ``messages``.

        ``known_token_ids``, everything before them, tell whether the last turn was closed by its end token.
        """


@runtime_checkable
class RendersTools(Protocol):
    """A tokenizer whose chat template may know tools: OpenAI's function tools, calls of them, and their results."""

    @property
    def chat_template(self) -> str:
        """The template's source; empty if there is none."""

    @property
    def knows_tools(self) -> bool:
        """Whether the template writes tools into the prompt."""

    def render_chat(self, messages: Sequence[ChatMessage], *, tools: Sequence[Mapping[str, Any]] = ()) -> str:
        """Render the chat template, ending where the assistant's turn begins."""

    def encode_chat(
        self, messages: Sequence[ChatMessage], *, tools: Sequence[Mapping[str, Any]] = (), control_tokens: bool = False
    ) -> list[int]:
        """Do the same, and tokenise it; contents have control tokens only where ``control_tokens`` says so."""

    def encode_chat_turn(
        self, messages: Sequence[ChatMessage], known_token_ids: Sequence[int], *,
        tools: Sequence[Mapping[str, Any]] = (), control_tokens: bool = False,
    ) -> list[int]:
        """Tokenise as ``Tokenizer.encode_chat_turn``, with ``control_tokens`` as in ``encode_chat``."""


@runtime_checkable
class NamesTokens(Protocol):
    """A tokenizer that knows what single tokens stand for; of others, the decoding of one token has to do."""

    def token_text(self, token_id: int) -> TokenText:
        """Return a token's text and, if it has any of its own, its bytes."""


@runtime_checkable
class EncodesPairs(Protocol):
    """A tokenizer that knows how two texts are joined; without one there are pairs only where a chat template writes
    them.
    """

    def encode_pair(self, first: str, second: str) -> list[int]:
        """Tokenise two texts that belong together, with the tokens around them of the tokenizer's own."""


@runtime_checkable
class HasVocabulary(NamesTokens, Protocol):
    """A tokenizer of the ``tokenizers`` library; without one there is no structured output."""

    def to_json(self) -> str | None:
        """Return what ``tokenizer.json`` has of it, without truncation and padding; ``None`` for one in Python."""


class Constraint(Protocol):
    """What the completion of one sequence has to look like, and how far it is. A function of the completion's tokens:
    whatever undoes or repeats a step need not undo anything here.
    """

    def branch(self) -> Constraint:
        """Return another one for a second sequence, under the same grammar, at its beginning."""


class MasksTokens(Protocol):
    """Knows which tokens constraints allow."""

    def masks_of(
        self, constrained: Sequence[tuple[Constraint, Sequence[int]]]
    ) -> tuple[npt.NDArray[np.uint8], dict[int, Exception]]:
        """Return which tokens may come next: a bit for each, [constraints, ceil(vocab_size / 8)], lowest bits first.

        Args:
            constrained: constraints, each with the tokens of its completion so far.

        Returns:
            The masks, and why one could not be made, by its place; such a mask allows nothing.
        """

    def mask_rows(
        self, rows: FloatArray, constrained: Sequence[tuple[int, Constraint, Sequence[int]]]
    ) -> dict[int, Exception]:
        """Set the logits of all tokens that must not come next to minus infinity, in place.

        Args:
            rows: float32 [S, vocab_size].
            constrained: rows that have a constraint, each with the tokens of its completion so far.

        Returns:
            Why a row could not be masked, by its index; of such a row no token may come.
        """


class ForcedTokens(Protocol):
    """Says what constraints leave no choice about."""

    def __call__(self, constraint: Constraint, token_ids: Sequence[int], most: int, /) -> tuple[int, ...]:
        """Return at most ``most`` tokens that are the only ones allowed, one after the other.

        Args:
            constraint: of a sequence.
            token_ids: its completion so far.
            most: how many are of use.
        """


class LogitsProcessor(Protocol):
    """Changes the logits of one completion before a token is chosen (``SamplingParams.logits_processor``).

    For equal arguments it has to return equal rows: a step that broke off is computed again.
    """

    def __call__(self, output_token_ids: list[int], logits: FloatArray, /) -> FloatArray:
        """Return the row to choose from.

        Args:
            output_token_ids: the tokens of the completion so far, a list of its own.
            logits: float32 [vocab_size], the model's, a copy of its own; it may be changed and returned.

        Returns:
            float32 [vocab_size], some of it finite, the rest finite or minus infinity (never chosen).
        """


class Clock(Protocol):
    """Seconds that never go backwards; the origin means nothing."""

    def now(self) -> float:
        """Return the current time in seconds."""

    def sleep(self, seconds: float) -> None:
        """Return when so much time has passed; an exception of a signal's handler ends it early."""


class MonotonicClock:
    """The process's monotonic clock."""

    now = staticmethod(time.monotonic)
    sleep = staticmethod(time.sleep)
