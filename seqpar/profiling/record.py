"""Records steps of a run by torch.profiler, with the blocks of its model and the meetings of its ranks as spans.

Without a profile none of this exists: global module hooks are registered when a recording begins and removed when it
ends. A module that the driver calls is a block, unless it has lists of layers: then it is a model, and the modules it
calls are the blocks, numbered by class in the order of their first calls. One session records all steps from the first
one on: the host launches each kernel inside its block only before a graph is captured, and on a GPU a second session
soon after the first may record nothing.
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

MEASURED = 4  # steps
BEFORE = 3  # steps on a GPU until all graphs are captured: the second call of a kind is, guidance pairs are known later
MEETINGS = 32  # of all ranks, to compare their clocks
# torch 2.13 prints a line per recording otherwise, and graphs replayed after a recording may fail if CUPTI is torn down
ENVIRONMENT = {"KINETO_LOG_LEVEL": "99", "TEARDOWN_CUPTI": "0", "DISABLE_CUPTI_LAZY_REINIT": "1"}


class BlockMarks:
    """Marks the blocks of models in traces, from `begin` to `end`."""

    def __init__(self) -> None:
        self._open: list[tuple[nn.Module, record_function | None]] = []
        self._names: dict[int, str] = {}
        self._counts = Counter[str]()
        self._hooks: list[Any] = []

    def begin(self) -> None:
        before = modules.register_module_forward_pre_hook(self._enter)
        self._hooks = [before, modules.register_module_forward_hook(self._leave, always_call=True)]

    def end(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks, self._open = [], []

    def _enter(self, module: nn.Module, inputs: object) -> None:
        span = None
        if all(_is_model(outer) for outer, _ in self._open) and not _is_model(module):
            if id(module) not in self._names:
                kind = type(module).__name__
                self._names[id(module)] = f"{kind} {self._counts[kind]}"
                self._counts[kind] += 1
            span = record_function(BLOCK + self._names[id(module)])
            with torch._C.DisableTorchFunction():  # function modes, such as a decoder's strips, do not know spans
                span.__enter__()
        self._open.append((module, span))

    def _leave(self, module: nn.Module, inputs: object, output: object) -> None:
        while self._open:
            inner, span = self._open.pop()
            if span is not None:
                with torch._C.DisableTorchFunction():
                    span.__exit__(None, None, None)
            if inner is module:  # those above it have raised before their hooks ran
                return


def _is_model(module: nn.Module) -> bool:
    return any(isinstance(child, nn.ModuleList) for child in module.children())


class StepRecorder:
    """Records steps while it is entered; call it after each step, on all ranks.

    measured: number of measured steps. before: steps until all graphs are captured; one more warms up. blocks: whether
    to mark blocks. first: the first measured step. needs: the least
    number of steps. trace: the recording, after exit.
    """

    def __init__(self, mesh: Mesh, measured: int = MEASURED, before: int | None = None, blocks: bool = True) -> None:
        self._mesh, self._measured = mesh, measured
        self._before = steps_before(mesh) if before is None else before
        self.needs = steps_needed(measured, self._before)
        self.first, self.trace = self._before + 1, dict[str, Any]()
        self._blocks = BlockMarks() if blocks else None
        self._span: record_function | None = None
        self._done = 0

    def __enter__(self) -> StepRecorder:
        for name, value in ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        on_gpu = self._mesh.device.type == "cuda"
        self._profiler = profile(
            activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])],
            schedule=self._action,
            on_trace_ready=self._read,
            acc_events=True,  # one cycle is all, so nothing accumulates; without it torch 2.11 prints a warning
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
        """Note that a step has been queued (GPU) or is done (CPU)."""
        self._end_step()
        self._done += 1
        self._profiler.step()
        if self._done == self.first and self._mesh.world.size > 1:
            for _ in range(MEETINGS):
                with record_function(CLOCK):
                    empty = torch.zeros(1, dtype=torch.uint8)
                    met = gathered(self._mesh.world, self._mesh.device, empty, "a meeting of the profile")
                    met.tolist()  # makes the host wait also with NCCL
        self._begin_step()

    @contextmanager
    def calls_of(self, is_step: Callable[[nn.Module], bool]) -> Iterator[None]:
        """Count each call of such a module as a step while entered."""

        def after(module: nn.Module, inputs: object, output: object) -> None:
            if is_step(module):
                self(self._done)

        hook = modules.register_module_forward_hook(after)
        try:
            yield
        finally:
            hook.remove()

    def check(self) -> None:
        if self._done < self.needs:
            raise ValueError(too_few(self._done, self._measured, self._before))

    def _action(self, step: int) -> ProfilerAction:
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


def steps_before(mesh: Mesh) -> int:
    return BEFORE if mesh.device.type == "cuda" else 0


def steps_needed(measured: int, before: int) -> int:
    """The number of steps of a recording: one that warms up lies between graphs and measured steps."""
    return before + 1 + measured


def too_few(steps: int, measured: int, before: int) -> str:
    """The error of a run with too few steps."""
    graphs = f"{before} until all graphs are captured, " if before else ""
    needs = steps_needed(measured, before)
    return f"got a run of {steps} steps, expected at least {needs}: {graphs}1 to warm up, {measured} to measure"
