"""`Evaluation`: one evaluation of a model by several ranks and by one rank: its attentions, its blocks and its result.

The ranks compute first. Then one rank computes the same in the ranks' data type, and in a wider one with the same
conditioning, which is the reference of both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from math import isnan
from typing import Any

import torch
from torch import Tensor, nn

from seqpar.attention._key_order import in_key_order
from seqpar.attention._streams import given, present
from seqpar.kernels.prepare import reference as prepared
from seqpar.local.reference import attend as by_formula
from seqpar.mesh.inputs import broadcast
from seqpar.mesh.mesh import Axis, Mesh
from seqpar.mesh.shard import Shard, Tokens
from seqpar.planner.costs import facts_of
from seqpar.transports.collective import gather
from seqpar.types.protocols import Attend, Core, Projected, Stream
from seqpar.verifying.compare import (
    BITS,
    BLOCKS,
    EXACT,
    FACTOR,
    FLOORS,
    NOT_FINITE,
    RESULT,
    WIDER,
    Comparison,
    Place,
    TokenShare,
    bound,
    digest,
    error,
    watched,
)
from seqpar.verifying.copies import Copies
from seqpar.verifying.one_rank import Conditioning, full_precision, held, widened

Streams = Mapping[str, Tensor]
Work = Callable[[], Streams]
MOVED = BITS.format("one rank has, and only data moves")


class Observed:
    """An attention with the results of another one. It shows its positions and mask to `copies`.

    split: of the tokens, whose order of keys the mask has. check: compares the heads with the formula; None compares
    none.
    """

    def __init__(self, attend: Attend, copies: Copies, split: Tokens | None, check: HeadCheck | None = None) -> None:
        self._attend, self._copies, self._split, self._check = attend, copies, split, check
        self.tokens = attend.tokens

    def __call__(
        self, streams: Sequence[Stream], mask_BL: Tensor | None = None, /, **options: Any
    ) -> tuple[Tensor, ...]:
        split = self._split if options.get("only") is None else None
        # before the model may overwrite its streams
        expected = None if self._check is None else self._check.expected(streams, mask_BL, split)
        self._copies.attention(streams, mask_BL, split)
        outs = self._attend(streams, mask_BL, **options)
        if self._check is not None and expected is not None:
            self._check.compare(torch.cat(outs, dim=1), *expected, kv_heads=_kv_heads(streams))
        return outs


class HeadCheck:
    """Compares each head of an attention with the formula. Collective on the sequence axis.

    heads: the axis over which the strategy shards heads; None where each rank computes all heads of its tokens. find:
    takes the reason why a head is wrong, its error in units of the accepted one, and the rank that computed it, if it
    is not this one.
    """

    def __init__(self, axis: Axis, heads: Axis | None, find: Callable[[str, float, int | None], None]) -> None:
        self._axis, self._heads, self._find = axis, heads, find

    def expected(
        self, streams: Sequence[Stream], mask_BL: Tensor | None, split: Tokens | None
    ) -> tuple[Tensor, Tensor]:
        """The output by the formula in a wider data type, and the accepted error of each row and head, (B, H)."""
        dtype = dtype_of(streams)
        formula: Core = by_formula if split is None else in_key_order(by_formula, split, self._axis.rank)
        with full_precision():
            truth = self._by(formula, streams, mask_BL, WIDER.get(dtype, torch.float32))
        alone = _errors(self._by(formula, streams, mask_BL, dtype), truth)
        return truth, (FACTOR * alone).clamp(min=max(FLOORS.get(dtype, 0.0), torch.finfo(dtype).eps))

    def compare(self, output: Tensor, truth: Tensor, accepted: Tensor, kv_heads: int) -> None:
        errors = _errors(output, truth)
        for row, head in (~(errors <= accepted)).nonzero()[:1].tolist():
            wrong, most = float(errors[row, head]), float(accepted[row, head])
            reason = f"head {head} of row {row} has error {wrong:.2e}, expected at most {most:.2e}"
            owner = None
            if self._heads is not None and self._heads.size > 1:  # groups of heads are sharded over their axis
                group, split = head * kv_heads // errors.shape[1], Shard(kv_heads, self._heads.size)
                part = next(part for part in range(split.parts) if group < split.starts[part] + split.sizes[part])
                owner = self._heads.ranks[part]
            self._find(NOT_FINITE if isnan(most) else reason, wrong / most, owner)

    def _by(self, formula: Core, streams: Sequence[Stream], mask_BL: Tensor | None, dtype: torch.dtype) -> Tensor:
        """The output in this data type, as one rank computes it from the keys of all ranks."""
        (q, k, v), axis = joined(streams, dtype), self._axis
        if axis.size > 1:
            local = torch.tensor([q.shape[1]], device=q.device)
            sizes = tuple(gather(local, axis, (1,) * axis.size).tolist())
            k, v = gather(k, axis, sizes, dim=1), gather(v, axis, sizes, dim=1)
        return formula(q, k, v, mask_BL)[0]


def dtype_of(streams: Sequence[Stream]) -> torch.dtype:
    first = streams[0]
    return first.x.dtype if isinstance(first, Projected) else first.q.dtype


def _kv_heads(streams: Sequence[Stream]) -> int:
    first = streams[0]
    return first.kv_heads if isinstance(first, Projected) else first.k.shape[2]


def joined(streams: Sequence[Stream], dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """q and k after norm and rotary, and v, of the tokens of all streams on this rank, computed in this data type."""
    parts = list[tuple[Tensor, Tensor, Tensor]]()
    for stream in present(streams):
        if isinstance(stream, Projected):
            stream = stream.widened(dtype)
        qkv = given(stream)
        parts.append((*prepared(qkv.q.to(dtype), qkv.k.to(dtype), qkv.prepare), qkv.v.to(dtype)))
    q, k, v = (torch.cat(tensors, dim=1) for tensors in zip(*parts, strict=True))
    return q, k, v


def _errors(got: Tensor, truth: Tensor) -> Tensor:
    """The rms of the difference of each row and head, (B, H), in units of the rms of the truth."""
    wide = truth.double()
    rms, unit = ((x.square().mean((1, 3))).sqrt() for x in (got.double() - wide, wide))
    return rms / unit.where(unit > 0, 1.0)


class Evaluation:
    """Compares one evaluation: the outputs of blocks on this rank and on one rank alone, and heads of attentions.

    measured: takes errors and findings. place: the step and the call. models: those that may compute the evaluation.
    strategy: the name of the ranks' strategy. dtype: the wider data type. same_bits: whether the ranks must have the
    bits of one rank.
    """

    def __init__(
        self,
        measured: Comparison,
        place: Place,
        models: Iterable[nn.Module],
        mesh: Mesh,
        strategy: str,
        dtype: torch.dtype,
        same_bits: bool = False,
    ) -> None:
        self.measured, self.mesh, self.dtype, self.same_bits = measured, mesh, dtype, same_bits
        self._place, self._models = place, list(models)
        self._outputs: dict[str, Tensor] = {}  # of blocks on this rank, which were not compared yet
        self._indices: dict[str, int] = {}
        self._wrong_heads: list[tuple[int, str, float, int | None]] = []
        self._heads = HeadCheck(
            mesh.sequence,
            mesh.ulysses if "ulysses" in facts_of(strategy).axes else None,
            lambda reason, ratio, by: self._wrong_heads.append((len(self._outputs), reason, ratio, by)),
        )
        self.copies = Copies(
            lambda name, before, reason, by: measured.find(self.place(3 * before, name), reason, by=by),
            lambda: len(self._outputs),
        )

    def place(self, index: int, name: str, part: int = BLOCKS) -> Place:
        return replace(self._place, part=part, index=index, name=name)

    @contextmanager
    def ranks(self) -> Iterator[None]:
        """Record the outputs of blocks in the ranks' call made inside. Collective."""
        with watched(self._models, lambda name, x: self._outputs.update({name: x.clone()})):
            yield
        names = [*self._outputs]
        self._indices = {name: 3 * number + 2 for number, name in enumerate(names)}
        for before, reason, ratio, by in self._wrong_heads:
            name = names[before].partition(",")[0] if before < len(names) else "the last layers"
            self.measured.find(self.place(3 * before + 1, f"attention in {name}"), reason, ratio, by)

    def observed(self, attend: Attend, split: Tokens) -> Attend:
        """The ranks' attention, whose heads are compared; split: see `Observed`."""
        return Observed(attend, self.copies, split, self._heads)

    def compare(self, name: str, ours: Streams, by_one: Callable[[], tuple[Streams, Streams]]) -> None:
        """Compare the result with that of one rank. Collective: call on all ranks.

        ours: the ranks' result. by_one: returns the results of `by_one`. Raises the same ValueError on all ranks if one
        rank alone cannot compute it on one of them.
        """
        place = self.place(0, name, RESULT)
        alone, truth = held(self.mesh, by_one)
        worst = self.copies.compare(self.mesh)
        if worst is not None:
            self.measured.by[place] = worst
        self.measured.add(place, error(ours, truth), error(alone, truth))
        self.whole(place, ours)
        if self.same_bits and digest(alone) != digest(ours):
            self.measured.find(place, MOVED)

        # every rank's reference must be the same
        apart = error(truth, broadcast(self.mesh, truth))
        if (reason := apart.why_not(bound(EXACT, torch.float32))) is not None:
            self.measured.find(place, f"{reason}, between the results of this rank and of rank 0 alone")
        others = self.mesh.collect(reason is not None and not isnan(apart.rms), bool)
        if self.measured.other is None and any(others):
            self.measured.other = others.index(True)

    def whole(self, place: Place, tensors: Streams) -> None:
        """Compare the bits of tensors that all ranks should have with rank 0's. Collective: call on all ranks."""
        bits = self.measured.bits[place] = digest(tensors)
        if self.mesh.share(bits, str) != bits:
            # after the errors at the same place, which say more
            self.measured.find(replace(place, index=place.index + 1), BITS.format("rank 0 has"))

    def by_one(self, share: TokenShare, alone: Work, truth: Work) -> tuple[Streams, Streams]:
        """Compute on one rank, in the ranks' data type (`alone`) and in the wider one (`truth`), and compare blocks.

        share: this rank's part of full tensors.
        """
        conditioning, taken = Conditioning(self._models), dict[str, tuple[Callable[[Tensor], Tensor], Tensor]]()

        def see_alone(name: str, whole: Tensor) -> None:
            if name not in self._outputs:
                raise ValueError(f"{name} ran on one rank alone, but not on the ranks")
            take = share.nearest(whole, self._outputs[name])
            taken[name] = take, take(whole).clone()
            if self.same_bits and not torch.equal(taken[name][1], self._outputs[name]):
                self.measured.find(self.place(self._indices[name], name), MOVED)

        def see_truth(name: str, whole: Tensor) -> None:
            ranks, (take, alone) = self._outputs.pop(name), taken.pop(name)  # freed after this
            if ranks.numel():  # a rank may have no token of a stream
                reference = {name: take(whole)}
                errors = error({name: ranks}, reference), error({name: alone}, reference)
                self.measured.add(self.place(self._indices[name], name), *errors)

        with watched(self._models, see_alone), conditioning.recorded():
            narrow = alone()
        with widened(self._models, self.dtype), watched(self._models, see_truth), conditioning.replayed(self.dtype):
            result = truth()
        if self._outputs:
            name = next(iter(self._outputs))
            self.measured.find(self.place(0, "a block"), f"{name} did not run on one rank alone")
        self.measured.blocks = max(self.measured.blocks, len(self._indices))
        return narrow, result
