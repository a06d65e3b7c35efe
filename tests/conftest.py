"""What every test shares: helper processes end with the session, GPU tests need a GPU."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

from tests.helpers.oracle import stop_oracle
from tests.helpers.ranks import stop_ranks

# The same examples in every run, and none too slow: a busy machine takes its time.
settings.register_profile(
    "tests", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("tests")


@pytest.fixture(scope="session", autouse=True)
def _helpers_end_with_the_session() -> Iterator[None]:
    yield
    stop_ranks()
    stop_oracle()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests marked `gpu` where torch finds no CUDA device."""
    needing_gpu = [item for item in items if item.get_closest_marker("gpu")]
    if not needing_gpu:
        return
    import torch  # only when it matters: collecting the tests of plain Python stays fast

    if not torch.cuda.is_available():
        for item in needing_gpu:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
