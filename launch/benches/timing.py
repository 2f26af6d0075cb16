"""Helpers of all benches: timing GPU work, describing the machine, writing JSON lines."""

from __future__ import annotations

import json
import math
import platform
import re
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch

from launch.baselines.graphs import graphed
from seqpar.mesh import Mesh

T = TypeVar("T")
K = TypeVar("K")
COPY_BYTES = 1 << 31  # far more than the caches hold
ROUND_MS = 10.0  # time that a kernel runs in a round; slower ways get the same number of calls
MOST_CALLS = 1000  # in a round


def timed(work: Callable[[], object], repeat: int) -> float:
    """ms of one call: the mean of `repeat` calls in a row."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    start.record()
    for _ in range(repeat):
        work()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / repeat


def elapsed(work: Callable[[], object], repeat: int, device: torch.device) -> float:
    """ms of one call of work that all ranks share: the mean of `repeat` calls, after one call that aligns the ranks."""
    work()
    if device.type == "cuda":
        return timed(work, repeat)
    start = time.perf_counter()
    for _ in range(repeat):
        work()
    return 1e3 * (time.perf_counter() - start) / repeat


def calls_for(seconds: float, work: Callable[[], object], mesh: Mesh) -> int:
    """The number of calls that take about `seconds`: the same on all ranks, at least 2."""
    ms = max(mesh.collect(elapsed(work, 1, mesh.device), float))
    return int(min(MOST_CALLS, max(2, 1e3 * seconds / ms)))


def attempt(work: Callable[[], T], mesh: Mesh, *errors: type[Exception]) -> tuple[T | None, str | None]:
    """(result of `work`, None), or (None, the reason on the first rank that failed); all ranks agree which."""
    made, why = None, None
    try:
        made = work()
    except errors as error:
        said = (str(error).strip() or "no message").splitlines()[0]
        why = said if isinstance(error, ValueError) else f"{type(error).__name__}: {said}"
    why = next((reason for reason in mesh.collect(why, str | None) if reason is not None), None)
    return (made, None) if why is None else (None, why)


def slowest(times: Mapping[K, Sequence[float]], mesh: Mesh) -> dict[K, dict[str, float]]:
    """Median, least and most over rounds of the slowest rank's time. A collective call: not for use while timing."""
    ranks = mesh.collect([list(each) for each in times.values()], list[list[float]])
    rounds = (zip(*(rank[index] for rank in ranks), strict=True) for index in range(len(times)))
    return {key: spread([max(each) for each in one]) for key, one in zip(times, rounds, strict=True)}


def walled(work: Callable[[], object]) -> float:
    """Wall-clock ms of one call, host and device together."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    work()
    torch.cuda.synchronize()
    return 1e3 * (time.perf_counter() - start)


def in_turn(works: Mapping[str, Callable[[], object]], rounds: int, repeat: int) -> dict[str, list[float]]:
    """ms of one call of each, in rounds, timed on the device."""
    return by_rounds(works, rounds, lambda work: timed(work, repeat))


def by_rounds(
    works: Mapping[str, Callable[[], object]], rounds: int, clock: Callable[[Callable[[], object]], float]
) -> dict[str, list[float]]:
    """The `clock` of each work in rounds (A B C A B C), so that drifting GPU clocks affect all works equally."""
    times: dict[str, list[float]] = {name: [] for name in works}
    for work in works.values():
        work()
    for _ in range(rounds):
        for name, work in works.items():
            times[name].append(clock(work))
    return times


def over(size: int) -> int:
    """The number of inputs of `size` bytes that fill the L2 cache four times, so that none is cached when reused."""
    return math.ceil(4 * torch.cuda.get_device_properties("cuda").L2_cache_size / size)


def timed_over(
    ways: Mapping[str, Callable[..., object]], sets: Sequence[Sequence[Any]], rounds: int
) -> dict[str, dict[str, float]]:
    """ms of one call of each way on one of `sets`; a CUDA graph calls the way on all sets in turn."""

    def all_sets(way: Callable[..., object]) -> Callable[[], object]:
        # the list keeps every result alive: memory that is reused at once would stay in the cache
        return lambda: [way(*one) for one in sets]

    torch.cuda.empty_cache()  # a capture does not reclaim what earlier graphs left
    graphs = {name: graphed(all_sets(way)) for name, way in ways.items()}
    repeat = max(3, int(ROUND_MS / timed(next(iter(graphs.values())), 3)))
    times = in_turn(graphs, rounds, repeat)
    return {name: spread([ms / len(sets) for ms in values]) for name, values in times.items()}


def rand(*shape: int, dtype: torch.dtype = torch.bfloat16, device: str = "cuda") -> torch.Tensor:
    """Random data, because GPUs run faster on zeros than on real data."""
    return torch.randn(shape, dtype=torch.float32, device=device).to(dtype)


def spread(times: Sequence[float]) -> dict[str, float]:
    """Median, least and most."""
    return {"median": statistics.median(times), "min": min(times), "max": max(times)}


def copy_bandwidth() -> float:
    """Bytes a second that a large device-to-device copy reads and writes."""
    source = torch.empty(COPY_BYTES, dtype=torch.uint8, device="cuda").random_(0, 255)
    target = torch.empty_like(source)
    return 2 * COPY_BYTES / (statistics.median(timed(lambda: target.copy_(source), 10) for _ in range(5)) * 1e-3)


class Sensors:
    """SM clock (MHz) and power (W) of a GPU while work runs, which nvidia-smi reads ten times a second."""

    def __init__(self, gpu: int = 0) -> None:
        # by UUID, because CUDA_VISIBLE_DEVICES changes torch's numbers but not nvidia-smi's
        self._gpu = f"GPU-{torch.cuda.get_device_properties(gpu).uuid}"

    def __enter__(self) -> Sensors:
        query = [
            "nvidia-smi",
            "--query-gpu=clocks.sm,power.draw.instant",
            "--format=csv,noheader,nounits",
            "-lms",
            "100",
            "-i",
            self._gpu,
        ]
        self._process = subprocess.Popen(query, stdout=subprocess.PIPE, text=True)
        self.readings: list[tuple[float, float]] = []
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()
        for _ in range(50):  # nvidia-smi takes a moment to start
            if self.readings or self._process.poll() is not None:
                break
            time.sleep(0.1)
        self.readings.clear()
        return self

    def __exit__(self, *error: object) -> None:
        time.sleep(0.1)
        self._process.terminate()
        self._process.wait()
        self._thread.join(timeout=2)
        if self._process.stdout is not None:
            self._process.stdout.close()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            clock, watts = line.split(",")
            self.readings.append((float(clock), float(watts)))

    def medians(self) -> tuple[float, float]:
        """(MHz, W); `OSError` if nvidia-smi printed nothing."""
        if not self.readings:
            raise OSError("nvidia-smi gave no readings of clock and power")
        clocks, watts = zip(*self.readings, strict=True)
        return statistics.median(clocks), statistics.median(watts)


def environment(device: torch.device) -> dict[str, str]:
    """The versions and the device that a measurement depends on."""
    found = {"torch": torch.__version__, "python": platform.python_version()}
    if device.type == "cuda":
        import triton

        nccl: Any = torch.cuda.nccl.version()  # pyright: ignore[reportAttributeAccessIssue]
        found |= {"gpu": torch.cuda.get_device_name(device), "cuda": str(torch.version.cuda)}
        found |= {"triton": triton.__version__, "nccl": ".".join(map(str, nccl))}
        found |= {"cudnn": str(torch.backends.cudnn.version())}
    return found


def command() -> str:
    """The command line of this bench without its --out."""
    return "launch/bench.py " + re.sub(r" --out[ =]\S+", "", " ".join(sys.argv[1:]))


def append(lines: Sequence[Mapping[str, Any]], out: Path | None) -> None:
    """Add JSON lines to a file."""
    if out is not None:
        with out.open("a") as file:
            file.writelines(json.dumps(line) + "\n" for line in lines)
