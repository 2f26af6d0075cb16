"""Tests of blocks with fewer passes: a norm with its SiLU, sums that add biases, and channels-last memory."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers.models.autoencoders.autoencoder_kl import AutoencoderKL
from torch import Tensor, nn

from seqpar.mesh.mesh import Axis, Mesh
from seqpar.planner.plan import load_transport
from seqpar.vae import norms
from seqpar.vae.norms import apply_normed
from seqpar.vae.on_mesh import MeshVAE
from seqpar.vae.parallel import ParallelVAE
from seqpar.vae.rules import RULES, StripMode
from seqpar.vae.strips import Cut, Exchanges, Strip
from tests.support import vaes
from tests.support.meshes import random
from tests.support.pool import Pool
from tests.vae.test_parallel import TOLERANCE, Task, largest, on_strips, truth

FP64 = 1e-12
SIZE = (1, 5, 3)


def single(vae: Any, channels_last: bool = False) -> ParallelVAE:
    return ParallelVAE(vae, Mesh.single(), load_transport("collective"), channels_last)


@pytest.mark.parametrize("channels_last", [False, True])
def test_one_rank_decodes_and_encodes_like_diffusers_and_gives_the_weights_back(channels_last: bool) -> None:
    for name in vaes.CASES:
        vae, close = vaes.tiny(name), max(FP64, 1e3 * TOLERANCE[name])
        z, x, extra = vaes.latents(name, *SIZE), vaes.pictures(name, *SIZE), vaes.extra(name, 1)
        modules, want = dict(vae.named_modules()), (vaes.decoded(vae, z, *extra), vaes.encoded(vae, x))
        parallel = single(vae, channels_last)
        got = vaes.decoded(parallel, z, *extra), vaes.encoded(parallel, x)
        assert got[0].is_contiguous()
        for found, wanted in zip(got, want, strict=True):
            assert float((found - wanted).abs().max() / wanted.abs().max()) < min(close, 1e-5), name
        assert dict(vae.named_modules()) == modules
        assert all("forward" not in vars(module) for module in modules.values())
        kernels = [each for each in vae.parameters() if each.ndim > 3 and each[0, 0].numel() > 1 and each.shape[1] > 1]
        assert all(each.is_contiguous() != channels_last for each in kernels)
        parallel.release()
        assert all(each.is_contiguous() for each in vae.parameters())
        assert torch.equal(vaes.decoded(vae, z, *extra), want[0])


def test_strips_in_channels_last_memory_are_exact(ranks: Pool) -> None:
    tasks: list[Task] = [(name, False, SIZE) for name in ("kl", "wan 2.2", "hunyuan")]
    for pictures in ranks.run(2, on_strips, tasks, torch.float64, "collective", True):
        for task, picture in zip(tasks, pictures, strict=True):
            assert largest(picture, truth(*task)) < TOLERANCE[task[0]], task


def test_passes_are_saved(monkeypatch: pytest.MonkeyPatch) -> None:
    """No SiLU after a norm has a pass of its own; biases are added alone only where no norm or sum of a block can."""
    vae, z, silus, alone = vaes.tiny("kl"), vaes.latents("kl", *SIZE), list[bool](), list[tuple[int, ...]]()
    normalise, with_bias = norms.kernels.normalise, norms.with_bias
    monkeypatch.setattr(norms.kernels, "normalise", lambda *args: silus.append(args[3]) or normalise(*args))
    monkeypatch.setattr(norms, "with_bias", lambda y, bias: alone.append(tuple(y.shape)) or with_bias(y, bias))
    monkeypatch.setattr(nn.SiLU, "forward", None)
    single(vae, True).decode(z)
    groups = [name for name, each in vae.decoder.named_modules() if isinstance(each, nn.GroupNorm)]
    assert len(silus) == len(groups)
    assert silus.count(False) == 1  # attention's
    others = [each for name, each in vae.named_modules() if isinstance(each, nn.Conv2d) and "resnets" not in name]
    assert len(alone) == len([each for each in others if each not in set(vae.encoder.modules())]) - 1  # not quant_conv


FAULTS: dict[str, tuple[Any, Callable[..., Tensor]]] = {
    "no SiLU": (
        norms.normed,
        lambda strip, f, x, norm, silu=True, shift=None: apply_normed(strip, f, x, norm, False, shift),
    ),
    "no bias in norms": (
        norms.normed,
        lambda strip, f, x, norm, silu=True, shift=None: apply_normed(strip, f, x, norm, silu),
    ),
    "no bias in sums": (norms.sum_of, lambda strip, f, first, second: first[0] + second[0]),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_negative_control_a_fault_changes_the_picture(monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    function, wrong = FAULTS[fault]
    vae, z = vaes.tiny("kl"), vaes.latents("kl", *SIZE)
    monkeypatch.setitem(RULES, function, wrong)  # pyright: ignore[reportArgumentType]
    assert float((vaes.decoded(single(vae, True), z) - vaes.decoded(vae, z)).abs().max()) > 1e-3


def test_modules_are_put_back_after_an_error_and_replaced_forwards_are_left_alone() -> None:
    """A norm without the SiLU that it expects to follow, or a SiLU after a norm that has it, would be wrong."""
    vae, z = vaes.tiny("kl"), vaes.latents("kl", *SIZE)
    want, parallel = vaes.decoded(vae, z), single(vae)
    with pytest.raises(AttributeError), norms.fewer_passes(vae):
        vae.decoder.missing()
    assert not any("forward" in vars(each) for each in vae.modules())
    block = vae.decoder.mid_block.resnets[0]
    for module in (vae.decoder.conv_act, block.nonlinearity, block.conv1):
        module.forward = module.forward  # as diffusers' hooks leave it
    assert float((vaes.decoded(parallel, z) - want).abs().max()) < FP64
    with norms.fewer_passes(vae):
        changed = {name for name, each in vae.decoder.named_modules() if "forward" in vars(each)}
    assert "mid_block.resnets.1" in changed
    assert not {"mid_block.resnets.0", "mid_block.resnets.0.norm1", "conv_norm_out"} & changed


def test_a_video_keeps_the_frames_that_diffusers_keeps() -> None:
    """The cache of a block of Wan is diffusers' after each of its parts, also where a part has one frame."""
    block = vaes.tiny("wan").decoder.mid_block.resnets[0]
    caches: tuple[list[Any], list[Any]] = ([None, None], [None, None])
    outputs: tuple[list[Any], list[Any]] = ([], [])
    for part, frames in enumerate((1, 1, 4)):
        x = random((1, 8, frames, 3, 4), part, "cpu", torch.float64)
        cut = Cut.of(Axis("world"), 3, 4)
        assert cut is not None
        with torch.no_grad():
            outputs[0].append(block(x, caches[0], [0]))
            with StripMode(Strip(cut, Exchanges(Axis("world"), load_transport("collective")))):
                outputs[1].append(norms.video_block(block, x, caches[1], [0]))
    for theirs, ours in ((outputs[0], outputs[1]), (caches[0], caches[1])):
        for want, got in zip(theirs, ours, strict=True):
            assert float((got - want).abs().max()) < FP64


def channels_last(vae: nn.Module) -> bool:
    """Return whether all weights of convolutions are channels-last; they must be all, or all contiguous."""
    weights = [module.weight for module in vae.modules() if isinstance(module, nn.Conv2d) and module.kernel_size[0] > 1]
    last = {weight.is_contiguous(memory_format=torch.channels_last) for weight in weights}
    assert last == {not weight.is_contiguous() for weight in weights}
    return last.pop() and not last


def test_a_vae_gets_its_weights_back_and_is_saved_meanwhile_and_two_may_share_it(tmp_path: Path) -> None:
    vae, z = vaes.tiny("kl"), vaes.latents("kl", 1, 5, 3)
    parameters, truth = dict(vae.named_parameters()), vaes.decoded(vae, z)
    with torch.inference_mode():
        first, second = (MeshVAE(vae, Mesh.single(), "collective", None, True, True) for _ in range(2))
    assert channels_last(vae)
    vae.save_pretrained(tmp_path)
    for end in (second.release, first.release):
        assert (first.decode(z).sample - truth).abs().max() < 1e-12
        assert channels_last(vae)
        end()
    assert not channels_last(vae)
    assert (second.decode(z).sample - truth).abs().max() < 1e-12  # as a release by the other may leave it
    assert all(parameter is parameters[name] for name, parameter in vae.named_parameters())
    assert torch.equal(vaes.decoded(vae, z), truth)
    saved = AutoencoderKL.from_pretrained(tmp_path, torch_dtype=torch.float64)
    assert all(torch.equal(parameter, parameters[name]) for name, parameter in saved.named_parameters())
