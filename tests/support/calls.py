"""A small transformer with nested arguments, and what records how a `ShardedCall` computes and captures it."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from diffusers.models.modeling_outputs import Transformer2DModelOutput
from torch import Tensor, nn

from seqpar.families import Cuts
from seqpar.graphs.graphs import Capture, Captured
from seqpar.graphs.signature import Form
from seqpar.mesh.mesh import Mesh
from seqpar.planner.plan import Choice
from seqpar.transformer.call import ShardedCall
from seqpar.transformer.foreign import ForeignCode
from seqpar.transformer.forward import CallState
from tests.support.meshes import random


class Toy(nn.Module):
    """Has rows and all kinds of arguments: a table without rows, a list with one entry a row, a nested scale."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(random((4,), 1), requires_grad=False)

    def forward(
        self,
        hidden_states: Tensor,
        timestep: Tensor,
        encoder_hidden_states: Tensor | None = None,
        txt_ids: Tensor | None = None,
        img_shapes: list[Any] | None = None,
        attention_kwargs: dict[str, Any] | None = None,
        return_dict: bool = True,
    ) -> Transformer2DModelOutput | tuple[Tensor]:
        """Return (B, L, 4): every argument has its part in every row.

        There is no product of matrices, whose bits could depend on the number of rows.
        """
        out = hidden_states * self.weight.to(hidden_states.device) * timestep[:, None, None]
        if encoder_hidden_states is not None:
            out = out + encoder_hidden_states.mean(1, keepdim=True)
        if txt_ids is not None:
            out = out + txt_ids.sum()
        if img_shapes is not None:
            out = out + out.new_tensor([sum(shape) for shape in img_shapes])[:, None, None]
        for value in (attention_kwargs or {}).values():
            out = out * (value["scale"] if isinstance(value, dict) else value)
        return Transformer2DModelOutput(sample=out) if return_dict else (out,)


@dataclass
class Recorder:
    """Stands for a transformer with hooks; computes by its own forward into one buffer, as exchanges share memory.

    calls: the number of rows of every call. key_: what `key` and `version` return.
    """

    module: nn.Module
    mesh: Mesh
    calls: list[int] = field(default_factory=list)
    key_: Hashable = 0
    checks: int = 0
    released: int = 0
    buffer: Tensor = field(default_factory=lambda: torch.empty(4096, dtype=torch.float64))
    cuts: Cuts = field(default_factory=lambda: Cuts({}, {}))
    steps: None = None
    foreign: ForeignCode = field(default_factory=ForeignCode)
    fused: Any = field(default_factory=lambda: SimpleNamespace(lacks_memory=False))

    def __post_init__(self) -> None:
        names = {"strategy": "kv_gather", "transport": "collective", "local": "sdpa"}
        plan: Any = SimpleNamespace(**{name: Choice(choice, "test") for name, choice in names.items()}, exact=False)
        self.state = CallState(self.mesh, plan)

    def compute(self, call: Form) -> tuple[Tensor, ...]:
        (out,) = type(self.module).forward(self.module, **call.whole, return_dict=False)
        self.calls.append(len(out))
        self.buffer = self.buffer.to(out.device)
        return (self.buffer[: out.numel()].view(out.shape).copy_(out),)

    def key(self) -> Hashable:
        return self.key_

    def version(self) -> Hashable:
        return self.key_

    def texts(self) -> dict[str, str]:
        return {}

    def check(self) -> None:
        self.checks += 1

    def release(self) -> None:
        self.released += 1


def recorded_call(mesh: Mesh, capture: Capture | None = None) -> tuple[ShardedCall, Recorder]:
    """Return a call of a toy, and what records its computations."""
    recorder: Any = Recorder(Toy(), mesh)
    call: Any = ShardedCall(recorder, capture)
    call.compute = recorder.compute
    return call, recorder


@dataclass
class Replayed:
    """A capture on the CPU: a replay runs the function again and writes into the results of the first run."""

    work: Callable[[], Any]
    results: Any
    replays: int = 0
    released: bool = False

    def replay(self) -> None:
        assert not self.released
        self.replays += 1
        for room, value in zip(self.results, self.work(), strict=True):
            room.copy_(value)

    def release(self) -> None:
        self.released = True


@dataclass
class Captures:
    """Captures calls as `Replayed`; `fails` makes it raise as torch does where a capture is impossible."""

    made: list[Replayed] = field(default_factory=list)
    fails: bool = False
    warm_ups: list[int] = field(default_factory=list)

    def __call__(self, work: Callable[[], Any], warm_up: int) -> Captured:
        self.warm_ups.append(warm_up)
        if self.fails:
            raise RuntimeError("operation not permitted when stream is capturing\nmore lines")
        self.made.append(Replayed(work, tuple(torch.full_like(x, torch.nan) for x in work())))
        return self.made[-1]
