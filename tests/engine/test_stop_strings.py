"""Stop strings end to end: why a completion ended, and where its text ends."""

from __future__ import annotations

import pytest

from pagedcore import Engine, SamplingParams

QUESTION = "What is 2 + 3?"


@pytest.fixture(scope="module")
def engine() -> Engine:
    return Engine.from_pretrained("demo", num_kv_blocks=64)


@pytest.mark.parametrize("num_tokens", [3, 5, 8])
@pytest.mark.parametrize("way", [{}, {"n": 2, "best_of": 3, "temperature": 1.0, "seed": 3}])
def test_a_stop_string_in_the_last_allowed_token_is_the_reason(
    engine: Engine, num_tokens: int, way: dict[str, int]
) -> None:
    """The token that completes a stop string is also the last one of ``max_tokens``: the reason is "stop", and the text
    ends before the string."""
    params = {"temperature": 0.0, "max_tokens": num_tokens, "ignore_eos": True} | way
    (without,) = engine.generate([QUESTION], SamplingParams(**params), show_progress=False)
    stop = tuple(dict.fromkeys(completion.text[-1] for completion in without.outputs))
    (output,) = engine.generate([QUESTION], SamplingParams(stop=stop, min_tokens=num_tokens - 1, **params),
                                show_progress=False)
    for completion in output.outputs:
        assert completion.finish_reason == "stop"
        assert len(completion.token_ids) == num_tokens
        assert completion.text in {one.text[:-1] for one in without.outputs}


def test_an_abort_returns_the_text_that_was_held_back(engine: Engine) -> None:
    """Text that might have become a stop string is text once no token follows."""
    params = SamplingParams(max_tokens=8, ignore_eos=True)
    # Why without guesses: the second answer would be guessed from the first, and come at once.
    request = engine.add_request(QUESTION, params, speculate=False)
    while len(request.sequences[0].output_token_ids) < 3:
        engine.step()
    request.abort()
    text = request.output().outputs[0].text
    stopped = SamplingParams(max_tokens=8, ignore_eos=True, stop=(text + "\0",))
    request = engine.add_request(QUESTION, stopped, speculate=False)
    while len(request.sequences[0].output_token_ids) < 3:
        engine.step()
    assert request.output().outputs[0].text == ""
    request.abort()
    assert text
    assert request.output().outputs[0].text == text
