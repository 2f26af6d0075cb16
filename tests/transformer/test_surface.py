# pyright cannot infer the types of diffusers' modules
# pyright: reportAttributeAccessIssue=false, reportArgumentType=false, reportCallIssue=false, reportIndexIssue=false
"""Tests what users do with a transformer besides calling it: offload, compile, copy, save, LoRA between pictures."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable
from typing import Any

import accelerate
import pytest
import torch
from diffusers.models.transformers.transformer_flux import FluxTransformer2DModel

import seqpar
from seqpar.families import _cuts as cuts
from seqpar.graphs.graphs import Graphs
from seqpar.mesh.mesh import Mesh
from tests.support.meshes import mesh as make_mesh
from tests.support.meshes import mesh_for
from tests.support.pool import Pool
from tests.support.tiny_flux import TOLERANCE, arguments, error, theirs, tiny
from tests.transformer.test_changes import Captures

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # peft warns of what is tested here
CPU = torch.device("cpu")


def sequential(module: Any) -> None:
    accelerate.cpu_offload(module, execution_device=CPU)


def grouped(module: Any) -> None:
    module.enable_group_offload(CPU, CPU, offload_type="leaf_level")


def whole_model(module: Any) -> None:
    accelerate.cpu_offload_with_hook(module, execution_device=CPU)


MANAGED: dict[str, Callable[[Any], None]] = {
    "sequential offload": sequential,
    "group offload": grouped,
    "model offload": whole_model,
}


def offloaded(rank: int, world: int, device: torch.device, how: str, wished: bool) -> str:
    """Return the message with which a call refuses weights that travel between host and GPU."""
    module, given = tiny().to(device), arguments("dev", device=device)
    mesh = mesh_for("ulysses", world, device)
    before = tiny().to(device)
    MANAGED[how](before)
    with pytest.raises(ValueError, match="whose weights are offloaded"):
        seqpar.parallelize(before, mesh, native=wished)
    seqpar.parallelize(module, mesh, native=wished)
    theirs(module, given)
    MANAGED[how](module)
    with pytest.raises(ValueError, match="got") as raised:
        theirs(module, given)
    return str(raised.value)


@pytest.mark.parametrize(
    ("how", "wished"),
    [("sequential offload", True), ("sequential offload", False), ("group offload", True), ("model offload", False)],
)
def test_offload_is_refused_in_one_sentence(ranks: Pool, how: str, wished: bool) -> None:
    for message in ranks.run(2, offloaded, how, wished):
        assert "offloaded between calls" in message or "move the pipeline there" in message


def surface(rank: int, world: int, device: torch.device) -> str:
    """Check a parallelized transformer's config, folder and contexts; return the message for a copy."""
    module, given = tiny().to(device), arguments("dev", device=device)
    before = {key: x.clone() for key, x in module.state_dict().items()}
    seqpar.parallelize(module, make_mesh(device))
    theirs(module, given)
    assert (module.config.in_channels, module.config["in_channels"], module.dtype) == (8, 8, torch.float64)
    with tempfile.TemporaryDirectory() as folder, module.cache_context("cond"):
        module.save_pretrained(folder)
        read: Any = FluxTransformer2DModel.from_pretrained(folder, torch_dtype=torch.float64)
    assert all(torch.equal(x.to(device), before[key]) for key, x in read.state_dict().items())
    with pytest.raises(ValueError, match="got") as raised:
        copy.deepcopy(module)
    seqpar.release(module)
    assert torch.equal(theirs(copy.deepcopy(module), given), theirs(module, given))
    assert all(torch.equal(x, before[key]) for key, x in module.state_dict().items())
    return str(raised.value)


@pytest.mark.parametrize("world", [1, 2])
def test_a_parallelized_transformer_keeps_its_surface(ranks: Pool, world: int) -> None:
    assert all("release" in copied for copied in ranks.run(world, surface))


def refreshed(rank: int, world: int, device: torch.device, wished: bool) -> list[float]:
    """Return the errors of calls before and after a weight is replaced, which calls notice only after `refresh`.

    It is called without need, and between a step's two calls, as well.
    """
    module, given = tiny().to(device), arguments("dev", device=device)
    seqpar.parallelize(module, mesh_for("ulysses", world, device), native=wished)
    call: Any = module.forward
    call.graphs, truth = Graphs(call.mesh, Captures()), theirs(tiny().to(device), given)
    errors = [error(theirs(module, given), truth) for _ in range(3)]
    seqpar.refresh(module)
    errors += [error(theirs(module, given), truth) for _ in range(3)]
    module.proj_out.weight = torch.nn.Parameter(module.proj_out.weight * 2, requires_grad=False)
    seqpar.refresh(module)
    after = [theirs(module, given) for _ in range(3)]
    seqpar.release(module)
    truth = theirs(module, given)
    return errors + [error(x, truth) for x in after]


@pytest.mark.parametrize("wished", [True, False], ids=["fused", "generic"])
def test_refresh_changes_nothing_but_what_calls_know(ranks: Pool, wished: bool) -> None:
    for errors in ranks.run(2, refreshed, wished):
        assert max(errors) < TOLERANCE
    with pytest.raises(ValueError, match="that is not parallelized"):
        seqpar.refresh(tiny())


def test_former_names_are_taken_with_a_warning() -> None:
    with pytest.warns(FutureWarning, match=r"got plan= for parallelize, expected cuts="):
        module: Any = seqpar.parallelize(tiny(), Mesh.single(), plan=tiny()._cp_plan, native=False)
    assert error(theirs(module, arguments("dev")), theirs(tiny(), arguments("dev"))) < TOLERANCE
    with pytest.warns(FutureWarning, match="got Place, expected its new name Boundary"):
        assert cuts.Place is cuts.Boundary
