"""Tests that a parallelized pipeline decides before sampling how a size is decoded."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

import seqpar
from seqpar.mesh import exact
from seqpar.mesh.mesh import Mesh
from seqpar.vae.on_mesh import MeshVAE
from tests.support import pipelines
from tests.support.foreign import StayDouble
from tests.support.meshes import mesh as make_mesh
from tests.support.pool import Pool
from tests.transformer.test_pipelines import CASES, SHORT, Case

CALL = {"prompt": "a red cat", "height": 20, "width": 12, "num_inference_steps": 1, **SHORT}


def with_memory(patch: pytest.MonkeyPatch, left: float) -> None:

    def of(vae: Any, mesh: Mesh, transport: str, modules: Any) -> MeshVAE:
        return MeshVAE(vae, mesh, transport, left=lambda: left)

    patch.setattr(MeshVAE, "of", staticmethod(of))


def called(pipe: Any, **others: Any) -> int:
    steps = []

    def on_step(pipe: Any, step: int, t: torch.Tensor, given: dict[str, Any]) -> dict[str, Any]:
        steps.append(step)
        return given

    with StayDouble():
        pipe(**{**CALL, "output_type": "pt", **others}, callback_on_step_end=on_step)
    return len(steps)


def refused(rank: int, world: int, device: torch.device) -> list[str]:
    """Return errors in exact mode where rank 0 has too little memory, and where ranks prepare other sizes."""
    errors = list[str]()
    with pytest.MonkeyPatch.context() as patch:
        with_memory(patch, 1e12 if rank else 1.0)
        pipe = seqpar.parallelize(pipelines.flux(), make_mesh(device, cfg=1))
        patch.setattr(exact, "is_on", lambda: True)
        for height in (20, 20 + 8 * rank):
            with pytest.raises(ValueError, match=r"^(got|decoding) ") as error:
                called(pipe, height=height)
            errors.append(str(error.value))
        seqpar.release(pipe)
    return errors


def test_tiles_are_printed_before_the_first_step(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with_memory(monkeypatch, 1.0)
    pipe = seqpar.parallelize(pipelines.flux(), Mesh.single())
    prepare = pipe.prepare_latents
    prepare(1, 4, 20, 12, torch.float64, torch.device("cpu"), None)
    assert capsys.readouterr().out.count("in diffusers' tiles, which leave seams, because decoding 20x12 pixels") == 1
    assert called(pipe) == 1
    twin = copy.deepcopy(pipe, {id(pipe.transformer): pipe.transformer})
    assert twin.prepare_latents.__self__ is twin  # a copy checks nothing, and prepares with its own parts
    shallow = copy.copy(pipe)
    seqpar.release(pipe)
    assert "prepare_latents" not in vars(pipe)
    assert called(pipe) == called(shallow) == 1
    for mode in (False, "tiled"):
        assert called(seqpar.parallelize(pipe, Mesh.single(), vae=mode), output_type="latent") == 1  # pyright: ignore
        seqpar.release(pipe)


def test_exact_mode_refuses_tiles_before_the_first_step_on_all_ranks(ranks: Pool) -> None:
    first, *others = ranks.run(2, refused)
    assert others == [first]
    assert "20x12 pixels" in first[0]
    assert "the shape that the VAE decodes" in first[1]


@pytest.mark.parametrize("name", ["flux", "sd3", "pixart", "wan", "qwen-image", "three pictures"])
def test_the_checked_shape_is_the_one_that_is_decoded(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = CASES[name] if name in CASES else Case(pipelines.flux, {**SHORT, "num_images_per_prompt": 3}, output="pt")
    seen, decode = list[Any](), MeshVAE.decode
    monkeypatch.setattr(MeshVAE, "check_call", lambda self, shape: seen.append(shape))
    monkeypatch.setattr(MeshVAE, "decode", lambda self, z, *a, **k: seen.append(z.shape) or decode(self, z, *a, **k))
    pipe = seqpar.parallelize(case.pipe(), Mesh.single())
    case.pictures(pipe, steps=2)
    assert len(seen) == 2
    assert seen[0] == tuple(seen[1])
