"""A step as one CUDA graph: captured once, replayed for every step with no work on the host between.

When it wins: always where the host launches slower than the GPU computes (small token counts, many GPUs); it never
costs more than its capture, two steps and some memory. The work must live on the device alone: static buffers, a step
counter in memory, no host sync.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

WARM_UP = 2  # runs before capture: libraries load, tune and allocate in their first calls


class StepGraph:
    """`step()` captured on the current device. `state` is what it changes: warm-up leaves it as it was."""

    def __init__(self, step: Callable[[], None], state: Sequence[Tensor]) -> None:
        before = [tensor.clone() for tensor in state]

        def restore() -> None:
            for tensor, value in zip(state, before, strict=True):
                tensor.copy_(value)

        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(WARM_UP):  # always the same step: there may be no other in its tables
                step()
                restore()
        torch.cuda.current_stream().wait_stream(stream)
        self._graph = torch.cuda.CUDAGraph()
        # the outer stream: a capture that fails does not go back to it by itself
        # thread_local: NCCL's watchdog may query its events while we capture
        with (
            torch.cuda.stream(torch.cuda.current_stream()),
            torch.cuda.graph(self._graph, capture_error_mode="thread_local"),
        ):
            step()
        restore()  # capturing runs nothing, but not all that it calls need know

    def replay(self) -> None:
        """One step, queued on the current stream."""
        self._graph.replay()

    def release(self) -> None:
        """Give its memory back; must happen before the process group ends."""
        self._graph.reset()
