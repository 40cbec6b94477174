"""What the kernels and the core agree on: the ragged rows of one step, paged attention over them, and matrix products.

The core makes ``RaggedRows`` and calls an ``AttentionBackend`` and a ``Matmul`` for each linear layer; objects of your
own with the same members can take the place of those in this package. Imports no compiler and no framework.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    import torch

    from pagedcore_kernels.layout import BlockLayout

Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float32]


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
        """Shape [R, W], C-contiguous; block ids of each row in order, -1 past its end.

        An array that is not writeable may come again in a later step, with longer rows; it keeps what it has.
        """
        ...

    @property
    def logits_rows(self) -> Int64Array:
        """Shape [S]; indices into the T tokens whose logits are wanted."""
        ...

    @property
    def is_long(self) -> npt.NDArray[np.bool_] | None:
        """Shape [R]; whether each row's sequence is beyond its model's short context; ``None``: none is."""
        ...

    @property
    def adapter_slots(self) -> Int32Array | None:
        """Shape [R]; the slot of each row's adapter, 0 for none; ``None``: no row has one."""
        ...

    @property
    def state_reads(self) -> Int32Array | None:
        """Shape [R]; the state block that each row begins from, -1 for the zero state of a row that begins at position
        0; ``None``: the model keeps no states. Several rows may read one block.
        """
        ...

    @property
    def state_writes(self) -> Int32Array | None:
        """Shape [R]; where the state after each row's last token goes, -1 for nowhere; ``None`` with ``state_reads``.

        A block that is written in a step is read by no row of it, and written by no other.
        """
        ...

    @property
    def window_tables(self) -> Int32Array | None:
        """Shape [R, W], as ``block_tables``; the window blocks that layers with a window read and write, -1 before the
        window of each row's first token; ``None``: all layers keep all positions in their blocks.
        """
        ...

    @property
    def window_slots(self) -> Int64Array | None:
        """Shape [T]; ``slot_mapping`` in window blocks; ``None`` with ``window_tables``."""
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


class StateBackend(Protocol):
    """Recurrences over a pool of states of one ``StateLayout``: ``plan`` once a step, the rest once per layer.

    A row begins from the state that it reads, advances it one position at a time in float32, and leaves the state after
    its last token where it writes, if anywhere; the state that it read stays as it was. Inputs are float32 or bfloat16,
    all of one layer of the same format; all strides are free except the last. What is said to be float32 is contiguous.
    Results are new tensors, contiguous, in the format of the inputs and rounded once; those of padding are zeros.
    ``layer`` and ``part`` are indices into the layout.
    """

    def plan(self, batch: RaggedRows) -> None:
        """Prepare everything that all layers of this step share."""
        ...

    def convolve(
        self, layer: int, part: int, rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, activation: str
    ) -> torch.Tensor:
        """Return the causal convolution of each channel over its row's sequence, [T, C].

        ``f(bias + sum over taps of weight[tap] * input)``, added in this order. The part keeps the last inputs
        [taps - 1, C], oldest first, in the format of ``rows``.

        Args:
            layer: index into the layout's layers.
            part: index into the layer's parts.
            rows: [T, C], the inputs. With "gates" [T, 3 * C], a row's ``before``, ``after`` and ``row``: inputs are
                ``before * row``, and the result is ``after`` times the sum; inputs and sum are rounded.
            weight: float32 [taps, C], oldest tap first.
            bias: float32 [C].
            activation: "silu", "none" or "gates".
        """
        ...

    def delta_rule(
        self,
        layer: int,
        part: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        log_decay: torch.Tensor,
        beta: torch.Tensor,
        *,
        scale: float,
        normalizes: bool,
    ) -> torch.Tensor:
        """Advance states float32 [H, Dk, Dv] by the gated delta rule, and return [T, H, Dv].

        Per position ``S *= exp(log_decay)``, ``S += k (beta * (v - S^T k))^T``, output ``S^T (scale * q)``. See
        "Gated Delta Networks" (Yang et al., 2024); with a decay per channel of the key, "Kimi Linear" (2025).

        Args:
            layer: index into the layout's layers.
            part: index into the layer's parts.
            query: [T, Hk, Dk]; head h of the values uses head ``h // (H / Hk)``.
            key: [T, Hk, Dk].
            value: [T, H, Dv].
            log_decay: float32 [T, H] or [T, H, Dk], at most 0.
            beta: float32 [T, H].
            scale: factor of the queries.
            normalizes: divide queries and keys by their length first: by the root of the sum of squares and 1e-6.
        """
        ...

    def mamba2(
        self,
        layer: int,
        part: int,
        x: torch.Tensor,
        dt: torch.Tensor,
        a: torch.Tensor,
        b: torch.Tensor,
        c: torch.Tensor,
        d: torch.Tensor,
    ) -> torch.Tensor:
        """Advance states float32 [H, N, P] as Mamba 2 does, and return [T, H, P].

        Per position ``S = exp(dt * a) S + b (dt * x)^T``, output ``S^T c + d * x``. See "Transformers are SSMs" (Dao
        and Gu, 2024).

        Args:
            layer: index into the layout's layers.
            part: index into the layer's parts.
            x: [T, H, P].
            dt: float32 [T, H], bias and softplus applied.
            a: float32 [H], negative.
            b: [T, G, N]; head h uses group ``h // (H / G)``.
            c: [T, G, N].
            d: float32 [H].
        """
        ...

    def mamba1(
        self,
        layer: int,
        part: int,
        x: torch.Tensor,
        dt: torch.Tensor,
        a: torch.Tensor,
        b: torch.Tensor,
        c: torch.Tensor,
        d: torch.Tensor,
    ) -> torch.Tensor:
        """Advance states float32 [N, C] as Mamba 1 does, and return [T, C].

        Per position and channel ``S = exp(dt * a) S + b * dt * x``, output ``S^T c + d * x``. See "Mamba" (Gu and Dao,
        2023).

        Args:
            layer: index into the layout's layers.
            part: index into the layer's parts.
            x: [T, C].
            dt: float32 [T, C], bias and softplus applied.
            a: float32 [N, C], negative.
            b: [T, N].
            c: [T, N].
            d: float32 [C].
        """
        ...

    def decaying_attention(
        self,
        layer: int,
        part: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        decay: torch.Tensor,
        *,
        scale: float = 1.0,
    ) -> torch.Tensor:
        """Advance states float32 [H, Dk, Dv] by attention whose past decays, and return [T, H, Dv].

        Per position ``S = exp(-decay) S + k v^T``, output ``S^T (scale * q)``. See "Lightning Attention-2" (Qin et al.,
        2024).

        Args:
            layer: index into the layout's layers.
            part: index into the layer's parts.
            query: [T, H, Dk].
            key: [T, H, Dk].
            value: [T, H, Dv].
            decay: float32 [H], at least 0.
            scale: factor of the queries.
        """
        ...

    def linear_recurrence(self, layer: int, part: int, x: torch.Tensor, decay: torch.Tensor) -> torch.Tensor:
        """Advance states float32 [1, C] of channels that decay by themselves, and return them [T, C].

        Per position ``S = decay * S + x``. See "Griffin" (De et al., 2024), whose gates are in the arguments.

        Args:
            layer: index into the layout's layers.
            part: index into the layer's parts.
            x: [T, C].
            decay: float32 [T, C].
        """
        ...


@runtime_checkable
class SendsNumbers(Protocol):
    """An attention backend of a device that sends further numbers over in the copy that a step needs anyway."""

    def plan_with(self, batch: RaggedRows, numbers: Sequence[npt.NDArray[Any]]) -> list[torch.Tensor]:
        """Plan a step like ``plan``; return arrays of integers on the device, flat and in int32, until the next step.
        """
        ...


@runtime_checkable
class RecordsLaunches(Protocol):
    """An attention backend whose launches for decode steps of one size can be recorded once and repeated."""

    def new_frame(self, most_rows: int, most_blocks: int) -> Any | None:
        """Return room for the numbers of one decode step of up to so many rows with up to so many blocks each;
        ``None``: no step was computed yet, or this model's decode steps are not alike.
        """
        ...

    def plan_in(
        self, frame: Any, batch: RaggedRows, numbers: Sequence[npt.NDArray[Any]]
    ) -> tuple[Hashable, list[torch.Tensor]]:
        """Plan a step like ``SendsNumbers.plan_with``, with its numbers in a frame.

        Args:
            frame: of ``new_frame``.
            batch: one token a row. A row of 0 tokens is padding and may have no table, and a slot of -1 is none.
            numbers: arrays of as many as there are rows.

        Returns:
            What its launches depend on: a recording made when it was another one is void. And the arrays, which are at
            the same addresses in every step of as many rows.
        """
        ...

    def follow_stream(self) -> None:
        """Launch what follows on the stream that torch works on now."""
        ...


class TokenChooser(Protocol):
    """Chooses tokens from logits that are on a device, and leaves them alone."""

    def __call__(self, logits: torch.Tensor, rows: npt.NDArray[Any] | None) -> torch.Tensor:
        """Return int64 [S] on the device, nothing waited for; -1 where a logit is NaN or plus infinity, or none is
        finite.

        Args:
            logits: float32 [S, vocab_size] there, elements of a row together.
            rows: [S] of ``SAMPLING_ROW``, as ``cpu.sampling.samplers.sampling_rows`` makes them; ``None``: the most
                likely token of each row is wanted, the lowest id of equal ones.
        """
        ...


@runtime_checkable
class ChoosesTokens(Protocol):
    """An attention backend that has also what chooses tokens on its device."""

    def new_token_chooser(self, vocab_size: int) -> TokenChooser:
        """Return it, for one thread at a time."""
        ...


class Matmul(Protocol):
    """``rows @ weight.T + bias`` for one weight and bias that it keeps in its own arrangement."""

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """Multiply ``rows`` [M, in], contiguous and M at least 2, and return [M, out] in their number format."""
        ...

    @property
    def weight(self) -> torch.Tensor:
        """The weight as it is kept, or any other tensor of the rows' number format on their device."""
        ...

    @property
    def memory(self) -> tuple[int, int]:
        """Address and bytes of the weight, which may be moved into huge pages; no bytes if it should not."""
        ...


class RowRoom(Protocol):
    """Room that stays where it is from step to step."""

    def take(self, purpose: str, num_rows: int, size: int, dtype: torch.dtype) -> torch.Tensor:
        """Return [num_rows, size], contiguous: the same memory for the same purpose, size and number format."""
        ...


@runtime_checkable
class RecordableMatmul(Protocol):
    """A ``Matmul`` that writes to a given tensor by kernels alone, so that its calls may be recorded and repeated."""

    @property
    def only_runs_kernels(self) -> bool:
        """Whether that holds for this one."""
        ...

    def multiply_to(self, out: torch.Tensor, rows: torch.Tensor, workspace: RowRoom | None = None) -> None:
        """Write the product to ``out`` [M, out], contiguous.

        What it needs on the way is in ``workspace``, if there is one.
        """
        ...


@runtime_checkable
class PicksLargest(Protocol):
    """A ``Matmul`` that can find the largest output of each row without writing the others to memory."""

    def pick_to(
        self, candidates: torch.Tensor, rows: torch.Tensor, barred: torch.Tensor, workspace: RowRoom | None = None
    ) -> None:
        """Write the candidates of ``rows`` [M, in] to ``candidates``, int64 [ceil(out / 64), M], contiguous.

        ``pagedcore_kernels/cpu/matmul/largest.py`` says what they are and makes numbers of outputs of them. ``barred``
        are outputs that are no candidates, int64 [1 + 2B], contiguous: how many, then pairs of row and output, sorted
        by outputs.
        """
        ...


@runtime_checkable
class RecordableAttention(Protocol):
    """An ``AttentionBackend`` whose calls may be recorded: repeated, they compute the step that it has planned then."""

    @property
    def only_runs_kernels(self) -> bool:
        """Whether that holds for this one."""
        ...

    def attend_to(
        self,
        output: torch.Tensor,
        layer: int,
        query: torch.Tensor,
        *,
        scale: float,
        window: int = 0,
        chunk: int = 0,
        softcap: float = 0.0,
        sinks: torch.Tensor | None = None,
    ) -> None:
        """Write what ``attend`` returns to output [T, H, Dv], contiguous, by kernels alone."""
        ...


@runtime_checkable
class LinearFactory(Protocol):
    """Makes the products of a model's linear layers; an entry of the plugin table ``linears``."""

    def supports(self, dtype: torch.dtype, num_inputs: int) -> bool:
        """Whether it takes weights of this number format and width; other layers stay as they are."""
        ...

    def __call__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Matmul:
        """Arrange a weight [out, in] and its bias [out]; neither tensor is kept. Several layers may share a product."""
        ...


AttentionFactory = Callable[..., AttentionBackend]
"""``(layout, pool) -> AttentionBackend``; its class, usually."""


@runtime_checkable
class AttentionRequirements(Protocol):
    """An attention factory that says what it needs; else a CPU, ``KVLayout`` and blocks of 16 tokens are assumed."""

    @property
    def devices(self) -> tuple[str, ...]:
        """Kinds of devices that it computes on: "cpu", "cuda"."""
        ...

    @property
    def layout_type(self) -> type[BlockLayout]:
        """The layout of its pools."""
        ...

    def preferred_block_size(self, dtype: torch.dtype) -> int:
        """Return the tokens per block if nothing else decides; ``dtype`` is the pool's."""
        ...


@runtime_checkable
class StoresScaledKV(Protocol):
    """An attention factory whose backends also work on pools of 8 bits, which have a ``ScaledKVLayout``."""

    @property
    def kv_cache_dtypes(self) -> tuple[str, ...]:
        """In which formats, as ``kv_cache_dtype`` names them: "int8", "e4m3"."""
        ...


@runtime_checkable
class ReadsWindowsAlone(Protocol):
    """An attention factory whose backends read nothing before the window of a row's first token, if a layout has one.

    Tables may name no blocks there. Its backends are ``ShowsKVPool`` and ``RecordableAttention`` too.
    """

    @property
    def reads_windows_alone(self) -> bool:
        """Whether that holds for them."""
        ...


@runtime_checkable
class ChecksAhead(Protocol):
    """An attention factory that says what it cannot serve before a model is loaded."""

    def check_ahead(self, dtype: torch.dtype) -> None:
        """Refuse to serve models whose weights are of a number format, or to run on this machine.

        Raises:
            InvalidConfig: its backends cannot; the message says what is allowed.
        """
        ...


@runtime_checkable
class TakesKernels(Protocol):
    """An attention factory whose kernels can be compiled ahead, on another machine."""

    def with_kernels(self, directory: Path) -> AttentionFactory:
        """Return the factory that takes its kernels from a directory, as far as they are there."""
        ...


@runtime_checkable
class ShowsKVPool(Protocol):
    """An attention backend into whose pool other kernels may write K and V themselves, instead of by ``write_kv``."""

    @property
    def layout(self) -> BlockLayout:
        """What the pool's bytes mean."""
        ...

    @property
    def pool(self) -> torch.Tensor:
        """The pool, uint8 [blocks, block_bytes]."""
        ...


@runtime_checkable
class LaunchesKernels(ShowsKVPool, Protocol):
    """An attention backend of a GPU, or the class of such, beside whose launches others are made: they read the step
    that it has planned, and write K and V themselves.
    """

    @property
    def driver(self) -> Any:
        """Launches kernels on the stream of the planned step; a ``pagedcore_kernels.cuda.driver.Driver``."""
        ...

    def planned_slots(self) -> torch.Tensor:
        """Return the planned slots on the GPU, int32 [T]."""
        ...

    def attend_to(
        self,
        output: torch.Tensor,
        layer: int,
        query: torch.Tensor,
        *,
        scale: float,
        window: int = 0,
        chunk: int = 0,
        softcap: float = 0.0,
        sinks: torch.Tensor | None = None,
    ) -> None:
        """Write what ``attend`` returns to output [T, H, Dv], contiguous; rows of padding are left as they are."""
        ...
