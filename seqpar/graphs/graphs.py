"""Runs each kind of call as one CUDA graph: captured at the second call of its kind, then replayed.

A transformer's call launches hundreds to thousands of kernels, more slowly than one or several GPUs run them; a replay
is one launch. Inputs are copied into the graph's own tensors before a replay and results out of them after it, so that
callers keep what they were given, and a conditional and an unconditional call of one kind share a graph. Cost: the
memory of a call for each graph.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol, Self

import torch
from torch import Tensor

from seqpar.graphs.signature import Form, form_of
from seqpar.mesh.mesh import Mesh, collected
from seqpar.mesh.watch import Calls
from seqpar.types.say import say

WARM_UP = 2  # runs before capture, because libraries load, tune and allocate in their first calls


Runs = Callable[[], bool]
"""Whether a part of a step is replayed; asked when the parts before it are queued."""


class Recording:
    """The CUDA graphs of one step, in order: a context in which kernels are captured, and which `cut` divides.

    They share memory, so that a part may read what those before it have left, but no part that may be left out.
    pool: a handle of that memory (`torch.cuda.graph_pool_handle`).
    """

    def __init__(self, pool: Any) -> None:
        self._pool, self._parts = pool, list[tuple[torch.cuda.CUDAGraph, Runs | None]]()
        self._open: ExitStack | None = None

    @property
    def is_rehearsal(self) -> bool:
        """Whether the step runs to warm up, before it is captured."""
        return not self._parts

    @property
    def is_open(self) -> bool:
        return self._open is not None

    def __enter__(self) -> Self:
        self._begin(None)
        return self

    def __exit__(self, *error: Any) -> None:
        # a failing capture does not restore the current stream, which the outer context does
        ended, self._open = self._open, None
        if ended is not None:  # it is None after a part whose end has failed
            ended.__exit__(*error)

    def cut(self, runs: Runs | None = None) -> None:
        """End a part and begin the next one, which is replayed if `runs` says so (None: always)."""
        self.__exit__(None, None, None)
        self._begin(runs)

    def _begin(self, runs: Runs | None) -> None:
        graph = torch.cuda.CUDAGraph()
        self._open = ExitStack()
        self._open.enter_context(torch.cuda.stream(torch.cuda.current_stream()))
        # thread_local lets NCCL's watchdog thread query its events during the capture
        self._open.enter_context(torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"))
        self._parts.append((graph, runs))

    def replay(self) -> None:
        for graph, runs in self._parts:
            if runs is None or runs():
                graph.replay()

    def release(self) -> None:
        for graph, _ in self._parts:
            graph.reset()


class StepGraph:
    """A CUDA graph of `step()` on the current device. results: what the captured step has returned.

    state: all tensors that a step changes; warm-up and capture restore their values. pool: a handle of memory that
    several graphs share (`torch.cuda.graph_pool_handle`), none of which needs what another leaves there. warm_up:
    number of runs before the capture; 0 if the step has just run as it will be captured. recording: what captures it,
    if the step itself cuts it; in place of `pool`.
    """

    def __init__(
        self,
        step: Callable[[], Any],
        state: Sequence[Tensor],
        pool: Any = None,
        warm_up: int = WARM_UP,
        recording: Recording | None = None,
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
        self._recording = Recording(pool) if recording is None else recording
        with self._recording:
            self.results: Any = step()
        restore()  # a capture runs no kernels, but code that it calls may still write to the state

    def replay(self) -> None:
        self._recording.replay()

    def release(self) -> None:
        """Free the graph's memory; call this before the process group ends."""
        self.results = None
        self._recording.release()


@cache
def _aside(device: int) -> torch.cuda.Stream:
    # one stream for all warm-ups of a device, because memory that a stream has freed serves that stream alone
    return torch.cuda.Stream(device)


GRAPHS = 8  # kinds of calls that are cached; a pipeline has one or two per image size

Compute = Callable[[Form], Any]
"""Computes a call from its arguments; returns nested tensors and other values."""


class Captured(Protocol):
    """A captured call: `replay` computes it again from the same input tensors into the same results."""

    results: Any

    def replay(self) -> None: ...

    def release(self) -> None: ...


Capture = Callable[[Callable[[], Any], int], Captured]
"""Captures a function without arguments, after some runs of it; raises RuntimeError where that is impossible."""


class CudaCapture:
    """Captures calls as CUDA graphs that share one memory pool: their results are copied out before the next replay."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self.recording: Recording | None = None  # of the last capture; open while a call is captured

    def __call__(self, work: Callable[[], Any], warm_up: int) -> Captured:
        self.recording = Recording(self._pool)
        try:
            return StepGraph(work, (), None, warm_up, self.recording)
        except BaseException:
            self.recording = None
            raise


@dataclass(frozen=True)
class _Graph:
    """A captured call with its own input tensors. generation: the state of the weights at its capture."""

    inputs: Form
    captured: Captured
    generation: int

    def __call__(self, arguments: Form) -> Any:
        for path, x in self.inputs.tensors.items():
            x.copy_(arguments.tensors[path])
        self.captured.replay()
        return self.captured.results


class Graphs:
    """The calls of one transformer or VAE method: each kind of call is a graph from its second call on.

    capture: captures calls; None runs all calls eagerly. check: raises TimeoutError if this rank timed out waiting for
    another one; it waits for the device, and is called after eager calls alone. limit: the number of cached graphs.
    prints: whether the first rank of the sequence axis prints why calls run without graphs. Collective over that axis.
    """

    def __init__(
        self, mesh: Mesh, capture: Capture | None, check: Callable[[], None], limit: int = GRAPHS, prints: bool = True
    ) -> None:
        self._mesh, self._capture, self._check, self._limit = mesh, capture, check, limit
        self._prints = prints and mesh.sequence.rank == 0
        self._seen, self._ran = Calls(), Calls()
        self._graphs: OrderedDict[Hashable, _Graph] = OrderedDict()
        self._calls = Calls()

    def __len__(self) -> int:
        return len(self._graphs)

    @property
    def captures(self) -> bool:
        return self._capture is not None

    @contextmanager
    def entered(
        self, compute: Compute, arguments: Form, generation: int = 0, eagerly: bool = False
    ) -> Iterator[Compute]:
        """Yield what computes a call with these arguments: the replay of its graph, or `compute` itself.

        Copy its results inside this context (`copied`), because the next call overwrites them. It is a context so that
        no frame lies between a call and its eager computation. generation: a number that is equal on all ranks and
        changes whenever a captured call is no longer valid. eagerly: whether this call may be neither captured nor
        replayed, the same on all ranks.
        """
        kind = arguments.kind
        if kind in self._graphs and self._graphs[kind].generation != generation:
            self._drop(kind)
        with self._mesh.call(self._mesh.sequence, "a call of a transformer or VAE", self._calls.is_first(kind)):
            graph = None if eagerly else self._graph(compute, arguments, generation)
            if graph is not None:
                yield graph
                return
            yield compute
            self._check()
            self._ran.before((kind, generation))

    def run(self, compute: Compute, arguments: Form, generation: int = 0, eagerly: bool = False) -> Form:
        """Return copies of a call's results; the arguments are those of `entered`."""
        with self.entered(compute, arguments, generation, eagerly) as computes:
            return copied(computes(arguments))

    def release(self) -> None:
        """Free all graphs; the next call of each kind counts as its first."""
        for kind in list(self._graphs):
            self._drop(kind)
        self._seen, self._ran = Calls(), Calls()

    def _graph(self, compute: Compute, arguments: Form, generation: int) -> _Graph | None:
        kind = arguments.kind
        if self._capture is None or kind is None or torch.is_autocast_enabled(self._mesh.device.type):
            return None
        graph = self._graphs.get(kind)
        if graph is None:
            # a call that raised an error may not have built its exchanges, and weights may have changed since it ran
            warm_up = 0 if self._ran.knows((kind, generation)) else 1
            if self._seen.before(kind):
                graph = self._captured(kind, compute, arguments, generation, warm_up)
        if graph is not None:
            self._graphs.move_to_end(kind)
        return graph

    def _captured(
        self, kind: Hashable, compute: Compute, arguments: Form, generation: int, warm_up: int
    ) -> _Graph | None:
        """Capture a call; if that fails on any rank, print why and run all calls eagerly from now on."""
        while len(self._graphs) >= self._limit:
            self._drop(next(iter(self._graphs)))
        inputs, captured, reason = arguments.each(lambda x: x.clone()), None, None
        try:
            assert self._capture is not None
            captured = self._capture(lambda: compute(inputs), warm_up)
        except RuntimeError as error:
            reason = str(error).partition("\n")[0]
        per_rank = collected(self._mesh.sequence, self._mesh.device, reason, str | None, "why a capture failed")
        reasons = [reason for reason in per_rank if reason is not None]
        if reasons:
            if captured is not None:
                captured.release()
            if self._prints:
                say(f"CUDA graph capture failed, running eagerly: {reasons[0]}")
            self.release()
            self._capture = None
            return None
        assert captured is not None
        self._calls.forget(kind)
        self._graphs[kind] = _Graph(inputs, captured, generation)
        return self._graphs[kind]

    def _drop(self, kind: Hashable) -> None:
        self._calls.forget(kind)  # the next capture has the longer deadline again
        self._graphs.pop(kind).captured.release()


def copied(results: Any) -> Form:
    return form_of(results).each(lambda x: x.clone())
