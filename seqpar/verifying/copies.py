"""Compares by bits what ranks copy or compute alike: positions, masks, ids and other cut inputs, modulation.

A block's error hides a fault that is small or that few tokens have: in bf16, a wrong position of one token or an
adapter that is 2 % off is within rounding. A rank's share of positions and masks is a slice of what one rank has, and
every rank computes modulation from the same numbers, so one other bit is a fault in every data type.
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

from seqpar.mesh.inputs import agree, broadcast, shapes
from seqpar.mesh.mesh import Axis, Mesh
from seqpar.mesh.shard import JointShard, Tokens
from seqpar.transformer.forward import CallState, shares
from seqpar.types.protocols import Attend, Stream
from seqpar.verifying.compare import BITS, TokenShare, digest, error, hooked, same_bits
from seqpar.verifying.one_rank import ROW_DIMS

ALONE = BITS.format("one rank has")
Find = Callable[[str, int, str, int | None], None]
"""Takes a finding: the name of what is wrong, after how many outputs of blocks it was seen, the reason, and the rank
that computed it, if it is not this one."""


@dataclass(frozen=True)
class _Whole:
    """What every rank has whole. by: the rank that computed it for all of them; None where each computes it."""

    seen: int
    bits: str
    shape: tuple[int, ...]
    by: int | None = None


class Copies:
    """What one evaluation copies or computes alike: first on all ranks, then on one rank alone (`alone`).

    find: takes what is wrong. seen: returns how many outputs of blocks were seen in the ranks' run. Both runs pass the
    same names in the same order.
    """

    def __init__(self, find: Find, seen: Callable[[], int]) -> None:
        self._find, self._seen = find, seen
        self._share: TokenShare | None = None
        self._counts, self._attended = Counter[str](), False
        self._parts: dict[str, tuple[int, Tensor]] = {}
        self._wholes: dict[str, _Whole] = {}
        self._both: dict[str, _Whole] = {}  # those that were seen on one rank, too
        self._digests: dict[str, tuple[Tensor, str]] = {}
        self._gathered: list[Tensor] = []
        self._off = 0.0

    def alone(self, share: TokenShare) -> None:
        """Compare from now on with one rank alone, of whose tensors this rank has a share."""
        self._share, self._attended = share, False
        self._counts.clear()

    def part(self, name: str, x: Tensor, rows: bool = True) -> None:
        """See this rank's part of a tensor, or the whole of one rank. rows: whether its first dim may be the batch."""
        name = self._numbered(name)
        if self._share is None:
            self._parts[name] = self._seen(), x
            return
        if name not in self._parts:
            self._find(name, 0, "it was seen on one rank alone, expected on all ranks", None)
            return
        seen, mine = self._parts.pop(name)
        if not _is_share(self._share if rows else replace(self._share, rows=None), x, mine):
            self._find(name, seen, ALONE, None)
        self._both[name] = _Whole(seen, self._digest(name, x), tuple(x.shape))

    def whole(self, name: str, x: Tensor, like_one: bool = False, by: int | None = None) -> None:
        """See a tensor that every rank has whole. like_one: whether one rank has its bits. by: see `_Whole`.

        One that has another shape on one rank is a share, and is not compared.
        """
        name = self._numbered(name)
        if self._share is None:
            self._wholes[name] = _Whole(self._seen(), digest({"": x}), tuple(x.shape), by)
        elif (mine := self._wholes.get(name)) is not None and mine.shape == tuple(x.shape):
            self._both[name] = mine
            if like_one and mine.bits != digest({"": x}):
                self._find(name, mine.seen, ALONE, mine.by)

    def cut(self, name: str, x: Tensor, mine: Tensor, lengths: Mapping[str, int], axis: Axis) -> None:
        """See a cut of tokens: a whole tensor, and what was made of it. lengths: the tokens of the streams in it."""
        # what was made of attention's results may round otherwise on one rank
        self.whole(f"the whole of {name}", x, like_one=not self._attended)
        if self._share is None and not _is_share(TokenShare(lengths, axis.size, axis.rank), x, mine):
            self._find(name, self._seen(), BITS.format("this rank's tokens of the whole tensor have"), None)

    def attention(self, streams: Sequence[Stream], mask_BL: Tensor | None, tokens: Tokens | None) -> None:
        """See the positions and the key mask of an attention. tokens: the split whose order of keys the mask has."""
        self._attended = True
        for number, stream in enumerate(streams, start=1):
            for part, rows in (("cosines", stream.prepare.cos_lD2), ("sines", stream.prepare.sin_lD2)):
                if rows is not None:
                    self.part(f"positions ({part}) of stream {number}", rows, rows.dim() > ROW_DIMS)
        if mask_BL is not None:
            self.part("the key mask", _by_stream(mask_BL, tokens))

    def gathered(self, x: Tensor) -> None:
        """See this rank's part of a result, or the whole of one rank, from which its own rounding may differ."""
        if self._share is None:
            self._gathered.append(x.clone())
        elif self._gathered:
            mine = self._gathered.pop(0)
            off = error({"": mine}, {"": self._share.nearest(x, mine)(x)}).rms
            self._off = max(self._off, inf if isnan(off) else off)

    def compare(self, mesh: Mesh) -> int | None:
        """Compare what every rank has whole with the others; all ranks must call this together, after both runs.

        Returns the rank whose part of the result differs most from that of one rank, or None where none was gathered.
        """
        for name, (seen, _) in self._parts.items():
            self._find(name, seen, "it was not seen on one rank alone", None)
        mine = {name: whole.bits for name, whole in self._both.items()}
        every = [dict(each) for each in mesh.collect([*mine.items()], list[tuple[str, str]])]
        for name, bits in mine.items():
            # most ranks are right; of two, rank 0 is the reference
            usual = Counter(each.get(name, "") for each in every).most_common(1)[0][0]
            if bits != usual:
                other = next(rank for rank, each in enumerate(every) if each.get(name, "") == usual)
                self._find(name, self._both[name].seen, BITS.format(f"rank {other} has"), None)
        off = mesh.collect(self._off, float)
        return off.index(max(off)) if max(off) else None

    def _numbered(self, name: str) -> str:
        self._counts[name] += 1
        return name if self._counts[name] == 1 else f"{name}, use {self._counts[name]}"

    def _digest(self, name: str, x: Tensor) -> str:
        """Return the digest of a tensor; positions that one block after the other reads are hashed once."""
        use = name.partition(", use")[0]
        before = self._digests.get(use)
        if before is None or not _is_one(before[0], x):
            before = self._digests[use] = x, digest({"": x})
        return before[1]


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    """Return a model's parameters and buffers by their names."""
    return dict([*model.named_parameters(), *model.named_buffers()])


def unequal(mesh: Mesh, mine: Mapping[str, Tensor]) -> tuple[int, str] | None:
    """Return the first rank that has other bits than rank 0, and the tensor; None if all are equal.

    All ranks must call this together. Raises ValueError on all ranks if names, shapes or data types differ.
    """
    agree(mesh, shapes(mine))
    other = [name for name, x in mine.items() if not same_bits(x, broadcast(mesh, {name: x})[name])]
    every = mesh.collect(other[:1], list[str])
    return next(((rank, names[0]) for rank, names in enumerate(every) if names), None)


def _is_share(share: TokenShare, whole: Tensor, mine: Tensor) -> bool:
    """Return whether `mine` has the bits of this rank's share of a whole tensor."""
    try:
        takes = share.takes(whole, mine)
    except ValueError:
        return False
    return any(same_bits(take(whole), mine) for take in takes)


def _is_one(x: Tensor, y: Tensor) -> bool:
    """Return whether two tensors are views of the same numbers, which nobody has written since."""
    first, second = ((z.data_ptr(), z.shape, z.stride(), z.dtype, z.device) for z in (x, y))
    return first == second and not x.is_inference() and not y.is_inference() and x._version == y._version


def _by_stream(mask_BL: Tensor, tokens: Tokens | None) -> Tensor:
    """Return a key mask, which ranks may have rank after rank, in the order of the streams."""
    if not isinstance(tokens, JointShard) or tokens.by_stream or tokens.parts == 1:
        return mask_BL
    places = torch.cat([torch.arange(part.start, part.stop) for part in tokens.arrivals])
    return mask_BL.index_select(1, places.argsort().to(mask_BL.device))


class Seen:
    """An attention that computes the same as another one, and shows its positions and mask to `Copies.attention`."""

    def __init__(self, attend: Attend, copies: Copies, split: Tokens | None = None) -> None:
        self._attend, self._copies, self._split, self.tokens = attend, copies, split, attend.tokens

    def __call__(
        self, streams: Sequence[Stream], mask_BL: Tensor | None = None, /, **options: Any
    ) -> tuple[Tensor, ...]:
        """Return what the other attention returns; options: its keyword arguments."""
        self._copies.attention(streams, mask_BL, self._split if options.get("only") is None else None)
        return self._attend(streams, mask_BL, **options)


@contextmanager
def seen_of(state: CallState, module: nn.Module, copies: Copies) -> Iterator[None]:
    """Show `copies` what a transformer's call cuts, keeps, spreads and computes alike, in the call made inside.

    Blocks keep what they make of modulation and positions (`CallState.once`), and spread products over ranks. Outputs
    of submodules without a dim for tokens are embeddings of timesteps and pooled texts, and modulation.
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
