"""The attention modules of a plan, with processors that compute by split attention in place of their own.

diffusers' processors that call its dispatcher are copied and told where to compute. All other processors, a user's
among them, get a class that derives from theirs and runs them inside of `Around`. It also checks that their attention
was split attention: one that is written by hand would see this rank's tokens only.
"""

from __future__ import annotations

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
from torch import Tensor
from torch.overrides import TorchFunctionMode

from seqpar.adapter import ops
from seqpar.adapter.attention import BACKEND, SplitAttention, Values, refuse_training
from seqpar.adapter.processors import OWN, own_of

CARRIED = frozenset((OWN, "_parallel_config", "_attention_backend", "seqpar_attention", "_seqpar_path"))
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
    call: Any = None  # what its class computes, which may be replaced, too

    def refresh(self) -> None:
        """Follow a processor that was replaced; ValueError for one that cannot be split, or an attention backend."""
        processor = getattr(self.module, "processor", None)
        refuse_backend(processor)
        if processor is not self.ours or type(processor).__call__ is not self.call:
            if self.attention.ranks.axis.size > 1:
                _refuse_unsplit(processor)
            self.module.processor = self.ours = self._carrying(processor)
            self.call = type(self.ours).__call__
        wanted = self.attention.values if _skips_scores(self.module) else self.attention
        if not _is_carried(self.ours, wanted):
            _carry(self.ours, wanted)

    def _carrying(self, processor: Any) -> Any:
        """Return what replaces a processor; ValueError for an object of which no class can be derived."""
        own, replaced = own_of(processor), self.attention.joint.processor
        if callable(own):
            try:
                return _carrying(own, replaced() if replaced else own, self.path)
            except (TypeError, AttributeError) as error:  # Python refuses to set its class or its attributes
                raise self._not_plain(own) from error
        raise self._not_plain(own)

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


def _carrying(own: Any, processor: Any, path: str) -> Any:
    """Return a copy of a processor for an attention module; own: the module's own.

    A copy, because one processor may serve several modules, which need not join the ranks alike.
    """
    made = copy(processor)
    if not _dispatches(processor):  # first, because it fails for a function, which is no copy
        made.__class__, made._seqpar_path = _around(type(processor)), path
    vars(made)[OWN] = own  # not by setattr: a processor that is a module would count the other as its part
    return made


def _dispatches(processor: Any) -> bool:
    """Return whether a processor is known to compute all attention by diffusers' dispatcher.

    A user's class may have only inherited what the dispatcher is told, and a user may replace the call of a class.
    """
    kind = type(processor)
    written = written_in(kind.__call__)
    return _root(kind) == written and written in ("diffusers", "seqpar") and hasattr(processor, "_parallel_config")


def written_in(function: Any) -> str:
    """Return the package whose code a function or a method is: `functools.wraps` changes its `__module__` only."""
    return getattr(function, "__globals__", {}).get("__name__", "").partition(".")[0]


def _root(kind: type) -> str:
    return kind.__module__.partition(".")[0]


@cache
def _around(kind: type) -> type:
    """Return a class that runs a processor inside of `Around`, with the same parameters: attention modules read them.

    There is one for each class of processors, so that compiled blocks share their code. What diffusers knows of a
    processor, by its class, holds for ours.
    """

    foreign = _root(kind) != "diffusers"  # its own ones read a result before they call attention again

    @wraps(kind.__call__)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        attention: SplitAttention | Values = self.seqpar_attention
        attention.reached, attention.foreign = False, foreign
        try:
            with Around(attention):
                out = kind.__call__(self, *args, **kwargs)
        finally:
            attention.foreign = False
        return out if attention.reached or not attention.splits else missed(out, kind.__name__, self._seqpar_path)

    ours = type(kind.__name__, (kind,), {"__call__": call})
    with suppress(ValueError):  # where diffusers knows nothing of this class
        AttentionProcessorRegistry.register(ours, AttentionProcessorRegistry.get(kind))
    return ours


class Around(TorchFunctionMode):
    """Replaces torch's `scaled_dot_product_attention` by split attention while a processor runs."""

    def __init__(self, attention: SplitAttention | Values) -> None:
        super().__init__()
        self._attention = attention

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """See `TorchFunctionMode`."""
        if func is F.scaled_dot_product_attention:
            known = {name: value for name, value in (kwargs or {}).items() if name != "enable_gqa"}  # shapes tell it
            return _called(self._attention, *args, **known)
        if func is Tensor.unflatten:  # compilers cannot trace what this method of Python calls inside of a mode
            func = torch.unflatten
        return func(*args, **(kwargs or {}))


def _called(
    attention: SplitAttention | Values,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
) -> Tensor:
    """Return attention with the parameters of `scaled_dot_product_attention`, whose tensors are (B, H, l, D)."""
    refuse_training(dropout_p, is_causal)
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    return attention(q, k, v, attn_mask, scale).transpose(1, 2)


def missed(out: Any, name: str, path: str) -> Any:
    """Raise ValueError for a processor or module without split attention; compiled code does so when it runs."""
    message = (
        f"got {name} at {path}, whose attention is to the tokens of its own rank, expected one to those of all ranks; "
        f"write it as a processor with torch's F.scaled_dot_product_attention or diffusers' dispatch_attention_fn, or "
        f"use cfg= or data= ranks in place of those that split the sequence"
    )
    if not torch.compiler.is_compiling():
        raise ValueError(message)
    return ops.refuse(out, message) if isinstance(out, Tensor) else (ops.refuse(out[0], message), *out[1:])


def _carry(processor: Any, attention: SplitAttention | Values) -> None:
    """Let a processor compute by `attention`."""
    processor.seqpar_attention = attention
    if hasattr(processor, "_parallel_config"):
        processor._parallel_config, processor._attention_backend = attention, BACKEND


def _is_carried(processor: Any, attention: SplitAttention | Values) -> bool:
    """Return whether a processor computes by `attention`; a backend that was reset is removed with ours."""
    if getattr(processor, "seqpar_attention", None) is not attention:
        return False
    return not hasattr(processor, "_parallel_config") or processor._attention_backend is BACKEND


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
    named = getattr(processor, "__dict__", {}).get("_attention_backend")
    if named is not None and named is not BACKEND:
        raise ValueError(
            f"got attention backend {getattr(named, 'value', named)} for a parallelized transformer, expected none; "
            f"call its reset_attention_backend(), and name the attention with local= of parallelize"
        )
