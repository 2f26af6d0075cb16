"""Finds the blocks of a replayed graph: by the order of its kernels, compared with a run whose blocks are known.

A graph's kernels do not say which part of the model launched them. The same call runs once without a graph, before it
is captured; there each kernel lies in the block whose forward launched it. A replay runs the same kernels in the same
order, with others before and after the blocks.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import groupby

import numpy as np

from seqpar.profiling.columns import OUTSIDE
from seqpar.profiling.trace import Event, Spans

ORDERED = ("products", "attention", "elementwise", "store")  # kernels that come in the same order in each run
ENOUGH = 0.9  # of the kernels of a known run have to be found at their places
Reference = Sequence[tuple[str, str]]
"""(kernel, block) of a run whose blocks are known, in order."""


def reference(ran: Iterable[Event]) -> list[tuple[str, str]]:
    """Return the kernels of each block's last run: earlier ones may have tuned themselves.

    ran: what was launched by the host itself, with the number of the run before the name of its block.
    """
    runs: defaultdict[str, list[Event]] = defaultdict(list)
    for event in ran:
        if event.block not in ("", OUTSIDE) and event.what in ORDERED:
            runs[event.block].append(event)
    last = {unnumbered(run): kernels for run, kernels in sorted(runs.items(), key=lambda x: x[1][0].start)}
    return [(event.name, block) for block, kernels in last.items() for event in kernels]


def numbered(blocks: Spans) -> Spans:
    """Return blocks with the number of their run before their names."""
    return Spans(replace(span, name=f"{number} {span.name}") for number, span in enumerate(blocks.all))


def unnumbered(block: str) -> str:
    """Return the name of a block without the number of its run."""
    return block.partition(" ")[2] if block[:1].isdecimal() else block


def attributed(ran: Sequence[Event], known: Reference) -> tuple[list[Event], str | None]:
    """Return the events of replays with their blocks, and why those of some replays are not known, or None."""
    blocks, reason, seen = dict[int, str](), None, dict[tuple[str, ...], list[str] | None]()
    indexed = [(event.graph, index) for index, event in enumerate(ran) if event.graph and event.what in ORDERED]
    for _, group in groupby(sorted(indexed), key=lambda pair: pair[0]):
        indices = [index for _, index in group]
        names = tuple(ran[index].name for index in indices)
        if names not in seen:
            seen[names] = by_order(known, names)
        found = seen[names]
        if found is None:
            reason = "blocks of replayed graphs are not known: their kernels ran in no order that was seen before"
        else:
            blocks.update(zip(indices, found, strict=True))
    return _filled(ran, blocks), reason


def by_order(known: Reference, names: Sequence[str]) -> list[str] | None:
    """Return the block of each kernel, or None if they are not those of the known run.

    Both runs have a longest common subsequence. A kernel between two of it belongs to the block of the first one.
    """
    pairs = common([name for name, _ in known], names)
    if not pairs or len(pairs) < ENOUGH * min(len(known), len(names)):
        return None
    matched, last = {ours: known[theirs][1] for theirs, ours in pairs}, pairs[-1][1]
    found, block = list[str](), OUTSIDE
    for index in range(len(names)):
        block = matched.get(index, block if index < last else OUTSIDE)
        found.append(block)
    return found


def common(first: Sequence[str], second: Sequence[str]) -> list[tuple[int, int]]:
    """Return the places of a longest common subsequence in both, as early as they can be."""
    codes = {name: code for code, name in enumerate(dict.fromkeys((*first, *second)))}
    mine, theirs = ([codes[name] for name in each] for each in (first, second))
    lengths = np.zeros((len(mine) + 1, len(theirs) + 1), dtype=np.int32)
    for row, code in enumerate(mine, start=1):
        before = lengths[row - 1]
        lengths[row, 1:] = np.maximum.accumulate(np.maximum(before[1:], before[:-1] + (np.array(theirs) == code)))
    pairs, (row, column) = list[tuple[int, int]](), (len(mine), len(theirs))
    while lengths[row, column]:
        if lengths[row, column - 1] == lengths[row, column]:
            column -= 1
        elif lengths[row - 1, column] == lengths[row, column]:
            row -= 1
        else:
            row, column = row - 1, column - 1
            pairs.append((row, column))
    return pairs[::-1]


def _filled(ran: Sequence[Event], blocks: Mapping[int, str]) -> list[Event]:
    """Give events of replays the blocks that were found, and others that of the last event before them."""
    every, last = list[Event](), OUTSIDE
    for index, event in enumerate(ran):
        last = blocks.get(index, last if event.graph else event.block)
        every.append(replace(event, block=last))
    return every
