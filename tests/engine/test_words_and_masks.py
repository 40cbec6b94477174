"""What may come, what the text has of it, and how much of the prompt counts: the oracles choose token by token."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from pagedcore import Chat, Engine, SamplingParams
from pagedcore.errors import InvalidSampling, InvalidToken, PromptTooLong
from pagedcore.tokenizer.tokenizer import HFTokenizer
from support.doubles import VOCAB_SIZE, ToyBackend, toy_answer, toy_logits
from support.engine_builders import make_engine
from support.scripted_model import TEMPLATES, scripted_engine
from support.text_builders import BUILDERS, make_fast, push_all

QUESTION = "What is 2 + 3?"


@pytest.fixture(scope="module")
def demo() -> Iterator[Engine]:
    with Engine.from_pretrained("demo", num_kv_blocks=64) as engine:
        yield engine


def answer(prompt: Sequence[int], num_tokens: int, is_barred: Callable[[list[int], int], bool]) -> list[int]:
    """Return the greedy completion of which no token is barred after those before it."""
    found = list[int]()
    for _ in range(num_tokens):
        logits = toy_logits(np.array([*prompt, *found], np.int64))
        found.append(next(int(one) for one in np.argsort(-logits, kind="stable") if not is_barred(found, int(one))))
    return found


def completed(found: list[int], sequences: Sequence[Sequence[int]]) -> bool:
    """Whether tokens end with one of some sequences."""
    return any(found[-len(one) :] == list(one) for one in sequences)


@pytest.mark.parametrize("settings", [{}, {"num_kv_blocks": 8, "max_num_batched_tokens": 4}])
def test_only_allowed_tokens_come(settings: Any) -> None:
    """Also beside others, and where memory is short; without an end token among them nothing ends but by length."""
    allowed, prompts = list(range(3, VOCAB_SIZE, 5)), [[1], [2, 3], [4]]
    with make_engine(**settings) as engine:
        outputs = engine.generate(prompts, [
            SamplingParams(max_tokens=8, allowed_token_ids=allowed, ignore_eos=True),
            SamplingParams(max_tokens=8, ignore_eos=True),
            SamplingParams(max_tokens=8, allowed_token_ids=[7], logprobs=0)])
    tokens = [list(one.outputs[0].token_ids) for one in outputs]
    assert tokens[0] == answer([1], 8, lambda found, one: one not in allowed)
    assert tokens[1:] == [toy_answer([2, 3], 8), [7] * 8]
    # Why below zero: log-probabilities are the model's own.
    assert all(one.logprob < 0 for one in outputs[2].outputs[0].logprobs or ())


@pytest.mark.parametrize("length", [1, 2, 3])
def test_bad_sequences_are_never_completed(length: int) -> None:
    """Each token that would complete one is passed over for the next likeliest, and prompts do not count."""
    plain = toy_answer([1, 2], 12)
    sequences = [plain[start : start + length] for start in (0, 4, 7)] + [[VOCAB_SIZE - 1]]
    wanted = answer([1, 2], 12, lambda found, one: completed([*found, one], sequences))
    with make_engine(num_kv_blocks=64) as engine:
        params = SamplingParams(max_tokens=12, bad_words_ids=sequences)
        (output,) = engine.generate([[1, 2]], params)
        # The first token of a completion may end what the prompt has begun.
        begun = SamplingParams(max_tokens=1, bad_words_ids=[[9, *toy_answer([1, 2, 9], 1)]])
        (first,) = engine.generate([[1, 2, 9]], begun)
        # Nearly all of a sequence is none of it.
        near = [[(plain[place] + 1) % 20, *plain[place + 1 : place + length]] for place in range(8) if length > 1]
        (missed,) = engine.generate([[1, 2]], SamplingParams(max_tokens=12, bad_words_ids=near, ignore_eos=True))
        drawn = engine.generate([[1, 2]], SamplingParams(max_tokens=12, temperature=1.0, seed=3, n=2, ignore_eos=True,
                                                         bad_words_ids=sequences))
    assert list(output.outputs[0].token_ids) == wanted != plain
    assert list(first.outputs[0].token_ids) == toy_answer([1, 2, 9], 1)
    assert list(missed.outputs[0].token_ids) == answer([1, 2], 12, lambda found, one: completed([*found, one], near))
    for one in drawn[0].outputs:
        assert not any(completed(list(one.token_ids[:end]), sequences) for end in range(1, 13))


def test_bad_words_are_their_tokens_with_and_without_a_space(demo: Engine) -> None:
    """The word that a completion begins with, or has after a space, comes no more, and nothing else is masked."""
    plain = demo.generate([QUESTION], SamplingParams(max_tokens=16))[0].outputs[0]
    word = plain.text.split()[-1].rstrip(".")
    processed = demo.prepare(QUESTION, SamplingParams(bad_words=[word, f" {word}"]))
    assert processed.params.bad_words == ()
    tokenizer: Any = demo.tokenizer
    assert processed.params.bad_words_ids == tuple(dict.fromkeys(
        tuple(tokenizer.encode(text, add_special_tokens=False)) for text in (word, f" {word}")))
    other = demo.generate([QUESTION], SamplingParams(max_tokens=16, bad_words=[word]))[0].outputs[0]
    sequences = processed.params.bad_words_ids
    assert not any(completed(list(other.token_ids[:end]), sequences) for end in range(1, len(other.token_ids) + 1))
    assert other.token_ids != plain.token_ids
    unused = demo.generate([QUESTION], SamplingParams(max_tokens=16, bad_words=["zebra"]))[0].outputs[0]
    assert unused.token_ids == plain.token_ids


def test_what_cannot_be_kept_together_is_refused(demo: Engine) -> None:
    """Masks with grammars or beams, tokens that the vocabulary lacks, words and special tokens without a tokenizer."""
    for masks in ({"bad_words": ["a"]}, {"bad_words_ids": [[1]]}, {"allowed_token_ids": [1]}):
        (name,) = masks
        for other in ({"structured": {"json_object": True}}, {"beam_width": 2}):
            with pytest.raises(InvalidSampling, match=f"{name}: got"):
                SamplingParams(**masks, **other)  # type: ignore[arg-type]
    with make_engine(ToyBackend()) as engine:
        for params in (SamplingParams(bad_words=["a"]), SamplingParams(skip_special_tokens=False)):
            with pytest.raises(InvalidSampling, match="without"):
                engine.prepare([1], params)
        for field in ({"allowed_token_ids": [VOCAB_SIZE]}, {"bad_words_ids": [[1, VOCAB_SIZE]]}):
            with pytest.raises(InvalidToken):
                engine.prepare([1], SamplingParams(**field))  # type: ignore[arg-type]


def test_the_stop_string_may_stay_in_the_text(demo: Engine) -> None:
    """The text ends with it instead of before it, in deltas too; the tokens and the reason are the same."""
    text = demo.generate([QUESTION], SamplingParams(max_tokens=16))[0].outputs[0].text
    stop = text[2:5]
    found = [demo.generate([QUESTION], SamplingParams(max_tokens=16, stop=stop, include_stop_str_in_output=keeps))[0]
             .outputs[0] for keeps in (False, True)]
    place = text.index(stop)
    assert [one.text for one in found] == [text[:place], text[: place + len(stop)]]
    assert found[0].token_ids == found[1].token_ids
    assert [one.finish_reason for one in found] == ["stop", "stop"]
    request = demo.add_request(QUESTION, SamplingParams(max_tokens=16, stop=stop, include_stop_str_in_output=True))
    told = ""
    while not request.is_done:
        told += "".join(delta.text for delta in demo.step())
    request.remove()
    assert told == found[1].text


def test_special_tokens_may_be_text(demo: Engine) -> None:
    """The end token is at the end of the text, and what a chat reads of it is still all of it."""
    shown, plain = (demo.generate([QUESTION], SamplingParams(max_tokens=40, skip_special_tokens=skips))[0].outputs[0]
                    for skips in (False, True))
    assert (shown.token_ids, shown.finish_reason) == (plain.token_ids, "stop")
    assert shown.text == plain.text + demo.token_text(shown.token_ids[-1]).text
    with scripted_engine("<think>\nHm.\n</think>\n\nThree.", "{#- </think> #}" + TEMPLATES["hermes"]) as engine:
        prompt = Chat([{"role": "user", "content": "hi"}])
        turn = engine.chat_format.turn(prompt, SamplingParams(max_tokens=60, skip_special_tokens=False))
        (completion,) = engine.submit(prompt, turn.params).result(60).outputs
        parsed = turn.reader().read_all(completion)
    assert (parsed.reasoning, parsed.content) == ("Hm.", "Three.<|im_end|>")


@pytest.mark.parametrize("kind", BUILDERS)
def test_text_with_special_tokens_is_the_one_shot_decoding(kind: str) -> None:
    """Whatever the tokenizer, and however the tokens come."""
    fast = make_fast(kind)
    tokenizer, rng = HFTokenizer.from_transformers(fast), np.random.default_rng(5)

    def decode(ids: list[int]) -> str:
        return str(fast.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))

    special = [*fast.added_tokens_decoder, *fast.all_special_ids]
    for _ in range(40):
        ids = [int(rng.choice(special)) if special and rng.random() < 0.3 else int(rng.integers(len(fast)))
               for _ in range(rng.integers(1, 20))]
        cuts = sorted({0, len(ids), *(int(one) for one in rng.integers(0, len(ids) + 1, 3))})
        chunks = [ids[start:end] for start, end in pairwise(cuts)]
        assert push_all(tokenizer.new_full_detokenizer(), chunks, decode) == decode(ids)


def test_a_prompt_is_cut_to_its_last_tokens() -> None:
    """By a number, or to what the context has room for; without it a prompt that is too long is refused."""
    prompt = [one % 20 for one in range(30)]
    with make_engine(max_model_len=16, num_kv_blocks=32) as engine:
        for most, kept in ((5, 5), (30, None), (-1, 12)):
            params = SamplingParams(max_tokens=4, ignore_eos=True, truncate_prompt_tokens=most)
            if kept is None:
                with pytest.raises(PromptTooLong):
                    engine.generate([prompt], params)
                continue
            (output,) = engine.generate([prompt], params)
            assert list(output.prompt_token_ids) == prompt[-kept:]
            assert list(output.outputs[0].token_ids) == toy_answer(prompt[-kept:], 4)
        (short,) = engine.generate([prompt[:3]], SamplingParams(max_tokens=4, truncate_prompt_tokens=-1))
        assert list(short.prompt_token_ids) == prompt[:3]
