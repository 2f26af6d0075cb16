"""USP: ulysses around a ring. Heads are exchanged over the `ulysses` axis, key-value blocks over the `ring` axis.

Source: USP (arXiv 2405.07719). Use it if there are more ranks than ulysses alone has heads for, or links are fast
inside a group of ranks and slow between groups.
"""

from __future__ import annotations

from functools import partial

from seqpar.attention.ring import Ring, ring_layer
from seqpar.attention.ulysses import Ulysses, around
from seqpar.mesh.mesh import Mesh
from seqpar.mesh.shard import Tokens, check_tokens
from seqpar.transports._contract import Transport
from seqpar.types.facts import Layer, ShardedLayer, StrategyFacts
from seqpar.types.protocols import Attend, Core


def build(mesh: Mesh, tokens: Tokens, local: Core, transport: Transport) -> Attend:
    """Build attention for one token count; ring block r joins the tokens of ranks r*U ... r*U + U - 1 (U: ulysses)."""
    check_tokens(tokens, mesh.sequence.size, merges=True)
    width = mesh.ulysses.size
    parts = [tokens.sizes[row * width : (row + 1) * width] for row in range(mesh.ring.size)]
    ring = Ring(local, mesh.ring, tuple(map(sum, parts)), transport)
    sizes, again = parts[mesh.ring.rank], lambda other: build(mesh, other, local, transport)
    return Ulysses(ring, mesh.ulysses, sizes, tokens, transport, partial(transport.heads, mesh.ulysses), again)


# Facts ---------------------------------------------------------------------------------------------------------


def layer(at: ShardedLayer, rank: int) -> Layer:
    """Return the costs of one rank: a ring with its heads, between two exchanges of heads."""
    return around(at, rank, ring_layer(at, rank))


FACTS = StrategyFacts(moves_only=False, order=40, axes=("ring", "ulysses"), layer=layer)
