"""The arithmetic of the original U-ViT of UniDiffuser, written from its description with the names of its files.

Source: arXiv 2303.06555. It is plain torch in one process, with mistakes on purpose for negative controls.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.support.meshes import random

TEXT_TOKENS = 77
Outputs = dict[str, Tensor]
Mistake = Literal[
    "none", "skips in order", "positions off by one", "no data type", "norm before the sum", "timesteps swapped"
]
MISTAKES: tuple[Mistake, ...] = get_args(Mistake)[1:]


def weights(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return random fp64 weights of these shapes, the same in every process; no norm, bias or position is trivial."""
    made = {}
    for seed, (name, x) in enumerate(state.items()):
        size = 0.5 if x.dim() == 1 or "pos_embed" in name else x[0].numel() ** -0.5
        made[name] = random(tuple(x.shape), seed) * size + (x.dim() == 1 and "norm" in name and "weight" in name)
    return made


def original_state(heads: int, half: int, version_1: bool) -> dict[str, Tensor]:
    """Return random weights with the names and shapes of an original file: patches of 2 x 2 on a latent of 8 x 8."""
    width = 64 * heads
    linear = {
        "text_embed": (width, 6),
        "text_out": (6, width),
        "clip_img_embed": (width, 5),
        "clip_img_out": (5, width),
    }
    shapes: dict[str, tuple[int, ...]] = {
        "patch_embed.proj.weight": (width, 4, 2, 2),
        "patch_embed.proj.bias": (width,),
    }
    shapes |= {"pos_embed": (1, 3 + TEXT_TOKENS + 16, width), "norm.weight": (width,), "norm.bias": (width,)}
    if version_1:
        shapes |= {"pos_embed_token": (1, 1, width), "token_embedding.weight": (2, width)}
    linear |= {"decoder_pred": (16, width)}
    blocks = [f"in_blocks.{i}" for i in range(half)] + ["mid_block"] + [f"out_blocks.{i}" for i in range(half)]
    for block in blocks:
        shapes[f"{block}.attn.qkv.weight"] = (3 * width, width)
        for norm in ("norm1", "norm2", "norm3")[not block.startswith("out") :]:
            shapes |= {f"{block}.{norm}.weight": (width,), f"{block}.{norm}.bias": (width,)}
        linear |= {f"{block}.attn.proj": (width, width), f"{block}.mlp.fc1": (4 * width, width)}
        linear |= {f"{block}.mlp.fc2": (width, 4 * width)}
        linear |= {f"{block}.skip_linear": (width, 2 * width)} if block.startswith("out") else {}
    for name, shape in linear.items():
        shapes |= {f"{name}.weight": shape, f"{name}.bias": shape[:1]}
    return weights({name: torch.empty(shape, device="meta") for name, shape in shapes.items()})


def original(w: Mapping[str, Tensor], given: Mapping[str, Tensor], mistake: Mistake = "none") -> Outputs:
    """Return the original's outputs, the image's as a latent; mistake: what is wrong on purpose."""
    rows, _, height, width = given["image"].shape
    grid, dim = (height // 2, width // 2), w["norm.weight"].shape[0]
    image = F.conv2d(given["image"], w["patch_embed.proj.weight"], w["patch_embed.proj.bias"], stride=2)
    frequencies = torch.exp(-torch.log(torch.tensor(10000.0)) * torch.arange(dim // 2) / (dim // 2))
    times = [given[name].double()[:, None] * frequencies for name in ("t_image", "t_text")]
    times = times[::-1] if mistake == "timesteps swapped" else times
    tokens = [torch.cat((angles.cos(), angles.sin()), dim=1)[:, None] for angles in times]
    if "token_embedding.weight" in w:
        kind = w["token_embedding.weight"][given["data_type"]][:, None]
        tokens.append(torch.zeros_like(kind) if mistake == "no data type" else kind)
    tokens += [_linear(w, "text_embed", given["text"]), _linear(w, "clip_img_embed", given["clip"])]
    x = torch.cat([*tokens, image.flatten(2).transpose(1, 2)], dim=1) + _positions(w, grid, mistake)
    skips = []
    for index in range(_count(w)):
        x = _block(w, f"in_blocks.{index}", x, mistake)
        skips.append(x)
    x = _block(w, "mid_block", x, mistake)
    for index in range(_count(w)):
        skip = skips.pop(0 if mistake == "skips in order" else -1)
        x = _linear(w, f"out_blocks.{index}.skip_linear", torch.cat((x, skip), dim=-1))
        x = _block(w, f"out_blocks.{index}", _norm(w, f"out_blocks.{index}.norm1", x), mistake)
    x = _norm(w, "norm", x)
    patches = x.shape[1] - grid[0] * grid[1]
    text, clip, image = x[:, patches - 1 - TEXT_TOKENS : patches - 1], x[:, patches - 1 : patches], x[:, patches:]
    latent = _linear(w, "decoder_pred", image).view(rows, *grid, 2, 2, 4).permute(0, 5, 1, 3, 2, 4)
    made = {"image": latent.reshape(rows, 4, height, width)}
    return made | {"clip": _linear(w, "clip_img_out", clip), "text": _linear(w, "text_out", text)}


def _count(w: Mapping[str, Tensor]) -> int:
    return sum(name.startswith("in_blocks.") and name.endswith("qkv.weight") for name in w)


def _linear(w: Mapping[str, Tensor], name: str, x: Tensor) -> Tensor:
    return F.linear(x, w[f"{name}.weight"], w[f"{name}.bias"])


def _norm(w: Mapping[str, Tensor], name: str, x: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], w[f"{name}.weight"], w[f"{name}.bias"], 1e-5)


def _block(w: Mapping[str, Tensor], name: str, x: Tensor, mistake: Mistake) -> Tensor:
    q, k, v = F.linear(x, w[f"{name}.attn.qkv.weight"]).unflatten(-1, (3, -1, 64)).permute(2, 0, 3, 1, 4)
    attended = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
    branches: list[tuple[str, Callable[[Tensor], Tensor]]] = [
        ("norm2", lambda _: _linear(w, f"{name}.attn.proj", attended)),
        ("norm3", lambda h: _linear(w, f"{name}.mlp.fc2", F.gelu(_linear(w, f"{name}.mlp.fc1", h)))),
    ]
    for norm, branch in branches:
        made = branch(x)
        early = mistake == "norm before the sum"
        x = x + _norm(w, f"{name}.{norm}", made) if early else _norm(w, f"{name}.{norm}", x + made)
    return x


def _positions(w: Mapping[str, Tensor], grid: tuple[int, int], mistake: Mistake) -> Tensor:
    others, image = w["pos_embed"][:, :-16], w["pos_embed"][:, -16:]
    if grid != (4, 4):
        square = image.transpose(1, 2).unflatten(2, (4, 4))
        image = F.interpolate(square, grid, mode="bilinear").flatten(2).transpose(1, 2)
    if mistake == "positions off by one":
        image = image.roll(1, 1)
    kind = [w["pos_embed_token"]] if "pos_embed_token" in w else []
    return torch.cat([others[:, :2], *kind, others[:, 2:], image], dim=1)
