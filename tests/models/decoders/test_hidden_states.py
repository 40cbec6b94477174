"""Hidden states beside logits: those of transformers, for every kind of decoder, and no other bits of the logits."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from models.decoders.test_fused import SCHEDULE, batch_of, model_of, sequences, take_over
from pagedcore.models.decoders.plain import HiddenDecoder, ModuleDecoder
from pagedcore.models.transformers_model import TransformersModel
from pagedcore_kernels.cpu.attention.backend import NumbaCpuAttention

#: Fused with and without head norms, with multipliers and caps of logits; fused experts.
FUSED = ["llama", "qwen3", "granite", "gemma2", "olmoe"]
TOLERANCE = 2e-3


def states_of(backend: TransformersModel, schedule: list[Any], every: int = 1) -> list[np.ndarray[Any, Any]]:
    """Return the hidden states of each sequence at every ``every``-th position; the logits of each step are what they
    are without them.
    """
    found: list[np.ndarray[Any, Any]] = [np.full((len(one), backend.hidden_size), np.nan) for one in sequences()]
    for pieces in schedule:
        batch = batch_of(pieces)
        alone = backend.forward(batch).clone()
        owners = [(i, position) for i, start, end in pieces for position in range(start, end)]
        rows = np.array([place for place, (_, position) in enumerate(owners) if position % every == 0], np.int64)
        logits, hidden = backend.forward_hidden(batch, rows)
        assert torch.equal(logits, alone)
        for row, states in zip(rows.tolist(), hidden, strict=True):
            number, position = owners[row]
            found[number][position] = states
    return found


@pytest.mark.parametrize("name", [*FUSED, "plain llama"])
def test_hidden_states_are_those_of_transformers(name: str) -> None:
    """Of every position, in chunks and in company, within the bound of the self-test: the last hidden states of the
    model without its head. Wanting them changes no bit of any logit."""
    model, options = model_of(name.removeprefix("plain ")), {}
    if name.startswith("plain"):
        options["decoder_factory"] = ModuleDecoder
    expected = []
    with torch.inference_mode():
        for tokens in sequences():
            expected.append(model.base_model(torch.from_numpy(tokens)[None]).last_hidden_state[0].numpy())
    backend = take_over(model, **options)
    assert isinstance(backend._decoder, HiddenDecoder)
    for own, known in zip(states_of(backend, SCHEDULE), expected, strict=True):
        seen = ~np.isnan(own).any(-1)
        assert seen.any()
        distance = np.linalg.norm(own - known, axis=-1)[seen] / np.linalg.norm(known, axis=-1)[seen]
        assert distance.max() < TOLERANCE


@pytest.mark.parametrize("name", FUSED)
def test_hidden_states_are_the_same_bits_for_any_schedule(name: str) -> None:
    """A token's state does not depend on how its sequence was cut, who else was there, or what else was wanted."""
    backend = take_over(model_of(name, dtype=torch.bfloat16))
    whole = states_of(backend, [[(i, 0, len(one))] for i, one in enumerate(sequences())])
    for every in (1, 7):
        for own, known in zip(states_of(backend, SCHEDULE, every), whole, strict=True):
            seen = ~np.isnan(own).any(-1)
            assert np.array_equal(own[seen], known[seen])


def test_a_step_may_want_no_logits() -> None:
    """Then there are none, and a single hidden state is the one that it is in company."""
    backend = take_over(model_of("qwen3"))
    batch = batch_of([(0, 0, 21)])
    _, all_states = backend.forward_hidden(batch, np.arange(21))
    logits, states = backend.forward_hidden(
        type(batch)(**{**{name: getattr(batch, name) for name in batch.__dataclass_fields__},
                       "logits_rows": np.zeros(0, np.int64)}), np.array([20]))
    assert len(logits) == 0
    assert states.dtype == np.float32
    assert np.array_equal(states[0], all_states[20])


def test_a_model_without_a_head_of_its_own_size_has_none() -> None:
    """A backend says the size of its hidden states, or 0 where its decoder returns none."""

    class OnlyLogits:
        def __init__(self, *given: Any) -> None:
            self._decoder = ModuleDecoder(*given)
            self.products, self.other_matrices = self._decoder.products, self._decoder.other_matrices

        def __call__(self, *given: Any) -> torch.Tensor:
            return self._decoder(*given)

        def fallback(self) -> None:
            return None

    model = model_of("llama")
    hidden_size = model.config.hidden_size
    backend = TransformersModel(model, NumbaCpuAttention, decoder_factory=OnlyLogits)
    assert backend.hidden_size == 0
    assert TransformersModel(model_of("llama"), NumbaCpuAttention).hidden_size == hidden_size
