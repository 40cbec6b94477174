"""Settings of the CUDA kernels' tests: where compiled PTX is kept between runs."""

from __future__ import annotations

import pytest

from kernels.cuda import simulated_driver


@pytest.fixture(autouse=True, scope="session")
def ptx_cache(request: pytest.FixtureRequest) -> None:
    """Keep PTX in pytest's cache, so that only changed kernels are compiled again."""
    simulated_driver.CACHE.append(request.config.cache.mkdir("pagedcore_ptx"))
