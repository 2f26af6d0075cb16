"""`SplitAttention`: the attention that a diffusers transformer's processors call, over the tokens of all ranks.

Processors call torch's `scaled_dot_product_attention`, themselves or by diffusers' dispatcher; it is replaced while
they run (`seats.py`).
When it wins: modules and processors stay unchanged; two exchanges an attention, or one, for any number of tokens and
heads.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from copy import copy
from dataclasses import dataclass
from functools import cache, wraps
from math import isclose
from operator import eq
from typing import Any

import torch
import torch.nn.functional as F
from diffusers.hooks._helpers import AttentionProcessorRegistry
from diffusers.models import attention_processor
from diffusers.models.attention_dispatch import AttentionBackendName
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from seqpar.attention._streams import given
from seqpar.families._cuts import Joint
from seqpar.families._masks import JOINED, is_by_key
from seqpar.families._processors import OWN, own_of
from seqpar.mesh.exact import linear
from seqpar.mesh.shard import JointShard, Shard
from seqpar.transformer import forward as whole_queries
from seqpar.transformer import masks
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
        if forward is None or (self.ranks.axis.size == 1 and not (self.joint.masked or is_by_key(mask, len(q)))):
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


ASKED = "_attention_backend"  # the attribute of a processor that holds the backend that a user has set
CARRIED = frozenset((OWN, ASKED, "_seqpar_attention", "_seqpar_skips", "_seqpar_path"))  # what ours have besides
PAG = "its mask lets each token of the image read itself alone, by its place among all of them"
# processors that read keys by their place in the whole image, of which each rank has a part -> (name, why)
UNSPLIT: dict[type, tuple[str, str]] = {
    attention_processor.SD3IPAdapterJointAttnProcessor2_0: (
        "SD3's IP-adapter",
        "its attention to the picture also reads the image's keys, of which each rank has a part; "
        "call unload_ip_adapter()",
    ),
    attention_processor.PAGJointAttnProcessor2_0: ("PAG's PAGJointAttnProcessor2_0", f"{PAG}; draw without PAG"),
    attention_processor.PAGCFGJointAttnProcessor2_0: ("PAG's PAGCFGJointAttnProcessor2_0", f"{PAG}; draw without PAG"),
}


@dataclass
class Seat:
    """An attention module, and the processor that it has in place of its own."""

    path: str
    module: Any
    attention: SplitAttention
    ours: Any = None

    def refresh(self) -> None:
        """Follow a processor that was replaced; ValueError for one that cannot be split, or an attention backend."""
        processor = getattr(self.module, "processor", None)
        refuse_backend(processor)
        if processor is None or processor is not self.ours:
            if self.attention.ranks.axis.size > 1:
                _refuse_unsplit(processor)
            self.module.processor = self.ours = self._ours_for(processor)
        self.ours._seqpar_attention, self.ours._seqpar_skips = self.attention, _skips_scores(self.module)
        vars(self.ours).pop(ASKED, None)  # the backend of our class counts again

    def _ours_for(self, processor: Any) -> Any:
        """Return what replaces a processor; ValueError for an object of which no class can be derived.

        It is a copy, because one processor may serve several modules, which need not join the ranks alike.
        """
        own, replaces = own_of(processor), self.attention.joint.processor
        if not callable(own):
            raise self._not_plain(own)
        try:
            ours: Any = copy(replaces() if replaces else own)
            ours.__class__, ours._seqpar_path = _around(type(ours)), self.path
        except (TypeError, AttributeError) as error:  # Python refuses to set its class or its attributes
            raise self._not_plain(own) from error
        vars(ours)[OWN] = own  # not by setattr: a processor that is a module would count the other as its part
        return ours

    def _not_plain(self, own: Any) -> ValueError:
        name = getattr(own, "__name__", type(own).__name__)
        return ValueError(
            f"got processor {name} at {self.path} of {type(self.module).__name__}, expected an object of a plain class "
            f"with a __call__, without __slots__, and not frozen; write it as one, and set it as the module's processor"
        )

    def leave(self) -> None:
        """Give the module its own processor back, with settings that were changed on ours."""
        if not hasattr(self.module, "processor"):  # it was refused
            return
        processor = self.module.processor
        own = own_of(processor)
        if own is not processor and self.attention.joint.processor is None:
            vars(own).update({name: value for name, value in vars(processor).items() if name not in CARRIED})
        self.module.processor = own


@cache
def _around(kind: type) -> type:
    """Return a class that runs a processor inside of `Around`, with the same parameters: attention modules read them.

    What diffusers knows of a processor, by its class, holds for ours. Its dispatcher calls torch's attention, whatever
    is set elsewhere.
    """

    # its own ones read a result before they call attention again, and never call it for whole keys alone
    foreign = kind.__module__.partition(".")[0] not in ("diffusers", "seqpar")

    @wraps(kind.__call__)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        attention: SplitAttention = self._seqpar_attention
        attention.reached = False
        with Around(attention, self._seqpar_skips, foreign):
            out = kind.__call__(self, *args, **kwargs)
        skips = attention.joint.skipped_by in kwargs and kwargs[attention.joint.skipped_by]
        is_right = attention.reached or not attention.splits or skips
        if not is_right:
            raise missed(kind.__name__, self._seqpar_path)
        return out

    ours = type(kind.__name__, (kind,), {"__call__": call, ASKED: AttentionBackendName.NATIVE})
    with suppress(ValueError):  # where diffusers knows nothing of this class
        AttentionProcessorRegistry.register(ours, AttentionProcessorRegistry.get(kind))
    return ours


class Around(TorchFunctionMode):
    """Replaces torch's `scaled_dot_product_attention` by split attention while a processor runs.

    skips: whether attention returns its values, as where diffusers skips its scores. foreign: whether it is a user's
    processor, which may call attention again before it has read a result, and for whole keys alone.
    """

    def __init__(self, attention: SplitAttention, skips: bool, foreign: bool) -> None:
        super().__init__()
        self._attention, self._skips, self._foreign = attention, skips, foreign

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """See `TorchFunctionMode`."""
        if func is Tensor.reshape and not kwargs and not args[0].numel():
            return _reshaped(*args)
        if func is not F.scaled_dot_product_attention:
            return func(*args, **(kwargs or {}))
        attention = self._attention
        q, k, v, mask, scale = arguments_of(*args, **(kwargs or {}))
        own = q.shape[1] == k.shape[1]
        if own or attention.joint.whole_queries or not (self._foreign and attention.joint.streams):
            attention.reached = True
        if self._skips and own:
            return v.transpose(1, 2)
        out = attention(q, k, v, mask, scale, attention.reads)
        return (out.clone() if self._foreign else out).transpose(1, 2)  # the next call overwrites it


def _reshaped(x: Tensor, *sizes: Any) -> Tensor:
    """Return a tensor without elements in another shape; torch refuses one with 0 and -1, as Qwen-Image's rotary has.

    The -1 stands for what it would be with one token in place of none.
    """
    shape = sizes if isinstance(sizes[0], int) else sizes[0]
    if 0 not in shape:
        return x.reshape(shape)
    before, after = (math.prod([max(size, 1) for size in each]) for each in (x.shape, shape))  # -1 and 0 count as 1
    return x.reshape([before // after if size == -1 else size for size in shape])


def arguments_of(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,  # shapes tell it
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, float | None]:
    """Return q, k, v as (B, l, H, D), mask and scale, of the arguments of `scaled_dot_product_attention`."""
    if dropout_p or is_causal:
        raise ValueError(
            f"got attention with dropout_p={dropout_p}, is_causal={is_causal}, expected neither: split attention is "
            f"for inference with attention to all tokens; call the transformer's eval() first"
        )
    q, k, v = (_cast(x).transpose(1, 2) for x in (query, key, value))
    return q, k, v, attn_mask, scale


def _cast(x: Tensor) -> Tensor:
    """Return a tensor in the dtype of the caller's autocast, as torch's own attention does; fp64 stays."""
    if x.dtype == torch.float64 or not torch.is_autocast_enabled(x.device.type):
        return x
    return x.to(torch.get_autocast_dtype(x.device.type))


def missed(name: str, path: str) -> ValueError:
    """Return the error of a processor or module that has computed attention without split attention."""
    return ValueError(
        f"got {name} at {path}, whose attention is to the tokens of its own rank, expected one to those of all ranks; "
        f"write it as a processor with torch's F.scaled_dot_product_attention or diffusers' dispatch_attention_fn, or "
        f"use cfg= or data= ranks in place of those that split the sequence"
    )


def _skips_scores(module: Any) -> bool:
    """Return whether diffusers lets a module's attention return its values (`LayerSkipConfig`, for PAG).

    Its hook replaces torch's attention while the module runs, which ours would not notice.
    """
    registry = vars(module).get("_diffusers_hook")
    if registry is None:
        return False
    return any(getattr(hook, "skip_attention_scores", False) for hook in registry.hooks.values())


def _refuse_unsplit(processor: Any) -> None:
    """Raise ValueError for a processor that cannot be split, although nothing in its call tells so."""
    for kind, (name, reason) in UNSPLIT.items():
        if isinstance(processor, kind):
            raise ValueError(
                f"got {name} on several ranks, expected none: {reason}, or use cfg= or data= ranks instead"
            )


def refuse_backend(processor: Any) -> None:
    """Raise ValueError if a user has set an attention backend, which a parallelized transformer does not use."""
    asked = getattr(processor, "__dict__", {}).get(ASKED)
    if asked is not None:
        raise ValueError(
            f"got attention backend {getattr(asked, 'value', asked)} for a parallelized transformer, expected none; "
            f"call its reset_attention_backend(), and name the attention with local= of parallelize"
        )


def refuse_backends(module: nn.Module) -> None:
    """Raise ValueError if an attention backend is set in any of a transformer's processors."""
    for one in module.modules():
        refuse_backend(getattr(one, "processor", None))


class Exactly(TorchFunctionMode):
    """Replaces torch's attention and linear layers while a transformer runs.

    Attention of split queries to keys that are whole on every rank is the planned local one, because torch's own may
    choose its tiles by the number of queries. Linear layers read contiguous rows, because torch adds the bias of others
    after it has rounded the product, and only the tokens of several ranks lie apart; very few rows become more.
    """

    def __init__(self, ranks: Ranks) -> None:
        super().__init__()
        self._ranks = ranks

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """See `TorchFunctionMode`."""
        options = kwargs or {}
        if func is F.linear:
            return linear(*args, **options)
        if func is F.scaled_dot_product_attention and not options.get("is_causal"):
            out = self._attention(*arguments_of(*args, **options))
            return func(*args, **options) if out is None else out.transpose(1, 2)
        return func(*args, **options)

    def _attention(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float | None) -> Tensor | None:
        """Return attention (B, l, H, D), or None for a mask that differs between queries, which then are whole, too."""
        if mask is None or (mask.dim() > 2 and is_by_key(mask, len(q))):
            return self._attended(q, k, v, mask, scale)
        if mask.dim() != 4 or mask.shape[2] > 1:
            return None
        # a mask for each head, as diffusers repeats them: each head becomes a row of the batch
        batch, _, heads, _ = q.shape
        q, k, v = (x.repeat_interleave(heads // x.shape[2], 2).transpose(1, 2).flatten(0, 1) for x in (q, k, v))
        rows = mask.expand(batch, heads, 1, -1).flatten(0, 1)
        out = self._attended(q[:, :, None], k[:, :, None], v[:, :, None], rows, scale)
        return out[:, :, 0].unflatten(0, (batch, heads)).transpose(1, 2)

    def _attended(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float | None) -> Tensor:
        whole = JointShard((Shard(k.shape[1], 1),))
        bias = None if mask is None else masks.from_whole(mask, len(q), whole, q.dtype)
        return self._ranks.local(q, bias is not None)(*fitting(q, k, v, scale), bias)[0]
