"""Calls of tiny transformers whose tokens are sharded, what diffusers computes in one process, and how they differ."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from seqpar.families._find import cuts_of
from seqpar.graphs.graphs import Graphs
from seqpar.graphs.signature import form_of
from seqpar.planner.plan import Choice
from seqpar.transformer.calibration import Calibration
from seqpar.transformer.call import ShardedCall
from seqpar.transformer.hooks import ShardedModule
from seqpar.types.protocols import Qkv8
from tests.support.calls import Captures
from tests.support.diffusers_tiny import MODELS, flat
from tests.support.foreign import StayDouble, in_double
from tests.support.meshes import mesh_for

TOLERANCE = 1e-12  # the order of sums changes 1e-15 of the largest value
VISIBLE = 1e-3
CPU = torch.device("cpu")
Outputs = tuple[Tensor, ...]


def body_of(
    module: Any,
    world: int = 1,
    device: torch.device = CPU,
    strategy: str = "ulysses",
    transport: str = "collective",
    cuts: Any = None,
    fused: bool = False,
    exact: bool = False,
    calibration: Calibration | None = None,
    attention: Mapping[str, Qkv8] | None = None,
) -> ShardedCall:
    """Return a call on the mesh on which a strategy is tested; the module's own forward stays in its place.

    attention: how its attention is rounded to 8 bits.
    """
    choices = {"strategy": strategy, "transport": transport, "local": "sdpa" if device.type == "cpu" else "reference"}
    choices |= {} if attention is None else {"local": "fp8"}
    plan: Any = SimpleNamespace(**{name: Choice(choice, "test") for name, choice in choices.items()}, exact=exact)
    mesh = mesh_for(strategy, world, device)
    return ShardedCall(ShardedModule(module, mesh, plan, cuts_of(module, cuts), fused, calibration, attention))


def captured(call: Any, captures: Any = None) -> tuple[Any, Any]:
    """Let a call compute in fp64 and capture on the CPU."""
    captures = captures or Captures()
    in_double(call).graphs = Graphs(call.mesh, captures, call.check_delivered)
    return call, captures


def computed(body: ShardedCall, arguments: Mapping[str, Any]) -> Outputs:
    """Return the outputs of a call, which the next one overwrites."""
    return body.compute(form_of(dict(arguments)))


def called(body: ShardedCall, arguments: Mapping[str, Any]) -> Outputs:
    """Return the outputs of a call in fp64, kept from being overwritten by the next one."""
    with StayDouble(), torch.no_grad():
        return tuple(x.clone() for x in flat(computed(body, arguments)))


def error(got: Outputs | Tensor, wanted: Outputs | Tensor) -> float:
    """Return the largest difference relative to the largest value; infinity where one is NaN."""
    pairs = zip(*(x if isinstance(x, tuple) else (x,) for x in (got, wanted)), strict=True)
    return torch.stack([(x - y).abs().max() / y.abs().max() for x, y in pairs]).nan_to_num(nan=torch.inf).max().item()


def raised(work: Callable[[], object]) -> str:
    """Return the message of the ValueError that `work` raises."""
    try:
        work()
    except ValueError as found:
        return str(found)
    return "nothing was raised"


# FLUX.1 --------------------------------------------------------------------------------------------------------


def tiny(dtype: torch.dtype = torch.float64, **config: Any) -> Any:
    return MODELS["flux"].having(**config).build().to(dtype)


def arguments(device: torch.device | str = "cpu", dtype: torch.dtype = torch.float64) -> dict[str, Any]:
    return {name: x.to(dtype) for name, x in MODELS["flux"].arguments(device).items()}


def theirs(module: nn.Module, given: dict[str, Any]) -> Tensor:
    """Return what a module's forward computes, in fp64 where it is in fp64."""
    return MODELS["flux"].whole(module, given)[0]


def ours(call: ShardedCall, given: dict[str, Any]) -> Tensor:
    return called(call, given)[0]
