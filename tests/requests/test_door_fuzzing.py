"""Door fuzzing: whatever is given to any field, only documented errors come back, small and silent about content."""

import tracemalloc

import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pagedcore import errors, sampling_params
from pagedcore.config import limits
from pagedcore.request_options import RequestOptions
from pagedcore.requests import validation
from pagedcore.sampling_params import SamplingParams
from pagedcore.tokenizer.chat import validate_chat

CANARY = "canary-7f3a"
VOCAB_SIZE, MAX_MODEL_LEN, POOL_TOKENS = 1000, 64, 256
FIELDS = sorted(sampling_params.NAMES)
BOUNDS = [0, 1, 2, 8, 10, 16, 20, 64, 100, 300, 1024, VOCAB_SIZE, MAX_MODEL_LEN, limits.MAX_COUNT, limits.MAX_SEED]

boundaries = st.sampled_from([sign * bound + step for bound in BOUNDS for step in (-1, 0, 1) for sign in (-1, 1)])
huge = st.integers(min_value=2**60, max_value=2**4000).flatmap(lambda number: st.sampled_from([number, -number]))
numbers = st.one_of(
    boundaries,
    boundaries.map(float),
    huge,
    st.integers(),
    st.floats(),
    st.sampled_from([np.int64(1), np.int32(1), np.float64(0.5), np.float32(0.5), np.bool_(True), 1j, -0.0, 5e-324]),
)
texts = st.one_of(
    st.text(alphabet=st.characters(exclude_categories=[]), max_size=70).map(lambda text: text + CANARY),
    st.sampled_from(["", "a", "a" * 64, "a" * 65, CANARY, CANARY * 100_000, CANARY + "\ud800", "\udfff"]),
)
plain = st.one_of(st.none(), st.booleans(), numbers, texts, st.binary(max_size=4))
values = st.recursive(
    plain,
    lambda inner: st.one_of(
        st.lists(inner, max_size=10),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(st.one_of(st.integers(), texts, st.none(), st.booleans()), inner, max_size=4),
        st.sets(st.integers(), max_size=3),
    ),
    max_leaves=12,
)
def nested(depth):
    """A list in a list in a list, deeper than any recursion may go."""
    inner = []
    for _ in range(depth):
        inner = [inner]
    return inner


oversized = st.sampled_from(
    [nested(100_000), list(range(100_000)), dict.fromkeys(range(100_000), 1.0), [CANARY] * 100_000,
     [{"role": CANARY}] * 5000]
)
anything = st.one_of(values, oversized)
fuzz = settings(max_examples=200, suppress_health_check=list(HealthCheck))


def refusal_of(call, *arguments, **keywords):
    """Call, and return the refusal or None; anything undocumented, large or talkative fails the test."""
    tracemalloc.start()
    try:
        call(*arguments, **keywords)
    except errors.InvalidRequest as error:
        refusal = error
    else:
        refusal = None
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    if refusal is not None:
        assert peak < 2**20, f"refusing took {peak} bytes"
        assert CANARY not in str(refusal)
        assert len(str(refusal)) < 600
        assert str(refusal).startswith(f"{refusal.what}: got ")
        assert refusal.__cause__ is None
        assert refusal.__context__ is None
    return refusal


@fuzz
@given(name=st.sampled_from(FIELDS), value=anything)
def test_every_field_refuses_with_its_name_or_accepts(name, value):
    """A field gives parameters or an InvalidRequest that names the field."""
    refusal = refusal_of(SamplingParams, **{name: value})
    assert refusal is None or refusal.what == name


@fuzz
@given(name=st.sampled_from(FIELDS), value=anything)
def test_a_mapping_refuses_as_the_constructor_does(name, value):
    """from_mapping differs from keywords only in the keys of logit_bias."""
    direct, mapped = refusal_of(SamplingParams, **{name: value}), refusal_of(SamplingParams.from_mapping, {name: value})
    if name != "logit_bias":
        assert type(direct) is type(mapped)


@fuzz
@given(mapping=st.one_of(anything, st.dictionaries(st.one_of(st.sampled_from(FIELDS), texts, st.none()), values)))
def test_unknown_names_are_never_ignored(mapping):
    """A mapping with any name that is no parameter's is refused."""
    refusal = refusal_of(SamplingParams.from_mapping, mapping)
    if not isinstance(mapping, dict) or not set(mapping) <= set(FIELDS):
        assert isinstance(refusal, errors.UnknownParameter)


@fuzz
@given(prompt=anything)
def test_prompts_are_refused_or_valid(prompt):
    """What passes is a list of Python integers of the vocabulary, within the context."""
    refusal = refusal_of(validation.validate_prompt_ids, prompt, VOCAB_SIZE, MAX_MODEL_LEN)
    if refusal is None:
        assert 1 <= len(prompt) < MAX_MODEL_LEN
        assert all(type(token_id) is int and 0 <= token_id < VOCAB_SIZE for token_id in prompt)
    else:
        assert refusal.what == "prompt"


@fuzz
@given(text=anything)
def test_texts_are_refused_or_valid(text):
    """What passes is encodable text within the byte limit."""
    refusal = refusal_of(validation.validate_text, text, MAX_MODEL_LEN)
    if refusal is None:
        assert len(text.encode()) <= 16 * MAX_MODEL_LEN
    else:
        assert isinstance(refusal, errors.InvalidText)


message_like = st.dictionaries(st.sampled_from(["role", "content", "name"]), st.one_of(texts, values), min_size=2)


@fuzz
@given(messages=st.one_of(anything, st.lists(message_like, max_size=3)))
def test_chats_are_refused_or_valid(messages):
    """What passes has encodable text in every role and content, text parts as their text."""
    refusal = refusal_of(validate_chat, messages, MAX_MODEL_LEN)
    if refusal is None:
        total = sum(len((message["role"] + message["content"]).encode()) for message in validate_chat(messages))
        assert total <= 16 * MAX_MODEL_LEN
    else:
        assert refusal.what.startswith("messages")


@fuzz
@given(priority=anything)
def test_priorities_are_refused_or_valid(priority):
    """What passes is an integer within the limit."""
    refusal = refusal_of(lambda one: RequestOptions(priority=one), priority)
    assert (refusal is None) == (type(priority) is int and abs(priority) <= limits.MAX_PRIORITY)


valid_params = st.builds(
    SamplingParams,
    max_tokens=st.one_of(st.none(), st.integers(1, 2**31 - 1), st.integers(1, 80)),
    top_k=st.one_of(st.integers(0, 1010), st.just(limits.MAX_COUNT)),
    n=st.integers(1, 16),
    stop_token_ids=st.lists(st.integers(0, 1010), max_size=3),
    logit_bias=st.dictionaries(st.integers(0, 1010), st.floats(-100, 100), max_size=3),
)


@fuzz
@given(params=valid_params, min_tokens=st.integers(0, 70), num_prompt_tokens=st.integers(1, 70))
def test_what_passes_all_checks_can_run(params, min_tokens, num_prompt_tokens):
    """After the door: tokens in the vocabulary, min <= max <= room, and the whole request fits the pool."""
    if params.max_tokens is None:
        params = SamplingParams(min_tokens=min_tokens, n=params.n)
    if refusal_of(validation.check_params_for_model, params, VOCAB_SIZE) is not None:
        return
    if refusal_of(validation.resolve_max_tokens, params, num_prompt_tokens, MAX_MODEL_LEN) is not None:
        return
    max_tokens = validation.resolve_max_tokens(params, num_prompt_tokens, MAX_MODEL_LEN)
    size = num_prompt_tokens, max_tokens, params.num_sequences
    if refusal_of(validation.check_fits_pool, *size, POOL_TOKENS) is not None:
        return
    assert params.min_tokens <= max_tokens
    assert 1 <= max_tokens <= MAX_MODEL_LEN - num_prompt_tokens
    assert params.num_sequences * (num_prompt_tokens + max_tokens) <= POOL_TOKENS
    assert all(token_id < VOCAB_SIZE for token_id in (*params.stop_token_ids, *(params.logit_bias or ())))


def test_ten_million_tokens_are_refused_without_a_copy():
    """A prompt far beyond the context costs nothing to refuse."""
    prompt = [1] * 10_000_000
    assert isinstance(refusal_of(validation.validate_prompt_ids, prompt, 10, 100), errors.PromptTooLong)


def test_a_hundred_megabytes_of_text_are_refused_without_a_copy():
    """So does text, ASCII or not."""
    for character in ("a", "\u00e9"):
        refusal = refusal_of(validation.validate_text, character * 100_000_000, 1000)
        assert isinstance(refusal, errors.InvalidText)
