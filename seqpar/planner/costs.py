"""Counts the FLOPs, elements, bytes and messages of a step; `predict.py` turns these counts into times.

The model's `Work` and the strategy's `StrategyFacts` describe their operations; this file looks the strategy up in its
folder and adds the operations up. docs/planner.md lists the formulas; the traffic of the exchanges follows from
DeepSpeed-Ulysses (arXiv 2309.14509) and Ring Attention (arXiv 2310.01889).
Letters: see `seqpar.types.protocols`; s is the number of tokens of one sequence.
"""

from __future__ import annotations

import seqpar.attention
from seqpar.transports import _contract
from seqpar.types.facts import Cost, Layer, Layout, ShardedLayer, StrategyFacts, Work, core, linear
from seqpar.types.plugins import plugin, plugins


def facts_of(strategy: str) -> StrategyFacts:
    """The `FACTS` of a strategy's file; ValueError if there is no such strategy."""
    return plugin(seqpar.attention, strategy, "strategy").FACTS


def strategies() -> dict[str, StrategyFacts]:
    known = {name: facts_of(name) for name in plugins(seqpar.attention)}
    return dict(sorted(known.items(), key=lambda item: item[1].order))


def exact_strategies() -> tuple[str, ...]:
    return tuple(name for name, facts in strategies().items() if facts.moves_only)


def why_not(strategy: str, ring: int, ulysses: int, heads: int, kv_heads: int) -> str | None:
    reason = facts_of(strategy).why_not(ring, ulysses, heads, kv_heads)
    return None if reason is None else f"got strategy {strategy} with {reason}"


def layers(work: Work, layout: Layout, tokens: int, batch: int = 1, others: tuple[int, ...] = ()) -> tuple[Layer, ...]:
    """The operations of one layer for each rank of the sequence axis, with `batch` rows on each.

    tokens: those of the state; others: those of each other stream.
    """
    # whether the transport, which its measured times name, writes into the reader's memory
    transports = map(_contract.facts, _contract.names())
    direct = any(facts.in_place and layout.transport in facts.rates.values() for facts in transports)
    whole = tokens + sum(others)
    at = ShardedLayer(work, layout.ring, layout.ulysses, whole, batch, direct, (tokens, *others))
    facts = facts_of(layout.strategy)
    return tuple(facts.layer(at, rank) for rank in range(layout.sequence))


def busiest(every: tuple[Layer, ...]) -> tuple[int, ...]:
    """For each exchange of a layer, the most that any rank sends or receives, in the unit of `Move`."""
    exchanges = zip(*(layer.moves for layer in every), strict=True)
    return tuple(max(max(move.sent, move.received) for move in exchange) for exchange in exchanges)


def attention_calls(work: Work, layer: Layer, batch: int) -> tuple[Cost, ...]:
    return tuple(core(batch, x.queries, x.keys, x.heads, work.head_dim, x.kv_heads) for x in layer.calls)


def merge_bytes(work: Work, layer: Layer, batch: int, itemsize: int) -> tuple[int, int]:
    """(bytes, kernels) of merging partial outputs.

    The first merge reads two outputs in the model's dtype; each later merge reads one and updates an fp32 result.
    """
    if not layer.merges:
        return 0, 0
    values = batch * layer.calls[0].queries * layer.calls[0].heads * work.head_dim
    return values * (3 * itemsize + (layer.merges - 1) * (itemsize + 8)), layer.merges


def parts(work: Work, b: int, s: int, others: tuple[int, ...] = ()) -> dict[str, Cost]:
    """The cost of a step's GEMMs (embedding and final layer too), attention and elementwise passes."""
    by_kind = [[cost * kind.count for cost in work.parts(kind, b, s, others)] for kind in work.blocks]
    gemms, attention, passes = (sum(costs, Cost(0, 0)) for costs in zip(*by_kind, strict=True))
    once = sum((linear(b * s, *gemm) for gemm in work.once), Cost(0, 0))
    return {"GEMMs": gemms + once, "attention": attention, "elementwise": passes}
