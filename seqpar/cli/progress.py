"""Progress bars of encoding, steps and decoding, and the time of a step, without making the GPU wait."""

from __future__ import annotations

import time
from collections import deque
from types import TracebackType

import torch
from tqdm import tqdm

from seqpar.mesh.mesh import Mesh


class Bar:
    """A bar on rank 0 that appears with the first count, so that no error message follows an empty bar."""

    def __init__(self, total: int, unit: str, mesh: Mesh, title: str | None = None) -> None:
        self._total, self._unit, self._title, self._main = total, unit, title, mesh.is_main
        self._bar: tqdm | None = None

    def __enter__(self) -> Bar:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Leave the bar as it is, so that another one can follow it."""
        if self._bar is not None:
            self._bar.close()

    def __call__(self, index: int) -> None:
        """Count one more."""
        self.add(1)

    def add(self, done: int) -> None:
        """Count `done` more; 0 shows the bar."""
        if self._bar is None:
            self._bar = tqdm(total=self._total, unit=self._unit, desc=self._title, disable=not self._main)
        self._bar.update(done)


class Progress(Bar):
    """A bar of steps that polls CUDA events during the run and waits for them only at the end."""

    def __init__(self, steps: int, mesh: Mesh) -> None:
        super().__init__(steps, "step", mesh, "denoising")
        self._cuda = mesh.device.type == "cuda"
        self._times: list[float] = []
        self._events: list[torch.cuda.Event] = []
        self._open: deque[torch.cuda.Event] = deque()

    def __enter__(self) -> Progress:
        return self

    def __call__(self, index: int) -> None:
        """Count a step that has been queued (GPU) or done (CPU)."""
        if not self._cuda:
            self._times.append(time.perf_counter())
            self.add(1)
            return
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        self._events.append(event)
        self._open.append(event)
        self.add(0)
        while self._open and self._open[0].query():
            self._open.popleft()
            self.add(1)

    def finish(self) -> float | None:
        """Wait for all steps; ms a step without the first one, which is warm-up; None for a single step."""
        while self._open:
            self._open.popleft().synchronize()
            self.add(1)
        marks = self._events if self._cuda else self._times
        if len(marks) < 2:
            return None
        spent = (
            self._events[0].elapsed_time(self._events[-1]) if self._cuda else 1e3 * (self._times[-1] - self._times[0])
        )
        return spent / (len(marks) - 1)
