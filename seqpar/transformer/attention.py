"""`SplitAttention`: the attention that a diffusers transformer's processors call, over the tokens of all ranks.

Processors call torch's `scaled_dot_product_attention`, themselves or by diffusers' dispatcher; it is replaced while
they run (`seats.py`).
When it wins: modules and processors stay unchanged; two exchanges an attention, or one, for any number of tokens and
heads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import isclose
from operator import eq

import torch
import torch.nn.functional as F
from torch import Tensor

from seqpar.attention._streams import given
from seqpar.families._cuts import JOINED, Joint
from seqpar.mesh.shard import JointShard, Shard
from seqpar.transformer import masks, whole_queries
from seqpar.transformer.forward import Forward, Ranks
from seqpar.types.protocols import Given, Prepare, Stream

IDENTITY = Prepare()
ADDS = (
    "the mask's floating numbers are added to the scores, as torch does it, which takes a second attention in each "
    "block, because {why}; pass a mask of bool to leave padding out"
)
UNLIKE = "its zeros are not known to be the padding at the end of all texts alike"

Joined = tuple[tuple[str, ...], JointShard]
"""The streams that an attention joins, and their split."""


class SplitAttention:
    """Attention of some streams of this rank to those of all ranks, for every module that joins the same streams.

    reads: whether the module that runs now was given tokens to attend to besides its own. It matters where a plan does
    not name the streams: ranks whose numbers of tokens differ could not tell from them alone, and alike, which
    attention exchanges something. reached: whether the processor that runs now has called it for split tokens.
    """

    def __init__(self, ranks: Ranks, joint: Joint, where: str) -> None:
        self.ranks, self.joint, self._where = ranks, joint, where
        self.reads = self.reached = False

    @property
    def splits(self) -> bool:
        """Return whether tokens are split now: in a body's call, on several ranks."""
        return self.ranks.now is not None and self.ranks.axis.size > 1

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float | None, reads: bool
    ) -> Tensor:
        """Return attention (B, l, H, D) over all ranks, or to keys that are whole on every rank.

        q (B, l, H, D), k and v (B, l, G, D), and a mask for all keys. All ranks decide alike. Outside of a body's call
        nothing is split. The next call may overwrite the result.
        """
        forward = self.ranks.now
        if forward is None or (self.ranks.axis.size == 1 and not (self.joint.masked or masks.is_by_key(mask, len(q)))):
            return _local(q, k, v, mask, scale)
        if self.joint.whole_queries:
            return self._of_whole(forward, q, k, v, mask, scale)
        choose = self._named if self.joint.streams else self._inferred
        joined = choose(forward, q.shape[1], k.shape[1], reads)
        if joined is None:
            return _local(q, k, v, mask, scale)
        streams, tokens = joined
        bias = self._bias(forward, mask, streams, tokens, q)
        q, k, v = fitting(q, k, v, scale)
        stream = Given(q, k, v, IDENTITY)
        if forward.adds and bias is not None:
            return self._by_query(forward, tokens, (stream,), bias, q)[0]
        return self.ranks.attend(tokens, q, bias is not None)((stream,), bias)[0]

    def _of_whole(
        self, forward: Forward, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float | None
    ) -> Tensor:
        """Return attention of queries that every rank holds whole to the keys of all ranks."""
        (name,), axis = self.joint.streams, self.ranks.axis
        total = forward.lengths.get(name, 0)
        if Shard(total, axis.size).sizes[axis.rank] != k.shape[1]:
            raise self._unknown(forward)
        if mask is not None:
            raise ValueError(f"got a mask at {self._where}, whose queries are whole on every rank, expected None")
        return whole_queries.attended(self.ranks, *fitting(q, k, v, scale), total)

    def of_streams(
        self,
        streams: Sequence[Stream],
        beside: Callable[[], None] | None = None,
        mask: Tensor | None = None,
        only: str | None = None,
    ) -> tuple[Tensor, ...]:
        """Return attention over all ranks for streams in the order of the plan, in a body's call.

        mask: for all keys; where the plan names masks, those count. only: the name of the one stream that is passed and
        attends to itself. The next call may overwrite the results.
        """
        forward = self.ranks.now
        assert forward is not None
        names = self._streams(forward) if only is None else (only,)
        if not forward.lengths.keys() >= set(names):
            raise self._unknown(forward)
        tokens, (heads, dim), batch, like = self._split(forward, names), *_sizes(streams[0])
        if tokens.sizes[self.ranks.axis.rank] != sum(stream.tokens for stream in streams):
            raise self._unknown(forward)
        q_BlHD = like.new_empty(batch, 0, heads, dim)
        bias = self._bias(forward, mask, names, tokens, q_BlHD)
        if forward.adds and bias is not None:
            return self._by_query(forward, tokens, streams, bias, q_BlHD, beside)
        return self.ranks.attend(tokens, q_BlHD, bias is not None)(streams, bias, beside=beside)

    def _by_query(
        self,
        forward: Forward,
        tokens: JointShard,
        streams: Sequence[Stream],
        bias: Tensor,
        like: Tensor,
        beside: Callable[[], None] | None = None,
    ) -> tuple[Tensor, ...]:
        """Return attention over all ranks with a mask of numbers: queries whose own number is 0 attend without it."""
        merges = f"{self.ranks.plan.strategy.name} merges the results of ranks"
        self.ranks.say(ADDS.format(why=UNLIKE if self.ranks.moves_only else merges))
        projected = [given(stream) for stream in streams]
        plain = [out.clone() for out in self.ranks.attend(tokens, like, False)(projected)]
        outs = self.ranks.attend(tokens, like, True)(projected, bias, beside=beside)
        has_one = masks.of_rank(forward.masks[JOINED] != 0, tokens, self.ranks.axis.rank)
        each = has_one[..., None, None].split([stream.tokens for stream in streams], dim=1)
        return tuple(torch.where(*parts) for parts in zip(each, outs, plain, strict=True))

    def _streams(self, forward: Forward) -> tuple[str, ...]:
        """Return the plan's streams, without those that this call lacks and may lack."""
        return tuple(name for name in self.joint.streams if name in forward.lengths or name not in self.joint.absent)

    def _split(self, forward: Forward, streams: Sequence[str]) -> JointShard:
        shards = tuple(Shard(forward.lengths[name], self.ranks.axis.size) for name in streams)
        padding = forward.padding if self.joint.masked and len(streams) > 1 else 0
        return JointShard(shards, self.ranks.plan.exact, padding)

    def _named(self, forward: Forward, queries: int, keys: int, reads: bool) -> Joined | None:
        """Return the plan's streams, or None for attention of some of them to keys that are whole on every rank.

        queries, keys: their numbers on this rank. An attention besides the joint one (FLUX's of an image to another
        picture) has the queries of one stream, and other numbers of keys. Where a rank has as many keys as another has
        queries, the one could not tell it from a wrong plan, so that both raise the same error.
        """
        rank, streams = self.ranks.axis.rank, self._streams(forward)
        if forward.lengths.keys() >= set(streams):
            tokens = self._split(forward, streams)
            if tokens.sizes[rank] == queries:
                return (streams, tokens) if queries == keys else None
        if self.ranks.axis.size == 1:  # all tokens are here, so that a processor may attend to any of them
            return None
        alone = [self._split(forward, (name,)).sizes for name in forward.lengths]
        if queries == keys or any(sizes[rank] == queries and keys in sizes for sizes in alone):
            raise self._unknown(forward)
        return None

    def _inferred(self, forward: Forward, queries: int, keys: int, reads: bool) -> Joined | None:
        """Return the streams that a plan in diffusers' form joins here, or None for keys that are whole.

        A module that is given no other tokens attends to its own, which are split. One that is given some joins them if
        the plan splits text, and reads them whole otherwise.
        """
        rank, named = self.ranks.axis.rank, tuple(name for name in forward.lengths if not name.isdecimal())
        if not named:  # before the first cut, sequences are whole on every rank
            return None
        choices = dict.fromkeys((named, *((name,) for name in named)))
        every = [(streams, self._split(forward, streams)) for streams in choices]
        joined = next((one for one in every if one[1].sizes[rank] == queries), None)
        if self.ranks.axis.size == 1:
            return joined if queries == keys else None
        if joined is None:
            raise self._unknown(forward)
        streams, sizes = joined[0], joined[1].sizes
        if any(sizes != other.sizes and any(map(eq, sizes, other.sizes)) for _, other in every):
            raise self._unclear("attention", "of streams of which some, but not all, ranks have as many tokens")
        if len(streams) > 1 and self.ranks.plan.exact:
            raise self._unclear("attention", "of several streams in exact mode, which holds their keys in its order")
        if reads and "text" not in named:
            if keys in sizes:
                raise self._unclear("cross-attention", "to as many tokens as a rank has of its own")
            return None
        if reads and streams != named:
            raise self._unclear("cross-attention", "with cuts that split text")
        if queries != keys:
            raise self._unclear("attention", "to other tokens than its own")
        return joined

    def _unknown(self, forward: Forward) -> ValueError:
        """Return an error that is the same on every rank: it has no number of this rank's tokens."""
        lengths = ", ".join(f"{total} of {name}" for name, total in forward.lengths.items()) or "none"
        expected = " and ".join(self.joint.streams) or "one or all of the streams"
        if (reason := self.ranks.why_of_one(self.joint.streams or sorted(forward.of_one))) is not None:
            return ValueError(reason)
        return ValueError(
            f"got attention at {self._where} to other tokens than each rank's share of {expected}, of which "
            f"{lengths} were cut before it; check the cuts and the streams of its attention"
        )

    def _unclear(self, kind: str, what: str) -> ValueError:
        return ValueError(
            f"got {kind} at {self._where} {what}, expected cuts that say what it joins; write it as "
            f"`seqpar.families.Cuts`, whose attention is explicit, and leave text out that is read whole"
        )

    def _bias(
        self, forward: Forward, mask: Tensor | None, streams: Sequence[str], tokens: JointShard, q: Tensor
    ) -> Tensor | None:
        """Return the key mask in the order of the keys; it is converted once for all blocks."""
        rows, dtype = len(q), q.dtype
        if self.joint.masked:
            key = tuple(streams), dtype
            if key not in forward.converted:
                bias = masks.from_streams(forward.masks, streams, tokens, dtype)
                if bias is not None and len(bias) not in (1, rows):
                    raise ValueError(
                        f"got masks of {len(bias)} rows for {rows}, expected a row for each, or one for all"
                    )
                forward.converted[key] = None, bias
            return forward.converted[key][1]
        if mask is None:
            return None
        if len(streams) > 1 and not self.joint.streams:
            raise ValueError(
                f"got a mask at {self._where} for the joined tokens of {', '.join(streams)}, expected their order; "
                f"write the cuts as `seqpar.families.Cuts`, whose `Joint` names it"
            )
        place = mask.data_ptr(), mask.shape, mask.stride(), mask.dtype, tuple(streams), dtype
        if place not in forward.converted:  # the mask is kept too, so that its address stays its own
            forward.converted[place] = mask, masks.from_whole(mask, rows, tokens, dtype)
        return forward.converted[place][1]


def fitting(q: Tensor, k: Tensor, v: Tensor, scale: float | None) -> tuple[Tensor, Tensor, Tensor]:
    """Return q, k and v (B, l, heads, D) for a local attention, which scales by D^-1/2 and reads contiguous heads."""
    default = q.shape[-1] ** -0.5
    if scale is not None and not isclose(scale, default, rel_tol=1e-12):
        q = q * (scale / default)
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    return q, k, v


def _sizes(stream: Stream) -> tuple[tuple[int, int], int, Tensor]:
    """Return the query heads and head dim of a stream, its batch rows, and one of its tensors."""
    if isinstance(stream, Given):
        return (stream.q.shape[2], stream.q.shape[3]), len(stream.q), stream.q
    heads = stream.heads + 2 * stream.kv_heads
    return (stream.heads, len(stream.weight) // heads), len(stream.x), stream.x


def _local(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float | None) -> Tensor:
    """Return attention to keys that are whole on every rank, as diffusers computes it by default."""
    if mask is not None and mask.dim() == 2 and len(mask) == len(q):  # otherwise it has a row for each query
        mask = mask[:, None, None]
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    grouped = q.shape[1] != k.shape[1]
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=grouped)
    return out.transpose(1, 2)
