"""Tests that all layouts of diffusers load, and that spoiled files are refused by name before weights load.

Each row of the tables is a way to spoil a good file, and what the message must say.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from seqpar import DistributedDiT
from seqpar.loading.checkpoint import open_checkpoint
from seqpar.loop.blueprint import locate
from seqpar.mesh.mesh import Mesh
from tests.loop.models.test_dit import call
from tests.loop.models.test_large_dit import TINY, plain
from tests.support.meshes import random
from tests.support.published import save_consolidated
from tests.support.tiny import diffusers_dit, original_state_dict

WEIGHTS, INDEX = "diffusion_pytorch_model.safetensors", "diffusion_pytorch_model.safetensors.index.json"
HEADS = {"dit": 3, "large-dit": 32}
Spoil = Callable[[Path], object]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a diffusers transformer folder."""
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


# Folders of diffusers --------------------------------------------------------------------------------------------


def edit(change: Callable[[dict[str, Tensor]], object]) -> Spoil:
    def apply(folder: Path) -> None:
        tensors = load_file(folder / WEIGHTS)
        change(tensors)
        save_file(tensors, folder / WEIGHTS)

    return apply


def config(**change: object) -> Spoil:
    def apply(folder: Path) -> None:
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | change))

    return apply


def index(change: Callable[[dict[str, Any]], object]) -> Spoil:
    """Write the model in shards, and change their index."""

    def apply(folder: Path) -> None:
        (folder / WEIGHTS).unlink()
        diffusers_dit().save_pretrained(folder, max_shard_size="100KB")  # pyright: ignore
        content = json.loads((folder / INDEX).read_text())
        (folder / INDEX).write_text(json.dumps(change(content) or content))

    return apply


def moved(content: dict[str, Any], name: object) -> None:
    content["weight_map"]["proj_out_2.bias"] = name


def halve(path: Path) -> None:
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2])


def narrow(tensors: dict[str, Tensor]) -> None:
    tensors["proj_out_1.weight"] = tensors["proj_out_1.weight"][:, :-1].contiguous()


FOLDERS: dict[str, tuple[Spoil, str]] = {
    "truncated": (lambda f: halve(f / WEIGHTS), r"truncated or not a safetensors file"),
    "no file": (lambda f: (f / WEIGHTS).unlink(), r"without weights, expected one of diffusion_.*pdparams"),
    "no config": (lambda f: (f / "config.json").unlink(), r"is not a diffusers folder \(no model_index\.json or"),
    "missing key": (edit(lambda t: t.pop("proj_out_2.bias")), r"Missing 1: proj_out_2\.bias"),
    "unknown key": (edit(lambda t: t.update(lora=torch.ones(1))), r"Unknown 1: lora"),
    "renamed key": (
        edit(lambda t: t.update({"proj_out_2.Bias": t.pop("proj_out_2.bias")})),
        r"Missing 1: proj_out_2\.bias\. Unknown 1: proj_out_2\.Bias",
    ),
    "wrong shape": (
        edit(narrow),
        r"proj_out_1\.weight of shape \(48, 23\), expected \(48, 24\) for final_modulation\.weight",
    ),
    "integers": (
        edit(lambda t: t.update({"proj_out_2.bias": t["proj_out_2.bias"].to(torch.int8)})),
        r"got proj_out_2\.bias of type int8, expected floating-point weights",
    ),
    "complex": (
        edit(lambda t: t.update({"proj_out_2.bias": t["proj_out_2.bias"].to(torch.complex64)})),
        r"got proj_out_2\.bias of type complex64",
    ),
    "other class": (
        config(_class_name="SD3Transformer2DModel"),
        r"SD3Transformer2DModel, which no model of seqpar recognises",
    ),
    "too many layers": (config(num_layers=10**12), r"num_layers=1000000000000, expected int <= 4096"),
    "more layers than tensors": (config(num_layers=4000), r"num_layers=4000, expected no more layers than its"),
    "file and index": (
        lambda f: (f / INDEX).write_text(json.dumps({"weight_map": {"a": "b.safetensors"}})),
        r"got both diffusion_pytorch_model\.safetensors and its index",
    ),
    "index lacks a key": (
        index(lambda i: moved(i, sorted(i["weight_map"].values())[0])),
        r"whose files lack proj_out_2",
    ),
    "no such shard": (index(lambda i: moved(i, "gone.safetensors")), r"gone\.safetensors, expected a file"),
}


@pytest.mark.parametrize("case", FOLDERS)
def test_a_bad_folder_is_refused_before_weights_load(folder: Path, case: str) -> None:
    spoil, message = FOLDERS[case]
    spoil(folder)
    with pytest.raises(ValueError, match=message):
        locate(folder)


# Original files --------------------------------------------------------------------------------------------------

ORIGINALS: dict[str, Callable[[], dict[str, Tensor]]] = {
    "dit": lambda: original_state_dict(diffusers_dit(num_layers=2)),
    "large-dit": lambda: plain(replace(TINY, num_layers=1)).state_dict(),
}
SIGNATURES = {"blocks.0.attn.qkv.weight", "y_embedder.embedding_table.weight"}  # the keys by which a DiT is recognised


@pytest.mark.parametrize("name", ORIGINALS)
def test_an_original_file_that_lacks_any_key_is_refused_by_the_name_of_the_key(tmp_path: Path, name: str) -> None:
    state = ORIGINALS[name]()
    path = tmp_path / "whole.pt"
    torch.save(state, path)
    locate(path, HEADS[name])
    for lost in sorted(state.keys() - {"pos_embed"} - (SIGNATURES if name == "dit" else set())):
        torch.save({key: tensor for key, tensor in state.items() if key != lost}, path)
        with pytest.raises(ValueError, match=re.escape(lost)):
            locate(path, HEADS[name])


@pytest.mark.parametrize(
    ("name", "key", "shape", "message"),
    [
        ("dit", "x_embedder.proj.weight", (64, 16), r"x_embedder\.proj\.weight of shape \(64, 16\), expected 4 dims"),
        ("dit", "x_embedder.proj.weight", (25, 4, 2, 2), r"3 heads for a DiT of width 25, expected heads of equal"),
        ("dit", "final_layer.linear.weight", (32,), r"final_layer\.linear\.weight of shape \(32,\), expected 2 dims"),
        ("dit", "final_layer.linear.weight", (33, 24), r"linear\.weight of 33 rows, expected a multiple of 2 x 2"),
        (
            "dit",
            "final_layer.linear.weight",
            (8, 24),
            r"a DiT with 2 output channels for 4 input channels, expected 4, or",
        ),
        ("dit", "final_layer.linear.weight", (24, 24), r"with 6 output channels for 4 input .* or 8 with variances"),
        ("large-dit", "final_layer.linear.weight", (8, 64), r"a Large-DiT with 2 output channels for 4 input channels"),
        ("dit", "final_layer.linear.bias", (), r"linear\.bias of shape \(\), which cannot make final\.bias"),
        ("dit", "final_layer.linear.bias", (31,), r"linear\.bias of shape \(31,\), which .* 31 rows, expected 32"),
        ("dit", "final_layer.linear.bias", (36,), r"linear\.bias of shape \(36,\), which .* 36 rows, expected 32"),
        ("large-dit", "final_layer.linear.weight", (33, 64), r"of 33 rows, expected a multiple of 2 x 2"),
        ("dit", "pos_embed", (16, 64), r"pos_embed of shape \(16, 64\), expected 3 dims"),
        ("dit", "pos_embed", (1, 15, 24), r"pos_embed of shape \(1, 15, 24\), expected \(1, side x side, 24\)"),
        ("dit", "pos_embed", (1, 16, 32), r"pos_embed of shape \(1, 16, 32\), expected \(1, side x side, 24\)"),
        ("dit", "blocks.1.mlp.fc1.weight", (255, 24), r"blocks\.1\.mlp\.fc1\.weight of shape \(255, 24\)"),
        ("dit", "y_embedder.embedding_table.weight", (0, 64), r"embedding_table\.weight of shape \(0, 64\)"),
        ("dit", "blocks.3000000.attn.qkv.weight", (2, 2), r"with blocks\.3000000 that lacks all of blocks\.2"),
        ("large-dit", "x_embedder.weight", (64, 15), r"x_embedder\.weight of shape \(64, 15\), expected 4 x patch"),
        ("large-dit", "x_embedder.weight", (63, 16), r"32 heads for a Large-DiT of width 63"),
        ("large-dit", "layers.0.attention.wk.weight", (64,), r"attention\.wk\.weight of shape \(64,\), expected 2"),
        ("large-dit", "layers.0.attention.wk.weight", (63, 64), r"queries are 64 and keys 63 wide"),
    ],
)
def test_an_original_file_of_odd_shapes_is_refused(
    tmp_path: Path, name: str, key: str, shape: tuple[int, ...], message: str
) -> None:
    torch.save(ORIGINALS[name]() | {key: torch.zeros(shape)}, tmp_path / "odd.pt")
    with pytest.raises(ValueError, match=message):
        locate(tmp_path / "odd.pt", HEADS[name])


@pytest.mark.parametrize(
    ("name", "heads", "message"),
    [
        ("dit", None, r"a DiT of width 24 with 2 layers, expected its number of heads from you.*--heads"),
        ("large-dit", None, r"a Large-DiT of width 64 with 1 layers, expected its number of heads from you"),
        ("dit", 5, r"got 5 heads for a DiT of width 24, expected heads of equal, even width"),
    ],
)
def test_heads_are_asked_for_and_never_guessed(tmp_path: Path, name: str, heads: int | None, message: str) -> None:
    torch.save(ORIGINALS[name](), tmp_path / "ours.pt")
    with pytest.raises(ValueError, match=message):
        locate(tmp_path / "ours.pt", heads)


def test_heads_that_files_say_cannot_be_changed(folder: Path, tmp_path: Path) -> None:
    assert locate(folder, 3).config.num_attention_heads == 3
    for model in (folder, "dit-s/2"):
        with pytest.raises(ValueError, match=r"got 4 heads for .*, expected the \d that its files or its preset say"):
            locate(model, 4)
    xl = {"args": argparse.Namespace(model="DiT-XL/2"), "ema": ORIGINALS["dit"]()}
    torch.save(xl, tmp_path / "xl.pt")
    with pytest.raises(ValueError, match=r"whose files say (width=1152|layers=28), but whose tensors have (24|2)"):
        locate(tmp_path / "xl.pt")


# Parts of model-parallel ranks -----------------------------------------------------------------------------------


def change(rank: int, edit: Callable[[dict[str, Tensor]], object]) -> Spoil:
    def apply(folder: Path) -> None:
        path = folder / f"consolidated_ema.{rank:02d}-of-02.pth"
        part = torch.load(path)
        edit(part)
        torch.save(part, path)

    return apply


PARTS: dict[str, tuple[Spoil, str]] = {
    "a part is missing": (
        lambda f: (f / "consolidated_ema.00-of-02.pth").unlink(),
        r"got the parts consolidated_ema\.01-of-02\.pth, expected all of 00 to 01 of 2",
    ),
    "two splits": (
        lambda f: save_consolidated(f, plain(TINY).state_dict(), 1),
        r"got the parts consolidated_ema\.00-of-01\.pth, .*expected all",
    ),
    "a key is missing": (change(1, lambda p: p.pop("x_embedder.bias")), r"the same keys in both: one lacks x_embedder"),
    "another shape": (
        change(1, lambda p: p.update({"x_embedder.weight": torch.zeros(32, 4)})),
        r"x_embedder\.weight of shape \(32, 4\) and torch\.float32, expected one that fits",
    ),
    "fewer dims": (
        change(1, lambda p: p.update({"layers.0.attention.wo.weight": torch.zeros(64).double()})),
        r"attention\.wo\.weight of shape \(64,\) and torch\.float64, expected one that fits",
    ),
    "an unknown key": (
        lambda f: [change(rank, lambda p: p.update(lora=torch.ones(1)))(f) for rank in (0, 1)],
        r"with lora, expected a key of Large-DiT: how this one is split is not known",
    ),
}


@pytest.mark.parametrize("case", PARTS)
def test_parts_that_do_not_fit_together_are_refused(tmp_path: Path, case: str) -> None:
    save_consolidated(tmp_path, plain(TINY).state_dict(), 2)
    spoil, message = PARTS[case]
    spoil(tmp_path)
    with pytest.raises(ValueError, match=message):
        locate(tmp_path, 32)


def test_norms_that_differ_between_parts_are_refused_when_they_are_read(tmp_path: Path) -> None:
    save_consolidated(tmp_path, plain(TINY).state_dict(), 2)
    change(1, lambda p: p.update({"layers.1.ffn_norm.weight": torch.zeros(64).double()}))(tmp_path)
    with pytest.raises(ValueError, match=r"01-of-02\.pth: layers\.1\.ffn_norm\.weight differs from that in"):
        locate(tmp_path, 32).build(torch.float32, torch.device("cpu"))


def test_headers_are_read_alone(tmp_path: Path) -> None:
    """A look at each tensor would fetch a third of a large file from its disk, by the system's reading ahead."""
    file, tensors, size = tmp_path / "model.safetensors", 200, 1 << 18
    entries = {
        f"{i}": {"dtype": "F32", "shape": [size // 4], "data_offsets": [i * size, (i + 1) * size]}
        for i in range(tensors)
    }
    header = json.dumps(entries).encode()
    with file.open("wb") as opened:
        opened.write(len(header).to_bytes(8, "little") + header)
        opened.truncate(8 + len(header) + tensors * size)

    def resident() -> int:
        """Return the bytes of the file that this process has mapped and looked at."""
        maps = Path("/proc/self/smaps").read_text().split(str(file))[1:]
        return sum(int(re.search(r"Rss:\s+(\d+) kB", each)[1]) << 10 for each in maps)  # pyright: ignore

    checkpoint = open_checkpoint(file)
    assert len(checkpoint.shapes) == tensors
    assert resident() < tensors << 12
    assert all(checkpoint.read(key)[:1].eq(0).all() for key in checkpoint.shapes)  # a negative control
    assert resident() >= tensors << 12
