# pyright cannot infer the types of diffusers' modules
# pyright: reportAttributeAccessIssue=false, reportArgumentType=false, reportCallIssue=false, reportIndexIssue=false
"""Tests FLUX.1's fused blocks in a body against diffusers' module in fp64, and its sharing of the weights."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers.models.transformers.transformer_flux import FluxTransformer2DModel
from torch import Tensor, nn

import seqpar
from seqpar.graphs.signature import form_of
from seqpar.mesh.mesh import Mesh
from tests.support.meshes import mesh_for, random
from tests.support.pool import Pool
from tests.support.tiny_flux import CASES, TOLERANCE, arguments, body_of, error, ours, theirs, tiny


def on_ranks(rank: int, world: int, device: torch.device, strategy: str, case: str) -> float:
    module = tiny(**CASES[case][3]).to(device)
    given = arguments(case, device=device)
    truth = theirs(module, given)
    body = body_of(module, strategy, mesh_for(strategy, world, device))
    first = ours(body, given)
    assert body.sharded.texts()["computation"] == "4 blocks by fused kernels"
    assert torch.equal(first, ours(body, given))
    return error(first, truth)


WORLDS = [(1, "schnell", "ulysses"), (2, "fill", "kv_first"), (4, "dev", "ulysses")]


@pytest.mark.parametrize(("world", "case", "strategy"), WORLDS)
def test_all_kinds_of_flux_equal_diffusers(ranks: Pool, world: int, case: str, strategy: str) -> None:
    for difference in ranks.run(world, on_ranks, strategy, case):
        assert difference < TOLERANCE


def spoiled(rank: int, world: int, device: torch.device, how: str) -> float:
    module = tiny().to(device)
    given = arguments("dev", device=device)
    truth = theirs(module, given)
    if how == "ids":
        given["img_ids"] = given["img_ids"] + torch.tensor([0, 1, 0], device=device)
    elif rank == world - 1:
        module.single_transformer_blocks[1].attn.to_k.weight.data[0] += 0.5
    return error(ours(body_of(module, "ulysses", mesh_for("ulysses", world, device)), given), truth)


@pytest.mark.parametrize("how", ["ids", "a weight of the last rank"])
def test_these_differences_are_noticed(ranks: Pool, how: str) -> None:
    """Negative control of the test above: image ids off by one; one rank's keys from another weight."""
    assert max(ranks.run(2, spoiled, how)) > 1e-3


# The module's weights ------------------------------------------------------------------------------------------


def test_weights_are_shared_and_stay_the_modules() -> None:
    """Their bits and names stay, the fused weights have the module's memory, and nothing is held twice."""
    module, given = tiny(), arguments("dev")
    before = {key: x.clone() for key, x in module.state_dict().items()}
    body = body_of(module)
    ours(body, given)
    assert [*module.state_dict()] == [*before]
    assert all(torch.equal(x, before[key]) for key, x in module.state_dict().items())
    storages = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in module.parameters()}
    assert len(storages) < len(before)  # those of q, k and v lie in one memory
    assert sum(storages.values()) == sum(x.numel() * x.element_size() for x in module.parameters())
    attn = module.transformer_blocks[0].attn
    attn.to_k.weight.mul_(1.5)  # in place, as peft fuses: the blocks read it
    assert error(ours(body, given), theirs(module, given)) < TOLERANCE
    assert not torch.equal(attn.to_k.weight, before["transformer_blocks.0.attn.to_k.weight"])


def replaced(module: Any) -> None:
    layer = module.transformer_blocks[1].attn.to_v
    layer.weight = nn.Parameter(layer.weight * 2, requires_grad=False)


def layer_replaced(module: Any) -> None:
    module.transformer_blocks[1].ff.net[2] = copy.deepcopy(module.transformer_blocks[0].ff.net[2])


ALONE = ("a weight's data", "a parameter", "a setting")  # which calls do not compare: `seqpar.refresh` is for them
CHANGES: dict[str, Callable[[Any], object]] = {
    "a weight's data": lambda module: setattr(
        module.single_transformer_blocks[0].attn.to_q.weight,
        "data",
        module.single_transformer_blocks[0].attn.to_q.weight.data * 2,
    ),
    "a parameter": replaced,
    "a setting": lambda module: setattr(module.transformer_blocks[0].norm2, "eps", 0.5),
    "a layer": layer_replaced,
    "a state dict, assigned": lambda module: module.load_state_dict(
        {key: x * 1.25 for key, x in module.state_dict().items()}, assign=True
    ),
    "a state dict, copied": lambda module: module.load_state_dict(
        {key: x * 1.25 for key, x in module.state_dict().items()}
    ),
    "moved and back": lambda module: module.float().double(),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_transformer_follows_changes_of_its_weights(change: str) -> None:
    module, given = tiny(), arguments("dev")
    seqpar.parallelize(module, Mesh.single())
    body: Any = module.forward
    old, state = theirs(module, given), body.sharded.key()
    assert body.sharded.key() == state
    CHANGES[change](module)
    if change in ALONE:
        seqpar.refresh(module)
    assert (body.sharded.key() == state) is (change == "a state dict, copied")  # which writes to the same addresses
    got = theirs(module, given)
    seqpar.release(module)
    truth = theirs(module, given)
    assert error(got, truth) < TOLERANCE
    assert change == "moved and back" or error(old, truth) > 1e-3


def test_a_folder_of_the_module_and_a_copy_are_whole(tmp_path: Path) -> None:
    """safetensors writes views of one memory as separate tensors; a deep copy has weights of its own."""
    module, given = tiny(torch.float32), arguments("dev", torch.float32)
    body = body_of(module)
    body.compute(form_of(given))
    module.save_pretrained(tmp_path)
    body.release()  # its hooks cannot be copied
    read, copied = FluxTransformer2DModel.from_pretrained(tmp_path), copy.deepcopy(module)
    for other in (read, copied):
        assert isinstance(other, nn.Module)
        pairs = zip(module.named_parameters(), other.named_parameters(), strict=True)
        assert all(a == b and torch.equal(x, y) and x.data_ptr() != y.data_ptr() for (a, x), (b, y) in pairs)
    size = sum(x.numel() * 4 for x in module.parameters())
    assert size < sum(file.stat().st_size for file in tmp_path.glob("*.safetensors")) < size * 1.1
    assert module.config.in_channels == module.config["in_channels"] == 8


def test_bf16_is_as_close_to_the_truth_as_diffusers() -> None:
    module = tiny(torch.bfloat16, num_layers=3, num_single_layers=6)
    found = []
    for seed in range(4):
        given = arguments("dev", torch.bfloat16)
        given["hidden_states"] = random((2, 13, 8), 50 + seed, dtype=torch.bfloat16)
        wide = {name: x.double() if isinstance(x, Tensor) else x for name, x in given.items()}
        # diffusers rounds the timestep times 1000 to bf16, which the body does as well
        wide |= {name: (given[name].bfloat16() * 1000).double() / 1000 for name in ("timestep", "guidance")}
        truth = theirs(copy.deepcopy(module).double(), wide)
        with torch.no_grad():
            plain = module(**given).sample.double()
        body = body_of(module)
        found.append([(x - truth).norm().item() for x in (body.compute(form_of(given))[0].double(), plain)])
        body.release()
    mine, plain = torch.tensor(found).norm(dim=0).tolist()
    assert mine <= 1.25 * plain
