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

from seqpar.loop.interface import SequenceModel
from seqpar.mesh.inputs import broadcast
from seqpar.mesh.mesh import Mesh
from seqpar.mesh.shard import Tokens
from seqpar.planner.costs import facts_of
from seqpar.types.protocols import Attend
from seqpar.verifying.blocks import Take, TokenShare, watched
from seqpar.verifying.compare import BITS, EXACT, Comparison, Place, bound, digest, error
from seqpar.verifying.copies import Copies, Seen
from seqpar.verifying.heads import ByFormula, Observed
from seqpar.verifying.one_rank import Conditioning, held, wide, widened

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
