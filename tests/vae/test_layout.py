"""Tests that a VAE's weights are channels-last while it computes so, and its user's own before and after."""

from __future__ import annotations

from pathlib import Path

import torch
from diffusers.models.autoencoders.autoencoder_kl import AutoencoderKL
from torch import nn

from seqpar.mesh.mesh import Mesh
from seqpar.vae.on_mesh import MeshVAE
from tests.support import vaes


def is_last(vae: nn.Module) -> bool:
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
    assert is_last(vae)
    vae.save_pretrained(tmp_path)
    for end in (second.release, first.release):
        assert (first.decode(z).sample - truth).abs().max() < 1e-12
        assert is_last(vae)
        end()
    assert not is_last(vae)
    assert (second.decode(z).sample - truth).abs().max() < 1e-12  # as a release by the other may leave it
    assert all(parameter is parameters[name] for name, parameter in vae.named_parameters())
    assert torch.equal(vaes.decoded(vae, z), truth)
    saved = AutoencoderKL.from_pretrained(tmp_path, torch_dtype=torch.float64)
    assert all(torch.equal(parameter, parameters[name]) for name, parameter in saved.named_parameters())
