"""The central promise, end to end: tokens, log-probabilities and logits are the same bytes whatever happens on the way.

Every way to a completion is compared with the same request run alone, in an engine of its own without prefix cache.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias, TypeVar

import pytest
import torch

from pagedcore.engine.builder import build_components
from pagedcore.engine.engine import Engine
from pagedcore.models.checkpoints.quantized import load_stored, stored_format
from pagedcore.models.linears.packed_linear import FASTEST
from pagedcore.models.linears.schemes import QUANTIZERS
from pagedcore.models.linears.stored_weight import StoredLinears
from pagedcore.models.transformers_model import TransformersModel
from pagedcore.outputs import CompletionOutput
from pagedcore.protocols import LinearFactory
from pagedcore.requests.candidate_groups import SEED_RANGE, SEED_STRIDE
from pagedcore.sampling_params import SamplingParams
from pagedcore.scheduler.step_time import StepTimes
from pagedcore.sessions.session import Session
from pagedcore_kernels.cpu.attention.backend import NumbaCpuAttention
from support.doubles import FakeClock
from support.drafts import Adversary, let_guess
from support.engine_builders import assert_all_free, run
from support.families import VOCAB, tiny_model
from support.quantized_checkpoints import KINDS as CHECKPOINTS
from support.quantized_checkpoints import write_checkpoint
from support.session_builders import Lab, Recorder
from support.torture import first_seed, scaled

BLOCK_SIZE = 16
NUM_QUESTIONS = max(4, scaled(4))
"""Fewer do not press each other."""
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "dense": ("llama", {"num_hidden_layers": 2}),
    # Why four of eight: two numbers have the same sum in either order.
    "mixture of experts": ("qwen2_moe", {"num_hidden_layers": 2, "num_experts": 8, "num_experts_per_tok": 4}),
    "sliding window": ("gemma3_text", {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]}),
}
LONG: dict[str, tuple[str, dict[str, Any]]] = {
    # Why this border: some answers pass it, others are before it or behind it from the first token on.
    "longrope": ("phi3", {"num_hidden_layers": 2, "original_max_position_embeddings": 34, "rope_parameters": {
        "rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 8, "long_factor": [3.0] * 8,
        "original_max_position_embeddings": 34}}),
}
SAMPLED: list[dict[str, Any]] = [
    {}, {"temperature": 1.3, "top_k": 40, "repetition_penalty": 1.1, "presence_penalty": 0.5},
    {"temperature": 0.8, "top_p": 0.9},
]
Question: TypeAlias = tuple[list[int], SamplingParams]
Way = TypeVar("Way")


class Answer(NamedTuple):
    """What has to be equal."""

    token_ids: tuple[int, ...]
    logprobs: tuple[Any, ...] | None
    logits: dict[int, bytes]
    """By position, as far as they were recorded."""


class Case(NamedTuple):
    """A model of one kind in one number format, and what its requests and conversations answer alone."""

    number: int
    """Its place among all."""
    backend: TransformersModel
    rebuild: Callable[[], TransformersModel]
    alone: list[Answer]
    turns: list[Answer]


def questions() -> list[Question]:
    """Prompts of several lengths with a common beginning, greedy and sampled."""
    rng = random.Random(3 + first_seed())
    beginning = [rng.randrange(3, VOCAB) for _ in range(19)]
    tails = [[rng.randrange(3, VOCAB) for _ in range((1, 13, 7, 26)[i % 4])] for i in range(NUM_QUESTIONS)]
    return [
        ([*beginning, *tail], SamplingParams(max_tokens=13, ignore_eos=True, seed=i, logprobs=3, **SAMPLED[i % 3]))
        for i, tail in enumerate(tails)
    ]


#: What a conversation asks, turn by turn; its turns are sampled from one seed each.
FIRST, SECOND = list(range(20, 38)), [60, 61, 62]
TALKS = [SamplingParams(max_tokens=12, ignore_eos=True, seed=i, logprobs=3, **SAMPLED[i % 3]) for i in range(scaled(2))]


@contextmanager
def lab_of(backend: TransformersModel, **settings: Any) -> Iterator[Lab]:
    """An engine that records logits, empty again at the end."""
    defaults = {"num_kv_blocks": 12 * NUM_QUESTIONS, "block_size": BLOCK_SIZE, "max_num_waiting": 256, "num_threads": 1}
    clock = FakeClock()
    with Engine(build_components(backend, **{**defaults, **settings}), clock) as engine:
        recorder = Recorder(engine._runner.backend)
        engine._runner.backend = recorder  # type: ignore[assignment]
        # Why: transfers take no time on this clock. If steps seemed to, blocks would be kept that the ways below lose.
        engine.scheduler.costs.steps.times = StepTimes(0.0, 0.0, 0.0, 0.0)
        yield Lab(engine, recorder, clock)
        for session in list(engine.sessions):
            session.close()
        assert_all_free(engine)


def ask(lab: Lab, asked: list[Question]) -> list[Answer]:
    """Run requests at the same time."""
    handles = [lab.engine.add_request(*question) for question in asked]
    run(lab.engine)
    answers = []
    for handle in handles:
        number = handle.sequences[0].sequence_id
        logits = {position: row for (of, position), row in lab.recorder.logits.items() if of == number}
        answers.append(answer_of(handle.output().outputs[0], logits))
    return answers


def answer_of(completion: CompletionOutput, logits: dict[int, bytes] | None = None) -> Answer:
    return Answer(completion.token_ids, completion.logprobs, logits or {})


def alone(backend: TransformersModel, asked: list[Question]) -> list[Answer]:
    """Run each request in an engine of its own, in which nothing is shared, cut or preempted."""
    answers = []
    for question in asked:
        with lab_of(backend, enable_prefix_caching=False, max_num_batched_tokens=1024) as lab:
            answers += ask(lab, [question])
    return answers


FORMATS = [(kind, dtype, "none") for kind in KINDS for dtype in ("float32", "bfloat16")]
FORMATS += [("dense", "bfloat16", "w8a8"), ("mixture of experts", "bfloat16", "w8a8"), ("dense", "float32", "w4a16"),
            ("mixture of experts", "bfloat16", "w4a16"), ("dense", "bfloat16", "w8a16")]  # fmt: skip
#: Checkpoints in a format of their own, by the kind of ``quantized_checkpoints``.
FORMATS += [("dense", "bfloat16", "bnb-nf4"), ("mixture of experts", "float32", "ct-w4a16-order")]
FORMATS += [("longrope", "float32", "none")]
FORMATS += [(kind, dtype, "int8 KV") for kind, dtype in zip(KINDS, ("bfloat16", "bfloat16", "float32"), strict=True)]


#: Each kind, each number format of products and of KV once; a way that every fifth case takes is among them.
QUICK = (1, 5, 6, 8, 12, 13, 14)


@pytest.fixture(scope="module", ids=str, params=[
    pytest.param(one, marks=() if number in QUICK else pytest.mark.slow) for number, one in enumerate(FORMATS)
])
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    kind, dtype, what = request.param
    (family, changes), number_format, checkpoint = {**KINDS, **LONG}[kind], getattr(torch, dtype), None
    quantization, kv_cache_dtype = ("none", "int8") if what == "int8 KV" else (what, "auto")
    linears: LinearFactory = QUANTIZERS.get(quantization, FASTEST)
    if what in CHECKPOINTS:
        directory = str(tmp_path_factory.mktemp("checkpoint"))
        write_checkpoint(Path(directory), what, family, **changes)
        checkpoint = stored_format(directory)
        assert checkpoint is not None
        linears, quantization = StoredLinears(), checkpoint.scheme

    def rebuild() -> TransformersModel:
        model = (tiny_model(family, dtype=number_format, **changes) if checkpoint is None
                 else load_stored(directory, checkpoint, number_format, trust_remote_code=False))  # fmt: skip
        return TransformersModel(
            model, NumbaCpuAttention, block_size=BLOCK_SIZE, linears=linears, quantization=quantization,
            kv_cache_dtype=kv_cache_dtype,
        )

    backend = rebuild()
    assert backend.is_schedule_invariant, backend.variable_part
    firsts = alone(backend, [(FIRST, params) for params in TALKS])
    seconds = [([*FIRST, *one.token_ids, *SECOND], params) for one, params in zip(firsts, TALKS, strict=True)]
    return Case(FORMATS.index(request.param), backend, rebuild, alone(backend, questions()), alone(backend, seconds))


NUM_PARTS = 5
each_part = pytest.mark.parametrize(
    "part", [0, *(pytest.param(part, marks=pytest.mark.slow) for part in range(1, NUM_PARTS))])
"""The ways of each case in five parts, of which `make test` takes one: every way with every fifth case, every case
with every fifth way."""


def part_of(ways: dict[str, Way], case: Case, part: int) -> Iterator[tuple[str, Way]]:
    """The ways of one part."""
    return ((name, way) for place, (name, way) in enumerate(ways.items())
            if (place + case.number) % NUM_PARTS == part)


# --- requests ---

Evidence: TypeAlias = Callable[[Any], bool]
"""Looks at an engine's statistics for the thing that was to happen."""
TIGHT: dict[str, Any] = {"num_kv_blocks": 6, "max_num_batched_tokens": 64}
HOST: dict[str, Any] = {"host_kv_memory": "4MiB"}


def preempted(kind: str) -> Evidence:
    return lambda stats: stats.num_preemptions_by_kind[kind] > 0


WAYS: dict[str, tuple[dict[str, Any], Evidence]] = {
    "in company": ({}, lambda stats: stats.num_preemptions == 0),
    "in chunks": ({"max_num_batched_tokens": 10, "max_num_seqs": 10}, lambda stats: stats.num_steps > 15),
    "two at a time": ({"max_num_seqs": 2, "max_num_batched_tokens": 64}, lambda stats: stats.num_steps > 15),
    "in static batches": ({"scheduling_policy": "static", "max_num_seqs": 2}, lambda stats: stats.num_steps > 15),
    "nothing shared": ({"enable_prefix_caching": False}, lambda stats: stats.num_cached_tokens == 0),
    "swapped": ({**TIGHT, **HOST, "preemption": "swap"}, preempted("swap")),
    "recomputed": ({**TIGHT, "preemption": "recompute"}, preempted("recompute")),
    "shrunk": ({**TIGHT, "preemption": "shrink"}, preempted("shrink")),
    "waited": ({**TIGHT, "preemption": "wait"}, lambda stats: stats.num_stalled_rows > 0),
    "the cheapest way": ({**TIGHT, **HOST}, lambda stats: stats.num_preemptions + stats.num_stalled_rows > 0),
    "two threads": ({"num_threads": 2}, lambda stats: True),
    "with drafts": ({}, lambda stats: 0 < stats.num_accepted_tokens < stats.num_drafted_tokens),
}


def knows(case: Case, token_ids: Sequence[int], most: int) -> list[int]:
    """How one of the requests goes on that have these tokens."""
    texts = [[*prompt, *answer.token_ids] for (prompt, _), answer in zip(questions(), case.alone, strict=True)]
    return next((text[len(token_ids) :][:most] for text in texts if text[: len(token_ids)] == list(token_ids)), [])


@each_part
def test_requests_answer_with_the_same_bytes_as_alone(case: Case, part: int) -> None:
    """Company, order, chunks, kinds of preemption, threads and drafts change no bit, nor does what the cache has the
    second time.
    """
    for way, (settings, has_happened) in part_of(WAYS, case, part):
        with lab_of(case.backend, **settings) as lab:
            if way == "with drafts":
                let_guess(lab.engine, Adversary(partial(knows, case), VOCAB), VOCAB)
            assert ask(lab, questions()[::-1])[::-1] == case.alone, way
            assert has_happened(lab.engine.stats()), (way, lab.engine.stats())
            before = lab.engine.stats().num_cached_tokens
            assert ask(lab, questions()) == case.alone, way
            assert (lab.engine.stats().num_cached_tokens > before) == (way != "nothing shared"), way
            contexts = lab.engine._runner._threads._contexts
            assert max(one.num_threads for one in contexts) == settings.get("num_threads", 1)


def test_a_restarted_engine_answers_with_the_same_bytes(case: Case) -> None:
    """Another engine with the same weights, packed anew, gives the same bits."""
    with lab_of(case.rebuild()) as lab:
        assert ask(lab, questions()) == case.alone


def test_completions_that_were_forked_are_those_of_requests_of_their_own(case: Case) -> None:
    """``n`` and ``best_of`` fork after the prompt: each completion is that of a request with its seed, run alone."""
    prompt, params = questions()[1]
    seeds = [(params.seed + i * SEED_STRIDE) % SEED_RANGE for i in range(3)]
    expected = alone(case.backend, [(prompt, replace(params, seed=seed)) for seed in seeds])
    for best_of in (None, 3):
        with lab_of(case.backend) as lab:
            [output] = lab.engine.generate([prompt], replace(params, n=3, best_of=best_of))
            assert {answer_of(one)[:2] for one in output.outputs} == {one[:2] for one in expected}, best_of


# --- conversations ---

Talk: TypeAlias = Callable[[Lab, Session, Path], Session]
"""What happens between two turns; returns the session that goes on."""


def in_place(lab: Lab, session: Session, path: Path) -> Session:
    return session


def forked(lab: Lab, session: Session, path: Path) -> Session:
    fork = session.fork()
    session.ask([70, 71])
    return fork


def forgotten(lab: Lab, session: Session, path: Path) -> Session:
    lab.flood()
    return session


def parked(tier: Any, lab: Lab, session: Session, path: Path) -> Session:
    state = session.park(tier)
    assert (state.tier, state.num_tokens_kept) == (tier, len(session.token_ids) - 1)
    lab.flood()
    return session


def expired(lab: Lab, session: Session, path: Path) -> Session:
    session.park("disk", ttl_s=10)
    lab.clock.advance(11)
    lab.flood()
    assert session.parked is None
    return session


def exported(lab: Lab, session: Session, path: Path, *, include_kv: bool) -> Session:
    session.export(path, include_kv=include_kv)
    session.close()
    lab.flood()
    return lab.engine.import_session(path)


#: What happens, and whether the second turn finds the KV of the first one.
TALK_WAYS: dict[str, tuple[Talk, bool]] = {
    "in place": (in_place, True),
    "forked": (forked, True),
    "forgotten": (forgotten, False),
    "parked on the host": (partial(parked, "host"), True),
    "parked on disk": (partial(parked, "disk"), True),
    "parked as tokens": (expired, False),
    "exported with KV": (partial(exported, include_kv=True), True),
    "exported as tokens": (partial(exported, include_kv=False), False),
}


@each_part
def test_a_conversation_goes_on_with_the_bytes_of_a_request_alone(case: Case, part: int, tmp_path: Path) -> None:
    """However its KV was kept or lost, a second turn is that of one request with all of the conversation's tokens."""
    for way, (happen, is_found) in part_of(TALK_WAYS, case, part):
        for number, params in enumerate(TALKS):
            with lab_of(case.backend, num_kv_blocks=8, **HOST) as lab:
                session = lab.engine.session(params)
                session.ask(FIRST)
                output = happen(lab, session, tmp_path / f"{way} {number}.json").ask(SECOND)
                assert answer_of(output.outputs[0])[:2] == case.turns[number][:2], way
                assert (output.num_cached_tokens > 0) == is_found, way
