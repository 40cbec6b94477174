"""Parts of bodies that several endpoints share: tokens by name, log-probabilities in both forms, usage."""

from __future__ import annotations

from codecs import getincrementaldecoder
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

from pagedcore import CompletionOutput, Delta, TokenLogprobs, TokenText, Usage
from pagedcore_http.events import encode, stop_of
from pagedcore_http.json_pieces import map_in_pieces
from pagedcore_openai.fields import Usages

_Utf8 = getincrementaldecoder("utf-8")
Spell = Callable[[int], TokenText]
"""Returns what a token stands for."""
LEAST_LOGPROB: Final = -9999.0
"""OpenAI's value for an impossible token; JSON has no infinity."""


def stop_text(ended: CompletionOutput | Delta) -> str:
    """Return the member ``stop_reason`` of a choice, as vLLM has it, after others; empty if no stop of the caller's own
    ended the completion."""
    return "".join(f',"{name}":{encode(value)}' for name, value in stop_of(ended).items())


def usage_of(usages: Iterable[Usage], num_reasoning_tokens: int | None = None) -> dict[str, Any]:
    """Return the usage of a call, all its prompts together; of a chat with the tokens that are reasoning."""
    each = list(usages)
    num_prompt, num_output = sum(one.num_prompt_tokens for one in each), sum(one.num_output_tokens for one in each)
    more = {} if num_reasoning_tokens is None else {
        "completion_tokens_details": {"reasoning_tokens": num_reasoning_tokens}}
    return {"prompt_tokens": num_prompt, "completion_tokens": num_output, "total_tokens": num_prompt + num_output,
            "prompt_tokens_details": {"cached_tokens": sum(one.num_cached_tokens for one in each)}, **more}


class UsageSoFar:
    """What the chunks of a stream say of its usage; all chunks of one call have the same form."""

    def __init__(self, usages: Usages) -> None:
        self._usages = usages
        self._num_prompt: dict[int, int] = {}
        self._num_output = 0

    def tail(self, place: int, delta: Delta) -> str:
        """Return the end of a chunk that tells of a delta of prompt ``place``, from its list of choices on."""
        if self._usages is not Usages.EVERY:
            return "]}" if self._usages is Usages.NONE else '],"usage":null}'
        self._num_prompt[place] = delta.num_prompt_tokens
        self._num_output += len(delta.token_ids)
        num_prompt = sum(self._num_prompt.values())
        usage = {"prompt_tokens": num_prompt, "completion_tokens": self._num_output,
                 "total_tokens": num_prompt + self._num_output}
        return f'],"usage":{encode(usage)}}}'


def _entry(token_id: int, logprob: float, spell: Spell) -> dict[str, Any]:
    token = spell(token_id)
    return {"token": token.text, "logprob": max(logprob, LEAST_LOGPROB),
            "bytes": None if token.utf8 is None else list(token.utf8)}


def chat_entry(one: TokenLogprobs, spell: Spell) -> dict[str, Any]:
    """Return the log-probabilities of a token as chats and responses have them."""
    return {**_entry(one.token_id, one.logprob, spell),
            "top_logprobs": [_entry(token_id, logprob, spell) for token_id, logprob in one.top]}


async def chat_logprobs(entries: Sequence[TokenLogprobs], spell: Spell) -> str:
    """Return the list of entries as JSON, made in pieces."""
    return f"[{','.join(await map_in_pieces(lambda one: encode(chat_entry(one, spell)), entries))}]"


class TextLogprobs:
    """Log-probabilities of text completions: four lists, of one completion or of one chunk of it.

    The offset of a token is the number of characters before the one that its first byte belongs to, in the text of the
    choice: tokens that are parts of one character have the same.

    Invariant: offsets never decrease, from chunk to chunk either.
    """

    def __init__(self, spell: Spell, echoed: str = "", num_echoed: int = 0, *, shows_special: bool = False) -> None:
        """Begin with what is echoed.

        Args:
            spell: says what a token stands for.
            echoed: the text that the completion's text follows.
            num_echoed: tokens that this text was made of.
            shows_special: whether it has the texts of special tokens, as a prompt that came as text.
        """
        self._spell = spell
        self._offset = 0
        self._characters = _Utf8("replace")
        self._echoed, self._num_left, self._shows_special = echoed, num_echoed, shows_special

    async def json(self, entries: Sequence[TokenLogprobs | None], token_ids: Sequence[int]) -> str:
        """Return the object for the next tokens; the first token of a prompt has no entry."""
        rows = await map_in_pieces(self._row, list(zip(entries, token_ids, strict=True)))
        columns = [f"[{','.join(column)}]" for column in zip(*rows, strict=True)] or ["[]"] * 4
        names = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
        return "{" + ",".join(f'"{name}":{column}' for name, column in zip(names, columns, strict=True)) + "}"

    def _row(self, item: tuple[TokenLogprobs | None, int]) -> tuple[str, str, str, str]:
        entry, token_id = item
        token, offset = self._spell(token_id), self._take(token_id)
        if entry is None:
            return encode(name_of(token)), "null", "null", str(offset)
        top: dict[str, float] = {}
        for other, logprob in (*entry.top, (token_id, entry.logprob)):
            # Why: of tokens with one name the likeliest counts.
            top.setdefault(name_of(self._spell(other)), max(logprob, LEAST_LOGPROB))
        return encode(name_of(token)), encode(max(entry.logprob, LEAST_LOGPROB)), encode(top), str(offset)

    def _take(self, token_id: int) -> int:
        """Return the offset of the next token."""
        token, offset = self._spell(token_id), self._offset
        if token.utf8 is not None:
            self._offset += len(self._characters.decode(token.utf8))
        elif self._shows_special and self._num_left and self._echoed.startswith(token.text, offset):
            # Why looked for: a tokenizer adds special tokens to a prompt, which its text does not have.
            self._offset += len(token.text)
        self._num_left -= 1
        if self._num_left == 0:
            # Why: the completion's text begins after the prompt's, however that ended.
            self._characters.reset()
            self._offset = len(self._echoed)
        return offset


def name_of(token: TokenText) -> str:
    """Return the text of a token, or its bytes if these are only a part of a character."""
    if token.utf8 is None or "\ufffd" not in token.text:
        return token.text
    return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token.utf8)
