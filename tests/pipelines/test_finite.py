"""Images that cannot be decoded are refused before sampling, and pixels that are not finite are never a black image."""

from __future__ import annotations

import io
from contextlib import redirect_stdout
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from diffusers.configuration_utils import FrozenDict
from torch import Tensor

from seqpar.cli import sample
from seqpar.cli.args import Args
from seqpar.cli.sample import run
from seqpar.loading.folder import PipelineParts, load_vae
from seqpar.mesh.mesh import Mesh
from seqpar.pipelines import classes as class_labels
from seqpar.pipelines.classes import Files, Pipeline
from seqpar.pipelines.diffusers import DiffusersJob, Source
from seqpar.pipelines.protocol import Events, GenerationRequest
from seqpar.types.guidance import Guidance
from seqpar.vae import on_mesh
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
            assert told.startswith("the decoder made pixels that are not finite in 1 of 3 results (the first is number")
    assert set(ranks.run(world, decoded, 9.0)) == {"nothing"}  # a negative control: a large value is white


def test_a_decoder_of_nan_ends_a_run_without_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def spoiled(*args: Any) -> Any:
        vae = load_vae(*args)
        next(vae.decoder.conv_out.parameters()).data[0] = float("nan")
        return vae

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(class_labels, "load_vae", spoiled)
    with pytest.raises(FloatingPointError, match="try dtype fp32 or bf16, or check the weights"):
        run(Args(classes=("cat",), steps=1, out=tmp_path / "x.png"))
    assert not list(tmp_path.iterdir())


def job_of(video: bool) -> DiffusersJob:
    """Return the work of a pipeline that makes two pictures or videos."""
    call = (lambda self, num_frames: None) if video else (lambda self: None)
    kind = type("APipeline", (), {"__call__": call})
    arguments = {"num_inference_steps": 1, "prompt": ["a", "b"], "output_type": "np"}
    request = GenerationRequest("a pipeline", torch.float32, prompts=("a", "b"))
    source, load = Source(PipelineParts(Path(), {}, {}, None, None)), SimpleNamespace(images=2)
    planned: Any = {"work": None, "load": load, "channels": 4, "pixels": None, "exact": True}
    return DiffusersJob(kind, source, request, arguments, Guidance(1.0), None, None, **planned)


@pytest.mark.parametrize("video", [False, True])
def test_diffusers_own_pipelines_are_checked_too(video: bool) -> None:
    made = np.linspace(0, 1, 2 * 4 * 4 * 3).reshape(2, 4, 4, 3)
    job, pipe = job_of(video), lambda **_: SimpleNamespace(images=made, frames=made[:, None])
    want = made[:, None] if video else (255 * made).round().astype("uint8")
    results, sounds = job.make(pipe, Events(), ONE)
    assert all(np.array_equal(np.asarray(one), x) for one, x in zip(results, want, strict=True))
    assert not sounds
    made[1, 2, 3, 0] = float("nan")
    with pytest.raises(FloatingPointError, match=r"not finite in 1 of 2 results \(the first is number 2\)"):
        job.make(pipe, Events(), ONE)


class Pipe:
    """A pipeline that clamps what its VAE decodes: in the second image one value."""

    def __init__(self, value: float) -> None:
        pixels = torch.full((2, 3, 4, 4), 0.5).index_fill_(0, torch.tensor(1), value)
        self.vae: Any = type("Vae", (), {"decode": lambda self, x, return_dict: (pixels,)})()

    def __call__(self, **_: Any) -> Any:
        clamped = self.vae.decode(torch.zeros(1), return_dict=False)[0].clamp(0, 1)
        return SimpleNamespace(images=clamped.movedim(1, -1).numpy())


def test_what_a_pipelines_vae_decodes_is_checked_before_it_is_clamped() -> None:
    job, pipe = job_of(video=False), Pipe(1e30)
    assert len(job.make(pipe, Events(), ONE)[0]) == 2
    assert vars(pipe.vae) == {}
    for value in (float("inf"), float("-inf")):
        pipe = Pipe(value)
        with pytest.raises(FloatingPointError, match=r"not finite in 1 of 2 results \(the first is number 2\)"):
            job.make(pipe, Events(), ONE)
        assert vars(pipe.vae) == {}


def test_exact_mode_refuses_before_sampling_what_would_need_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = list[int]()
    monkeypatch.setattr(
        MeshVAE, "of", staticmethod(lambda vae, mesh, way, modules: MeshVAE(vae, mesh, way, left=lambda: 1.0))
    )
    with Pipeline.load(Files.locate("builtin"), Mesh.single()) as pipeline:

        def latents() -> None:
            pipeline.latents(["cat"], steps=1, guidance=Guidance(1.0), size=(128, 128), on_step=steps.append)

        latents()
        with monkeypatch.context() as patch:
            patch.setattr(on_mesh.exact, "is_on", lambda: True)
            with pytest.raises(ValueError, match=r"decoding 128x128 pixels needs .* the weights leave .* Exact mode"):
                latents()
            assert len(steps) == 1
            pipeline.set_vae("tiled")
            latents()
        with pytest.raises(ValueError, match="got decoding mode 'turns', expected auto, strips, pictures, tiled"):
            pipeline.set_vae("turns")
    assert len(steps) == 2


def test_a_plan_and_a_run_say_how_pictures_are_decoded(tmp_path: Path) -> None:
    shown = io.StringIO()
    with redirect_stdout(shown):
        sample.run(sample.Args(dry_run=(1, 2), size="2048"))
        sample.run(sample.Args(classes=("0",), steps=1, vae="tiled", out=tmp_path / "x.png"))
    lines = [line for line in shown.getvalue().splitlines() if line.startswith(("decoding: ", "decoder "))]
    assert len(lines) == 3
    assert "unless the loaded weights leave too little memory for it" in lines[0]
    assert lines[2] == "decoder   whole images, in diffusers' tiles, which leave seams"
