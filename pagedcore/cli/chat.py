"""``pagedcore chat``: a conversation that keeps its cache from turn to turn, on a terminal or on piped input."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from pagedcore.cli import common
from pagedcore.errors import InvalidConfig, InvalidRequest

if TYPE_CHECKING:
    from pagedcore import Engine, Request, SamplingParams

_LEAVE = {"/exit", "/quit"}


def chat(
    model: common.ModelOption = "demo",
    system: Annotated[str | None, typer.Option(help="The system message.")] = None,
    max_tokens: Annotated[int, typer.Option(help="Most tokens per completion.")] = 128,
    temperature: common.TemperatureOption = None,
    top_p: common.TopPOption = None,
    seed: Annotated[int | None, typer.Option(help="The same seed gives the same conversation.")] = None,
    dtype: common.DtypeOption = None,
    kv_cache_dtype: common.KVDtypeOption = None,
    quantization: common.QuantizationOption = None,
    blocks: common.BlocksOption = None,
    max_model_len: common.LengthOption = None,
    adapter: common.AdapterOption = None,
    config: common.ConfigOption = None,
) -> None:
    """Talk to a model; an empty line is skipped, /new starts again, /exit or end of input leaves."""
    from pagedcore import SamplingParams

    adapters = common.adapters_of(adapter)
    params = SamplingParams(max_tokens=max_tokens, seed=seed, **common.chosen(temperature=temperature, top_p=top_p))
    with common.open_engine(model, config, dtype=dtype, kv_cache_dtype=kv_cache_dtype, quantization=quantization,
                            num_kv_blocks=blocks,
                            max_model_len=max_model_len, adapters=adapters) as engine:
        conversation = Conversation(engine, params, system, common.only_adapter(adapters))
        notes = common.error_console()
        while (line := _read_line()) is not None and line not in _LEAVE:
            if line == "/new":
                conversation.restart()
            elif line:
                try:
                    conversation.say(line)
                except InvalidRequest as error:
                    notes.print(f"refused: {error} /new starts a new conversation.", style="red", markup=False)
                    continue
                if sys.stdin.isatty():
                    notes.print(f"[dim]{conversation.num_reused_tokens} tokens reused[/]")


class Conversation:
    """One request that is extended turn by turn, so that earlier turns are not computed again.

    Invariant: ``request`` is ``None`` or finished and not removed, between two turns.
    """

    def __init__(
        self, engine: Engine, params: SamplingParams, system: str | None = None, lora: str | None = None
    ) -> None:
        self._engine, self._lora = engine, lora
        self._params = params
        self._opening = [{"role": "system", "content": system}] if system else []
        self.request: Request | None = None

    def say(self, text: str) -> None:
        """Send ``text`` and stream the completion to standard output.

        Raises:
            InvalidRequest: the turn is refused, for one because the context is full; the conversation is as it was.
        """
        message = {"role": "user", "content": text}
        if self.request is None:
            self.request = self._engine.add_request([*self._opening, message], self._params, lora=self._lora)
        else:
            self.request.extend([message], self._params)
        common.stream_completion(self._engine, self.request)

    @property
    def num_reused_tokens(self) -> int:
        """Tokens of the present turn that did not have to be computed again."""
        return self.request.output().num_cached_tokens if self.request is not None else 0

    def restart(self) -> None:
        """Forget the conversation and free its blocks."""
        if self.request is not None:
            self.request.remove()
        self.request = None


def _read_line() -> str | None:
    if sys.stdin.isatty():
        common.error_console().print("[bold cyan]you>[/] ", end="")
    try:
        line = sys.stdin.readline()
    except UnicodeDecodeError as error:
        raise InvalidConfig(f"standard input: is no UTF-8 text, byte {error.start} for one.") from None
    return line.strip() if line else None
