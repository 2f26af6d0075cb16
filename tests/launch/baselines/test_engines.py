"""Tests that other engines of the scale bench predict what the plain model predicts, or report why they cannot run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from diffusers.models import attention_dispatch
from torch import Tensor, nn

from launch.baselines.engines import device_meshes, other_engines, other_step, predict_tokens, with_core
from launch.baselines.plain import KEEP, plain_model, predict
from seqpar.local import reference, sdpa
from seqpar.mesh import Mesh
from seqpar.models import dit, large_dit
from seqpar.protocols import SequenceModel
from seqpar.shard import Shard
from seqpar.weights.find import randomise
from tests.support.meshes import mesh as make_mesh
from tests.support.pool import Pool

CPU = torch.device("cpu")
CONFIGS = {
    "large-dit": large_dit.Config(64, 2, 4, 4, 48, num_classes=10, sample_size=8),
    "large-dit, grouped": large_dit.Config(96, 2, 6, 3, 48, num_classes=10, sample_size=8),
    "dit": dit.Config(4, 16, 2, in_channels=4, sample_size=8, num_classes=10),
}


def model_of(name: str, device: torch.device, dtype: torch.dtype = torch.float32) -> SequenceModel:
    config = CONFIGS[name]
    made = large_dit.Model(config) if isinstance(config, large_dit.Config) else dit.Model(config)
    randomise(made.to(device, dtype), 0)
    return made.requires_grad_(False)


def plain_of(name: str, device: torch.device, dtype: torch.dtype) -> nn.Module:
    plain = plain_model(CONFIGS[name], 8, dtype, device)
    if name == "dit":  # our positions, which are those of the original model
        rows: Any = model_of(name, device, dtype).positions(8, 8)
        plain.pos_embed.pos_embed.copy_(rows[None])  # pyright: ignore
    return plain


@contextmanager
def with_lse() -> Iterator[None]:
    """Make diffusers' ring run on CPUs: our reference returns the log-sum-exp that its native attention lacks there."""

    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, *rest: Any, **given: Any) -> Any:
        out, lse = reference.attend(q, k, v)
        return (out, lse.transpose(1, 2)) if rest[-1] else out

    native = attention_dispatch._native_attention_forward_op
    attention_dispatch._native_attention_forward_op = forward
    try:
        yield
    finally:
        attention_dispatch._native_attention_forward_op = native


def compared(rank: int, world: int, device: torch.device, name: str) -> dict[str, float]:
    """Return each engine's largest error on this rank's tokens, relative to the plain model on one device."""
    dtype = torch.float64 if device.type == "cpu" else torch.bfloat16  # cuDNN does not support fp64
    mesh, model, plain = make_mesh(device, cfg=1), model_of(name, device, dtype), plain_of(name, device, dtype)
    x = torch.randn(2, 4, 8, 8, generator=torch.Generator().manual_seed(1)).to(device, dtype)
    t, y = torch.tensor([480, 480], device=device), torch.tensor([1, 10], device=device)
    mine = Shard(16, world).slice(rank)
    errors = {}
    with torch.no_grad(), with_lse():
        # ordered (ph, pw, C), as the plain models' last layers return them
        truth = model.patchify(predict(plain, x, t, y)).unflatten(-1, (8, -1)).transpose(-1, -2).flatten(-2)
        heads = CONFIGS[name].num_attention_heads
        for engine in other_engines(mesh, device_meshes(mesh), 16, heads, sdpa.attend):
            if engine.refusal is None:
                tokens, positions = model.patchify(x)[:, mine], model.positions(8, 8)[mine]
                out = predict_tokens(with_core(plain, engine.core, False), tokens, positions, t, y)
                errors[engine.name] = float((out - truth[:, mine]).abs().max() / truth.abs().max())
    return errors


@pytest.mark.parametrize(
    ("world", "name", "names"),
    [
        (1, "large-dit", ["plain, one GPU"]),
        (1, "dit", ["plain, one GPU"]),
        (2, "large-dit", ["plain Ulysses", "diffusers Ulysses", "diffusers ring"]),
        (2, "large-dit, grouped", ["plain Ulysses", "diffusers Ulysses", "diffusers ring"]),
        (2, "dit", ["plain Ulysses", "diffusers Ulysses", "diffusers ring"]),
        (3, "large-dit, grouped", ["diffusers Ulysses anything", "diffusers ring anything"]),
        (4, "large-dit", ["plain Ulysses", "diffusers Ulysses", "diffusers ring", "diffusers unified"]),
    ],
)
def test_other_engines_predict_as_the_plain_model(ranks: Pool, world: int, name: str, names: list[str]) -> None:
    close = 1e-6 if ranks.device == "cpu" else 5e-2  # diffusers merges a ring in fp32
    for errors in ranks.run(world, compared, name):
        assert list(errors) == names
        assert max(errors.values()) < close, errors


def test_negative_control_a_core_of_other_tokens_is_noticed() -> None:
    name, size = "large-dit", (8, 8)
    model, plain = model_of(name, CPU, torch.float64), plain_of(name, CPU, torch.float64)
    swapped = with_core(plain, lambda q, k, v: sdpa.attend(q, k.flip(1), v)[0], False)
    steps = [other_step(x, model, size, Mesh.single(), 4.0)() for x in (plain, swapped)]
    assert (steps[0] - steps[1]).abs().max() > 1e-9
    assert steps[0].shape == (1, 16, 16)


def test_another_engines_step_guides_and_moves_its_tokens() -> None:
    """Compare with guidance and update written out on the latent."""
    model, plain = model_of("dit", CPU, torch.float64), plain_of("dit", CPU, torch.float64)
    moved = model.unpatchify(other_step(plain, model, (8, 8), Mesh.single(), 4.0)(), 8, 8)
    x = torch.randn(1, 4, 8, 8, generator=torch.Generator().manual_seed(0)).double()
    c, u = predict(plain, torch.cat((x, x)), torch.tensor([480, 480]), torch.tensor([1, 10]))[:, :4]
    assert (moved[0] - (KEEP * x[0] - 0.01 * (u + 4 * (c - u)))).abs().max() < 1e-6  # the sums have another order


def refusals(rank: int, world: int, device: torch.device, tokens: int, heads: int) -> dict[str, str | None]:
    mesh = make_mesh(device, cfg=1)
    return {x.name: x.refusal for x in other_engines(mesh, device_meshes(mesh), tokens, heads, sdpa.attend)}


def test_other_engines_say_what_they_cannot_do(ranks: Pool) -> None:
    found = ranks.run(4, refusals, 17, 4)[0]
    assert found["plain Ulysses"] == "17 tokens do not divide by 4 ranks"
    assert found["diffusers unified"] == "17 tokens and 4 heads do not divide by ring 2 x ulysses 2"
    assert found["diffusers Ulysses anything"] is found["diffusers ring anything"] is None
    assert ranks.run(4, refusals, 16, 6)[0]["plain Ulysses"] == "6 heads do not divide by 4 ranks"


@pytest.mark.parametrize("name", ["large-dit", "dit"])
def test_a_twin_shares_weights_and_compiles_its_blocks_alone(name: str) -> None:
    plain = plain_of(name, CPU, torch.float32)
    twin = with_core(plain, lambda q, k, v: v, True)
    pairs = list(zip(plain.parameters(), twin.parameters(), strict=True))
    assert all(a is b for a, b in pairs)
    compiled = [module for module in twin.modules() if module._compiled_call_impl is not None]
    assert [type(block).__name__ for block in compiled] == 2 * [
        "PlainBlock" if name == "large-dit" else "BasicTransformerBlock"
    ]
    assert all(module._compiled_call_impl is None for module in plain.modules())
