"""A request's own logits processor: what it sees, what it may do, and that nobody else notices."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pagedcore import AsyncEngine, Engine, SamplingParams
from pagedcore.analysis.replay.point import find_point
from pagedcore.errors import (
    InvalidLogits,
    InvalidSampling,
    InvalidSessionFile,
    ProcessorFailed,
    RecordingError,
)
from pagedcore.protocols import FloatArray
from support.doubles import VOCAB_SIZE, FakeClock, ToyBackend, toy_answer, toy_logits
from support.engine_builders import assert_all_free, make_engine, run
from support.families import VOCAB, tiny_model
from support.recordings import dumped, toy_engine

PROMPT = [3, 5, 7, 9, 11]
PLAIN = SamplingParams(max_tokens=8, ignore_eos=True)


def ban_last(output_token_ids: list[int], logits: FloatArray) -> FloatArray:
    """Let no token follow itself, and never token 25, which the toy likes; a pure function of its arguments."""
    logits[[*output_token_ids[-1:], 25]] = -np.inf
    return logits * np.float32(0.5)


def banned_answer(prompt: list[int], num_tokens: int) -> tuple[int, ...]:
    """What ``ban_last`` and the toy's own logits make of a prompt, greedily."""
    tokens: list[int] = []
    for _ in range(num_tokens):
        row = ban_last(tokens, toy_logits(np.array(prompt + tokens, np.int64)))
        tokens.append(int(np.argmax(row)))
    return tuple(tokens)


def steered(process: Any, **more: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 8, "ignore_eos": True, "logits_processor": process, **more})


def answer(engine: Engine, params: SamplingParams, prompt: list[int] = PROMPT) -> tuple[int, ...]:
    return engine.generate([prompt], params)[0].outputs[0].token_ids


def test_it_sees_the_completion_s_tokens_and_the_model_s_whole_row() -> None:
    """Each call has the tokens so far and the row that the model gave for them, before any bias."""
    seen: list[tuple[list[int], FloatArray]] = []

    def note(output_token_ids: list[int], logits: FloatArray) -> FloatArray:
        seen.append((list(output_token_ids), logits.copy()))
        return ban_last(output_token_ids, logits)

    with make_engine() as engine:
        tokens = answer(engine, steered(note, logit_bias={6: -100.0}))
    assert 6 not in tokens
    for place, (output_token_ids, logits) in enumerate(seen):
        assert tuple(output_token_ids) == tokens[:place]
        assert (logits.dtype, logits.shape) == (np.float32, (VOCAB_SIZE,))
        assert np.array_equal(logits, toy_logits(np.array([*PROMPT, *output_token_ids], np.int64)))
    with make_engine() as engine:
        assert answer(engine, steered(ban_last)) == banned_answer(PROMPT, 8) != tuple(toy_answer(PROMPT, 8))


def test_what_it_keeps_and_changes_is_its_own() -> None:
    """It may write to its arguments, and keep them: neither neighbours nor its own tokens and later rows change."""
    kept: list[FloatArray] = []

    def meddle(output_token_ids: list[int], logits: FloatArray) -> FloatArray:
        output_token_ids.clear()
        for one in kept:
            one[:] = np.nan
            one.base is None or one.base.fill(np.nan)
        kept.append(logits)
        return logits

    with make_engine(max_num_batched_tokens=32) as engine:
        outputs = engine.generate([PROMPT] * 4, [PLAIN, steered(meddle), PLAIN, steered(meddle)])
        assert_all_free(engine)
    assert {output.outputs[0].token_ids for output in outputs} == {tuple(toy_answer(PROMPT, 8))}


def _raise(error: BaseException) -> Any:
    raise error


BROKEN: dict[str, tuple[Any, str]] = {
    "raises": (lambda ids, row: _raise(KeyError("secret")), "raised KeyError"),
    "memory": (lambda ids, row: _raise(MemoryError()), "raised MemoryError"),
    "nothing": (lambda ids, row: None, "returned a NoneType"),
    "list": (lambda ids, row: row.tolist(), "returned a list"),
    "float64": (lambda ids, row: row.astype(np.float64), "returned float64"),
    "short": (lambda ids, row: row[:-1], f"shape ({VOCAB_SIZE - 1},)"),
    "matrix": (lambda ids, row: row[None], f"shape (1, {VOCAB_SIZE})"),
    "all nan": (lambda ids, row: row * np.float32(np.nan), "returned NaN"),
    "one nan": (lambda ids, row: np.where(np.arange(len(row)) == 3, np.float32(np.nan), row), "returned NaN"),
    "nothing left": (lambda ids, row: np.full_like(row, -np.inf), "no finite value"),
    "infinite": (lambda ids, row: np.where(np.arange(len(row)) == 3, np.float32(np.inf), row), "plus infinity"),
    "no arguments": (lambda: None, "raised TypeError"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_what_it_does_wrong_ends_its_request_alone(name: str) -> None:
    """Whatever it raises or returns: a typed error with its cause, no text of it; neighbours, and what it had, stay."""
    broken, words = BROKEN[name]

    def later(output_token_ids: list[int], logits: FloatArray) -> Any:
        return broken(output_token_ids, logits) if len(output_token_ids) == 3 else logits

    process = broken if name == "no arguments" else later
    with make_engine(max_num_batched_tokens=32) as engine:
        outputs = engine.generate([PROMPT] * 3, [PLAIN, steered(process), PLAIN])
        assert engine.stats().num_steps < 20
        assert_all_free(engine)
    failed = outputs[1].outputs[0]
    assert failed.token_ids == tuple(toy_answer(PROMPT, 8)[: 0 if name == "no arguments" else 3])
    assert failed.finish_reason == "error"
    assert isinstance(failed.error, ProcessorFailed)
    assert words in str(failed.error)
    assert "secret" not in str(failed.error)
    assert (failed.error.__cause__ is not None) == ("raised" in words)
    for other in (outputs[0], outputs[2]):
        assert other.outputs[0].token_ids == tuple(toy_answer(PROMPT, 8))


def test_a_row_that_the_model_broke_is_the_model_s_fault() -> None:
    """It is not called with unusable logits, and the error is the one of every other request."""
    calls: list[int] = []

    class Broken(ToyBackend):
        def logits_after(self, token_ids: Any) -> FloatArray:
            row = toy_logits(token_ids)
            return np.where(len(token_ids) == len(PROMPT) + 2, np.float32(np.nan), row).astype(np.float32)

    with make_engine(Broken()) as engine:
        output = engine.generate([PROMPT], steered(lambda ids, row: calls.append(len(ids)) or row))[0].outputs[0]
    assert calls == [0, 1]
    assert isinstance(output.error, InvalidLogits)


def test_an_exit_on_the_engine_s_thread_ends_one_request() -> None:
    """What is no ``Exception`` ends the request too where no Ctrl-C can come; the engine serves on."""
    async def main() -> None:
        engine = make_engine()
        async with AsyncEngine(engine) as served:
            bad = served.submit(PROMPT, steered(lambda ids, row: _raise(SystemExit(3))))
            good = served.submit(PROMPT, PLAIN)
            bad_output, good_output = [await asyncio.wrap_future(one) for one in (bad, good)]
        assert isinstance(bad_output.outputs[0].error, ProcessorFailed)
        assert good_output.outputs[0].token_ids == tuple(toy_answer(PROMPT, 8))

    asyncio.run(main())


def test_ctrl_c_within_it_ends_the_step_and_no_request() -> None:
    """The step is undone, and the next one gives the same tokens."""
    pressed: list[int] = []

    def press(output_token_ids: list[int], logits: FloatArray) -> FloatArray:
        if len(output_token_ids) == 2 and not pressed:
            pressed.append(1)
            raise KeyboardInterrupt
        return ban_last(output_token_ids, logits)

    with make_engine() as engine:
        request = engine.add_request(PROMPT, steered(press))
        with pytest.raises(KeyboardInterrupt):
            run(engine)
        run(engine)
        assert request.output().outputs[0].token_ids == banned_answer(PROMPT, 8)
        request.remove()


@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_preemption_and_chunks_change_nothing(mode: str) -> None:
    """In a pool that is too small, in small chunks, with n and best_of, tokens are those of the function."""
    prompts = [[3 + place, 5, 7, 9, 11, 13, 15, 17] for place in range(5)]
    with make_engine(num_kv_blocks=12, max_num_seqs=4, max_num_batched_tokens=5, preemption=mode,
                     host_kv_memory=64 * 32) as engine:
        outputs = engine.generate(prompts, steered(ban_last, max_tokens=16))
        assert engine.stats().num_preemptions > 0
        several = engine.generate(prompts[:2], steered(ban_last, n=2, best_of=3, max_tokens=3))
        assert_all_free(engine)
    for prompt, output in zip(prompts, outputs, strict=True):
        assert output.outputs[0].token_ids == banned_answer(prompt, 16)
    for prompt, output in zip(prompts, several, strict=False):
        assert [one.token_ids for one in output.outputs] == [banned_answer(prompt, 3)] * 2


def test_bits_are_the_same_in_any_company() -> None:
    """With a real model, sampled: alone, in chunks, and beside others, a processor makes the same bits."""
    prompts = [[(7 * place + i) % VOCAB for i in range(12 + 5 * place)] for place in range(3)]
    params = SamplingParams(max_tokens=10, temperature=1.0, seed=4, ignore_eos=True, logprobs=2,
                            logits_processor=lambda ids, row: row * np.float32(0.25))
    found = []
    for settings in ({"max_num_seqs": 1}, {"max_num_batched_tokens": 16, "max_num_seqs": 4}):
        with Engine.from_pretrained(tiny_model("llama"), num_kv_blocks=32, block_size=16, **settings) as engine:
            outputs = engine.generate(prompts, params)
        found.append([(output.outputs[0].token_ids, output.outputs[0].logprobs) for output in outputs])
    assert found[0] == found[1]


def test_a_grammar_and_a_minimum_length_hold_against_it() -> None:
    """It acts first, so that it cannot choose what another parameter of its request forbids."""
    def insist(output_token_ids: list[int], logits: FloatArray) -> FloatArray:
        row = np.full_like(logits, -50.0)
        row[eos] = 50.0
        return row

    with Engine.from_pretrained("demo") as engine:
        (eos, *_) = engine.input_processor.eos_token_ids
        short, longer = engine.generate(["2 + 3"] * 2, [
            SamplingParams(max_tokens=9, logits_processor=insist),
            SamplingParams(max_tokens=9, min_tokens=4, logits_processor=insist),
        ])
        chosen = engine.generate(["2 + 3"], SamplingParams(structured={"choice": ["yes"]}, logits_processor=insist))
        params = SamplingParams(structured={"choice": ["yes"]}, logits_processor=lambda ids, row: None)
        failed = engine.generate(["2 + 3"], params)
    assert isinstance(failed[0].outputs[0].error, ProcessorFailed)
    assert (short.outputs[0].token_ids, short.outputs[0].finish_reason) == ((eos,), "stop")
    assert len(longer.outputs[0].token_ids) == 5
    assert chosen[0].outputs[0].text == "yes"


def test_sessions_continue_with_it_and_files_have_no_code(tmp_path: Path) -> None:
    """Later turns, forks and cut-off completions use it; an export is refused before anything is written."""
    with make_engine(num_kv_blocks=64) as engine, engine.session(steered(ban_last)) as session:
        request = session.extend(PROMPT)
        for _ in range(4):
            engine.step()
        request.abort()
        whole = banned_answer(PROMPT, 8)
        assert 0 < len(request.output().outputs[0].token_ids) < 8
        with session.fork() as fork:
            assert fork.ask(None).outputs[0].token_ids == whole
        assert session.ask(None).outputs[0].token_ids == whole
        assert session.ask([4]).outputs[0].token_ids == banned_answer([*PROMPT, *whole, 4], 8)
        with pytest.raises(InvalidSessionFile, match="logits_processor"):
            session.export(tmp_path / "chat.json")
        assert not list(tmp_path.iterdir())


def test_no_mapping_no_beam_and_no_recording_has_it(tmp_path: Path) -> None:
    """What comes from another process cannot name it; beams refuse it; a point of a recording says what is missing."""
    with pytest.raises(InvalidSampling, match="in the engine's process"):
        SamplingParams.from_mapping({"logits_processor": ban_last})
    with pytest.raises(InvalidSampling, match="logits_processor"):
        SamplingParams(logits_processor="ban_last")  # type: ignore[arg-type]
    with pytest.raises(InvalidSampling, match="beam_width"):
        SamplingParams(beam_width=2, logits_processor=ban_last)
    engine = toy_engine("tokens", clock=FakeClock())
    request = engine.add_request(PROMPT, steered(ban_last))
    run(engine)
    with pytest.raises(RecordingError, match="logits processor"):
        find_point(dumped(engine, tmp_path), request.request_id, 2)


def test_it_may_abort_its_own_request() -> None:
    """A call of the engine from within, on its thread, does what it does elsewhere, and breaks nothing."""
    with make_engine(max_num_batched_tokens=32) as engine:
        def leave(output_token_ids: list[int], logits: FloatArray) -> FloatArray:
            if len(output_token_ids) == 2:
                engine.abort_request(request.request_id)
            return logits

        request, other = engine.add_request(PROMPT, steered(leave)), engine.add_request(PROMPT, PLAIN)
        run(engine)
        assert request.output().outputs[0].finish_reason == "abort"
        assert other.output().outputs[0].token_ids == tuple(toy_answer(PROMPT, 8))
        request.remove()
        other.remove()
        assert_all_free(engine)
