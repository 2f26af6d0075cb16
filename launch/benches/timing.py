"""What all benches share: clocks, the description of the machine, and JSON lines."""

from __future__ import annotations

import json
import math
import platform
import re
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch

from seqpar.mesh.mesh import Mesh

T = TypeVar("T")
K = TypeVar("K")
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


def calls_for(seconds: float, ms_of_one: float, mesh: Mesh) -> int:
    """The number of calls that take about `seconds` on the slowest rank: the same on all ranks, at least 1."""
    ms = max(mesh.collect(ms_of_one, float))
    return int(min(MOST_CALLS, max(1, 1e3 * seconds / ms)))


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


def over(size: int) -> int:
    """The number of inputs of `size` bytes that fill the L2 cache four times, so that none is cached when reused."""
    return math.ceil(4 * torch.cuda.get_device_properties("cuda").L2_cache_size / size)


def spread(times: Sequence[float]) -> dict[str, float]:
    return {"median": statistics.median(times), "min": min(times), "max": max(times)}


def environment(device: torch.device | None = None) -> dict[str, str]:
    """The versions and the device that a measurement depends on. device: by default a GPU where there is one."""
    device = device or torch.device("cuda" if torch.cuda.is_available() else "cpu")
    found = {"torch": torch.__version__, "python": platform.python_version()}
    if device.type == "cuda":
        import triton

        nccl: Any = torch.cuda.nccl.version()  # pyright: ignore[reportAttributeAccessIssue]
        found |= {"gpu": torch.cuda.get_device_name(device), "cuda": str(torch.version.cuda)}
        found |= {"triton": triton.__version__, "nccl": ".".join(map(str, nccl))}
        found |= {"cudnn": str(torch.backends.cudnn.version())}
    return found


def command() -> str:
    return "launch/bench.py " + re.sub(r" --out[ =]\S+", "", " ".join(sys.argv[1:]))


def record(line: Mapping[str, Any], out: Path | None, device: torch.device | None = None) -> None:
    """Append a JSON line with the command and the environment."""
    if out is not None:
        with out.open("a") as file:
            file.write(json.dumps({**line, "command": command(), "env": environment(device)}) + "\n")


def judged(verdicts: Iterable[tuple[str, bool]], shows: bool = True) -> bool:
    """Print what was found, and whether it is right; return whether all is."""
    found = list(verdicts)
    for text, right in found if shows else ():
        print(f"{'ok    ' if right else 'FAILED'} {text}", flush=True)
    return all(right for _, right in found)


def graphed(work: Callable[[], object], calls: int = 1) -> Callable[[], None]:
    """A function that replays `calls` calls of `work` as one CUDA graph; the replay keeps what `work` uses alive."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            work()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    # The outer `with` restores the current stream if a capture fails.
    # thread_local: NCCL's watchdog may query its events during the capture.
    with torch.cuda.stream(torch.cuda.current_stream()), torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for _ in range(calls):
            work()

    def replay(kept: object = work) -> None:
        graph.replay()

    return replay
