"""What a step costs, counted and not timed: FLOPs, elements, bytes and messages. `predict.py` makes times of them.

A model's `Work` and a strategy's `Facts` say what they do; this file looks the strategy up in its folder and adds up.
The formulas stand in docs/planner.md; what the exchanges move follows from DeepSpeed-Ulysses (arXiv 2309.14509) and
Ring Attention (arXiv 2310.01889).
Letters: see `seqpar.protocols`; s tokens of one sequence.
"""

from __future__ import annotations

from dataclasses import dataclass

import seqpar.attention
from seqpar.planner.facts import Cost, Facts, Layer, Layout, Place, Work, core
from seqpar.protocols import plugin, plugins
from seqpar.transports import _folder


def facts_of(strategy: str) -> Facts:
    """What a strategy's file says of it; `ValueError` where there is no such file, or it says nothing."""
    found = getattr(plugin(seqpar.attention, strategy, "strategy"), "FACTS", None)
    if not isinstance(found, Facts):
        raise ValueError(f"got strategy {strategy!r} without FACTS, expected a seqpar.planner.facts.Facts in its file")
    return found


def strategies() -> dict[str, Facts]:
    """Name -> facts of every strategy in the folder, in the order in which they are taken where predictions tie."""
    found = {name: facts_of(name) for name in plugins(seqpar.attention)}
    return dict(sorted(found.items(), key=lambda item: item[1].order))


def exact_strategies() -> tuple[str, ...]:
    """The strategies that only move data: those that the exact mode takes."""
    return tuple(name for name, facts in strategies().items() if facts.moves_only)


def why_not(strategy: str, ring: int, ulysses: int, heads: int, kv_heads: int) -> str | None:
    """The reason why a strategy cannot run on axes of these sizes, None where it can."""
    reason = facts_of(strategy).why_not(ring, ulysses, heads, kv_heads)
    return None if reason is None else f"got strategy {strategy} with {reason}"


def place(work: Work, layout: Layout, tokens: int, batch: int = 1) -> Place:
    """The ranks of one sequence of a layout, with `batch` rows each."""
    return Place(work, layout.ring, layout.ulysses, tokens, batch, is_direct(layout.transport))


def is_direct(curve: str) -> bool:
    """Whether a transport, named by the key of its measured times, writes into the memory of the reader."""
    every = map(_folder.facts, _folder.names())
    return any(facts.in_place and curve in facts.rates.values() for facts in every)


def layers(work: Work, layout: Layout, tokens: int, batch: int = 1) -> tuple[Layer, ...]:
    """What each rank of the sequence axis does in one layer."""
    facts, at = facts_of(layout.strategy), place(work, layout, tokens, batch)
    return tuple(facts.layer(at, rank) for rank in range(layout.sequence))


def busiest(every: tuple[Layer, ...]) -> tuple[int, ...]:
    """For each exchange of a layer the most that any rank sends or receives; units of `Move`."""
    exchanges = zip(*(layer.moves for layer in every), strict=True)
    return tuple(max(max(move.sent, move.received) for move in exchange) for exchange in exchanges)


def attention_calls(work: Work, layer: Layer, batch: int) -> tuple[Cost, ...]:
    """The cost of each call of the local attention."""
    return tuple(core(batch, x.queries, x.keys, x.heads, work.head_dim, x.kv_heads) for x in layer.calls)


def merge_bytes(work: Work, layer: Layer, batch: int, itemsize: int) -> tuple[int, int]:
    """(bytes, kernels) of the merges of partial outputs: the first of two in the model's dtype, then into fp32."""
    if not layer.merges:
        return 0, 0
    values = batch * layer.calls[0].queries * layer.calls[0].heads * work.head_dim
    return values * (3 * itemsize + (layer.merges - 1) * (itemsize + 8)), layer.merges


@dataclass(frozen=True)
class Totals:
    """A step in numbers. flops: of all ranks together; elements: read and written by all ranks if each operation ran
    alone; sent: bytes that the rank with most to send or receive exchanges in its layers; messages: those it sends."""

    flops: int
    elements: int
    sent: int
    messages: int


def totals(work: Work, layout: Layout, tokens: int, images: int, guidance: bool, itemsize: int) -> Totals:
    """What a step of so many pictures costs; `guidance` doubles the rows of the batch."""
    rows = images * (2 if guidance else 1)
    batch = -(-images // layout.data) * (2 if guidance and layout.cfg == 1 else 1)
    every, cost = layers(work, layout, tokens, batch), work.step(rows, tokens)
    sent = work.layers * sum(busiest(every)) * batch * work.head_dim * itemsize
    messages = work.layers * max(sum(move.messages for move in layer.moves) for layer in every)
    return Totals(cost.flops, cost.elements, sent, messages)
