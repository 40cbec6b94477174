"""``pagedcore generate``: completions on standard output, one prompt streamed, many with a progress bar."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from pagedcore.cli import common
from pagedcore.errors import InvalidConfig


def generate(
    prompts: Annotated[list[str] | None, typer.Argument(help="Any number of prompts.")] = None,
    model: common.ModelOption = "demo",
    prompts_file: Annotated[
        Path | None, typer.Option(help="A file with one prompt per line; - is standard input.", allow_dash=True)
    ] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Send each prompt as a user's chat message.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object per completion and line.")] = False,
    max_tokens: Annotated[int | None, typer.Option(help="Most tokens per completion.")] = None,
    temperature: common.TemperatureOption = None,
    top_k: Annotated[int | None, typer.Option(help="Sample among the k most likely; 0 is all.")] = None,
    top_p: common.TopPOption = None,
    min_p: Annotated[float | None, typer.Option(help="Drop tokens less likely than this share of the best.")] = None,
    repetition_penalty: Annotated[float | None, typer.Option(help="Above 1 discourages repetition.")] = None,
    stop: Annotated[list[str] | None, typer.Option(help="Text that ends a completion; may be repeated.")] = None,
    seed: Annotated[int | None, typer.Option(help="The same seed gives the same completion.")] = None,
    json_schema: Annotated[Path | None, typer.Option(help="A file with a JSON schema that completions keep.")] = None,
    regex: Annotated[str | None, typer.Option(help="A regular expression that completions match.")] = None,
    choice: Annotated[list[str] | None, typer.Option(help="A text that a completion may be; repeat it.")] = None,
    dtype: common.DtypeOption = None,
    kv_cache_dtype: common.KVDtypeOption = None,
    quantization: common.QuantizationOption = None,
    max_num_seqs: common.SeqsOption = None,
    blocks: common.BlocksOption = None,
    max_model_len: common.LengthOption = None,
    attention_backend: common.BackendOption = None,
    adapter: common.AdapterOption = None,
    config: common.ConfigOption = None,
) -> None:
    """Complete prompts given as arguments or in a file."""
    from pagedcore import SamplingParams

    wanted = [*(prompts or []), *_read_prompts(prompts_file)]
    if not wanted:
        raise InvalidConfig("prompts: got none, needed is at least one, as an argument or with --prompts-file.")
    sampling = common.chosen(
        temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, repetition_penalty=repetition_penalty)
    params = SamplingParams(
        max_tokens=max_tokens, stop=tuple(stop or ()), seed=seed, structured=_structured(json_schema, regex, choice),
        **sampling,
    )
    adapters = common.adapters_of(adapter)
    lora = common.only_adapter(adapters)
    inputs: list[Any] = [[{"role": "user", "content": text}] if chat else text for text in wanted]
    with common.open_engine(model, config, dtype=dtype, kv_cache_dtype=kv_cache_dtype, quantization=quantization,
                            max_num_seqs=max_num_seqs, num_kv_blocks=blocks, max_model_len=max_model_len,
                            attention_backend=attention_backend, adapters=adapters) as engine:
        if len(inputs) == 1 and not as_json:
            common.stream_completion(engine, engine.add_request(inputs[0], params, lora=lora))
            return
        for text, output in zip(wanted, engine.generate(inputs, params, lora=lora), strict=True):
            completion = output.outputs[0]
            record = {"prompt": text, "text": completion.text, "num_tokens": len(completion.token_ids),
                      "finish_reason": completion.finish_reason, "queue_s": output.metrics.queue_s,
                      "ttft_s": output.metrics.ttft_s, "itl_s": completion.itl_s}
            print(json.dumps(record, ensure_ascii=False) if as_json else f"{text}\n  {completion.text.strip()}")


def _structured(schema: Path | None, regex: str | None, choice: list[str] | None) -> dict[str, Any] | None:
    text = None if schema is None else common.read_text(schema, "--json-schema")
    given = {"json_schema": text, "regex": regex, "choice": choice or None}
    return {name: value for name, value in given.items() if value is not None} or None


def _read_prompts(path: Path | None) -> list[str]:
    if path is None:
        return []
    return [line for _, line in common.read_lines(path, "--prompts-file")]
