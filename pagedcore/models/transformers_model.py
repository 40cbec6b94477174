"""Any decoder-only language model of transformers as a ``ModelBackend``: ragged batches over a paged KV cache.

Owns one loaded model, the layout and the memory of its KV pool, and the order of taking a model over: compute the
expected logits, redirect attention, look at the layers, pack the weights, compare. Read ``pretrained.py`` for where
models come from, ``decoder.py`` for the part a faster implementation replaces.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from types import MethodType
from typing import TYPE_CHECKING, Final

import torch

from pagedcore.errors import InternalError, InvalidConfig, ModelNotSupported, ModelTakenOver
from pagedcore.execution.device_sampler import DeviceTokens
from pagedcore.execution.devices import CPU, Device
from pagedcore.execution.failures import is_out_of_memory
from pagedcore.execution.kv_pool import KVPool
from pagedcore.execution.memory_pages import FileMappings
from pagedcore.execution.ragged_batch import largest_batch
from pagedcore.models.adapted_layers import AdaptedProducts, why_no_adapters
from pagedcore.models.attention import recurrences
from pagedcore.models.attention.interface import PagedStep
from pagedcore.models.attention.windows import WindowLayers
from pagedcore.models.checkpoints import ownership
from pagedcore.models.decoders.choice import best_factory
from pagedcore.models.decoders.graphed import MOST_ROWS, GraphedSteps
from pagedcore.models.decoders.plain import (
    AdaptedDecoder,
    Decoder,
    DecoderFactory,
    GreedyDecoder,
    HiddenDecoder,
    Incomplete,
    PreparesSteps,
)
from pagedcore.models.decoders.step_numbers import send_numbers
from pagedcore.models.families import model_facts, supported_models
from pagedcore.models.families.llama_modules import ForCausalLM
from pagedcore.models.fingerprint import model_fingerprint
from pagedcore.models.layouts import kv_shapes, layout_maker, not_redirected, redirect_attention, requirements_of
from pagedcore.models.linears.int8_embedding import quantize_embedding
from pagedcore.models.linears.packed_linear import FASTEST, OnUnused, probe_invariance
from pagedcore.models.linears.schemes import QUANTIZERS
from pagedcore.models.linears.stored_weight import JoinedMatmul, StoredLinears, has_unpacked
from pagedcore.models.linears.torch_products import describe_products
from pagedcore.models.lora.adapter import LoraAdapter
from pagedcore.models.origin import Origin, Succession
from pagedcore.models.self_test import INT8_KV_TOLERANCE, QUANTIZED_TOLERANCE, SelfTest
from pagedcore.models.state_pool import StatePool
from pagedcore.protocols import (
    AttentionBackend,
    AttentionFactory,
    FloatArray,
    Int64Array,
    LinearFactory,
    RaggedRows,
)
from pagedcore.text_head import PairDefaults, TextHead
from pagedcore_kernels.cpu.matmul.packed import PackedMatmul, can_multiply
from pagedcore_kernels.cpu.matmul.packed_grouped import PackedGroupedMatmul
from pagedcore_kernels.cpu.matmul.packed_int8 import PackedInt8Matmul
from pagedcore_kernels.cpu.runtime.threads import Computing, num_threads, torch_beside_kernels
from pagedcore_kernels.interface import ChoosesTokens, RecordsLaunches
from pagedcore_kernels.layout import BlockLayout

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_log = logging.getLogger("pagedcore")
_OF_POOL: Final = frozenset({"cache_store", "state_store", "windows", "_attention", "_device_tokens", "_graphed",
                             "_largest_step", "block_size"})
"""What of a backend belongs to its pools, and not to its weights."""
_OUR_PRODUCTS = PackedMatmul | PackedInt8Matmul | PackedGroupedMatmul | JoinedMatmul


class TransformersModel:
    """A causal language model of transformers, taken over.

    Invariant: the model's attention goes nowhere but to the KV pool; calling the model outside of a step fails.
    Invariant: the weights are those of the take-over, as far as ``ownership.py`` can see.
    Invariant: the KV pool has the number format of the weights, unless it is of int8.
    Invariant: no matrix product runs over one row: batches have two tokens or more, and a lone wanted row of logits is
    computed twice and returned once.
    """

    text_head: TextHead | None = None
    """What turns states into numbers, set by whoever has read the model's files, like ``pair_defaults``."""
    pair_defaults = PairDefaults(refusal="its files were not looked at")
    _adapted: AdaptedProducts | None = None
    _device_tokens: DeviceTokens | None = None
    _largest_step = MOST_ROWS, sys.maxsize
    """The most rows of a decode step, and tokens of a row."""
    origin: Origin | None = None
    """How the weights were loaded, set by whoever did it."""
    has_fallen_back = False
    """Whether the fastest decoder has failed the self-test, and another one computes."""
    state_store: StatePool | None = None
    """What ``allocate_states`` has made; see ``KeepsStates``."""

    def __init__(
        self, model: PreTrainedModel, attention_factory: AttentionFactory, *, block_size: int | None = None,
        is_private: bool = False, runs_self_test: bool = True, decoder_factory: DecoderFactory | None = None,
        attention_name: str = "unnamed", linears: LinearFactory = FASTEST, linear_name: str = "auto",
        quantization: str = "none", kv_cache_dtype: str = "auto", device: Device = CPU,
        when_made: Callable[[], None] = lambda: None, succession: Succession | None = None,
    ) -> None:
        """Take a model over: it cannot be used by itself any more.

        Args:
            model: on the CPU, all weights in memory or mapped, or already on the device.
            attention_factory: makes the attention backend.
            block_size: tokens per KV block; ``None``: what the attention backend prefers.
            is_private: the caller keeps neither the model nor its weights, so that mapped pages may be dropped early.
            runs_self_test: compare twelve tokens with a plain forward first.
            decoder_factory: makes what computes a batch; ``None``: the best for model and device.
            attention_name: what ``attention_factory`` is called.
            linears: makes the products of linear layers on the CPU; ``linear_name`` is what it is called.
            quantization: the scheme that ``linears`` follows; "none" for none.
            kv_cache_dtype: as in ``EngineConfig``.
            device: where the model computes.
            when_made: called when all products are made, and before any is computed.
            succession: whose place it takes, which spares the self-test; products are compared with their weights.

        Raises:
            ModelNotSupported: the architecture cannot run here, or the self-test failed.
            ModelTakenOver: another engine has the model.
            InvalidConfig: a KV pool cannot store its number format, or int8, or it has weights on another device.
        """
        self.name = str(model.config.model_type)
        self.make_again: Callable[..., TransformersModel] = partial(
            TransformersModel, attention_factory=attention_factory, block_size=block_size,
            decoder_factory=decoder_factory, attention_name=attention_name, linears=linears, linear_name=linear_name,
            quantization=quantization, kv_cache_dtype=kv_cache_dtype, device=device)
        """Takes another model over in the same way; given that, and the other arguments."""
        self._device, self.device_name, self.attention_name = device, device.gpu_name, attention_name
        self._is_quantized = quantization != "none"
        self._tolerance = max(QUANTIZED_TOLERANCE * self._is_quantized, INT8_KV_TOLERANCE * (kv_cache_dtype != "auto"))
        self.linear_name = linear_name if quantization == "none" else quantization
        self.dtype = model_facts.format_and_device(model)[0]
        """Number format of the weights, and of the K and V that are handed to the KV pool."""
        self._attention_factory, needs = attention_factory, requirements_of(attention_factory)
        self._make_layout = layout_maker(attention_factory, kv_cache_dtype)
        self.block_size = block_size or needs.preferred_block_size(self.dtype)
        self.cache_store: KVPool | None = None
        self._attention: AttentionBackend | None = None
        self._graphed: GraphedSteps | None = None
        self._read_facts(model, quantization)
        self._scheme = quantization if linears is QUANTIZERS.get(quantization) else ""
        """What weights are quantised by; "" for weights that were when they were loaded, or are not."""
        is_decoded_late = not self._is_quantized and has_unpacked(model)
        if self._scheme or is_decoded_late:
            linears = StoredLinears(linears)
        factory = decoder_factory or best_factory(device.kind, attention_factory, linears)
        with torch.inference_mode(), device.computing():
            # Why: to compare logits with those of the weights in files takes a second for each gigabyte, and products
            # were compared with their weights one by one. Quantised ones do not compute what those weights would.
            is_known = isinstance(model, ForCausalLM) and linears is FASTEST and decoder_factory is None
            compares_products = self._is_quantized or is_decoded_late or (is_known and device.kind == "cpu")
            self._take_over(model, factory, is_private, runs_self_test, compares_products, when_made, succession)

    def _read_facts(self, model: PreTrainedModel, quantization: str) -> None:
        ownership.require_free(model)
        supported_models.check(model, self.name, self._device.kind)
        facts, config = model_facts, model.config
        self.max_model_len, self.num_short_tokens = facts.max_model_len(config), facts.num_short_tokens(config)
        self.eos_token_ids, self.generation_config = facts.eos_token_ids(model), facts.generation_fields(model)
        self.fingerprint = model_fingerprint(model, quantization)
        self.embedding_defaults, self._hidden_size = facts.embedding_defaults(config), facts.hidden_size(model)

    @property
    def computes_in_torch(self) -> bool:
        """Whether other libraries compute matrix products of a step on the CPU."""
        products, others = self._decoder.products, self._decoder.other_matrices
        is_ours = all(isinstance(product.multiply, _OUR_PRODUCTS) for product in products)
        return self._device.kind == "cpu" and (bool(others) or not products or not is_ours)

    def layout(self, block_size: int) -> BlockLayout:
        """Return the layout of blocks of so many tokens."""
        return self._make_layout(block_size, self.dtype, kv_shapes(self.layers))

    def kv_block_bytes(self, block_size: int) -> int:
        """Return the bytes of one block of so many tokens over all layers, padding included."""
        return self.layout(block_size).block_bytes

    def allocate_kv(self, num_blocks: int, block_size: int) -> None:
        """Make the KV pool.

        Raises:
            ModelTakenOver: another engine has made one, and has not closed it.
            InvalidConfig: there is not enough memory.
        """
        if self.cache_store is not None:
            raise ModelTakenOver(
                "model: another engine uses this backend and has its KV pool already. Close that engine, or load the "
                "model once more."
            )
        with self._device.computing():
            self.cache_store = self._device.new_storage(self.windows.allocate(self.layout(block_size)), num_blocks)
            attention = self._attention = self._pool_attention(self.cache_store)
        self._graphed = self._new_graphs(attention)
        if isinstance(attention, ChoosesTokens):
            self._device_tokens = DeviceTokens(self._device, attention.new_token_chooser(self.vocab_size))

    def _pool_attention(self, storage: KVPool) -> AttentionBackend:
        return self._prepared(self.windows.attention(storage))

    def _new_attention(self, storage: KVPool) -> AttentionBackend:
        return self._prepared(self._attention_factory(storage.layout, storage.pool))

    def _prepared(self, attention: AttentionBackend) -> AttentionBackend:
        if isinstance(self._decoder, PreparesSteps):
            self._decoder.prepare(attention)
        return attention

    @property
    def state_bytes(self) -> int:
        """Bytes of one state block over all layers; 0: none of them is recurrent. See ``KeepsStates``."""
        return 0 if self.state_layout is None else self.state_layout.state_bytes

    def allocate_states(self, num_states: int) -> None:
        """Make the state pool; see ``KeepsStates``.

        Raises:
            InvalidConfig: there is not enough memory.
        """
        if self.state_layout is not None:
            self.state_store = StatePool(self.state_layout, num_states)

    def _new_graphs(self, attention: AttentionBackend) -> GraphedSteps | None:
        if self._device.graphs is None or not isinstance(attention, RecordsLaunches):
            return None
        assert self.cache_store is not None  # Invariant: made before the backend that has it
        num_blocks, block_size = len(self.cache_store.pool), self.cache_store.layout.block_size
        num_rows, num_tokens = self._largest_step
        return GraphedSteps(
            self._decoder, attention, self.layers, self.dtype, self._device.torch_device, self._device.graphs,
            min(num_blocks, -(-num_tokens // block_size)), num_rows, self.num_short_tokens, self._latest)

    @property
    def _latest(self) -> torch.Tensor | None:
        return None if self._device_tokens is None else self._device_tokens.latest

    @torch.inference_mode()
    def record_steps(self, num_rows: int, num_tokens: int) -> None:
        """Record decode steps, where they can be; see ``RecordsSteps``."""
        self._largest_step, attention, store = (num_rows, num_tokens), self._ready_attention(), self.cache_store
        if self._device_tokens is not None:
            self._device_tokens = self._device_tokens.with_latest(num_rows)
        self._graphed = self._new_graphs(attention)
        if self._graphed is not None and store is not None:
            with self._device.computing():
                self._graphed.record_ahead(
                    lambda batch: self._compute(attention, batch), len(store.pool), store.layout.block_size)

    def free_kv_bytes(self) -> int:
        """Bytes of memory that a KV pool could take now."""
        return self._device.free_bytes()

    @torch.inference_mode()
    def fitting_kv_bytes(self, num_tokens: int, num_rows: int) -> int | None:
        """Compute the largest step of a GPU once, over a few blocks; see ``MeasuresSteps``."""
        if self._device.kind == "cpu":
            return None
        batch, num_blocks = largest_batch(num_tokens, num_rows, self.block_size)
        refusal = InvalidConfig(
            f"max_num_batched_tokens: got {num_tokens} tokens of up to {num_rows} sequences, more than this GPU has "
            "memory for beside the weights. Lower max_num_batched_tokens, or max_num_seqs."
        )
        with self._device.computing():
            try:
                storage = self._device.new_storage(self.layout(self.block_size), num_blocks)
            except InvalidConfig:
                raise refusal from None
            attention = self._new_attention(storage)
            try:
                return self._device.room_beside(lambda: self._compute_all(attention, batch))
            except RuntimeError as error:
                raise refusal if is_out_of_memory(error) else error from None

    def release_kv(self) -> None:
        """Free the pools of KV and of states, as far as there are any; others can be made then."""
        for pool in (self.cache_store, self.state_store):
            if pool is not None:
                pool.close()
        self.windows.release()
        self._attention = self.cache_store = self.state_store = self._graphed = self._device_tokens = None
        if self._adapted is not None:
            self._adapted.leave()
            self._adapted = None

    def suspend_kv(self) -> None:
        """Free the memory of the pools, whose blocks are lost; the pools stay this backend's. For a CPU."""
        self._attention = None
        for pool in (self.cache_store, self.state_store, self.windows):
            if pool is not None:
                pool.close()

    def resume_kv(self) -> None:
        """Allocate what ``suspend_kv`` has freed. Raises ``InvalidConfig`` if there is not enough memory."""
        if self.state_store is not None:
            self.state_store.open_again()
        if self.cache_store is not None:
            self.cache_store.open_again()
            self._attention = self._pool_attention(self.cache_store)

    @property
    def why_no_adapters(self) -> str:
        """Why rows can have no adapters; "" if they can. See ``TakesAdapters``."""
        return why_no_adapters(self._model, self._decoder, self._device.kind)

    @torch.inference_mode()
    def use_adapters(self, max_adapters: int, max_rank: int) -> None:
        """Make slots for adapters, which stay until ``release_kv``; see ``TakesAdapters``.

        Raises:
            ModelNotSupported: rows can have no adapters.
        """
        if reason := self.why_no_adapters:
            raise ModelNotSupported(f"adapters: this model takes none, as {reason}.")
        assert isinstance(self._decoder, AdaptedDecoder)  # Invariant: asked above
        with torch_beside_kernels():
            self._adapted = AdaptedProducts(self._model, self._decoder, max_adapters, max_rank)

    def adapter_bytes(self, directory: str) -> int:
        """Return the memory that the adapter in a directory takes, by the heads of its files; see ``TakesAdapters``.

        Raises:
            InvalidAdapter: it is none, or none for this model.
            OSError: a file cannot be read.
        """
        return self._ready_adapters().num_bytes(directory)

    def read_adapter(self, directory: str) -> LoraAdapter:
        """Read the adapter in a directory, on any thread; see ``TakesAdapters``. Raises as ``adapter_bytes``."""
        return self._ready_adapters().read(directory)

    def put_adapter(self, slot: int, adapter: LoraAdapter) -> None:
        """Use an adapter in an empty slot from the next forward on; see ``TakesAdapters``."""
        self._ready_adapters().slots.put(slot, adapter)

    def drop_adapter(self, slot: int) -> None:
        """Empty a slot; see ``TakesAdapters``."""
        self._ready_adapters().slots.drop(slot)

    def _ready_adapters(self) -> AdaptedProducts:
        if self._adapted is None:
            raise InternalError("adapters: use_adapters has not been called")
        return self._adapted

    @property
    def has_lost_device(self) -> bool:
        """Whether the device has failed for good; see ``MayLoseDevice``."""
        return self._device.is_lost()

    @torch.inference_mode()
    def forward(self, batch: RaggedRows) -> torch.Tensor:
        """Compute a batch; return logits [S, vocab_size] of its ``logits_rows``, on the CPU: bfloat16 of a model in
        bfloat16 there, else float32. The next forward may overwrite them.

        Raises:
            InternalError: there is no KV pool yet.
            ModelTakenOver: the weights were changed.
        """
        with self._device.computing():
            return self._fetch(self.forward_there(batch))

    @property
    def device_tokens(self) -> DeviceTokens | None:
        """What chooses tokens on the device; see ``KeepsLogits``."""
        # Why: as below.
        return self._device_tokens if self.forward == MethodType(TransformersModel.forward, self) else None

    @torch.inference_mode()
    def forward_there(self, batch: RaggedRows) -> torch.Tensor:
        """Compute a batch; return logits on the device, see ``KeepsLogits``. Raises as ``forward``."""
        attention = self._ready_attention()
        with self._device.computing():
            if self._graphed is not None and (logits := self._graphed.run(batch)) is not None:
                return logits
            return self._compute(attention, batch)

    @property
    def decodes_greedily(self) -> bool:
        """Whether ``forward_greedily`` does for this model what ``forward`` would; see ``DecodesGreedily``."""
        # Why: whoever replaces ``forward`` decides what the logits are.
        is_ours = self.forward == MethodType(TransformersModel.forward, self)
        return is_ours and isinstance(self._decoder, GreedyDecoder) and self._decoder.can_pick

    @torch.inference_mode()
    def forward_greedily(self, batch: RaggedRows, barred: Int64Array) -> Int64Array:
        """Compute a batch; return the [S] most likely tokens, see ``DecodesGreedily``. Raises as ``forward``."""
        attention = self._ready_attention()
        assert isinstance(self._decoder, GreedyDecoder)  # Invariant: ``decodes_greedily`` was asked
        with torch_beside_kernels():
            return self._decoder.pick(*self._arguments(attention, batch)[:4], barred)[: len(batch.logits_rows)]

    @property
    def hidden_size(self) -> int:
        """Numbers of one hidden state; 0 if ``forward_hidden`` cannot return any."""
        return self._hidden_size if isinstance(self._decoder, HiddenDecoder) else 0

    @torch.inference_mode()
    def forward_hidden(self, batch: RaggedRows, hidden_rows: Int64Array) -> tuple[torch.Tensor, FloatArray]:
        """Compute a batch; return logits, and hidden states [H, hidden_size] in float32; see ``ReturnsHidden``. Raises
        as ``forward``.
        """
        attention, decoder = self._ready_attention(), self._decoder
        assert isinstance(decoder, HiddenDecoder)  # Invariant: ``hidden_size`` was asked
        with self._device.computing():
            arguments = self._arguments(attention, batch, hidden_rows)
            with torch_beside_kernels() if self._device.kind == "cpu" else nullcontext():
                logits, hidden = decoder.with_hidden(*arguments)
            fetched = self._device.fetch(hidden[: len(hidden_rows)].float().contiguous())
            return self._fetch(logits[: len(batch.logits_rows)]), fetched.numpy()

    def _ready_attention(self) -> AttentionBackend:
        if self._attention is None:
            raise InternalError("forward: allocate_kv has not been called")
        self._weights.require_unchanged()
        return self._attention

    def _arguments(
        self, attention: AttentionBackend, batch: RaggedRows, further: Int64Array | None = None
    ) -> tuple[PagedStep, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        numbers = send_numbers(self._device, attention, batch, self.num_short_tokens, further, self._latest)
        states = None if self.state_store is None else self.state_store.planned(batch)
        return PagedStep(attention, self.layers, batch, self.dtype, numbers[0], states), *numbers[1:]

    def _compute(self, attention: AttentionBackend, batch: RaggedRows) -> torch.Tensor:
        arguments = self._arguments(attention, batch)
        with torch_beside_kernels() if self._device.kind == "cpu" else nullcontext():
            return self._decoder(*arguments[:4])[: len(batch.logits_rows)]

    def _compute_all(self, attention: AttentionBackend, batch: RaggedRows) -> None:
        """Compute a batch and take what choosing its tokens takes."""
        logits = self._compute(attention, batch)
        logits.float()
        self._fetch(logits[:0])

    def _fetch(self, logits: torch.Tensor) -> torch.Tensor:
        # Why: bfloat16 is what the sampler can read, which may need no more of it than the largest.
        is_read_as_it_is = logits.dtype == torch.bfloat16
        return self._device.fetch((logits if is_read_as_it_is else logits.float()).contiguous())

    def _take_over(
        self, model: PreTrainedModel, decoder_factory: DecoderFactory, is_private: bool, runs_self_test: bool,
        compares_products: bool, when_made: Callable[[], None], succession: Succession | None,
    ) -> None:
        model = self._device.take(model.eval())
        self.model, runs_self_test = model, runs_self_test and succession is None
        self.own_attention = model.config._attn_implementation
        new_test, test = partial(SelfTest, model, self.block_size, self._tolerance), None
        if runs_self_test and not compares_products:
            with recurrences.own_recurrences(model):
                test = new_test()
        ownership.take(model)
        self.layers, self.vocab_size, self.state_layout = redirect_attention(model)
        self.windows = WindowLayers(self.layers, self._attention_factory, self.layout)
        """The layers that can have window blocks; see ``KeepsWindows``."""
        self._require_what_layers_need()
        self.kv_bytes_per_token = self.layout(self.block_size).bytes_per_token
        mappings = FileMappings()
        on_unused: OnUnused = mappings.free_pages if is_private else lambda weight: None
        if succession is not None:
            on_unused = _both(on_unused, succession.on_packed)
        if self._scheme and (unused := quantize_embedding(model, QUANTIZERS[self._scheme], self._scheme)) is not None:
            on_unused(unused)
        with _kernels_compute() if self._device.kind == "cpu" and can_multiply(self.dtype, 2) else nullcontext():
            self._decoder: Decoder = decoder_factory(model, self.layers, on_unused)
        mappings.detach(model)
        # Why not on a GPU: what was moved there is a copy already.
        if succession is not None and succession.keeps_nothing and self._device.kind == "cpu":
            for tensor in model.parameters():
                tensor.data = tensor.data.clone()
        self._model, self._weights = model, ownership.TakenWeights(model)
        for product in self._decoder.products:
            product.use_huge_pages()
        when_made()
        with nullcontext() if self.computes_in_torch or self._device.kind != "cpu" else _kernels_compute():
            if runs_self_test and compares_products:
                # Why now: what is expected of the model is what its own modules compute with these products.
                with not_redirected(model, self.own_attention):
                    test = new_test()
            if succession is None:
                self.variable_part: str = self._find_variable_part(test is None or self._settle_decoder(test))
                """What makes results depend on the schedule, or nothing."""
            else:
                self._settle_like(succession.like)

    def _settle_like(self, other: TransformersModel) -> None:
        """Take the decoder that another one of the same form has found to be right, and what is known of it."""
        self.variable_part = other.variable_part
        if other.has_fallen_back and (fallback := self._decoder.fallback()) is not None:
            self._decoder, self.has_fallen_back = fallback, True

    def become(self, other: TransformersModel) -> None:
        """Compute with what another one of the same form has taken over, from the next forward on; at once.

        The KV pool stays, with numbers that were computed with other weights; ``other`` is not used any more.
        """
        if self._adapted is not None:
            other._adapted = self._adapted.moved(other._model, other._decoder)
        # Why one call: an interrupt leaves all of the old, or all of the new.
        vars(self).update({name: value for name, value in vars(other).items() if name not in _OF_POOL})
        if self._attention is not None:
            self._graphed = self._new_graphs(self._prepared(self._attention))

    def lose_products(self) -> Iterator[int]:
        """Free the products one by one, in the order in which they were made, and yield the bytes of each; from then
        on every forward raises ``WeightsIncomplete``.
        """
        products, self._decoder, self._graphed = tuple(self._decoder.products), Incomplete(), None
        for product in products:
            num_bytes = product.multiply.memory[1]
            del product.multiply
            yield num_bytes

    def lose_weights(self) -> None:
        """Free all weights, until this backend ``become``s another; what is said about the model stays."""
        if self._adapted is not None:
            self._adapted.leave()
        for _ in self.lose_products():
            pass
        # Why an empty one: embeddings, norms and whatever else is no product are in the tree of modules.
        self.model = self._model = torch.nn.Module()
        self._weights = ownership.TakenWeights(self._model)

    def _require_what_layers_need(self) -> None:
        if self.state_layout is not None and self._device.kind != "cpu":
            raise ModelNotSupported(
                f"model: {self.name!r} has recurrent layers, which run on a CPU alone. Use device='cpu'."
            )

    @property
    def takes_positions_back(self) -> bool:
        """Whether positions may be computed again with other tokens: keys and values of one are written over."""
        return True

    @property
    def is_schedule_invariant(self) -> bool:
        """Whether products, attention and model were seen to give the same bits under every schedule tried."""
        return not self.variable_part

    def _find_variable_part(self, is_reproducible: bool) -> str:
        products, others = self._decoder.products, self._decoder.other_matrices
        if self._device.kind != "cpu" and self._decoder.torch_products:
            return describe_products(self._model, self._decoder.torch_products, self.dtype, is_reproducible)
        if others or not products:
            return f"torch multiplies the matrices of {', '.join(others) or 'all layers'}, by a path that rows decide"
        if shapes := probe_invariance(products):
            return f"products of the shapes {shapes} depend on the number of rows on this machine"
        return "" if is_reproducible else "its logits differed in the last bits between chunked, whole and in company"

    def _settle_decoder(self, test: SelfTest) -> bool:
        """Run the self-test on a small pool of its own, and again with a slower decoder if it fails with one that has
        such a fallback; return its result.
        """
        storage = self._device.new_storage(self.layout(self.block_size), test.num_blocks)
        attention = self._new_attention(storage)
        self.allocate_states(test.num_states)
        try:
            keeps_states = self.state_layout is not None
            return test.check(lambda batch: self._fetch(self._compute(attention, batch)), keeps_states=keeps_states)
        except ModelNotSupported as failure:
            if (fallback := self._decoder.fallback()) is None:
                raise
            _log.warning("%s: a slower decoder computes it, as the fast one failed: %s", self.name, failure)
            self._decoder, self.has_fallen_back = fallback, True
            return self._settle_decoder(test)
        finally:
            self.state_store = None


def _both(one: OnUnused, other: OnUnused) -> OnUnused:
    def call(weight: torch.Tensor) -> None:
        one(weight)
        other(weight)

    return call


@contextmanager
def _kernels_compute() -> Iterator[None]:
    """Let kernels have the cores that torch would use; its helpers would spin on them."""
    with Computing(num_threads()), torch_beside_kernels():
        yield
