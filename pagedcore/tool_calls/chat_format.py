"""How the model of one engine writes calls and reasoning, and what that means for one call of a door.

Doors call ``ChatFormat.turn`` before a request and read its output with the parser that the turn makes. The engine
itself knows nothing of it: parsing is the reader's work.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, Final

from pagedcore.errors import InvalidPrompt, InvalidTools, TextFailed
from pagedcore.outputs import CompletionOutput, Delta
from pagedcore.protocols import RendersTools
from pagedcore.sampling_params import SamplingParams
from pagedcore.structured_output import WHITESPACE, StructuredOutput
from pagedcore.tokenizer.chat import Chat
from pagedcore.tokenizer.incremental_text import IncrementalText, UnsearchedSpan
from pagedcore.tokenizer.template_arguments import (
    EFFORTS,
    TakesArguments,
    arguments_of_effort,
    require_read,
    validate_arguments,
)
from pagedcore.tool_calls.events import (
    ChatEvent,
    ContentDelta,
    ParsedCompletion,
    ToolCallEnd,
    ToolCallStart,
    collect,
)
from pagedcore.tool_calls.formats import (
    OutputParser,
    ReadsAnswers,
    ReasoningFormat,
    ReasoningRules,
    ToolFormat,
    ToolGrammar,
    cut_off,
    default_id,
    in_regex,
    quoted,
)
from pagedcore.tool_calls.marked_text import ShowsMarkers
from pagedcore.tool_calls.reasoning import ReasoningParser

if TYPE_CHECKING:
    from pagedcore.protocols import Tokenizer

_QUESTION: Final = ({"role": "user", "content": "question"},)
_NO_PROMPT: Final = {"add_generation_prompt": False}
_PROBED: Final[Any] = ({"type": "function", "function": {
    "name": "pagedcore_probe", "description": "It does nothing.", "parameters": {
        "type": "object", "properties": {"text": {"type": "string"}, "number": {"type": "integer"}}}}},)
_PROBE: Final[Any] = (
    {"role": "user", "content": "pagedcore-question"},
    # Why this id: templates of Mistral want nine letters or digits.
    {"role": "assistant", "content": "", "tool_calls": [{"id": "pagedcore", "type": "function", "function": {
        "name": "pagedcore_probe", "arguments": {"text": "word", "number": 5}}}]},
)
"""A call that no template writes by itself; what it looks like says which format a model was made for."""


class ChatFormat:
    """The formats of one model, found when they are first needed; safe to use from several threads."""

    def __init__(
        self, tokenizer: Tokenizer | None, find_tools: Callable[[str], ToolFormat | None],
        find_reasoning: Callable[[str], ReasoningFormat | None],
    ) -> None:
        """Take the functions that return the formats for a chat template."""
        self._tokenizer, self._find_tools, self._find_reasoning = tokenizer, find_tools, find_reasoning
        self._opens_reasoning: Callable[[], bool] = lambda: self._is_opened({})

    @cached_property
    def template(self) -> str:
        """The source of the chat template; empty if there is none."""
        return self._tokenizer.chat_template if isinstance(self._tokenizer, RendersTools) else ""

    @cached_property
    def _written(self) -> str:
        """What the template writes for a call; if it writes none, how it tells the model to; empty for neither."""
        if not isinstance(self._tokenizer, RendersTools):
            return ""
        given: Any = {"arguments": _NO_PROMPT} if isinstance(self._tokenizer, TakesArguments) else {}
        try:
            text = self._tokenizer.render_chat(_PROBE, tools=_PROBED, **given)
        except InvalidPrompt:
            return ""
        call = text.rpartition(_PROBE[0]["content"])[2]
        return next((one for one in (call, text) if _PROBED[0]["function"]["name"] in one), "")

    @cached_property
    def tools(self) -> ToolFormat | None:
        """How calls are written, if that is known."""
        return self._find_tools(self._written) or self._find_tools(self.template)

    @cached_property
    def reasoning(self) -> ReasoningFormat | None:
        """How reasoning is written, if there is any."""
        return self._find_reasoning(self.template)

    @cached_property
    def opens_reasoning(self) -> bool:
        """Whether the prompt of a chat ends with the beginning of reasoning."""
        return self._opens_reasoning()

    def _is_opened(self, arguments: Mapping[str, Any]) -> bool:
        if self.reasoning is None or not isinstance(self._tokenizer, RendersTools):
            return False
        given: Any = {"arguments": arguments} if arguments and isinstance(self._tokenizer, TakesArguments) else {}
        try:
            return self._tokenizer.render_chat(_QUESTION, **given).rstrip().endswith(self.reasoning.begin)
        except InvalidPrompt:
            return False

    def _is_left_open(self, messages: Any) -> bool:
        last = messages[-1] if isinstance(messages, list | tuple) and messages else None
        if self.reasoning is None or not isinstance(last, Mapping):
            return False
        text = Chat.joined_parts(f"messages[{len(messages) - 1}].content", last.get("content"))
        if not isinstance(text, str):
            return False
        return self.reasoning.begin in text and self.reasoning.end not in text.rpartition(self.reasoning.begin)[2]

    def _of(self, chat: Chat) -> ChatFormat:
        """Return the format of the completions of a chat that is rendered out of the ordinary."""
        # Why before: what was found once is found for all.
        _ = self.special_ids
        own = copy(self)
        own.__dict__.pop("opens_reasoning", None)
        if chat.continue_final_message:
            own._opens_reasoning = lambda: self._is_left_open(chat.messages)
        else:
            own._opens_reasoning = lambda: self._is_opened(chat.rendering)
        return own

    @property
    def template_arguments(self) -> frozenset[str]:
        """The names of the arguments that the chat template reads, such as ``enable_thinking``."""
        return self._tokenizer.template_arguments if isinstance(self._tokenizer, TakesArguments) else frozenset()

    def arguments(
        self, given: Any, effort: Any = None, what: str = "template_arguments"
    ) -> Mapping[str, Any]:
        """Return the arguments of a chat's template: those given, and those that an effort of reasoning becomes.

        Args:
            given: names with values; ``None``: none.
            effort: "none", "minimal", "low", "medium", "high", "xhigh", "max"; ``None``: nothing is said of it. Where
                the template reads nothing of the kind, it has no effect.
            what: how a door calls them.

        Raises:
            InvalidRequest: an argument or the effort is none, the template does not read it, or models of this format
                do not know the effort.
        """
        names, arguments = self.template_arguments, validate_arguments(what, given)
        require_read(what, arguments, names)
        known = EFFORTS if self.reasoning is None else self.reasoning.efforts
        return {**arguments_of_effort(effort, names, known), **arguments}

    @cached_property
    def special_ids(self) -> dict[str, int]:
        """The markers of both formats that texts of completions lack, because they are special tokens."""
        found, tokenizer = dict[str, int](), self._tokenizer
        if tokenizer is None:
            return found
        for form in (self.tools, self.reasoning):
            for marker in form.markers if form is not None else ():
                ids = tokenizer.encode(marker, add_special_tokens=False)
                if len(ids) == 1 and not tokenizer.decode(ids):
                    found[marker] = ids[0]
        return found

    def turn(
        self, prompt: Any, params: SamplingParams, tool_choice: object = None, is_parallel: bool = True
    ) -> ChatTurn:
        """Say how a completion of ``prompt`` is constrained and read.

        Args:
            prompt: as the engine gets it; only a ``Chat`` has tools.
            params: of the request.
            tool_choice: "auto", "none", "required" or ``{"type": "function", "function": {"name": ...}}``; ``None``
                is "auto".
            is_parallel: whether the model may call several tools at once.

        Raises:
            InvalidTools: the choice is none of these, there is no tool to choose, or it is not known how this model
                writes calls.
        """
        if type(prompt) is Chat and prompt.rendering:
            return self._of(prompt)._turn(prompt, params, tool_choice, is_parallel)
        return self._turn(prompt, params, tool_choice, is_parallel)

    def _turn(self, prompt: Any, params: SamplingParams, tool_choice: object, is_parallel: bool) -> ChatTurn:
        tools = prompt.functions if type(prompt) is Chat else []
        is_required, named = _read_choice(tool_choice, [tool["name"] for tool in tools])
        chosen = [tool for tool in tools if tool["name"] in named]
        form = self.tools if tools else None
        if chosen and form is None:
            raise InvalidTools("tools", len(tools), "none, because it is not known how this model writes calls",
                               "Name a format with tool_parser=..., or choose none of them.")
        grammar = self._grammar(form, params, chosen, is_required, is_parallel)
        if grammar is not None:
            params = replace(params, structured=StructuredOutput(lark=grammar))
        # Why: structured output that has no reasoning before it begins with content, whatever the prompt ends with.
        reasoning = None if params.structured is not None and grammar is None else self.reasoning
        if params.stop and reasoning is not None and params.stop_outside is None:
            # Why: what a model thinks is none of what the caller asked to have cut.
            params = replace(params, stop_outside=self._marks_around_answer(reasoning))
        if not chosen and reasoning is None:
            return ChatTurn(params, None, self)
        schemas = {tool["name"]: tool.get("parameters") or {} for tool in chosen}
        new_parser = partial(self._new_parser, form if chosen else None, schemas, reasoning)
        return ChatTurn(params, new_parser, self, has_reasoning=reasoning is not None)

    def _grammar(
        self, form: ToolFormat | None, params: SamplingParams, tools: Sequence[dict[str, Any]], is_required: bool,
        is_parallel: bool,
    ) -> str | None:
        """Return the Lark grammar of completions; ``None`` if the parameters say all that there is to say."""
        wanted, answer = params.structured, ""
        if wanted is not None:
            if wanted.kind not in ("json_schema", "json_object"):
                if tools:
                    limit = "a JSON schema where there are tools"
                    raise InvalidTools("structured", wanted.kind, limit, is_described=True)
                return None
            answer = f"%json {_schema_of(wanted)}"
        reasoning = self._reasoning_rules()
        if answer and not tools:
            if isinstance(self.reasoning, ReadsAnswers):
                return self.reasoning.grammar((), ToolGrammar(self.template, self.special_ids, answer=answer))
            if reasoning is None:
                return None
            return "\n".join([f"start: {reasoning.thought_if_any} answer", f"answer: {answer}", *reasoning.rules])
        if form is None:
            return None
        grammar = ToolGrammar(self.template, self.special_ids, is_parallel, is_required, reasoning, answer)
        rules = form.grammar(tools, grammar)
        if rules is None and (is_required or answer):
            raise InvalidTools("tool_choice", "a call, or structured output", "auto or none without structured output",
                               "The format of this model's calls has no grammar.", is_described=True)
        return rules

    def _reasoning_rules(self) -> ReasoningRules | None:
        """Return the rules of a completion's reasoning; ``None`` if the model writes none."""
        if self.reasoning is None:
            return None
        is_open = self.opens_reasoning
        begin, end = (f"<[{self.special_ids[tag]}]>" if tag in self.special_ids else ""
                      for tag in (self.reasoning.begin, self.reasoning.end))
        # Why with line breaks: completions often begin with one, and what reads them leaves it out.
        begins = () if begin else tuple(f"{blank}{self.reasoning.begin}" for blank in ("", "\n", "\n\n"))
        opening, rules = "" if is_open else begin, list[str]()
        if begins and not is_open:
            opening, rules = "OPENING", [f"OPENING: {' | '.join(map(quoted, begins))}"]
        if end:
            rest, rules = f"THOUGHT {end}", [*rules, "THOUGHT: /(?s:.*)/"]
        else:
            tag = in_regex(self.reasoning.end)
            rest, rules = "thinking", [*rules, f"thinking[lazy]: /(?s:.*){tag}/",
                                       f"THOUGHT: /(?s:.*)/ & ~/(?s:.*){tag}(?s:.*)/"]
        return ReasoningRules(
            rf"{opening} {rest} /\s{{0,4}}/", f"{opening} THOUGHT", is_open, begins, rules,
        )

    def _new_parser(
        self, form: ToolFormat | None, names: Mapping[str, Any], reasoning: ReasoningFormat | None
    ) -> OutputParser:
        if isinstance(reasoning, ReadsAnswers):
            return reasoning.new_parser(names, default_id)
        parser: OutputParser = form.new_parser(names, form.new_id) if form is not None else _Text()
        return parser if reasoning is None else ReasoningParser(reasoning, parser, is_open=self.opens_reasoning)

    def new_reasoning(self) -> UnsearchedSpan | None:
        """Return what follows the tokens of a completion's reasoning; ``None`` if the model writes none."""
        if self._tokenizer is None or self.reasoning is None:
            return None
        return UnsearchedSpan(self._tokenizer.new_detokenizer(), *self._marks_of_reasoning(self.reasoning))

    def _marks_of_reasoning(self, form: ReasoningFormat) -> tuple[str | int, str | int]:
        """Return beginning and end, in text that does not show special tokens."""
        return self._marks(form.begin, form.end, is_shown=False)

    def _marks_around_answer(
        self, form: ReasoningFormat, *, is_shown: bool = False
    ) -> tuple[str | int, str | int]:
        """Return between which marks no stop string is looked for, in text that shows special tokens or does not."""
        return self._marks(form.begin, form.end + form.head_of_answer, is_shown=is_shown)

    def _marks(self, *tags: str, is_shown: bool) -> tuple[str | int, str | int]:
        begin, end = (self.special_ids.get(tag, tag if is_shown else self._without_markers(tag)) for tag in tags)
        return ("" if self.opens_reasoning else begin), end

    def _without_markers(self, text: str) -> str:
        for marker in self.special_ids:
            text = text.replace(marker, "")
        return text

    def new_text(self, params: SamplingParams) -> IncrementalText | None:
        """Return what makes text with the markers of tokens; ``None`` if the text of completions has them all."""
        if self._tokenizer is None or not self.special_ids or not params.skip_special_tokens:
            return None
        detokenizer = ShowsMarkers(self._tokenizer.new_detokenizer, self.special_ids)
        outside = params.stop_outside
        if self.reasoning is not None and outside == self._marks_around_answer(self.reasoning):
            outside = self._marks_around_answer(self.reasoning, is_shown=True)
        return IncrementalText(detokenizer, params.stop, params.min_tokens, outside,
                               keeps_stop=params.include_stop_str_in_output)


@dataclass(frozen=True)
class ChatTurn:
    """How the completions of one request are constrained and read."""

    params: SamplingParams
    """With the grammar of calls."""
    _new_parser: Callable[[], OutputParser] | None
    _form: ChatFormat
    has_reasoning: bool = False
    """Whether completions may begin with reasoning."""

    @property
    def is_plain(self) -> bool:
        """Whether completions are content and nothing else."""
        return self._new_parser is None

    def reader(self) -> CompletionReader:
        """Return what reads one completion."""
        if self._new_parser is None:
            return CompletionReader(None, None)
        reasoning = self._form.new_reasoning() if self.has_reasoning else None
        return CompletionReader(self._new_parser(), self._form.new_text(self.params), reasoning)


class CompletionReader:
    """Turns the deltas of one completion into events.

    Invariant: all errors of a format, which may be a third party's, are ``TextFailed``.
    """

    def __init__(
        self, parser: OutputParser | None, text: IncrementalText | None, reasoning: UnsearchedSpan | None = None
    ) -> None:
        self._parser, self._text, self._reasoning = parser, text, reasoning
        self._num_calls = self._num_ended = 0
        self.num_reasoning_tokens = 0
        """Tokens read so far that are reasoning, with its marks."""

    def read(self, delta: Delta) -> list[ChatEvent]:
        """Return the events of the next delta; the last one ends what is read. Raises ``TextFailed``."""
        return self._read(delta, delta.finish_reason is not None)

    def reason(self, ended: Delta | CompletionOutput) -> str | None:
        """Return why a completion that was read has ended, as chats say it: "tool_calls" for calls that all have their
        end, where it ended by itself.
        """
        is_called = ended.finish_reason == "stop" and self._num_calls > 0 and self._num_calls == self._num_ended
        return "tool_calls" if is_called else ended.finish_reason

    def read_all(self, completion: CompletionOutput) -> ParsedCompletion:
        """Return a whole completion. Raises ``TextFailed``."""
        return collect(self.read_completion(completion))

    def read_completion(self, completion: CompletionOutput) -> list[ChatEvent]:
        """Return the events of a whole completion. Raises ``TextFailed``."""
        return self._read(completion, True)

    def _read(self, given: Delta | CompletionOutput, is_last: bool) -> list[ChatEvent]:
        parser, text = self._parser, given.text
        if parser is None:
            return [ContentDelta(text)] if text else []
        if self._text is not None:
            text = self._text.push(given.token_ids).text + (self._text.finish() if is_last else "")
        try:
            self._count_reasoning(given.token_ids, is_last)
            events = parser.push(text) if text else []
            if is_last:
                is_cut = given.finish_reason != "stop" or given.stop_reason is not None
                events = [*events, *(cut_off(parser) if is_cut else parser.finish())]
        except Exception as error:  # the format may be a third party's; its failure is this completion's
            raise TextFailed(f"the parser of this completion failed: {type(error).__name__}") from error
        for event in events:
            self._num_calls += isinstance(event, ToolCallStart)
            self._num_ended += isinstance(event, ToolCallEnd)
        return events


    def _count_reasoning(self, token_ids: Sequence[int], is_last: bool) -> None:
        if (span := self._reasoning) is None:
            return
        for token_id in token_ids:
            self.num_reasoning_tokens += 1
            if span.push(token_id)[1] is not None:
                self._reasoning = None
                break
        if not span.is_inside and (is_last or self._reasoning is None):
            self.num_reasoning_tokens = 0


class _Text:
    """The parser of completions without calls."""

    def push(self, text: str) -> list[ChatEvent]:
        return [ContentDelta(text)] if text else []

    def finish(self) -> list[ChatEvent]:
        return []


def _read_choice(choice: object, names: Sequence[str]) -> tuple[bool, Sequence[str]]:
    """Return whether a call has to be made, and of which tools. Raises ``InvalidTools``."""
    if choice is None or choice == "auto":
        return False, names
    if choice == "none":
        return False, ()
    if choice == "required" and names:
        return True, names
    if choice == "required":
        raise InvalidTools("tool_choice", "'required'", "auto or none without tools", is_described=True)
    function = choice.get("function") if isinstance(choice, Mapping) and choice.get("type") == "function" else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if isinstance(name, str) and name in names:
        return True, (name,)
    if name is not None:
        raise InvalidTools("tool_choice", name, "a tool that is given in tools")
    limit = 'auto, none, required or {"type": "function", "function": {"name": "..."}}'
    raise InvalidTools("tool_choice", choice, limit)


def _schema_of(wanted: StructuredOutput) -> str:
    """Return the JSON schema of structured output, with bounded whitespace, as the engine compiles it."""
    schema = json.loads(wanted.json_schema or '{"type": "object"}')
    return json.dumps({**schema, "x-guidance": {"whitespace_pattern": WHITESPACE}})
