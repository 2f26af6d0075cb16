# pyright cannot infer the types of diffusers' modules
# pyright: reportAttributeAccessIssue=false, reportArgumentType=false, reportCallIssue=false, reportIndexIssue=false
"""Tests the native body of FLUX.1 against diffusers' module in fp64, on 1-4 ranks, and its sharing of the weights."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers.hooks.first_block_cache import FirstBlockCacheConfig
from diffusers.models.transformers.transformer_flux import FluxIPAdapterAttnProcessor, FluxTransformer2DModel
from torch import Tensor, nn

import seqpar
from seqpar.adapter import adopt, native
from seqpar.models import flux
from seqpar.planner.plan import Plan, for_library
from seqpar.planner.search import Wish
from seqpar.ranks.mesh import Mesh
from tests.support.foreign import StayDouble
from tests.support.meshes import LAYOUTS, mesh_for, random
from tests.support.pool import Pool

TOLERANCE = 1e-12
SMALL = {
    "num_layers": 2,
    "num_single_layers": 2,
    "attention_head_dim": 8,
    "num_attention_heads": 5,
    "joint_attention_dim": 12,
    "pooled_projection_dim": 6,
    "guidance_embeds": True,
    "axes_dims_rope": (2, 2, 4),
    "in_channels": 8,
}
# (batch, text tokens, image tokens, rows of the picture, config): a text shorter than four ranks, and more channels in
# than out with a second picture's ids, as in fill and Kontext pipelines
CASES = {
    "dev": (2, 7, 13, {}),
    "schnell": (1, 3, 11, {"guidance_embeds": False}),
    "fill": (3, 5, 9, {"in_channels": 16, "out_channels": 8}),
}


def tiny(dtype: torch.dtype = torch.float64, **config: Any) -> FluxTransformer2DModel:
    """Return diffusers' transformer with random weights, the same on every rank."""
    module = FluxTransformer2DModel(**{**SMALL, **config}).double().eval().requires_grad_(False)
    for seed, weight in enumerate(module.parameters()):
        weight.copy_(random(tuple(weight.shape), seed) * weight.shape[-1] ** (-0.5 if weight.dim() > 1 else 0))
    return module.to(dtype)


def arguments(case: str, dtype: torch.dtype = torch.float64, device: torch.device | str = "cpu") -> dict[str, Any]:
    """Return the arguments of a call as a pipeline passes them; the second half of the image tokens has axis 0 set."""
    batch, text, image, config = CASES[case]
    ids = torch.stack((torch.arange(image) // 8, torch.arange(image) % 3, torch.arange(image) // 3), dim=1)
    made = {
        "hidden_states": random((batch, image, config.get("in_channels", 8)), 1, device, dtype),
        "encoder_hidden_states": random((batch, text, 12), 2, device, dtype),
        "pooled_projections": random((batch, 6), 3, device, dtype),
        "timestep": torch.tensor([0.96, 0.5, 0.003])[:batch].to(device, dtype),
        "img_ids": ids.to(device, dtype),
        "txt_ids": torch.zeros(text, 3, device=device, dtype=dtype),
        "joint_attention_kwargs": None,
    }
    guided = config.get("guidance_embeds", True)
    return made | ({"guidance": torch.tensor([3.5, 2.0, 1.0])[:batch].to(device)} if guided else {})


def plan_for(mesh: Mesh, strategy: str, module: nn.Module) -> Plan:
    """Return a plan of this strategy."""
    dtype = next(module.parameters()).dtype
    wish = Wish(strategy=strategy, local="auto" if mesh.device.type == "cpu" else "reference")
    config = flux.Config(num_attention_heads=5, attention_head_dim=8, axes_dims_rope=(2, 2, 4))
    return for_library(config, 1000, dtype, mesh, wish, 0)


def body_of(module: nn.Module, strategy: str = "ulysses", mesh: Mesh | None = None) -> native.Native:
    """Return the native body of a module."""
    mesh = mesh or Mesh.single()
    return native.build(module, mesh, plan_for(mesh, strategy, module))


def theirs(module: nn.Module, given: dict[str, Any]) -> Tensor:
    """Return what diffusers' own forward computes; for fp64 it keeps fp64."""
    with torch.no_grad(), StayDouble():
        return module(**given).sample


def ours(body: native.Native, given: dict[str, Any]) -> Tensor:
    """Return what the body computes; for fp64 it keeps fp64."""
    with torch.no_grad(), StayDouble():
        return body(given)[0]


def error(got: Tensor, truth: Tensor) -> float:
    """Return the largest difference."""
    return (got - truth).abs().max().item()


def on_ranks(rank: int, world: int, device: torch.device, strategy: str, case: str) -> float:
    module = tiny(**CASES[case][3]).to(device)
    given = arguments(case, device=device)
    truth = theirs(module, given)
    body = body_of(module, strategy, mesh_for(strategy, world, device))
    assert native.why_not(module) is None
    first = ours(body, given)
    assert torch.equal(first, ours(body, given))
    return error(first, truth)


WORLDS = [(1, "schnell", "ulysses"), (2, "fill", "kv_first"), (4, "dev", "ulysses")]


@pytest.mark.parametrize(("world", "case", "strategy"), [*WORLDS, *((3, "dev", strategy) for strategy in LAYOUTS)])
def test_the_native_body_equals_diffusers(ranks: Pool, world: int, case: str, strategy: str) -> None:
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
    assert body._model is not None
    storages = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in body._model.parameters()}
    assert storages == {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in module.parameters()}
    assert sum(storages.values()) == sum(x.numel() * x.element_size() for x in module.parameters())
    attn = module.transformer_blocks[0].attn
    attn.to_k.weight.mul_(1.5)  # in place, as peft fuses: the native model reads it
    assert error(ours(body, given), theirs(module, given)) < TOLERANCE
    assert not torch.equal(attn.to_k.weight, before["transformer_blocks.0.attn.to_k.weight"])


def test_adopting_twice_moves_nothing() -> None:
    module = tiny()
    config, found = native._config(module, adopt.places(module)), adopt.places(module)
    model, keys = flux.Model(config), native._keys(config)
    adopt.adopt(model, found, keys)
    first = [x.data_ptr() for x in module.parameters()]
    adopt.adopt(model, adopt.places(module), keys)
    assert [x.data_ptr() for x in module.parameters()] == first


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
    body: Any = module.forward.body
    old, state = theirs(module, given), body.state()
    assert body.state() == state
    CHANGES[change](module)
    if change in ALONE:
        seqpar.refresh(module)
    assert (body.state() == state) is (change == "a state dict, copied")  # which writes to the same addresses
    got = theirs(module, given)
    seqpar.release(module)
    truth = theirs(module, given)
    assert error(got, truth) < TOLERANCE
    assert change == "moved and back" or error(old, truth) > 1e-3


def test_a_folder_of_the_module_and_a_copy_are_whole(tmp_path: Path) -> None:
    """safetensors writes views of one memory as separate tensors; a deep copy has weights of its own."""
    module, given = tiny(torch.float32), arguments("dev", torch.float32)
    body = body_of(module)
    body(given)
    module.save_pretrained(tmp_path)
    read, copied = FluxTransformer2DModel.from_pretrained(tmp_path), copy.deepcopy(module)
    for other in (read, copied):
        assert isinstance(other, nn.Module)
        pairs = zip(module.named_parameters(), other.named_parameters(), strict=True)
        assert all(a == b and torch.equal(x, y) and x.data_ptr() != y.data_ptr() for (a, x), (b, y) in pairs)
    size = sum(x.numel() * 4 for x in module.parameters())
    assert size < sum(file.stat().st_size for file in tmp_path.glob("*.safetensors")) < size * 1.1
    assert module.config.in_channels == module.config["in_channels"] == 8
    with module.cache_context("cond"):
        body(given)


def test_bf16_is_as_close_to_the_truth_as_diffusers() -> None:
    module = tiny(torch.bfloat16, num_layers=3, num_single_layers=6)
    found = []
    for seed in range(4):
        given = arguments("dev", torch.bfloat16)
        given["hidden_states"] = random((2, 13, 8), 50 + seed, dtype=torch.bfloat16)
        wide = {name: x.double() if isinstance(x, Tensor) else x for name, x in given.items()}
        # diffusers rounds the timestep times 1000 to bf16, which the native body does as well
        wide |= {name: (given[name].bfloat16() * 1000).double() / 1000 for name in ("timestep", "guidance")}
        truth = theirs(copy.deepcopy(module).double(), wide)
        with torch.no_grad():
            plain = module(**given).sample.double()
        body = body_of(module)
        found.append([(x - truth).norm().item() for x in (body(given)[0].double(), plain)])
    mine, plain = torch.tensor(found).norm(dim=0).tolist()
    assert mine <= 1.25 * plain


# What the native model cannot take ------------------------------------------------------------------------------


class Subclass(FluxTransformer2DModel):
    """A transformer of unknown arithmetic."""


class Quantised(nn.Linear):
    """Stands for a layer of a quantised model."""


def with_layer(module: Any) -> None:
    module.proj_out.__class__ = Quantised


def with_processor(module: Any) -> None:
    processor = FluxIPAdapterAttnProcessor(40, 8, dtype=torch.float64)
    module.transformer_blocks[0].attn.set_processor(processor)


def mixed(module: Any) -> None:
    module.proj_out.float()


REASONS: dict[str, tuple[Callable[[Any], object], str]] = {
    "subclass": (lambda module: setattr(module, "__class__", Subclass), "no native model for Subclass"),
    "layer": (with_layer, "proj_out.weight belongs to a Quantised"),
    "processor": (with_processor, "an attention processor is a FluxIPAdapterAttnProcessor"),
    "dtypes": (mixed, "is torch.float32 on cpu, and other weights torch.float64"),
    "cache": (lambda module: module.enable_cache(FirstBlockCacheConfig()), "a cache between steps"),
    "fused": (lambda module: module.fuse_qkv_projections(), "fuse_qkv_projections"),
    "hook": (
        lambda module: module.transformer_blocks[0].ff.register_forward_hook(lambda *_: None),
        "<lambda> is on transformer_blocks.0.ff",
    ),
    "activation": (
        lambda module: setattr(module.single_transformer_blocks[0], "act_mlp", torch.nn.ReLU()),
        "single_transformer_blocks.0.act_mlp is a ReLU and no GELU",
    ),
    "setting": (
        lambda module: setattr(module.transformer_blocks[0].norm2, "eps", 0.5),
        "transformer_blocks.0.norm2.eps is 0.5 and not 1e-06",
    ),
    "forward": (
        lambda module: setattr(module.transformer_blocks[0], "forward", lambda *args, **kwargs: None),
        "<lambda> is on transformer_blocks.0",
    ),
    "meta": (lambda module: module.proj_out.to("meta"), "is not in memory between the layers' own calls"),
    "casting": (
        lambda module: module.enable_layerwise_casting(torch.float8_e4m3fn, torch.float64),
        "torch.float8_e4m3fn",
    ),
}


@pytest.mark.parametrize("name", REASONS)
def test_reasons_for_the_generic_way(name: str) -> None:
    module = tiny()
    assert native.why_not(module) is None
    change, told = REASONS[name]
    change(module)
    assert told in (native.why_not(module) or "")


def controlled(rank: int, world: int, device: torch.device) -> tuple[float, float, bool]:
    """Return the errors of a call with residuals of a control net on one rank, and of the next without."""
    module, given = tiny().to(device), arguments("dev", device=device)
    body = body_of(module, "ulysses", mesh_for("ulysses", world, device))
    module.transformer_blocks[0].ff.register_forward_hook(lambda _, args, out: out * 2)
    first = error(ours(body, given), theirs(module, given))
    module.transformer_blocks[0].ff._forward_hooks.clear()
    plain = theirs(module, given)
    return first, error(ours(body, given), plain), body._why is None


def test_a_changed_module_is_computed_generically_until_it_is_as_before(
    ranks: Pool, capfd: pytest.CaptureFixture[str]
) -> None:
    for first, second, native_again in ranks.run(1, controlled) + ranks.run(2, controlled):
        assert max(first, second) < TOLERANCE
        assert native_again
    out, why = capfd.readouterr().out, "because hook controlled.<locals>.<lambda> is on transformer_blocks.0.ff"
    assert (
        out.count(f"the transformer's own modules compute, {why}") == 1
    )  # by the rank that is this process; the others write elsewhere
    assert out.count(f"1 of 4 blocks are diffusers' own, {why}") == 1


def test_why_not_call_names_the_argument() -> None:
    given = arguments("dev")
    assert native.why_not_call(given) is None
    assert native.why_not_call({**given, "joint_attention_kwargs": {"scale": 0.5}}) is None
    assert "controlnet_block_samples" in (native.why_not_call({**given, "controlnet_block_samples": [1]}) or "")
    assert "ip_hidden" in (native.why_not_call({**given, "joint_attention_kwargs": {"ip_hidden": 1}}) or "")


def test_wrong_arguments_are_refused() -> None:
    body, given = body_of(tiny()), arguments("dev")
    with pytest.raises(ValueError, match="got no guidance, expected a tensor"):
        body({name: x for name, x in given.items() if name != "guidance"})
    plain = body_of(tiny(guidance_embeds=False))
    with pytest.raises(ValueError, match="got guidance, expected None"):
        plain(given)


def released(rank: int, world: int, device: torch.device) -> bool:
    module, given = tiny().to(device), arguments("dev", device=device)
    body = body_of(module, "ulysses", mesh_for("ulysses", world, device))
    first = ours(body, given)
    body.release()
    body.check_delivered()
    return torch.equal(first, ours(body, given))


@pytest.mark.parametrize("world", [1, 2])
def test_a_released_body_starts_again(ranks: Pool, world: int) -> None:
    assert all(ranks.run(world, released))
