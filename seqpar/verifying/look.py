"""One evaluation of a model by several ranks and by one rank alone: its attentions, its blocks and its result.

The ranks compute first, in their own way. Then one rank computes the same in the ranks' data type, and in a wider one
with the same conditioning, which is the reference of both.
When it wins: it names the first block that is wrong, where a result only tells that something is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from math import isnan
from typing import Any

import torch
from torch import Tensor, nn

from seqpar.attention._by_stream import in_key_order
from seqpar.attention._streams import given, present, split_out
from seqpar.kernels.prepare import reference as prepared
from seqpar.local.reference import attend as by_formula
from seqpar.loop.interface import SequenceModel
from seqpar.mesh.inputs import broadcast
from seqpar.mesh.mesh import Axis, Mesh
from seqpar.mesh.shard import Shard, Tokens
from seqpar.planner.costs import facts_of
from seqpar.transports.collective import gather
from seqpar.types.protocols import Attend, Core, Projected, Stream
from seqpar.verifying.compare import (
    BITS,
    EXACT,
    FACTOR,
    FLOORS,
    NOT_FINITE,
    WIDER,
    Comparison,
    Place,
    Take,
    TokenShare,
    bound,
    digest,
    error,
    watched,
)
from seqpar.verifying.copies import Copies, Seen
from seqpar.verifying.one_rank import Conditioning, full_precision, held, wide, widened

Find = Callable[[str, float, int | None], None]
"""Takes the reason why a head is wrong, its error in units of the accepted one, and the rank that computed it, if it is
not this one."""


class Observed:
    """An attention that computes the same as another one, and compares its heads with the formula.

    find: is told which head is wrong. tokens: the split for which the attention was built, whose order of keys masks
    have; None for the order of the ranks. heads: the axis over which the strategy splits heads; None where each rank
    computes all heads of its tokens. Every rank of the sequence axis must call it together.
    """

    def __init__(
        self, attend: Attend, axis: Axis, find: Find, tokens: Tokens | None = None, heads: Axis | None = None
    ) -> None:
        self._attend, self._axis, self._find, self.tokens = attend, axis, find, attend.tokens
        self._heads = heads
        self._formula: Core = by_formula if tokens is None else in_key_order(by_formula, tokens, axis.rank)

    def __call__(
        self, streams: Sequence[Stream], mask_BL: Tensor | None = None, /, **options: Any
    ) -> tuple[Tensor, ...]:
        """Return what the other attention returns; options: its keyword arguments."""
        dtype = _dtype(streams)
        formula = self._formula if options.get("only") is None else by_formula
        with full_precision():  # before the model may overwrite its streams
            truth = self._by(formula, streams, mask_BL, WIDER.get(dtype, torch.float32))
        alone = _errors(self._by(formula, streams, mask_BL, dtype), truth)
        outs = self._attend(streams, mask_BL, **options)
        accepted = (FACTOR * alone).clamp(min=max(FLOORS.get(dtype, 0.0), torch.finfo(dtype).eps))
        error = _errors(torch.cat(outs, dim=1), truth)
        for row, head in (~(error <= accepted)).nonzero()[:1].tolist():
            wrong, most = float(error[row, head]), float(accepted[row, head])
            reason = f"head {head} of row {row} has error {wrong:.2e}, expected at most {most:.2e}"
            owner = self._owner(head, error.shape[1], _groups(streams))
            self._find(NOT_FINITE if isnan(most) else reason, wrong / most, owner)
        return outs

    def _owner(self, head: int, heads: int, groups: int) -> int | None:
        """Return the rank that computes a head, or None for this one: groups of heads are split over their axis."""
        if self._heads is None or self._heads.size == 1:
            return None
        group, split = head * groups // heads, Shard(groups, self._heads.size)
        part = next(part for part in range(split.parts) if group < split.starts[part] + split.sizes[part])
        return self._heads.ranks[part]

    def _by(self, formula: Core, streams: Sequence[Stream], mask_BL: Tensor | None, dtype: torch.dtype) -> Tensor:
        """Return the output in this data type, as one rank computes it from the tokens of all."""
        (q, k, v), axis = _joined(streams, dtype), self._axis
        if axis.size > 1:
            mine = torch.tensor([q.shape[1]], device=q.device)
            sizes = tuple(gather(mine, axis, (1,) * axis.size).tolist())
            k, v = gather(k, axis, sizes, dim=1), gather(v, axis, sizes, dim=1)
        return formula(q, k, v, mask_BL)[0]


class ByFormula:
    """Attention of one rank alone by its formula, in the data type of its streams."""

    def __init__(self, tokens: int) -> None:
        self.tokens = tokens

    def __call__(
        self,
        streams: Sequence[Stream],
        mask_BL: Tensor | None = None,
        /,
        *,
        beside: Callable[[], None] | None = None,
        only: int | None = None,
    ) -> tuple[Tensor, ...]:
        """Return (B, L, H, D) for each of the given streams, which is the one of `only` where it names one."""
        if beside is not None:
            beside()
        return split_out(by_formula(*_joined(streams, _dtype(streams)), mask_BL)[0], streams)


def _dtype(streams: Sequence[Stream]) -> torch.dtype:
    first = streams[0]
    return first.x.dtype if isinstance(first, Projected) else first.q.dtype


def _groups(streams: Sequence[Stream]) -> int:
    """Return the number of key-value heads."""
    first = streams[0]
    return first.kv_heads if isinstance(first, Projected) else first.k.shape[2]


def _joined(streams: Sequence[Stream], dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Return q, k and v of the tokens of all streams on this rank, as `_qkv` computes them."""
    q, k, v = (torch.cat(parts, dim=1) for parts in zip(*(_qkv(each, dtype) for each in present(streams)), strict=True))
    return q, k, v


def _qkv(stream: Stream, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Return q and k after norm and rotary, and v, computed in this data type."""
    if isinstance(stream, Projected):
        bias = None if stream.bias is None else stream.bias.to(dtype)
        stream = replace(stream, x=stream.x.to(dtype), weight=stream.weight.to(dtype), bias=bias)
    own = given(stream)
    return *prepared(own.q.to(dtype), own.k.to(dtype), own.prepare), own.v.to(dtype)


def _errors(got: Tensor, truth: Tensor) -> Tensor:
    """Return the rms of the difference of each row and head, (B, H), in units of the rms of the truth."""
    wide = truth.double()
    rms, unit = ((x.square().mean((1, 3))).sqrt() for x in (got.double() - wide, wide))
    return rms / unit.where(unit > 0, 1.0)


Streams = Mapping[str, Tensor]
Work = Callable[[], Streams]
# positions of a step's result and of the state after it, which follow its blocks: output n has position 3 n + 2, the
# attention before it 3 n + 1, and what is copied for that 3 n
RESULT, AFTER = 10**6, 2 * 10**6
ROOM = 10 * RESULT  # positions of one call of a step


def is_result(place: Place) -> bool:
    """Return whether a place is an evaluation's result, of whichever of the calls of its step."""
    return place.position % ROOM == RESULT


def evaluation_of(place: Place) -> tuple[int, int]:
    """Return what is the same for all places of one evaluation: the step, and which of its calls it was."""
    return place.step, place.position // ROOM


class Look:
    """A look into one evaluation: what its blocks return on this rank and on one rank alone, and which heads are wrong.

    measured: takes errors and findings, at the places that `place(position, name)` returns. models: those that may
    compute the evaluation. strategy: the name of the ranks' strategy. dtype: the wider data type. same_bits: whether
    the ranks must have the bits of one rank.
    """

    def __init__(
        self,
        measured: Comparison,
        place: Callable[[int, str], Place],
        models: Iterable[nn.Module],
        mesh: Mesh,
        strategy: str,
        dtype: torch.dtype,
        same_bits: bool = False,
    ) -> None:
        self._measured, self._place, self._mesh, self._dtype = measured, place, mesh, dtype
        self._models, self._same_bits = list({id(each): each for each in models}.values()), same_bits
        self._kept: dict[str, Tensor] = {}
        self._alone: dict[str, tuple[Take, Tensor]] = {}
        self._positions: dict[str, int] = {}
        self._wrong: list[tuple[int, str, float, int | None]] = []
        self._heads = mesh.ulysses if "ulysses" in facts_of(strategy).axes else None
        self.copies = Copies(
            lambda name, before, reason, by: measured.find(place(3 * before, name), reason, by=by),
            lambda: len(self._kept),
        )

    @contextmanager
    def ranks(self) -> Iterator[None]:
        """Keep what blocks return in the call of the ranks that is made inside; all ranks must do this together."""
        with watched(self._models, lambda name, x: self._kept.update({name: x.clone()})):
            yield
        names = [*self._kept]
        self._positions = {name: 3 * number + 2 for number, name in enumerate(names)}
        for before, reason, ratio, by in self._wrong:
            name = names[before].partition(",")[0] if before < len(names) else "the last layers"
            self._measured.find(self._place(3 * before + 1, f"attention in {name}"), reason, ratio, by)

    def attention(self, attend: Attend, tokens: Tokens | None = None) -> Attend:
        """Return an attention that computes the same, and compares its heads; tokens: see `Observed`."""

        def find(reason: str, ratio: float, by: int | None) -> None:
            self._wrong.append((len(self._kept), reason, ratio, by))

        return Observed(attend, self._mesh.sequence, find, tokens, self._heads)

    def compare(self, name: str, ours: Streams, by_one: Callable[[], tuple[Streams, Streams]]) -> None:
        """Compare the evaluation's result with that of one rank; all ranks must call this together.

        name: of the result. ours: the ranks' result. by_one: calls `by_one` or `tokens_by_one`, whose result it
        returns. Raises the same ValueError on all ranks if one rank alone cannot compute it on one of them.
        """
        place = self._place(RESULT, name)
        alone, truth = held(self._mesh, by_one)
        worst = self.copies.compare(self._mesh)
        if worst is not None:
            self._measured.by[place] = worst
        self._measured.add(place, error(ours, truth), error(alone, truth))
        self.whole(place, ours)
        if self._same_bits and digest(alone) != digest(ours):
            self._measured.find(place, BITS.format("one rank has, and only data moves"))
        apart = error(truth, broadcast(self._mesh, truth))
        if (reason := apart.why_not(bound(EXACT, torch.float32))) is not None:
            self._measured.find(place, f"{reason}, between what this rank and what rank 0 compute alone")
        others = self._mesh.collect(reason is not None and not isnan(apart.rms), bool)
        if self._measured.other is None and any(others):
            self._measured.other = others.index(True)

    def whole(self, place: Place, tensors: Streams) -> None:
        """Compare the bits of what all ranks should have whole with those of rank 0; all must call this together."""
        bits = self._measured.bits[place] = digest(tensors)
        if self._mesh.share(bits, str) != bits:
            # errors at the same place say more, so that they come before it
            self._measured.find(replace(place, position=place.position + 1), BITS.format("rank 0 has"))

    def by_one(self, share: TokenShare, alone: Work, truth: Work) -> tuple[Streams, Streams]:
        """Return what one rank computes, in the ranks' data type and in the wider one, and compare its blocks.

        share: this rank's part of whole tensors. alone, truth: compute both; `truth` finds wide weights.
        """
        conditioning = Conditioning(self._models)
        with watched(self._models, partial(self._see_alone, share)), conditioning.recorded():
            narrow = alone()
        seen = watched(self._models, self._see_truth)
        with widened(self._models, self._dtype), seen, conditioning.replayed(self._dtype):
            result = truth()
        if self._kept:
            self._measured.find(self._place(0, "a block"), f"{next(iter(self._kept))} did not run on one rank alone")
        self._measured.blocks = max(self._measured.blocks, len(self._positions))
        return narrow, result

    def tokens_by_one(self, share: TokenShare, call: Callable[[], object]) -> tuple[Streams, Streams]:
        """Return what `forward_tokens` of a model of ours returns in this call of one rank; see `by_one`.

        Attention is computed by its formula, because kernels take 16 bits; only where the bits of one rank are
        expected, in the ranks' data type by the attention that it is given.
        """
        both = list[Streams]()

        def compute(true: Callable[..., Streams], *arguments: Any) -> Streams:
            *inputs, attend = arguments
            formula = ByFormula(attend.tokens)
            plain = Seen(attend if self._same_bits else formula, self.copies)
            self.copies.alone(share)
            self._copied(*inputs)
            both[:] = self.by_one(
                share, lambda: copied(true(*inputs, plain)), lambda: copied(true(*wide(inputs, self._dtype), formula))
            )
            return both[0]

        with in_place_of(self._models, compute):
            call()
        return both[0], both[1]

    def tokens(self, call: Callable[[], object], split: Tokens) -> Streams:
        """Return what `forward_tokens` returns on this rank in this call, whose attentions `ranks` compares.

        split: of the tokens over the ranks.
        """
        outputs: dict[str, Tensor] = {}

        def compute(true: Callable[..., Streams], *arguments: Any) -> Streams:
            *inputs, attend = arguments
            self._copied(*inputs)
            returned = true(*inputs, self.attention(Seen(attend, self.copies, split)))
            outputs.update(copied(returned))
            return returned

        with in_place_of(self._models, compute):
            call()
        return outputs

    def _copied(self, streams: Streams, positions: Streams, conditioning: Streams) -> None:
        """Look at the inputs of `forward_tokens`; attention shows the mask among them."""
        for name, x in positions.items():
            self.copies.part(f"positions of {name}", x, rows=False)
        for name, x in (*streams.items(), *conditioning.items()):
            if name != "mask":
                self.copies.part(f"the input {name}", x.clone())  # tokens are a buffer that the step writes to

    def _see_alone(self, share: TokenShare, name: str, whole: Tensor) -> None:
        if name not in self._kept:
            raise ValueError(f"got {name}, which ran on one rank alone, expected the blocks that ran on this rank, too")
        take = share.nearest(whole, self._kept[name])
        self._alone[name] = take, take(whole).clone()
        if self._same_bits and not torch.equal(self._alone[name][1], self._kept[name]):
            place = self._place(self._positions[name], name)
            self._measured.find(place, BITS.format("one rank has, and only data moves"))

    def _see_truth(self, name: str, whole: Tensor) -> None:
        """Measure the outputs of the ranks and of one rank alone, and let go of them."""
        mine, (take, alone) = self._kept.pop(name), self._alone.pop(name)
        if mine.numel():  # a rank may have no token of a stream
            truth, place = {name: take(whole)}, self._place(self._positions[name], name)
            self._measured.add(place, error({name: mine}, truth), error({name: alone}, truth))


@contextmanager
def in_place_of(models: Sequence[nn.Module], work: Callable[..., Streams]) -> Iterator[None]:
    """Call `work(forward_tokens, *its arguments)` for each call of a model's `forward_tokens`."""
    models = [model for model in {id(model): model for model in models}.values() if isinstance(model, SequenceModel)]
    try:
        for model in models:
            vars(model)["forward_tokens"] = partial(work, model.forward_tokens)
        yield
    finally:
        for model in models:
            vars(model).pop("forward_tokens", None)


def copied(streams: Streams) -> dict[str, Tensor]:
    """Return copies, because a stream of tokens on one rank is the buffer that the next step writes to."""
    return {name: x.clone() for name, x in streams.items()}
