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
from seqpar.vae import on_mesh
from seqpar.vae.on_mesh import MeshVAE


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
