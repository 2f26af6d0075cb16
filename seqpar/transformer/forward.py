"""`CallState`: the ranks of one transformer, and what its current forward has met so far.

Numbers of tokens are known only inside a forward, after its patches are made. Each split point records them, and
attention, which comes later, reads them. All ranks get the same full inputs, so they find the same numbers and raise
the same errors without communication.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from math import gcd
from typing import Any, TypeVar

import torch
from torch import Tensor

import seqpar.local
from seqpar.families._cuts import CutJoined, CutTokens, GatherTokens
from seqpar.families._masks import JOINED
from seqpar.graphs.exchanges import ExchangeCache
from seqpar.local.fp8 import MOST_KEYS
from seqpar.mesh.mesh import Axis, Mesh
from seqpar.mesh.shard import JointShard, Shard
from seqpar.planner.costs import facts_of
from seqpar.planner.plan import Plan, choose_local, is_lossy, load_local
from seqpar.types.plugins import plugin
from seqpar.types.protocols import Attend, Core, Qkv8
from seqpar.types.say import say

T = TypeVar("T")


class CallState:
    """What split points, attention and blocks of one transformer share: its ranks and exchanges, and the forward."""

    def __init__(self, mesh: Mesh, plan: Plan) -> None:
        self.mesh, self.plan, self.exchanges = mesh, plan, ExchangeCache(mesh, plan)
        self.active = False  # whether a sharded forward runs now; what follows keeps its values after one
        self._reset()
        self.eight = is_lossy(plan.local.name)  # whether attention in 8 bits is computed where it is calibrated
        self._printed = set[str]()

    def _reset(self) -> None:
        self.lengths = dict[str, int]()  # tokens of each stream
        self.of_one = set[str]()  # streams of which a tensor with one row was met, which may hold for all tokens
        self.padding = 0  # tokens at the end of the text that attention weighs as padding
        self.keeps_attention = False  # whether attention of this call keeps its dtype
        self.prefix = 0  # tokens before the streams that every rank has whole
        self.masks: Mapping[str, Tensor] = {}  # key masks of streams
        # masks that attention was given, with their converted form: held, so that their addresses stay theirs
        self.converted: dict[Hashable, tuple[Tensor | None, Tensor | None]] = {}
        # what blocks keep for the next ones (`BlockCall.once`, `hand_over`), with what it was made of and who left it
        self.made: dict[Hashable, tuple[object, Any]] = {}
        self.handed: dict[int, tuple[Tensor, Any, Any]] = {}

    def begin(self) -> None:
        """Start a forward, after ending exchanges that an error in the last one left unfinished."""
        self.exchanges.abandon()
        self._reset()
        self.active = True

    def check(self) -> None:
        """Raise TimeoutError if this rank timed out waiting for another one; waits for the device."""
        self.exchanges.check()

    @property
    def axis(self) -> Axis:
        """The sequence axis."""
        return self.mesh.sequence

    @property
    def moves_only(self) -> bool:
        """Whether the planned strategy only moves data, so that it can hold keys in another order."""
        return facts_of(self.plan.strategy.name).moves_only

    @property
    def adds(self) -> bool:
        """Whether the mask of `JOINED` tokens adds numbers to scores, rather than to leave keys out."""
        return JOINED in self.masks and self.masks[JOINED].is_floating_point()

    def say(self, message: str) -> None:
        """Print a message on rank 0, once."""
        if message not in self._printed:
            say(message, self.mesh)
        self._printed.add(message)

    def once(self, name: Hashable, of: Any, make: Callable[[], T]) -> T:
        """Return what `make` returned first in this forward under this name for this very object `of`."""
        if name not in self.made or not _are_same(self.made[name][0], of):
            self.made[name] = of, make()
        return self.made[name][1]

    def snapshot(self) -> Callable[[], None]:
        """Return a function that puts back what blocks keep as it is now, and drops what one has left for the next."""
        made, converted = dict(self.made), dict(self.converted)

        def put_back() -> None:
            self.handed.clear()
            self.made, self.converted = made, converted

        return put_back

    # Tokens -------------------------------------------------------------------------------------------------------

    def cut(self, x: Tensor, cut: CutTokens) -> Tensor:
        """Return this rank's tokens of a tensor, as a view, and record how many tokens there are."""
        if (cut.dims is not None and x.dim() != cut.dims) or not self.active:
            return x
        if cut.after_prefix and self.prefix:
            return self._after_prefix(x, cut.dim, lambda rest: self.cut(rest, replace(cut, after_prefix=False)))
        total, parts = x.shape[cut.dim], self.axis.size
        name = cut.stream or str(total)
        several = parts > 1 or self.lengths.get(name, 1) > 1
        if total == 1 and several and not (cut.may_be_empty and self.lengths.get(name, 1) == 1):
            self.of_one |= {cut.stream}
            return x
        expected = self.lengths.setdefault(name, total)
        if total != expected:
            raise ValueError(
                f"got a tensor of shape {tuple(x.shape)} with {total} tokens of {name}, expected {expected} as in "
                f"other tensors of {name}; check the plan's cuts"
            )
        if total < parts and not cut.may_be_empty:
            raise ValueError(
                f"got {total} tokens of {name} for {parts} ranks, expected at least one per rank; use fewer ranks on "
                f"the sequence or a larger input"
            )
        part = Shard(total, parts).slice(self.axis.rank)
        return x.narrow(cut.dim, part.start, part.stop - part.start)

    def _after_prefix(self, x: Tensor, dim: int, work: Callable[[Tensor], Tensor]) -> Tensor:
        first, rest = x.split([self.prefix, x.shape[dim] - self.prefix], dim=dim)
        return torch.cat([first, work(rest)], dim=dim)

    def cut_joined(self, x: Tensor, cut: CutJoined) -> Tensor:
        """Return this rank's tokens of each stream, stream after stream, of a tensor with the tokens of all ranks."""
        totals = [self.lengths.get(stream, 0) if self.active else 0 for stream in cut.streams]
        if (reason := self.why_of_one(cut.streams)) is not None:
            raise ValueError(reason)
        if sum(totals) != x.shape[cut.dim] or 0 in totals:
            raise ValueError(
                f"got a tensor of shape {tuple(x.shape)} for all tokens of {' and '.join(cut.streams)}, of which "
                f"{', '.join(map(str, totals))} were cut before it, expected as many"
            )
        shares = [Shard(total, self.axis.size).slice(self.axis.rank) for total in totals]
        parts = zip(x.split(totals, dim=cut.dim), shares, strict=True)
        return torch.cat([part.narrow(cut.dim, own.start, own.stop - own.start) for part, own in parts], cut.dim)

    def groups(self, stream: str, count: int) -> tuple[slice, tuple[int, int]]:
        """Return which groups this rank's tokens are in, and how many other tokens of these are before and after."""
        total, rank = self.lengths.get(stream, 0), self.axis.rank
        if total % count or not total:
            raise ValueError(f"got {count} rows for groups of {total} tokens of {stream}, expected groups of one size")
        own, size = Shard(total, self.axis.size).slice(rank), total // count
        first, last = own.start // size, -(-own.stop // size)
        return slice(first, last), (own.start - first * size, last * size - own.stop)

    def why_of_one(self, streams: Sequence[str]) -> str | None:
        """Return why streams of which no tensor was cut cannot be split, if one with a single token was met."""
        lone = (name for name in streams if self.active and name in self.of_one and name not in self.lengths)
        if (name := next(lone, None)) is None:
            return None
        return f"{'an' if name == 'image' else 'a'} {name} of one token cannot be split; pad it or use cfg=/data="

    def gather(self, x: Tensor, gather: GatherTokens, use: str) -> Tensor:
        """Return a tensor with the tokens of all ranks; the next gather of this use overwrites it."""
        if gather.after_prefix and self.prefix:
            gathered = partial(self.gather, gather=replace(gather, after_prefix=False), use=use)
            return self._after_prefix(x, gather.dim, gathered)
        if gather.stream not in self.lengths:
            raise ValueError(f"got a gather of {gather.stream} at {use} before any cut of it, expected a cut before it")
        sizes = Shard(self.lengths[gather.stream], self.axis.size).sizes
        if x.shape[gather.dim] != sizes[self.axis.rank]:
            raise ValueError(
                f"got a gather at {use} of other tokens than each rank's share of the {sum(sizes)} of {gather.stream}, "
                f"expected these; check the plan's cuts"
            )
        if self.axis.size == 1:
            return x
        whole = self.exchanges.gathered(use, self.axis, x.movedim(gather.dim, 0), sizes)
        return whole.movedim(0, gather.dim).contiguous()

    def spread(self, use: str, widths: Sequence[int], make: Callable[[int], Tensor]) -> Sequence[Tensor]:
        """Compute a share of some results here and gather the others' (`BlockCall.spread`).

        The results are GEMVs of one vector per image with the modulation's weights: each of N ranks reads an Nth of
        these, which are a quarter of FLUX.1. Of the 2.0 ms that FLUX.1-dev's take on an H200, two ranks save 1.0 and
        four 1.5; 4.2 MB of fp32 results are gathered in about 0.02 ms.
        """
        axis = self.axis
        if axis.size == 1:
            return [make(index) for index in range(len(widths))]
        unit, parts = gcd(*widths), shares(widths, axis.size)
        products = [make(index) for index in range(len(widths))[parts[axis.rank]]]
        like = products[0] if products else make(0)[:, :0]
        local_lRC = torch.cat(products or [like], dim=1).unflatten(1, (-1, unit)).movedim(1, 0)
        sizes = tuple(sum(widths[part]) // unit for part in parts)
        whole = self.exchanges.gathered(use, axis, local_lRC, sizes)
        return whole.movedim(0, 1).flatten(1).split(list(widths), dim=1)

    # Attention ----------------------------------------------------------------------------------------------------

    def attend(self, tokens: JointShard, like: Tensor, masked: bool, eight: bool = False) -> Attend:
        """Return the planned strategy's attention. like: the queries, or a tensor of their batch, dtype and head dim.

        masked: whether it gets key masks; where the planned local attention takes none, another one computes the call.
        eight: whether streams say how they are rounded to 8 bits; otherwise a local attention of 8 bits takes none.
        """
        return self.exchanges.attend(len(like), tokens, None if eight else self._local(like, masked))

    def rounding(self, eight: Qkv8 | None, tokens: JointShard, like: Tensor, groups: int, masked: bool) -> Qkv8 | None:
        """Return how an attention's q, k and v are rounded to 8 bits, or None if this call keeps its dtype.

        eight: as calibrated. groups: the number of key-value heads. All ranks decide identically.
        """
        if eight is None or not self.eight or self.keeps_attention:
            return None
        reason = None
        if masked:
            reason = "it has key masks"
        elif tokens.total > MOST_KEYS:
            reason = f"it has {tokens.total} keys, and 8 bits lose the mean of more than {MOST_KEYS}"
        elif like.dtype != eight.v_centre_GD.dtype or eight.k_centre_GD.shape != (groups, like.shape[-1]):
            reason = "its dtype or heads are not those of the calibration"
        if reason is not None:
            self.say(f"attention of a call is computed in {like.dtype}, because {reason}".replace("torch.", ""))
        return eight if reason is None else None

    def local(self, like: Tensor, masked: bool) -> Core:
        """Return the local attention, for keys that are whole on every rank, as `attend` chooses it."""
        return load_local(self._local(like, masked) or self.plan.local.name)

    def _local(self, like: Tensor, masked: bool) -> str | None:
        # None: the plan's
        name, inputs = self.plan.local.name, (like.device, like.dtype, like.shape[-1], masked)
        if is_lossy(name):
            return choose_local("auto", *inputs).name
        if not masked:
            return None
        reason = plugin(seqpar.local, name, "local attention").why_not(*inputs)
        if reason is None:
            return name
        other = choose_local("auto", *inputs).name
        self.say(f"local attention {name} {reason}: {other} computes the masked attention")
        return other

    def attend_whole(self, q_BLHD: Tensor, k_BlGD: Tensor, v_BlGD: Tensor, total: int) -> Tensor:
        """Return attention (B, L, H, D) of whole queries to the keys of all ranks, the same on each.

        k, v: of this rank's tokens; every rank has one. total: the number of tokens of all ranks.
        """
        core, axis = self.local(q_BLHD, False), self.axis
        if axis.size == 1:
            return core(q_BLHD, k_BlGD, v_BlGD)[0]
        if self.plan.exact:
            use, both = ("keys of whole queries", total), torch.cat([k_BlGD, v_BlGD], dim=2).movedim(1, 0)
            whole = self.exchanges.gathered(use, axis, both, Shard(total, axis.size).sizes)
            return core(q_BLHD, *whole.movedim(0, 1).chunk(2, dim=2))[0]
        out_BLHD, lse_BHL = core(q_BLHD, k_BlGD, v_BlGD)
        local = torch.cat([out_BLHD.to(lse_BHL.dtype), lse_BHL.transpose(1, 2)[..., None]], dim=-1)
        parts = self.exchanges.gathered("attention of whole queries", axis, local[None])
        weights = torch.softmax(parts[..., -1:], dim=0)
        return (parts[..., :-1] * weights).sum(0).to(q_BLHD.dtype)


def _are_same(one: object, other: object) -> bool:
    # two objects are the same if they are one, or tensors of one memory, which cuts make of one tensor for two blocks;
    # tuples are if their parts are
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
