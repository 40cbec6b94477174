from __future__ import annotations

import json
import os
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

import pagedcore
from pagedcore.errors import InvalidConfig, InvalidPrompt, InvalidText
from pagedcore.outputs import TokenText
from pagedcore.protocols import Detokenizer
from pagedcore.protocols import Tokenizer as TokenizerPort
from pagedcore.tokenizer.byte_detokenizer import ByteLevelDetokenizer
from pagedcore.tokenizer.chat_template import _COMPLETION
from pagedcore.tokenizer.tokenizer import HFTokenizer
from support.text_builders import BUILDERS, byte_level, make_fast, push_all

DEMO = Path(pagedcore.__file__).parent / "demo_model"
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def chat_tokenizer(template: str | dict[str, str] = CHATML) -> HFTokenizer:
    fast = PreTrainedTokenizerFast(tokenizer_object=byte_level(), eos_token="<|im_end|>")
    fast.chat_template = template
    return HFTokenizer.from_transformers(fast)


@pytest.mark.parametrize("kind", BUILDERS)
def test_encode_and_decode_are_those_of_the_wrapped_tokenizer(kind) -> None:
    """Tokens and text are exactly what transformers gives, special tokens left out of text."""
    fast = make_fast(kind)
    tokenizer = HFTokenizer.from_transformers(fast)
    text = "the quick dog </s><eos>, ok ? yes"
    ids = tokenizer.encode(text)
    assert ids == fast.encode(text)
    assert tokenizer.encode(text, add_special_tokens=False) == fast.encode(text, add_special_tokens=False)
    assert tokenizer.decode(ids) == fast.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)


def test_the_port_is_implemented() -> None:
    """The wrapper has all the port's members, with their types."""
    tokenizer: TokenizerPort = chat_tokenizer()
    detokenizer: Detokenizer = tokenizer.new_detokenizer()
    assert tokenizer.eos_token_ids == frozenset({2})
    assert detokenizer.push(tokenizer.encode("hi")) == "hi"


def test_a_tokenizer_without_an_end_token_says_so() -> None:
    """No end-of-sequence token: no ids, not a guess."""
    assert HFTokenizer(make_fast("word_piece")).eos_token_ids == frozenset()


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback", "unigram", "word_piece"])
def test_the_bytes_of_tokens_are_the_bytes_of_their_text(kind: str) -> None:
    """Put together they decode to the text but for its leading space, also where a character is several tokens."""
    tokenizer = HFTokenizer.from_transformers(make_fast(kind))
    ids = tokenizer.encode("the quick Größe 日本語 lazy dog", add_special_tokens=False)
    texts = [tokenizer.token_text(token_id) for token_id in ids]
    joined = b"".join(one.utf8 or b"" for one in texts).decode()
    assert joined.lstrip(" ") == tokenizer.decode(ids).lstrip(" ")
    assert all(one.text == one.utf8.decode("utf-8", "replace") for one in texts if one.utf8 is not None)


def test_a_token_without_text_is_called_by_its_name() -> None:
    """An end token has no bytes; one that the vocabulary does not have has no name either."""
    tokenizer = chat_tokenizer()
    assert tokenizer.token_text(2) == TokenText("<|im_end|>", None)
    assert tokenizer.token_text(10**6) == TokenText("", None)


def test_each_answer_has_its_own_detokenizer() -> None:
    """Two answers decoded in turns do not mix their bytes."""
    tokenizer = chat_tokenizer()
    one, two = tokenizer.new_detokenizer(), tokenizer.new_detokenizer()
    euro, smile = tokenizer.encode("€€"), tokenizer.encode("🙃")
    text = [one.push(euro[:1]) + one.push([]), two.push(smile[:2]), one.push(euro[1:]), two.push(smile[2:])]
    assert ("".join(text[::2]), "".join(text[1::2])) == ("€€", "🙃")


def test_truncation_and_padding_of_the_wrapped_tokenizer_are_ignored() -> None:
    """A tokenizer saved with truncation or padding still gives every token of the prompt, and no other."""
    backend = byte_level()
    backend.enable_truncation(2)
    backend.enable_padding(length=50)
    tokenizer = HFTokenizer(PreTrainedTokenizerFast(tokenizer_object=backend))
    assert tokenizer.encode("the quick brown fox") == make_fast("byte_level").encode("the quick brown fox")


def test_a_lone_surrogate_is_refused() -> None:
    """Text that is not Unicode gives a typed error that does not repeat it."""
    tokenizer = chat_tokenizer()
    with pytest.raises(InvalidText, match="a string of 7 characters"):
        tokenizer.encode("secret\ud800")
    with pytest.raises(InvalidText):
        tokenizer.encode_chat([{"role": "user", "content": "\udfff"}])


def test_encoding_is_safe_from_many_threads_and_starts_none() -> None:
    """Threads that encode and decode together get what one thread gets, and calls leave no worker thread behind."""
    tokenizer, texts = chat_tokenizer(), [f"text {i} Größe 🙂" * 20 for i in range(40)]
    expected = [tokenizer.encode(text) for text in texts]
    # Why not their number: one of an earlier test may end meanwhile.
    before = set(os.listdir("/proc/self/task"))
    assert [tokenizer.encode(text) for text in texts] == expected
    assert set(os.listdir("/proc/self/task")) <= before
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(tokenizer.encode, texts)) == expected
        assert list(pool.map(tokenizer.decode, expected)) == texts


def test_others_run_while_a_long_text_is_encoded(tmp_path: Path) -> None:
    """A tokenizer loaded from files, which no other code can change, releases the interpreter's lock; same tokens."""
    PreTrainedTokenizerFast(tokenizer_object=byte_level()).save_pretrained(tmp_path)
    tokenizer, text = HFTokenizer.from_directory(tmp_path), "the quick brown fox Größe 🙂 " * 5000
    may_run, has_run = threading.Event(), threading.Event()
    other = threading.Thread(target=lambda: may_run.wait() and has_run.set())
    other.start()
    interval = sys.getswitchinterval()
    # Why: from here on the lock changes hands only where it is released.
    sys.setswitchinterval(60)
    try:
        may_run.set()
        token_ids, end_s = tokenizer.encode(text), time.monotonic() + 30
        # Why again: on a busy machine the other one may be late for one encoding; if none lets it in, it is for all.
        while not has_run.is_set() and time.monotonic() < end_s:
            tokenizer.encode(text)
        assert has_run.is_set()
    finally:
        sys.setswitchinterval(interval)
        other.join()
    assert token_ids == make_fast("byte_level").encode(text)


def test_a_saved_tokenizer_loads_from_its_directory(tmp_path) -> None:
    """A round trip through files keeps tokens, end token, chat template and kind of detokenizer."""
    fast = PreTrainedTokenizerFast(tokenizer_object=byte_level(), eos_token="<|im_end|>")
    fast.chat_template = CHATML
    fast.save_pretrained(tmp_path)
    loaded, made = HFTokenizer.from_directory(tmp_path), HFTokenizer(fast)
    messages = [{"role": "user", "content": "hi"}]
    assert loaded.encode_chat(messages) == made.encode_chat(messages)
    assert loaded.eos_token_ids == made.eos_token_ids == frozenset({2})
    assert type(loaded.new_detokenizer()) is ByteLevelDetokenizer


@pytest.mark.parametrize(
    "files", [{}, {"tokenizer.json": "{"}, {"tokenizer.json": "{}"}, {"config.json": '{"model_type": "gpt2"}'}]
)
def test_missing_or_damaged_files_are_a_configuration_error(tmp_path, files) -> None:
    """A directory without a readable tokenizer gives a typed error that says what is expected, without the path."""
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    with pytest.raises(InvalidConfig, match="tokenizer: ") as caught:
        HFTokenizer.from_directory(tmp_path)
    assert str(tmp_path) not in str(caught.value)


def test_an_object_that_is_no_tokenizer_is_refused() -> None:
    """Passing a bare Rust tokenizer or anything else is a typed error."""
    with pytest.raises(InvalidConfig, match="Tokenizer"):
        HFTokenizer.from_transformers(Tokenizer(models.BPE()))


def test_chat_is_rendered_up_to_the_answer() -> None:
    """The template's control tokens become special tokens, and the answer's header is the end of the prompt."""
    tokenizer = chat_tokenizer()
    ids = tokenizer.encode_chat([{"role": "user", "content": "two words é?"}])
    header = tokenizer.encode("<|im_start|>assistant\n")
    assert ids[0] == 1
    assert ids[-len(header) :] == header
    assert tokenizer.decode(ids) == "user\ntwo words é?\nassistant\n"


def test_a_further_turn_continues_the_conversation_as_the_template_would() -> None:
    """Known tokens plus the turn are the tokens of the whole conversation, whether or not the answer was closed."""
    tokenizer = chat_tokenizer()
    first, second = {"role": "user", "content": "a b"}, {"role": "user", "content": "c"}
    answer = {"role": "assistant", "content": "d e"}
    whole = tokenizer.encode_chat([first, answer, second])
    open_ids = tokenizer.encode_chat([first]) + tokenizer.encode("d e", add_special_tokens=False)
    (end,) = tokenizer.eos_token_ids
    for known in (open_ids, [*open_ids, end]):
        assert known + tokenizer.encode_chat_turn([second], known) == whole


@pytest.mark.parametrize(
    ("template", "content"),
    [
        ("{{ messages[-1]['content'] }}", "c"),
        (CHATML, f"c {_COMPLETION} d"),
    ],
)
def test_a_further_turn_is_refused_where_the_answer_before_it_cannot_be_told(template, content) -> None:
    """Templates that hide earlier answers, and messages that hold the stand-in, are not cut at a guess."""
    with pytest.raises(InvalidPrompt, match="exactly once"):
        chat_tokenizer(template).encode_chat_turn([{"role": "user", "content": content}], [1, 2])


def test_prompt_text_never_appears_in_the_answer() -> None:
    """A detokenizer knows the answer's tokens only, whatever the prompt was."""
    tokenizer = chat_tokenizer()
    tokenizer.encode_chat([{"role": "user", "content": "secret"}])
    answer = [*tokenizer.encode(" fox 🙂"), 2]
    assert push_all(tokenizer.new_detokenizer(), [[i] for i in answer], tokenizer.decode) == " fox 🙂"


def test_a_tokenizer_of_another_make_encodes_chat_through_its_own_method() -> None:
    """A subclass that changes how text is encoded is asked, not bypassed."""

    class Shouting(PreTrainedTokenizerFast):
        def _encode_plus(self, text, *args, **kwargs):
            return super()._encode_plus(text.upper(), *args, **kwargs)

    fast = Shouting(tokenizer_object=byte_level())
    fast.chat_template = CHATML
    tokenizer = HFTokenizer(fast)
    assert tokenizer.decode(tokenizer.encode("hi")) == "HI"
    assert "HI" in tokenizer.decode(tokenizer.encode_chat([{"role": "user", "content": "hi"}]))


def test_no_chat_template_is_an_invalid_prompt_with_advice() -> None:
    """Chat messages for a tokenizer without a template: the error says what to do instead."""
    with pytest.raises(InvalidPrompt, match="no chat template"):
        HFTokenizer(make_fast("byte_level")).encode_chat([{"role": "user", "content": "hi"}])


@pytest.mark.parametrize(
    ("statement", "expected"),
    [
        ("{{ raise_exception('Roles must alternate.') }}", "The template says: Roles must alternate."),
        ("{{ raise_exception('Unknown role: ' + messages[0]['content']) }}", "The template says: Unknown role: ..."),
        ("{{ raise_exception(messages[0]['content']) }}", "It failed with TemplateError."),
        ("{{ messages[0]['content'] + 1 }}", "It failed with TypeError."),
        ("{{ messages[0].nothing.more }}", "It failed with UndefinedError."),
    ],
)
def test_a_refusing_template_is_an_invalid_prompt_that_repeats_no_content(statement, expected) -> None:
    """Only words of the template itself reach the message; neither it nor its chain holds the conversation."""
    with pytest.raises(InvalidPrompt) as caught:
        chat_tokenizer(statement).encode_chat([{"role": "user", "content": "my secret text"}])
    assert str(caught.value).endswith(expected)
    assert "secret" not in str(caught.value)
    assert caught.value.__context__ is None


def test_a_template_cannot_reach_python() -> None:
    """Templates run sandboxed: attribute tricks are refused."""
    with pytest.raises(InvalidPrompt, match="SecurityError"):
        chat_tokenizer("{{ ''.__class__.__mro__[1].__subclasses__() }}").encode_chat([{"role": "user", "content": "x"}])


@pytest.mark.parametrize("messages", [[], ["hi"], [{"role": "user", "content": "x"}, None], [[{"role": "user"}]]])
def test_messages_that_are_none_are_refused(messages) -> None:
    """An empty conversation, and anything that is not a mapping, is an invalid prompt."""
    with pytest.raises(InvalidPrompt, match="messages"):
        chat_tokenizer().encode_chat(messages)


def test_the_default_of_several_templates_is_used() -> None:
    """A tokenizer with named templates uses its default one."""
    several = chat_tokenizer({"default": CHATML, "tool_use": "{{ 1 }}"})
    messages = [{"role": "user", "content": "hi"}]
    assert several.encode_chat(messages) == chat_tokenizer().encode_chat(messages)


@pytest.mark.skipif(not (DEMO / "tokenizer.json").exists(), reason="the demo model is not in this checkout")
def test_the_demo_tokenizer_keeps_the_laws() -> None:
    """The demo model's tokenizer loads, and every token of it decodes incrementally as at once."""
    tokenizer = HFTokenizer.from_directory(DEMO)
    vocabulary = json.loads((DEMO / "tokenizer.json").read_text())["model"]["vocab"]
    answer = list(vocabulary.values() if isinstance(vocabulary, dict) else range(len(vocabulary)))
    assert push_all(tokenizer.new_detokenizer(), [[i] for i in answer], tokenizer.decode) == tokenizer.decode(answer)
    text = "What is 2 + 3?"
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text
