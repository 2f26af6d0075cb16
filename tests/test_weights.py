"""Checkpoints: a wrong, truncated or missing one is refused with its name and what is wrong, before weights load."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from seqpar import DistributedDiT
from seqpar.mesh import Mesh
from seqpar.models._find import locate
from tests.meshes import random
from tests.test_dit import call
from tests.tiny import diffusers_dit, original_state_dict

WEIGHTS = "diffusion_pytorch_model.safetensors"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A diffusers transformer folder."""
    diffusers_dit().save_pretrained(tmp_path / "dit")  # pyright: ignore
    return tmp_path / "dit"


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("safe", [True, False])
def test_every_diffusers_file_layout_loads(tmp_path: Path, shards: int, safe: bool) -> None:
    theirs = diffusers_dit()
    size = "10GB" if shards == 1 else "100KB"
    theirs.save_pretrained(tmp_path, safe_serialization=safe, max_shard_size=size)  # pyright: ignore
    assert (len(list(tmp_path.glob("*.index.json"))) == 1) == (shards > 1)
    ours = DistributedDiT.from_pretrained(tmp_path, Mesh.single(), torch.float64)
    x = random((2, 4, 8, 8), 1)
    assert (call(ours, x) - call(theirs, x)).abs().max() < 1e-11


def edit(change: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        tensors = load_file(folder / WEIGHTS)
        change(tensors)
        save_file(tensors, folder / WEIGHTS)

    return apply


def truncate(folder: Path) -> None:
    data = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(data[: len(data) // 2])


def narrow(tensors: dict[str, torch.Tensor]) -> None:
    tensors["proj_out_1.weight"] = tensors["proj_out_1.weight"][:, :-1].contiguous()


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (truncate, r"truncated or no safetensors file"),
        (lambda folder: (folder / WEIGHTS).unlink(), r"without weights, expected one of diffusion_pytorch_model"),
        (lambda folder: (folder / "config.json").unlink(), r"config\.json, expected a readable JSON"),
        (edit(lambda t: t.pop("proj_out_2.bias")), r"Missing 1: proj_out_2\.bias"),
        (edit(lambda t: t.update(lora=torch.ones(1))), r"Unknown 1: lora"),
        (edit(narrow), r"proj_out_1\.weight of shape \(48, 23\), expected \(48, 24\) for final_modulation\.weight"),
        (lambda folder: (folder / "config.json").write_text('{"_class_name": "SD3Transformer2DModel"}'),
         r"SD3Transformer2DModel, which no model of seqpar recognises"),
    ],
    ids=["truncated", "no-file", "no-config", "missing-key", "unknown-key", "wrong-shape", "other-class"],
)  # fmt: skip
def test_a_bad_folder_is_refused_before_weights_load(folder: Path, spoil: Callable[[Path], None], message: str) -> None:
    spoil(folder)
    with pytest.raises(ValueError, match=message):
        locate(folder)


def test_a_bad_pt_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "dit.pt"
    torch.save(original_state_dict(diffusers_dit()), path)
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match="truncated or holds no weights"):
        locate(path)
    torch.save(["not", "weights"], path)
    with pytest.raises(ValueError, match="expected a state dict"):
        locate(path)


def test_a_shard_that_lacks_keys_is_refused(tmp_path: Path) -> None:
    diffusers_dit().save_pretrained(tmp_path, max_shard_size="100KB")  # pyright: ignore
    index = next(tmp_path.glob("*.index.json"))
    content = json.loads(index.read_text())
    content["weight_map"]["absent"] = next(iter(content["weight_map"].values()))
    index.write_text(json.dumps(content))
    with pytest.raises(ValueError, match="whose files lack absent"):
        locate(tmp_path)
