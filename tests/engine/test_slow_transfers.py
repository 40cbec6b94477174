"""Transfers that never end, or end too late: their sequences continue; their write targets are not given out."""

from __future__ import annotations

from typing import Any

import pytest

from pagedcore.analysis.diagnosis.invariants import check, snapshot
from pagedcore.config.limits import MAX_TRANSFER_S
from pagedcore.engine.builder import build_components
from pagedcore.engine.engine import Engine
from pagedcore.errors import InvalidConfig
from pagedcore.execution import kv_transfers
from pagedcore.execution.kv_transfers import KVTransfers
from pagedcore.requests.request import Request
from pagedcore.sampling_params import SamplingParams
from pagedcore.scheduler.cost_model import CostModel
from support.doubles import FakeClock, ToyBackend, ToyStore, toy_answer
from support.engine_builders import assert_all_free

PROMPTS = [[3, 1, 4, 1, 5], [9, 2, 6, 5, 3], [5, 8, 9, 7, 9]]
BLOCK = 4 * ToyBackend.kv_bytes_per_token
TOO_LATE = pytest.mark.parametrize("is_ok", [True, False])


def params(max_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, ignore_eos=True)


class Lab:
    """An engine whose store stalls on command, and a clock that moves a second in every step."""

    def __init__(self, **settings: Any) -> None:
        defaults: dict[str, Any] = {
            "num_kv_blocks": 8, "block_size": 4, "max_num_seqs": 4, "max_num_batched_tokens": 16,
            "host_kv_memory": 48 * BLOCK, "preemption": "swap", "max_model_len": 32,
            "check_invariants": True,
        }
        self.clock = FakeClock()
        self.engine = Engine(build_components(ToyBackend(), **{**defaults, **settings}), self.clock)
        self.store: ToyStore = self.engine.components.runner.backend.cache_store  # type: ignore[attr-defined]
        self.host = self.engine.scheduler.kv_cache.host

    def stand_still(self) -> None:
        """From now on no transfer ends by itself."""
        self.store.is_slow = self.store.is_hung = True

    def end_all(self, *, is_ok: bool) -> None:
        """Let everything end that is under way, and work again."""
        self.store.is_slow = self.store.is_hung = False
        for transfer_id in sorted(self.store.under_way):
            self.store.end(transfer_id, is_ok=is_ok)
        self.step()

    def step(self) -> None:
        """Let a second pass and step."""
        self.clock.advance(1.0)
        self.engine.step()

    def run(self, max_steps: int = 200) -> None:
        """Step until nothing is pending."""
        for _ in range(max_steps):
            if not self.engine.has_pending_requests():
                return
            self.step()
        raise AssertionError(f"still pending after {max_steps} steps")

    def add(self, prompt: list[int], max_tokens: int) -> Request:
        return self.engine.add_request(prompt, params(max_tokens))

    def ask(self, prompt: list[int], max_tokens: int = 4) -> int:
        """Answer one prompt, compare with the oracle, and return how much was found."""
        request = self.add(prompt, max_tokens)
        self.run()
        assert list(request.output().outputs[0].token_ids) == toy_answer(prompt, max_tokens)
        return request.output().num_cached_tokens

    def flood(self) -> None:
        """Use every block of the device for the tokens of another request."""
        for start in range(3):
            self.ask([20 + start] * 28)


def swapped_to_nowhere(**settings: Any) -> tuple[Lab, list[Request]]:
    """Three answers that grow into each other, until one has been swapped out to a host that stands still."""
    lab = Lab(**settings)
    lab.stand_still()
    requests = [lab.add(prompt, 16) for prompt in PROMPTS]
    while lab.engine.stats().num_preemptions == 0:
        lab.step()
    assert lab.store.under_way
    return lab, requests


@TOO_LATE
def test_who_was_swapped_out_to_nowhere_goes_on(is_ok: bool) -> None:
    """After the deadline a sequence waits no more, with the right answer; the late end frees the host's blocks."""
    lab, requests = swapped_to_nowhere()
    lab.run()
    for request, prompt in zip(requests, PROMPTS, strict=True):
        assert list(request.output().outputs[0].token_ids) == toy_answer(prompt, 16)
    written = sum(len(pairs) for _, pairs in lab.store.under_way.values())
    stats = lab.engine.stats()
    assert stats.num_failed_transfers == len(lab.store.under_way) > 0
    assert (stats.num_blocks_used, stats.num_host_blocks_used) == (0, written)
    lab.end_all(is_ok=is_ok)
    assert lab.engine.stats().num_host_blocks_used == lab.engine.stats().num_host_blocks_cached == 0
    assert lab.engine.stats().num_failed_transfers == stats.num_failed_transfers
    lab.ask(PROMPTS[0])
    assert_all_free(lab.engine)


def test_nothing_is_given_up_before_its_time() -> None:
    """Up to the deadline a transfer is waited for, and what it brings is used."""
    lab, _ = swapped_to_nowhere()
    (first,) = lab.store.under_way
    lab.clock.advance(MAX_TRANSFER_S - 1.0)
    lab.step()
    assert lab.engine.stats().num_failed_transfers == 0
    lab.store.end(first)
    lab.step()
    assert lab.engine.stats().swapped_out_bytes > 0
    lab.end_all(is_ok=True)
    lab.run()
    assert lab.engine.stats().num_failed_transfers == 0


@TOO_LATE
def test_who_is_loaded_from_nowhere_is_computed(is_ok: bool) -> None:
    """A load that never ends keeps the blocks it writes to, and those only, until it does; its prompt is computed."""
    lab = Lab(num_kv_blocks=16)
    lab.ask(PROMPTS[0], 8)
    lab.flood()
    lab.stand_still()
    prompt = [*PROMPTS[0], *toy_answer(PROMPTS[0], 8), 7]
    assert lab.ask(prompt) == 0
    stats = lab.engine.stats()
    assert (stats.num_failed_transfers, stats.num_blocks_used, stats.num_host_blocks_used) == (1, 3, 0)
    lab.end_all(is_ok=is_ok)
    assert lab.engine.stats().num_blocks_used == 0
    assert lab.ask([*prompt, 1]) > 0
    assert_all_free(lab.engine)


def test_a_host_that_stands_still_is_left_alone_until_it_moves() -> None:
    """While a transfer is overdue none begins, in either direction; after its end the host is used again."""
    lab, _ = swapped_to_nowhere()
    lab.run()
    num_given_up = lab.engine.stats().num_failed_transfers
    for start in range(4):
        lab.ask([11 + start] * 20)
    assert lab.engine.stats().num_failed_transfers == len(lab.store.under_way) == num_given_up
    lab.end_all(is_ok=True)
    before = lab.engine.stats().swapped_out_bytes
    lab.ask([30] * 20)
    assert lab.engine.stats().swapped_out_bytes > before


@TOO_LATE
def test_without_the_blocks_of_a_load_everybody_waits_for_its_end(is_ok: bool) -> None:
    """What needs the blocks that a store withholds waits, is no error, and is answered when the store lets go."""
    lab = Lab(num_kv_blocks=6)
    lab.ask([3] * 16, 4)
    lab.ask([4] * 20, 4)
    lab.stand_still()
    request = lab.add([*([3] * 16), 1], 7)
    for _ in range(30):
        lab.step()
    assert (lab.engine.stats().num_failed_transfers, request.is_done) == (1, False)
    lab.end_all(is_ok=is_ok)
    lab.run()
    assert list(request.output().outputs[0].token_ids) == toy_answer([*([3] * 16), 1], 7)
    assert_all_free(lab.engine)


@pytest.mark.parametrize("num_steps", [0, int(MAX_TRANSFER_S) + 2])
def test_leaving_while_a_transfer_hangs(num_steps: int) -> None:
    """Aborted before or after the deadline, no block is freed early or twice, and the late end is harmless."""
    lab, requests = swapped_to_nowhere()
    for _ in range(num_steps):
        lab.step()
    for request in requests:
        request.abort()
        request.remove()
    assert check(snapshot(lab.engine.scheduler)) == []
    lab.clock.advance(2 * MAX_TRANSFER_S)
    lab.step()
    assert lab.engine.stats().num_blocks_used == 0
    lab.end_all(is_ok=True)
    assert_all_free(lab.engine)


def test_a_session_parked_to_nowhere_keeps_its_tokens() -> None:
    """What did not arrive in time is not kept; parked again while the host stands still, it goes to disk."""
    lab = Lab()
    session = lab.engine.session(params(4))
    session.ask(PROMPTS[0])
    lab.stand_still()
    session.ask([7])
    assert session.park("host").tier == "host"
    for _ in range(int(MAX_TRANSFER_S) + 2):
        lab.step()
    assert session.parked is not None
    assert (session.parked.tier, lab.engine.stats().num_failed_transfers) == ("tokens", 1)
    assert session.park("host").tier == "disk"
    known = list(session.token_ids)
    assert list(session.ask([1]).outputs[0].token_ids) == toy_answer([*known, 1], 4)


def test_a_session_is_not_fetched_from_a_host_that_stands_still() -> None:
    """Brought back while another transfer is overdue, it stays where it is; after its end it comes."""
    lab = Lab(num_kv_blocks=12)
    session = lab.engine.session(params(4))
    session.ask(PROMPTS[0])
    assert session.park("host").num_tokens_kept == 8
    lab.flood()
    lab.stand_still()
    lab.ask(PROMPTS[1])
    for _ in range(int(MAX_TRANSFER_S) + 2):
        lab.step()
    assert (session.resume(), session.parked.tier) == (0, "host")  # type: ignore[union-attr]
    lab.end_all(is_ok=True)
    assert session.resume() == 8


def test_a_store_that_moves_nothing_at_the_start_is_refused() -> None:
    """An engine that cannot even measure a transfer does not start: the blocks would never be safe to use."""
    backend = ToyBackend()
    backend.allocate_kv(8, 4)
    backend.cache_store.allocate_host(8)
    backend.cache_store.is_slow = backend.cache_store.is_hung = True
    clock = FakeClock()
    poll = backend.cache_store.poll_transfers

    def idle(*, wait: bool) -> list[tuple[int, bool]]:
        clock.advance(0.05)
        return poll(wait=wait)

    backend.cache_store.poll_transfers = idle  # type: ignore[method-assign]
    mover = KVTransfers(backend.cache_store, Lab().engine.scheduler.moves, clock)
    with pytest.raises(InvalidConfig, match=r"host_kv_memory: .* in 10 s"):
        mover.calibrate(CostModel(), 8, 0)


@pytest.mark.parametrize("lie", ["raises", "raises once", "unknown ids", "ends twice"])
def test_a_store_that_cannot_say_what_has_ended(
    lie: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A ``poll_transfers`` that raises, or names transfers that are not under way, ends no request: what it does not
    report is timed out, what it reports twice counts once, and the log says so once."""
    lab = Lab()
    real, num_polls, pauses, num_waits = lab.store.poll_transfers, 0, list[float](), 0
    monkeypatch.setattr(kv_transfers.time, "sleep", pauses.append)

    def poll_transfers(*, wait: bool) -> list[tuple[int, bool]]:
        nonlocal num_polls, num_waits
        num_polls += 1
        num_waits += wait
        if lie == "raises" or (lie == "raises once" and num_polls == 1):
            raise ZeroDivisionError
        ended = list(real(wait=wait))
        return {"unknown ids": [*ended, (10**6, True)], "ends twice": ended * 2}.get(lie, ended)

    monkeypatch.setattr(lab.store, "poll_transfers", poll_transfers)
    requests = [lab.add(prompt, 16) for prompt in PROMPTS]
    lab.run()
    assert lab.engine.stats().num_preemptions
    for request, prompt in zip(requests, PROMPTS, strict=True):
        assert list(request.output().outputs[0].token_ids) == toy_answer(prompt, 16)
    assert caplog.text.count("cannot say which transfers have ended") == ("raises" in lie)
    # Why: an engine that has nothing to compute until the time-out must not spin on a core of its host.
    assert lie != "raises" or len(pauses) == num_waits > 0
    assert_all_free(lab.engine)
