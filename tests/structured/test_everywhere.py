"""Structured output where completions wait, travel, or are asked for from an event loop; and with other tokenizers."""

from __future__ import annotations

import asyncio
import copy
import json
import pickle
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pagedcore import AsyncEngine, Engine, SamplingParams, StructuredOutput
from pagedcore.errors import InvalidGrammar
from pagedcore.structured.grammars import Grammars
from pagedcore.tokenizer.tokenizer import HFTokenizer
from support.text_builders import make_fast

PROMPT = [{"role": "user", "content": "What is 2 + 3?"}]
FORM = StructuredOutput(json_schema={
    "type": "object", "required": ["a", "b"], "additionalProperties": False,
    "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 9999}, "b": {"enum": ["x", "yy"]}},
})
PARAMS = SamplingParams(max_tokens=80, temperature=1.5, seed=4, structured=FORM)


def is_valid(text: str) -> bool:
    value = json.loads(text)
    return list(value) == ["a", "b"] and type(value["a"]) is int and value["b"] in ("x", "yy")


def test_a_turn_that_was_cut_off_continues_its_grammar_elsewhere(engine: Engine, tmp_path: Path) -> None:
    """Aborted after any number of tokens, forked, exported and completed in another engine: the same completion."""
    with engine.session(PARAMS) as session:
        whole = session.ask(PROMPT).outputs[0]
    assert is_valid(whole.text)
    with Engine.from_pretrained("demo") as other:
        for num_tokens in (1, 5, len(whole.token_ids) - 2):
            with engine.session(PARAMS, speculate=False) as session:
                request = session.extend(PROMPT)
                while len(request.output().outputs[0].token_ids) < num_tokens:
                    engine.step()
                request.abort()
                with session.fork() as fork:
                    assert fork.ask(None).outputs[0].token_ids == whole.token_ids
                session.export(tmp_path / "chat.json")
                assert session.ask(None).outputs[0].text == whole.text
            with other.import_session(tmp_path / "chat.json") as session:
                assert session.ask(None).outputs[0].token_ids == whole.token_ids
                assert is_valid(session.ask("And 4 + 4?").outputs[0].text)


def test_a_session_s_next_turn_has_a_grammar_of_its_own_or_none(engine: Engine) -> None:
    """Parameters of a turn replace those before, grammar included."""
    with engine.session(PARAMS) as session:
        assert is_valid(session.ask(PROMPT).outputs[0].text)
        assert session.ask("Again?", SamplingParams(max_tokens=20)).outputs[0].text[0] != "{"
        assert session.ask("Again?", SamplingParams(structured={"choice": ["so it is"]})).outputs[0].text == "so it is"
        assert is_valid(session.ask("Again?").outputs[0].text)


async def test_no_event_loop_or_engine_thread_compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Through every way of an AsyncEngine, sessions and the continuation of a turn among them."""
    compiling: set[str] = set()
    compile_grammar = Grammars.compile

    def noted(self: Grammars, wanted: StructuredOutput, owner: bytes) -> Any:
        compiling.add(threading.current_thread().name)
        return compile_grammar(self, wanted, owner)

    monkeypatch.setattr(Grammars, "compile", noted)
    async with AsyncEngine.from_pretrained("demo") as engine:
        texts = ["".join([delta.text async for delta in engine.generate(PROMPT, PARAMS)])]
        texts.append((await asyncio.wrap_future(engine.submit(PROMPT, PARAMS))).outputs[0].text)
        async with engine.session(PARAMS) as session:
            texts.append((await session.ask(PROMPT)).outputs[0].text)
            stream = session.stream("Again?")
            await anext(stream)
            await stream.aclose()
            texts.append((await session.ask(None)).outputs[0].text)
        with pytest.raises(InvalidGrammar):
            await anext(engine.generate(PROMPT, SamplingParams(structured={"regex": "("})))
    assert all(is_valid(text) for text in texts)
    assert compiling
    assert not {"MainThread", "pagedcore-engine"} & compiling


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback"])
def test_other_kinds_of_tokenizers(kind: str) -> None:
    """Byte-level and SentencePiece-like vocabularies: every token that is allowed continues the text as it decodes."""
    tokenizer = HFTokenizer(make_fast(kind))
    size = max(tokenizer._tokenizer.get_vocab().values()) + 1
    grammars = Grammars(tokenizer, size + 37, frozenset({0}))
    cursor, tokens = grammars.compile(StructuredOutput(regex="é[a-z ]{3,40}日本?")), list[int]()
    rng = np.random.default_rng(1)
    while 0 not in tokens:
        rows = np.zeros((1, size + 37), np.float32)
        assert grammars.mask_rows(rows, [(0, cursor, tokens)]) == {}
        assert not np.isfinite(rows[0, size:]).any()
        tokens.append(int(rng.choice(np.flatnonzero(rows[0] == 0.0))))
    text = b"".join(tokenizer.token_text(token_id).utf8 or b"" for token_id in tokens[:-1]).decode()
    assert text[0] == "é"
    assert text.rstrip("本")[-1] == "日"


def test_parameters_with_a_grammar_are_values() -> None:
    """They can be hashed, compared, copied and pickled, and their mapping makes the same ones."""
    for form in (FORM, StructuredOutput(choice=["b", "a", "b"]), StructuredOutput(json_object=True)):
        params = SamplingParams(structured=form)
        assert len({params, copy.copy(params), pickle.loads(pickle.dumps(params))}) == 1
        assert SamplingParams.from_mapping({"structured": json.loads(json.dumps(form.as_mapping()))}) == params
    assert StructuredOutput(choice=["b", "a", "b"]).choice == ("b", "a")


def test_a_schema_keeps_the_order_of_its_properties() -> None:
    """An object and its text are the same schema; another order of its properties is another one."""
    text = '{"properties": {"b": {}, "a": {"const": "\\u00e9"}}}'
    one = StructuredOutput(json_schema=text)
    assert one == StructuredOutput(json_schema=json.loads(text))
    assert one.json_schema == '{"properties":{"b":{},"a":{"const":"é"}}}'
    assert one != StructuredOutput(json_schema={"properties": {"a": {"const": "é"}, "b": {}}})
