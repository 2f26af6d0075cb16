"""Reads what the blocks of a transformer return, and compares this rank's tokens with those of a whole run.

A block is a member of one of the model's lists of layers. On several ranks it returns this rank's rows and tokens; on
one rank it returns all of them, of which this rank's are taken by their numbers.
When it wins: it names the first block that is wrong, where a prediction only tells that something is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import combinations, permutations
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from seqpar.fidelity.compare import Error, error
from seqpar.shard import Shard

Outputs = Mapping[str, Tensor]
"""Tensors by the name of the block that returned them, in the order of the run."""
Take = Callable[[Tensor], Tensor]
"""Takes this rank's rows and tokens of a whole tensor."""


@dataclass(frozen=True)
class Share:
    """What one rank has of the tensors of a whole run.

    lengths: tokens of each stream on all ranks together, in the order in which the model joins them. parts, rank: how
    many ranks share them, and which one this is. rows: this rank's rows of the batch of `batch` rows, None for all.
    ordered: whether streams are joined in the order of `lengths` only; otherwise every order is tried.
    """

    lengths: Mapping[str, int]
    parts: int
    rank: int
    rows: Tensor | None = None
    batch: int = 0
    ordered: bool = True

    def ways(self, whole: Tensor, mine: Tensor) -> list[Take]:
        """Return every way to take a tensor like `mine` from a whole one; ValueError if there is none."""
        taken = self._mine(whole)
        dims = [dim for dim in range(taken.dim()) if taken.dim() == mine.dim() and taken.shape[dim] != mine.shape[dim]]
        if taken.shape == mine.shape:
            return [self._mine]
        found = self._indices(taken.shape[dims[0]], mine.shape[dims[0]]) if len(dims) == 1 else []
        if not found:
            raise ValueError(
                f"got a block's output of shape {tuple(mine.shape)} on one of {self.parts} ranks and "
                f"{tuple(whole.shape)} on one rank, expected a share of the tokens of {dict(self.lengths)}"
            )
        return [self._take(dims[0], index) for index in found]

    def _mine(self, whole: Tensor) -> Tensor:
        """Return this rank's rows."""
        if self.rows is None or not whole.dim() or len(whole) != self.batch:
            return whole
        return whole[self.rows.to(whole.device)]

    def _take(self, dim: int, index: list[int]) -> Take:
        return lambda x: self._mine(x).index_select(dim, torch.tensor(index, device=x.device))

    def _indices(self, total: int, mine: int) -> list[list[int]]:
        """Return the numbers of this rank's tokens, for each choice of streams with so many tokens in all."""
        choose = combinations if self.ordered else permutations
        chosen = [each for n in range(len(self.lengths)) for each in choose(self.lengths.values(), n + 1)]
        found = [self._joined(each) for each in chosen if sum(each) == total]
        fitting = [index for index in found if len(index) == mine]
        return [index for place, index in enumerate(fitting) if index not in fitting[:place]]

    def _joined(self, lengths: Iterable[int]) -> list[int]:
        index, start = list[int](), 0
        for length in lengths:
            part = Shard(length, self.parts).slice(self.rank)
            index += range(start + part.start, start + part.stop)
            start += length
        return index


@dataclass
class Compared:
    """Errors of a rank's blocks: `mine` are those of the ranks' run, `alone` those of one rank in the same data type.

    equal: whether an output has one rank's bits, if that was asked (`same`). A sharded run is read first (`keep`), then
    the reference (`truth`), then the plain run (`plain`).
    """

    share: Share
    mine: dict[str, Error] = field(default_factory=dict)
    alone: dict[str, Error] = field(default_factory=dict)
    equal: dict[str, bool] = field(default_factory=dict)
    _kept: dict[str, Tensor] = field(default_factory=dict)
    _takes: dict[str, Take] = field(default_factory=dict)

    def count(self) -> int:
        """Return how many outputs are kept."""
        return len(self._kept)

    def names(self) -> list[str]:
        """Return the names of the kept outputs, in the order of the run."""
        return [*self._kept]

    def keep(self, name: str, x: Tensor) -> None:
        """Keep a block's output of the ranks' run."""
        self._kept[name] = x.clone()

    def same(self, name: str, whole: Tensor) -> None:
        """Find out whether the kept output has the bits of one rank's."""
        mine = self._known(name)
        self.equal[name] = any(torch.equal(take(whole), mine) for take in self.share.ways(whole, mine))

    def truth(self, name: str, whole: Tensor) -> None:
        """Measure the kept output by the reference, and keep the reference in its place."""
        mine = self._known(name)
        ways = self.share.ways(whole, mine)  # also of a rank without tokens here, which must have no share of them
        if not mine.numel():
            self._takes[name] = lambda x: x.new_empty(0)
            return
        tried = [(error({name: mine}, {name: take(whole)}), take) for take in ways]
        # a fault is far from every choice; between choices that fit, the order of streams decides
        self.mine[name], take = min(tried, key=lambda each: (each[0].rms != each[0].rms, each[0].rms))
        self._takes[name], self._kept[name] = take, take(whole).clone()

    def plain(self, name: str, whole: Tensor) -> None:
        """Measure the output of one rank in the ranks' data type by the reference, and let go of that."""
        mine = self._takes[name](whole)
        truth = self._known(name)
        if mine.numel():
            self.alone[name] = error({name: mine}, {name: truth})
        del self._kept[name]

    def missing(self) -> str | None:
        """Return in words which blocks did not run in all three runs, or None."""
        left = [*self._kept, *(name for name in self.mine if name not in self.alone)]
        return f"{left[0]} did not run on one rank alone" if left else None

    def _known(self, name: str) -> Tensor:
        if name not in self._kept:
            raise ValueError(f"got {name}, which ran on one rank alone, expected the blocks that ran on this rank, too")
        return self._kept[name]


@contextmanager
def watched(models: Iterable[nn.Module], seen: Callable[[str, Tensor], Any]) -> Iterator[None]:
    """Call `seen(name, tensor)` for every tensor that a block returns, in their order; blocks are not compiled."""
    models, counts = list(models), dict[str, int]()

    def hook(name: str) -> Callable[..., None]:
        def after(module: nn.Module, args: object, output: object) -> None:
            counts[name] = counts.get(name, 0) + 1
            again = "" if counts[name] == 1 else f", call {counts[name]}"
            tensors = [x for x in pytree.tree_leaves(output) if isinstance(x, Tensor) and x.is_floating_point()]
            for number, x in enumerate(tensors, start=1):
                place = f"{name}{again}" if len(tensors) == 1 else f"{name}{again}, output {number}"
                seen(place, x)

        return after

    handles = [block.register_forward_hook(hook(name)) for model in models for name, block in blocks_of(model)]
    compiled = [(one, one._compiled_call_impl) for model in models for one in model.modules()]
    try:
        for one, _ in compiled:
            one._compiled_call_impl = None  # compiled code would not see the hooks
        yield
    finally:
        for one, impl in compiled:
            one._compiled_call_impl = impl
        for handle in handles:
            handle.remove()


def blocks_of(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return the blocks of a model with their names: members of its lists, and its other layers of their types.

    A block without a forward of its own, whose parts the model calls, counts as these parts.
    """
    children = list(model.named_children())
    lists = [(name, child) for name, child in children if isinstance(child, nn.ModuleList)]
    members = [(f"{name}.{i}", member) for name, child in lists for i, member in enumerate(child)]
    kinds = {type(member) for _, member in members if any(True for _ in member.children())}
    members += [(name, child) for name, child in children if type(child) in kinds]
    return [found for name, member in members for found in _called(name, member)]


def _called(name: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    if type(module).forward is not nn.Module.forward:
        yield name, module
        return
    for part, child in module.named_children():
        yield from _called(f"{name}.{part}", child)
