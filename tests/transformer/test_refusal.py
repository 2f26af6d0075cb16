"""Tests that a parallelized pipeline refuses before sampling what its VAE cannot decode, and nothing else."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

import seqpar
from seqpar.mesh.mesh import Mesh
from seqpar.vae.on_mesh import MeshVAE
from tests.support import pipelines
from tests.support.foreign import StayDouble
from tests.support.meshes import mesh as make_mesh
from tests.support.pool import Pool
from tests.transformer.test_pipelines import CASES, SHORT, Case
from tests.vae.test_memory import Imagined

REFUSAL = r"got 20x12 pixels, whose decoding needs .* that are free; "
CALL = {"prompt": "a red cat", "height": 20, "width": 12, "num_inference_steps": 1, **SHORT}


def with_meter(patch: pytest.MonkeyPatch, meter: Imagined | None) -> None:
    """Let VAEs read an imagined device, where the tests' devices would not refuse anything."""
    patch.setattr(MeshVAE, "of", staticmethod(lambda vae, mesh, way: MeshVAE(vae, mesh, way, meter=meter)))


def called(pipe: Any, **others: Any) -> int:
    """Return the number of steps that a call of a FLUX pipeline makes."""
    steps = []

    def on_step(pipe: Any, step: int, t: torch.Tensor, given: dict[str, Any]) -> dict[str, Any]:
        steps.append(step)
        return given

    with StayDouble():
        pipe(**{**CALL, "output_type": "pt", **others}, callback_on_step_end=on_step)
    return len(steps)


def refused(rank: int, world: int, device: torch.device) -> list[str]:
    """Return what this rank is told where rank 0 has too little memory, and where the ranks prepare other sizes."""
    told = list[str]()
    with pytest.MonkeyPatch.context() as patch:
        with_meter(patch, Imagined(1e12 if rank else 1.0))
        pipe = seqpar.parallelize(pipelines.flux(), make_mesh(device, cfg=1))
        for height in (20, 20 + 8 * rank):
            with pytest.raises(ValueError, match="got ") as error:
                called(pipe, height=height)
            told.append(str(error.value))
        seqpar.release(pipe)
    return told


def test_a_size_is_refused_before_the_first_step_unless_it_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    meter = Imagined(1.0)
    with_meter(monkeypatch, meter)
    pipe = seqpar.parallelize(pipelines.flux(), Mesh.single())
    with pytest.raises(ValueError, match=REFUSAL) as error:
        called(pipe)
    assert str(error.value).endswith("; for output_type='latent' parallelize the pipeline with vae=False")
    pipe.vae.enable_tiling()
    assert called(pipe) == 1  # tiles are as small as their user wants
    pipe.vae.disable_tiling()
    meter.room = 1e12
    assert called(pipe) == 1
    meter.room = 1.0
    twin = copy.deepcopy(pipe, {id(pipe.transformer): pipe.transformer})
    assert twin.prepare_latents.__self__ is twin  # a copy checks nothing, and prepares with its own parts
    shallow = copy.copy(pipe)
    seqpar.release(pipe)
    assert "prepare_latents" not in vars(pipe)
    assert called(pipe) == called(shallow) == 1
    for wish in (False, "tiled"):
        assert called(seqpar.parallelize(pipe, Mesh.single(), vae=wish), output_type="latent") == 1  # pyright: ignore
        seqpar.release(pipe)


def test_all_ranks_refuse_alike(ranks: Pool) -> None:
    first, *others = ranks.run(2, refused)
    assert others == [first]
    assert "20x12 pixels" in first[0]
    assert "the shape that the VAE decodes" in first[1]


@pytest.mark.parametrize("name", ["flux", "sd3", "pixart", "wan", "qwen-image", "three pictures"])
def test_the_checked_shape_is_the_one_that_is_decoded(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = CASES[name] if name in CASES else Case(pipelines.flux, {**SHORT, "num_images_per_prompt": 3}, output="pt")
    seen, decode = list[Any](), MeshVAE.decode
    monkeypatch.setattr(MeshVAE, "check_call", lambda self, shape, also: seen.append(shape))
    monkeypatch.setattr(MeshVAE, "decode", lambda self, z, *a, **k: seen.append(z.shape) or decode(self, z, *a, **k))
    pipe = seqpar.parallelize(case.pipe(), Mesh.single())
    case.pictures(pipe, steps=2)
    assert len(seen) == 2
    assert seen[0] == tuple(seen[1])
