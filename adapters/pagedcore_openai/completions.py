"""``/v1/completions``: the call, the whole response, and the chunks of a stream, of one prompt or of many."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any, ClassVar

from pagedcore import CompletionOutput, Infill, RequestOutput, SamplingParams, TokenLogprobs, Usage
from pagedcore_http.events import encode, frame_text, stop_of
from pagedcore_openai import fields as known
from pagedcore_openai.calls import Call
from pagedcore_openai.errors import DONE, FieldNotSupported
from pagedcore_openai.prompts import prompts_of
from pagedcore_openai.wire import TextLogprobs, UsageSoFar, stop_text, usage_of


class TextCall(Call):
    """Prompts to complete; completion ``i`` of prompt ``p`` is choice ``p * n + i``."""

    form: ClassVar = known.COMPLETION
    prefix: ClassVar = "cmpl"

    def names(self) -> Mapping[str, str]:
        """Return the name of what is scored of the prompt, with ``echo``."""
        return {"prompt_logprobs": "logprobs"}

    def prompts_of(self, fields: Mapping[str, Any]) -> list[Any]:
        """Return the prompts."""
        self._echoes = known.flag(fields, "echo")
        prompts = prompts_of(known.required(fields, "prompt", "text, token ids, or a list of either"))
        if (suffix := fields.get("suffix", "")) == "":
            return prompts
        if self._echoes:
            raise FieldNotSupported("suffix", suffix, "null with echo: true, as the prompt's text is in two parts then")
        return [Infill(prompt, suffix) for prompt in prompts]

    def params_of(self, fields: Mapping[str, Any]) -> SamplingParams:
        """Return the parameters; with ``echo`` they may ask for no token, for what is said of the prompt alone."""
        if self._echoes and "truncate_prompt_tokens" in fields:
            raise FieldNotSupported("truncate_prompt_tokens", fields["truncate_prompt_tokens"], "null with echo: true")
        max_tokens, logprobs = fields.get("max_tokens", known.DEFAULT_MAX_TOKENS), fields.get("logprobs")
        self._is_prompt_only = self._echoes and type(max_tokens) is int and max_tokens == 0
        if self._is_prompt_only:
            # Why: the engine computes at least one token; it is not delivered.
            max_tokens = 1
        self._scores_first = self._echoes and logprobs is not None and self.is_stream
        more = {"best_of": fields["best_of"]} if "best_of" in fields else {}
        return known.params_of(fields, max_tokens=max_tokens, logprobs=logprobs, **more,
                               **({"prompt_logprobs": logprobs} if self._echoes and not self.is_stream else {}))

    async def body(self, outputs: list[RequestOutput]) -> str:
        """Return the text completion."""
        if self._is_prompt_only:
            outputs = [replace(output, outputs=[_without_tokens(one) for one in output.outputs]) for output in outputs]
        choices = [await self._choice(place, output, one)
                   for place, output in enumerate(outputs) for one in output.outputs]
        usage = encode({"usage": usage_of([output.usage for output in outputs])})
        return f"{self._head()}{','.join(choices)}],{usage[1:]}"

    async def _choice(self, place: int, output: RequestOutput, one: CompletionOutput) -> str:
        entries: Sequence[TokenLogprobs | None] | None = one.logprobs
        token_ids, text = one.token_ids, one.text
        if self._echoes:
            token_ids, text = (*output.prompt_token_ids, *token_ids), self._text_of(place) + text
            entries = None if entries is None else (*(output.prompt_logprobs or ()), *entries)
        of_choice = self._logprobs_of(place, len(output.prompt_token_ids))
        logprobs = "null" if entries is None else await of_choice.json(entries, token_ids)
        told: dict[str, Any] = {"index": self._index(place, one.index), "text": text,
                                "finish_reason": "length" if self._is_prompt_only else one.finish_reason,
                                **({} if self._is_prompt_only else stop_of(one))}
        if self.has_token_ids:
            told |= {"token_ids": one.token_ids, "prompt_token_ids": output.prompt_token_ids}
        return f'{encode(told)[:-1]},"logprobs":{logprobs}}}'

    def _text_of(self, place: int) -> str:
        prompt = self.prompts[place]
        return prompt if isinstance(prompt, str) else self.served.engine.decode(prompt)

    def _logprobs_of(self, place: int, num_prompt_tokens: int) -> TextLogprobs:
        """Return what writes the log-probabilities of one choice, which begins with its prompt if that is echoed."""
        if not self._echoes:
            return TextLogprobs(self.served.spell)
        is_text = isinstance(self.prompts[place], str)
        return TextLogprobs(self.served.spell, self._text_of(place), num_prompt_tokens, shows_special=is_text)

    def _index(self, place: int, index: int) -> int:
        return place * self.params.n + index

    def _head(self) -> str:
        head = encode({"id": self.id, "object": "text_completion", "created": self.created, "model": self.served.name,
                       **self.served.fingerprint})
        return f'{head[:-1]},"choices":['

    async def events(self) -> AsyncGenerator[str, None]:
        """Yield chunks: those with text, the last one of each completion with the reason of its end.

        With ``echo`` the first chunk of each has the prompt, and its log-probabilities if they are asked for.
        """
        scored = await self._scored() if self._scores_first else []
        head, usages = self._head(), list[Usage]()
        usage = UsageSoFar(self.usages)
        logprobs: dict[int, TextLogprobs] = {}
        async with aclosing(self.deltas()) as deltas:
            async for place, delta in deltas:
                index = self._index(place, delta.index)
                is_first = index not in logprobs
                of_choice = logprobs.setdefault(index, self._logprobs_of(place, delta.num_prompt_tokens))
                if self._is_prompt_only:
                    delta = replace(delta, text="", token_ids=(), logprobs=None)
                told: Sequence[TokenLogprobs | None] | None = delta.logprobs
                token_ids = delta.token_ids
                if is_first and scored:
                    told = (*(scored[place].prompt_logprobs or ()), *(told or ()))
                    token_ids = (*scored[place].prompt_token_ids, *token_ids)
                entries = "null" if told is None else await of_choice.json(told, token_ids)
                text = self._text_of(place) + delta.text if is_first and self._echoes else delta.text
                more = f',"token_ids":{encode(delta.token_ids)}' if self.has_token_ids else ""
                more += "" if self._is_prompt_only else stop_text(delta)
                choice = (f'{{"index":{index},"text":{encode(text)},"logprobs":{entries},'
                          f'"finish_reason":{encode(delta.finish_reason)}{more}}}')
                usages += [] if delta.usage is None else [delta.usage]
                is_last = len(usages) == len(self.prompts)
                chunk = frame_text(f"{head}{choice}{usage.tail(place, delta)}")
                yield chunk + (self._end(head, usages) if is_last else "")

    async def _scored(self) -> list[RequestOutput]:
        """Score the prompts, whose completions then find them in the prefix cache: a stream tells of its prompt at its
        end only."""
        return await self.complete(SamplingParams(max_tokens=1, prompt_logprobs=self.params.logprobs))

    def _end(self, head: str, usages: list[Usage]) -> str:
        if self._is_prompt_only:
            usages = [replace(one, num_output_tokens=0) for one in usages]
        return (frame_text(f'{head}],"usage":{encode(usage_of(usages))}}}') if self.has_usage else "") + DONE


def _without_tokens(one: CompletionOutput) -> CompletionOutput:
    return replace(one, text="", token_ids=(), logprobs=None if one.logprobs is None else ())
