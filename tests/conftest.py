"""Shared fixtures: the pool of ranks, which uses GPUs if there are any."""

from __future__ import annotations

import gc
import os
import shutil
import signal
import tempfile
from collections.abc import Generator, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.support.forked_workers import fork_workers
from tests.support.garbage import SELDOM, imported

if TYPE_CHECKING:
    from tests.support.pool import Pool


def has_gpu() -> bool:
    """Return whether torch can use a GPU; without a driver torch is not imported, which takes seconds."""
    if not any(map(os.path.exists, ("/dev/nvidiactl", "/dev/dxg", "/dev/kfd"))):
        return False
    import torch

    return torch.cuda.is_available()


DEVICE = os.environ.get("SEQPAR_TEST_DEVICE") or ("cuda" if has_gpu() else "cpu")
if DEVICE == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"  # runs kernels on the CPU; Triton reads it when a kernel is defined

# nohup ignores SIGHUP, a shell's background job SIGINT and SIGQUIT, and processes that tests start inherit that
signal.signal(signal.SIGHUP, signal.SIG_DFL)
signal.signal(signal.SIGQUIT, signal.SIG_DFL)
signal.signal(signal.SIGINT, signal.default_int_handler)
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)

# what tests compute is small: threads would spend more time waiting for each other, here and in processes of tests
os.environ.setdefault("OMP_NUM_THREADS", "1")
# as `seqpar` sets it for its ranks; a forked rank has the setting of the server that has imported torch
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")


def pytest_configure(config: pytest.Config) -> None:
    """Prepare what runs tests; a process whose workers run them imports nothing of it."""
    if not (hasattr(config, "workerinput") or config.option.collectonly):  # as the server of workers collects
        # what was measured before, on this machine or by other tests, must not influence the tests
        cache = os.environ["SEQPAR_CACHE"] = tempfile.mkdtemp(prefix="seqpar-tests-")
        config.add_cleanup(partial(shutil.rmtree, cache, ignore_errors=True))
    if config.getoption("dist", "no") != "no" and not hasattr(config, "workerinput"):
        return
    import torch
    from hypothesis import settings

    from tests.support.pool import quicken

    torch.set_num_threads(1)
    if DEVICE == "cpu":
        quicken()
    settings.register_profile("seqpar", deadline=None)  # an example takes long on a busy machine, whatever it computes
    settings.load_profile("seqpar")


@pytest.fixture(autouse=True)
def signals() -> Iterator[None]:
    """Restore handlers of signals: what starts ranks ignores signals at its end, and so would later servers."""
    before = {number: signal.getsignal(number) for number in SIGNALS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture(scope="session")
def ranks() -> Iterator[Pool]:
    """Return the pool of ranks of all tests: gloo on the CPU, NCCL with one rank a GPU."""
    from tests.support.pool import Pool

    pool = Pool(DEVICE)
    yield pool
    pool.close()


@pytest.fixture(autouse=True)
def _memory_for_others() -> Iterator[None]:
    from tests.support.pool import give_back

    yield
    give_back()


@pytest.fixture
def cpu_ranks(ranks: Pool) -> Pool:
    """Return ranks on CPUs, for exact mode in fp64; on GPUs it is for 16 bits, and tests compare it with one GPU."""
    if ranks.device == "cuda":
        pytest.skip("a GPU has no attention in fp64 whose rows do not depend on their number")
    return ranks


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
    """Return how many processes run the tests, a file each; on GPUs one, whose ranks have them all.

    On CPUs one more than there are cores: some tests wait for seconds.
    """
    return 0 if DEVICE == "cuda" else min(len(os.sched_getaffinity(0)) + 1, 8)


def pytest_xdist_setupnodes(config: pytest.Config) -> None:
    """Fork the workers; on a machine with GPUs a forked process could not use them."""
    if not has_gpu():
        fork_workers(config.args)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Look for no garbage while modules are imported, nor later in what they made: it all stays."""
    with imported():
        result = yield
    gc.set_threshold(*SELDOM)
    return result


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect tests that need more GPUs than there are, and sort the others by world size: process groups are reused.

    Workers take the files in this order, a file each, so that a file's fixtures are made once. Files with a slow test
    come first, because no worker may begin one when the others have nothing left to do.
    """
    gpus = _gpus() if DEVICE == "cuda" else None
    left_out = [item for item in items if DEVICE != "cuda" and item.get_closest_marker("gpu")]
    left_out += [item for item in items if gpus is not None and _world(item) > gpus]
    config.hook.pytest_deselected(items=left_out)
    gone = set(left_out)
    items[:] = [item for item in items if item not in gone]
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    paths = sorted(dict.fromkeys(item.path for item in items), key=lambda path: path not in slow)
    files = {path: index for index, path in enumerate(paths)}
    alone = "PYTEST_XDIST_WORKER" not in os.environ
    items.sort(key=lambda item: (0 if alone else files[item.path], _world(item)))


def _gpus() -> int:
    import torch

    return torch.cuda.device_count()


def _world(item: pytest.Item) -> int:
    spec = getattr(item, "callspec", None)
    return spec.params.get("world", 0) if spec else 0
