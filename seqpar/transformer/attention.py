"""Attention of a transformer over the tokens of all ranks, in place of torch's.

The attention modules of diffusers call torch's `scaled_dot_product_attention`, themselves or through diffusers'
dispatcher. `Override` replaces it while a module runs, so that modules and processors stay unchanged. Cost: one or two
exchanges per attention, for any number of tokens and heads.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from itertools import chain
from math import isclose
from operator import eq
from typing import Any

import torch
import torch.nn.functional as F
from diffusers.hooks.hooks import ModelHook
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from seqpar.attention._streams import given
from seqpar.families._block import Attended8, Input, unrounded
from seqpar.families._cuts import Joint, block_lists, is_attention, parameters
from seqpar.families._find import UNSPLIT
from seqpar.families._masks import JOINED, is_by_key
from seqpar.mesh.exact import linear
from seqpar.mesh.shard import JointShard, Shard
from seqpar.transformer import masks
from seqpar.transformer.foreign import LIBRARIES, home_of_forward
from seqpar.transformer.forward import CallState
from seqpar.transformer.internals import skips_scores
from seqpar.types.protocols import Given, Prepare, Qkv8, Stream

IDENTITY = Prepare()
ADDS = (
    "the mask's floating numbers are added to the scores, as torch does it, which takes a second attention in each "
    "block, because {why}; pass a mask of bool to leave padding out"
)
UNLIKE = "its zeros are not known to be the padding at the end of all texts alike"

OURS = frozenset({"diffusers", "seqpar"})  # packages whose processors are known
PREFIX = "prefix"  # the name of the stream that every rank has whole

Joined = tuple[tuple[str, ...], JointShard]
"""The streams that an attention joins, and their split."""


class Override(TorchFunctionMode):
    """While entered, calls other functions in place of some functions of torch. functions: of torch -> the other."""

    def __init__(self, functions: Mapping[Callable[..., Any], Callable[..., Any]]) -> None:
        super().__init__()
        self._functions = functions

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        return self._functions.get(func, func)(*args, **(kwargs or {}))


class ShardedAttention:
    """Attention of some streams of this rank to the same streams of all ranks, for all modules that join them."""

    def __init__(self, state: CallState, joint: Joint, where: str) -> None:
        self.state, self.joint, self._where = state, joint, where
        # whether the module that runs now was given tokens to attend to besides its own: where a plan does not name the
        # streams, ranks whose numbers of tokens differ could not tell from these which attention exchanges something
        self.reads = False
        self.reached = False  # whether the module that runs now has called it for split tokens

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Tensor | None,
        scale: float | None,
        eight: Qkv8 | None = None,
        is_causal: bool = False,
    ) -> Tensor:
        """Return attention (B, l, H, D) over all ranks, or to keys that are whole on every rank.

        q (B, l, H, D), k and v (B, l, G, D), and a mask for all keys. eight: as for `of_streams`. is_causal: for a
        prefix. All ranks decide identically. The next call may overwrite the result.
        """
        if self.joint.after_prefix and (is_causal or k.shape[1] <= self.state.prefix):
            return _local(q, k, v, mask, scale, is_causal)
        if self.state.axis.size == 1 and eight is None and not (self.joint.masked or is_by_key(mask, len(q))):
            return _local(q, k, v, mask, scale)
        if self.joint.whole_queries:  # every rank holds the queries whole
            (name,), axis = self.joint.streams, self.state.axis
            total = self.state.lengths.get(name, 0)
            if Shard(total, axis.size).sizes[axis.rank] != k.shape[1]:
                raise self._unknown()
            if mask is not None:
                raise ValueError(f"A mask at {self._where} is not supported: its queries are whole on every rank")
            return self.state.attend_whole(*fitting(q, k, v, scale), total)
        if self.joint.after_prefix and k.shape[1] > q.shape[1]:
            return self._after_prefix(*fitting(q, k, v, scale), mask)
        choose = self._named if self.joint.streams else self._inferred
        joined = choose(q.shape[1], k.shape[1])
        if joined is None:
            return _local(q, k, v, mask, scale)
        q, k, v = fitting(q, k, v, scale)
        (out,) = self.of_streams((Given(q, k, v, IDENTITY),), mask=mask, joined=joined, eight=eight)
        return unrounded(out).unflatten(2, (q.shape[2], -1))

    def _after_prefix(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        """Return attention to keys that every rank has whole, and to those of all ranks, which follow them.

        Each rank gives the strategy its share of the first keys, with queries of zeros, which are few.
        """
        total, rank = k.shape[1] - q.shape[1], self.state.axis.rank
        prefix = Shard(total, self.state.axis.size)
        streams = replace(self._split(self._streams()), padding=0)
        if streams.sizes[rank] != q.shape[1]:
            raise self._unknown()
        joined = replace(streams, streams=(prefix, *streams.streams))
        names = (PREFIX, *self._streams())
        if prefix.parts == 1:
            bias = self._bias(mask, names, joined, q)
            return self.state.local(q, bias is not None)(q, k, v, bias)[0]
        own, count = prefix.slice(rank), prefix.sizes[rank]
        k, v = (torch.cat([x[:, own], x[:, total:]], dim=1) for x in (k, v))
        q = torch.cat([q.new_zeros(len(q), count, *q.shape[2:]), q], dim=1)
        (out,) = self.of_streams((Given(q, k, v, IDENTITY),), mask=mask, joined=(names, joined))
        return unrounded(out)[:, count:].unflatten(2, (q.shape[2], -1))

    def of_streams(
        self,
        streams: Sequence[Stream],
        beside: Callable[[], None] | None = None,
        mask: Tensor | None = None,
        only: str | None = None,
        joined: Joined | None = None,
        eight: Qkv8 | None = None,
    ) -> tuple[Input, ...]:
        """Return attention (B, l, E) over all ranks for streams in the order of the cuts, inside a sharded forward.

        mask: for all keys; where the cuts name masks, those count. only: the name of the one stream that is passed and
        attends to itself. joined: the streams that the passed one joins, if not those of the cuts. eight: how attention
        of all of them is rounded to 8 bits; calls that it does not fit keep their dtype. The next call may overwrite
        the results.
        """
        names, tokens = joined or self._joined(streams, only)
        first = streams[0]
        if isinstance(first, Given):
            like, groups = first.q, first.k.shape[2]
        else:  # q is computed later
            dim, groups = len(first.weight) // (first.heads + 2 * first.kv_heads), first.kv_heads
            like = first.weight.new_empty(first.x.shape[0], 0, first.heads, dim)
        bias = self._bias(mask, names, tokens, like)
        eight = None if only is not None else self.state.rounding(eight, tokens, like, groups, bias is not None)
        if eight is not None:
            rounded = [replace(stream, prepare=replace(stream.prepare, eight=eight)) for stream in streams]
            outs = self.state.attend(tokens, like, False, True)(rounded, beside=beside)
            return tuple(Attended8(out, eight, like.dtype) for out in outs)
        if bias is None or not self.state.adds:
            outs = self.state.attend(tokens, like, bias is not None)(streams, bias, beside=beside)
            return tuple(out.flatten(2) for out in outs)

        # a mask of numbers that are added: queries whose own number is 0 attend without it
        merges = f"{self.state.plan.strategy.name} merges the results of ranks"
        self.state.say(ADDS.format(why=UNLIKE if self.state.moves_only else merges))
        projected = [given(stream) for stream in streams]
        plain = [out.clone() for out in self.state.attend(tokens, like, False)(projected)]
        outs = self.state.attend(tokens, like, True)(projected, bias, beside=beside)
        has_one = masks.of_rank(self.state.masks[JOINED] != 0, tokens, self.state.axis.rank)
        per_stream = has_one[..., None, None].split([stream.tokens for stream in streams], dim=1)
        return tuple(torch.where(*parts).flatten(2) for parts in zip(per_stream, outs, plain, strict=True))

    def _joined(self, streams: Sequence[Stream], only: str | None) -> Joined:
        names = self._streams() if only is None else (only,)
        if not self.state.lengths.keys() >= set(names):
            raise self._unknown()
        tokens = self._split(names)
        if tokens.sizes[self.state.axis.rank] != sum(stream.tokens for stream in streams):
            raise self._unknown()
        return names, tokens

    def _streams(self) -> tuple[str, ...]:
        # without those that this call lacks and may lack
        lengths = self.state.lengths
        return tuple(name for name in self.joint.streams if name in lengths or name not in self.joint.absent)

    def _split(self, streams: Sequence[str]) -> JointShard:
        shards = tuple(Shard(self.state.lengths[name], self.state.axis.size) for name in streams)
        padding = self.state.padding if self.joint.masked and len(streams) > 1 else 0
        return JointShard(shards, self.state.plan.exact, padding)

    def _named(self, queries: int, keys: int) -> Joined | None:
        """Return the cuts' streams, or None for attention of some of them to keys that are whole on every rank.

        queries, keys: their numbers on this rank. An attention besides the joint one (of an image to an IP-adapter's
        picture) has the queries of one stream, and other numbers of keys. Where a rank has as many keys as another has
        queries, it looks the same as a wrong plan there, so that both raise the same error.
        """
        rank, streams = self.state.axis.rank, self._streams()
        if self.state.lengths.keys() >= set(streams):
            tokens = self._split(streams)
            if tokens.sizes[rank] == queries:
                return (streams, tokens) if queries == keys else None
        if self.state.axis.size == 1:  # all tokens are here, so that a processor may attend to any of them
            return None
        alone = [self._split((name,)).sizes for name in self.state.lengths]
        if queries == keys or any(sizes[rank] == queries and keys in sizes for sizes in alone):
            raise self._unknown()
        return None

    def _inferred(self, queries: int, keys: int) -> Joined | None:
        """Return the streams that a plan in diffusers' form joins here, or None for keys that are whole.

        A module that is given no other tokens attends to its own, which are split. One that is given some joins them if
        the plan splits text, and reads them whole otherwise.
        """
        rank, named = self.state.axis.rank, tuple(name for name in self.state.lengths if not name.isdecimal())
        if not named:  # before the first cut, sequences are whole on every rank
            return None
        choices = dict.fromkeys((named, *((name,) for name in named)))
        splits = [(streams, self._split(streams)) for streams in choices]
        joined = next((choice for choice in splits if choice[1].sizes[rank] == queries), None)
        if self.state.axis.size == 1:
            return joined if queries == keys else None
        if joined is None:
            raise self._unknown()
        streams, sizes = joined[0], joined[1].sizes
        several, whole_text = len(streams) > 1, self.reads and "text" not in named
        few = any(sizes != other.sizes and any(map(eq, sizes, other.sizes)) for _, other in splits)
        for is_unclear, kind, what in (
            (few, "attention", "of streams of which some, but not all, ranks have as many tokens"),
            (several and self.state.plan.exact, "attention", "of several streams in exact mode"),
            (whole_text and keys in sizes, "cross-attention", "to as many tokens as a rank's share"),
            (self.reads and not whole_text and streams != named, "cross-attention", "with cuts that split text"),
            (not whole_text and queries != keys, "attention", "to other tokens than its own"),
        ):
            if is_unclear:
                raise ValueError(
                    f"got {kind} at {self._where} {what}, expected cuts that say what it joins; write it as "
                    f"`seqpar.families.Cuts`, whose attention is explicit, and leave text out that is read whole"
                )
        return None if whole_text else joined

    def _unknown(self) -> ValueError:
        # the same on every rank: without a number of this rank's tokens
        lengths = ", ".join(f"{total} of {name}" for name, total in self.state.lengths.items()) or "none"
        expected = " and ".join(self.joint.streams) or "one or all of the streams"
        if (reason := self.state.why_of_one(self.joint.streams or sorted(self.state.of_one))) is not None:
            return ValueError(reason)
        return ValueError(
            f"got attention at {self._where} to other tokens than each rank's share of {expected}, of which "
            f"{lengths} were cut before it; check the cuts and the streams of its attention"
        )

    def _bias(self, mask: Tensor | None, streams: Sequence[str], tokens: JointShard, q: Tensor) -> Tensor | None:
        """Return the key mask in the order of the keys; it is converted once for all blocks."""
        rows, dtype = len(q), q.dtype
        if self.joint.masked:
            key = tuple(streams), dtype
            if key not in self.state.converted:
                bias = masks.from_streams(self.state.masks, streams, tokens, dtype)
                if bias is not None and len(bias) not in (1, rows):
                    raise ValueError(
                        f"got masks of {len(bias)} rows for {rows}, expected a row for each, or one for all"
                    )
                self.state.converted[key] = None, bias
            return self.state.converted[key][1]
        if mask is None:
            return None
        if len(streams) > 1 and not self.joint.streams:
            raise ValueError(
                f"got a mask at {self._where} for the joined tokens of {', '.join(streams)}, expected their order; "
                f"write the cuts as `seqpar.families.Cuts`, whose `Joint` names it"
            )
        place = mask.data_ptr(), mask.shape, mask.stride(), mask.dtype, tuple(streams), dtype
        if place not in self.state.converted:  # the mask is kept too, so that its address stays its own
            self.state.converted[place] = mask, masks.from_whole(mask, rows, tokens, dtype)
        return self.state.converted[place][1]


def fitting(q: Tensor, k: Tensor, v: Tensor, scale: float | None) -> tuple[Tensor, Tensor, Tensor]:
    """Return q, k and v (B, l, heads, D) for a local attention, which scales by D^-1/2 and reads contiguous heads."""
    default = q.shape[-1] ** -0.5
    if scale is not None and not isclose(scale, default, rel_tol=1e-12):
        q = q * (scale / default)
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    return q, k, v


def _local(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float | None, is_causal: bool = False
) -> Tensor:
    # attention to keys that are whole on every rank, as diffusers computes it by default
    if mask is not None and mask.dim() == 2 and len(mask) == len(q):  # otherwise it has a row for each query
        mask = mask[:, None, None]
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    grouped = q.shape[1] != k.shape[1]
    out = F.scaled_dot_product_attention(q, k, v, mask, is_causal=is_causal, scale=scale, enable_gqa=grouped)
    return out.transpose(1, 2)


# Attention modules ---------------------------------------------------------------------------------------------


class AttentionHook(ModelHook):
    """Runs an attention module inside a sharded forward with sharded attention in place of torch's.

    It is inside all other hooks on the module, because hooks of caches may call no forward.
    """

    def __init__(self, attention: ShardedAttention, module: nn.Module, path: str, eight: Qkv8 | None = None) -> None:
        super().__init__()
        self.attention, self._path, self.eight, names = attention, path, eight, parameters(module)
        tokens = (name for name in ("hidden_states", "encoder_hidden_states") if name in names)
        self._places = [(name, names.index(name)) for name in tokens]
        self._override = Override({F.scaled_dot_product_attention: self._attend, Tensor.reshape: _reshaped})
        self._ours = attention.joint.processor() if attention.joint.processor else None
        self._replacement: Any = None
        self._skips = self.is_foreign = False

    def follow(self, module: nn.Module) -> None:
        """Look at the module's processor, which users may replace; ValueError for one that cannot be sharded."""
        processor = getattr(module, "processor", None)
        home = type(processor).__module__.partition(".")[0]
        by_user = processor is not None and home not in OURS
        refuse_backends(module)
        if self.attention.state.axis.size > 1:
            for kind, (name, reason) in UNSPLIT.items():
                if isinstance(processor, kind):
                    raise ValueError(f"{name} is not supported on several ranks: {reason}, or use cfg= or data= ranks")
            if by_user and self._ours is not None:
                raise ValueError(
                    f"{type(module).__name__} at {self._path} has the processor {_name(processor)}, which is not "
                    f"supported on several ranks: seqpar computes attention of this model by its own processor. Put "
                    f"diffusers' own back, or use cfg= or data= ranks"
                )
        self._replacement = None if by_user else self._ours
        self._skips = skips_scores(module)
        # users' code reads a result before it calls attention again, and never calls it for whole keys alone
        self.is_foreign = not {home_of_forward(module), home} <= OURS

    def compute(self, forward: Callable[..., Any], module: Any, *args: Any, **kwargs: Any) -> Any:
        """Return what the module's own forward returns with sharded attention; ValueError if it did not call it."""
        attention = self.attention
        if not attention.state.active:
            return forward(*args, **kwargs)
        if not attention.joint.streams:
            tokens = [kwargs.get(name, args[at] if at < len(args) else None) for name, at in self._places]
            attention.reads = len(tokens) > 1 and tokens[1] is not None and tokens[1] is not tokens[0]
        attention.reached = False
        if self.is_foreign and attention.state.axis.size > 1 and attention.joint.masked and "attention_mask" in kwargs:
            kwargs["attention_mask"] = None  # it is that of all ranks' tokens, which torch's attention has here
        processor = getattr(module, "processor", None)
        try:
            if self._replacement is not None:  # of models whose own one cannot be sharded
                module.processor = self._replacement
            with self._override:
                out = forward(*args, **kwargs)
        finally:
            if self._replacement is not None:
                module.processor = processor
        skipped = attention.joint.skipped_by in kwargs and kwargs[attention.joint.skipped_by]
        if attention.reached or attention.state.axis.size == 1 or skipped:
            return out
        by = "" if processor is None else f" (processor {_name(processor)})"
        raise ValueError(
            f"{type(module).__name__} at {self._path}{by} attends to one rank's tokens only. Compute its "
            f"attention by torch's F.scaled_dot_product_attention or diffusers' dispatch_attention_fn, or use cfg= or "
            f"data= ranks instead of ranks that split the sequence"
        )

    def _attend(self, *args: Any, **kwargs: Any) -> Tensor:
        attention, is_causal = self.attention, False
        if attention.joint.after_prefix:
            is_causal = kwargs.pop("is_causal", False)
        q, k, v, mask, scale = arguments_of(*args, **kwargs)
        own = q.shape[1] == k.shape[1]
        if own or attention.joint.whole_queries or not (self.is_foreign and attention.joint.streams):
            attention.reached = True
        if self._skips and own:
            return v.transpose(1, 2)
        out = attention(q, k, v, mask, scale, self.eight if attention.state.eight else None, is_causal)
        return (out.clone() if self.is_foreign else out).transpose(1, 2)  # the next call overwrites it


def _name(processor: Any) -> str:
    return getattr(processor, "__name__", type(processor).__name__)


def _reshaped(x: Tensor, *sizes: Any, **kwargs: Any) -> Tensor:
    # torch refuses a shape with 0 and -1 for a tensor without elements, which Qwen-Image's rotary rows have; the -1 is
    # what it would be with one token
    if kwargs or x.numel():
        return x.reshape(*sizes, **kwargs)
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
    enable_gqa: bool = False,  # follows from the shapes
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, float | None]:
    """Return q, k, v as (B, l, H, D), mask and scale, of the arguments of `scaled_dot_product_attention`."""
    if dropout_p or is_causal:
        raise ValueError(
            f"attention with dropout_p={dropout_p}, is_causal={is_causal} is not supported: sharded attention is for "
            f"inference with attention to all tokens; call the transformer's eval() first"
        )
    q, k, v = (_cast(x).transpose(1, 2) for x in (query, key, value))
    return q, k, v, attn_mask, scale


def _cast(x: Tensor) -> Tensor:
    # to the dtype of the caller's autocast, as torch's own attention does; fp64 stays
    if x.dtype == torch.float64 or not torch.is_autocast_enabled(x.device.type):
        return x
    return x.to(torch.get_autocast_dtype(x.device.type))


def refuse_backends(module: nn.Module) -> None:
    """Raise ValueError if a user has set an attention backend, which a parallelized transformer does not use."""
    for part in module.modules():
        backend = getattr(getattr(part, "processor", None), "__dict__", {}).get("_attention_backend")
        if backend is not None:
            raise ValueError(
                f"Attention backend {getattr(backend, 'value', backend)} is not supported by a parallelized "
                f"transformer. Call its reset_attention_backend(), and choose attention with local= of parallelize"
            )


# Exact mode ----------------------------------------------------------------------------------------------------


def exact_mode(state: CallState) -> AbstractContextManager[object]:
    """Return the context in which a transformer has one GPU's bits, if its plan is exact.

    Attention of split queries to keys that are whole on every rank is the planned local one, because torch's own may
    choose its tiles by the number of queries. Linear layers read contiguous rows, because for others torch adds the
    bias after it has rounded the product, and only the tokens of several ranks lie apart; very few rows become more.
    """
    if not state.plan.exact:
        return nullcontext()
    return Override({F.linear: linear, F.scaled_dot_product_attention: partial(_exact_attention, state)})


def _exact_attention(state: CallState, *args: Any, **kwargs: Any) -> Tensor:
    if kwargs.get("is_causal"):
        return F.scaled_dot_product_attention(*args, **kwargs)
    q, k, v, mask, scale = arguments_of(*args, **kwargs)
    if mask is None or (mask.dim() > 2 and is_by_key(mask, len(q))):
        return _by_keys(state, q, k, v, mask, scale).transpose(1, 2)
    if mask.dim() != 4 or mask.shape[2] > 1:  # it differs between queries, which are whole then, too
        return F.scaled_dot_product_attention(*args, **kwargs)
    # a mask for each head, as diffusers repeats them: each head becomes a row of the batch
    batch, _, heads, _ = q.shape
    q, k, v = (x.repeat_interleave(heads // x.shape[2], 2).transpose(1, 2).flatten(0, 1) for x in (q, k, v))
    rows = mask.expand(batch, heads, 1, -1).flatten(0, 1)
    out = _by_keys(state, q[:, :, None], k[:, :, None], v[:, :, None], rows, scale)
    return out[:, :, 0].unflatten(0, (batch, heads))


def _by_keys(state: CallState, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float | None) -> Tensor:
    whole = JointShard((Shard(k.shape[1], 1),))
    bias = None if mask is None else masks.from_whole(mask, len(q), whole, q.dtype)
    return state.local(q, bias is not None)(*fitting(q, k, v, scale), bias)[0]


# Users' own code ------------------------------------------------------------------------------------------------

SOFTMAX = (torch.softmax, F.softmax, Tensor.softmax)


class BlockWatch:
    """Raises ValueError for attention of a rank's tokens to themselves inside of users' own parts of a transformer.

    A wrapper around a block, a block of a user's class or a replaced forward runs on this rank's tokens. That is right
    as long as its attention goes through modules that join the ranks, so that what torch computes is inspected.

    parts: submodules that run code of users, by path. Attention modules in them join the ranks or are local.
    """

    def __init__(self, state: CallState, parts: Mapping[str, nn.Module]) -> None:
        self._state, self._running = state, list[str | None]()
        inside = {id(part): part for whole in parts.values() for part in whole.modules() if is_attention(part)}
        named = [(part, f"{type(part).__name__} at {path}") for path, part in parts.items() if id(part) not in inside]
        self._handles = [hook for part, name in named for hook in self._hooks(part, name)]
        self._handles += [hook for part in inside.values() for hook in self._hooks(part, None)]
        watched = {softmax: partial(self._softmax, softmax) for softmax in SOFTMAX}
        self._override = Override({F.scaled_dot_product_attention: self._attention, **watched})

    def _hooks(self, part: nn.Module, name: str | None) -> Iterator[Any]:
        def begin(*_: Any) -> None:
            self._running.append(name)

        def end(*_: Any) -> None:
            self._running.pop()

        yield part.register_forward_pre_hook(begin)
        yield part.register_forward_hook(end, always_call=True)

    def during(self) -> AbstractContextManager[object]:
        self._running.clear()
        return self._override if self._handles and self._state.axis.size > 1 else nullcontext()

    def remove(self) -> None:
        while self._handles:
            self._handles.pop().remove()

    def _attention(self, query: Tensor, key: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        self._refuse(query.shape[-2], key.shape[-2])
        return F.scaled_dot_product_attention(query, key, *args, **kwargs)

    def _softmax(self, softmax: Callable[..., Tensor], input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if input.dim() > 2:
            self._refuse(*input.shape[-2:])
        return softmax(input, *args, **kwargs)

    def _refuse(self, queries: int, keys: int) -> None:
        # as many queries as keys are a rank's share of a stream, or of all joined ones
        if not self._running or self._running[-1] is None or queries != keys:
            return
        totals = [total for name, total in self._state.lengths.items() if not name.isdecimal()]
        # the shares of all ranks, so that all raise the same error
        shares = [Shard(total, self._state.axis.size).sizes for total in totals]
        if queries in {*chain(*shares), *map(sum, zip(*shares, strict=True))}:
            raise ValueError(
                f"{self._running[-1]} computes attention itself, to the tokens of one rank only. Call the block's own "
                f"attention module, pass cuts= that name this attention, or use cfg= or data= ranks"
            )


def parts_of_users(module: nn.Module) -> dict[str, nn.Module]:
    """Return, by path, members of lists and modules around attention whose forward is neither diffusers' nor torch's.

    Classes of the package that defines the transformer itself count as its own.
    """
    known = (*LIBRARIES, type(module).__module__.partition(".")[0])
    modules = dict(module.named_modules())
    members = (f"{path}.{name}" for path, blocks in block_lists(module) for name in blocks._modules)
    steps = (path.split(".") for path, part in modules.items() if is_attention(part))
    above = (".".join(names[:end]) for names in steps for end in range(1, len(names)))
    paths = dict.fromkeys(path.removeprefix(".") for path in (*members, *above))
    return {path: modules[path] for path in paths if path in modules and home_of_forward(modules[path]) not in known}
