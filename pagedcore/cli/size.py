"""``pagedcore size``: what a model takes, and what fits, before anything is loaded."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Column, Table

from pagedcore import EngineConfig
from pagedcore.cli.common import DtypeOption, KVDtypeOption, QuantizationOption, console, silence_transformers
from pagedcore.config.memory_budget import format_memory, parse_memory

if TYPE_CHECKING:
    from pagedcore.models.blueprint import Blueprint
    from pagedcore.protocols import AttentionFactory
    from pagedcore_kernels.layout import BlockLayout


@dataclass(frozen=True, slots=True)
class SizeReport:
    """What ``concurrency`` sequences of ``context`` tokens take, and what fits; sizes in bytes."""

    model: str
    dtype: str
    kv_cache_dtype: str
    """As in ``EngineConfig``."""
    quantization: str
    max_model_len: int
    num_parameters: int
    weight_bytes: int
    layers: list[dict[str, int]]
    """How many layers have each shape of K and V."""
    context: int
    """Tokens of each sequence, prompt and completion."""
    concurrency: int
    block_size: int
    block_bytes: int
    """Over all layers, padding included."""
    bytes_per_token: int
    """K and V without padding: 2 x layers x KV heads (Ainslie et al. 2023) x head size x bytes, summed over layers; in
    int8 a scale of 4 bytes is added to each head."""
    padding_bytes: int
    """Bytes of a block that hold no K, V or scale."""
    blocks_per_sequence: int
    num_blocks: int
    kv_bytes: int
    """What an engine allocates: whole blocks, padding included."""
    int8_kv_bytes: int | None
    """The same with ``kv_cache_dtype="int8"``; ``None`` for a model that cannot have it."""
    bytes_per_state: int
    """What recurrent layers keep of a sequence, at one position and whatever its length; 0 if there are none."""
    num_states: int
    """What an engine allocates: a sequence that runs has some, one of which is written while another is read."""
    state_bytes: int
    """All of them."""
    window: int
    """Tokens that layers with a window read; 0: an engine of this size keeps all positions of all layers."""
    window_block_bytes: int
    """What these layers keep of a block's tokens; it is none of a block then."""
    num_windows: int
    """Such window blocks of an engine: a sequence has those of its window, and of the chunk that is computed."""
    window_bytes: int
    """All of them, which are no part of ``kv_bytes``."""
    adapter_bytes: int
    """As ``adapter_memory`` keeps them for adapters."""
    memory: int
    """For weights, KV and adapters together."""
    num_blocks_that_fit: int
    num_sequences_that_fit: int
    context_that_fits: int
    """Tokens that each of ``concurrency`` sequences has room for, in whole blocks."""
    speculative_model: str | None = None
    """As in ``EngineConfig``."""
    draft_weight_bytes: int = 0
    """Its weights."""
    draft_block_bytes: int = 0
    """A block of its pool; it has as many as the model's own, and they are part of ``kv_bytes``."""
    device: str = "auto"
    """As in ``EngineConfig``."""

    @property
    def total_bytes(self) -> int:
        """Weights, KV, states, window blocks and adapters together."""
        beside = self.state_bytes + self.window_bytes + self.adapter_bytes
        return self.weight_bytes + self.draft_weight_bytes + self.kv_bytes + beside

    @property
    def pair_bytes(self) -> int:
        """A block, and the one that ``speculative_model`` has beside it."""
        return self.block_bytes + self.draft_block_bytes

    @property
    def draft_bytes(self) -> int:
        """Weights and KV of ``speculative_model``."""
        return self.draft_weight_bytes + self.num_blocks * self.draft_block_bytes

    @property
    def fits(self) -> bool:
        """Whether weights and all sequences at full length have room."""
        return self.num_blocks <= self.num_blocks_that_fit

    @property
    def settings(self) -> dict[str, int | str]:
        """Keywords of ``Engine.from_pretrained`` for an engine of this size, or with the blocks that fit."""
        return {
            **({"device": self.device} if self.device != "auto" else {}), "dtype": self.dtype,
            **({"kv_cache_dtype": self.kv_cache_dtype} if self.kv_cache_dtype != "auto" else {}),
            **({"quantization": self.quantization} if self.quantization != "none" else {}),
            **({"speculation": "auto", "speculative_model": self.speculative_model} if self.speculative_model else {}),
            "max_model_len": self.context, "max_num_seqs": self.concurrency,
            "max_num_batched_tokens": max(self.concurrency, EngineConfig().max_num_batched_tokens),
            "num_kv_blocks": max(1, min(self.num_blocks, self.num_blocks_that_fit)),
            **({"max_adapters": 8, "adapter_memory": self.adapter_bytes} if self.adapter_bytes else {}),
        }

    @property
    def advice(self) -> str:
        """One sentence on what is left, or on what to change, the smallest loss first."""
        if self.fits:
            return f"It fits: {format_memory(self.memory - self.total_bytes)} are left."
        changes = [f"give it {format_memory(self.total_bytes)} of memory"]
        if self.num_sequences_that_fit:
            changes += [f"keep both with num_kv_blocks={self.num_blocks_that_fit}: what has no room waits and gets the "
                        "same completion", f"lower the concurrency to {self.num_sequences_that_fit}"]
        if self.context_that_fits:
            changes.append(f"lower the context to {self.context_that_fits} tokens")
        kv_bytes = self.kv_bytes + self.window_bytes
        is_kv_alike = self.kv_cache_dtype == "auto"
        if self.speculative_model and self.total_bytes - self.draft_bytes <= self.memory:
            changes.append(f"leave speculative_model, which takes {format_memory(self.draft_bytes)}")
        if is_kv_alike and self.int8_kv_bytes and self.total_bytes - kv_bytes + self.int8_kv_bytes <= self.memory:
            changes.append(f"take kv_cache_dtype int8, in which KV takes {format_memory(self.int8_kv_bytes)}")
        if self.dtype == "float32" and (self.weight_bytes + kv_bytes * is_kv_alike) // 2 >= self._missing_bytes:
            changes.append(f"take dtype bfloat16, which halves weights{' and KV' if is_kv_alike else ''}")
        if not self.num_blocks_that_fit:
            changes.append("take a smaller model: beside the weights there is no room for a block")
        missing = format_memory(self._missing_bytes)
        return f"It does not fit: {missing} are missing. Either {', or '.join(changes)}."

    @property
    def _missing_bytes(self) -> int:
        return self.total_bytes - self.memory

    def as_json(self) -> dict[str, Any]:
        """Return all figures as plain values."""
        return {**asdict(self), "fits": self.fits, "settings": self.settings, "advice": self.advice}


def size_model(
    model: str | os.PathLike[str], *, context: int | None = None, concurrency: int | None = None, dtype: str = "auto",
    kv_cache_dtype: str = "auto", quantization: str = "none", memory: int | float | str | None = None,
    speculative_model: str | None = None, adapter_memory: int | float | str | None = None, device: str = "auto",
) -> SizeReport:
    """Return what ``model`` takes; its configuration is read, its weights are not.

    Args:
        model: "demo", a directory, or a hub name.
        context: tokens of each sequence; ``None``: what the model was made for.
        concurrency: sequences at once; ``None``: the default of ``max_num_seqs``.
        dtype: as in ``EngineConfig``.
        kv_cache_dtype: as in ``EngineConfig``.
        quantization: as in ``EngineConfig``.
        memory: bytes, text or a share of free memory, for weights, KV and adapters; ``None``: what is free now.
        speculative_model: as in ``EngineConfig``.
        adapter_memory: as in ``EngineConfig``; ``None``: for none.
        device: as in ``EngineConfig``; of a GPU that multiplies FP8, which has to be here if ``memory`` is not given.

    Raises:
        InvalidConfig: an argument is out of range, there is no such model, or it cannot run here.
        DeviceUnavailable: the memory of a GPU is asked that is not here.
    """
    from pagedcore.engine.kv_memory import context_length
    from pagedcore.engine.state_memory import num_useful_states
    from pagedcore.models.loading import model_name, plan_backend
    from pagedcore.plugins.manager import create_plugin_manager

    sequences = concurrency if concurrency is not None else EngineConfig().max_num_seqs
    config = replace(_for_sequences(sequences), dtype=dtype, kv_cache_dtype=kv_cache_dtype, quantization=quantization,
                     device=device, attention_backend=_attends(kv_cache_dtype, device), max_model_len=context)
    given = parse_memory(memory, free_bytes=(free_bytes := _free_bytes(device, memory)), what="memory")
    adapter_bytes = parse_memory(adapter_memory, free_bytes=free_bytes, what="adapter_memory") or 0
    plan = plan_backend(model, config, load := create_plugin_manager().registry.attention.load)
    draft_weights, draft_block = _sizes_of_draft_model(speculative_model, config, plan.layout.block_size, load)
    layout, layers, most = plan.layout, Counter(plan.layout.layers), free_bytes if given is None else given
    length, in_int8 = context_length(plan.max_model_len, config), _in_int8(layout)
    of_token = _bytes_per_token(layout)
    num_blocks = sequences * (blocks_per_sequence := -(-length // layout.block_size))
    windows = _windows(plan, config, length, 0 if speculative_model is not None else num_blocks)
    block_bytes = layout.block_bytes - windows["window_block_bytes"]
    pair_bytes, num_tokens = block_bytes + draft_block, num_blocks * layout.block_size
    num_states = num_useful_states(sequences, num_tokens, plan.state_bytes, pair_bytes // layout.block_size)
    of_states, room = num_states * plan.state_bytes, max(0, most - plan.weight_bytes - draft_weights - adapter_bytes)
    num_blocks_that_fit = _fitting_blocks(room - of_states - windows["window_bytes"], pair_bytes, num_blocks)
    return SizeReport(
        model=model_name(model), dtype=str(layout.model_dtype).removeprefix("torch."),
        kv_cache_dtype=kv_cache_dtype, quantization=quantization, max_model_len=plan.max_model_len, device=device,
        num_parameters=plan.num_parameters, weight_bytes=plan.weight_bytes,
        layers=[{"num_layers": n, **asdict(layer)} for layer, n in layers.items()],
        context=length, concurrency=sequences, block_size=layout.block_size, block_bytes=block_bytes,
        bytes_per_token=of_token, padding_bytes=layout.block_bytes - layout.block_size * of_token,
        blocks_per_sequence=blocks_per_sequence, num_blocks=num_blocks, kv_bytes=num_blocks * pair_bytes,
        int8_kv_bytes=None if in_int8 is None else _int8_bytes(plan, in_int8, num_blocks, draft_block, windows),
        bytes_per_state=plan.state_bytes, num_states=num_states, state_bytes=of_states, adapter_bytes=adapter_bytes,
        **windows, memory=most, num_blocks_that_fit=num_blocks_that_fit,
        num_sequences_that_fit=room * sequences // (num_blocks * pair_bytes + of_states + windows["window_bytes"]),
        context_that_fits=min(length, num_blocks_that_fit // sequences * layout.block_size),
        speculative_model=speculative_model, draft_weight_bytes=draft_weights, draft_block_bytes=draft_block,
    )


def _free_bytes(device: str, memory: int | float | str | None) -> int:
    """Return what is free on a device, or on the host where bytes of a GPU are given, which need not be here then."""
    from pagedcore.execution.devices import find_device
    from pagedcore.execution.machine import free_memory_bytes

    is_asked = device.startswith("cuda") and (memory is None or isinstance(memory, float))
    return find_device(device).free_bytes() if is_asked else free_memory_bytes()


def _attends(kv_cache_dtype: str, device: str) -> str:
    if device.startswith("cuda"):
        return "numba-cuda"
    # Why the reference: what attends on a CPU has no e4m3, whose bytes are the same everywhere.
    return "reference" if kv_cache_dtype == "e4m3" else "auto"


def _for_sequences(sequences: int) -> EngineConfig:
    """Return settings for so many sequences: a token budget in which every one of them can advance."""
    most_tokens = max(sequences, EngineConfig().max_num_batched_tokens)
    return EngineConfig(max_num_seqs=sequences, max_num_batched_tokens=most_tokens)


def _windows(plan: Blueprint, config: EngineConfig, length: int, num_blocks: int) -> dict[str, int]:
    """Return what a report says of the window blocks beside so many blocks; all 0: an engine of this size has none."""
    from pagedcore.engine.window_memory import can_have_windows, num_windows_for

    layers, size, count = plan.windows, plan.layout.block_size, 0
    if layers is not None and can_have_windows(layers.window, size, length):
        count = num_windows_for(num_blocks, 0, layers.window, size, config)
    window, num_bytes = (0, 0) if layers is None or not count else (layers.window, layers.bytes_in(plan.layout))
    return {"window": window, "window_block_bytes": num_bytes, "num_windows": count, "window_bytes": count * num_bytes}


def _int8_bytes(
    plan: Blueprint, in_int8: BlockLayout, num_blocks: int, draft_block: int, windows: dict[str, int]
) -> int:
    """Return the bytes of blocks and window blocks with KV in int8."""
    of_window = plan.windows.bytes_in(in_int8) if plan.windows is not None and windows["window"] else 0
    return num_blocks * (in_int8.block_bytes - of_window + draft_block) + windows["num_windows"] * of_window


def _fitting_blocks(left: int, pair_bytes: int, num_blocks: int) -> int:
    """Return the blocks that memory has room for which states leave; all wanted ones of a model without attention."""
    if not pair_bytes:
        return num_blocks if left >= 0 else 0
    return max(0, left) // pair_bytes


def _in_int8(layout: BlockLayout) -> BlockLayout | None:
    """Return the same with KV in int8; ``None``: there is no KV."""
    from torch import int8

    from pagedcore_kernels.layout import ScaledKVLayout

    return ScaledKVLayout(layout.block_size, int8, layout.layers, layout.model_dtype) if layout.layers else None


def _bytes_per_token(layout: BlockLayout) -> int:
    """Return the bytes of K and V of a token over all layers; in 8 bits each head has a scale."""
    from pagedcore_kernels.layout import SCALE_BYTES, ScaledKVLayout

    scale_bytes = SCALE_BYTES if isinstance(layout, ScaledKVLayout) else 0
    return sum(layer.num_kv_heads * (size * layout.dtype.itemsize + scale_bytes)
               for layer in layout.layers for size in (layer.key_head_size, layer.value_head_size))


def _sizes_of_draft_model(
    name: str | None, config: EngineConfig, block_size: int, load: Callable[[str], AttentionFactory]
) -> tuple[int, int]:
    """Return the bytes of weights and of a block of ``speculative_model``."""
    from pagedcore.engine.draft_models import settings_of_draft_model
    from pagedcore.models.loading import model_source, plan_backend

    if name is None:
        return 0, 0
    source = model_source(name, "speculative_model")
    plan = plan_backend(source, settings_of_draft_model(config, block_size), load)
    return plan.weight_bytes, plan.layout.block_bytes


def size(
    model: Annotated[
        str, typer.Argument(help='A model directory, a GGUF file, a hub id, or "demo"; no weights are read.')
    ],
    context: Annotated[
        int | None, typer.Option(help="Tokens of each sequence, prompt and completion; else the most the model can.")
    ] = None,
    concurrency: Annotated[int | None, typer.Option(help="Sequences at once; else the engine's default.")] = None,
    dtype: DtypeOption = None,
    kv_cache_dtype: KVDtypeOption = None,
    quantization: QuantizationOption = None,
    memory: Annotated[
        str | None, typer.Option(help='For weights and KV, such as "2GiB"; else what is free on this machine.')
    ] = None,
    speculative_model: Annotated[
        str | None, typer.Option(help="A smaller model beside it that guesses; with its weights and KV.")
    ] = None,
    adapter_memory: Annotated[str | None, typer.Option(help='Of it, for LoRA adapters, such as "1GiB".')] = None,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda; without --memory such a GPU is to be here.")] = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object; sizes in bytes.")] = False,
) -> None:
    """Say how much memory a model takes for so many sequences, and what fits."""
    silence_transformers()  # Why: remarks about a configuration would stand between the figures
    report = size_model(model, context=context, concurrency=concurrency, dtype=dtype or "auto", memory=memory,
                        kv_cache_dtype=kv_cache_dtype or "auto", quantization=quantization or "none", device=device,
                        speculative_model=speculative_model, adapter_memory=adapter_memory)
    if as_json:
        print(json.dumps(report.as_json(), indent=2))
        return
    table = _table(report, "free on this machine" if memory is None else "given")
    out = console()
    out.print(table)
    out.print(report.advice, soft_wrap=True)
    if report.num_sequences_that_fit:
        settings = ", ".join(f"{name}={value!r}" for name, value in report.settings.items())
        out.print(f"Engine.from_pretrained(..., {settings})", markup=False, soft_wrap=True)


def _table(report: SizeReport, source: str) -> Table:
    """Return the figures; ``source`` says where the memory is from."""
    tokens = f"{report.context:,} tokens"
    title = f"{report.model}, {report.dtype}" + (f", {report.quantization}" if report.quantization != "none" else "")
    title += f", KV in {report.kv_cache_dtype}" if report.kv_cache_dtype != "auto" else ""
    table = Table("what", Column("bytes", justify="right"), "how", title=title, title_justify="left")
    for what, num_bytes, how in (
        ("KV of a token", report.bytes_per_token, _token_sum(report)),
        ("a block", report.block_bytes, f"{report.block_size} tokens, {report.padding_bytes:,} bytes of it padding"),
        *([("a block beside", report.draft_block_bytes, f"of {report.speculative_model}, which guesses")]
          if report.speculative_model else []),
        ("a sequence", report.blocks_per_sequence * report.pair_bytes,
         f"{tokens} in {report.blocks_per_sequence:,} blocks"),
        ("all sequences", report.kv_bytes, f"{report.concurrency:,} sequences, {report.num_blocks:,} blocks, "
         f"{format_memory(report.kv_bytes)}: what an engine allocates"),
        ("without padding", report.concurrency * report.context * report.bytes_per_token,
         f"{report.concurrency:,} x {tokens}, as the formula counts"),
        *([("a state", report.bytes_per_state, "of recurrent layers, at any length"),
           ("all states", report.state_bytes, f"{report.num_states:,} for {report.concurrency:,} sequences")]
          if report.state_bytes else []),
        *([("a window block", report.window_block_bytes, f"of layers that read {report.window:,} tokens"),
           ("all window blocks", report.window_bytes, f"{report.num_windows:,}, for {report.concurrency:,} sequences")]
          if report.window else []),
        ("weights, about", report.weight_bytes,
         f"{report.num_parameters:,} parameters, {format_memory(report.weight_bytes)}"),
        *([("weights beside", report.draft_weight_bytes,
            f"of {report.speculative_model}, {format_memory(report.draft_weight_bytes)}")]
          if report.speculative_model else []),
        *([("adapters", report.adapter_bytes, "adapter_memory")] if report.adapter_bytes else []),
        ("memory", report.memory,
         f"{format_memory(report.memory)} {source}"),
        ("room for KV", report.num_blocks_that_fit * report.pair_bytes,
         f"{report.num_blocks_that_fit:,} blocks: {report.num_sequences_that_fit:,} sequences of {tokens} at once"),
    ):
        table.add_row(what, f"{num_bytes:,}", how)
    return table


def _token_sum(report: SizeReport) -> str:
    """Write the sum over the layers; 2 stands for K and V, where their heads have one size."""
    if not report.layers:
        return "no layer has K and V"
    terms, is_scaled = [], report.kv_cache_dtype != "auto"
    for layer in report.layers:
        sizes = [f"{layer[name]}{' + 4' * is_scaled}" for name in ("key_head_size", "value_head_size")]
        heads = f"{layer['num_layers']} layers x {layer['num_kv_heads']} KV heads"
        twice = f"2 x {heads} x ({sizes[0]})" if is_scaled else f"2 x {heads} x {sizes[0]}"
        terms.append(twice if sizes[0] == sizes[1] else f"{heads} x ({' + '.join(sizes)})")
    total = terms[0] if len(terms) == 1 else f"({' + '.join(terms)})"
    return f"{total} bytes" if is_scaled else f"{total} x {4 if report.dtype == 'float32' else 2} bytes"
