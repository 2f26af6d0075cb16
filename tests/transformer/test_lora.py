# pyright cannot infer the types of diffusers' and peft's modules
# pyright: reportAttributeAccessIssue=false, reportArgumentType=false, reportCallIssue=false, reportIndexIssue=false
"""Tests LoRA and its kin, merged for fused blocks and by diffusers' own, against diffusers with peft's layers.

`tests/families/test_blocks.py` tells the story of a session with adapters for each family.
"""

from __future__ import annotations

import copy
import timeit
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers.pipelines.flux.pipeline_flux import FluxPipeline
from diffusers.schedulers.scheduling_flow_match_euler_discrete import FlowMatchEulerDiscreteScheduler
from peft import IA3Config, LoHaConfig, LoKrConfig, LoraConfig, OFTConfig, get_peft_model_state_dict
from torch import Tensor, nn

from seqpar.graphs.signature import form_of
from seqpar.transformer.changes import Changes
from tests.support.meshes import random
from tests.support.sharded import TOLERANCE, VISIBLE, arguments, body_of, error, ours, theirs, tiny

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # peft warns of what is tested here
ATTENTION = ["to_q", "to_v", "to_out.0", "add_k_proj"]
EVERYTHING = [*ATTENTION, "proj_out", "proj_mlp", "linear", "net.0.proj", "x_embedder", "linear_1"]


def add(module: Any, name: str, config: Any = None, seed: int = 0) -> None:
    """Add an adapter with random weights, the same on every rank."""
    module.add_adapter(config or LoraConfig(r=3, lora_alpha=6, target_modules=ATTENTION), name)
    for index, (key, weight) in enumerate(module.named_parameters()):
        if f".{name}." in f"{key}.":
            weight.requires_grad_(False)
            weight.copy_(1 + 0.3 * random(tuple(weight.shape), 1000 * seed + index)) if "ia3" in key else weight.copy_(
                0.3 * random(tuple(weight.shape), 1000 * seed + index)
            )
    module.double()


def step(name: str, module: Any) -> None:
    steps: dict[str, Callable[[], object]] = {
        "load": lambda: (add(module, "a", seed=1), add(module, "b", seed=2)),
        "one": lambda: module.set_adapters(["a"], [1.0]),
        "both": lambda: module.set_adapters(["a", "b"], [0.8, 0.5]),
        "scale": lambda: module.set_adapters(["a", "b"], [0.3, 0.5]),
        "disable": lambda: module.disable_lora(),
        "enable": lambda: module.enable_lora(),
        "fuse": lambda: module.fuse_lora(lora_scale=0.7),  # in place
        "fuse safely": lambda: module.fuse_lora(safe_fusing=True),  # replaces the data
        "unfuse": lambda: module.unfuse_lora(),
        "delete": lambda: module.delete_adapters("b"),
        "unload": lambda: module.unload_lora(),
    }
    steps[name]()


KINDS = {
    "lora with bias": LoraConfig(r=2, target_modules=ATTENTION, lora_bias=True),
    "rslora": LoraConfig(r=2, target_modules=EVERYTHING, use_rslora=True),
    "dora": LoraConfig(r=2, target_modules=[*ATTENTION, "norm1.linear"], use_dora=True),
    "loha": LoHaConfig(r=2, target_modules=EVERYTHING),
    "lokr": LoKrConfig(r=2, target_modules=EVERYTHING),
    "ia3": IA3Config(target_modules=ATTENTION, feedforward_modules=["to_out.0"]),
    "oft": OFTConfig(r=0, oft_block_size=5, target_modules=["to_out.0"]),
}


@pytest.mark.parametrize("name", KINDS)
def test_kinds_of_adapters_are_merged(name: str) -> None:
    module, given = tiny(), arguments()
    body = body_of(module, fused=True)
    before = ours(body, given)
    kept = {key: x.clone() for key, x in module.state_dict().items()}
    add(module, "a", KINDS[name], 1)
    truth = theirs(module, given)
    assert error(ours(body, given), truth) < (1e-12 if name != "dora" else 1e-9)
    assert error(before, truth) > VISIBLE
    module.unload_lora()
    assert all(torch.equal(x, kept[key]) for key, x in module.state_dict().items())
    assert torch.equal(ours(body, given), before)


def test_a_layer_that_an_adapter_saves_whole_is_computed() -> None:
    module, given = tiny(), arguments()
    module.add_adapter(LoraConfig(r=2, target_modules=ATTENTION, modules_to_save=["proj_out"]), "a")
    body = body_of(module, fused=True)
    assert error(ours(body, given), theirs(module, given)) < TOLERANCE


def test_changed_scales_keep_the_addresses() -> None:
    """Merged weights are written where captured calls read them. Last, a negative control: a watch that is frozen."""
    module, given = tiny(), arguments()
    body: Any = body_of(module, fused=True)
    step("load", module)
    step("both", module)
    ours(body, given)
    copies = body.sharded.fused._copies
    weights = {name: x.weight.data_ptr() for name, x in copies.items()}
    step("scale", module)
    assert error(ours(body, given), theirs(module, given)) < TOLERANCE
    assert all(x.weight.data_ptr() == weights[name] for name, x in copies.items())
    seen = body.sharded._changes.count()
    body.sharded._changes.count = lambda: seen
    step("one", module)
    assert error(ours(body, given), theirs(module, given)) > VISIBLE


# Files and pipelines -------------------------------------------------------------------------------------------


def pipeline(module: nn.Module) -> FluxPipeline:
    scheduler = FlowMatchEulerDiscreteScheduler()
    return FluxPipeline(scheduler, None, None, None, None, None, module)


def saved(folder: Path, seed: int) -> str:
    module = tiny()
    add(module, "default", LoraConfig(r=2, target_modules=EVERYTHING), seed)
    FluxPipeline.save_lora_weights(folder / str(seed), get_peft_model_state_dict(module))
    return str(folder / str(seed))


@pytest.mark.parametrize("fused", [True, False], ids=["fused", "generic"])
def test_a_pipelines_loras(tmp_path: Path, fused: bool) -> None:
    """Load two from files, weigh them, fuse, unfuse, exchange one, and unload, all by the pipeline's own methods."""
    module, given = tiny(), arguments()
    paths = [saved(tmp_path, seed) for seed in (1, 2)]
    body = body_of(module, fused=fused)
    before = ours(body, given)
    pipe, results = pipeline(module), [before]
    actions: list[Callable[[], object]] = [
        lambda: pipe.load_lora_weights(paths[0], adapter_name="a"),
        lambda: pipe.load_lora_weights(paths[1], adapter_name="b"),
        lambda: pipe.set_adapters(["a", "b"], [0.7, 0.2]),
        lambda: pipe.fuse_lora(adapter_names=["a"]),
        pipe.unfuse_lora,
        lambda: pipe.delete_adapters("b"),
        lambda: pipe.load_lora_weights(paths[1], adapter_name="a", hotswap=True),
        pipe.disable_lora,
        pipe.enable_lora,
        pipe.unload_lora_weights,
    ]
    for action in actions:
        action()
        results.append(ours(body, given))
        assert error(results[-1], theirs(module, given)) < TOLERANCE
    assert all(error(x, y) > 1e-4 for x, y in pairwise(results[:5]))
    assert error(results[-1], before) < 1e-12  # unfusing rounds


def test_bf16_is_rounded_once() -> None:
    """Merged weights are those of fp32 sums; peft's own products round three times."""
    module = tiny(torch.bfloat16)
    module.add_adapter(LoraConfig(r=3, target_modules=ATTENTION), "a")
    for index, (key, weight) in enumerate(module.named_parameters()):
        if "lora_" in key:
            weight.requires_grad_(False).copy_(0.1 * random(tuple(weight.shape), index))
    given, wide = arguments(dtype=torch.bfloat16), arguments()
    wide |= {name: x.double() for name, x in given.items() if isinstance(x, Tensor)}
    wide |= {name: (given[name].bfloat16() * 1000).double() / 1000 for name in ("timestep", "guidance")}
    truth = theirs(copy.deepcopy(module).double(), wide)
    with torch.no_grad():
        plain = (module(**given).sample.double() - truth).norm().item()
    mine = (body_of(module, fused=True).compute(form_of(given))[0].double() - truth).norm().item()
    assert mine <= 1.25 * plain


# What calls compare -------------------------------------------------------------------------------------------


def test_a_comparison_is_quick_and_counts_only_changes() -> None:
    """FLUX.1's number of blocks, without and with an adapter on each layer; the limits are far above what it takes."""
    module = tiny(num_layers=19, num_single_layers=38)
    plain = Changes(module)
    assert quickest(plain) < 500e-6
    step("load", module)
    changes = Changes(module)
    first = changes.count()
    assert quickest(changes) < 10e-3
    assert changes.count() == first
    text = changes.texts()
    module.transformer_blocks[18].attn.to_q.scale_layer(0.5)
    assert changes.count() == first + 1
    assert changes.texts() != text
    module.transformer_blocks[18].attn.to_q.lora_B["a"].weight.mul_(2)
    assert changes.count() == first + 2 == changes.count()


def quickest(changes: Changes) -> float:
    return min(timeit.repeat(changes.count, number=1, repeat=20))
