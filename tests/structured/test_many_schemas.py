"""Completions of the demo model under fifty schemas, judged by another library: what is not cut off is valid."""

from __future__ import annotations

import json
from collections import Counter
from decimal import Decimal
from pathlib import Path
from typing import Any, Final

import pytest
from jsonschema import Draft202012Validator, FormatChecker

from pagedcore import Engine, SamplingParams, StructuredOutput

SCHEMAS: Final[list[dict[str, Any]]] = json.loads((Path(__file__).parent / "schemas.json").read_text())
"""The kinds are those of JSONSchemaBench; the schemas were written for this test."""
MAX_TOKENS: Final = 300


def complete(engine: Engine, num_requests: int) -> tuple[int, list[str]]:
    """Complete under the schemas in turn, with seeds and temperatures of their own; return how many were cut off by the
    limit, and the kinds whose completions are not valid."""
    wanted = [
        SamplingParams(max_tokens=MAX_TOKENS, temperature=(0.0, 0.7, 1.0, 1.5)[place // len(SCHEMAS) % 4], seed=place,
                       structured=StructuredOutput(json_schema=SCHEMAS[place % len(SCHEMAS)]["schema"]))
        for place in range(num_requests)
    ]
    prompts = [[{"role": "user", "content": f"Give me an example of number {place}."}] for place in range(num_requests)]
    outputs = [output.outputs[0] for output in engine.generate(prompts, wanted)]
    assert {output.finish_reason for output in outputs} <= {"stop", "length"}
    wrong = []
    for place, output in enumerate(outputs):
        one = SCHEMAS[place % len(SCHEMAS)]
        if output.finish_reason == "stop" and not _is_valid(one["schema"], output.text):
            wrong.append(f"{one['kind']}: {output.text}")
    return Counter(output.finish_reason for output in outputs)["length"], wrong


def _is_valid(schema: dict[str, Any], text: str) -> bool:
    # Why decimals: by floats 9.19 is no multiple of 0.01.
    exact = json.loads(json.dumps(schema), parse_float=Decimal)
    return Draft202012Validator(exact, format_checker=FormatChecker()).is_valid(json.loads(text, parse_float=Decimal))


def test_numbers_are_judged_as_decimals() -> None:
    """What is a multiple in decimals is one here, and what is none is none."""
    schema = {"type": "number", "multipleOf": 0.01}
    assert _is_valid(schema, "9.19")
    assert not _is_valid(schema, "9.195")


def test_the_schemas_are_fifty_of_eight_kinds() -> None:
    """All of them are schemas, and no two are the same."""
    for one in SCHEMAS:
        Draft202012Validator.check_schema(one["schema"])
    assert len({json.dumps(one) for one in SCHEMAS}) == 50
    assert len({one["kind"] for one in SCHEMAS}) == 8


@pytest.mark.parametrize("num_requests", [60, pytest.param(1000, marks=pytest.mark.slow)])
def test_completions_are_valid(num_requests: int) -> None:
    """All that are not cut off by the limit are valid, and at most 5 % are cut off."""
    with Engine.from_pretrained("demo", max_num_seqs=64) as engine:
        num_cut, wrong = complete(engine, num_requests)
    assert wrong == []
    assert num_cut <= 0.05 * num_requests
