"""Tests that a parallelized pipeline refuses before sampling what its VAE cannot decode, and nothing else."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

import seqpar
from seqpar.adapter import decoding
from seqpar.adapter.decoding import Decoding
from seqpar.mesh import Mesh
from tests.adapter.test_pipelines import CASES, SHORT, Case
from tests.support import pipelines
from tests.support.foreign import StayDouble
from tests.support.meshes import mesh as make_mesh
from tests.support.pool import Pool

REFUSAL = r"got 20x12 pixels, whose decoding needs .* that are free; "
CALL = {"prompt": "a red cat", "height": 20, "width": 12, "num_inference_steps": 1, **SHORT}


def fake(patch: pytest.MonkeyPatch, free: float) -> None:
    """Give this rank a device with 1e-6 GiB, of which `free` GiB are free."""
    patch.setattr(decoding, "total_gib", lambda device: 1e-6)
    patch.setattr(decoding, "free_gib", lambda device: free)


def called(pipe: Any, **others: Any) -> int:
    """Return the number of steps that a call of a FLUX pipeline makes."""
    steps = []

    def on_step(pipe: Any, step: int, t: torch.Tensor, given: dict[str, Any]) -> dict[str, Any]:
        steps.append(step)
        return given

    with StayDouble():
        pipe(**CALL, **{"output_type": "pt", **others}, callback_on_step_end=on_step)
    return len(steps)


def refused(rank: int, world: int, device: torch.device) -> list[str]:
    """Return what this rank is told where rank 0 has too little memory, and where the ranks' output_type differs."""
    pipe, told = seqpar.parallelize(pipelines.flux(), make_mesh(device, cfg=1)), list[str]()
    with pytest.MonkeyPatch.context() as patch:
        fake(patch, 8.0 if rank else 1e-7)
        for kind in ("pt", "latent" if rank else "pt"):
            with pytest.raises(ValueError, match="got ") as error:
                called(pipe, output_type=kind)
            told.append(str(error.value))
        assert called(pipe, output_type="latent") == 1
    seqpar.release(pipe)
    return told


def test_a_size_is_refused_before_the_first_step_unless_it_fits_or_is_not_decoded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pipe = seqpar.parallelize(pipelines.flux(), Mesh.single())
    assert called(pipe) == 1  # a CPU never refuses
    fake(monkeypatch, 1e-7)
    for kind in ("pt", "pil"):
        with pytest.raises(ValueError, match=REFUSAL):
            called(pipe, output_type=kind, callback_on_step_end_tensor_inputs=[])
    assert called(pipe, output_type="latent") == 1
    pipe.vae.enable_tiling()
    assert called(pipe) == 1  # tiles are as small as their user wants
    pipe.vae.disable_tiling()
    fake(monkeypatch, 8.0)
    assert called(pipe) == 1
    fake(monkeypatch, 1e-7)
    twin = copy.deepcopy(pipe, {id(pipe.transformer): pipe.transformer})
    assert twin.prepare_latents.__self__ is twin  # a copy checks nothing, and prepares with its own parts
    shallow = copy.copy(pipe)
    seqpar.release(pipe)
    assert "prepare_latents" not in vars(pipe)
    assert called(pipe) == called(shallow) == 1


def test_all_ranks_refuse_alike(ranks: Pool) -> None:
    first, *others = ranks.run(2, refused)
    assert others == [first]
    assert "20x12 pixels" in first[0]
    assert first[1].startswith("got ranks that do different things: rank 0 prepares latents to decode")


@pytest.mark.parametrize("name", ["flux", "sd3", "pixart", "wan", "qwen-image", "several pictures"])
def test_the_checked_shape_is_the_one_that_is_decoded(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = CASES[name] if name in CASES else Case(pipelines.flux, {**SHORT, "num_images_per_prompt": 3})
    seen, decode = list[Any](), Decoding.decode
    monkeypatch.setattr(Decoding, "check_call", lambda self, shape, decodes: seen.append(shape))
    monkeypatch.setattr(Decoding, "decode", lambda self, z, *a, **k: seen.append(z.shape) or decode(self, z, *a, **k))
    pipe = seqpar.parallelize(case.pipe(), Mesh.single())
    case.pictures(pipe)
    assert len(seen) == 2
    assert seen[0] == tuple(seen[1])
