"""Settings that all kernel tests share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from support.emulated_tiles import EmulatedTiles


@pytest.fixture(autouse=True)
def quiet_torch() -> Iterator[None]:
    """No autograd, as in the engine, and one thread unless a test asks for more: small tensors gain nothing."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    with torch.inference_mode():
        yield
    torch.set_num_threads(before)


@pytest.fixture
def tiles(machine: EmulatedTiles) -> Iterator[EmulatedTiles]:
    """The ``machine`` of a module, required to have had no fault and to be released by every thread."""
    machine.executed.clear()
    yield machine
    assert not machine.faults
    assert machine.num_threads_in_use == 0
