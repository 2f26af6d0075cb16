"""`Forward`: what one forward of a split transformer has met so far; `Ranks`: what cuts, attention and gathers share.

The numbers of tokens are known only inside of a forward, after its patches are made. Each cut records them, and
attention, which comes later, reads them. All ranks get the same complete inputs, so that they find the same numbers,
and the same errors, without talking to each other.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import gcd
from typing import Any, TypeVar

import torch
from torch import Tensor

import seqpar.local
from seqpar.families._cuts import CutJoined, CutTokens, GatherTokens
from seqpar.families._masks import JOINED
from seqpar.graphs.exchanges import Keeper
from seqpar.mesh.mesh import Axis, Mesh
from seqpar.mesh.shard import JointShard, Shard
from seqpar.planner.costs import facts_of
from seqpar.planner.plan import Plan, choose_local, load_local
from seqpar.types.plugins import plugin
from seqpar.types.protocols import Attend, Core


def attended(ranks: Ranks, q_BLHD: Tensor, k_BlGD: Tensor, v_BlGD: Tensor, total: int) -> Tensor:
    """Return attention (B, L, H, D) of whole queries to the keys of all ranks, the same on each.

    k, v: of this rank's tokens; every rank has one. total: the number of tokens of all ranks.
    """
    core = ranks.local(q_BLHD, False)
    if ranks.axis.size == 1:
        return core(q_BLHD, k_BlGD, v_BlGD)[0]
    if ranks.plan.exact:
        use, both = ("keys of whole queries", total), torch.cat([k_BlGD, v_BlGD], dim=2).movedim(1, 0)
        whole = ranks.keeper.gathered(use, ranks.axis, both, Shard(total, ranks.axis.size).sizes)
        return core(q_BLHD, *whole.movedim(0, 1).chunk(2, dim=2))[0]
    out_BLHD, lse_BHL = core(q_BLHD, k_BlGD, v_BlGD)
    mine = torch.cat([out_BLHD.to(lse_BHL.dtype), lse_BHL.transpose(1, 2)[..., None]], dim=-1)
    every = ranks.keeper.gathered("attention of whole queries", ranks.axis, mine[None])
    shares = torch.softmax(every[..., -1:], dim=0)
    return (every[..., :-1] * shares).sum(0).to(q_BLHD.dtype)


T = TypeVar("T")


@dataclass
class Forward:
    """One forward: the number of tokens of each stream, the key masks of streams, and masks in the order of the keys.

    of_one: streams of which a tensor with one row was met, which is not split: it may be one for all tokens.
    padding: how many tokens at the end of the text are padding that attention weighs (`JointShard.padding`).
    converted: masks that attention was given, with their converted form; they are kept here, so that a mask that the
    next block passes again is found by its address. kept, handed: what blocks keep for the next ones (`once` and
    `hand_over` of `BlockCall`), each with the object that it was made of. What was handed over also names
    the block that left it.
    """

    lengths: dict[str, int] = field(default_factory=dict)
    of_one: set[str] = field(default_factory=set)
    masks: Mapping[str, Tensor] = field(default_factory=dict)
    padding: int = 0
    converted: dict[Hashable, tuple[Tensor | None, Tensor | None]] = field(default_factory=dict)
    kept: dict[Hashable, tuple[object, Any]] = field(default_factory=dict)
    handed: dict[int, tuple[Tensor, Any, object]] = field(default_factory=dict)

    @property
    def adds(self) -> bool:
        """Return whether the mask of `JOINED` tokens adds numbers to scores, rather than to leave keys out."""
        return JOINED in self.masks and self.masks[JOINED].is_floating_point()

    def once(self, name: Hashable, of: Any, make: Callable[[], T]) -> T:
        """See `seqpar.families._block.BlockCall`."""
        if name not in self.kept or not _are_same(self.kept[name][0], of):
            self.kept[name] = of, make()
        return self.kept[name][1]


class Ranks:
    """The ranks of the sequence axis, for what is split inside of diffusers' own modules: tokens and attention."""

    def __init__(self, mesh: Mesh, plan: Plan) -> None:
        self.mesh, self.plan, self.keeper = mesh, plan, Keeper(mesh, plan)
        self.now: Forward | None = None
        self.last = Forward()  # the forward that was started last, also after its end
        self._warned: set[str] = set()
        self._said: set[str] = set()

    @property
    def axis(self) -> Axis:
        """Return the sequence axis."""
        return self.mesh.sequence

    @property
    def moves_only(self) -> bool:
        """Return whether the planned strategy only moves data, so that it can hold keys in another order."""
        return facts_of(self.plan.strategy.name).moves_only

    def begin(self) -> Forward:
        """Start a forward, after the exchanges that an error in the last one left unfinished were ended."""
        self.keeper.abandon()
        self.now = self.last = Forward()
        return self.now

    def cut(self, x: Tensor, cut: CutTokens) -> Tensor:
        """Return this rank's tokens of a tensor, as a view, and record how many tokens there are."""
        if (cut.dims is not None and x.dim() != cut.dims) or self.now is None:
            return x
        total, parts = x.shape[cut.dim], self.axis.size
        name = cut.stream or str(total)
        if total == 1 < parts and not (cut.may_be_empty and self.now.lengths.get(name, 1) == 1):
            self.now.of_one |= {cut.stream}
            return x
        known = self.now.lengths.setdefault(name, total)
        if total != known:
            raise ValueError(
                f"got a tensor of shape {tuple(x.shape)} with {total} tokens of {name}, expected {known} as in other "
                f"tensors of {name}; check the plan's cuts"
            )
        if total < parts and not cut.may_be_empty:
            raise ValueError(
                f"got {total} tokens of {name} for {parts} ranks, expected at least one a rank; use fewer ranks on "
                f"the sequence or a larger input"
            )
        mine = Shard(total, parts).slice(self.axis.rank)
        return x.narrow(cut.dim, mine.start, mine.stop - mine.start)

    def cut_joined(self, x: Tensor, cut: CutJoined) -> Tensor:
        """Return this rank's tokens of each stream, one after the other, of a tensor with those of all ranks."""
        lengths = {} if self.now is None else self.now.lengths
        totals = [lengths.get(stream, 0) for stream in cut.streams]
        if (reason := self.why_of_one(cut.streams)) is not None:
            raise ValueError(reason)
        if sum(totals) != x.shape[cut.dim] or 0 in totals:
            raise ValueError(
                f"got a tensor of shape {tuple(x.shape)} for all tokens of {' and '.join(cut.streams)}, of which "
                f"{', '.join(map(str, totals))} were cut before it, expected as many"
            )
        shares = [Shard(total, self.axis.size).slice(self.axis.rank) for total in totals]
        parts = zip(x.split(totals, dim=cut.dim), shares, strict=True)
        return torch.cat([part.narrow(cut.dim, mine.start, mine.stop - mine.start) for part, mine in parts], cut.dim)

    def why_of_one(self, streams: Sequence[str]) -> str | None:
        """Return why streams of which no tensor was cut cannot be split, if one with a single token was met."""
        now = self.now or Forward()
        one = next((name for name in streams if name in now.of_one and name not in now.lengths), None)
        article = "an" if one == "image" else "a"
        return None if one is None else f"{article} {one} of one token cannot be split; pad it or use cfg=/data="

    def total(self, stream: str, use: str) -> int:
        """Return the number of tokens of a stream on all ranks; ValueError if none of it was cut yet."""
        if self.now is None or stream not in self.now.lengths:
            raise ValueError(f"got a gather of {stream} at {use} before any cut of it, expected a cut; check the plan")
        return self.now.lengths[stream]

    def gather(self, x: Tensor, gather: GatherTokens, use: str) -> Tensor:
        """Return a tensor with the tokens of all ranks; the next gather of this use overwrites it."""
        sizes = Shard(self.total(gather.stream, use), self.axis.size).sizes
        if x.shape[gather.dim] != sizes[self.axis.rank]:
            raise ValueError(
                f"got a gather at {use} of other tokens than each rank's share of the {sum(sizes)} of {gather.stream}, "
                f"expected these; check the plan's cuts"
            )
        if self.axis.size == 1:
            return x
        whole = self.keeper.gathered(use, self.axis, x.movedim(gather.dim, 0), sizes)
        return whole.movedim(0, gather.dim).contiguous()

    def spread(self, use: str, widths: Sequence[int], make: Callable[[int], Tensor]) -> Sequence[Tensor]:
        """Compute a share of some results here and gather the others'; see `seqpar.families._block.Spread`.

        The results are products of one vector a picture with the modulation's weights: each of N ranks reads an Nth of
        these, which are a quarter of FLUX.1. Of the 2.0 ms that FLUX.1-dev's take on an H200, two ranks save 1.0 and
        four 1.5; 4.2 MB of fp32 results are gathered in about 0.02 ms.
        """
        axis = self.axis
        if axis.size == 1:
            return [make(index) for index in range(len(widths))]
        unit, parts = gcd(*widths), shares(widths, axis.size)
        products = [make(index) for index in range(len(widths))[parts[axis.rank]]]
        like = products[0] if products else make(0)[:, :0]
        mine_lRC = torch.cat(products or [like], dim=1).unflatten(1, (-1, unit)).movedim(1, 0)
        sizes = tuple(sum(widths[part]) // unit for part in parts)
        whole = self.keeper.gathered(use, axis, mine_lRC, sizes)
        return whole.movedim(0, 1).flatten(1).split(list(widths), dim=1)

    def say(self, message: str) -> None:
        """Let rank 0 print a message once."""
        if message not in self._said and self.mesh.is_main:
            print(f"seqpar: {message}", flush=True)
        self._said.add(message)

    def attend(self, tokens: JointShard, like: Tensor, masked: bool) -> Attend:
        """Return the planned strategy's attention for a split of tokens.

        like: its queries, or a tensor of their batch and dtype if nothing is masked. masked: whether it gets key masks;
        where the planned local attention takes none, another one computes those calls.
        """
        return self.keeper.attend(len(like), tokens, self._local(like, masked) if masked else None)

    def local(self, like: Tensor, masked: bool) -> Core:
        """Return the planned local attention, for keys that are whole on every rank; see `attend`."""
        return load_local(self._local(like, masked) if masked else self.plan.local.name)

    def _local(self, like: Tensor, masked: bool) -> str:
        name, inputs = self.plan.local.name, (like.device, like.dtype, like.shape[-1], masked)
        reason = plugin(seqpar.local, name, "local attention").why_not(*inputs)
        if reason is None:
            return name
        other = choose_local("auto", *inputs).name
        if self.mesh.is_main and name not in self._warned:
            self._warned.add(name)
            warnings.warn(f"local attention {name} {reason}: {other} computes the masked attention", stacklevel=2)
        return other


def _are_same(one: object, other: object) -> bool:
    """Return whether two objects are one, or tensors of one memory, which cuts make of one tensor for two blocks.

    Tuples are the same if their parts are.
    """
    if isinstance(one, tuple) and isinstance(other, tuple):
        return len(one) == len(other) and all(map(_are_same, one, other))
    if not (isinstance(one, Tensor) and isinstance(other, Tensor)):
        return one is other
    places = [(x.data_ptr(), x.shape, x.stride(), x.dtype) for x in (one, other)]
    return places[0] == places[1]


def shares(widths: Sequence[int], parts: int) -> list[slice]:
    """Return neighbouring results for each of some ranks, so that their widths add up to about the same."""
    ends, total = [sum(widths[: index + 1]) for index in range(len(widths))], sum(widths)
    # a result belongs to the part in which its middle lies
    middles = [(end - width / 2) / total * parts for end, width in zip(ends, widths, strict=True)]
    starts = [sum(middle < part for middle in middles) for part in range(parts + 1)]
    return [slice(start, end) for start, end in pairwise(starts)]
