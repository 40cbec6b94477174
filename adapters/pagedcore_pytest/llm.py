"""What the fixture ``llm`` is: the engine, short ways to ask it, and the completions of the running test."""

from __future__ import annotations

import secrets
from collections.abc import AsyncGenerator, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from pagedcore import AsyncEngine, Delta, Engine, EngineConfig, RequestOutput, SamplingParams
from pagedcore.errors import InvalidSampling, PromptTooLong
from pagedcore.plugins.hookspecs import hookimpl
from pagedcore_pytest.current import CurrentTest
from pagedcore_pytest.environment import environment_of
from pagedcore_pytest.errors import NothingToCompare
from pagedcore_pytest.goldens import Answer, Goldens

DEFAULT_MAX_TOKENS: Final = 64
SEED: Final = 0
"""What sampled completions without a seed of their own begin with, so that a test gets the same in any order."""
SETTINGS: Final[Mapping[str, Any]] = {
    "num_kv_blocks": 512, "max_num_seqs": 32, "max_num_waiting": 1024, "num_threads": 1,
    # Why: the number of cached tokens in a usage would depend on the tests before.
    "enable_prefix_caching": False,
}
"""Settings of the engine unless a file has others: one thread, because test runners have many processes."""
_OWN_LABEL: Final = "pagedcore-golden-"
_CLOSE_LIMIT_S: Final = 10.0


@dataclass(frozen=True)
class Call:
    """One completion that the running test has had, by any way."""

    prompt: str
    """The text of the prompt, without special tokens."""
    text: str
    prompt_token_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    finish_reason: str | None


class SeededEngine(AsyncEngine):
    """An engine whose sampled completions do not depend on the requests before them."""

    def generate(self, prompt: Any, params: SamplingParams | None = None, **more: Any) -> AsyncGenerator[Delta, None]:
        """Complete with a seed; see ``AsyncEngine.generate``."""
        return super().generate(prompt, self._seeded(params), **more)

    def generate_sync(self, prompt: Any, params: SamplingParams | None = None, **more: Any,
                      ) -> Generator[Delta, None, None]:
        """Complete with a seed; see ``AsyncEngine.generate_sync``."""
        return super().generate_sync(prompt, self._seeded(params), **more)

    def submit(self, prompt: Any, params: SamplingParams | None = None, **more: Any) -> Any:
        """Complete with a seed; see ``AsyncEngine.submit``."""
        return super().submit(prompt, self._seeded(params), **more)

    def session(self, params: SamplingParams | None = None, **more: Any) -> Any:
        """Open a conversation with a seed; see ``AsyncEngine.session``."""
        return super().session(self._seeded(params), **more)

    def _seeded(self, params: SamplingParams | None) -> SamplingParams | None:
        of_model = self.generation_defaults.get("temperature", 0.0)
        own = SamplingParams() if params is None else params
        if not isinstance(own, SamplingParams) or own.seed is not None:
            return params
        is_sampled = own.temperature or ("temperature" not in own.given and of_model)
        return replace(own, seed=SEED) if is_sampled else params


class _Observer:
    """Notes the outputs of the running test; the methods run on the engine's thread."""

    def __init__(self, current: CurrentTest) -> None:
        self._current = current
        self._number = current.number
        self._outputs: list[RequestOutput] = []

    @hookimpl
    def pagedcore_request_finished(self, request: RequestOutput) -> None:
        """Keep the output of a request that the test has made."""
        self.start_anew()
        if not (request.client_request_id or "").startswith(_OWN_LABEL):
            self._outputs.append(request)

    def start_anew(self) -> None:
        """Forget what earlier tests have had."""
        if self._number != self._current.number:
            self._number, self._outputs = self._current.number, []

    def outputs(self) -> list[RequestOutput]:
        """Return the outputs of the running test."""
        self.start_anew()
        return list(self._outputs)


class LLM:
    """A language model in tests. The same question gets the same answer, byte for byte, whatever runs beside it."""

    def __init__(self, engine: AsyncEngine, model: str, current: CurrentTest, goldens: Goldens,
                 observer: _Observer) -> None:
        self.engine = engine
        """The engine, for everything that ``AsyncEngine`` does; the plugin closes it."""
        self.model = model
        """The model's name."""
        self._current = current
        self._goldens = goldens
        self._observer = observer

    def __call__(self, prompt: str | list[int], **sampling: Any) -> str:
        """Return the completion of a prompt.

        Args:
            prompt: text or token ids.
            sampling: fields of ``SamplingParams``; ``max_tokens`` is 64 if not given, and a seed 0.

        Raises:
            InvalidRequest: the prompt or a field is refused.
        """
        return self.generate([prompt], **sampling)[0].outputs[0].text

    def chat(self, messages: str | Sequence[Mapping[str, Any]], **sampling: Any) -> str:
        """Return the answer to a chat, or to one message of a user; otherwise as ``llm(prompt)``."""
        return self(_chat(messages), **sampling)

    def generate(self, prompts: Iterable[Any], **sampling: Any) -> list[RequestOutput]:
        """Complete prompts (text, token ids or chats) side by side; return all of it. Raises as ``llm(prompt)``."""
        params = SamplingParams.from_mapping({"max_tokens": DEFAULT_MAX_TOKENS, **sampling})
        futures = [self.engine.submit(prompt, params, wait_for_room=True) for prompt in prompts]
        try:
            outputs = [future.result() for future in futures]
        finally:
            for future in futures:
                future.cancel()
        for output in outputs:
            output.raise_for_error()
        return outputs

    @property
    def calls(self) -> list[Call]:
        """The completions that the running test has had so far, in the order in which they ended, through the fixtures,
        OpenAI's client, LangChain or the engine; those that were aborted are left out."""
        # Why: the engine tells of a request's end after its caller has the output.
        self.engine.send(lambda _: None).result()
        return [
            Call(self._text_of(output.prompt_token_ids), one.text, output.prompt_token_ids, one.token_ids,
                 one.finish_reason)
            for output in self._observer.outputs() for one in output.outputs if one.finish_reason in ("stop", "length")
        ]

    def _text_of(self, token_ids: Sequence[int]) -> str:
        return self.engine.decode(token_ids)

    def golden(self, name: str, prompt: Any = None, **sampling: Any) -> str:
        """Compare an answer with the one that is stored in ``__goldens__`` beside the test; return the answer.

        ``pytest --update-goldens`` stores it instead.

        Args:
            name: unique in the test's file.
            prompt: text, token ids or a chat; ``None``: compare all completions that the test has had so far.
            sampling: as for ``llm(prompt)``.

        Raises:
            GoldenChanged: the answer is another one; the message names the first token that is.
            GoldenMissing: no answer of this name is stored.
            GoldenFileInvalid: the file is damaged.
        """
        __tracebackhide__ = True
        if sampling.get("n", 1) != 1 or "best_of" in sampling:
            raise InvalidSampling("n", sampling.get("n", sampling.get("best_of")), "1 in llm.golden")
        if prompt is None:
            calls = self.calls
        else:
            (output,) = self.generate([prompt], **sampling)
            (one,) = output.outputs
            calls = [Call(self._text_of(output.prompt_token_ids), one.text, output.prompt_token_ids, one.token_ids,
                          one.finish_reason)]
        path = self._current.golden_path
        if path is None or not calls:
            raise NothingToCompare(
                f"llm.golden({name!r}): the running test has had no completion yet. Ask the model first, or give "
                "llm.golden a prompt; it works inside a test and its fixtures."
            )
        answers = [Answer(one.prompt, one.prompt_token_ids, one.text, one.token_ids, self) for one in calls]
        self._goldens.check(path, name, answers, sampling, environment_of(self.engine))
        return calls[-1].text

    def logprobs_of(self, prompt: Sequence[int], token_ids: Sequence[int]) -> list[float]:
        """Return the log-probability of each token after a prompt and those before it; of none past the context."""
        scored = SamplingParams(max_tokens=1, prompt_logprobs=0)
        try:
            output = self.engine.submit([*prompt, *token_ids], scored, wait_for_room=True,
                                        request_id=_OWN_LABEL + secrets.token_hex(8)).result()
        except PromptTooLong:
            return []
        output.raise_for_error()
        return [entry.logprob for entry in (output.prompt_logprobs or ())[len(prompt) :] if entry is not None]

    def name_of(self, token_id: int) -> str:
        """Return what a token stands for."""
        return self.engine.token_text(token_id).text


def _chat(messages: str | Sequence[Mapping[str, Any]]) -> Any:
    return [{"role": "user", "content": messages}] if isinstance(messages, str) else list(messages)


@contextmanager
def open_llm(model: str, config: Path | None, current: CurrentTest, goldens: Goldens) -> Iterator[LLM]:
    """Build the engine and the facade; close the engine in the end.

    Raises:
        InvalidConfig: the model or a setting is refused.
    """
    observer = _Observer(current)
    settings = dict(SETTINGS) if config is None else {"config": EngineConfig.from_file(config)}
    engine = SeededEngine(Engine.from_pretrained(model, plugins=(observer,), **settings))
    try:
        yield LLM(engine, model, current, goldens, observer)
    finally:
        engine.close(_CLOSE_LIMIT_S)
