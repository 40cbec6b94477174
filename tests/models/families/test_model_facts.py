from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from pagedcore.errors import InvalidConfig, ModelNotSupported
from pagedcore.models.families.model_facts import eos_token_ids, max_model_len, num_short_tokens


def config(**fields: Any) -> Any:
    return SimpleNamespace(model_type="tested", **fields)


@pytest.mark.parametrize(("fields", "expected"), [
    ({"max_position_embeddings": 4096}, 4096),
    ({"n_positions": 1024}, 1024),
    ({"max_seq_len": 2048}, 2048),
    ({"max_position_embeddings": 4096, "rope_parameters": None}, 4096),
    ({"max_position_embeddings": 4096, "rope_parameters": {"rope_type": "default"}}, 4096),
    ({"max_position_embeddings": 131072, "rope_parameters": {
        "rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 8192}}, 131072),
    ({"max_position_embeddings": 32768, "rope_parameters": {
        "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}}, 131072),
    ({"max_position_embeddings": 131072, "rope_parameters": {
        "rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096}}, 131072),
    ({"max_position_embeddings": 131072, "rope_parameters": {
        "rope_type": "longrope", "original_max_position_embeddings": 4096}}, 4096),
    ({"max_position_embeddings": 4096, "rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, 4096),
    ({"max_position_embeddings": 32768, "rope_scaling": {"type": "linear", "factor": 2.0}}, 32768),
    ({"max_position_embeddings": 32768, "rope_parameters": {
        "full_attention": {"rope_type": "linear", "factor": 8.0}, "sliding_attention": {"rope_type": "default"},
    }}, 32768),
], ids=str)
def test_longest_context_is_that_of_one_sequence_alone(fields: dict[str, Any], expected: int) -> None:
    """Stretched embeddings count where they are the same for every batch; those that follow the batch do not."""
    assert max_model_len(config(**fields)) == expected


@pytest.mark.parametrize(("family", "original", "expected"), [
    ("phi3", 4096, (131072, 4096)), ("phimoe", 4096, (131072, 4096)), ("phi3", 131072, (131072, None)),
    ("phi4_multimodal", 4096, (4096, None)),
])
def test_longrope_has_two_kinds_of_angles(family: str, original: int, expected: tuple[int, int | None]) -> None:
    """Where positions are known to be read for angles alone, the context is whole, and sequences are of two kinds."""
    rope = {"rope_type": "longrope", "original_max_position_embeddings": original}
    made = SimpleNamespace(model_type=family, max_position_embeddings=131072, rope_parameters=rope)
    assert (max_model_len(made), num_short_tokens(made)) == expected
    made.rope_parameters = {"full_attention": rope, "sliding_attention": {"rope_type": "default"}}
    assert (max_model_len(made), num_short_tokens(made)) == expected
    made.rope_parameters["other"] = {**rope, "original_max_position_embeddings": 64}
    assert (max_model_len(made), num_short_tokens(made)) == (64, None)


def test_a_configuration_without_a_length_is_refused() -> None:
    """A model that does not say how long a context may be cannot be scheduled."""
    with pytest.raises(ModelNotSupported, match="'tested'"):
        max_model_len(config())


@pytest.mark.parametrize(("generation", "own", "expected"), [
    ([5, 6], 5, {5, 6}), (7, None, {7}), (None, 3, {3}), (None, None, set()), (None, [1, 2], {1, 2}),
])
def test_end_tokens_come_from_both_places(generation: Any, own: Any, expected: set[int]) -> None:
    """Whatever generation settings or configuration call the end ends an answer."""
    model = SimpleNamespace(generation_config=SimpleNamespace(eos_token_id=generation), config=config(eos_token_id=own))
    assert eos_token_ids(model) == expected


@pytest.mark.parametrize("given", ["x", [1, "2"], 2.5, True, {"a": 1}, [[3]]], ids=str)
def test_end_tokens_that_are_none_are_refused(given: Any) -> None:
    """Files of a model may say anything."""
    model = SimpleNamespace(generation_config=SimpleNamespace(eos_token_id=given), config=config(eos_token_id=1))
    with pytest.raises(InvalidConfig, match="eos_token_id has "):
        eos_token_ids(model)
