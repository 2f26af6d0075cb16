"""Shared fixtures: the pool of ranks, which uses GPUs if there are any."""

from __future__ import annotations

import importlib.util
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from zlib import crc32

import pytest
import torch

from tests.support.pool import Pool

DEVICE = os.environ.get("SEQPAR_TEST_DEVICE") or ("cuda" if torch.cuda.is_available() else "cpu")
if DEVICE == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"  # runs kernels on the CPU; Triton reads it when a kernel is defined

# what tests compute is small: threads would spend more time waiting for each other, here and in processes of tests
torch.set_num_threads(1)
os.environ.setdefault("OMP_NUM_THREADS", "1")
# as `seqpar` sets it for its ranks; a forked rank has the setting of the server that has imported torch
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")

# rates measured on this machine must not influence the tests
os.environ["SEQPAR_CACHE"] = os.path.join(tempfile.gettempdir(), "seqpar-tests-without-rates")

# Triton exists on Linux only, and nothing launches its kernels elsewhere
collect_ignore_glob = [] if importlib.util.find_spec("triton") else ["kernels/*.py"]


@pytest.fixture(scope="session")
def ranks() -> Iterator[Pool]:
    """Return the pool of ranks of all tests: gloo on the CPU, NCCL with one rank a GPU."""
    pool = Pool(DEVICE)
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a read-only diffusers transformer folder with random weights."""
    from tests.support.tiny import (
        diffusers_dit,  # imported here, because diffusers loads slowly and must load after TRITON_INTERPRET is set
    )

    path = tmp_path_factory.mktemp("model")
    diffusers_dit().float().save_pretrained(path)  # pyright: ignore
    return path


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """Return how many processes run the tests, a file each: the CPU's cores; on GPUs one, whose ranks have them all."""
    return 0 if DEVICE == "cuda" else min(len(os.sched_getaffinity(0)), 8)


@pytest.hookimpl(tryfirst=True)  # xdist reads the groups
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect tests that need more GPUs than there are, sort the others by world size, and group them by worker.

    So process groups are reused. A file's tests run in one worker. Ranks that wait for each other take CPU time from
    those of other workers, so files with several ranks share as few workers as there are pairs of cores.
    """
    gpus = torch.cuda.device_count() if DEVICE == "cuda" else None
    left_out = [item for item in items if DEVICE != "cuda" and item.get_closest_marker("gpu")]
    left_out += [item for item in items if gpus is not None and _world(item) > gpus]
    config.hook.pytest_deselected(items=left_out)
    gone = set(left_out)
    items[:] = [item for item in items if item not in gone]
    files = {path: index for index, path in enumerate(dict.fromkeys(item.path for item in items))}
    alone = "PYTEST_XDIST_WORKER" not in os.environ  # a worker keeps a file together, for its fixtures
    items.sort(key=lambda item: (0 if alone else files[item.path], _world(item)))
    shared = {item.path for item in items if "ranks" in getattr(item, "fixturenames", ())}
    pairs = max(1, len(os.sched_getaffinity(0)) // 2)
    for item in items:
        name = f"ranks {crc32(bytes(item.path)) % pairs}" if item.path in shared else str(item.path)
        item.add_marker(pytest.mark.xdist_group(name))


def _world(item: pytest.Item) -> int:
    spec = getattr(item, "callspec", None)
    return spec.params.get("world", 0) if spec else 0
