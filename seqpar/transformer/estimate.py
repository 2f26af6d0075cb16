"""Describes a diffusers transformer to the planner, from its modules.

The planner needs the cost of a token and the number of tokens. A module's attention gives the heads, and the linear
layers of its blocks the GEMMs; the number of tokens is that of the family's own size. Layouts are compared by these
numbers, so they need not be exact. A family's file may have a better description.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from seqpar.families._cuts import Cuts
from seqpar.families._find import CUTS, OF_TEXT, PROMPT_TOKENS, WORK
from seqpar.planner.plan import STEPS
from seqpar.planner.predict import TABLE_BYTES, Load
from seqpar.transformer.blocks import blocks_of
from seqpar.types.facts import Blocks, Cross, Work

IMAGE_TOKENS = 4096  # 1024 x 1024 pixels, in latents of 1/8 and patches of 2 x 2
VIDEO_TOKENS = 32760  # 81 frames of 480 x 832 pixels
TEXT_TOKENS = 256  # of a prompt
STATE = ("image", "video", "sound")  # streams that are no text

QUERY, KEY, VALUE = ("to_q", "to_query"), ("to_k", "to_key"), ("to_v", "to_value")  # names of layers of attention
# layers whose rows are prompts or text tokens rather than image tokens
_FEW_ROWS = ("norm", "mod", "ada", "time", "emb", "add_", "context", "txt", "text")


def work_of(module: nn.Module, text: int | None = None) -> Work:
    """Return what a token costs in a transformer, from the attention and the linear layers of its blocks.

    A family's cuts say which blocks compute the state, and whether attention joins it with text or reads text. text:
    number of text tokens; None: the family's. Raises ValueError if it has no attention with `heads`, `to_q` and `to_k`,
    or names like these, as diffusers' have.
    """
    kind = next((kind.__name__ for kind in type(module).__mro__ if kind.__name__ in CUTS), "")
    cuts, text = CUTS.get(kind, Cuts({}, {})), text or PROMPT_TOKENS.get(kind, TEXT_TOKENS)
    lists = _lists(module, cuts)
    attention = next(_attention(lists[0][1][0]))[1]
    to_q, to_k = _named(attention, QUERY), _named(attention, KEY)
    width, inner, heads = to_q.in_features, to_q.out_features, _heads(attention) or 1
    head_dim = inner // heads
    config: Any = getattr(module, "config", {})
    latent = int(config.get("in_channels") or 16)
    texts = max((sum(stream not in STATE for stream in joint.streams) for joint in cuts.attention.values()), default=0)
    prefix = any(joint.after_prefix for joint in cuts.attention.values())
    return Work(
        width=width,
        heads=heads,
        kv_heads=to_k.out_features // head_dim,
        head_dim=head_dim,
        blocks=tuple(_described(name, blocks, cuts, text, OF_TEXT.get(kind), config) for name, blocks in lists),
        prepares=True,
        once=((latent, width), (width, latent)),
        table=6 * width,
        live=12 * width,
        joined=(text,) * (texts or prefix),
    )


def planned_work(module: Any, fused: bool = True) -> Work:
    """Return what a token costs in a transformer, whose blocks functions of `seqpar.families` compute if they may.

    These leave q, k and v to attention, and gate and norm in one pass. fused: whether they may.
    """
    if not fused or not blocks_of(module):
        return work_of(module)
    kinds = (kind.__name__ for kind in type(module).__mro__)
    if (describe := next((WORK[kind] for kind in kinds if kind in WORK), None)) is not None:
        return describe(module.config)
    work = work_of(module)
    passes = (4 * work.width, 4 * work.width)
    return replace(work, blocks=tuple(replace(block, given=False, passes=passes) for block in work.blocks))


def load_of(module: nn.Module, dtype: torch.dtype, guided: bool, others: tuple[int, ...] = ()) -> Load:
    """Return the run for which a layout is chosen: one picture, or video, of the family's size.

    others: tokens of the streams besides the state, for a `Work` that knows of them.
    """
    count = sum(x.numel() for x in module.parameters())
    config: Any = getattr(module, "config", {})
    latent = int(config.get("in_channels") or 16)
    return Load(1, _tokens(config), guided, STEPS, dtype.itemsize, count, latent, 2, TABLE_BYTES, others)


def dtype_of(module: nn.Module) -> torch.dtype:
    """Return the dtype of most weights; some models keep a few of them in fp32."""
    counts: Counter[torch.dtype] = Counter()
    for x in module.parameters():
        counts[x.dtype] += x.numel() * x.is_floating_point()
    return max(counts, key=counts.__getitem__)


def _lists(module: nn.Module, cuts: Cuts) -> list[tuple[str, nn.ModuleList]]:
    # the lists of blocks with attention, those with the most parameters first; not those that compute text alone
    lists = [(name, child) for name, child in module.named_children() if isinstance(child, nn.ModuleList) and child]
    lists = [(name, blocks) for name, blocks in lists if next(_attention(blocks[0]), None) is not None]
    split = {path.partition(".")[0] for path in cuts.attention}
    lists = [(name, blocks) for name, blocks in lists if name in split] or lists
    if not lists:
        raise ValueError(
            f"got {type(module).__name__} without a list of blocks whose attention has heads, to_q and to_k, "
            f"expected a transformer as diffusers writes them"
        )
    return sorted(lists, key=lambda pair: -sum(x.numel() for x in pair[1].parameters()))


def _described(name: str, blocks: nn.ModuleList, cuts: Cuts, text: int, of_text: str | None, config: Any) -> Blocks:
    local = {path.removeprefix(f"{name}.*.").removesuffix("?") for path in cuts.local}
    every = dict(_attention(blocks[0]))
    own = next((one for path, one in every.items() if path not in local), next(iter(every.values())))
    read = next((one for path, one in every.items() if path in local), None)
    q, k = (_gemm(own, names) for names in (QUERY, KEY))
    gemms, width = ((q[0], q[1] + 2 * k[1]), *_products(blocks[0], of_text, config)), q[0]
    cross = None
    if read is not None:
        gemms, cross = (*gemms, _gemm(read, QUERY)), Cross(text, (_gemm(read, KEY), _gemm(read, VALUE)))
    return Blocks(len(blocks), gemms, (4 * width, 4 * width, 8 * width), cross=cross, given=True)


def _attention(block: nn.Module) -> Iterator[tuple[str, Any]]:
    for path, each in block.named_modules():
        if _heads(each) is not None and _named(each, QUERY) is not None and _named(each, KEY) is not None:
            yield path, each


def _heads(attention: Any) -> int | None:
    counts = (getattr(attention, name, None) for name in ("heads", "num_heads", "num_attention_heads"))
    return next((count for count in counts if isinstance(count, int)), None)


def _named(module: nn.Module, names: Sequence[str]) -> Any:
    # the linear layer that has one of these names, or None
    layers = (getattr(module, name, None) for name in names)
    return next((layer for layer in layers if hasattr(layer, "out_features")), None)


def _gemm(attention: nn.Module, names: Sequence[str]) -> tuple[int, int]:
    layer = _named(attention, names)
    return layer.in_features, layer.out_features


def _products(block: nn.Module, of_text: str | None, config: Any) -> Iterator[tuple[int, int]]:
    # (inputs, outputs) of the linear layers of a block on image tokens, without those to q, k and v
    for name, layer in block.named_modules():
        skipped = name.endswith((*QUERY, *KEY, *VALUE)) or any(word in name.lower() for word in _FEW_ROWS)
        skipped = skipped or (of_text is not None and re.search(of_text, name) is not None)
        expert = re.search(r"\bexperts\.(\d+)\.", name)  # as many as a token passes
        if isinstance(layer, nn.Linear) and not (
            skipped or (expert and int(expert[1]) >= config["num_activated_experts"])
        ):
            yield layer.in_features, layer.out_features


def _tokens(config: Any) -> int:
    size, patch = config.get("sample_size"), config.get("patch_size")
    if isinstance(size, int) and isinstance(patch, int):
        return max(1, size // patch) ** 2
    if isinstance(size, int) and patch is None:  # of sound
        return size
    frames = isinstance(patch, (tuple, list)) and len(patch) == 3
    return VIDEO_TOKENS if frames or config.get("patch_size_t") or config.get("sample_frames") else IMAGE_TOKENS
