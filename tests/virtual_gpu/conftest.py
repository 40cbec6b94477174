"""Fixtures of tests on virtual GPUs."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kernels.cuda import simulated_driver
from virtual_gpu.machine import Machine
from virtual_gpu.torch_cuda import virtual_gpus


@pytest.fixture(autouse=True, scope="session")
def ptx_cache(request: pytest.FixtureRequest) -> None:
    """Keep PTX in pytest's cache, so that only changed kernels are compiled again."""
    simulated_driver.CACHE.append(request.config.cache.mkdir("pagedcore_ptx"))


@pytest.fixture
def gpus() -> Iterator[Machine]:
    """Two virtual GPUs in the place of ``torch.cuda``."""
    with virtual_gpus() as machine:
        yield machine
