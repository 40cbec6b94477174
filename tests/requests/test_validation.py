"""The laws of the door: prompts, texts, chats, and what of the parameters depends on prompt and model."""

import traceback
from collections.abc import Mapping

import numpy as np
import pytest

from pagedcore import errors
from pagedcore.config import limits
from pagedcore.request_options import RequestOptions
from pagedcore.requests import validation
from pagedcore.requests.input_processor import InputProcessor
from pagedcore.sampling_params import SamplingParams
from pagedcore.tokenizer.chat import validate_chat
from pagedcore.tokenizer.text_size import count_text_bytes


@pytest.mark.parametrize("given", [[0], [9], (0, 9, 5), [3] * 7])
def test_token_ids_within_bounds_are_returned_as_a_new_list(given):
    """A list or tuple of ids below the vocabulary, at most max_model_len - 1 of them, is copied."""
    checked = validation.validate_prompt_ids(given, vocab_size=10, max_model_len=8)
    assert checked == list(given)
    assert type(checked) is list
    assert checked is not given


@pytest.mark.parametrize(
    ("given", "error"),
    [
        ([], errors.PromptEmpty),
        ((), errors.PromptEmpty),
        ([1] * 8, errors.PromptTooLong),
        ([-1], errors.InvalidToken),
        ([1, 10, 2], errors.InvalidToken),
        ([10**30], errors.InvalidToken),
        ([True], errors.InvalidPrompt),
        ([1, 2.0], errors.InvalidPrompt),
        ([1, None], errors.InvalidPrompt),
        ([1, "2"], errors.InvalidPrompt),
        ([1, np.int64(2)], errors.InvalidPrompt),
        ([[1]], errors.InvalidPrompt),
        (np.arange(3), errors.InvalidPrompt),
        (range(3), errors.InvalidPrompt),
        (iter([1]), errors.InvalidPrompt),
        ({1}, errors.InvalidPrompt),
        (b"abc", errors.InvalidPrompt),
        (None, errors.InvalidPrompt),
        (1, errors.InvalidPrompt),
    ],
)
def test_other_prompts_are_refused(given, error):
    """Wrong kinds, wrong elements, wrong lengths and foreign ids each have their error, naming the prompt."""
    with pytest.raises(error) as refusal:
        validation.validate_prompt_ids(given, vocab_size=10, max_model_len=8)
    assert refusal.value.what == "prompt"


@pytest.mark.parametrize("max_model_len", [1, 0, -5])
def test_a_context_without_room_refuses_every_prompt(max_model_len):
    """When the context is used up already, the limit reads 0 tokens."""
    with pytest.raises(errors.PromptTooLong, match="at most 0 tokens"):
        validation.validate_prompt_ids([1], vocab_size=10, max_model_len=max_model_len)


@pytest.mark.parametrize("text", ["", "a", "a" * 32, "\u00e9" * 16, "\U0001f600" * 8, "\x00"])
def test_text_up_to_sixteen_bytes_a_token_is_accepted(text):
    """The limit counts UTF-8 bytes and is inclusive."""
    assert validation.validate_text(text, max_model_len=2) is text


@pytest.mark.parametrize(
    "text", ["a" * 33, "\u00e9" * 17, "\U0001f600" * 9, "\ud800", "a\udfff", "a" * 31 + "\udcff", None, b"a", 1, ["a"]]
)
def test_other_text_is_refused(text):
    """Text that is too long, not encodable or not text is InvalidText."""
    with pytest.raises(errors.InvalidText) as refusal:
        validation.validate_text(text, max_model_len=2)
    assert refusal.value.what == "text"


def test_a_surrogate_is_found_wherever_it_stands():
    """Counting in pieces neither misses a lone surrogate nor miscounts a long text."""
    for position in (0, 4095, 4096, 4097, 9999):
        text = "\u00e9" * position + "\ud800" + "\u00e9" * (9999 - position)
        with pytest.raises(errors.InvalidText, match="lone surrogate"):
            validation.validate_text(text, max_model_len=10**6)
    assert count_text_bytes("text", "\u00e9" * 10_001, 20_002) == 20_002


def test_far_too_much_text_is_refused_before_it_is_read():
    """A text with more characters than allowed bytes is refused for its length, whatever it holds."""
    with pytest.raises(errors.InvalidText, match="at most 32 bytes"):
        validation.validate_text("\ud800" * 33, max_model_len=2)


def test_a_refusal_does_not_carry_the_text_in_its_chain():
    """The codec's error, which holds the text, is neither cause nor context of the refusal."""
    with pytest.raises(errors.InvalidText) as refusal:
        validation.validate_text("canary\ud800", max_model_len=10)
    assert refusal.value.__cause__ is None
    assert refusal.value.__context__ is None
    assert "canary" not in "".join(traceback.format_exception_only(refusal.value))


def text_part(text):
    """OpenAI's form of a text in a content."""
    return {"type": "text", "text": text}


def message(role="user", content="hi", **further):
    """One chat message."""
    return {"role": role, "content": content, **further}


@pytest.mark.parametrize(
    "messages", [[message()], (message(),), [message(content="")], [message(name="x")], [message()] * 1024]
)
def test_chats_within_bounds_are_accepted(messages):
    """1 to 1,024 mappings with a role and a content of text; further keys are left alone."""
    assert validate_chat(messages) == list(messages)


def test_text_parts_are_their_text():
    """A content of OpenAI's text parts is what they say one after the other; a part of another type is named."""
    parts = message(content=[text_part("a"), {**text_part("b"), "cache_control": {}}], name="x")
    assert validate_chat([message(), parts, message(content=())]) == [
        message(), message(content="ab", name="x"), message(content="")]
    with pytest.raises(errors.InvalidPrompt, match="got 'image_url', allowed is a part like"):
        validate_chat([message(content=[{"type": "image_url", "image_url": {"url": "canary"}}])])


@pytest.mark.parametrize(
    ("messages", "error", "what"),
    [
        ([], errors.PromptEmpty, "messages"),
        ([message()] * 1025, errors.InvalidPrompt, "messages"),
        (None, errors.InvalidPrompt, "messages"),
        ("hi", errors.InvalidPrompt, "messages"),
        (message(), errors.InvalidPrompt, "messages"),
        (["hi"], errors.InvalidPrompt, "messages[0]"),
        ([message(), None], errors.InvalidPrompt, "messages[1]"),
        ([{"role": "user"}], errors.InvalidPrompt, "messages[0].content"),
        ([{"content": "hi"}], errors.InvalidPrompt, "messages[0].role"),
        ([message(role=1)], errors.InvalidPrompt, "messages[0].role"),
        ([message(content=[{"type": "text"}])], errors.InvalidPrompt, "messages[0].content[0]"),
        ([message(content=[text_part("a"), {"type": "image_url"}])], errors.InvalidPrompt, "messages[0].content[1]"),
        ([message(content=[text_part("a" * (limits.MAX_CHAT_BYTES // 2))] * 3)], errors.InvalidText,
         "messages[0].content[2]"),
        ([message(content=None)], errors.InvalidPrompt, "messages[0].content"),
        ([message(content="\ud800")], errors.InvalidText, "messages[0].content"),
        ([message(), message(role="\udcff")], errors.InvalidText, "messages[1].role"),
        ([message(content="a" * (limits.MAX_CHAT_BYTES - 3))], errors.InvalidText, "messages[0].content"),
    ],
)
def test_other_chats_are_refused(messages, error, what):
    """Everything else is refused, naming the message and the key."""
    with pytest.raises(error) as refusal:
        validate_chat(messages)
    assert refusal.value.what == what


def test_a_chat_is_held_to_the_context_when_it_is_known():
    """All texts of a chat together have at most sixteen bytes per position."""
    chat = [message(content="a" * 8), message(content="a" * 8), message(content=""), message(content="")]
    assert validate_chat(chat, max_model_len=2) == chat
    for refused in ({"messages": [*chat[:3], message(content="a")]}, {"messages": chat, "num_bytes": 33}):
        with pytest.raises(errors.PromptTooLong) as refusal:
            validate_chat(**refused, max_model_len=2)
        assert refusal.value.what == ("tools" if "num_bytes" in refused else "messages[3].content")


def test_any_mapping_can_be_a_message():
    """A message need not be a dict."""

    class Message(Mapping):
        def __getitem__(self, key):
            return {"role": "user", "content": "hi"}[key]

        def __iter__(self):
            return iter(("role", "content"))

        def __len__(self):
            return 2

    assert len(validate_chat([Message()])) == 1


@pytest.mark.parametrize(("asked", "resolved"), [(None, 6), (1, 1), (6, 6)])
def test_max_tokens_resolves_to_what_was_asked_or_to_the_rest(asked, resolved):
    """Without max_tokens the answer gets all positions after the prompt; with it, exactly that."""
    assert validation.resolve_max_tokens(SamplingParams(max_tokens=asked), 4, 10) == resolved


@pytest.mark.parametrize(("asked", "num_prompt_tokens"), [(7, 4), (2**31 - 1, 4), (1, 10), (None, 10), (None, 11)])
def test_max_tokens_is_never_clamped(asked, num_prompt_tokens):
    """More than the rest of the context is refused."""
    with pytest.raises(errors.InvalidMaxTokens):
        validation.resolve_max_tokens(SamplingParams(max_tokens=asked), num_prompt_tokens, 10)


def test_min_tokens_is_checked_against_the_resolved_limit():
    """min_tokens of a request without max_tokens is held to the rest of the context."""
    assert validation.resolve_max_tokens(SamplingParams(min_tokens=6), 4, 10) == 6
    with pytest.raises(errors.InvalidMinTokens, match="min_tokens: got 7, allowed is 0 to max_tokens, 6 here"):
        validation.resolve_max_tokens(SamplingParams(min_tokens=7), 4, 10)


@pytest.mark.parametrize(
    ("field", "error"),
    [
        ({"top_k": 11}, errors.InvalidSampling),
        ({"stop_token_ids": [9, 10]}, errors.InvalidToken),
        ({"logit_bias": {9: 1.0, 10: 1.0}}, errors.InvalidToken),
    ],
)
def test_parameters_are_held_to_the_vocabulary(field, error):
    """top_k is at most the vocabulary's size; stop and biased tokens are below it."""
    params = SamplingParams(**field)
    validation.check_params_for_model(params, vocab_size=11)
    with pytest.raises(error) as refusal:
        validation.check_params_for_model(params, vocab_size=10)
    assert refusal.value.what == next(iter(field))


def test_a_request_has_to_fit_the_whole_pool():
    """n x (prompt + max_tokens) is at most the pool, and the message shows the sum."""
    validation.check_fits_pool(4, 6, 2, 20)
    with pytest.raises(errors.RequestTooLarge, match=r"got 20, allowed is at most 19 .* 2 x \(4 \+ 6\)"):
        validation.check_fits_pool(4, 6, 2, 19)


@pytest.mark.parametrize("priority", [-limits.MAX_PRIORITY, 0, limits.MAX_PRIORITY])
def test_priorities_within_bounds_are_returned(priority):
    """Any integer up to the limit, of either sign."""
    assert RequestOptions(priority=priority).priority == priority


@pytest.mark.parametrize(
    "priority", [limits.MAX_PRIORITY + 1, -limits.MAX_PRIORITY - 1, True, 1.0, None, "1", np.int64(1), 10**400]
)
def test_other_priorities_are_refused(priority):
    """Anything else is refused by name."""
    with pytest.raises(errors.InvalidRequest) as refusal:
        RequestOptions(priority=priority)
    assert refusal.value.what == "priority"


OPTIONS = {
    "tenant": (["", "blue", "t" * 128], ["t" * 129, "a\nb", b"blue", None, 5]),
    "weight": ([0.001, 1, 2.5, 1000], [0, 0.0009, 1001, -1.0, float("nan"), float("inf"), True, "1", None]),
    "deadline_s": ([None, 0.001, 1, limits.MAX_TIMEOUT_S], [0, -1.0, 2 * limits.MAX_TIMEOUT_S, True, "1"]),
}


@pytest.mark.parametrize("name", OPTIONS)
def test_tenant_weight_and_deadline_have_ranges(name):
    """Values within them are kept, numbers as floats; all others are refused by name."""
    accepted, refused = OPTIONS[name]
    for value in accepted:
        assert getattr(RequestOptions(**{name: value}), name) == value
    for value in refused:
        with pytest.raises(errors.InvalidRequest) as refusal:
            RequestOptions(**{name: value})
        assert refusal.value.what == name
    assert type(RequestOptions(weight=2).weight) is float


def test_policies_see_no_salt():
    """What a sequence keeps of its request's options has everything but the salt."""
    options = RequestOptions(cache_salt="canary", tenant="blue", priority=3)
    seen = options.without_salt()
    assert (seen.cache_salt, seen.salt, seen.tenant, seen.priority) == (None, b"", "blue", 3)
    assert seen.without_salt() is seen


@pytest.mark.parametrize("prompt", [["a"], ["a", "b"], [1, "a"], [None], [1.5], [[1]], [("role", "user")]])
def test_a_list_that_is_no_prompt_is_not_taken_for_a_chat(prompt):
    """The refusal names the prompt and all that it may be; several texts are told from chat messages."""
    processor = InputProcessor(None, 100, 64, 640, 8, frozenset())
    with pytest.raises(errors.InvalidPrompt) as refusal:
        processor.process(prompt, None, RequestOptions())
    assert str(refusal.value).startswith("prompt: got a list with ")
    assert refusal.value.limit.startswith("text, a list of token ids")
    has_text = any(isinstance(one, str) for one in prompt)
    assert str(refusal.value).endswith("Several texts are several prompts.") == has_text
