"""From what a caller wrote to something the scheduler can run: the one way in, for every door.

Tokenises, validates completely and resolves defaults without touching the engine's state: it is safe to call from any
thread, and a request that it refuses was never accepted. Next: ``request_table``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as ListOf
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Final

from pagedcore.embedding_defaults import EmbeddingDefaults
from pagedcore.errors import (
    InvalidGrammar,
    InvalidPrompt,
    InvalidRequest,
    InvalidSampling,
    InvalidTools,
    PagedcoreError,
    RequestStateError,
    TextFailed,
    TooManySequences,
    UnknownAdapter,
)
from pagedcore.generation_defaults import GenerationDefaults
from pagedcore.outputs import RequestOutput, TokenText
from pagedcore.protocols import ChatMessage, Constraint, NamesTokens, RendersTools, Tokenizer
from pagedcore.request_options import OPTIONS, RequestOptions
from pagedcore.requests import validation
from pagedcore.requests.infill import Infill, encode_infill, require_no_gap
from pagedcore.requests.request import ReadsHidden
from pagedcore.sampling_params import SamplingParams, validate_params
from pagedcore.structured_output import CompilesGrammars
from pagedcore.text_head import PairDefaults, TextHead
from pagedcore.tokenizer.chat import Chat, require_continuable, tools_length, uses_tools, validate_chat
from pagedcore.tokenizer.incremental_text import ShowsSpecialTokens
from pagedcore.tokenizer.template_arguments import TakesArguments, require_read

Prompt = str | ListOf[int] | ListOf[ChatMessage] | Chat | Infill
"""Text, token ids, chat messages (mappings with "role" and "content"), a ``Chat``, which has tools too, or an
``Infill``, the text around a gap."""


NO_PAIRS: Final = PairDefaults(refusal="its backend has no head for that")


@dataclass(frozen=True, slots=True)
class ProcessedRequest:
    """A request that was validated: everything resolved, nothing allocated."""

    token_ids: list[int]
    """Of a further turn, the new ones."""
    params: SamplingParams
    options: RequestOptions
    max_tokens: int
    stop_token_ids: frozenset[int]
    has_candidates: bool
    """As ``SamplingParams.has_candidates``."""
    constraint: Constraint | None = None
    """What the completion has to look like."""
    context: object = None
    """What an observer says that the request belongs to, where it was submitted."""
    new_reader: Callable[[], ReadsHidden] | None = None
    """Makes what reads the hidden states of a request that generates nothing."""
    num_unscored: int | None = None
    """Of a request that generates nothing and is scored: how many positions at its beginning are not."""
    scored_as: ProcessedRequest | None = None
    """The request whose completion such a one is taken to be, if that is not scored by the model's own distribution."""


@dataclass(frozen=True, slots=True)
class InputProcessor:
    """The engine's validator, with the bounds of one model and one KV pool."""

    tokenizer: Tokenizer | None
    vocab_size: int
    max_model_len: int
    """Positions of the model, as configured."""
    num_pool_tokens: int
    """Positions that the whole KV pool can hold."""
    max_num_waiting: int
    """Sequences that may wait; a request has to fit the queue when it is empty."""
    eos_token_ids: frozenset[int]
    unread_options: Mapping[str, Any] = field(default_factory=dict)
    """Options that the scheduling policy does not look at, with the values that mean nothing."""
    grammars: CompilesGrammars | None = None
    """Compiles what asks for structured output; ``None``: it is refused."""
    context: Callable[[], object] = lambda: None
    """What a request that is processed at the moment belongs to."""
    control_tokens_in_chats: bool = False
    """As ``EngineConfig`` has it."""
    defaults: GenerationDefaults = field(default_factory=GenerationDefaults)
    """The model's own parameters."""
    embeddings: EmbeddingDefaults = field(default_factory=EmbeddingDefaults)
    """What the model says of vectors of texts."""
    hidden_size: int = 0
    """Numbers of a vector; 0: the backend returns no hidden states."""
    head: TextHead | None = None
    """What makes numbers of a text's last hidden state."""
    pairs: PairDefaults = NO_PAIRS
    """How a query and a document become a text."""
    find_adapter: Callable[[str], object] = lambda name: _no_adapter(name)
    """Raises ``UnknownAdapter`` for a name that no adapter is loaded under."""

    def process(
        self, prompt: Prompt, params: SamplingParams | None, options: RequestOptions, known: list[int] | None = None
    ) -> ProcessedRequest:
        """Validate and resolve a request, or a turn after the tokens ``known``. Raises as ``Engine.add_request``."""
        if known is None:
            if not self.embeddings.generates:
                limit = "asked for classes, by classify()" if self.head else "asked for embeddings, by embed()"
                raise InvalidRequest("model", "one without an output layer", limit, is_described=True)
            self.check_options(options)
        if type(params) is not SamplingParams:
            params = validate_params(params)
        asked = params
        if self.defaults.parameters or self.defaults.suppress_tokens:
            params = self.defaults.apply(params)
        if params.bad_words:
            params = self._with_bad_sequences(params)
        if not params.skip_special_tokens:
            self._require_special_tokens()
        num_known = len(known or ())
        stop_token_ids, has_candidates = self.stop_token_ids(params), params.has_candidates
        num_initial, num_sequences = params.num_initial_sequences, params.num_sequences
        validation.check_params_for_model(params, self.vocab_size)
        if num_initial > self.max_num_waiting:
            limit = f"up to max_num_waiting ({self.max_num_waiting})"
            raise TooManySequences("n" if params.n == num_initial else "best_of", num_initial, limit)
        if isinstance(prompt, str):
            validation.validate_text(prompt, self.max_model_len)
            given: object = self._encode(prompt, adds_special_tokens=known is None)
        elif type(prompt) is Infill:
            if known is not None:
                require_no_gap(prompt)
            with _tokenizing():
                given, ends = encode_infill(prompt, params, self.tokenizer, self.max_model_len)
            stop_token_ids |= ends
        else:
            given = self._chat_ids(prompt, known) if is_chat(prompt) else prompt
        if params.truncate_prompt_tokens is not None:
            given = self._truncated(given, params, num_known)
        token_ids = validation.validate_prompt_ids(given, self.vocab_size, self.max_model_len - num_known)
        num_prompt, longest = num_known + len(token_ids), self.max_model_len
        if params.max_tokens is None:
            longest = max(min(longest, self.num_pool_tokens), num_prompt + 1)
        if params is not asked and asked.min_tokens < longest - num_prompt < params.min_tokens:
            params = replace(params, min_tokens=longest - num_prompt)
        max_tokens = validation.resolve_max_tokens(params, num_prompt, longest)
        if params.return_logits:
            validation.check_returned_logits(params, max_tokens, self.vocab_size)
        validation.check_fits_pool(num_prompt, max_tokens, num_sequences, self.num_pool_tokens)
        return ProcessedRequest(
            token_ids, params, options, max_tokens, stop_token_ids, has_candidates,
            None if params.structured is None else self.constraint_of(params, options.owner), self.context(),
        )

    def tokens_of_text(self, text: str, *, adds_special_tokens: bool = True) -> list[int]:
        """Tokenise text. Raises ``InvalidRequest`` for what is none, or too long, or without a tokenizer; and
        ``TextFailed``.
        """
        validation.validate_text(text, self.max_model_len)
        return self._encode(text, adds_special_tokens=adds_special_tokens)

    def tokens_of_chat(self, chat: Chat) -> list[int]:
        """Return the tokens of a chat that nobody answers. Raises as ``render``, and ``TextFailed``."""
        return self._chat_ids(chat, None)

    def tokens_of(self, tokenize: Callable[[], list[int]]) -> list[int]:
        """Return what a call of the tokenizer returns. Raises what it raises that is typed, else ``TextFailed``."""
        with _tokenizing():
            return tokenize()

    def longest_text(self, max_tokens: int | None) -> int:
        """Return the tokens of the longest text that generates nothing, if its defaults allow so many."""
        return min(self.max_model_len, self.num_pool_tokens - 1, max_tokens or self.max_model_len)

    def _encode(self, text: str, *, adds_special_tokens: bool) -> list[int]:
        if self.tokenizer is None:
            raise _needs_tokenizer("text")
        with _tokenizing():
            return self.tokenizer.encode(text, add_special_tokens=adds_special_tokens)

    def with_defaults(self, params: SamplingParams | None) -> SamplingParams:
        """Return a request's parameters with the model's own where it gave none. Raises ``InvalidSampling``."""
        return self.defaults.apply(validate_params(params))

    def process_further(
        self, output: RequestOutput, index: int | None, prompt: Prompt, params: SamplingParams | None,
        options: RequestOptions,
    ) -> ProcessedRequest:
        """Validate and resolve a request that continues a completion of another one. Raises as ``Request.extend``."""
        if type(output) is not RequestOutput:
            raise InvalidRequest("output", output, "the RequestOutput of a finished request")
        if not output.is_finished:
            raise RequestStateError("extend", "running", "finished", "Wait for its end.")
        completion = output.outputs[validation.index_of_completion(index, len(output.outputs))]
        # Why checked: an output may be made by hand, and kernels take token ids as places in memory.
        known = validation.validate_prompt_ids(
            [*output.prompt_token_ids, *completion.token_ids], self.vocab_size, self.max_model_len + 1
        )
        self.check_options(options)
        processed = self.process(prompt, params, options, known)
        return replace(processed, token_ids=[*known, *processed.token_ids])

    def constraint_of(self, params: SamplingParams, owner: bytes = b"") -> Constraint | None:
        """Compile what a completion has to look like, ``None`` for nothing. Raises as ``CompilesGrammars.compile``."""
        if params.structured is None:
            return None
        if self.grammars is None:
            raise InvalidGrammar("structured", params.structured, "None with this engine")
        return self.grammars.compile(params.structured, owner)

    def check_options(self, options: RequestOptions) -> None:
        """Raise ``InvalidRequest`` for an option that the scheduling policy would ignore, ``UnknownAdapter`` too."""
        if options.lora is not None:
            self.find_adapter(options.lora)
        for name, neutral in self.unread_options.items():
            if (given := getattr(options, name)) != neutral:
                reader = OPTIONS[name].reader
                advice = f'Build the engine with scheduling_policy="{reader.policy}".' if reader is not None else ""
                limit = f"{neutral} under this scheduling policy, which does not look at it"
                raise InvalidRequest(name, given, limit, advice)

    def stop_token_ids(self, params: SamplingParams) -> frozenset[int]:
        """Return the model's end tokens and the request's stop tokens."""
        return self.eos_token_ids.union(params.stop_token_ids)

    def _with_bad_sequences(self, params: SamplingParams) -> SamplingParams:
        """Return parameters whose words are sequences of tokens, each with and without a space before it."""
        if self.tokenizer is None:
            raise InvalidSampling("bad_words", params.bad_words, "() without a tokenizer", "Give bad_words_ids.")
        with _tokenizing():
            texts = (before + word.lstrip() for word in params.bad_words for before in ("", " "))
            found = dict.fromkeys(tuple(self.tokenizer.encode(text, add_special_tokens=False)) for text in texts)
        own = tuple(one for one in found if one)
        return replace(params, bad_words=(), bad_words_ids=tuple(dict.fromkeys((*params.bad_words_ids, *own))))

    def _require_special_tokens(self) -> None:
        if not isinstance(self.tokenizer, ShowsSpecialTokens):
            raise InvalidSampling("skip_special_tokens", False, "True with this tokenizer, or without one")
        with _tokenizing():
            # Why here: the first one of a tokenizer takes long, and the engine's thread shall not wait for it.
            self.tokenizer.new_full_detokenizer()

    def _truncated(self, given: Any, params: SamplingParams, num_known: int) -> Any:
        most = params.truncate_prompt_tokens or -1
        if most < 0:
            most = max(1, self.max_model_len - (params.max_tokens or 1) - num_known)
        return given[-most:] if isinstance(given, list | tuple) else given

    def token_text(self, token_id: int) -> TokenText:
        """Return what a token stands for. Raises ``InvalidRequest`` outside of the vocabulary, and ``TextFailed``."""
        validation.validate_prompt_ids([token_id], self.vocab_size, 2)
        if self.tokenizer is None:
            return TokenText("", None)
        with _tokenizing():
            if isinstance(self.tokenizer, NamesTokens):
                return self.tokenizer.token_text(token_id)
            # Why: a tokenizer of the user's own need not have more than its protocol says.
            text = self.tokenizer.decode([token_id])
        return TokenText(text, text.encode() if text and "\ufffd" not in text else None)

    def text_of(self, token_ids: ListOf[int]) -> str:
        """Return the text of tokens, special ones left out. Raises ``InvalidRequest``, and ``TextFailed``."""
        ids = validation.validate_prompt_ids(token_ids, self.vocab_size, self.max_model_len + 1)
        if self.tokenizer is None:
            raise InvalidPrompt("tokens", token_ids, "used with a tokenizer, which this engine does not have")
        with _tokenizing():
            return self.tokenizer.decode(ids)

    def render(self, chat: Chat) -> str:
        """Return a chat as its template writes it. Raises ``InvalidRequest``, also without a template in Jinja."""
        messages, tokenizer, options = self._chat(chat)
        if not isinstance(tokenizer, RendersTools):
            raise InvalidPrompt("messages", type(tokenizer), "used with a tokenizer that has a chat template")
        options.pop("control_tokens", None)
        with _tokenizing():
            return tokenizer.render_chat(messages, **options)

    def _chat_ids(self, chat: Any, known: list[int] | None) -> list[int]:
        messages, tokenizer, options = self._chat(chat)
        with _tokenizing():
            if known is None:
                return tokenizer.encode_chat(messages, **options)
            return tokenizer.encode_chat_turn(messages, known, **options)

    def _chat(self, chat: Any) -> tuple[list[ChatMessage], Tokenizer, dict[str, Any]]:
        """Return the messages of a chat, what renders them, and with which options."""
        tools: ListOf[Mapping[str, Any]] = ()
        has_control_tokens = self.control_tokens_in_chats
        of_chat = chat if type(chat) is Chat else None
        if of_chat is not None:
            has_control_tokens |= of_chat.control_tokens
            chat, tools = of_chat.messages, of_chat.tools
        messages = validate_chat(chat, self.max_model_len, tools_length(tools))
        tokenizer = self.tokenizer
        if tokenizer is None:
            raise _needs_tokenizer("chat messages")
        options: dict[str, Any] = {}
        with _tokenizing():
            if of_chat is not None and of_chat.rendering:
                options["arguments"] = _arguments_for(tokenizer, of_chat, messages)
            if tools or uses_tools(messages):
                if not isinstance(tokenizer, RendersTools) or not tokenizer.knows_tools:
                    raise InvalidTools("tools", len(tools), "none, nor calls or results of calls in messages",
                                       "The chat template of this model does not know tools.")
                options["tools"] = tools
            # Why: a tokenizer of the user's own that renders no tools decides on contents itself.
            if has_control_tokens and isinstance(tokenizer, RendersTools):
                options["control_tokens"] = True
        return messages, tokenizer, options


def _no_adapter(name: str) -> None:
    raise UnknownAdapter.named(name)


def _arguments_for(tokenizer: Tokenizer, chat: Chat, messages: ListOf[ChatMessage]) -> Mapping[str, Any]:
    """Return what the template of a chat is told. Raises ``InvalidPrompt`` for what this one cannot be told."""
    names = tokenizer.template_arguments if isinstance(tokenizer, TakesArguments) else frozenset[str]()
    require_read("template_arguments", chat.template_arguments, names)
    if not isinstance(tokenizer, TakesArguments):
        raise InvalidPrompt("add_generation_prompt", False, "True with this tokenizer, which ends all chats alike")
    if chat.continue_final_message:
        require_continuable(messages)
    return chat.rendering


@contextmanager
def _tokenizing() -> Iterator[None]:
    """Raise ``TextFailed`` for an error of a tokenizer, which may be the user's own, but not for its refusal."""
    try:
        yield
    except PagedcoreError:
        raise
    except Exception as error:
        raise TextFailed(f"the tokenizer failed on the prompt of this request: {type(error).__name__}") from error


def _needs_tokenizer(kind: str) -> InvalidPrompt:
    advice = "This engine has no tokenizer; pass tokenizer=... or ids."
    return InvalidPrompt("prompt", kind, "token ids", advice, is_described=True)


def is_single(prompts: Any) -> bool:
    """Whether what was given as prompts is one prompt by its type: a chat, or a gap with the text around it."""
    return type(prompts) is Infill or is_chat(prompts)


def is_chat(prompt: Any) -> bool:
    """Whether a prompt is one list of messages, or a ``Chat``, as far as the first of them tells."""
    has_messages = isinstance(prompt, list | tuple) and len(prompt) > 0 and isinstance(prompt[0], Mapping)
    return has_messages or type(prompt) is Chat
