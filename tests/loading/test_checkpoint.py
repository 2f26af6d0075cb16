"""Tests that all layouts of diffusers load, and that spoiled files are refused by name before weights load.

Each row of the tables is a way to spoil a good file, and what the message must say.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from seqpar import DistributedDiT
from seqpar.loading.checkpoint import open_checkpoint
from seqpar.loop.blueprint import locate
from seqpar.mesh.mesh import Mesh
from tests.loop.models.test_dit import call
from tests.support.meshes import random
from tests.support.tiny import diffusers_dit

WEIGHTS, INDEX = "diffusion_pytorch_model.safetensors", "diffusion_pytorch_model.safetensors.index.json"
Spoil = Callable[[Path], object]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
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


def cast(dtype: torch.dtype) -> Spoil:
    return edit(lambda t: t.update({"proj_out_2.bias": t["proj_out_2.bias"].to(dtype)}))


def config(**change: object) -> Spoil:
    return lambda f: (f / "config.json").write_text(json.dumps(json.loads((f / "config.json").read_text()) | change))


def index(shard: Callable[[dict[str, str]], str]) -> Spoil:
    """Write the model in shards, with another place of one tensor in their index."""

    def apply(folder: Path) -> None:
        (folder / WEIGHTS).unlink()
        diffusers_dit().save_pretrained(folder, max_shard_size="100KB")  # pyright: ignore
        content = json.loads((folder / INDEX).read_text())
        content["weight_map"]["proj_out_2.bias"] = shard(content["weight_map"])
        (folder / INDEX).write_text(json.dumps(content))

    return apply


def halve(folder: Path) -> None:
    data = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(data[: len(data) // 2])


def narrow(tensors: dict[str, Tensor]) -> None:
    tensors["proj_out_1.weight"] = tensors["proj_out_1.weight"][:, :-1].contiguous()


RENAMED = r"Missing 1: proj_out_2\.bias\. Unknown 1: proj_out_2\.Bias"
NARROW = r"proj_out_1\.weight of shape \(48, 23\), expected \(48, 24\) for final_modulation\.weight"
TWICE = {"weight_map": {"a": "b.safetensors"}}
FOLDERS: dict[str, tuple[Spoil, str]] = {
    "truncated": (halve, r"truncated or not a safetensors file"),
    "no file": (lambda f: (f / WEIGHTS).unlink(), r"has no weights; expected diffusion_pytorch_model\.safetensors"),
    "no config": (lambda f: (f / "config.json").unlink(), r"not a folder of diffusers: it has no model_index"),
    "missing key": (edit(lambda t: t.pop("proj_out_2.bias")), r"Missing 1: proj_out_2\.bias"),
    "unknown key": (edit(lambda t: t.update(lora=torch.ones(1))), r"Unknown 1: lora"),
    "renamed key": (edit(lambda t: t.update({"proj_out_2.Bias": t.pop("proj_out_2.bias")})), RENAMED),
    "wrong shape": (edit(narrow), NARROW),
    "integers": (cast(torch.int8), r"got proj_out_2\.bias of type int8, expected floating-point weights"),
    "complex": (cast(torch.complex64), r"got proj_out_2\.bias of type complex64"),
    "other class": (config(_class_name="SD3Transformer2DModel"), r"SD3Trans.*, which no model of seqpar recognises"),
    "too many layers": (config(num_layers=10**12), r"num_layers=1000000000000, but its file has only \d+ tensors"),
    "more layers than tensors": (config(num_layers=4000), r"num_layers=4000, but its file has only"),
    "file and index": (lambda f: (f / INDEX).write_text(json.dumps(TWICE)), r"has both diffusion_.* and its index"),
    "index lacks a key": (index(lambda places: sorted(places.values())[0]), r"lack proj_out_2"),
    "paddle's": (lambda f: (f / WEIGHTS).rename(f / "model_state.pdparams"), r"ppdiffusers' weights are not"),
    "no such shard": (index(lambda _: "gone.safetensors"), r"gone\.safetensors not found"),
}


@pytest.mark.parametrize("case", FOLDERS)
def test_a_bad_folder_is_refused_before_weights_load(folder: Path, case: str) -> None:
    spoil, message = FOLDERS[case]
    spoil(folder)
    with pytest.raises(ValueError, match=message):
        locate(folder)


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
