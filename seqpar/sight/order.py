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
from typing import Any

import numpy as np

from seqpar.sight.columns import OUTSIDE
from seqpar.sight.trace import BLOCK, STEP, Event, Spans, events, spans

ORDERED = ("products", "attention", "elementwise", "store")  # kernels that come in the same order in each run
ENOUGH = 0.9  # of the kernels of a known run have to be found at their places
Reference = Sequence[tuple[str, str]]
"""(kernel, block) of a run whose blocks are known, in order."""


def reference(trace: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the kernels of each block's last run without a graph: earlier ones may have tuned themselves."""
    if not spans(trace, STEP).all:
        return []
    numbered = Spans(replace(span, name=f"{index} {span.name}") for index, span in enumerate(spans(trace, BLOCK).all))
    runs: defaultdict[str, list[Event]] = defaultdict(list)
    for event in events(trace, numbered):
        if event.block not in ("", OUTSIDE) and event.what in ORDERED:
            runs[event.block].append(event)
    last = {run.partition(" ")[2]: kernels for run, kernels in sorted(runs.items(), key=lambda x: x[1][0].start)}
    return [(event.name, block) for block, kernels in last.items() for event in kernels]


def attributed(ran: Sequence[Event], known: Reference) -> tuple[list[Event], str | None]:
    """Return the events of replays with their blocks, and why those of some replays are not known, or None."""
    blocks, reason = dict[int, str](), None
    indexed = [(event.graph, index) for index, event in enumerate(ran) if event.graph and event.what in ORDERED]
    for _, group in groupby(sorted(indexed), key=lambda pair: pair[0]):
        indices = [index for _, index in group]
        found = by_order(known, [ran[index].name for index in indices])
        if found is None:
            reason = "blocks of replayed graphs are not known: their kernels ran in no order that was seen before"
        else:
            blocks.update(zip(indices, found, strict=True))
    return _filled(ran, blocks), reason


def by_order(known: Reference, names: Sequence[str]) -> list[str] | None:
    """Return the block of each kernel, or None if they are not those of the known run.

    The known run lies where most names agree. A kernel between two that agree belongs to the block of the first one.
    """
    if not known or not names:
        return None
    codes = {name: code for code, name in enumerate(dict.fromkeys((*names, *(name for name, _ in known))))}
    theirs, ours = np.array([codes[name] for name, _ in known]), np.array([codes[name] for name in names])

    def place(offset: int) -> tuple[int, int]:
        return max(0, offset), min(len(ours), offset + len(theirs))

    def agree(offset: int) -> np.ndarray:
        first, end = place(offset)
        return ours[first:end] == theirs[first - offset : end - offset]

    offset = max(range(1 - len(theirs), len(ours)), key=lambda offset: int(agree(offset).sum()))
    agreed, (first, end) = agree(offset), place(offset)
    if agreed.sum() < ENOUGH * len(theirs):
        return None
    inside = (known[index - offset][1] if agreed[index - first] else "" for index in range(first, end))
    found, block = list[str](), OUTSIDE
    for each in inside:
        block = each or block
        found.append(block)
    return [OUTSIDE] * first + found + [OUTSIDE] * (len(names) - end)


def _filled(ran: Sequence[Event], blocks: Mapping[int, str]) -> list[Event]:
    """Give events of replays the blocks that were found, and others that of the last event before them."""
    every, last = list[Event](), OUTSIDE
    for index, event in enumerate(ran):
        last = blocks.get(index, last if event.graph else event.block)
        every.append(replace(event, block=last))
    return every


def blocks_in(known: Iterable[tuple[str, str]]) -> list[str]:
    """Return the names of the blocks of a known run, in order."""
    return list(dict.fromkeys(block for _, block in known))
