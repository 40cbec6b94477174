"""The laws of ``SamplingParams``: what each field accepts, what it is stored as, and how it refuses the rest."""

import copy
import dataclasses
import inspect
import pickle

import numpy as np
import pytest

from pagedcore import errors
from pagedcore.config import limits
from pagedcore.config.field_rules import LogitBias
from pagedcore.sampling_params import SamplingParams
from pagedcore.structured_output import StructuredOutput

NAN, INF = float("nan"), float("inf")

ACCEPTED = {
    "max_tokens": [None, 1, limits.MAX_COUNT],
    "min_tokens": [0, 1, limits.MAX_COUNT],
    "temperature": [0, 0.0, 5e-324, 1, 10, 10.0],
    "top_k": [0, 1, limits.MAX_COUNT],
    "top_p": [5e-324, 0.5, 1, 1.0],
    "min_p": [0, 0.0, 5e-324, 1, 1.0],
    "presence_penalty": [-2, -2.0, 0, 2, 2.0],
    "frequency_penalty": [-2, -2.0, 0, 2, 2.0],
    "repetition_penalty": [5e-324, 1, 10, 10.0],
    "logit_bias": [None, {}, {0: -100, limits.MAX_COUNT: 100.0}, dict.fromkeys(range(300), 1.0)],
    "stop": ["a", "\U0001f600" * 64, [], (), ["a"] * 8, ("a", "b")],
    "stop_token_ids": [(), [], [0, limits.MAX_COUNT], list(range(64))],
    "ignore_eos": [False, True],
    "seed": [None, 0, 2**63 - 1],
    "n": [1, 16],
    "best_of": [None, 1, 16],
    "beam_width": [1, 16],
    "length_penalty": [-10, -10.0, 0, 1, 10, 10.0],
    "early_stopping": [False, True, "never"],
    "logprobs": [None, 0, 20],
    "prompt_logprobs": [None, 0, 20],
    "structured": [None, {"json_object": True}, StructuredOutput(regex="a")],
    "bad_words": [(), [], ["a"], ("\U0001f600" * 32,) * 128, [" a "]],
    "bad_words_ids": [(), [], [[0]], [[limits.MAX_COUNT] * 132] * 256, ((1, 2), [3])],
    "allowed_token_ids": [None, [0], (limits.MAX_COUNT,), list(range(4096)), [3, 3]],
    "include_stop_str_in_output": [False, True],
    "skip_special_tokens": [True, False],
    "truncate_prompt_tokens": [None, -1, 1, limits.MAX_COUNT],
    "suppress_tokens": [(), [], [0, limits.MAX_COUNT], list(range(4096)), (3, 3)],
    "begin_suppress_tokens": [(), [], [0, limits.MAX_COUNT], list(range(4096)), (3, 3)],
    "no_repeat_ngram_size": [0, 1, 64],
    "forced_eos_token_id": [None, 0, limits.MAX_COUNT, [1], tuple(range(64))],
    "logprobs_mode": ["raw", "processed"],
}

NOT_A_NUMBER = [None, True, "1", NAN, INF, -INF, 10**400, -(10**400), np.float64(0.5), np.float32(0.5), 1j, [1], b"1"]
NOT_AN_INTEGER = [True, False, "1", 1.0, NAN, INF, np.int64(1), [1], -(10**400), 10**400]

REFUSED = {
    "max_tokens": (errors.InvalidMaxTokens, [0, -1, limits.MAX_COUNT + 1, *NOT_AN_INTEGER]),
    "min_tokens": (errors.InvalidMinTokens, [-1, limits.MAX_COUNT + 1, None, *NOT_AN_INTEGER]),
    "temperature": (errors.InvalidSampling, [-5e-324, 10.000001, 11, *NOT_A_NUMBER]),
    "top_k": (errors.InvalidSampling, [-1, limits.MAX_COUNT + 1, None, *NOT_AN_INTEGER]),
    "top_p": (errors.InvalidSampling, [0, 0.0, -0.0, 1.0000001, 2, *NOT_A_NUMBER]),
    "min_p": (errors.InvalidSampling, [-1, 1.0000001, 2, *NOT_A_NUMBER]),
    "presence_penalty": (errors.InvalidSampling, [-2.0000001, 2.0000001, *NOT_A_NUMBER]),
    "frequency_penalty": (errors.InvalidSampling, [-2.0000001, 2.0000001, *NOT_A_NUMBER]),
    "repetition_penalty": (errors.InvalidSampling, [0, 0.0, -1, 10.000001, *NOT_A_NUMBER]),
    "logit_bias": (
        errors.InvalidBias,
        [dict.fromkeys(range(301), 1.0), {1: 100.00001}, {1: NAN}, {1: INF}, {1: True}, {1: "1"}, {1: None},
         {1: 10**400}, {1: np.float64(1)}, [(1, 1.0)], "1", 1, True],
    ),
    "stop": (
        errors.InvalidStop,
        ["", "a" * 65, ["a"] * 9, [""], [1], [None], [b"a"], "\ud800", ["\udfff"], None, 1, True, b"a", {"a"},
         {"a": 1}, range(2)],
    ),
    "stop_token_ids": (errors.InvalidStop, [list(range(65)), None, 1, "12", {1}, range(3), np.arange(3)]),
    "ignore_eos": (errors.InvalidSampling, [None, 0, 1, "false", 1.0]),
    "seed": (errors.InvalidSeed, [-1, 2**63, *NOT_AN_INTEGER]),
    "n": (errors.TooManySequences, [0, -1, 17, 10**9, None, *NOT_AN_INTEGER]),
    "best_of": (errors.TooManySequences, [0, -1, 17, 10**9, *NOT_AN_INTEGER]),
    "beam_width": (errors.TooManySequences, [0, -1, 17, 10**9, None, *NOT_AN_INTEGER]),
    "length_penalty": (errors.InvalidSampling, [-10.000001, 10.000001, *NOT_A_NUMBER]),
    "early_stopping": (errors.InvalidSampling, [None, 0, 1, "true", "Never", b"never", 1.0]),
    "logprobs": (errors.TooManyLogprobs, [-1, 21, *NOT_AN_INTEGER]),
    "prompt_logprobs": (errors.TooManyLogprobs, [-1, 21, *NOT_AN_INTEGER]),
    "bad_words": (errors.InvalidSampling, ["a", [""], [" "], ["a" * 33], ["a"] * 129, [1], ["\ud800"], None, 1, {"a"}]),
    "bad_words_ids": (
        errors.InvalidSampling, [[1], [[]], [[1] * 133], [[1]] * 257, [[1], 2], None, 1, "1", [{1}], {1: [2]}]),
    "allowed_token_ids": (errors.InvalidSampling, [[], (), list(range(4097)), 1, "1", {1}, range(3), True]),
    "include_stop_str_in_output": (errors.InvalidSampling, [None, 0, 1, "false"]),
    "skip_special_tokens": (errors.InvalidSampling, [None, 0, 1, "true"]),
    "truncate_prompt_tokens": (errors.InvalidSampling, [0, -2, limits.MAX_COUNT + 1, *NOT_AN_INTEGER]),
    "suppress_tokens": (errors.InvalidSampling, [list(range(4097)), None, 1, "1", {1}, range(3), True]),
    "begin_suppress_tokens": (errors.InvalidSampling, [list(range(4097)), None, 1, "1", {1}, range(3), True]),
    "no_repeat_ngram_size": (errors.InvalidSampling, [-1, 65, None, *NOT_AN_INTEGER]),
    "forced_eos_token_id": (errors.InvalidSampling, [[], (), list(range(65))]),
    "structured": (errors.InvalidGrammar, [{}, [], "json", True, {"json_object": False}, {"regex": "a", "lark": "b"}]),
}  # fmt: skip


@pytest.mark.parametrize("name", ACCEPTED)
def test_values_up_to_the_limit_are_accepted(name):
    """Every value within its range makes parameters."""
    for value in ACCEPTED[name]:
        assert isinstance(SamplingParams(**{name: value}), SamplingParams)


@pytest.mark.parametrize("name", REFUSED)
def test_values_beyond_the_limit_are_refused(name):
    """Every value out of range or of a wrong type is refused with its field's error, which names the field."""
    error, values = REFUSED[name]
    for value in values:
        refusal = refusal_of(name, value)
        assert type(refusal) is error, value
        assert refusal.what == name
        assert str(refusal).startswith(f"{name}: got ")


def refusal_of(name, value):
    """Return what refuses a value of a field, or None."""
    try:
        SamplingParams(**{name: value})
    except errors.PagedcoreError as refusal:
        return refusal
    return None


@pytest.mark.parametrize("token_id", [-1, limits.MAX_COUNT + 1, True, 1.0, "1", None, np.int64(1), 10**400])
@pytest.mark.parametrize("name", [
    "stop_token_ids", "logit_bias", "allowed_token_ids", "bad_words_ids", "suppress_tokens", "begin_suppress_tokens",
    "forced_eos_token_id"])
def test_what_is_no_token_id_is_refused_wherever_it_stands(name, token_id):
    """An element that cannot be a token id is an InvalidToken that names the field."""
    value = {"logit_bias": {token_id: 1.0}, "bad_words_ids": [[token_id]]}.get(name, [token_id])
    with pytest.raises(errors.InvalidToken) as refusal:
        SamplingParams(**{name: value})
    assert refusal.value.what == name


def test_defaults_are_greedy_and_change_nothing():
    """Without arguments every feature is off."""
    params = SamplingParams()
    assert (params.temperature, params.top_k, params.top_p, params.min_p) == (0.0, 0, 1.0, 0.0)
    assert (params.presence_penalty, params.frequency_penalty, params.repetition_penalty) == (0.0, 0.0, 1.0)
    assert (params.max_tokens, params.min_tokens, params.n, params.seed) == (None, 0, 1, None)
    assert (params.logit_bias, params.stop, params.stop_token_ids, params.logprobs) == (None, (), (), None)


def test_numbers_are_stored_as_floats():
    """An integer given for a float field is stored as a float."""
    params = SamplingParams(temperature=1, top_p=1, min_p=0, repetition_penalty=2, logit_bias={3: 4})
    numbers = (params.temperature, params.top_p, params.min_p, params.repetition_penalty, params.logit_bias[3])
    assert all(type(number) is float for number in numbers)


def test_sequences_are_stored_as_tuples():
    """One stop string, lists and tuples all become tuples."""
    assert SamplingParams(stop="ab").stop == ("ab",)
    assert SamplingParams(stop=["ab", "c"]).stop == ("ab", "c")
    assert SamplingParams(stop_token_ids=[3, 1]).stop_token_ids == (3, 1)


def test_parameters_do_not_follow_changes_of_what_they_were_made_from():
    """Lists and mappings are copied; nothing can be changed afterwards."""
    stop, ids, bias = ["a"], [1], {1: 1.0}
    params = SamplingParams(stop=stop, stop_token_ids=ids, logit_bias=bias)
    stop.append("b"), ids.append(2), bias.update({1: 2.0, 2: 2.0})
    assert (params.stop, params.stop_token_ids, params.logit_bias) == (("a",), (1,), {1: 1.0})
    with pytest.raises(TypeError):
        params.logit_bias[1] = 2.0
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.temperature = 1.0


def test_parameters_are_values():
    """Equal parameters hash alike and survive copying, pickling, replacing and asdict."""
    params = SamplingParams(temperature=0.5, stop="x", logit_bias={7: -1.0, 2: 3.0}, stop_token_ids=[4])
    same = SamplingParams(temperature=0.5, stop=("x",), logit_bias={2: 3.0, 7: -1.0}, stop_token_ids=(4,))
    assert params == same
    assert hash(params) == hash(same)
    assert params == copy.deepcopy(params) == pickle.loads(pickle.dumps(params))
    assert SamplingParams.from_mapping(dataclasses.asdict(params)) == params
    assert dataclasses.replace(params, n=2).n == 2
    assert params != dataclasses.replace(params, logit_bias={2: 3.0})


def test_a_bias_made_by_hand_is_checked_too():
    """A ready-made LogitBias is no way around the checks."""
    with pytest.raises(errors.InvalidBias):
        SamplingParams(logit_bias=LogitBias({1: NAN}))


def test_min_tokens_above_max_tokens_is_refused():
    """When both are given, min_tokens is at most max_tokens."""
    assert SamplingParams(min_tokens=3, max_tokens=3).min_tokens == 3
    with pytest.raises(errors.InvalidMinTokens, match="min_tokens: got 4, allowed is 0 to max_tokens, 3 here"):
        SamplingParams(min_tokens=4, max_tokens=3)


def test_answers_are_chosen_among_at_least_as_many():
    """best_of is at least n, and so is the width of a beam search."""
    assert SamplingParams(n=2, best_of=2).has_candidates is False
    assert SamplingParams(n=2, best_of=3).has_candidates is True
    with pytest.raises(errors.TooManySequences, match="best_of: got 2, allowed is n to 16, n is 3 here"):
        SamplingParams(n=3, best_of=2)
    with pytest.raises(errors.TooManySequences, match="n: got 5, allowed is 1 to beam_width, 4 here"):
        SamplingParams(n=5, beam_width=4)


def test_num_beams_is_another_name_for_beam_width():
    """Parameters made with either name are equal in every way, and both names read the same."""
    one, other = SamplingParams(num_beams=4, n=2), SamplingParams(beam_width=4, n=2)
    assert (one, hash(one), repr(one)) == (other, hash(other), repr(other))
    assert one == SamplingParams(num_beams=4, beam_width=4, n=2)
    assert one == SamplingParams.from_mapping({"num_beams": 4, "n": 2})
    assert one == copy.deepcopy(one) == pickle.loads(pickle.dumps(one)) == SamplingParams(**dataclasses.asdict(one))
    assert one.num_beams == one.beam_width == 4
    assert dataclasses.replace(one, n=1).beam_width == 4
    assert dataclasses.replace(one, beam_width=3).num_beams == 3
    assert dataclasses.replace(SamplingParams(), num_beams=3).beam_width == 3
    assert SamplingParams(num_beams=None) == SamplingParams()


@pytest.mark.parametrize("given", [
    {"num_beams": 3, "beam_width": 4}, {"num_beams": 1, "beam_width": 4}, {"num_beams": 17}, {"num_beams": True},
    {"num_beams": "4"}, {"num_beams": 4, "beam_width": 17},
])  # fmt: skip
def test_a_refused_number_of_beams_is_called_by_the_name_it_was_given(given):
    """Two different widths, and values out of range, are TooManySequences that names the keyword."""
    for make in (lambda: SamplingParams(**given), lambda: SamplingParams.from_mapping(given)):
        with pytest.raises(errors.TooManySequences) as refusal:
            make()
        assert refusal.value.what == ("beam_width" if given.get("beam_width") == 17 else "num_beams")


def test_what_starts_and_what_runs_at_the_same_time():
    """A beam search starts with one sequence, everything else with all of them."""
    counted = [SamplingParams(n=3), SamplingParams(n=2, best_of=4), SamplingParams(n=2, beam_width=5)]
    assert [(params.num_initial_sequences, params.num_sequences) for params in counted] == [(3, 3), (4, 4), (1, 5)]


@pytest.mark.parametrize("other", [
    {"temperature": 0.5}, {"top_k": 2}, {"top_p": 0.5}, {"min_p": 0.1}, {"presence_penalty": 1}, {"best_of": 4},
    {"frequency_penalty": 1}, {"repetition_penalty": 2}, {"logit_bias": {1: 1.0}}, {"stop": "a"},
])  # fmt: skip
def test_beams_follow_the_models_own_distribution(other):
    """A parameter that beam search would have to ignore is refused with it, by name."""
    with pytest.raises(errors.InvalidSampling, match="where beam_width is above 1") as refusal:
        SamplingParams(beam_width=2, **other)
    assert refusal.value.what == next(iter(other))


def test_a_mapping_makes_the_same_parameters_as_keywords():
    """from_mapping is the constructor for decoded JSON."""
    decoded = {"temperature": 0.7, "top_k": 5, "stop": ["a"], "logit_bias": {"50": -100, "7": 1.5}}
    made = SamplingParams(temperature=0.7, top_k=5, stop="a", logit_bias={50: -100, 7: 1.5})
    assert SamplingParams.from_mapping(decoded) == made


@pytest.mark.parametrize("key", ["", " 1", "+1", "-1", "1.0", "1e3", "\u0661", "\u00b2", "12345678901", "0x1", "true"])
def test_keys_that_are_no_decimal_numbers_are_refused(key):
    """A JSON key is a token id only if it is made of ASCII digits and in range."""
    with pytest.raises(errors.InvalidToken):
        SamplingParams.from_mapping({"logit_bias": {key: 1.0}})


@pytest.mark.parametrize("bias", [{str(i): 1.0 for i in range(301)}, [["1", 1.0]], "1"])
def test_a_mapping_refuses_the_same_biases_as_keywords(bias):
    """Converting keys neither hides how many there are nor what kind the value has."""
    with pytest.raises(errors.InvalidBias):
        SamplingParams.from_mapping({"logit_bias": bias})


def test_unknown_names_are_refused_with_the_known_ones():
    """A misspelt name is refused, the known ones are listed, and the nearest one is proposed."""
    with pytest.raises(errors.UnknownParameter) as refusal:
        SamplingParams.from_mapping({"temprature": 1.0})
    message = str(refusal.value)
    assert message.endswith("Did you mean temperature?")
    assert all(field.name in message for field in dataclasses.fields(SamplingParams))
    assert "got 'temprature'" in message


@pytest.mark.parametrize("name", ["What is my password?", "x" * 41, "a\nb", "\u0442", "", 5])
def test_a_name_that_looks_like_text_is_not_repeated(name):
    """Only what looks like a field's name is shown: any other key may be a piece of a prompt."""
    with pytest.raises(errors.UnknownParameter) as refusal:
        SamplingParams.from_mapping({name: 1.0})
    assert refusal.value.given == errors.describe(name)


@pytest.mark.parametrize("mapping", [None, 1, "temperature", [("temperature", 1)], {1: 2}, {None: 1}, {("n",): 1}])
def test_what_is_no_mapping_of_names_is_refused(mapping):
    """from_mapping accepts mappings with parameter names only."""
    with pytest.raises(errors.UnknownParameter):
        SamplingParams.from_mapping(mapping)


def test_unknown_keywords_are_a_type_error():
    """The constructor refuses unknown names with an error that is a TypeError too, and names the nearest."""
    with pytest.raises(TypeError, match=r"got 'temprature', allowed is .*\. Did you mean temperature\?") as raised:
        SamplingParams(temprature=1.0)
    assert isinstance(raised.value, errors.UnknownParameter)


def test_the_signature_has_the_fields_and_defaults():
    """The constructor's parameters are the fields with their defaults, and the other name of ``beam_width``."""
    parameters = inspect.signature(SamplingParams).parameters.values()
    declared = {parameter.name: parameter.default for parameter in parameters}
    assert {parameter.kind for parameter in parameters} == {inspect.Parameter.KEYWORD_ONLY}
    fields = {field.name: field.default for field in dataclasses.fields(SamplingParams)}
    assert declared == fields | {"num_beams": None}


def test_a_default_is_what_is_stored_of_it() -> None:
    """Defaults are stored without being checked, so each has to be one that its check accepts and leaves as it is."""
    for one in dataclasses.fields(SamplingParams):
        stored = one.metadata["facts"].check(one.name, one.default)
        assert (type(stored), stored) == (type(one.default), one.default), one.name


def test_parameters_remember_what_was_given() -> None:
    """Whatever its value, through copies, pickles and ``replace``; it is no part of what they are."""
    assert SamplingParams().given == SamplingParams.from_mapping({}).given == frozenset()
    params = SamplingParams(temperature=0.0, num_beams=1, n=2)
    assert params.given == {"temperature", "beam_width", "n"}
    for same in (copy.copy(params), copy.deepcopy(params), pickle.loads(pickle.dumps(params)),
                 dataclasses.replace(params), SamplingParams.from_mapping({"temperature": 0, "num_beams": 1, "n": 2})):
        assert same.given == params.given
    assert dataclasses.replace(params, top_p=0.5, n=1).given == params.given | {"top_p"}
    assert (params, hash(params)) == (SamplingParams(n=2), hash(SamplingParams(n=2)))
    assert "given" not in repr(params)


def test_a_doors_default_is_not_given() -> None:
    """It gives way to a model's own, as a parameter's own default does; what was given does not."""
    own = {"temperature": 0.7, "top_p": 0.8, "min_tokens": 9}
    params = SamplingParams.from_mapping({"top_p": 1, "max_tokens": 4}, {"temperature": 1.0, "top_p": 0.3})
    assert (params.temperature, params.top_p, params.given) == (1.0, 1.0, {"top_p", "max_tokens"})
    assert dataclasses.replace(params, seed=1).given == {"top_p", "max_tokens", "seed"}
    chosen = params.with_defaults(own)
    assert chosen == SamplingParams(top_p=1, max_tokens=4, temperature=0.7, min_tokens=4)
    assert chosen.with_defaults({"temperature": 2.0}) is chosen


@pytest.mark.parametrize("given", [{"beam_width": 2}, {"structured": {"regex": "a"}}])
def test_defaults_refuse_nothing(given) -> None:
    """Whatever can be given alone gives way where it cannot be combined."""
    own = {"temperature": 0.5, "top_k": 4, "top_p": 0.5, "min_p": 0.1, "repetition_penalty": 1.3, "min_tokens": 2,
           "no_repeat_ngram_size": 2, "bad_words_ids": ((1,),), "begin_suppress_tokens": (1,),
           "forced_eos_token_id": (2,)}
    taken = SamplingParams(**given).with_defaults(own).given
    for name, value in own.items():
        try:
            SamplingParams(**given, **{name: value})
            assert name in taken
        except errors.InvalidSampling:
            assert name not in taken
