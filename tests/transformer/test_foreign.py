# pyright cannot infer the types of diffusers' and peft's modules
# pyright: reportAttributeAccessIssue=false, reportArgumentType=false, reportCallIssue=false
"""Tests what may couple tokens besides attention: hooks of others, replaced forwards, quantisation by whole tensors.

A mean over tokens is wrong on several ranks, which nobody can tell from outside: it is named in one printed line.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from contextlib import redirect_stdout
from typing import Any

import pytest
import torch
from diffusers.hooks.hooks import HookRegistry, ModelHook
from diffusers.hooks.layer_skip import LayerSkipConfig, apply_layer_skip
from diffusers.hooks.smoothed_energy_guidance_utils import (
    SmoothedEnergyGuidanceConfig,
    _apply_smoothed_energy_guidance_hook,
)
from diffusers.hooks.taylorseer_cache import TaylorSeerCacheConfig, apply_taylorseer_cache
from peft import LoraConfig
from torch import Tensor, nn
from torch.ao.quantization import quantize_dynamic

import seqpar
from seqpar.transformer.foreign import look
from tests.support.diffusers_tiny import MODELS
from tests.support.meshes import mesh_for
from tests.support.pool import Pool
from tests.transformer.test_body import CPU, TOLERANCE, VISIBLE, body_of, called, error
from tests.transformer.test_cuts import raised

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # peft and torch.ao warn of what is tested here


def mean(module: nn.Module, args: Any, out: Any) -> Any:
    """Hook that reads all tokens."""
    return (
        tuple(x + x.mean(1, keepdim=True) for x in out) if isinstance(out, tuple) else out + out.mean(1, keepdim=True)
    )


class Mean(ModelHook):
    """The same as a hook of diffusers."""

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        return mean(module, (), output)


def by_torch(module: Any) -> None:
    for block in module.transformer_blocks:
        block.register_forward_hook(mean)


def by_diffusers(module: Any) -> None:
    HookRegistry.check_if_exists_or_initialize(module.transformer_blocks[1].ff).register_hook(Mean(), "mean")


def replaced(module: Any) -> None:
    theirs = module.proj_out.forward

    def shifted(x: Tensor) -> Tensor:
        return theirs(x.roll(1, dims=1))

    module.proj_out.forward = shifted


def many(module: Any) -> None:
    for number, one in enumerate(module.modules()):
        hook = type(f"Hook{number}{'x' * 500}", (), {"__call__": lambda self, *_: None})()
        one.register_forward_pre_hook(hook)


def with_lora(module: Any) -> None:
    module.add_adapter(LoraConfig(r=2, target_modules=["to_q", "to_k", "proj_out"]), "a")


def with_harmless(module: Any) -> None:
    """Put on what diffusers and torch have that computes each token by itself."""
    apply_layer_skip(module, LayerSkipConfig([0], "single_transformer_blocks", skip_attention=True, skip_ff=True))
    apply_taylorseer_cache(module, TaylorSeerCacheConfig())
    torch.nn.utils.spectral_norm(module.proj_out)


# what is done to a FLUX -> what the line names
NAMED: dict[str, tuple[Callable[[Any], object], str]] = {
    "torch": (by_torch, "hook mean on transformer_blocks.0 and 1 more"),
    "diffusers": (by_diffusers, "hook Mean on transformer_blocks.1.ff"),
    "replaced": (replaced, "forward replaced.<locals>.shifted on proj_out"),
}


def said(rank: int, world: int, device: torch.device, case: str) -> tuple[str, list[float]]:
    """Return what is printed in three calls, before and after something is put on, and how wrong they are."""
    tiny = MODELS["flux"]
    module, arguments, out = tiny.build().to(device), tiny.arguments(device), io.StringIO()
    other = tiny.build().to(device)
    NAMED[case][0](other)
    changed = tiny.whole(other, arguments)
    with redirect_stdout(out):
        body = body_of(module, world, device, "ulysses")
        body.sharded.key()
        called(body, arguments)
        assert out.getvalue() == ""
        NAMED[case][0](module)
        errors = []
        for _ in range(2):
            body.sharded.key()
            errors.append(error(called(body, arguments), changed))
    return out.getvalue(), errors


@pytest.mark.parametrize("case", NAMED)
def test_what_others_have_put_on_is_named_once(ranks: Pool, case: str) -> None:
    told = NAMED[case][1]
    ((line, errors), *others) = ranks.run(3, said, case)
    assert line == (
        f"seqpar: each rank's tokens alone pass {told}; where that needs all tokens results are wrong: "
        f"seqpar.verify tells\n"
    )
    assert min(errors) > VISIBLE
    assert all(other == "" for other, _ in others)
    ((nothing, errors),) = ranks.run(1, said, case)
    assert nothing == ""
    assert max(errors) < TOLERANCE


def only_here(rank: int, world: int, device: torch.device) -> str:
    """Return the message of a call where rank 1 alone has hooks."""
    module = MODELS["flux"].build().to(device)
    seqpar.parallelize(module, mesh_for("ulysses", world, device), native=False)
    if rank == 1:
        by_diffusers(module)
    message = raised(lambda: module(**MODELS["flux"].arguments(device)))
    seqpar.release(module)
    return message


def test_hooks_of_one_rank_alone_are_one_error(ranks: Pool) -> None:
    (message,) = set(ranks.run(2, only_here))
    assert message.startswith("got hooks '1 x hook Mean (")
    assert "' on rank 1, expected 'none' as on rank 0" in message


@pytest.mark.parametrize("change", [lambda module: None, with_lora, with_harmless], ids=["plain", "lora", "harmless"])
@pytest.mark.parametrize("name", ["flux", "qwen_masked"])
def test_what_computes_each_token_by_itself_is_not_named(name: str, change: Callable[[Any], object]) -> None:
    """Our own hooks are on the module, too."""
    module = MODELS[name].build()
    body = body_of(module, 1, CPU, "ulysses")
    if name == "flux" or change is not with_harmless:
        change(module)
    body.sharded.key()
    assert look(module).named == ""


def test_the_line_has_a_limited_length() -> None:
    module = MODELS["flux"].build()
    many(module)
    told = look(module).named
    assert len(told) < 400
    assert re.search(r"and \d+ more|\d+ others$", told)


# Refused -------------------------------------------------------------------------------------------------------


def blurred(module: Any) -> Any:
    config = SmoothedEnergyGuidanceConfig([0], fqn="transformer_blocks")
    _apply_smoothed_energy_guidance_hook(module, config, blur_sigma=1.0)
    return module


def dynamic(module: Any, dtype: torch.dtype = torch.qint8) -> Any:
    return quantize_dynamic(module.float(), {nn.Linear}, dtype=dtype)


COUPLED: dict[str, tuple[str, Callable[[Any], Any], str]] = {
    "smoothed energy guidance": ("pixart", blurred, "smoothed energy guidance blurs the queries of the whole picture"),
    "dynamic quantisation": ("pixart", dynamic, "with one scale for all tokens"),
    "dynamic float16": ("pixart", lambda module: dynamic(module, torch.float16), "nothing was raised"),
}


def coupled(rank: int, world: int, device: torch.device, case: str) -> str:
    """Return the message with which a changed transformer is refused."""
    name, change, _ = COUPLED[case]
    return raised(lambda: body_of(change(MODELS[name].build()), world, device, "ulysses"))


@pytest.mark.parametrize("case", COUPLED)
def test_what_surely_needs_all_tokens_is_refused_on_every_rank(ranks: Pool, case: str) -> None:
    if ranks.device != "cpu":
        pytest.skip("torch.ao quantises for CPUs")
    assert ranks.run(1, coupled, case) == ["nothing was raised"]
    (message,) = set(ranks.run(2, coupled, case))
    assert COUPLED[case][2] in message
