"""A small transformer with nested arguments, and bodies and captures that record what a `Call` does with them."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from diffusers.models.modeling_outputs import Transformer2DModelOutput
from torch import Tensor, nn

from seqpar.graphs.graphs import Captured
from seqpar.transformer.foreign import Foreign
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
    """A body that runs a module's own forward into one buffer that all calls share, as exchanges share their memory.

    calls: the number of rows of every call. state_: what `state` and `version` return.
    """

    module: nn.Module
    calls: list[int] = field(default_factory=list)
    state_: Hashable = 0
    checks: int = 0
    lacks_memory: bool = False
    released: int = 0
    buffer: Tensor = field(default_factory=lambda: torch.empty(4096, dtype=torch.float64))

    def __call__(self, arguments: Mapping[str, Any]) -> tuple[Tensor, ...]:
        """Return a view of the shared buffer."""
        (out,) = type(self.module).forward(self.module, **arguments, return_dict=False)
        self.calls.append(len(out))
        self.buffer = self.buffer.to(out.device)
        return (self.buffer[: out.numel()].view(out.shape).copy_(out),)

    def why_eager(self) -> str | None:
        """Return None: it can be captured."""

    def state(self) -> Hashable:
        """Return the state."""
        return self.state_

    def told(self) -> dict[str, str]:
        """Return nothing that ranks compare."""
        return {}

    def version(self) -> Hashable:
        """Return the state."""
        return self.state_

    def foreign(self) -> Foreign:
        """Return nothing: nobody has put hooks onto the module."""
        return Foreign()

    def end_copies(self) -> None:
        """Raise, because nothing is merged."""
        raise NotImplementedError

    def check_delivered(self) -> None:
        """Count the checks."""
        self.checks += 1

    def release(self) -> None:
        """Count the releases."""
        self.released += 1


@dataclass
class Replayed:
    """A capture on the CPU: a replay runs the function again and writes into the results of the first run."""

    work: Callable[[], Any]
    results: Any
    replays: int = 0
    released: bool = False

    def replay(self) -> None:
        """Compute again from the same input tensors into the same results."""
        assert not self.released
        self.replays += 1
        for room, value in zip(self.results, self.work(), strict=True):
            room.copy_(value)

    def release(self) -> None:
        """Refuse every later replay."""
        self.released = True


@dataclass
class Captures:
    """Captures calls as `Replayed`; `fails` makes it raise as torch does where a capture is impossible."""

    made: list[Replayed] = field(default_factory=list)
    fails: bool = False
    warm_ups: list[int] = field(default_factory=list)

    def __call__(self, work: Callable[[], Any], warm_up: int) -> Captured:
        """Return a captured call, and note how often it should have run before."""
        self.warm_ups.append(warm_up)
        if self.fails:
            raise RuntimeError("operation not permitted when stream is capturing\nmore lines")
        self.made.append(Replayed(work, tuple(torch.full_like(x, torch.nan) for x in work())))
        return self.made[-1]
