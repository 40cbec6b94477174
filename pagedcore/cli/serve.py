"""``pagedcore serve``: models behind OpenAI's HTTP interface, in a process of their own."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any

import typer

from pagedcore.cli import common
from pagedcore.errors import InvalidConfig, show

MemoryOption = Annotated[
    str | None, typer.Option(help='Memory for weights and KV of all models, "8GiB"; idle ones sleep to make room.')]
IdleOption = Annotated[
    str | None, typer.Option(help='A model gives its memory back when no call has used it for so long: "10m".')]
MaxAdaptersOption = Annotated[
    int | None, typer.Option(help="Adapters in memory at a time; else 8 with --adapter or --adapter-root.")]


def serve(
    model: Annotated[
        str | None, typer.Argument(help='A directory, a GGUF file, a hub id, or "demo", which comes with pagedcore.')
    ] = None,
    models: Annotated[
        list[str] | None, typer.Option("--model", "-m", help="NAME=MODEL, for a name of its own or for several models.")
    ] = None,
    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 is every network.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on; 0 is any free one.")] = 8000,
    drain_s: Annotated[
        float, typer.Option(min=0.0, help="Longest wait for calls in flight at the end, in seconds.")
    ] = 25.0,
    allow_host: Annotated[
        list[str] | None, typer.Option(help="A name by which a proxy or a browser addresses the server; repeatable.")
    ] = None,
    allow_origin: Annotated[
        list[str] | None, typer.Option(help="Another site whose pages may call, https://NAME; repeatable.")
    ] = None,
    page: Annotated[bool, typer.Option(help="The page at /: chat, and a live view of the batch.")] = True,
    recordings: Annotated[
        str | None, typer.Option(help='"on" or "tokens": record, and send it to admins at /recording.')
    ] = None,
    weights_dir: Annotated[
        str | None, typer.Option(help="A directory from which admins may load weights at /update_weights.")
    ] = None,
    kv_memory: Annotated[
        str | None, typer.Option(help='Memory for KV, such as "2GiB"; several models share it equally.')
    ] = None,
    memory: MemoryOption = None,
    idle_unload: IdleOption = None,
    dtype: common.DtypeOption = None,
    kv_cache_dtype: common.KVDtypeOption = None,
    quantization: common.QuantizationOption = None,
    max_num_seqs: common.SeqsOption = None,
    blocks: common.BlocksOption = None,
    max_model_len: common.LengthOption = None,
    attention_backend: common.BackendOption = None,
    chat_template: common.TemplateOption = None,
    adapter: common.AdapterOption = None,
    max_adapters: MaxAdaptersOption = None,
    adapter_root: Annotated[
        list[str] | None, typer.Option(help="Where PAGEDCORE_ADMIN_KEY may load adapters from; repeatable.")
    ] = None,
    config: common.ConfigOption = None,
) -> None:
    """Serve OpenAI's HTTP interface; PAGEDCORE_API_KEYS has the keys of those who may call, separated by commas."""
    from pagedcore import EngineConfig

    settings = {"dtype": dtype, "kv_cache_dtype": kv_cache_dtype, "quantization": quantization,
                "max_num_seqs": max_num_seqs, "num_kv_blocks": blocks, "max_model_len": max_model_len,
                "attention_backend": attention_backend, "kv_cache_memory": kv_memory,
                "chat_template": common.template_of(chat_template), "adapters": common.adapters_of(adapter),
                "max_adapters": max_adapters if max_adapters is not None or not adapter_root else 8}
    given: dict[str, Any] = {name: value for name, value in settings.items() if value is not None}
    if config is not None:
        given = {"config": EngineConfig.from_file(config, **given)}
    run(_by_name(model, models or [], adapter), host=host, port=port, drain_s=drain_s, allow_hosts=allow_host or [],
        allow_origins=allow_origin or [], page=page, recordings=recordings, adapter_roots=adapter_root or [],
        weights_dir=weights_dir, memory=memory, idle_s=None if idle_unload is None else _seconds_of(idle_unload),
        **given)


def run(by_name: Mapping[str, str], *, is_announced: bool = True, **options: Any) -> None:
    """Serve until the end, with a status line until the server answers; then print how to call it if ``is_announced``.

    Raises ``MissingDependency``, and as ``pagedcore_openai.serve``.
    """
    from pagedcore.plugins.registry import Table

    # Why by its name: adapters are above the commands. This one comes with pagedcore, installed as a plugin or not.
    doors: Table[Any] = Table("serve")
    doors.add("openai", "pagedcore_openai.server:serve", extra="openai")
    serve_models = doors.load("openai")
    with common.error_console().status(f"loading {', '.join(by_name)} ...") as status:
        for path in by_name.values():
            common.hide_bars_of(path)

        def show(text: str) -> None:
            status.stop()
            if is_announced:
                common.error_console().print(text, markup=False, soft_wrap=True)

        serve_models(by_name, announce=show, **options)


def _by_name(model: str | None, models: list[str], adapters: list[str] | None) -> dict[str, str]:
    """Return models by the names that requests give. Raises ``InvalidConfig``, also for adapters of several."""
    if model is None and not models:
        raise InvalidConfig('model: got none, needed is one, such as "demo", or --model NAME=MODEL.')
    named = [] if model is None else [(_name_of(model), model)]
    for text in models:
        name, mark, path = text.partition("=")
        if not (name and mark and path):
            raise InvalidConfig(f"--model: got {show(text)}, needed is NAME=MODEL.")
        named.append((name, path))
    by_name = dict(named)
    if len(by_name) < len(named):
        raise InvalidConfig("--model: two models have the same name; give each one of its own.")
    if adapters and len(by_name) > 1:
        raise InvalidConfig(f"--adapter: got one with {len(by_name)} models, allowed is one model.")
    return by_name


def _seconds_of(text: str) -> float:
    """Return the seconds of "30s", "10m" or "2h". Raises ``InvalidConfig``."""
    if (found := re.fullmatch(r"([0-9]{1,9}(?:\.[0-9]{1,9})?)([smh])", text)) is None:
        raise InvalidConfig(f'--idle-unload: got {show(text)}, allowed is a time such as "30s", "10m" or "2h".')
    return float(found[1]) * {"s": 1, "m": 60, "h": 3600}[found[2]]


def _name_of(model: str) -> str:
    from pathlib import Path

    return Path(model).resolve().name if Path(model).exists() else model
