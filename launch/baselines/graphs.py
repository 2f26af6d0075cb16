"""Captures work as a CUDA graph, for what benches time and what they compare with."""

from __future__ import annotations

from collections.abc import Callable

import torch


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
