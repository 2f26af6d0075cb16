# pyright: reportAttributeAccessIssue=false, reportPrivateUsage=false
"""Pairs of LoRAs of Wan 2.2, one for each transformer, in each format in use, against diffusers' own loading."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import seqpar
from seqpar.loading.lora import Lora, check, parse
from seqpar.pipelines import diffusers as adapted
from seqpar.pipelines.order import Order
from seqpar.serve.ranks.loras import FittingLoras, loras_in
from seqpar.transformer import lora_files
from tests.support import pipelines
from tests.support.meshes import mesh as mesh_of
from tests.support.meshes import random
from tests.support.pool import Pool

THEIRS: Any = diffusers
TOLERANCE = 5e-5  # of pixels: the pipeline keeps latents in fp32
ASKED: dict[str, Any] = {"height": 48, "width": 80, "num_frames": 5, "num_inference_steps": 2, "max_sequence_length": 16}
RANK, ALPHA = 2, 3.0
ORIGINAL = {  # names of the authors, of layers in a block
    **{f"attn1.{ours}": f"self_attn.{theirs}" for ours, theirs in zip(("to_q", "to_k", "to_v", "to_out.0"), "qkvo")},
    **{f"attn2.{ours}": f"cross_attn.{theirs}" for ours, theirs in zip(("to_q", "to_k", "to_v", "to_out.0"), "qkvo")},
    **{"ffn.net.0.proj": "ffn.0", "ffn.net.2": "ffn.2"},
}
TensorsOf = Callable[[int], dict[str, Tensor]]


def layers(seed: int) -> dict[tuple[int, str], tuple[Tensor, Tensor, int]]:
    """Return the matrices of a LoRA of each layer, and the layer's number of outputs, by block and name."""
    made, model = {}, pipelines.wan().transformer
    for block in range(2):
        for number, name in enumerate(ORIGINAL):
            wide, narrow = model.get_submodule(f"blocks.{block}.{name}").weight.shape
            first = 1000 * seed + 100 * block + 2 * number
            made[block, name] = (0.3 * random((RANK, narrow), first), 0.3 * random((wide, RANK), first + 1), wide)
    return made


def peft(seed: int, part: str = "transformer") -> dict[str, Tensor]:
    """Return a LoRA as diffusers saves it, for whichever transformer."""
    keys = {"A": 0, "B": 1}
    return {
        f"{part}.blocks.{block}.{name}.lora_{key}.weight": each[index].contiguous()
        for (block, name), each in layers(seed).items()
        for key, index in keys.items()
    }


def lightning(seed: int) -> dict[str, Tensor]:
    """Return a LoRA with the authors' names, lora_down, lora_up and alphas, as the Lightning pairs have them."""
    made = {}
    for (block, name), (down, up, _) in layers(seed).items():
        begin = f"diffusion_model.blocks.{block}.{ORIGINAL[name]}"
        made |= {f"{begin}.lora_down.weight": down, f"{begin}.lora_up.weight": up, f"{begin}.alpha": torch.tensor(ALPHA)}
    return made


def trained(seed: int) -> dict[str, Tensor]:
    """Return a LoRA with the authors' names, lora_A and lora_B, as most trainers write it."""
    ends = {"lora_down": "lora_A", "lora_up": "lora_B"}
    plain = {key: x for key, x in lightning(seed).items() if not key.endswith("alpha")}
    return {key.replace(end, ends[end]): x for key, x in plain.items() for end in ends if end in key}


def distilled(seed: int) -> dict[str, Tensor]:
    """Return a LoRA with the differences of biases, of norms (none) and of the last layer, as the distilled pairs."""
    made = lightning(seed)
    made = {key: x for key, x in made.items() if not key.endswith("alpha")}
    for (block, name), (_, _, wide) in layers(seed).items():
        made[f"diffusion_model.blocks.{block}.{ORIGINAL[name]}.diff_b"] = 0.1 * random((wide,), 7 * seed + block)
    for block in range(2):
        made[f"diffusion_model.blocks.{block}.norm3.diff"] = torch.zeros(60)
        made[f"diffusion_model.blocks.{block}.norm3.diff_b"] = torch.zeros(60)
    model = pipelines.wan().transformer
    made["diffusion_model.head.head.diff"] = 0.1 * random(tuple(model.proj_out.weight.shape), 9 * seed)
    made["diffusion_model.head.head.diff_b"] = 0.1 * random((len(model.proj_out.bias),), 9 * seed + 1)
    return made


def musubi(seed: int) -> dict[str, Tensor]:
    """Return a LoRA as musubi-tuner writes it, with kohya's names."""
    made = {}
    for key, x in lightning(seed).items():
        name, dot, end = key.removeprefix("diffusion_model.").partition(".lora_" if ".lora_" in key else ".alpha")
        made[f"lora_unet_{name.replace('.', '_')}{dot}{end}"] = x
    return made


FORMATS: dict[str, TensorsOf] = {
    "peft": peft,
    "lightning": lightning,
    "trained": trained,
    "distilled": distilled,
    "musubi": musubi,
}


def written(folder: Path, names: Mapping[str, Mapping[str, Tensor]]) -> dict[str, Path]:
    """Write LoRAs, and return their files by their names."""
    for name, tensors in names.items():
        save_file({key: x.clone() for key, x in tensors.items()}, folder / f"{name}.safetensors", {"format": "pt"})
    return {name: folder / f"{name}.safetensors" for name in names}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("wan22")
    pipelines.wan(2).save_pretrained(made)
    return made


def frames(pipe: Any) -> np.ndarray:
    return pipe("a red cat", generator=pipelines.seeded(3), output_type="np", **ASKED).frames[0]


def theirs(folder: Path, high: Path | None, low: Path | None, second: bool = True) -> np.ndarray:
    """Return the video by diffusers alone. second: whether the second file goes into the second transformer."""
    pipe = pipelines.quiet(THEIRS.WanPipeline.from_pretrained(folder, torch_dtype=torch.float64))
    for name, file, into in (("high", high, False), ("low", low, second)):
        if file is not None:
            pipe.load_lora_weights(
                str(file.parent), weight_name=file.name, adapter_name=name, load_into_transformer_2=into
            )
    if high is not None and low is not None:
        pipe.set_adapters(["high", "low"], [1.0, 0.8])
    return frames(pipe)


def ours(
    rank: int, world: int, device: torch.device, folder: str, loras: tuple[str, ...], merged: bool
) -> np.ndarray:
    """Return the video of a pipeline with LoRAs, beside its weights as in Python, or merged as by the command."""
    mesh = mesh_of(device, ulysses=world)
    if merged:
        order = Order(folder, torch.float64, prompts=("a red cat",), loras=tuple(map(parse, loras)))
        job: Any = adapted.check(order, adapted.parts_of(Path(folder)))
        pipe = job.pipeline(mesh)
        assert not any(getattr(pipe, name).__dict__.get("peft_config") for name in ("transformer", "transformer_2"))
        seqpar.parallelize(pipe, mesh)
    else:
        pipe = seqpar.load(folder, dtype=torch.float64, mesh=mesh, loras=loras)
    made = frames(pipelines.quiet(pipe))
    seqpar.release(pipe)
    return made


@pytest.mark.usefixtures("no_gpu")
@pytest.mark.filterwarnings("ignore:.*peft_config:UserWarning")  # diffusers alone, with a second file
@pytest.mark.parametrize("kind", FORMATS)
def test_each_file_of_a_pair_changes_its_transformer(ranks: Pool, folder: Path, tmp_path: Path, kind: str) -> None:
    files = written(tmp_path, {"high_noise": FORMATS[kind](1), "low_noise": FORMATS[kind](2)})
    high, low = files["high_noise"], files["low_noise"]
    truth = theirs(folder, high, low)
    controls = [theirs(folder, None, None), theirs(folder, high, None), theirs(folder, high, low, second=False)]
    assert min(abs(truth - control).max() for control in controls) > 100 * TOLERANCE
    named = (f"{high}@transformer", f"{low}:0.8@transformer_2")
    for world, loras, merged in ((1, named, True), (2, (f"{low}:0.8", str(high)), True), (2, named, False)):
        for video in ranks.run(world, ours, str(folder), loras, merged):
            assert abs(video - truth).max() < TOLERANCE, (world, merged)
