"""Predicts what decoding a picture or video on some ranks takes, from the VAE's config alone: no GPU, no weights.

diffusers' own decode runs on the meta device, where tensors have shapes only, under `StripMode` with exchanges that
move nothing, for the strip of one rank; `seqpar.planner.decoder` counts. When it wins: before sampling, when a size
that cannot be decoded is still an early error.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from seqpar.mesh import Axis
from seqpar.planner.decoder import Counted, count, follow
from seqpar.vae.cut import Cut
from seqpar.vae.known import check_modules
from seqpar.vae.later import Biased, ChannelNorm, GroupNorm
from seqpar.vae.mode import StripMode
from seqpar.vae.norms import over_channels, single_functions
from seqpar.vae.place import Place
from seqpar.vae.rules import RULES
from seqpar.vae.turns import STRIP_BYTES, in_turns

SHOTS, SHOTS_OF_VIDEO = 32, 6  # strips of the largest tensor in a dry run; real ones may be smaller and need less
PICTURE = 4  # dims of pictures
LEAST = 4  # the share of the largest tensor's bytes by which strips in turn need least memory
FRAMES = 4  # latent frames after which a video's decoding only repeats itself


@dataclass(frozen=True)
class Kind:
    """What a prediction depends on besides the size: the VAE's class, its config as JSON, and the dtype."""

    type: type
    config: str
    dtype: torch.dtype

    @staticmethod
    def of(kind: type, config: Mapping[str, Any], dtype: torch.dtype) -> Kind:
        """Return the kind of a VAE of diffusers with this config."""
        plain = {name: value for name, value in config.items() if not name.startswith("_")}
        return Kind(kind, json.dumps(plain, default=str, sort_keys=True), dtype)

    def build(self) -> Any:
        """Return the VAE on the meta device."""
        with torch.device("meta"):
            vae: Any = self.type.from_config(json.loads(self.config))  # pyright: ignore[reportAttributeAccessIssue]
        return nn.Module.to(vae, self.dtype).eval()


@lru_cache(maxsize=64)
def counted(kind: Kind, shape: tuple[int, ...], ranks: int = 1, turns: int = 0, plain: bool = False) -> Counted:
    """Return the operations and the peak of the rank with most rows, without weights.

    shape: of the latents (N, C, ..., h, w) that are decoded at once. turns: one of `shares` for strips in turn that
    hold whole what has at most one part in so many of the largest tensor's bytes (see `held_bytes`), 0 for none.
    A VAE or a size that is not cut into strips is decoded whole by every rank. plain: by diffusers alone, on one rank.
    """
    vae = kind.build()
    frames = shape[2] if len(shape) == 5 else 1
    if frames <= 2 * FRAMES:
        return _counted(vae, kind.dtype, shape, None if plain else ranks, turns)
    few, more = (FRAMES + frames % 2 + extra for extra in (0, 2))
    shapes = [(*shape[:2], n, *shape[3:]) for n in (few, more)]
    first, second = (_counted(vae, kind.dtype, each, None if plain else ranks, turns) for each in shapes)
    repeated = first.extended(second, (frames - more) // 2)
    return repeated or _counted(vae, kind.dtype, shape, None if plain else ranks, turns)


def shares(dims: int) -> tuple[int, ...]:
    """Return the possible `turns` of `counted`, from most memory and least time to the opposite.

    dims: of the latents. Strips of videos always hold the outputs of convolutions.
    """
    return (1, 2, LEAST) if dims == PICTURE else (LEAST,)


def held_bytes(kind: Kind, shape: tuple[int, ...], ranks: int, turns: int) -> int:
    """Return the `held_bytes` of `seqpar.vae.turns.in_turns` by which `counted` predicts; turns: one of `shares`."""
    return counted(kind, shape, ranks).largest // turns


def _counted(vae: Any, dtype: torch.dtype, shape: tuple[int, ...], ranks: int | None, turns: int) -> Counted:
    cut = _cut(vae, ranks, shape)
    rows = shape[-2:] if cut is None else (cut.mine, shape[-1]) if cut.dim == -2 else (shape[-2], cut.mine)
    z = torch.empty(*shape[:-2], *rows, dtype=dtype, device="meta")
    if not turns:  # strips at once lie channels-last, which convolutions of GPUs take as they are
        return count(lambda: _decode(vae, z, cut), copies=cut is None)
    largest = count(lambda: _decode(vae, z, cut)).largest
    size = max(STRIP_BYTES, largest // (SHOTS if z.dim() == 4 else SHOTS_OF_VIDEO))
    return count(lambda: _decode(vae, z, cut, (size, largest // turns)), copies=cut is None)


def _cut(vae: Any, ranks: int | None, shape: tuple[int, ...]) -> Cut | None:
    try:
        check_modules(vae)
    except ValueError:
        return None
    return None if ranks is None else Cut.of(Axis("dry", 0, ranks), shape[-2], shape[-1])


def _decode(vae: Any, z: Tensor, cut: Cut | None, turns: tuple[int, int] | None = None) -> Any:
    """Decode latents or this rank's strip of them. turns: the bytes of strips in turn, and of what they hold."""
    own, place = type(vae).decode.__get__(vae), None
    if cut is None:
        return in_turns(lambda: own(z), None, *turns) if turns else own(z)
    place = Place(cut, DryExchanges(cut.axis), {module: name for name, module in vae.named_modules()})
    with single_functions(vae), StripMode(place, DRY):
        made = in_turns(lambda: own(z), place, *turns) if turns else own(z)
    strip = made[0]
    size = sum(cut.shares(strip.shape[cut.dim]))
    return strip.new_empty([size if dim == strip.ndim + cut.dim else n for dim, n in enumerate(strip.shape)])


# A strip without neighbours ------------------------------------------------------------------------------------


class DryExchanges:
    """`seqpar.vae.exchanges.Exchanges` that move nothing, and tell the counter what they would."""

    def __init__(self, axis: Axis) -> None:
        self._axis = axis

    def swap(self, first: Tensor | None, last: Tensor | None, before: Tensor | None, after: Tensor | None) -> None:
        """See `Exchanges.swap`."""
        sent = max((x.numel() * x.element_size() for x in (first, last, before, after) if x is not None), default=0)
        follow(sent)

    def every(self, block: Tensor) -> Tensor:
        """See `Exchanges.every`."""
        follow(block.numel() * block.element_size())
        return block.expand(self._axis.size, *block.shape)

    def tokens(self, sizes: tuple[int, ...], shape: tuple[int, ...], like: Tensor) -> DryGather:
        """See `Exchanges.tokens`."""
        whole = like.new_empty((sum(sizes), *shape))
        follow(whole[: sizes[self._axis.rank]].numel() * like.element_size() * (self._axis.size - 1))
        return DryGather(whole, sizes[self._axis.rank])


@dataclass(frozen=True)
class DryGather:
    """A gather of `tokens`, which receives into one tensor and moves nothing."""

    whole: Tensor
    mine: int

    def outbox(self) -> Tensor:
        """Return this rank's place in the tensor."""
        return self.whole[: self.mine]

    def deliver(self) -> Tensor:
        """Return the tensor."""
        return self.whole


class DryNorm(GroupNorm):
    """A group norm that costs what its kernel costs: one pass, without the temporaries of plain torch."""

    def write(self, out: Tensor, silu: bool = False) -> None:
        """See `GroupNorm.write`."""
        out.copy_(self.x)


class DryChannelNorm(ChannelNorm):
    """See `DryNorm`."""

    def write(self, out: Tensor, silu: bool = False) -> None:
        """See `ChannelNorm.write`."""
        out.copy_(self.x)


def _group_norm(place: Place, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Count one pass over the input for the moments, and put the norm off."""
    x = args[0] if args else kwargs["input"]
    how = place.later.how(x)
    if isinstance(how, Biased):
        x = how.x
    elif how is not None:
        place.later.write(x)
    moments = x.new_empty(x.shape[0], kwargs.get("num_groups") or args[1], 3, dtype=torch.float32)
    torch.sum(x)
    if place.cut.axis.size > 1:
        place.exchanges.every(moments)
    return place.later.add(x, DryNorm(x, moments, None))  # pyright: ignore[reportArgumentType]


def _channel_norm(place: Place, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    return place.later.add(args[0], DryChannelNorm(args[0], args[1], None))


DRY = {**RULES, F.group_norm: _group_norm, over_channels: _channel_norm}
