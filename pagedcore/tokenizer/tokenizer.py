"""``HFTokenizer``: the ``Tokenizer`` port over a tokenizer of transformers.

It chooses the detokenizer and raises the typed errors of loading and encoding. It never truncates, pads, or cleans up
spaces. Chat templates are in ``chat_template``, incremental decoding in ``detokenizer_choice``.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from copy import copy
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Final

from tokenizers import AddedToken

from pagedcore.config.limits import MAX_CHAT_BYTES, MAX_VOCABULARY
from pagedcore.errors import InvalidConfig, InvalidText, MissingDependency, describe
from pagedcore.outputs import TokenText
from pagedcore.protocols import ChatMessage, Detokenizer
from pagedcore.tokenizer.chat_contents import ChatContents, Render
from pagedcore.tokenizer.chat_template import (
    apply_chat_template,
    arguments_read,
    knows_tools,
    problem_of,
    render_turn,
    template_source,
)
from pagedcore.tokenizer.detokenizer_choice import DetokenizerFactory, choose_detokenizer
from pagedcore.tokenizer.infill import InfillTokens
from pagedcore.tokenizer.other_files import missing_packages, tokenizer_file
from pagedcore.tokenizer.quick_tokenizer import PLAIN_CLASSES, QuickTokenizer, read_tokenizer
from pagedcore.tokenizer.template_arguments import NO_ARGUMENTS
from pagedcore.tokenizer.text_size import count_text_bytes

_LONG_TEXT: Final = 1024
"""Characters that take about half a millisecond to tokenise."""


class HFTokenizer:
    """Text to token ids and back with a tokenizer of transformers; safe to use from several threads.

    Encoding a short text starts no worker thread. The given tokenizer is not changed, except that its truncation and
    padding are switched off, as its own calls without them do. ``is_shared`` says whether other code may change it.

    Invariant: ``new_detokenizer`` and ``decode`` give the same text for the same tokens.

    Raises:
        InvalidConfig: it has no vocabulary, or ids that no vocabulary has.
    """

    def __init__(self, tokenizer: Any, *, is_shared: bool = True) -> None:
        self._tokenizer = tokenizer
        self._is_shared = is_shared
        self._backend = _plain_backend(tokenizer)
        self._eos_token_ids = frozenset(() if tokenizer.eos_token_id is None else (int(tokenizer.eos_token_id),))
        vocabulary = {token_id: token for token, token_id in tokenizer.get_vocab().items()}
        if (largest := max(vocabulary, default=0)) >= MAX_VOCABULARY:
            raise InvalidConfig(f"tokenizer: a token has the id {largest}, allowed are ids below {MAX_VOCABULARY}.")
        self._added_ids = added_ids = {*getattr(tokenizer, "added_tokens_decoder", ()), *tokenizer.all_special_ids}
        # Why: for some models transformers makes an empty tokenizer when its files are missing.
        if vocabulary.keys() <= added_ids:
            raise InvalidConfig("tokenizer: it has no vocabulary; its files are missing from the directory.")
        self._new_detokenizer = choose_detokenizer(self.decode, vocabulary, sorted(added_ids), self._backend)

    @classmethod
    def from_directory(cls, path: str | os.PathLike[str], trust_remote_code: bool = False) -> HFTokenizer:
        """Load a tokenizer from a directory, without fetching anything, or else by its name on the hub.

        Raises:
            InvalidConfig: there is no tokenizer, its files are damaged, or it needs code that is not trusted.
            MissingDependency: it is in a file that takes a package to read.
        """
        # Why: transformers and tokenizers raise many types here, the bare Exception among them, and for damaged files
        # make objects whose members raise.
        try:
            quick = read_tokenizer(Path(path))
            return cls(_load_with_transformers(path, trust_remote_code) if quick is None else quick, is_shared=False)
        except Exception as error:
            if missing := missing_packages(name := tokenizer_file(Path(path))):
                raise MissingDependency(
                    f"tokenizer: it is in {name}, for which {' and '.join(missing)} must be installed. Do "
                    "that, or put tokenizer.json and tokenizer_config.json beside it."
                ) from error
            if isinstance(error, InvalidConfig):
                raise
            raise InvalidConfig(
                f"tokenizer: cannot be loaded ({type(error).__name__}). Expected a directory with tokenizer.json and "
                "tokenizer_config.json, or a name on the hub; one that brings its own code needs trust_remote_code."
            ) from error

    @classmethod
    def from_transformers(cls, tokenizer: Any) -> HFTokenizer:
        """Wrap a loaded tokenizer of transformers.

        Raises:
            InvalidConfig: it is something else.
        """
        from transformers import PreTrainedTokenizerBase

        if not isinstance(tokenizer, PreTrainedTokenizerBase):
            raise InvalidConfig(f"tokenizer: got {describe(tokenizer)}, allowed is a tokenizer of transformers.")
        return cls(tokenizer)

    def with_chat_template(self, source: str) -> HFTokenizer:
        """Return the same tokenizer with another chat template.

        Raises:
            InvalidConfig: it is no template.
        """
        if (problem := problem_of(source)) is not None:
            raise InvalidConfig(f"chat_template: {problem}")
        tokenizer = copy(self._tokenizer)
        tokenizer.chat_template = source
        return HFTokenizer(tokenizer, is_shared=self._is_shared)

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """The tokenizer's end-of-sequence token; empty if it has none."""
        return self._eos_token_ids

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Tokenise plain text; special tokens written out in it become those tokens.

        Raises:
            InvalidText: the text holds a lone surrogate, which no encoding of Unicode has.
        """
        try:
            text.encode()
        except UnicodeEncodeError:
            raise InvalidText("text", text, "text without lone surrogates") from None
        backend = self._backend
        # Why: the wrapper of transformers sets the backend's truncation and padding, and starts a thread pool.
        if backend is None or backend.truncation is not None or backend.padding is not None:
            return list(self._tokenizer.encode(text, add_special_tokens=add_special_tokens))
        if len(text) <= _LONG_TEXT or self._is_shared:
            encoding = backend.encode(text, add_special_tokens=add_special_tokens)
        else:
            # Why: this one releases the interpreter's lock. While it runs the tokenizer must not be changed, which the
            # host may do with a tokenizer of its own.
            (encoding,) = backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        ids: list[int] = encoding.ids
        return ids

    def encode_pair(self, first: str, second: str) -> list[int]:
        """Tokenise two texts that belong together, with the tokens around them of the tokenizer's own.

        Raises:
            InvalidText: a text holds a lone surrogate.
        """
        for name, text in (("first", first), ("second", second)):
            count_text_bytes(name, text, MAX_CHAT_BYTES)
        backend = self._backend
        if backend is None or backend.truncation is not None or backend.padding is not None:
            return list(self._tokenizer.encode(first, second))
        ids: list[int] = backend.encode(first, second).ids
        return ids

    @property
    def chat_template(self) -> str:
        """The source of the chat template, of all its variants; empty if there is none."""
        return template_source(self._tokenizer)

    @cached_property
    def knows_tools(self) -> bool:
        """Whether the chat template writes tools into the prompt."""
        return knows_tools(self._tokenizer)

    @cached_property
    def template_arguments(self) -> frozenset[str]:
        """The names of the arguments that the chat template reads, such as ``enable_thinking``."""
        return arguments_read(self._tokenizer)

    def render_chat(
        self, messages: Sequence[ChatMessage], *, tools: Sequence[Mapping[str, Any]] = (),
        arguments: Mapping[str, Any] = NO_ARGUMENTS,
    ) -> str:
        """Render the chat template up to where the assistant's completion begins. Raises as ``encode_chat``."""
        return str(apply_chat_template(self._tokenizer, messages, tokenize=False, tools=tools, arguments=arguments))

    def encode_chat(
        self, messages: Sequence[ChatMessage], *, tools: Sequence[Mapping[str, Any]] = (), control_tokens: bool = False,
        arguments: Mapping[str, Any] = NO_ARGUMENTS,
    ) -> list[int]:
        """Render the chat template up to where the assistant's completion begins, and tokenise it.

        The text of a control token in messages, tools or arguments is ordinary text, unless ``control_tokens`` are
        asked for.

        Raises:
            InvalidPrompt: there is no chat template, or it refuses the messages; or they have the text of a control
                token, and this tokenizer reads such text in one way only.
            InvalidText: the messages hold a lone surrogate.
        """
        render = partial(apply_chat_template, self._tokenizer, tokenize=False)
        if self._backend is not None:
            return self._encode_contents(render, messages, tools, control_tokens, arguments)
        ids = list(apply_chat_template(self._tokenizer, messages, tokenize=True, tools=tools, arguments=arguments))
        return ids if control_tokens else self._contents.checked(ids, None, render, messages, tools, arguments)

    def encode_chat_turn(
        self, messages: Sequence[ChatMessage], known_token_ids: Sequence[int], *,
        tools: Sequence[Mapping[str, Any]] = (), control_tokens: bool = False,
        arguments: Mapping[str, Any] = NO_ARGUMENTS,
    ) -> list[int]:
        """Tokenise what the chat template puts between a conversation so far and the completion of ``messages``.

        An end token at the end of ``known_token_ids`` is not written a second time. Otherwise as ``encode_chat``.
        """
        render = partial(render_turn, self._tokenizer)
        turn = self._encode_contents(render, messages, tools, control_tokens, arguments)
        is_closed = bool(turn) and bool(known_token_ids) and turn[0] == known_token_ids[-1]
        return turn[1:] if is_closed and turn[0] in self._eos_token_ids else turn

    def _encode_contents(
        self, render: Render, messages: Sequence[ChatMessage], tools: Sequence[Mapping[str, Any]],
        control_tokens: bool, arguments: Mapping[str, Any],
    ) -> list[int]:
        text = render(messages, tools=tools, arguments=arguments)
        ids = self.encode(text, add_special_tokens=False)
        return ids if control_tokens else self._contents.checked(ids, text, render, messages, tools, arguments)

    @property
    def infill_end_ids(self) -> frozenset[int]:
        """The tokens that end a completion between two texts; empty if the model has no fill-in-the-middle tokens."""
        return self._infill.end_ids

    def encode_infill(self, prefix: str, suffix: str) -> list[int]:
        """Return the prompt that asks for the text between two others; control tokens in them are ordinary text.

        Raises:
            InvalidPrompt: the model has no such prompts, or this tokenizer reads the text of a control token in one way
                only.
            InvalidText: a text holds a lone surrogate.
        """
        return self._infill.prompt(prefix, suffix)

    @cached_property
    def _infill(self) -> InfillTokens:
        return InfillTokens(self._added_tokens, self.chat_template, self._backend, self.encode)

    @cached_property
    def _contents(self) -> ChatContents:
        return ChatContents(self._added_tokens, self.chat_template, self._backend)

    @cached_property
    def _added_tokens(self) -> dict[int, AddedToken]:
        tokenizer = self._tokenizer
        added = dict(getattr(tokenizer, "added_tokens_decoder", ()))
        for token_id in {*tokenizer.all_special_ids} - added.keys():
            added[token_id] = AddedToken(tokenizer.convert_ids_to_tokens(token_id), special=True, normalized=False)
        return added

    def decode(self, token_ids: Sequence[int]) -> str:
        """Decode at once, special tokens left out."""
        text: str = self._tokenizer.decode(
            list(token_ids), skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        return text

    def token_text(self, token_id: int) -> TokenText:
        """Return the text of one token. The bytes of a text's tokens are its bytes, except for a leading space."""
        utf8 = self._new_detokenizer().token_bytes(token_id)
        if utf8 is None:
            return TokenText(str(self._tokenizer.convert_ids_to_tokens(token_id) or ""), None)
        return TokenText(utf8.decode("utf-8", "replace"), utf8)

    def to_json(self) -> str | None:
        """Return what ``tokenizer.json`` has of it, without truncation and padding; ``None`` for one in Python."""
        kind = "backend" if isinstance(self._tokenizer, QuickTokenizer) else "backend_tokenizer"
        backend = getattr(self._tokenizer, kind, None)
        if backend is not None and (backend.truncation is not None or backend.padding is not None):
            backend = copy(backend)
            backend.no_truncation()
            backend.no_padding()
        return None if backend is None else backend.to_str()

    def new_full_detokenizer(self) -> Detokenizer:
        """Start an incremental decoding in which special tokens are text too; the first call takes longer."""
        return self._new_full_detokenizer()

    @cached_property
    def _new_full_detokenizer(self) -> DetokenizerFactory:
        tokenizer = self._tokenizer
        vocabulary = {token_id: token for token, token_id in tokenizer.get_vocab().items()}

        def decode(token_ids: Sequence[int]) -> str:
            return str(tokenizer.decode(list(token_ids), skip_special_tokens=False, clean_up_tokenization_spaces=False))

        return choose_detokenizer(decode, vocabulary, sorted({*vocabulary} & {*self._added_ids}))

    def new_detokenizer(self) -> Detokenizer:
        """Start an incremental decoding, of the kind that was found exact when the tokenizer was loaded."""
        return self._new_detokenizer()


def _load_with_transformers(path: str | os.PathLike[str], trust_remote_code: bool) -> Any:
    from transformers import AutoTokenizer, PreTrainedTokenizerFast
    from transformers.models.auto.tokenization_auto import get_tokenizer_config

    is_local = os.path.isdir(path)
    settings = get_tokenizer_config(path, local_files_only=is_local)
    # Why: for some architectures transformers replaces what tokenizer.json says, though it is declared to be all.
    is_plain = settings.get("tokenizer_class") in PLAIN_CLASSES and "auto_map" not in settings
    loader = PreTrainedTokenizerFast if is_plain else AutoTokenizer
    return loader.from_pretrained(path, trust_remote_code=trust_remote_code, local_files_only=is_local)


def _plain_backend(tokenizer: Any) -> Any | None:
    """Return the Rust tokenizer if encoding with it alone is what the wrapper would do, else ``None``."""
    if isinstance(tokenizer, QuickTokenizer):
        return tokenizer.backend
    from transformers import PreTrainedTokenizerFast

    overridable = ("encode", "_encode_plus", "apply_chat_template", "__call__")
    kind = type(tokenizer)
    if not isinstance(tokenizer, PreTrainedTokenizerFast) or tokenizer.split_special_tokens:
        return None
    is_plain = all(getattr(kind, name) is getattr(PreTrainedTokenizerFast, name) for name in overridable)
    return tokenizer.backend_tokenizer if is_plain else None
