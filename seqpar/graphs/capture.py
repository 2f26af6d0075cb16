"""Captures a step once as a CUDA graph and replays it for every step, with no work on the host in between.

When it wins: whenever the host launches kernels more slowly than the GPU runs them (few tokens, many GPUs). It costs
one capture, some warm-up steps and some memory. The step must run on the device alone: static buffers, a step counter
in device memory, no host sync.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

WARM_UP = 2  # runs before capture, because libraries load, tune and allocate in their first calls


class StepGraph:
    """A CUDA graph of `step()` on the current device. results: what the captured step has returned.

    state: all tensors that a step changes; warm-up and capture restore their values. pool: a handle of memory that
    several graphs share (`torch.cuda.graph_pool_handle`), none of which needs what another leaves there. warm_up: how
    often the step runs before; 0 if it has just run as it will be captured.
    """

    def __init__(
        self, step: Callable[[], Any], state: Sequence[Tensor], pool: Any = None, warm_up: int = WARM_UP
    ) -> None:
        before = [tensor.clone() for tensor in state]

        def restore() -> None:
            for tensor, value in zip(state, before, strict=True):
                tensor.copy_(value)

        stream = _aside(torch.cuda.current_device())
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(warm_up):  # the same step each time, because its tables may hold no other
                step()
                restore()
        torch.cuda.current_stream().wait_stream(stream)
        self._graph = torch.cuda.CUDAGraph()
        # the outer context restores the current stream, which a failing capture does not do
        # thread_local lets NCCL's watchdog thread query its events during the capture
        with (
            torch.cuda.stream(torch.cuda.current_stream()),
            torch.cuda.graph(self._graph, pool=pool, capture_error_mode="thread_local"),
        ):
            self.results: Any = step()
        restore()  # a capture runs no kernels, but code that it calls may still write to the state

    def replay(self) -> None:
        """Queue one step on the current stream."""
        self._graph.replay()

    def release(self) -> None:
        """Free the graph's memory; call this before the process group ends."""
        self.results = None
        self._graph.reset()


@cache
def _aside(device: int) -> torch.cuda.Stream:
    """Return the stream of all warm-ups on a device, because memory that one stream has freed serves only that one."""
    return torch.cuda.Stream(device)
