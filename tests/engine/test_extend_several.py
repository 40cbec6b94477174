"""Further turns after several completions: one of them is continued, and the others leave nothing behind."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from pagedcore import AsyncEngine, SamplingParams
from pagedcore.analysis.replay.point import find_point
from pagedcore.errors import InvalidRequest, InvalidToken, PromptTooLong, RequestStateError
from pagedcore.requests.request import Request
from support.doubles import FakeClock, ToyBackend, toy_answer
from support.engine_builders import assert_all_free, make_engine, run
from support.letters import WritesLetters
from support.recordings import dumped, toy_engine

PROMPT = [3, 5, 7, 9, 11]
DRAWN: dict[str, Any] = {"max_tokens": 5, "temperature": 1.0, "seed": 3, "ignore_eos": True}
GREEDY = SamplingParams(max_tokens=4, ignore_eos=True)


class Endless(ToyBackend):
    """A toy that never ends by itself."""

    eos_token_ids = frozenset()


def texts(request: Request) -> list[tuple[int, tuple[int, ...], str]]:
    return [(one.index, one.token_ids, one.text) for one in request.output().outputs]


def letters(tokens: Any) -> str:
    return "".join(chr(97 + token) for token in tokens)


@pytest.mark.parametrize("params", [
    SamplingParams(**DRAWN, n=3), SamplingParams(**DRAWN, n=3, best_of=4),
    SamplingParams(max_tokens=5, beam_width=3, n=3, ignore_eos=True),
], ids=["n", "best_of", "beams"])
@pytest.mark.parametrize("index", [0, 2])
def test_the_named_completion_is_continued(params: SamplingParams, index: int) -> None:
    """However it was chosen: the turn's prompt is the conversation with it, and nothing is kept of the others."""
    with make_engine(Endless(), num_kv_blocks=64, tokenizer=WritesLetters()) as engine:
        request = engine.add_request(PROMPT, params)
        run(engine)
        chosen = request.output().outputs[index]
        request.extend([4, 6], GREEDY, index=index)
        known = [*PROMPT, *chosen.token_ids, 4, 6]
        assert request.prompt_token_ids == known
        run(engine)
        expected = tuple(toy_answer(known, 4))
        assert texts(request) == [(0, expected, letters(expected))]
        assert request.take_new_tokens() == list(expected)
        assert request.output().num_cached_tokens > (0 if params.has_candidates else 8)
        assert len(engine._outputs.by_sequence) == 1
        request.remove()
        assert_all_free(engine)
        assert not engine._outputs.by_sequence


def test_a_turn_has_as_many_completions_as_its_parameters_say() -> None:
    """One becomes several, several become fewer or as many again; drawn, each has a seed of its own."""
    with make_engine(Endless(), num_kv_blocks=128, max_num_batched_tokens=32) as engine:
        request, known = engine.add_request(PROMPT, GREEDY), list(PROMPT)
        run(engine)
        for n, params, index in ((3, SamplingParams(**DRAWN, n=3), None), (3, None, 1),
                                 (2, SamplingParams(**DRAWN, n=2, best_of=3), 2), (1, GREEDY, 1)):
            known += [*request.output().outputs[index or 0].token_ids, 4]
            request.extend([4], params, index=index)
            run(engine)
            output = request.output()
            assert (len(output.outputs), output.prompt_token_ids) == (n, tuple(known))
            assert [one.index for one in output.outputs] == list(range(n))
            assert len({one.token_ids for one in output.outputs}) == n
            alone = engine.add_request(known, SamplingParams(**{**DRAWN, "n": n, "best_of": request.params.best_of})
                                       if n > 1 else GREEDY)
            run(engine)
            if params is not None:
                assert [one.token_ids for one in alone.output().outputs] == [one.token_ids for one in output.outputs]
            alone.remove()
        request.remove()
        assert_all_free(engine)


def test_scores_of_the_prompt_come_with_any_completion() -> None:
    """The first completion has scored the prompt; a turn that continues another one reports all of it, once."""
    with make_engine(Endless(), num_kv_blocks=64) as engine:
        params = SamplingParams(**DRAWN, n=2, prompt_logprobs=1)
        request = engine.add_request(PROMPT, params)
        run(engine)
        request.extend([4], index=1)
        run(engine)
        found, known = request.output().prompt_logprobs, request.prompt_token_ids
        alone = engine.add_request(known, params)
        run(engine)
        assert found == alone.output().prompt_logprobs
        assert found is not None
        assert len(found) == len(known)


def test_it_has_to_be_said_which_and_a_refusal_changes_nothing() -> None:
    """Without an index, with a wrong one, or with a refused prompt, every completion stays, and can be chosen."""
    with make_engine(Endless(), num_kv_blocks=64, tokenizer=WritesLetters()) as engine:
        request = engine.add_request(PROMPT, SamplingParams(**DRAWN, n=2))
        with pytest.raises(RequestStateError, match="running"):
            request.extend([4], index=0)
        run(engine)
        before, context = texts(request), engine.stats().max_model_len
        for index, error, prompt in ((None, RequestStateError, [4]), (2, InvalidRequest, [4]),
                                     (-1, InvalidRequest, [4]), (True, InvalidRequest, [4]),
                                     (1, InvalidToken, [10**9]), (1, PromptTooLong, [4] * context)):
            with pytest.raises(error):
                request.extend(prompt, index=index)  # type: ignore[arg-type]
            assert texts(request) == before
        request.extend([4], GREEDY, index=1)
        run(engine)
        assert request.prompt_token_ids == [*PROMPT, *before[1][1], 4]
        request.remove()
        with pytest.raises(RequestStateError, match="removed"):
            request.extend([4])


def test_a_recording_names_the_completions_of_the_latest_turn(tmp_path: Path) -> None:
    """A point of a turn with several completions is found among these, not among those of the turn before."""
    engine = toy_engine("tokens", Endless(), FakeClock())
    request = engine.add_request(PROMPT, SamplingParams(**DRAWN, n=2))
    run(engine)
    request.extend([4], index=1)
    run(engine)
    recording = dumped(engine, tmp_path)
    for completion in request.output().outputs:
        point = find_point(recording, request.request_id, 2, completion.index)
        assert point.token_ids == (*request.prompt_token_ids, *completion.token_ids[:2])
        assert point.token_id == completion.token_ids[2]


def test_an_async_engine_continues_what_it_has_returned() -> None:
    """Each completion of an output, several at once, with text or tokens; the tokens are those of the conversation."""
    async def main() -> None:
        async with AsyncEngine(make_engine(Endless(), num_kv_blocks=128, max_num_waiting=16)) as served:
            first = await asyncio.wrap_future(served.submit(PROMPT, SamplingParams(**DRAWN, n=2), cache_salt="mine"))
            again = [served.extend(first, [4, 6], GREEDY, index=index, cache_salt="mine") for index in (0, 1)]
            outputs = [await asyncio.wrap_future(one) for one in again]
            for before, output in zip(first.outputs, outputs, strict=True):
                known = [*PROMPT, *before.token_ids, 4, 6]
                assert output.prompt_token_ids == tuple(known)
                assert output.outputs[0].token_ids == tuple(toy_answer(known, 4))
                assert output.num_cached_tokens >= 8
            third = await asyncio.wrap_future(served.extend(outputs[0], [5], GREEDY))
            assert third.num_cached_tokens == 0
            assert third.prompt_token_ids == (*outputs[0].prompt_token_ids, *outputs[0].outputs[0].token_ids, 5)
            for index in (None, 2):
                with pytest.raises(InvalidRequest):
                    served.extend(first, [4], index=index)
            with pytest.raises(InvalidRequest, match="output"):
                served.extend([1, 2], [4])  # type: ignore[arg-type]
            assert served.stats().num_waiting == served.stats().num_running == 0

    asyncio.run(main())
