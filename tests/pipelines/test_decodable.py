"""Tests that pipelines refuse before sampling what they cannot decode, and decode in turns what fits only so."""

from __future__ import annotations

import io
from contextlib import redirect_stdout

import pytest
import torch

from seqpar.adapter import decoding
from seqpar.cli import sample
from seqpar.mesh import Mesh
from seqpar.pipelines.class_labels import Files, Pipeline
from seqpar.sampling.guidance import Guidance
from seqpar.vae.decodable import Fit
from seqpar.vae.turns import maybe_in_turns as _in_turns
from tests.support import vaes


def test_a_size_that_cannot_be_decoded_is_refused_before_sampling(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoding, "total_gib", lambda device: 8.0)
    monkeypatch.setattr(decoding, "free_gib", lambda device: 1e-3)
    monkeypatch.setattr(decoding, "ALWAYS_FITS", 0.0)
    steps: list[int] = []
    with Pipeline.load(Files.locate("builtin"), Mesh.single()) as pipeline:
        with pytest.raises(ValueError, match=r"got \d+x\d+ pixels, whose decoding needs .* that are free; use at most"):
            pipeline.latents(["cat"], steps=2, guidance=Guidance(1.0), size=(512, 512), on_step=steps.append)
        assert steps == []
        monkeypatch.setattr(decoding, "free_gib", lambda device: 8.0)
        monkeypatch.setattr(decoding, "total_gib", lambda device: 1e-3)
        with pytest.raises(ValueError, match="that are free"):  # the model, as predicted, leaves nothing
            pipeline.latents(["cat"], steps=2, guidance=Guidance(1.0), size=(512, 512), on_step=steps.append)
        assert steps == []
        monkeypatch.setattr(decoding, "total_gib", lambda device: 8.0)
        pipeline.latents(["cat"], steps=1, guidance=Guidance(1.0), on_step=steps.append)
    assert steps


def test_what_fits_only_in_strips_is_decoded_in_turns(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    vae = vaes.tiny("kl", torch.float32)
    made = decoding.Decoding(vae, Mesh.single(), "collective", kernels=True)
    z = vaes.latents("kl", 1, 7, 3, torch.float32)
    expected = made.alone(z)
    monkeypatch.setattr(decoding, "total_gib", lambda device: 1e-6)
    monkeypatch.setattr(decoding, "free_gib", lambda device: 1e-5)
    monkeypatch.setattr(decoding, "STRIP_BYTES", 700)
    monkeypatch.setattr(decoding, "fit_of", lambda kind, shape, ranks, free: Fit(True, 2.0, 1.0, 1.5, 900, 1.25))
    ran = []
    monkeypatch.setattr(
        "seqpar.vae.parallel.maybe_in_turns",
        lambda run, place, *sizes: ran.append(sizes) or _in_turns(run, place, *sizes),
    )
    assert torch.allclose(made.decode(z).sample, expected, atol=1e-5)
    assert ran == [(700, 900)]
    assert (
        "in strips in turn, in 1.0 GiB and about 1.2 x the time: at once it needs 2.0 GiB of 1.5 GiB"
        in capsys.readouterr().out
    )


def test_a_dry_run_predicts_the_decoder() -> None:
    shown = io.StringIO()
    with redirect_stdout(shown):
        sample.run(sample.Args(dry_run=(1, 2), size="2048"))
    lines = [line for line in shown.getvalue().splitlines() if line.startswith("decoding: ")]
    assert len(lines) == 2
    assert "s predicted" in lines[0]
    assert "GiB a rank over weights" in lines[0]
