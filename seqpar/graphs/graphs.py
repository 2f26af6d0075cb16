"""Runs a body as one CUDA graph for each kind of call: captured at its second call, then only replayed.

A transformer's call launches hundreds to thousands of kernels; the host launches them more slowly than a GPU, or
several, run them. A replay is one launch. Inputs are copied into the graph's own tensors before it and results are
copied out after it, so that callers keep what they were given, and a conditional and an unconditional call of the same
kind share a graph.
When it wins: whenever the host is slower than the GPUs, at the price of the memory of a call for each graph.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol

import torch
from torch import Tensor

from seqpar.graphs.signature import Form, form_of
from seqpar.mesh.mesh import Mesh, collected
from seqpar.mesh.watch import Calls

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


GRAPHS = 8  # kinds of calls that are kept; a pipeline has one or two for each size of picture


class Computes(Protocol):
    """What is run and captured: a `seqpar.transformer.call.Body`, or the decoding of a VAE."""

    def __call__(self, arguments: Any, /) -> Any:
        """Return nested tensors and other values; see `seqpar.transformer.call.Body`."""
        ...

    def check_delivered(self) -> None:
        """Raise TimeoutError if a rank waited in vain for another one; this waits for the device."""
        ...


class Captured(Protocol):
    """A captured call: `replay` computes it again from the same input tensors into the same results."""

    results: Any

    def replay(self) -> None:
        """Queue the call."""
        ...

    def release(self) -> None:
        """Free its memory."""
        ...


Capture = Callable[[Callable[[], Any], int], Captured]
"""Captures a function without arguments, after some runs of it; raises RuntimeError where that is impossible."""


class CudaCapture:
    """Captures calls as CUDA graphs that share one memory pool: their results are copied out before the next replay."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, work: Callable[[], Any], warm_up: int) -> Captured:
        """Return the captured call, after warm-up runs on a side stream."""
        return StepGraph(work, (), self._pool, warm_up)


@dataclass(frozen=True)
class _Graph:
    """A captured call with its own input tensors. generation: the state of the weights at its capture."""

    inputs: Form
    captured: Captured
    generation: int


class Graphs:
    """Runs bodies, each kind of call as a graph from its second call on; keeps a bounded number of graphs.

    capture: captures calls; None runs all calls eagerly. Every rank of the sequence axis must make the same calls.
    tells: whether the first rank of that axis prints why calls run without graphs.
    """

    def __init__(self, mesh: Mesh, capture: Capture | None, limit: int = GRAPHS, tells: bool = True) -> None:
        self._mesh, self._capture, self._limit = mesh, capture, limit
        self._tells = tells and mesh.sequence.rank == 0
        self._seen, self._ran = Calls(), Calls()
        self._graphs: OrderedDict[Hashable, _Graph] = OrderedDict()
        self._calls = Calls()

    def __len__(self) -> int:
        return len(self._graphs)

    @property
    def captures(self) -> bool:
        """Return whether calls are captured."""
        return self._capture is not None

    def run(self, body: Computes, arguments: Form, generation: int, eagerly: bool = False) -> Form:
        """Return the body's results in tensors of their own.

        generation: a number that is equal on all ranks and changes whenever a captured call is no longer valid.
        eagerly: whether this call may be neither captured nor replayed, the same on all ranks.
        """
        kind = id(body), arguments.kind
        if kind in self._graphs and self._graphs[kind].generation != generation:
            self._drop(kind)
        with self._mesh.call(self._mesh.sequence, "a call of a transformer or VAE", self._calls.is_first(kind)):
            graph = None if eagerly else self._graph(body, arguments, generation)
            if graph is None:
                results = _copied(body(arguments.whole))
                body.check_delivered()  # only where nothing is replayed, because it waits for the device
                self._ran.before((kind, generation))
                return results
            for path, x in graph.inputs.tensors.items():
                x.copy_(arguments.tensors[path])
            graph.captured.replay()
            return _copied(graph.captured.results)

    def _graph(self, body: Computes, arguments: Form, generation: int) -> _Graph | None:
        """Return the graph of a kind of call, captured now if this is its second call, or None if there is none."""
        key = None if arguments.kind is None else (id(body), arguments.kind)
        if self._capture is None or key is None or torch.is_autocast_enabled(self._mesh.device.type):
            return None
        graph = self._graphs.get(key)
        if graph is None:
            # a call that raised an error may not have built its exchanges, and weights may have changed since it ran
            warm_up = 0 if self._ran.knows((key, generation)) else 1
            if self._seen.before(key):
                graph = self._made(key, body, arguments, generation, warm_up)
        if graph is not None:
            self._graphs.move_to_end(key)
        return graph

    def release(self) -> None:
        """Free all graphs; later calls are seen for the first time."""
        for key in list(self._graphs):
            self._drop(key)
        self._seen, self._ran = Calls(), Calls()

    def _made(self, key: Hashable, body: Computes, arguments: Form, generation: int, warm_up: int) -> _Graph | None:
        """Capture a call and keep it; where that fails on a rank, print why and run all calls eagerly from now on."""
        while len(self._graphs) >= self._limit:
            self._drop(next(iter(self._graphs)))
        inputs, captured, reason = arguments.each(lambda x: x.clone()), None, None
        try:
            assert self._capture is not None
            captured = self._capture(lambda: body(inputs.whole), warm_up)
        except RuntimeError as error:
            reason = str(error).partition("\n")[0]
        every = collected(self._mesh.sequence, self._mesh.device, reason, str | None, "why a capture failed")
        reasons = [each for each in every if each is not None]
        if reasons:
            if captured is not None:
                captured.release()
            if self._tells:
                print(f"seqpar: calls run without CUDA graphs, because a capture failed: {reasons[0]}", flush=True)
            self.release()
            self._capture = None
            return None
        assert captured is not None
        self._calls.forget(key)
        self._graphs[key] = _Graph(inputs, captured, generation)
        return self._graphs[key]

    def _drop(self, key: Hashable) -> None:
        self._calls.forget(key)  # the next capture is again what ranks wait longer for
        self._graphs.pop(key).captured.release()


def _copied(results: Any) -> Form:
    return form_of(results).each(lambda x: x.clone())
