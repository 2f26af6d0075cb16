"""The attention modules that join the ranks, with processors that compute by split attention in place of their own.

Every processor, diffusers' or a user's, gets a class that derives from its own and runs it inside of `Around`, which
replaces torch's attention. It also checks that the processor has called it: an attention that is written by hand would
see this rank's tokens only.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from copy import copy
from dataclasses import dataclass
from functools import cache, wraps
from typing import Any

import torch
import torch.nn.functional as F
from diffusers.hooks._helpers import AttentionProcessorRegistry
from diffusers.models import attention_processor
from diffusers.models.attention_dispatch import AttentionBackendName
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from seqpar.families._processors import OWN, own_of
from seqpar.transformer.attention import SplitAttention

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
