"""Pixels that are not finite are an error on every rank, and never a black picture."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from diffusers.configuration_utils import FrozenDict
from torch import Tensor

from seqpar.cli.args import Args
from seqpar.cli.sample import run
from seqpar.loading.folder import PipelineParts
from seqpar.loading.vae import load_vae
from seqpar.mesh.mesh import Mesh
from seqpar.pipelines import classes as class_labels
from seqpar.pipelines.diffusers import DiffusersJob, Source
from seqpar.pipelines.protocol import Events
from seqpar.pipelines.request import GenerationRequest
from seqpar.types.guidance import Guidance
from seqpar.vae.on_mesh import MeshVAE
from tests.support.pool import Pool

ONE = Mesh.single(torch.device("cpu"))


class Identity(torch.nn.Module):
    """A decoder of three channels that makes its input, with something else in place of 9."""

    def __init__(self, spoil: float) -> None:
        super().__init__()
        self.dtype, self._spoil = torch.float32, spoil
        self.config = FrozenDict(block_out_channels=(1,), scaling_factor=1.0, shift_factor=None)

    def decode(self, z: Tensor, return_dict: bool = True) -> tuple[Tensor]:
        """Return what diffusers' decoders return without `return_dict`."""
        return (torch.where(z == 9.0, self._spoil, z),)


def decoded(rank: int, world: int, device: torch.device, spoil: float) -> str:
    """The error of decoding three pictures, of which the last one, and with it the last rank, makes one bad value."""
    mesh, latents = Mesh.joined(device), torch.zeros(3, 3, 4, 4, device=device)
    latents[2, 1, 3, 0] = 9.0
    try:
        made = MeshVAE(Identity(spoil), mesh, "collective").pictures(latents)
    except FloatingPointError as error:
        return str(error)
    assert made.unique().tolist() == [0.5, 1.0]
    return "nothing"


@pytest.mark.parametrize("world", [1, 2])
def test_every_rank_raises_for_one_bad_value(ranks: Pool, world: int) -> None:
    for spoil in (float("nan"), float("inf"), -float("inf")):
        for told in ranks.run(world, decoded, spoil):
            assert told.startswith("the decoder made pixels that are not finite in 1 of 3 images (the first is image")
    assert set(ranks.run(world, decoded, 9.0)) == {"nothing"}  # a negative control: a large value is white


def test_a_decoder_of_nan_ends_a_run_without_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def spoiled(*args: Any) -> Any:
        vae = load_vae(*args)
        next(vae.decoder.conv_out.parameters()).data[0] = float("nan")
        return vae

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(class_labels, "load_vae", spoiled)
    with pytest.raises(FloatingPointError, match="try dtype fp32 or bf16, or check the decoder's weights"):
        run(Args(classes=("cat",), steps=1, out=tmp_path / "x.png"))
    assert not list(tmp_path.iterdir())


def job_of(video: bool) -> DiffusersJob:
    """Return the work of a pipeline that makes two pictures or videos."""
    call = (lambda self, num_frames: None) if video else (lambda self: None)
    kind = SimpleNamespace(__call__=call, __name__="APipeline")
    arguments = {"num_inference_steps": 1, "prompt": ["a", "b"], "output_type": "np"}
    request = GenerationRequest("a pipeline", torch.float32, prompts=("a", "b"))
    planned, source = SimpleNamespace(load=SimpleNamespace(images=2)), Source(PipelineParts(Path(), {}, {}, None, None))
    return DiffusersJob(kind, source, request, arguments, Guidance(1.0), None, planned)  # pyright: ignore


@pytest.mark.parametrize("video", [False, True])
def test_diffusers_own_pipelines_are_checked_too(video: bool) -> None:
    made = np.linspace(0, 1, 2 * 4 * 4 * 3).reshape(2, 4, 4, 3)

    def pipe(**_: Any) -> Any:
        return SimpleNamespace(images=made, frames=made[:, None])

    job = job_of(video)
    shown = job.make(pipe, Events(), ONE)
    want = made[:, None] if video else (255 * made).round().astype("uint8")
    assert all(np.array_equal(np.asarray(one), each) for one, each in zip(shown, want, strict=True))
    made[1, 2, 3, 0] = float("nan")
    with pytest.raises(FloatingPointError, match=r"not finite in 1 of 2 results \(the first is number 2\)"):
        job.make(pipe, Events(), ONE)


@pytest.mark.parametrize(("value", "right"), [(1e30, True), (float("inf"), False), (float("-inf"), False)])
def test_what_a_pipelines_vae_decodes_is_checked_before_it_is_clamped(value: float, right: bool) -> None:
    class Vae:
        def decode(self, x: Tensor, return_dict: bool = True) -> tuple[Tensor]:
            return (torch.full((2, 3, 4, 4), 0.5).index_fill_(0, torch.tensor(1), value),)

    class Pipe:
        vae = Vae()

        def __call__(self, **_: Any) -> Any:
            clamped = self.vae.decode(torch.zeros(1), return_dict=False)[0].clamp(0, 1)
            return SimpleNamespace(images=clamped.movedim(1, -1).numpy())

    job, pipe = job_of(video=False), Pipe()
    if right:
        assert len(job.make(pipe, Events(), ONE)) == 2
    else:
        with pytest.raises(FloatingPointError, match=r"not finite in 1 of 2 results \(the first is number 2\)"):
            job.make(pipe, Events(), ONE)
    assert vars(pipe.vae) == {}
