"""One evaluation of a model by several ranks and by one rank alone: `verify` compares its blocks and heads.

The ranks compute first, in their own way. Then one rank computes the same in the ranks' data type, and in a wider one
with the same conditioning, which is the reference of both.
When it wins: it names the first block that is wrong, where a prediction only tells that something is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from seqpar.fidelity.blocks import Take, TokenShare, watched
from seqpar.fidelity.compare import EXACT, Comparison, Error, Place, bound, error
from seqpar.fidelity.heads import Attended, ByFormula, Observed
from seqpar.fidelity.one_rank import Conditioning, wide, widened
from seqpar.ranks.inputs import broadcast
from seqpar.ranks.mesh import Axis, Mesh
from seqpar.types.protocols import Attend, SequenceModel

T = TypeVar("T")
Streams = Mapping[str, Tensor]
WHOLE, AFTER = 10**6, 2 * 10**6  # positions of a step's prediction and of the state after it: they follow its blocks


def block_position(number: int) -> int:
    """Return the position of a block's output in its step; attentions before it have the even one before."""
    return 2 * number + 1


class Look:
    """A look into one evaluation: what its blocks returned on this rank, their errors, and what is wrong with heads.

    modules: the models that may compute it. axis: the sequence axis of the ranks. share: this rank's part of whole
    tensors; it may be set later, before one rank computes. unequal: position and name of each output of a block that
    has other bits than that of one rank in the ranks' data type.
    """

    def __init__(self, modules: Sequence[nn.Module], axis: Axis, share: TokenShare | None = None) -> None:
        self._modules, self._axis = list({id(each): each for each in modules}.values()), axis
        self.share = share or TokenShare({}, axis.size, axis.rank)
        self.unequal: list[tuple[int, str]] = []
        self._kept: dict[str, Tensor] = {}
        self._alone: dict[str, Tensor] = {}
        self._takes: dict[str, Take] = {}
        self._errors: dict[str, tuple[Error, Error]] = {}
        self._attended: list[tuple[int, Attended]] = []
        self._wrong: list[tuple[int, str, str]] = []

    @contextmanager
    def ranks(self) -> Iterator[None]:
        """Keep what blocks return in the call of the ranks that is made inside, then compare the heads of attention.

        All ranks must do this together.
        """
        with watched(self._modules, lambda name, x: self._kept.update({name: x.clone()})):
            yield
        names = [*self._kept]
        for before, attended in self._attended:
            if (reason := attended.wrong(self._axis)) is not None:
                name = names[before].partition(",")[0] if before < len(names) else "the last layers"
                self._wrong.append((2 * before, f"attention in {name}", reason))
        self._attended.clear()

    def attention(self, attend: Attend) -> Attend:
        """Return an attention that computes the same, and whose heads `ranks` compares."""
        return Observed(attend, lambda attended: self._attended.append((len(self._kept), attended)))

    def by_one(
        self,
        compute: Callable[[T], Streams],
        arguments: T,
        dtype: torch.dtype,
        truth: Callable[[T], Streams] | None = None,
    ) -> tuple[Streams, Streams]:
        """Return what one rank computes of nested arguments in the ranks' data type, and in a wider one.

        truth: computes in the wider type, if that is not `compute`.
        """
        conditioning = Conditioning(self._modules)
        with watched(self._modules, self._see_alone), conditioning.recorded():
            alone = compute(arguments)
        with widened(self._modules, dtype), watched(self._modules, self._see_truth), conditioning.replayed(dtype):
            return alone, (truth or compute)(wide(arguments, dtype))

    def tokens_by_one(self, call: Callable[[], object], dtype: torch.dtype) -> tuple[Streams, Streams]:
        """Return what one rank's `forward_tokens` returns in this call, in the ranks' data type and in a wider one.

        In the wider type attention is computed by its formula: kernels take 16 bits.
        """
        both = list[Streams]()

        def compute(true: Callable[..., Streams], *arguments: Any) -> Streams:
            *inputs, attend = arguments

            def by(attend: Attend) -> Callable[[list[Any]], Streams]:
                return lambda inputs: copied(true(*inputs, attend))

            both[:] = self.by_one(by(attend), inputs, dtype, by(ByFormula(attend.tokens)))
            return both[0]

        with in_place_of(self._modules, compute):
            call()
        return both[0], both[1]

    def tokens(self, call: Callable[[], object], watch: Callable[[Attend], Attend] | None = None) -> Streams:
        """Return what `forward_tokens` returns here in this call. watch: returns the attention that it calls."""
        outputs: dict[str, Tensor] = {}

        def compute(true: Callable[..., Streams], *arguments: Any) -> Streams:
            *inputs, attend = arguments
            returned = true(*inputs, attend if watch is None else watch(attend))
            outputs.update(copied(returned))
            return returned

        with in_place_of(self._modules, compute):
            call()
        return outputs

    def report(self, made: Comparison, place: Callable[[int, str], Place]) -> None:
        """Add all errors and findings at places by position and name."""
        for position, name, reason in self._wrong:
            made.find(place(position, name), reason)
        if self._kept:
            made.find(place(0, "a block"), f"{next(iter(self._kept))} did not run on one rank alone")
        for number, (name, errors) in enumerate(self._errors.items()):
            made.add(place(block_position(number), name), *errors)
        made.blocks = max(made.blocks, len(self._errors))

    def _see_alone(self, name: str, whole: Tensor) -> None:
        if name not in self._kept:
            raise ValueError(f"got {name}, which ran on one rank alone, expected the blocks that ran on this rank, too")
        take = self._takes[name] = self.share.nearest(whole, self._kept[name])
        self._alone[name] = take(whole).clone()
        if not torch.equal(self._alone[name], self._kept[name]):
            self.unequal.append((block_position([*self._kept].index(name)), name))

    def _see_truth(self, name: str, whole: Tensor) -> None:
        """Measure the outputs of the ranks and of one rank alone, and let go of them."""
        truth, mine, alone = self._takes[name](whole), self._kept.pop(name), self._alone.pop(name)
        if mine.numel():  # a rank may have no token of a stream
            self._errors[name] = error({name: mine}, {name: truth}), error({name: alone}, {name: truth})


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


def compare_references(made: Comparison, mesh: Mesh, place: Place, truth: Streams) -> None:
    """Compare what this rank computes alone in the wider type with rank 0's; all ranks must call this together."""
    reason = error(truth, broadcast(mesh, truth)).why_not(bound(EXACT, torch.float32))
    if reason is not None:
        made.find(place, f"{reason}, between what this rank and what rank 0 compute alone")
