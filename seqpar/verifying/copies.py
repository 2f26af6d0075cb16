"""Compares the bits of tensors that ranks copy or compute identically: positions, masks, sharded inputs, modulation.

A block's error hides faults that are small or in few tokens: in bf16, a wrong position of one token or an adapter that
is 2 % off is within rounding. A rank's positions and masks are a slice of one rank's, and every rank computes
modulation from the same numbers, so one other bit is a fault in every data type.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from math import inf, isnan
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from seqpar.loading.parking import bring
from seqpar.mesh.inputs import agree, broadcast, shapes
from seqpar.mesh.mesh import Axis, Mesh
from seqpar.mesh.shard import JointShard, Tokens
from seqpar.transformer.forward import CallState, shares
from seqpar.types.protocols import Stream
from seqpar.verifying.compare import BITS, TokenShare, digest, error, hooked, same_bits
from seqpar.verifying.one_rank import ROW_DIMS

ALONE = BITS.format("one rank has")
Find = Callable[[str, int, str, int | None], None]
"""Takes a finding: the tensor's name, the number of block outputs seen before it, the reason, and the rank that
computed it, if it is not this one."""


@dataclass(frozen=True)
class _Whole:
    """A full tensor of every rank. by: the rank that computed it for all; None where each computes it."""

    seen: int
    bits: str
    shape: tuple[int, ...]
    by: int | None = None


class Copies:
    """The tensors that one evaluation copies or computes identically: first on all ranks, then on one rank (`alone`).

    find: takes findings. seen: returns the number of block outputs seen in the ranks' run. Both runs pass the same
    names in the same order.
    """

    def __init__(self, find: Find, seen: Callable[[], int]) -> None:
        self._find, self._seen = find, seen
        self._share: TokenShare | None = None
        self._counts, self._attended = Counter[str](), False
        self._parts: dict[str, tuple[int, Tensor]] = {}
        self._wholes: dict[str, _Whole] = {}
        self._both: dict[str, _Whole] = {}  # seen on one rank, too
        self._digests: dict[str, tuple[Tensor, str]] = {}
        self._gathered: list[Tensor] = []
        self._off = 0.0

    def alone(self, share: TokenShare) -> None:
        """Compare from now on with one rank alone; share: this rank's part of its tensors."""
        self._share, self._attended = share, False
        self._counts.clear()

    def part(self, name: str, x: Tensor, rows: bool = True) -> None:
        """Add this rank's part of a tensor, or one rank's full one. rows: whether its first dim may be the batch."""
        name = self._numbered(name)
        if self._share is None:
            self._parts[name] = self._seen(), x
            return
        if name not in self._parts:
            self._find(name, 0, "it exists on one rank alone, but not on the ranks", None)
            return
        seen, local = self._parts.pop(name)
        if not _is_share(self._share if rows else replace(self._share, rows=None), x, local):
            self._find(name, seen, ALONE, None)
        self._both[name] = _Whole(seen, self._digest(name, x), tuple(x.shape))

    def whole(self, name: str, x: Tensor, like_one: bool = False, by: int | None = None) -> None:
        """Add a full tensor of every rank. like_one: whether one rank has its bits. by: see `_Whole`.

        A tensor of another shape on one rank is a share, and is not compared.
        """
        name = self._numbered(name)
        if self._share is None:
            self._wholes[name] = _Whole(self._seen(), digest({"": x}), tuple(x.shape), by)
        elif (whole := self._wholes.get(name)) is not None and whole.shape == tuple(x.shape):
            self._both[name] = whole
            if like_one and whole.bits != digest({"": x}):
                self._find(name, whole.seen, ALONE, whole.by)

    def cut(self, name: str, x: Tensor, local: Tensor, lengths: Mapping[str, int], axis: Axis) -> None:
        """Add a full tensor and this rank's tokens of it. lengths: the tokens of the streams in it."""
        # results of attention may be rounded differently on one rank
        self.whole(f"the whole of {name}", x, like_one=not self._attended)
        if self._share is None and not _is_share(TokenShare(lengths, axis.size, axis.rank), x, local):
            self._find(name, self._seen(), BITS.format("this rank's tokens of the whole tensor have"), None)

    def attention(self, streams: Sequence[Stream], mask_BL: Tensor | None, tokens: Tokens | None) -> None:
        """Add the positions and the key mask of an attention. tokens: the split whose order of keys the mask has."""
        self._attended = True
        for number, stream in enumerate(streams, start=1):
            for part, rows in (("cosines", stream.prepare.cos_lD2), ("sines", stream.prepare.sin_lD2)):
                if rows is not None:
                    self.part(f"positions ({part}) of stream {number}", rows, rows.dim() > ROW_DIMS)
        if mask_BL is not None:
            if isinstance(tokens, JointShard) and not tokens.by_stream and tokens.parts > 1:
                # from the order of the ranks to that of the streams
                places = torch.cat([torch.arange(part.start, part.stop) for part in tokens.arrivals])
                mask_BL = mask_BL.index_select(1, places.argsort().to(mask_BL.device))
            self.part("the key mask", mask_BL)

    def gathered(self, x: Tensor) -> None:
        """Add this rank's part of a result, or one rank's full one, whose rounding may differ."""
        if self._share is None:
            self._gathered.append(x.clone())
        elif self._gathered:
            local = self._gathered.pop(0)
            off = error({"": local}, {"": self._share.nearest(x, local)(x)}).rms
            self._off = max(self._off, inf if isnan(off) else off)

    def compare(self, mesh: Mesh) -> int | None:
        """Compare full tensors between ranks, after both runs. Collective: call on all ranks.

        Returns the rank whose part of the result differs most from one rank's, or None if no result was gathered.
        """
        for name, (seen, _) in self._parts.items():
            self._find(name, seen, "it does not exist on one rank alone", None)
        local = {name: whole.bits for name, whole in self._both.items()}
        ranks = [dict(items) for items in mesh.collect([*local.items()], list[tuple[str, str]])]
        for name, bits in local.items():
            # most ranks are right; of two, rank 0 is the reference
            usual = Counter(digests.get(name, "") for digests in ranks).most_common(1)[0][0]
            if bits != usual:
                other = next(rank for rank, digests in enumerate(ranks) if digests.get(name, "") == usual)
                self._find(name, self._both[name].seen, BITS.format(f"rank {other} has"), None)
        off = mesh.collect(self._off, float)
        return off.index(max(off)) if max(off) else None

    def _numbered(self, name: str) -> str:
        self._counts[name] += 1
        return name if self._counts[name] == 1 else f"{name}, use {self._counts[name]}"

    def _digest(self, name: str, x: Tensor) -> str:
        """The digest of a tensor; positions that all blocks read are hashed once."""
        use = name.partition(", use")[0]
        before = self._digests.get(use)
        if before is None or not _is_one(before[0], x):
            before = self._digests[use] = x, digest({"": x})
        return before[1]


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    bring(model)
    return dict([*model.named_parameters(), *model.named_buffers()])


def unequal(mesh: Mesh, tensors: Mapping[str, Tensor]) -> tuple[int, str] | None:
    """The first rank with other bits than rank 0, and the tensor; None if all are equal. Collective.

    Raises ValueError on all ranks if names, shapes or data types differ.
    """
    agree(mesh, shapes(tensors))
    other = [name for name, x in tensors.items() if not same_bits(x, broadcast(mesh, {name: x})[name])]
    ranks = mesh.collect(other[:1], list[str])
    return next(((rank, names[0]) for rank, names in enumerate(ranks) if names), None)


def _is_share(share: TokenShare, whole: Tensor, local: Tensor) -> bool:
    try:
        takes = share.takes(whole, local)
    except ValueError:
        return False
    return any(same_bits(take(whole), local) for take in takes)


def _is_one(x: Tensor, y: Tensor) -> bool:
    """Whether two tensors are views of the same numbers, unchanged since."""
    first, second = ((z.data_ptr(), z.shape, z.stride(), z.dtype, z.device) for z in (x, y))
    return first == second and not x.is_inference() and not y.is_inference() and x._version == y._version


@contextmanager
def seen_of(state: CallState, module: nn.Module, copies: Copies) -> Iterator[None]:
    """Show `copies` the tensors that a transformer's call made inside shards, caches, spreads and computes identically.

    Blocks cache tensors computed from modulation and positions (`CallState.once`), and spread products over ranks.
    Outputs of submodules without a token dim are embeddings of timesteps and pooled texts, and modulation.
    """
    once, cut, cut_joined, spread, gather = state.once, state.cut, state.cut_joined, state.spread, state.gather

    def made(name: str, make: Callable[[], Any]) -> Any:
        result = make()
        for x in pytree.tree_leaves(result):
            if isinstance(x, Tensor):
                copies.whole(f"what blocks make of {name}", x, like_one=True)
        return result

    def cut_one(x: Tensor, how: Any) -> Tensor:
        mine = cut(x, how)
        if state.active and (how.dims is None or x.dim() == how.dims):
            name = how.stream or str(x.shape[how.dim])
            copies.cut(f"a cut of {name}", x, mine, {name: x.shape[how.dim]}, state.axis)
        return mine

    def cut_several(x: Tensor, how: Any) -> Tensor:
        mine, lengths = cut_joined(x, how), state.lengths
        totals = {stream: lengths[stream] for stream in how.streams}
        copies.cut(f"a cut of {' and '.join(how.streams)}", x, mine, totals, state.axis)
        return mine

    def spread_one(use: str, widths: Sequence[int], make: Callable[[int], Tensor]) -> Sequence[Tensor]:
        results = spread(use, widths, make)
        owners = [rank for rank, part in enumerate(shares(widths, state.axis.size)) for _ in widths[part]]
        for x, owner in zip(results, owners, strict=True):
            copies.whole(use, x, like_one=True, by=state.axis.ranks[owner] if state.axis.size > 1 else None)
        return results

    def gather_one(x: Tensor, how: Any, use: str) -> Tensor:
        copies.gathered(x)
        return gather(x, how, use)

    def row_of(name: str, output: Any) -> None:
        for x in pytree.tree_leaves(output):
            if isinstance(x, Tensor) and x.is_floating_point() and x.dim() <= ROW_DIMS:
                copies.whole(f"the output of {name}", x)

    def once_more(name: str, of: Any, make: Callable[[], Any]) -> Any:
        return once(name, of, partial(made, name, make))

    vars(state).update(once=once_more, cut=cut_one, cut_joined=cut_several, spread=spread_one, gather=gather_one)
    try:
        submodules = [(name, each) for name, each in module.named_modules() if name]
        with hooked(submodules, row_of):
            yield
    finally:
        for name in ("once", "cut", "cut_joined", "spread", "gather"):
            del vars(state)[name]
