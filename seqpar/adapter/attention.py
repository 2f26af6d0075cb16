"""`SplitAttention`: the attention that a diffusers transformer's processors call, over the tokens of all ranks.

It gets to a processor in one of two ways. Most processors call diffusers' dispatcher with the backend and the parallel
config that they carry; ours is a backend there, and the processor's parallel config is a `SplitAttention`. Others call
torch's `scaled_dot_product_attention`, which is replaced while they run (`seats.py`).
When it wins: modules and processors stay unchanged; two exchanges an attention, or one, for any number of tokens and
heads.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import isclose
from operator import eq

import torch
import torch.nn.functional as F
from diffusers.models.attention_dispatch import AttentionBackendName, _AttentionBackendRegistry
from torch import Tensor

from seqpar.adapter import masks, ops
from seqpar.adapter.cuts import Joint
from seqpar.adapter.forward import Forward, Ranks
from seqpar.protocols import Given, Prepare
from seqpar.shard import JointShard, Shard

IDENTITY = Prepare()

Joined = tuple[tuple[str, ...], JointShard]
"""The streams that an attention joins, and their split."""


class SplitAttention:
    """Attention of some streams of this rank to those of all ranks, for every module that joins the same streams.

    reads: whether the module that runs now was given tokens to attend to besides its own. It matters where a plan does
    not name the streams: ranks whose numbers of tokens differ could not tell from them alone, and alike, which
    attention exchanges something. foreign: whether a user's processor runs, which may call it again before it has read
    the result, and for whole keys alone. reached: whether the processor has called it for split tokens.
    """

    def __init__(self, ranks: Ranks, joint: Joint, where: str) -> None:
        self.ranks, self.joint, self._where = ranks, joint, where
        self.reads = self.foreign = self.reached = False
        self.values = Values(self)
        self._reading = Reading(self)
        self._number, self._reading_number = ops.NUMBERS.add(self), ops.NUMBERS.add(self._reading)

    @property
    def splits(self) -> bool:
        """Return whether tokens are split now: in a body's call, on several ranks."""
        return self.ranks.now is not None and self.ranks.axis.size > 1

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float | None) -> Tensor:
        """Return attention's output (B, l, H, D); q (B, l, H, D), k and v (B, l, G, D), and a mask for all keys."""
        q, k, v = _cast(q), _cast(k), _cast(v)
        if not (self.foreign and self.joint.streams) or q.shape[1] == k.shape[1]:
            self.reached = True
        if torch.compiler.is_compiling():
            number = self._reading_number if self.reads else self._number  # a bool is no index for torch.compile
            return ops.attention(q, k, v, None if self.joint.masked else mask, scale, number)
        out = self.compute(q, k, v, mask, scale, self.reads)
        return out.clone() if self.foreign else out  # the next call overwrites it

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float | None) -> Tensor:
        """Compute attention of a module's own tokens; see `seqpar.adapter.ops`."""
        return self.compute(q, k, v, mask, scale, False)

    def compute(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float | None, reads: bool) -> Tensor:
        """Compute it over all ranks, or locally to keys that are whole on every rank; all ranks decide alike.

        Outside of a body's call, where nothing is split, it is local, too.
        """
        now = self.ranks.now
        if now is None or (self.ranks.axis.size == 1 and not (self.joint.masked or masks.is_by_key(mask, len(q)))):
            return _local(q, k, v, mask, scale)
        choose = self._named if self.joint.streams else self._inferred
        joined = choose(now, q.shape[1], k.shape[1], reads)
        if joined is None:
            return _local(q, k, v, mask, scale)
        streams, tokens = joined
        bias = self._bias(now, mask, streams, tokens, q)
        default = q.shape[-1] ** -0.5
        if scale is not None and not isclose(scale, default, rel_tol=1e-12):
            q = q * (scale / default)
        q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
        return self.ranks.attend(tokens, q, bias is not None)((Given(q, k, v, IDENTITY),), bias)[0]

    def _split(self, now: Forward, streams: Sequence[str]) -> JointShard:
        return JointShard(tuple(Shard(now.lengths[name], self.ranks.axis.size) for name in streams))

    def _named(self, now: Forward, queries: int, keys: int, reads: bool) -> Joined | None:
        """Return the plan's streams, or None for attention of some of them to keys that are whole on every rank.

        queries, keys: their numbers on this rank. An attention besides the joint one (FLUX's of an image to another
        picture) has the queries of one stream, and other numbers of keys. Where a rank has as many keys as another has
        queries, the one could not tell it from a wrong plan, so that both raise the same error.
        """
        rank, streams = self.ranks.axis.rank, self.joint.streams
        if now.lengths.keys() >= set(streams):
            tokens = self._split(now, streams)
            if tokens.sizes[rank] == queries:
                return (streams, tokens) if queries == keys else None
        if self.ranks.axis.size == 1:  # all tokens are here, so that a processor may attend to any of them
            return None
        alone = [self._split(now, (name,)).sizes for name in now.lengths]
        if queries == keys or any(sizes[rank] == queries and keys in sizes for sizes in alone):
            raise self._unknown(now)
        return None

    def _inferred(self, now: Forward, queries: int, keys: int, reads: bool) -> Joined | None:
        """Return the streams that a plan in diffusers' form joins here, or None for keys that are whole.

        A module that is given no other tokens attends to its own, which are split. One that is given some joins them if
        the plan splits text, and reads them whole otherwise.
        """
        rank, named = self.ranks.axis.rank, tuple(name for name in now.lengths if not name.isdecimal())
        choices = dict.fromkeys((named, *((name,) for name in named))) if named else ()
        every = [(streams, self._split(now, streams)) for streams in choices]
        found = next((one for one in every if one[1].sizes[rank] == queries), None)
        if self.ranks.axis.size == 1:
            return found if queries == keys else None
        if found is None:
            raise self._unknown(now)
        streams, sizes = found[0], found[1].sizes
        if any(sizes != other.sizes and any(map(eq, sizes, other.sizes)) for _, other in every):
            raise self._unclear("attention", "of streams of which some, but not all, ranks have as many tokens")
        if reads and "text" not in named:
            if keys in sizes:
                raise self._unclear("cross-attention", "to as many tokens as a rank has of its own")
            return None
        if reads and streams != named:
            raise self._unclear("cross-attention", "in a plan that splits text")
        if queries != keys:
            raise self._unclear("attention", "to other tokens than its own")
        return found

    def _unknown(self, now: Forward) -> ValueError:
        """Return an error that is the same on every rank: it has no number of this rank's tokens."""
        told = ", ".join(f"{total} of {name}" for name, total in now.lengths.items()) or "none"
        expected = " and ".join(self.joint.streams) or "one or all of the streams"
        return ValueError(
            f"got attention at {self._where} to other tokens than each rank's share of {expected}, of which "
            f"{told} were cut before it; check the plan's cuts and the streams of its attention"
        )

    def _unclear(self, kind: str, what: str) -> ValueError:
        return ValueError(
            f"got {kind} at {self._where} {what}, expected a plan that says what it joins; write it as "
            f"`seqpar.adapter.cuts.Cuts`, whose attention is explicit, and leave text out that is read whole"
        )

    def _bias(
        self, now: Forward, mask: Tensor | None, streams: Sequence[str], tokens: JointShard, q: Tensor
    ) -> Tensor | None:
        """Return the key mask in the order of the ranks; it is converted once for all blocks."""
        rows, dtype = len(q), q.dtype
        if self.joint.masked:
            key = tuple(streams), dtype
            if key not in now.converted:
                now.converted[key] = None, masks.from_streams(now.masks, streams, tokens, dtype)
            return now.converted[key][1]
        if mask is None:
            return None
        if len(streams) > 1 and not self.joint.streams:
            raise ValueError(
                f"got a mask at {self._where} for the joined tokens of {', '.join(streams)}, expected their order; "
                f"write the plan as `seqpar.adapter.cuts.Cuts`, whose `Joint` names it"
            )
        place = mask.data_ptr(), mask.shape, mask.stride(), mask.dtype, tuple(streams), dtype
        if place not in now.converted:  # the mask is kept too, so that its address stays its own
            now.converted[place] = mask, masks.from_whole(mask, rows, tokens, dtype)
        return now.converted[place][1]


class Values:
    """What a processor computes by where diffusers skips the scores of its attention: the output is the value."""

    def __init__(self, attention: SplitAttention) -> None:
        self._attention, self.foreign, self.reached = attention, False, False

    @property
    def splits(self) -> bool:
        """Return whether tokens are split now."""
        return self._attention.splits

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float | None) -> Tensor:
        """Return the value (B, l, G, D), or attention to keys that are whole, whose scores diffusers keeps."""
        if q.shape[1] != k.shape[1]:
            return self._attention(q, k, v, mask, scale)
        self.reached = True
        return v


class Reading:
    """What a compiled block calls for the attention of a module that was given tokens besides its own."""

    def __init__(self, attention: SplitAttention) -> None:
        self._attention = attention

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float | None) -> Tensor:
        """Compute it; see `seqpar.adapter.ops`."""
        return self._attention.compute(q, k, v, mask, scale, True)


def _cast(x: Tensor) -> Tensor:
    """Return a tensor in the dtype of the caller's autocast, as torch's own attention does; fp64 stays."""
    if x.dtype == torch.float64 or not torch.is_autocast_enabled(x.device.type):
        return x
    return x.to(torch.get_autocast_dtype(x.device.type))


def _local(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float | None) -> Tensor:
    """Return attention to keys that are whole on every rank, as diffusers computes it by default."""
    if mask is not None and mask.dim() == 2 and len(mask) == len(q):  # otherwise it has a row for each query
        mask = mask[:, None, None]
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    grouped = q.shape[1] != k.shape[1]
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=grouped)
    return out.transpose(1, 2)


# The dispatcher's backend --------------------------------------------------------------------------------------


def _backend() -> AttentionBackendName:
    """Return our member of the dispatcher's names of backends; the enum is closed, so the member is added to it."""
    name, value = "SEQPAR", "seqpar"
    if value not in AttentionBackendName._value2member_map_:
        member = str.__new__(AttentionBackendName, value)
        member._name_, member._value_ = name, value
        AttentionBackendName._member_map_[name] = member
        AttentionBackendName._value2member_map_[value] = member
        AttentionBackendName._member_names_.append(name)
        _AttentionBackendRegistry.register(member)(dispatched)
    return AttentionBackendName(value)


def dispatched(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    _parallel_config: SplitAttention | Values | None = None,
) -> Tensor:
    """Return attention for diffusers' dispatcher, (B, l, H, D); a call without our config is local."""
    refuse_training(dropout_p, is_causal)
    if _parallel_config is None:
        return _local(query, key, value, attn_mask, scale)
    return _parallel_config(query, key, value, attn_mask, scale)


def refuse_training(dropout_p: float, is_causal: bool) -> None:
    """Raise ValueError for attention that drops weights at random, or hides later tokens."""
    if dropout_p or is_causal:
        raise ValueError(
            f"got attention with dropout_p={dropout_p}, is_causal={is_causal}, expected neither: split attention is "
            f"for inference with attention to all tokens; call the transformer's eval() first"
        )


BACKEND = _backend()
