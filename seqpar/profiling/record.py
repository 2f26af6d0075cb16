"""Records steps of a run by torch.profiler, with the blocks of its model and the meetings of its ranks as spans.

Nothing of this is there while no profile is made: torch's hooks of all modules are registered when a recording begins
and removed when it ends, and drivers call what they are given after each step, as they do for progress bars.

A module that the driver calls is a block, unless it has lists of layers: then it is a model, and what it calls are the
blocks. They are numbered by their classes, in the order of their first calls. All steps from the first one on are
recorded, because only before a graph is captured the host launches each kernel inside of its block; and in one session,
because on a GPU a second one soon after the first may find nothing.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as modules
from torch.profiler import ProfilerAction, ProfilerActivity, profile, record_function

from seqpar.mesh.mesh import Mesh, gathered
from seqpar.profiling.trace import BLOCK, CLOCK, STEP

MEASURED = 4  # steps that are measured
BEFORE = 3  # steps on a GPU until graphs are captured: the second call of a kind is, pairs of branches are known later
MEETINGS = 32  # of all ranks, to compare their clocks
# for torch's profiler: torch 2.13 prints a line for each recording otherwise, and graphs that are replayed after a
# recording may fail if what records on the GPU is taken down
ENVIRONMENT = {"KINETO_LOG_LEVEL": "99", "TEARDOWN_CUPTI": "0", "DISABLE_CUPTI_LAZY_REINIT": "1"}


class BlockMarks:
    """Marks the blocks of models in traces, from `begin` to `end`."""

    def __init__(self) -> None:
        self._open: list[tuple[nn.Module, record_function | None]] = []
        self._names: dict[int, str] = {}
        self._counts = Counter[str]()
        self._hooks: list[Any] = []

    def begin(self) -> None:
        """Look at the calls of all modules from now on."""
        before = modules.register_module_forward_pre_hook(self._enter)
        self._hooks = [before, modules.register_module_forward_hook(self._leave, always_call=True)]

    def end(self) -> None:
        """Look no more."""
        for hook in self._hooks:
            hook.remove()
        self._hooks, self._open = [], []

    def _enter(self, module: nn.Module, inputs: object) -> None:
        span = None
        if all(_is_model(each) for each, _ in self._open) and not _is_model(module):
            span = record_function(BLOCK + self._name(module))
            with torch._C.DisableTorchFunction():  # modes, as that of a decoder's strips, know no spans
                span.__enter__()
        self._open.append((module, span))

    def _leave(self, module: nn.Module, inputs: object, output: object) -> None:
        while self._open:
            each, span = self._open.pop()
            if span is not None:
                with torch._C.DisableTorchFunction():
                    span.__exit__(None, None, None)
            if each is module:  # what is left above it has raised an error before its hook ran
                return

    def _name(self, module: nn.Module) -> str:
        if id(module) not in self._names:
            kind = type(module).__name__
            self._names[id(module)] = f"{kind} {self._counts[kind]}"
            self._counts[kind] += 1
        return self._names[id(module)]


def _is_model(module: nn.Module) -> bool:
    return any(isinstance(child, nn.ModuleList) for child in module.children())


class StepRecorder:
    """Records steps while it is entered; call it after each step, on all ranks. It needs `needs` steps at least.

    measured: how many steps are measured. before: after how many all graphs have been captured; one more warms up.
    blocks: whether blocks are marked; hooks of all modules make compiled ones compile again. first: the first step that
    is measured. trace: what was recorded, once it is left.
    """

    def __init__(self, mesh: Mesh, measured: int = MEASURED, before: int | None = None, blocks: bool = True) -> None:
        self._mesh, self._measured = mesh, measured
        self._before = steps_before(mesh) if before is None else before
        self.first, self.trace = self._before + 1, dict[str, Any]()
        self._blocks = BlockMarks() if blocks else None
        self._span: record_function | None = None
        self._done = 0

    @property
    def needs(self) -> int:
        """Return the least number of steps."""
        return steps_needed(self._measured, self._before)

    def __enter__(self) -> StepRecorder:
        for name, value in ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        on_gpu = self._mesh.device.type == "cuda"
        self._profiler = profile(
            activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])],
            schedule=self._action,
            on_trace_ready=self._read,
            acc_events=True,  # one cycle is all, so that nothing accumulates; without it torch 2.11 prints a warning
        )
        self._profiler.start()
        if self._blocks is not None:
            self._blocks.begin()
        self._begin_step()
        return self

    def __exit__(self, *error: object) -> None:
        self._end_step()
        if self._blocks is not None:
            self._blocks.end()
        self._profiler.stop()

    def __call__(self, index: int) -> None:
        """Take note that a step has been queued, or done on a CPU."""
        self._end_step()
        self._done += 1
        self._profiler.step()
        if self._done == self.first:
            self._meet()
        self._begin_step()

    @contextmanager
    def calls_of(self, is_step: Callable[[nn.Module], bool]) -> Iterator[None]:
        """Take each call of such a module for a step while it is entered."""

        def after(module: nn.Module, inputs: object, output: object) -> None:
            if is_step(module):
                self(self._done)

        hook = modules.register_module_forward_hook(after)
        try:
            yield
        finally:
            hook.remove()

    def check(self) -> None:
        """Raise ValueError if there were too few steps."""
        if self._done < self.needs:
            raise ValueError(too_few(self._done, self._measured, self._before))

    def _action(self, step: int) -> ProfilerAction:
        """Return what torch.profiler does in a step: its schedule."""
        if step + 1 == self.needs:
            return ProfilerAction.RECORD_AND_SAVE
        return ProfilerAction.RECORD if step < self.needs else ProfilerAction.NONE

    def _read(self, profiler: Any) -> None:
        with tempfile.TemporaryDirectory(prefix="seqpar-") as folder:
            profiler.export_chrome_trace(str(file := Path(folder, "trace.json")))
            self.trace = json.loads(file.read_bytes())

    def _begin_step(self) -> None:
        self._span = record_function(f"{STEP}{self._done}")
        self._span.__enter__()

    def _end_step(self) -> None:
        if self._span is not None:
            self._span.__exit__(None, None, None)
            self._span = None

    def _meet(self) -> None:
        """Meet all ranks on the host, so that clocks can be compared."""
        world = self._mesh.world
        for _ in range(MEETINGS if world.size > 1 else 0):
            with record_function(CLOCK):
                met = gathered(world, self._mesh.device, torch.zeros(1, dtype=torch.uint8), "a profile's meeting")
                met.tolist()  # the host waits also where only NCCL is there


def steps_before(mesh: Mesh) -> int:
    """Return how many steps run before all that is captured as a graph has been."""
    return BEFORE if mesh.device.type == "cuda" else 0


def steps_needed(measured: int, before: int) -> int:
    """Return how many steps a recording takes: one lies between those before graphs and those that are measured."""
    return before + 1 + measured


def too_few(steps: int, measured: int, before: int) -> str:
    """Return the error of a run with too few steps."""
    graphs = f"{before} until all graphs are captured, " if before else ""
    needs = steps_needed(measured, before)
    return f"got a run of {steps} steps, expected at least {needs}: {graphs}1 to warm up, {measured} to measure"
