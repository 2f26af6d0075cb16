"""LoRA files of tiny pipelines, as diffusers and others write them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model_state_dict
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.support import pipelines
from tests.support.meshes import random

RANK, ALPHA = 2, 3.0
ATTENTION = (("q", "q"), ("k", "k"), ("v", "v"), ("out.0", "o"))
ORIGINAL = {  # names of Wan's authors, of layers in a block
    **{f"attn1.to_{ours}": f"self_attn.{theirs}" for ours, theirs in ATTENTION},
    **{f"attn2.to_{ours}": f"cross_attn.{theirs}" for ours, theirs in ATTENTION},
    **{"ffn.net.0.proj": "ffn.0", "ffn.net.2": "ffn.2"},
}
FORMATS = ("peft", "lightning", "trained", "distilled", "musubi")


def written(folder: Path, names: Mapping[str, Mapping[str, Tensor]]) -> dict[str, Path]:
    for name, tensors in names.items():
        save_file({key: x.clone() for key, x in tensors.items()}, folder / f"{name}.safetensors", {"format": "pt"})
    return {name: folder / f"{name}.safetensors" for name in names}


def adapted(model: Any, layers: Sequence[str], seed: int) -> dict[str, Tensor]:
    """Add an adapter without zeros to a model, and return its tensors."""
    model.add_adapter(LoraConfig(r=RANK, target_modules=list(layers)), "made")
    for index, (key, weight) in enumerate(model.named_parameters()):
        if ".made." in key:
            weight.data = 0.3 * random(tuple(weight.shape), 100 * seed + index).float()
    return get_peft_model_state_dict(model, adapter_name="made")


def write(path: Path, kind: str, layers: Sequence[str], seed: int, encoder: bool = False) -> Path:
    """Write a LoRA of a tiny pipeline as diffusers does, and return its file; encoder: also for its text encoder."""
    pipe = getattr(pipelines, kind)()
    more = {"text_encoder_lora_layers": adapted(pipe.text_encoder, ("q_proj", "v_proj"), seed)} if encoder else {}
    type(pipe).save_lora_weights(path.parent, adapted(pipe.transformer, layers, seed), weight_name=path.name, **more)
    return path


def of_flux(folder: Path) -> dict[str, Path]:
    found = {
        "style": write(folder / "style.safetensors", "flux", ("to_q", "to_out.0", "proj_mlp"), 1, encoder=True),
        "other": write(folder / "other.safetensors", "flux", ("add_k_proj", "x_embedder"), 2),
        "sd3": write(folder / "sd3.safetensors", "sd3", ("to_q",), 3),
    }
    tensors = load_file(found["other"])
    key = next(iter(tensors))
    changes = {
        "unknown": {"transformer.nothing.lora_A.weight": torch.ones(2, 40)},
        "wide": {key: torch.ones(*tensors[key].shape[:-1], 48)},
        "elsewhere": {"unet.nothing.lora_A.weight": torch.ones(2, 40)},
    }
    found |= written(folder, {name: {**tensors, **change} for name, change in changes.items()})
    found["cut"], found["bin"] = folder / "cut.safetensors", folder / "style.bin"
    found["cut"].write_bytes(found["style"].read_bytes()[:-9])
    found["bin"].write_bytes(b"")
    return found


@cache
def wan_model() -> Any:
    return pipelines.wan().transformer


def of_wan(kind: str, seed: int, part: str = "transformer") -> dict[str, Tensor]:
    """A LoRA of all layers of Wan's blocks in one of `FORMATS`.

    As diffusers saves it ("peft"), as the Lightning pairs (with alphas) and as most trainers write it with the authors'
    names, as the distilled pairs (differences of biases, of norms and of the last layer), and as musubi-tuner does.
    part: the transformer that "peft" names.
    """
    made, model = dict[str, Tensor](), wan_model()
    down, up = ("lora_A", "lora_B") if kind in ("peft", "trained") else ("lora_down", "lora_up")
    for block in range(2):
        for number, (name, original) in enumerate(ORIGINAL.items()):
            wide, narrow = model.get_submodule(f"blocks.{block}.{name}").weight.shape
            first = 1000 * seed + 100 * block + 2 * number
            begin = {
                "peft": f"{part}.blocks.{block}.{name}",
                "musubi": f"lora_unet_blocks_{block}_{original.replace('.', '_')}",
            }.get(kind, f"diffusion_model.blocks.{block}.{original}")
            made[f"{begin}.{down}.weight"] = 0.3 * random((RANK, narrow), first)
            made[f"{begin}.{up}.weight"] = 0.3 * random((wide, RANK), first + 1)
            if kind in ("lightning", "musubi"):
                made[f"{begin}.alpha"] = torch.tensor(ALPHA)
            elif kind == "distilled":
                made[f"{begin}.diff_b"] = 0.1 * random((wide,), 7 * seed + block)
    if kind == "distilled":
        norms = {f"diffusion_model.blocks.{block}.norm3.{end}" for block in range(2) for end in ("diff", "diff_b")}
        made |= {name: torch.zeros(60) for name in norms}
        made["diffusion_model.head.head.diff"] = 0.1 * random(tuple(model.proj_out.weight.shape), 9 * seed)
        made["diffusion_model.head.head.diff_b"] = 0.1 * random((len(model.proj_out.bias),), 9 * seed + 1)
    return made
