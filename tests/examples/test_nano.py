"""Tests that `examples/nano.py`, which imports nothing of seqpar, makes the engine's pictures on 1 to 4 ranks."""

from __future__ import annotations

import ast
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from examples import nano
from seqpar.mesh.mesh import Mesh
from seqpar.pipelines.classes import Files, Pipeline
from seqpar.types.guidance import Guidance
from tests.support.pool import Pool

NAMES, CLASSES, STEPS, SEED = ("cat", "rocket"), (0, 39), 2, 3
FILE = Path(nano.__file__)


@pytest.fixture(scope="module")
def engine() -> tuple[torch.Tensor, torch.Tensor]:
    """Return latents and pictures of the engine in fp64, on one rank."""
    with Pipeline.load(Files.locate("builtin"), Mesh.single(), torch.float64) as pipeline:
        latents = pipeline.latents(NAMES, steps=STEPS, guidance=Guidance(nano.GUIDANCE), seed=SEED)
        return latents.cpu(), pipeline.decode(latents).cpu()


def sampled(rank: int, world: int, device: torch.device, strategy: str) -> torch.Tensor:
    with torch.inference_mode():
        weights = nano.read("transformer", str(device))
        return nano.sample(CLASSES, STEPS, SEED, weights, nano.Ranks(rank, world), strategy).clone()


@pytest.mark.parametrize("world", [1, 2, 3, 4])
@pytest.mark.parametrize("strategy", nano.STRATEGIES)
def test_latents_are_the_engines(cpu_ranks: Pool, engine: Any, world: int, strategy: str) -> None:
    for latents in cpu_ranks.run(world, sampled, strategy):
        assert (latents - engine[0]).abs().max() < 1e-11


def forgotten(rank: int, world: int, device: torch.device) -> torch.Tensor:
    """Sample with attention to this rank's own tokens alone."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(nano.STRATEGIES, "none", lambda q, k, v, ranks, total: nano.attention(q, k, v)[0])
        return sampled(rank, world, device, "none")


def test_negative_control_attention_to_own_tokens_alone_makes_other_pictures(cpu_ranks: Pool, engine: Any) -> None:
    assert (cpu_ranks.run(1, forgotten)[0] - engine[0]).abs().max() < 1e-11
    for latents in cpu_ranks.run(2, forgotten):
        assert (latents - engine[0]).abs().max() > 1e-2


def test_pictures_are_the_engines(engine: Any) -> None:
    """The engine's pictures are fp32."""
    latents, pictures = engine
    with torch.inference_mode():
        assert (nano.decode(latents, nano.read("vae")) - pictures).abs().max() < 1e-7


def test_it_is_one_short_file_of_torch_safetensors_and_pillow() -> None:
    text = FILE.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 300
    nodes = list(ast.walk(ast.parse(text)))
    names = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    names |= {node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)}
    others = {name.split(".")[0] for name in names} - sys.stdlib_module_names
    assert others == {"torch", "safetensors", "PIL"}


def test_the_command_writes_a_row_of_pictures_and_refuses_what_is_wrong(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    out = tmp_path / "row.png"
    monkeypatch.setattr(sys, "argv", ["nano.py", *NAMES, "--steps", "1", "--out", str(out)])
    nano.main()
    with Image.open(out) as row:
        assert row.size == (128, 64)
    for wrong in (["unicorn"], ["--steps", "0"]):
        monkeypatch.setattr(sys, "argv", ["nano.py", *wrong])
        with pytest.raises(SystemExit):
            nano.main()
        assert "expected 1 to 1000 steps" in capsys.readouterr().err
