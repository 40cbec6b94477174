"""Models with recurrent layers: ``generate``'s tokens, and the same bits under everything that moves what they keep."""

from __future__ import annotations

import random
from collections import Counter
from contextlib import suppress
from dataclasses import fields, replace
from functools import partialmethod
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pagedcore.convert.conversion import convert
from pagedcore.convert.packing import pack
from pagedcore.engine.engine import Engine
from pagedcore.errors import InvalidConfig, ModelNotSupported, StepFailed
from pagedcore.models.state_pool import StatePool
from pagedcore.models.transformers_model import TransformersModel
from pagedcore.plugins.manager import create_plugin_manager
from pagedcore.sampling_params import SamplingParams
from pagedcore.scheduler import chunk_ends
from pagedcore_kernels.cpu.attention.backend import NumbaCpuAttention
from pagedcore_kernels.cpu.matmul.packed_int8 import form_of_int8_product
from support.engine_builders import make_engine
from support.families import HYBRIDS, VOCAB, tiny_model
from support.lora_directories import linear_sizes, merged, random_matrices, write_adapter
from support.torture import first_seed, scaled

needs_products = pytest.mark.skipif(form_of_int8_product(16) is None, reason="no such vectors")
CHUNKS = (8, 48, 64)
#: One token, two, one less than a convolution has taps, and both sides of usual chunk borders.
LENGTHS = (1, 2, 3, 63, 64, 65, 127)
NUM_TOKENS = 12
#: Compared by `make test`; `make slow` takes all.
EACH_TIME = ("qwen3_5_text", "granitemoehybrid", "lfm2", "mamba")


def random_prompts(lengths: tuple[int, ...], seed: int = 4) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, VOCAB, (length,), generator=generator).tolist() for length in lengths]


@torch.inference_mode()
def generated(model: Any, prompt: list[int]) -> list[int]:
    """What transformers generates for one prompt alone."""
    ids = torch.tensor([prompt])
    out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=NUM_TOKENS, do_sample=False,
                         pad_token_id=0, eos_token_id=None)  # fmt: skip
    return out[0, len(prompt) :].tolist()  # type: ignore[no-any-return]


@pytest.mark.parametrize("family", [
    pytest.param(family, marks=[] if family in EACH_TIME else [pytest.mark.slow]) for family in HYBRIDS
])
def test_greedy_tokens_are_those_of_generate(family: str) -> None:
    """In ragged batches and in chunks of three sizes, tokens are those that transformers generates for each alone."""
    prompts = random_prompts(LENGTHS)
    model = tiny_model(family)
    model.set_attn_implementation("eager")
    expected = [generated(model, prompt) for prompt in prompts]
    for chunk in CHUNKS:
        with Engine.from_pretrained(
            tiny_model(family), max_num_batched_tokens=chunk, max_num_seqs=4, block_size=8, num_kv_blocks=120
        ) as engine:
            outputs = engine.generate(prompts, SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True))
        assert [list(output.outputs[0].token_ids) for output in outputs] == expected, chunk


def test_a_decode_step_of_a_pure_recurrence_reads_as_much_behind_32_000_tokens_as_behind_1_000() -> None:
    """One state is read and one is written, KV has no bytes, and a batch grows by the names of its blocks alone."""
    sizes = []
    for length in (1_000, 32_000):
        backend: Any = TransformersModel(tiny_model("mamba", max_position_embeddings=33_000), NumbaCpuAttention,
                                            block_size=64, runs_self_test=False)
        batches: list[Any] = []
        compute = backend.forward
        backend.forward = lambda batch, *more, compute=compute, batches=batches: (
            batches.append(batch), compute(batch, *more))[1]
        with make_engine(backend, block_size=64, num_kv_blocks=520, max_num_seqs=1, max_num_batched_tokens=4_096,
                         speculation="off", max_model_len=33_000) as engine:
            assert engine.stats().kv_bytes == 0
            engine.generate([random_prompts((length,))[0]], SamplingParams(max_tokens=4, ignore_eos=True))
        last = batches[-1]
        assert last.positions[0] == length + 2
        assert (len(last.state_reads), len(last.state_writes)) == (1, 1)
        assert last.block_tables.shape == (1, -(-(length + 3) // 64))
        arrays = {field.name: getattr(last, field.name) for field in fields(last)}
        sizes.append({name: array.nbytes for name, array in arrays.items()
                      if isinstance(array, np.ndarray) and name != "block_tables"})
    assert sizes[0] == sizes[1]


SHARED = random_prompts((37,), 8)[0]
PROMPTS = [[*SHARED[:length], 5 + length] for length in (1, 7, 8, 9, 16, 17, 31, 37)]
SMALL: dict[str, Any] = {"block_size": 8, "max_num_seqs": 6, "max_num_batched_tokens": 12}
SAME_BITS = [
    (family, dtype, scheme)
    for family in ("lfm2", "qwen3_5_text", "qwen3_next", "granitemoehybrid", "falcon_h1", "jamba", "mamba", "mamba2",
                   "recurrent_gemma")
    for dtype, scheme in ((torch.float32, "none"), (torch.bfloat16, "none"), (torch.bfloat16, "w8a8"))
]
SAME_BITS_EACH_TIME = (
    ("lfm2", torch.float32, "none"), ("qwen3_5_text", torch.bfloat16, "none"), ("mamba2", torch.float32, "none"),
)


def params(place: int) -> SamplingParams:
    """Sampled and greedy, one and several completions, with log-probabilities."""
    return SamplingParams(max_tokens=20, temperature=float(place % 2), seed=place, n=1 + place % 3, logprobs=2,
                          ignore_eos=True)  # fmt: skip


def answers(engine: Engine, order: list[int]) -> dict[int, Any]:
    outputs = engine.generate([PROMPTS[place] for place in order], [params(place) for place in order])
    return {place: [(list(one.token_ids), one.logprobs) for one in output.outputs]
            for place, output in zip(order, outputs, strict=True)}  # fmt: skip


def small_model(family: str, dtype: torch.dtype) -> Any:
    """Without the ties of tiny routers, of which a last bit of transformers' own decides in bfloat16."""
    changes = {"num_local_experts": 0} if family == "granitemoehybrid" else {}
    return tiny_model(family, dtype=dtype, **changes)


class Case:
    """A model's arguments, and what it answers to each prompt alone, without a prefix cache and in one chunk."""

    def __init__(self, family: str, dtype: torch.dtype, scheme: str) -> None:
        self.family, self.dtype, self.scheme = family, dtype, scheme
        with self.engine(block_size=8, num_kv_blocks=64, enable_prefix_caching=False) as engine:
            self.alone = {place: answers(engine, [place])[place] for place in range(len(PROMPTS))}

    def engine(self, **settings: Any) -> Engine:
        return Engine.from_pretrained(
            small_model(self.family, self.dtype), dtype=str(self.dtype).removeprefix("torch."),
            quantization=self.scheme, **settings,
        )  # fmt: skip


@pytest.fixture(scope="module", params=[
    pytest.param(case, marks=[] if case in SAME_BITS_EACH_TIME else [pytest.mark.slow], id="-".join(map(str, case)))
    for case in SAME_BITS
])
def case(request: pytest.FixtureRequest) -> Case:
    return Case(*request.param)


@pytest.mark.parametrize("more", [
    {"num_kv_blocks": 200}, {"num_kv_blocks": 24, "preemption": "recompute", "speculation": "off"},
    {"num_kv_blocks": 60, "speculation": "auto"},
    {"num_kv_blocks": 24, "preemption": "swap", "host_kv_memory": "16MiB", "speculation": "off"},
], ids=["cached", "recomputed", "drafted", "swapped"])
def test_answers_are_those_alone(case: Case, more: dict[str, Any]) -> None:
    """With prompts that share prefixes to every offset of a block, chunked, forked, preempted, swapped and with drafts,
    each answer and each log-probability is the same."""
    places = list(range(len(PROMPTS)))
    with case.engine(**SMALL, **more) as engine:
        first, again, stats = answers(engine, places), answers(engine, places[::-1]), engine.stats()
    assert first == case.alone
    assert again == case.alone
    assert stats.is_schedule_invariant
    assert stats.num_preemptions > 0 or more["num_kv_blocks"] > 24
    assert stats.swapped_in_bytes > 0 or "host_kv_memory" not in more


def test_threads_change_no_bit(case: Case) -> None:
    """Two threads give the answers of one."""
    torch.set_num_threads(2)
    with case.engine(**SMALL, num_kv_blocks=200) as engine:
        assert answers(engine, list(range(len(PROMPTS)))) == case.alone


def test_a_session_goes_on_where_it_was(case: Case, tmp_path: Path) -> None:
    """A conversation that is parked, and one that is exported to another engine, have the answer of one prompt."""
    tokens = SamplingParams(max_tokens=9, ignore_eos=True)
    with case.engine(**SMALL, num_kv_blocks=40, host_kv_memory="4MiB") as engine:
        session = engine.session()
        first = list(session.ask(PROMPTS[6], tokens).outputs[0].token_ids)
        session.park("host")
        session.export(tmp_path / "session")
        second = list(session.ask(PROMPTS[3], tokens).outputs[0].token_ids)
        whole = engine.generate([PROMPTS[6] + first + PROMPTS[3]], tokens)[0]
    with case.engine(**SMALL, num_kv_blocks=40) as other:
        moved = other.import_session(tmp_path / "session")
        assert list(moved.ask(PROMPTS[3], tokens).outputs[0].token_ids) == second
    assert second == list(whole.outputs[0].token_ids)


@torch.inference_mode()
def greedy(model: Any, prompt: list[int], num_tokens: int) -> list[int]:
    """Return the likeliest tokens behind a prompt, all of which is computed again for each."""
    tokens = list(prompt)
    for _ in range(num_tokens):
        tokens.append(int(model(torch.tensor([tokens]), use_cache=False).logits[0, -1].argmax()))
    return tokens[len(prompt):]


def test_a_sequence_has_a_state_of_its_own_adapter(tmp_path: Path) -> None:
    """Behind one prefix, cached or not, requests with two adapters and with none have the answers of transformers' own
    model with that adapter merged."""
    prompts, tokens = PROMPTS[1::2], SamplingParams(max_tokens=6, ignore_eos=True)
    settings: dict[str, Any] = {"num_kv_blocks": 200, **SMALL}
    sizes = linear_sizes(tiny_model("lfm2"))
    matrices = {name: random_matrices(sizes if name else {}, 4, seed) for seed, name in enumerate([None, "a", "b"])}
    models = {name: merged(tiny_model("lfm2"), own, {"lora_alpha": 8}) for name, own in matrices.items()}
    expected = {name: [greedy(model, prompt, 6) for prompt in prompts] for name, model in models.items()}
    assert len({str(one) for one in expected.values()}) == 3
    places = {name: write_adapter(tmp_path / name, own, 4) for name, own in matrices.items() if name}
    with Engine.from_pretrained(tiny_model("lfm2"), **settings, adapters=places) as engine:
        for _ in range(2):
            asked = [(place, name) for place in range(len(prompts)) for name in matrices]
            requests = [engine.add_request(prompts[place], tokens, lora=name) for place, name in asked]
            while engine.has_pending_requests():
                engine.step()
            found = [list(one.output().outputs[0].token_ids) for one in requests]
            assert found == [expected[name][place] for place, name in asked]


def test_a_gpu_is_refused_before_it_is_asked_for() -> None:
    """States are advanced on a CPU alone; the message says which model and what to do."""
    from virtual_gpu.backends import on_gpu
    from virtual_gpu.torch_cuda import virtual_gpus

    with virtual_gpus(), pytest.raises((ModelNotSupported, InvalidConfig), match=r"recurrent layers.*device='cpu'"):
        on_gpu(tiny_model("qwen3_5_text"))


LIVES = ("lfm2", "qwen3_5_text", *(pytest.param(one, marks=pytest.mark.slow) for one in ("mamba", "bamba", "jamba")))
ROOM: dict[str, Any] = {"max_num_seqs": 4, "max_num_batched_tokens": 16, "kv_cache_memory": "4MiB", "dtype": "float32"}


def all_answers(engine: Engine) -> list[Any]:
    return list(answers(engine, list(range(len(PROMPTS)))).values())


Directories = tuple[Path, Path, Any, Any]


@pytest.fixture(scope="module", params=LIVES)
def directories(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Directories:
    """Two models of one shape, and what each answers."""
    places = [tmp_path_factory.mktemp("model") for _ in range(2)]
    found = []
    for seed, place in enumerate(places):
        tiny_model(request.param, seed=seed).save_pretrained(place)
        with Engine.from_pretrained(place, **ROOM) as engine:
            found.append(all_answers(engine))
    assert found[0] != found[1]
    return places[0], places[1], *found


def test_an_engine_that_slept_has_its_answers_again(directories: Directories) -> None:
    """States and weights go and come back; nothing of a state from before is used."""
    with Engine.from_pretrained(directories[0], **ROOM) as engine:
        for level in (1, 2):
            assert all_answers(engine) == directories[2]
            engine.sleep(level)  # type: ignore[arg-type]
            engine.wake()
        assert all_answers(engine) == directories[2]


@pytest.mark.parametrize("way", ["staged", "in_place"])
def test_new_weights_answer_as_if_there_had_been_no_others(
    way: Any, directories: Directories
) -> None:
    """No state of the old weights is found by the prefixes of the new ones."""
    with Engine.from_pretrained(directories[0], **ROOM) as engine:
        assert all_answers(engine) == directories[2]
        with engine.new_weights("other", way=way) as new:
            new.load(directories[1])
        assert all_answers(engine) == directories[3]


@needs_products
def test_packed_and_converted_weights_answer_as_those_packed_at_load(
    directories: Directories, tmp_path: Path
) -> None:
    """Convolutions and decays go along as they are, and each linear layer is quantised as at load."""
    packed = pack(str(directories[0]), tmp_path / "packed", create_plugin_manager().registry.load, dtype="float32")
    with Engine.from_pretrained(packed.parent, **ROOM) as engine:
        assert all_answers(engine) == directories[2]
    convert(str(directories[0]), tmp_path / "converted", quantization="w8a8", dtype="float32")
    with Engine.from_pretrained(tmp_path / "converted", **ROOM) as engine:
        converted = all_answers(engine)
    with Engine.from_pretrained(directories[0], quantization="w8a8", **ROOM) as engine:
        assert all_answers(engine) == converted


class Alone:
    """An engine without company, cache, chunks and drafts: the oracle of drawn lives."""

    def __init__(self, family: str) -> None:
        self.engine = Engine.from_pretrained(tiny_model(family), block_size=8, num_kv_blocks=64, max_num_seqs=1,
                                             enable_prefix_caching=False, speculation="off")  # fmt: skip
        self._known: dict[tuple[tuple[int, ...], int], list[int]] = {}

    def __call__(self, prompt: list[int], num_tokens: int) -> list[int]:
        known = (tuple(prompt), num_tokens)
        if known not in self._known:
            how = SamplingParams(max_tokens=num_tokens, ignore_eos=True)
            (output,) = self.engine.generate([prompt], how, show_progress=False)
            self._known[known] = list(output.outputs[0].token_ids)
        return self._known[known]


def drawn_settings(rng: random.Random) -> dict[str, Any]:
    rows, size = rng.randint(1, 5), rng.choice([4, 8, 16])
    return {
        "block_size": size, "num_kv_blocks": rng.choice([128, 200, 720]) // size, "max_num_seqs": rows,
        "max_num_waiting": 200,
        "max_num_batched_tokens": rows + rng.choice([4, 9, 40]), "speculation": rng.choice(["auto", "off"]),
        "host_kv_memory": rng.choice([None, "256KiB", "8MiB"]), "max_model_len": 96,
        "preemption": rng.choice(["auto", "swap", "swap", "recompute", "shrink", "wait"]), "check_invariants": True,
    }


def live(engine: Engine, alone: Alone, rng: random.Random, fails: list[bool]) -> Counter[str]:
    """Let requests, forks, and sessions that are parked come and go; compare all that ends without an error."""
    counts, sessions, waiting = Counter[str](), [], []
    how = SamplingParams(max_tokens=6, ignore_eos=True)
    for _ in range(12):
        start = [*SHARED[: rng.choice([0, 7, 8, 16, 37])], rng.randrange(3, VOCAB)]
        for _ in range(rng.randint(0, 3)):
            waiting.append(engine.add_request(start, replace(how, n=rng.randint(1, 2), max_tokens=rng.randint(1, 20))))
        fails[0] = rng.random() < 0.3
        if rng.random() < 0.4:
            sessions.append(engine.session(how))
        for session in rng.sample(sessions, min(len(sessions), 2)):
            known = [*session.token_ids, rng.randrange(3, VOCAB)]
            if len(known) > 80 or rng.random() < 0.2:
                sessions.remove(session)
                session.close()
                continue
            with suppress(StepFailed):
                (found,) = session.ask(known[len(session.token_ids) :]).outputs
                assert found.finish_reason == "error" or list(found.token_ids) == alone(known, 6)
                counts["turns"] += found.finish_reason == "length"
            session.park(rng.choice(["host", "disk"]))
            sessions.extend([session.fork()] if rng.random() < 0.3 else [])
        for _ in range(rng.randint(0, 6)):
            engine.step()
    while engine.has_pending_requests():
        engine.step()
    for request in waiting:
        for one in request.output().outputs:
            counts[one.finish_reason or ""] += 1
            if one.finish_reason == "length":
                prompt, found = list(request.output().prompt_token_ids), list(one.token_ids)
                assert found == alone(prompt, 20)[: len(found)]
        request.remove()
    return counts


@pytest.mark.torture
def test_drawn_lives_of_real_models(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Engines of drawn sizes, with swaps, forks, drafts, parked sessions, steps that fail and copies that fail: what
    ends without an error is what the model answers to that prompt alone."""
    seed, counts, fails = first_seed(), Counter[str](), [False]
    family = EACH_TIME[seed % len(EACH_TIME)]
    alone = Alone(family)

    def once(self: StatePool, *given: Any, what: Any) -> Any:
        is_over, fails[0] = fails[0], False
        if is_over:
            raise OSError("on purpose")
        return what(self, *given)

    for name in ("planned", "swap_out", "swap_in"):
        monkeypatch.setattr(StatePool, name, partialmethod(once, what=getattr(StatePool, name)))
    for number in range(seed, seed + scaled(1)):
        rng = random.Random(f"hybrid {number}")
        monkeypatch.setattr(chunk_ends, "LEAST_SAVED", rng.choice([2, 16, 128]))
        with Engine.from_pretrained(tiny_model(family), **drawn_settings(rng), disk_kv_dir=str(tmp_path)) as engine:
            counts += live(engine, alone, rng, fails)
            fails[0] = False
            for session in list(engine.sessions):
                session.close()
            stats = engine.stats()
            assert (stats.num_blocks_used, stats.num_states_used, stats.num_host_states_used) == (0, 0, 0), number
    assert counts["length"] + counts["turns"] > 5
