"""Shared fixtures: the pool of ranks, on GPUs where there are any."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

from tests.pool import Pool

DEVICE = os.environ.get("SEQPAR_TEST_DEVICE") or ("cuda" if torch.cuda.is_available() else "cpu")
if DEVICE == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"  # kernels are tested on the CPU too; read when a kernel is defined


@pytest.fixture(scope="session")
def ranks() -> Iterator[Pool]:
    """All tests' ranks; gloo on the CPU, NCCL with one rank a GPU."""
    torch.set_num_threads(2)
    pool = Pool(DEVICE)
    yield pool
    pool.close()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave out what needs more GPUs than there are; tests of one world follow each other, so groups are reused."""
    gpus = torch.cuda.device_count() if DEVICE == "cuda" else None
    items.sort(key=_world)
    for item in items:
        world = _world(item)
        if gpus is not None and world and world > gpus:
            item.add_marker(pytest.mark.skip(reason=f"needs {world} GPUs, there are {gpus}"))
        if item.get_closest_marker("gpu") and DEVICE != "cuda":
            item.add_marker(pytest.mark.skip(reason="needs CUDA"))


def _world(item: pytest.Item) -> int:
    spec = getattr(item, "callspec", None)
    return spec.params.get("world", 0) if spec else 0
