"""Tests that our pipelines refuse before sampling what they cannot decode, and decode in tiles what is too large."""

from __future__ import annotations

import io
from contextlib import redirect_stdout
from pathlib import Path

import pytest

from seqpar.cli import sample
from seqpar.mesh.mesh import Mesh
from seqpar.pipelines.classes import Files, Pipeline
from seqpar.types.guidance import Guidance
from seqpar.vae.on_mesh import MeshVAE
from tests.vae.test_memory import Imagined


def test_a_size_that_cannot_be_decoded_is_refused_before_sampling(monkeypatch: pytest.MonkeyPatch) -> None:
    meter, steps = Imagined(1e6), list[int]()
    with_meter = staticmethod(lambda vae, mesh, transport: MeshVAE(vae, mesh, transport, meter=meter))
    monkeypatch.setattr(MeshVAE, "of", with_meter)
    with Pipeline.load(Files.locate("builtin"), Mesh.single()) as pipeline:

        def latents() -> None:
            pipeline.latents(["cat"], steps=1, guidance=Guidance(1.0), size=(128, 128), on_step=steps.append)

        with pytest.raises(ValueError, match=r"got 128x128 pixels, whose decoding needs .* that are free; use more"):
            latents()
        meter.room = 6e6  # the decoding, but not the model besides, as predicted
        with pytest.raises(ValueError, match="that are free"):
            latents()
        assert steps == []
        pipeline.set_vae("tiled")
        latents()
        pipeline.set_vae("auto")
        meter.room = 1e12
        latents()
        with pytest.raises(ValueError, match="got wish='turns', expected auto, strips, pictures, tiled"):
            pipeline.set_vae("turns")
    assert len(steps) == 2


def test_a_plan_and_a_run_say_how_pictures_are_decoded(tmp_path: Path) -> None:
    shown = io.StringIO()
    with redirect_stdout(shown):
        sample.run(sample.Args(dry_run=(1, 2), size="2048"))
        sample.run(sample.Args(classes=("0",), steps=1, vae="tiled", out=tmp_path / "x.png"))
    lines = [line for line in shown.getvalue().splitlines() if line.startswith(("decoding: ", "decoder "))]
    assert len(lines) == 3
    assert "its memory is measured when the weights are loaded, before the first step" in lines[0]
    assert lines[2] == "decoder   whole pictures, in diffusers' tiles, which leave seams"
