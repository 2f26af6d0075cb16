"""Checkpoints: a wrong, truncated or missing one is refused with its name and what is wrong, before weights load."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from seqpar import DistributedDiT
from seqpar.mesh import Mesh
from seqpar.weights.find import locate
from tests.models.test_dit import call
from tests.models.test_large_dit import TINY, plain
from tests.support.meshes import random
from tests.support.tiny import diffusers_dit, original_state_dict

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
        (truncate, r"truncated or not a safetensors file"),
        (lambda folder: (folder / WEIGHTS).unlink(), r"without weights, expected one of diffusion_pytorch_model"),
        (lambda folder: (folder / "config.json").unlink(), r"is not a diffusers folder \(no model_index\.json or"),
        (edit(lambda t: t.pop("proj_out_2.bias")), r"Missing 1: proj_out_2\.bias"),
        (edit(lambda t: t.update(lora=torch.ones(1))), r"Unknown 1: lora"),
        (edit(narrow), r"proj_out_1\.weight of shape \(48, 23\), expected \(48, 24\) for final_modulation\.weight"),
        (
            lambda folder: (folder / "config.json").write_text('{"_class_name": "SD3Transformer2DModel"}'),
            r"SD3Transformer2DModel, which no model of seqpar recognises",
        ),
    ],
    ids=["truncated", "no-file", "no-config", "missing-key", "unknown-key", "wrong-shape", "other-class"],
)
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


def wide_dit() -> dict[str, torch.Tensor]:
    """The original format: heads follow from the width, which must be a real one."""
    return original_state_dict(diffusers_dit(num_attention_heads=1, attention_head_dim=64, num_layers=2))


ORIGINALS: dict[str, Callable[[], dict[str, torch.Tensor]]] = {
    "dit": wide_dit,
    "large-dit": lambda: plain(TINY).state_dict(),
}
SIGNATURES = {"blocks.0.attn.qkv.weight", "y_embedder.embedding_table.weight"}  # what a DiT is recognised by


@pytest.mark.parametrize("name", ORIGINALS)
def test_an_original_file_that_lacks_any_key_is_refused_by_the_name_of_the_key(tmp_path: Path, name: str) -> None:
    state = ORIGINALS[name]()
    path = tmp_path / "whole.pt"
    torch.save(state, path)
    locate(path)
    for lost in sorted(state.keys() - {"pos_embed"} - (SIGNATURES if name == "dit" else set())):
        torch.save({key: tensor for key, tensor in state.items() if key != lost}, path)
        with pytest.raises(ValueError, match=re.escape(lost)):
            locate(path)


@pytest.mark.parametrize(
    ("name", "key", "shape", "message"),
    [
        ("dit", "x_embedder.proj.weight", (64, 16), r"x_embedder\.proj\.weight of shape \(64, 16\), expected 4 dims"),
        ("dit", "x_embedder.proj.weight", (24, 4, 2, 2), r"a DiT of width 24, expected a multiple of 64 or 72"),
        ("dit", "final_layer.linear.weight", (32,), r"final_layer\.linear\.weight of shape \(32,\), expected 2 dims"),
        ("dit", "pos_embed", (16, 64), r"pos_embed of shape \(16, 64\), expected 3 dims"),
        ("dit", "blocks.1.mlp.fc1.weight", (255, 64), r"blocks\.1\.mlp\.fc1\.weight of shape \(255, 64\)"),
        ("dit", "y_embedder.embedding_table.weight", (0, 64), r"embedding_table\.weight of shape \(0, 64\)"),
        ("large-dit", "x_embedder.weight", (64, 15), r"x_embedder\.weight of shape \(64, 15\), expected a multiple"),
        ("large-dit", "x_embedder.weight", (63, 16), r"x_embedder\.weight of shape \(63, 16\), expected a multiple"),
        ("large-dit", "layers.0.attention.wk.weight", (64,), r"attention\.wk\.weight of shape \(64,\), expected 2"),
    ],
)
def test_an_original_file_of_odd_shapes_is_refused(
    tmp_path: Path, name: str, key: str, shape: tuple[int, ...], message: str
) -> None:
    torch.save(ORIGINALS[name]() | {key: torch.zeros(shape)}, tmp_path / "odd.pt")
    with pytest.raises(ValueError, match=message):
        locate(tmp_path / "odd.pt")


def test_a_shard_that_lacks_keys_is_refused(tmp_path: Path) -> None:
    diffusers_dit().save_pretrained(tmp_path, max_shard_size="100KB")  # pyright: ignore
    index = next(tmp_path.glob("*.index.json"))
    content = json.loads(index.read_text())
    content["weight_map"]["absent"] = next(iter(content["weight_map"].values()))
    index.write_text(json.dumps(content))
    with pytest.raises(ValueError, match="whose files lack absent"):
        locate(tmp_path)
