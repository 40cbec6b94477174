"""Structured output of an engine: what completions look like, how they end, and what a step that is undone changes."""

from __future__ import annotations

import json
import re
from typing import Any

import numpy as np
import pytest

from pagedcore import Engine, SamplingParams, StructuredOutput
from pagedcore.errors import GrammarFailed, InvalidGrammar, InvalidSampling, MissingDependency
from pagedcore.execution.sampler import Sampler
from pagedcore.request_options import RequestOptions
from support.doubles import ToyBackend
from support.engine_builders import make_engine

PROMPT = "What is 12 + 30?"
ANSWER = {"type": "object", "properties": {"answer": {"type": "integer", "minimum": 0, "maximum": 999},
                                           "unit": {"enum": ["none", "euro"]}},
          "required": ["answer", "unit"], "additionalProperties": False}
FORMS: dict[str, Any] = {
    "json_schema": ANSWER, "json_object": True, "regex": "[0-9]{2,4}", "choice": ["forty-two", "not known, é"],
    "lark": 'start: "result " %json {"type": "integer", "minimum": 10, "maximum": 99} "."',
    "ebnf": 'root ::= "(" digit digit? ")"\ndigit ::= [0-9]',
}


def is_valid(form: str, text: str) -> bool:
    match form:
        case "json_schema":
            value = json.loads(text)
            return list(value) == ["answer", "unit"] and type(value["answer"]) is int and 0 <= value["answer"] <= 999
        case "json_object":
            return isinstance(json.loads(text), dict)
        case "choice":
            return text in FORMS["choice"]
    patterns = {"regex": "[0-9]{2,4}", "lark": r"result [1-9][0-9]\.", "ebnf": r"\([0-9]{1,2}\)"}
    return re.fullmatch(patterns[form], text) is not None


def params(form: str, **more: Any) -> SamplingParams:
    """Sample with much randomness, so that nothing but the mask keeps the form; little where that would not end."""
    temperature = 0.0 if form == "json_object" else 2.0
    return SamplingParams(**{"max_tokens": 120, "temperature": temperature, "seed": 1,
                             "structured": {form: FORMS[form]}, **more})


@pytest.mark.parametrize("form", FORMS)
def test_a_completion_has_the_form_that_is_asked_for(engine: Engine, form: str) -> None:
    """Every way of writing a grammar is kept, whatever is sampled, and ends the completion by itself."""
    outputs = engine.generate([PROMPT] * 4, [params(form, seed=seed) for seed in range(4)])
    assert [output.outputs[0].finish_reason for output in outputs] == ["stop"] * 4
    assert [output.outputs[0].text for output in outputs if not is_valid(form, output.outputs[0].text)] == []


def test_a_row_does_not_depend_on_its_company(engine: Engine) -> None:
    """Alone, beside rows with and without grammars, and preempted in a small pool: the same tokens."""
    wanted = [params(form, seed=3, logprobs=2) for form in FORMS] + [SamplingParams(max_tokens=40, logprobs=2)] * 2
    alone = [engine.generate([PROMPT], one)[0].outputs[0] for one in wanted]
    together = [output.outputs[0] for output in engine.generate([PROMPT] * len(wanted), wanted)]
    with Engine.from_pretrained(
        "demo", num_kv_blocks=9, block_size=16, check_invariants=True, speculation="off"
    ) as small:
        squeezed = small.generate([PROMPT] * len(wanted), wanted)
        assert small.stats().num_preemptions > 0
    for one, two, three in zip(alone, together, squeezed, strict=True):
        assert one.token_ids == two.token_ids == three.outputs[0].token_ids
        assert one.logprobs == two.logprobs == three.outputs[0].logprobs


def test_log_probabilities_are_the_model_s_own(engine: Engine) -> None:
    """A mask changes what is chosen; what is reported is the distribution without it."""
    plain = engine.generate([PROMPT], SamplingParams(max_tokens=1, logprobs=5))[0].outputs[0].logprobs
    masked = engine.generate([PROMPT], SamplingParams(max_tokens=1, logprobs=5, structured={"regex": "[x-z]+"}))
    (chosen,) = masked[0].outputs[0].logprobs
    assert chosen.top == plain[0].top
    assert chosen.token_id not in dict(chosen.top)
    assert chosen.logprob < min(value for _, value in chosen.top)


def test_a_grammar_that_can_go_on_ends_where_the_model_ends_it_or_at_the_limit(engine: Engine) -> None:
    """The end token is among the choices exactly where the grammar accepts."""
    wanted = SamplingParams(max_tokens=20, structured={"regex": "(ab)*c"}, logit_bias=bias(engine, "c"))
    never = engine.generate([PROMPT], wanted)
    assert never[0].outputs[0].finish_reason == "length"
    assert re.fullmatch("(ab)*a?", never[0].outputs[0].text)


def bias(engine: Engine, text: str) -> dict[int, float]:
    """Make all tokens with a text as unlikely as a bias can."""
    return {token_id: -100.0 for token_id in range(2048) if text in engine.token_text(token_id).text}


def test_completions_of_one_request_each_follow_the_grammar(engine: Engine) -> None:
    """With ``n`` and with ``best_of``, each completion has a place of its own in the grammar."""
    (output,) = engine.generate([PROMPT], params("json_schema", n=4))
    assert len({one.token_ids for one in output.outputs}) > 1
    assert all(is_valid("json_schema", one.text) for one in output.outputs)
    (output,) = engine.generate([PROMPT], params("json_schema", n=2, best_of=4))
    assert all(is_valid("json_schema", one.text) for one in output.outputs)


def test_stop_strings_and_stop_tokens_end_a_completion_within_the_grammar(engine: Engine) -> None:
    """They end it wherever they occur, complete or not: the caller asked for both."""
    (output,) = engine.generate([PROMPT], params("json_schema", stop=["unit"]))
    assert output.outputs[0].finish_reason == "stop"
    assert output.outputs[0].text.endswith('"')


@pytest.mark.parametrize("others", [{"min_tokens": 1}, {"ignore_eos": True}, {"beam_width": 2}])
def test_what_contradicts_a_grammar_is_refused(others: dict[str, Any]) -> None:
    """Where the grammar ends, the completion ends; beams know no masks."""
    with pytest.raises(InvalidSampling) as refusal:
        SamplingParams(structured=StructuredOutput(json_object=True), **others)
    assert refusal.value.what in {*others, "structured"}


def test_a_step_that_is_undone_advances_no_grammar(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps that fail after their masks, and are computed again in halves, change no token."""
    wanted = [params(form, seed=5) for form in FORMS]
    expected = [output.outputs[0].token_ids for output in engine.generate([PROMPT] * len(wanted), wanted)]
    choose, calls = Sampler._choose, []

    def failing(self: Sampler, rows: Any, sequences: Any, *more: Any) -> Any:
        calls.append(1)
        if len(calls) % 3 == 1 and len(sequences) > 3:
            raise RuntimeError("a row cannot be sampled")
        return choose(self, rows, sequences, *more)

    monkeypatch.setattr(Sampler, "_choose", failing)
    got = [output.outputs[0].token_ids for output in engine.generate([PROMPT] * len(wanted), wanted)]
    assert len(calls) > 30
    assert got == expected


def test_a_grammar_that_explodes_ends_its_own_request_only(engine: Engine) -> None:
    """Beside it, in the same steps, another grammar and no grammar get the tokens that they get alone."""
    others = [params("json_schema"), SamplingParams(max_tokens=30)]
    expected = [output.outputs[0].token_ids for output in engine.generate([PROMPT] * 2, others)]
    grammar = 'start: ("a"{1,100000}){1,100000} "b"'
    bomb = SamplingParams(max_tokens=200, structured={"lark": grammar}, logit_bias=bias(engine, "b"))
    outputs = engine.generate([PROMPT] * 3, [others[0], bomb, others[1]])
    assert [outputs[0].outputs[0].token_ids, outputs[2].outputs[0].token_ids] == expected
    assert isinstance(outputs[1].outputs[0].error, GrammarFailed)
    assert outputs[1].outputs[0].finish_reason == "error"


def test_a_grammar_fails_in_a_step_that_is_computed_in_parts(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a failing step is computed again in halves, a failing grammar still ends as what it is."""
    choose = Sampler._choose

    def failing(self: Sampler, rows: Any, sequences: Any, *more: Any) -> Any:
        if len(sequences) > 1:
            raise RuntimeError("together they cannot be sampled")
        return choose(self, rows, sequences, *more)

    monkeypatch.setattr(Sampler, "_choose", failing)
    grammar = 'start: ("a"{1,100000}){1,100000} "b"'
    bomb = SamplingParams(max_tokens=200, structured={"lark": grammar}, logit_bias=bias(engine, "b"))
    outputs = engine.generate([PROMPT] * 2, [bomb, SamplingParams(max_tokens=100, ignore_eos=True)])
    assert len(outputs[0].outputs[0].token_ids) < 90
    assert isinstance(outputs[0].outputs[0].error, GrammarFailed)
    assert outputs[1].outputs[0].error is None


def test_a_cursor_follows_any_completion(engine: Engine) -> None:
    """Whatever tokens it is asked about, in any order, on it or on its branch: the mask is that of a fresh one."""
    grammars = engine.input_processor.grammars
    assert grammars is not None
    wanted = SamplingParams(structured={"regex": "[ab]{3}[cd]{3}"})
    cursor, letters = engine.input_processor.constraint_of(wanted), {}
    for letter in "abcd":
        (letters[letter],) = engine.input_processor.process(letter, None, RequestOptions()).token_ids
    branch = cursor.branch()
    for text in ("", "ab", "abac", "ab", "ba", "bab", "babd", "a", "aaaccc", "b"):
        ids = [letters[letter] for letter in text]
        rows = np.zeros((3, 2048), np.float32)
        fresh = engine.input_processor.constraint_of(wanted)
        assert grammars.mask_rows(rows, [(0, cursor, ids), (1, branch, ids[:1]), (2, fresh, ids)]) == {}
        assert (rows[0] == rows[2]).all()
        assert (rows[1] == 0).any()
        assert np.isfinite(rows[0, letters["c"]]) == (3 <= len(text) < 6)
        assert np.isneginf(rows[1, letters["c"]])


def test_a_grammar_without_any_text_is_refused(engine: Engine) -> None:
    """What no completion can be is found before the request is accepted."""
    num_finished = engine.num_finished
    for form, value in (("json_schema", {"$ref": "#"}), ("regex", "[a&&b]"), ("lark", 'start: start "a"')):
        with pytest.raises(InvalidGrammar, match=f"{form}: .* no token of the vocabulary continues it"):
            engine.add_request(PROMPT, SamplingParams(structured={form: value}))
    assert not engine.has_pending_requests()
    assert engine.num_finished == num_finished


def test_a_model_whose_vocabulary_is_unknown_has_no_structured_output() -> None:
    """Without a tokenizer of the library, or without an end token, the request is refused."""
    with pytest.raises(InvalidGrammar, match="structured"):
        make_engine(ToyBackend()).add_request([1, 2], SamplingParams(structured={"regex": "a"}))


def test_without_the_library_the_refusal_says_what_to_install(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """A request that asks for structured output names the extra; others need nothing."""
    monkeypatch.setitem(__import__("sys").modules, "llguidance", None)
    with pytest.raises(MissingDependency, match=re.escape("pip install 'pagedcore[structured]'")):
        engine.add_request(PROMPT, SamplingParams(structured={"regex": "a"}))
    assert engine.generate([PROMPT], SamplingParams(max_tokens=1))[0].outputs[0].token_ids


def test_a_broken_row_stays_recognisable(engine: Engine) -> None:
    """NaN and plus infinity are left under a mask; every finite logit of a token that is not allowed goes."""
    grammars = engine.input_processor.grammars
    assert grammars is not None
    constraint = engine.input_processor.constraint_of(SamplingParams(structured={"regex": "[0-9]+"}))
    rows = np.zeros((2, 2048), np.float32)
    rows[0, :3] = np.nan, np.inf, -np.inf
    assert grammars.mask_rows(rows, [(0, constraint, [])]) == {}
    assert np.isnan(rows[0, 0])
    assert rows[0, 1] == np.inf
    allowed = {token_id for token_id in range(3, 2048) if rows[0, token_id] == 0.0}
    assert allowed == {one for one in range(3, 2048) if re.fullmatch("[0-9]+", engine.token_text(one).text)}
    assert not rows[1].any()
