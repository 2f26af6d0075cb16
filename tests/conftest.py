"""Shared fixtures: the pool of ranks, on GPUs where there are any."""

from __future__ import annotations

import importlib.util
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.support.pool import Pool

DEVICE = os.environ.get("SEQPAR_TEST_DEVICE") or ("cuda" if torch.cuda.is_available() else "cpu")
if DEVICE == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"  # kernels are tested on the CPU too; read when a kernel is defined

# what was measured on this machine must not decide what tests see
os.environ["SEQPAR_CACHE"] = os.path.join(tempfile.gettempdir(), "seqpar-tests-without-rates")

# no Triton outside Linux: nothing launches its kernels there
collect_ignore_glob = [] if importlib.util.find_spec("triton") else ["kernels/*.py"]


@pytest.fixture(scope="session")
def ranks() -> Iterator[Pool]:
    """All tests' ranks; gloo on the CPU, NCCL with one rank a GPU."""
    torch.set_num_threads(2)
    pool = Pool(DEVICE)
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A transformer folder with random weights, to be read."""
    from tests.support.tiny import (
        diffusers_dit,  # here: diffusers loads slowly, and after the interpreter was asked for
    )

    path = tmp_path_factory.mktemp("model")
    diffusers_dit().float().save_pretrained(path)  # pyright: ignore
    return path


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what needs (more) GPUs than there are; tests of one world follow each other, so groups are reused."""
    gpus = torch.cuda.device_count() if DEVICE == "cuda" else None
    left_out = [item for item in items if DEVICE != "cuda" and item.get_closest_marker("gpu")]
    left_out += [item for item in items if gpus is not None and _world(item) > gpus]
    config.hook.pytest_deselected(items=left_out)
    gone = set(left_out)
    items[:] = sorted((item for item in items if item not in gone), key=_world)


def _world(item: pytest.Item) -> int:
    spec = getattr(item, "callspec", None)
    return spec.params.get("world", 0) if spec else 0
