"""Tiny random models of a transformer class, with arguments of a call: what `python -m seqpar.families` runs.

The config is the class's own with few layers, few heads and narrow streams. The arguments are made by their names, as
most transformers of diffusers have them. A family's file says what is special: `TINY`, name of the class -> `Tiny`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from diffusers.models.modeling_utils import no_init_weights
from torch import Tensor, nn

HEADS = 3  # not divisible by two ranks
HEAD_DIM = 32  # wider heads become as narrow
WIDE = 512  # wider streams and hidden layers become narrow
NARROW = 64
BATCH, TEXT = 2, 7
GRID = (3, 3, 5)  # patches of frames, rows and columns
TEXT_WIDTHS = (
    "joint_attention_dim",
    "text_embed_dim",
    "text_dim",
    "caption_channels",
    "cap_feat_dim",
    "context_in_dim",
)


@dataclass(frozen=True)
class Tiny:
    """What is special about a tiny model. config: entries besides the scaled defaults.

    inputs: returns further arguments, for the config and a function that returns random numbers of a shape. fp32: names
    of parameters, or of modules, that stay fp32, because the model mixes them with fp32 numbers.
    """

    config: Mapping[str, Any] = field(default_factory=dict)
    inputs: Callable[[Mapping[str, Any], Callable[..., Tensor]], Mapping[str, Any]] = lambda config, random: {}
    fp32: tuple[str, ...] = ()


def scaled(kind: type) -> dict[str, Any]:
    """Return a class's default config with two layers of each kind, `HEADS` narrow heads, and narrow streams."""
    defaults: dict[str, Any] = {name: one.default for name, one in inspect.signature(kind.__init__).parameters.items()}
    numbers = {name: value for name, value in defaults.items() if type(value) is int}
    all_heads = {name: value for name, value in numbers.items() if name.endswith("heads")}
    head_dim = numbers.get("attention_head_dim", HEAD_DIM)
    narrower = head_dim // HEAD_DIM if head_dim % HEAD_DIM == 0 else 1
    config = dict[str, Any]()
    for name, value in defaults.items():  # channels of a head that turn with each axis
        if "axes_dim" in name and isinstance(value, (tuple, list)) and sum(value) == head_dim:
            config[name] = type(value)(channels // narrower for channels in value)
    for name, value in numbers.items():
        if name in all_heads:  # groups of heads of keys and values stay groups
            is_grouped = ("kv" in name or "key_value" in name) and list(all_heads.values()).count(value) == 1
            config[name] = 1 if is_grouped else HEADS
        elif name.endswith("attention_head_dim"):
            config[name] = value // narrower
        elif "layers" in name or name.endswith("blocks"):
            config[name] = min(value, 2)
        elif value > WIDE and any(word in name for word in ("dim", "channels", "size")):
            heads = next((count for count in all_heads.values() if value % count == 0), None)
            config[name] = NARROW if heads is None else HEADS * value // heads // narrower
    return config


def build(kind: Any, tiny: Tiny) -> Any:
    """Return a tiny random transformer of a class in fp64, the same in every process."""
    torch.manual_seed(0)
    with no_init_weights():  # all weights are drawn below
        module: nn.Module = kind(**{**scaled(kind), **tiny.config}).double().eval().requires_grad_(False)
    for name, weight in module.named_parameters():
        fan = weight[0].numel() if weight.dim() > 1 else 4
        weight.uniform_(-((3 / fan) ** 0.5), (3 / fan) ** 0.5)  # a variance of 1 / fan; gates and norms count, too
        if {*name.split(".")} & {*tiny.fp32}:
            weight.data = weight.float()
    return module


def arguments(module: Any, tiny: Tiny) -> dict[str, Any]:
    """Return the arguments of a call, the same in every process. Numbers of tokens are odd."""
    generator = torch.Generator().manual_seed(1)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    config, names = dict(module.config), inspect.signature(type(module).forward).parameters
    axes = len(config.get("axes_dims_rope") or ())
    video = {"num_frames": GRID[0], "height": GRID[1], "width": GRID[2]} if "num_frames" in names else {}
    widths = (config.get(name) for name in (*TEXT_WIDTHS, "cross_attention_dim"))
    text = next((width for width in widths if width), NARROW)
    valid = torch.arange(TEXT) < torch.tensor([[TEXT], [TEXT - 2]])
    by_name: dict[str, Callable[[], Any]] = {
        "hidden_states": lambda: random(*_latents(module, bool(video))),
        "encoder_hidden_states": lambda: random(BATCH, TEXT, text),
        "encoder_attention_mask": lambda: valid.long(),
        "encoder_hidden_states_mask": lambda: valid,
        "pooled_projections": lambda: random(BATCH, config["pooled_projection_dim"]),
        "timestep": lambda: torch.tensor([0.3, 0.7], dtype=torch.float64),
        "img_ids": lambda: _places(axes),
        "txt_ids": lambda: torch.zeros(TEXT, axes, dtype=torch.float64),
    }
    if config.get("guidance_embeds"):
        by_name["guidance"] = lambda: torch.tensor([3.5, 2.5], dtype=torch.float64)
    special = tiny.inputs(config, random)
    made = {name: make() for name, make in by_name.items() if name in names and name not in special}
    return {**made, **video, **special}


def _latents(module: nn.Module, is_video: bool) -> tuple[int, ...]:
    # as the layer that makes patches of them takes it; without one, of tokens
    config: Any = module.config
    frames, rows, columns = GRID
    embed = next((one for one in module.modules() if isinstance(one, (nn.Conv2d, nn.Conv3d))), None)
    if embed is None:
        return BATCH, rows * columns * (frames if is_video else 1), config["in_channels"]
    sides = GRID if isinstance(embed, nn.Conv3d) else GRID[1:]
    return BATCH, embed.in_channels, *(side * patch for side, patch in zip(sides, embed.kernel_size, strict=True))


def _places(axes: int) -> Tensor:
    # of an image's tokens, (L, axes)
    rows, columns = torch.meshgrid(torch.arange(GRID[1]), torch.arange(GRID[2]), indexing="ij")
    ids = torch.zeros(GRID[1] * GRID[2], axes, dtype=torch.float64)
    ids[:, 1], ids[:, 2] = rows.flatten(), columns.flatten()
    return ids
