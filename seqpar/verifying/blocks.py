"""Compares what one evaluation of a model returns on several ranks, block by block, with what one rank alone computes.

A block is a member of one of the model's lists of layers. On several ranks it returns this rank's rows and tokens; on
one rank it returns all of them, of which this rank's are taken by their numbers. Every head of attention is compared,
too (`seqpar.verifying.heads`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import permutations
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

Take = Callable[[Tensor], Tensor]
"""Takes this rank's rows and tokens of a whole tensor."""


@dataclass(frozen=True)
class TokenShare:
    """What one rank has of the tensors of a whole run.

    lengths: tokens of each stream on all ranks together; blocks may join some of them in any order. parts, rank: how
    many ranks share them, and which one this is. rows: this rank's rows of the batch of `batch` rows, None for all.
    """

    lengths: Mapping[str, int]
    parts: int
    rank: int
    rows: Tensor | None = None
    batch: int = 0

    def nearest(self, whole: Tensor, mine: Tensor) -> Take:
        """Return the way to take this rank's share of a whole tensor that is most like `mine`; ValueError without one.

        A fault is far from every way; where several orders of streams have the same shape, the right one is nearest.
        """
        takes = self.takes(whole, mine)
        if len(takes) == 1:
            return takes[0]
        return min(takes, key=lambda take: float((take(whole).double() - mine.double()).square().sum().nan_to_num()))

    def takes(self, whole: Tensor, mine: Tensor) -> list[Take]:
        """Return every way to take a tensor of the shape of `mine` from a whole one; ValueError if there is none."""
        taken = self._rows(whole)
        if taken.shape == mine.shape:
            return [self._rows]
        dims = [dim for dim in range(taken.dim()) if taken.dim() == mine.dim() and taken.shape[dim] != mine.shape[dim]]
        chosen = self._indices(taken.shape[dims[0]], mine.shape[dims[0]]) if len(dims) == 1 else []
        if not chosen:
            raise ValueError(
                f"got a block's output of shape {tuple(mine.shape)} on one of {self.parts} ranks and "
                f"{tuple(whole.shape)} on one rank, expected a share of the tokens of {dict(self.lengths)}"
            )
        return [lambda x, index=index: self._rows(x).index_select(dims[0], index.to(x.device)) for index in chosen]

    def _rows(self, whole: Tensor) -> Tensor:
        """Return this rank's rows."""
        if self.rows is None or not whole.dim() or len(whole) != self.batch:
            return whole
        return whole[self.rows.to(whole.device)]

    def _indices(self, total: int, mine: int) -> list[Tensor]:
        """Return the numbers of this rank's tokens, for each choice of streams with so many tokens in all."""
        chosen = [each for n in range(len(self.lengths)) for each in permutations(self.lengths.values(), n + 1)]
        indices = {self._joined(lengths) for lengths in chosen if sum(lengths) == total}
        return [torch.tensor(index, dtype=torch.int64) for index in sorted(indices) if len(index) == mine]

    def _joined(self, lengths: Iterable[int]) -> tuple[int, ...]:
        index, start = list[int](), 0
        for length in lengths:
            # larger shares come first; counted here and not by `Shard`, whose fault a comparison would share
            share, rest = divmod(length, self.parts)
            first = start + self.rank * share + min(self.rank, rest)
            index += range(first, first + share + (self.rank < rest))
            start += length
        return tuple(index)


@contextmanager
def watched(modules: Iterable[nn.Module], seen: Callable[[str, Tensor], Any]) -> Iterator[None]:
    """Call `seen(name, tensor)` for every tensor that a block returns, in their order; compiled blocks run eagerly."""
    counts = Counter[str]()

    def after(name: str, output: object) -> None:
        counts[name] += 1
        again = "" if counts[name] == 1 else f", call {counts[name]}"
        tensors = [x for x in pytree.tree_leaves(output) if isinstance(x, Tensor) and x.is_floating_point()]
        for number, x in enumerate(tensors, start=1):
            seen(f"{name}{again}" if len(tensors) == 1 else f"{name}{again}, output {number}", x)

    blocks = [each for module in modules for each in blocks_of(module)]
    with torch.compiler.set_stance("force_eager"), hooked(blocks, after):
        yield


@contextmanager
def hooked(modules: Iterable[tuple[str, nn.Module]], work: Callable[[str, Any], Any]) -> Iterator[None]:
    """Call `work(name, output)` after each call of a module; what it returns, if anything, replaces the output."""
    with ExitStack() as hooks:
        for name, module in modules:
            hooks.enter_context(module.register_forward_hook(lambda *call, name=name: work(name, call[-1])))
        yield


def blocks_of(module: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return the blocks of a model with their names: members of its lists, and its other layers of their types.

    A block without a forward of its own, whose parts the model calls, counts as these parts.
    """
    children = list(module.named_children())
    lists = [(name, child) for name, child in children if isinstance(child, nn.ModuleList)]
    members = [(f"{name}.{i}", member) for name, child in lists for i, member in enumerate(child)]
    kinds = {type(member) for _, member in members if any(True for _ in member.children())}
    members += [(name, child) for name, child in children if type(child) in kinds]
    return [called for name, member in members for called in _called(name, member)]


def _called(name: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    if type(module).forward is not nn.Module.forward:
        yield name, module
        return
    for part, child in module.named_children():
        yield from _called(f"{name}.{part}", child)
