# pyright cannot infer the types of diffusers' and peft's modules
# pyright: reportAttributeAccessIssue=false, reportArgumentType=false, reportCallIssue=false, reportIndexIssue=false
"""What users and diffusers do to a transformer: cases of tests/transformer/test_foreign.py, by name."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial, wraps
from types import MethodType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from diffusers.hooks.hooks import HookRegistry, ModelHook
from diffusers.hooks.layer_skip import LayerSkipConfig, apply_layer_skip
from diffusers.models import attention_processor as theirs
from diffusers.models.attention_dispatch import dispatch_attention_fn
from diffusers.models.embeddings import apply_rotary_emb
from diffusers.models.transformers.transformer_flux import FluxAttnProcessor, FluxIPAdapterAttnProcessor
from diffusers.models.transformers.transformer_wan import WanAttention, WanAttnProcessor
from torch import Tensor, nn
from torch.nn.attention.flex_attention import flex_attention

from tests.support.diffusers_tiny import MODELS
from tests.support.meshes import random

NOTHING = "nothing was raised"
UNREACHED = "attends to one rank's tokens only"
COMPILED = "Compiled modules are not supported"


@dataclass(frozen=True)
class Case:
    """What is done to a transformer. refused: the words of the error where ranks share tokens; None: it is right.

    undo: undoes it, after which the transformer is right again. more: further arguments of the call. calls: how many
    calls are compared.
    """

    model: str
    change: Callable[[Any], object]
    refused: str | None = None
    undo: Callable[[Any], object] | None = None
    more: Callable[[torch.device], dict[str, Any]] = lambda device: {}
    calls: int = 2


# Blocks --------------------------------------------------------------------------------------------------------


def blocks_of(module: Any) -> nn.ModuleList:
    return getattr(module, "blocks", None) or module.transformer_blocks


def mixed(out: Any) -> Any:
    """Return what a block returns with its channels mixed, which a later norm does not undo."""
    if isinstance(out, tuple):
        return tuple(map(mixed, out))
    return None if out is None else out + 0.5 * out.roll(1, dims=-1)  # SD3's last block returns no text


class Held(nn.Module):
    """A user's wrapper that holds its block as torch's wrappers do, and changes what it returns."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return mixed(self.module(*args, **kwargs))


class Hidden(nn.Module):
    """A wrapper that holds its block by another name."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return mixed(self.block(*args, **kwargs))


class Alone(nn.Module):
    """A block of a user that attends without a module for it: by hand, or by torch."""

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        weights = (hidden_states @ hidden_states.mT).softmax(-1)
        return weights @ hidden_states

    @staticmethod
    def by_torch(hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        x = hidden_states[:, None]
        return F.scaled_dot_product_attention(x, x, x)[:, 0]


def wrapped(kind: Any, indices: slice = slice(1, 2)) -> Callable[[Any], None]:
    def change(module: Any) -> None:
        blocks = blocks_of(module)
        for index in range(len(blocks))[indices]:
            blocks[index] = kind(blocks[index])

    return change


def by_partial(module: Any) -> None:
    block = blocks_of(module)[1]
    block.forward = partial(lambda before, *args, **kwargs: mixed(before(*args, **kwargs)), block.forward)


def inserted(name: str) -> Callable[[Any], None]:

    def change(module: Any) -> None:
        donor = MODELS[name].build(1).to(next(module.parameters()).device)
        blocks_of(module).insert(1, blocks_of(donor)[0])

    return change


def swapped(module: Any) -> None:
    blocks = blocks_of(module)
    blocks[0], blocks[1] = blocks[1], blocks[0]


def own_block(forward: Any = None) -> Callable[[Any], None]:
    def change(module: Any) -> None:
        block: Any = Alone()
        block.forward = forward or block.forward
        blocks_of(module).insert(1, block)

    return change


def compiled_forward(module: Any) -> None:
    block = blocks_of(module)[1]
    block.forward = torch.compile(block.forward, backend="eager")


OWN = "computes attention itself"
H3 = "minimax_h3"  # cut by diffusers' own plan here
BLOCKS = {
    # some blocks wrapped and others not: the cuts' pattern still matches the others
    **{f"held in {name}": Case(name, wrapped(Held)) for name in ("flux", "sd3_dual", "wan", "qwen", "pixart", H3)},
    "all held in flux": Case("flux", wrapped(Held, slice(None))),
    "a partial in flux": Case("flux", by_partial),
    **{f"inserted into {name}": Case(name, inserted(name)) for name in ("flux", H3)},
    **{f"removed from {name}": Case(name, lambda m: blocks_of(m).pop(0)) for name in ("pixart", H3)},
    "swapped in flux": Case("flux", swapped),
    **{
        f"hidden in {name}": Case(name, wrapped(Hidden), "inside Hidden at|a wrapper must hold its block as .module")
        for name in ("flux", "wan", "qwen", "pixart", H3)
    },
    "all hidden in flux": Case("flux", wrapped(Hidden, slice(None)), "inside Hidden at|a wrapper must hold"),
    "compiled": Case("wan", lambda module: blocks_of(module)[1].compile(backend="eager"), COMPILED),
    "compiled by a wrapper": Case("flux", wrapped(partial(torch.compile, backend="eager")), COMPILED),
    "a compiled forward": Case("pixart", compiled_forward, COMPILED),
    "a block by hand": Case("wan", own_block(), f"Alone at blocks.1 {OWN}, to the tokens of one rank only"),
    "a block by torch": Case("wan", own_block(Alone.by_torch), f"Alone at blocks.1 {OWN}"),
    "torch's module": Case(
        "wan",
        lambda module: blocks_of(module)[1].add_module("mine", nn.MultiheadAttention(4, 2)),
        "MultiheadAttention at blocks.1.mine of WanTransformer3DModel would attend",
    ),
    "a replaced forward": Case(
        "wan",
        lambda module: setattr(blocks_of(module)[1], "forward", Alone.by_torch),
        f"WanTransformerBlock at blocks.1 {OWN}",
    ),
}

# Attention processors ------------------------------------------------------------------------------------------


def softmax(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return ((q @ k.transpose(-1, -2)) / math.sqrt(q.shape[-1])).softmax(-1) @ v


class OnFlux(FluxAttnProcessor):
    """FLUX's processor with another attention in it; it inherits what diffusers' dispatcher is told."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Return attention of (B, H, l, D)."""
        whole = torch.linspace(-1, 1, 3 * k.shape[-1], dtype=k.dtype, device=k.device).view(1, 1, 3, -1)
        whole = whole.expand(len(k), k.shape[1], -1, -1)  # keys that every rank has whole, as IP-adapters have them
        match self.kind:
            case "softmax":
                return softmax(q, k, v)
            case "flex_attention":
                return flex_attention(q, k, v)
            case "torch's":
                return F.scaled_dot_product_attention(q, k, v)
            case "twice":  # both ways to be reached
                more = {"backend": self._attention_backend, "parallel_config": self._parallel_config}
                second = dispatch_attention_fn(*(x.transpose(1, 2) for x in (q, k, v)), **more).transpose(1, 2)
                return F.scaled_dot_product_attention(q, k, 2 * v) - second
            case "a picture":
                return F.scaled_dot_product_attention(q, k, v) + softmax(q, whole, whole)
            case _:  # only the picture is reached
                return softmax(q, k, v) + F.scaled_dot_product_attention(q, whole, whole)

    def __call__(
        self, attn: Any, hidden_states: Tensor, encoder_hidden_states: Any = None, mask: Any = None, rows: Any = None
    ) -> Any:
        q, k, v = (layer(hidden_states).unflatten(2, (attn.heads, -1)) for layer in (attn.to_q, attn.to_k, attn.to_v))
        q, k = attn.norm_q(q), attn.norm_k(k)
        if encoder_hidden_states is not None:
            layers = (attn.add_q_proj, attn.add_k_proj, attn.add_v_proj)
            tq, tk, tv = (layer(encoder_hidden_states).unflatten(2, (attn.heads, -1)) for layer in layers)
            tq, tk = attn.norm_added_q(tq), attn.norm_added_k(tk)
            q, k, v = (torch.cat(pair, dim=1) for pair in ((tq, q), (tk, k), (tv, v)))
        q, k = (apply_rotary_emb(x, rows, sequence_dim=1) for x in (q, k))
        out = self.attend(*(x.transpose(1, 2) for x in (q, k, v))).transpose(1, 2).flatten(2)
        if encoder_hidden_states is None:
            return out
        text = encoder_hidden_states.shape[1]
        return attn.to_out[1](attn.to_out[0](out[:, text:])), attn.to_add_out(out[:, :text])


def seat(make: Callable[[], Any]) -> Callable[[Any], None]:

    def change(module: Any) -> None:
        for name, attention in module.named_modules():
            if name.endswith((".attn", ".attn1")):
                attention.own = attention.processor
                attention.set_processor(make())

    return change


def unseat(module: Any) -> None:
    for attention in module.modules():
        if hasattr(attention, "own"):
            attention.processor = attention.own


def seated(model: str, make: Callable[[], Any], refused: str | None = None) -> Case:
    return Case(model, seat(make), refused, unseat)


def with_ip_adapter(module: Any) -> None:
    for block in module.transformer_blocks:
        torch.manual_seed(3)
        processor = FluxIPAdapterAttnProcessor(module.inner_dim, 16).to(block.attn.to_q.weight)
        block.attn.set_processor(processor.requires_grad_(False))


def pictures(tokens: int) -> Callable[[torch.device], dict[str, Any]]:
    return lambda device: {"joint_attention_kwargs": {"ip_hidden_states": [random((2, tokens, 16), 20, device)]}}


def with_softmax(own: Any) -> Any:
    """Return diffusers' own processor with attention by hand in it, which takes the mask that the processor makes."""
    home = sys.modules[type(own).__module__]

    def attended(q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None, **options: Any) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        scores = q @ k.mT / math.sqrt(q.shape[-1])
        if attn_mask is not None:
            scores = scores.masked_fill(~attn_mask, -1e30) if attn_mask.dtype == torch.bool else scores + attn_mask
        return (scores.softmax(-1) @ v).transpose(1, 2)

    class Softmax:
        @wraps(type(own).__call__)  # diffusers passes on what a processor names
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(home, "dispatch_attention_fn", attended)
                return own(*args, **kwargs)

    return Softmax()


def doubling(own: Any) -> Any:
    class Twice:
        @wraps(type(own).__call__)
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            return tuple(2 * x for x in own(*args, **kwargs))

    return Twice()


def around(make: Callable[[Any], Any]) -> Callable[[Any], None]:
    def change(module: Any) -> None:
        for name, attention in module.named_modules():
            if "transformer_blocks." in name and hasattr(attention, "processor"):
                attention.own = attention.processor
                attention.processor = make(attention.own)

    return change


def alike(device: torch.device) -> dict[str, Any]:
    mask = torch.ones(2, 22, dtype=torch.float64, device=device)
    mask[:, 4:7] = 0  # the end of both texts, which attention may weigh in place of a mask
    return {"attention_mask": mask}


MASKED = ("hunyuanimage", "qwen_masked", "qwen_edit", "chroma_numbers")
OF_OURS = "not supported on several ranks: seqpar computes attention of this model by its own processor"
PROCESSORS = {
    **{
        f"softmax in {name}": Case(name, around(with_softmax), f"(processor Softmax) {UNREACHED}", unseat)
        for name in MASKED
    },
    "softmax in chroma": Case("chroma", around(with_softmax), f"(processor Softmax) {UNREACHED}", unseat, alike),
    **{f"twice in {name}": Case(name, around(doubling), OF_OURS, unseat) for name in ("mochi", "hunyuan15")},
    **{
        kind: seated("flux", partial(OnFlux, kind), f"(processor OnFlux) {UNREACHED}")
        for kind in ("softmax", "flex_attention", "only a picture")
    },
    **{kind: seated("flux", partial(OnFlux, kind)) for kind in ("torch's", "twice", "a picture")},
    "AttnProcessor": seated("pixart", theirs.AttnProcessor, f"(processor AttnProcessor) {UNREACHED}"),
    "SlicedAttnProcessor": seated("dit", lambda: theirs.SlicedAttnProcessor(2), "SlicedAttnProcessor"),
    "PAG of one stream": seated("pixart", theirs.PAGIdentitySelfAttnProcessor2_0),
    "PAG of two streams": seated("sd3_dual", theirs.PAGJointAttnProcessor2_0, "PAGJointAttnProcessor2_0"),
    "an IP-adapter": Case("flux", with_ip_adapter, more=pictures(4)),
}

# Attention modules ---------------------------------------------------------------------------------------------


def by_hand(attn: Any, x: Tensor, others: Tensor | None = None, *args: Any, **kwargs: Any) -> Tensor:
    others = x if others is None else others
    q, k, v = attn.norm_q(attn.to_q(x)), attn.norm_k(attn.to_k(others)), attn.to_v(others)
    q, k, v = (each.unflatten(2, (attn.heads, -1)).transpose(1, 2) for each in (q, k, v))
    return attn.to_out[0](softmax(q, k, v).transpose(1, 2).flatten(2))


class ByHand(WanAttention):
    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        return by_hand(self, *args, **kwargs)


class Doubled(WanAttention):
    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        return 2 * super().forward(*args, **kwargs)


class Around(nn.Module):
    """An attention module without a processor."""

    def __init__(self, attn: Any) -> None:
        super().__init__()
        self.attn = attn

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        return by_hand(self.attn, *args, **kwargs)


class Repeated(ModelHook):
    """Calls the forward in every other call only, as caches do."""

    def __init__(self) -> None:
        super().__init__()
        self.last: Any = None

    def new_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        last = self.last
        reference: Any = self.fn_ref
        self.last = None if last is not None else reference.original_forward(*args, **kwargs)
        return self.last if last is None else last


class Slots:
    __slots__ = ("factor",)

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        return by_hand(*args, **kwargs)


def fresh(attn: Any, kind: type = WanAttention) -> Any:
    width, each = attn.to_q.in_features, attn.to_q.out_features // attn.heads
    other = kind(dim=width, heads=attn.heads, dim_head=each, processor=WanAttnProcessor()).to(attn.to_q.weight)
    other.load_state_dict(attn.state_dict())
    return other


def cached(attn: Any) -> Any:
    other = fresh(attn, Doubled)
    HookRegistry.check_if_exists_or_initialize(other).register_hook(Repeated(), "repeated")
    return other


def changed(attn: Any, **attributes: Any) -> Any:
    for name, value in attributes.items():
        setattr(attn, name, value)
    return attn


def put(make: Callable[[Any], Any], refused: str | None = None) -> Case:

    def change(module: Any) -> None:
        for block in module.blocks:
            block.attn1 = make(block.attn1)

    return Case("wan", change, refused, calls=3)


def unreached(kind: str, processor: str) -> str:
    return f"{kind} at blocks.0.attn1 (processor {processor}) {UNREACHED}"


MODULES = {
    "fresh": put(fresh),
    "doubled": put(lambda attn: fresh(attn, Doubled)),
    "cached": put(cached),
    "by hand": put(lambda attn: fresh(attn, ByHand), unreached("ByHand", "WanAttnProcessor")),
    "its forward": put(
        lambda attn: changed(attn, forward=MethodType(by_hand, attn)), unreached("WanAttention", "WanAttnProcessor")
    ),
    "around": put(Around, "WanAttention at blocks.0.attn1.attn of WanTransformer3DModel inside Around at blocks.0"),
    "a function": put(lambda attn: changed(attn, processor=by_hand), unreached("WanAttention", "by_hand")),
    "slots": put(lambda attn: changed(attn, processor=Slots()), unreached("WanAttention", "Slots")),
}

# What diffusers' guiders skip ----------------------------------------------------------------------------------

# LayerSkipConfig's (skip_attention, skip_attention_scores, skip_ff)
SCORES, ATTENTION, MLP, BLOCK = (False, True, False), (True, False, False), (False, False, True), (True, False, True)
NAMED_LISTS = {"lumina2": "layers", "z_image": "layers"}  # the blocks that diffusers does not find by itself


def skips(name: str, what: tuple[bool, bool, bool], index: int) -> Case:
    attention, scores, mlp = what
    config = LayerSkipConfig(
        [index], NAMED_LISTS.get(name, "auto"), skip_attention=attention, skip_attention_scores=scores, skip_ff=mlp
    )
    return Case(
        name,
        lambda module: apply_layer_skip(module, config),
        undo=lambda module: HookRegistry.check_if_exists_or_initialize(module).remove_hook("layer_skip_hook"),
    )


# what diffusers 0.42.1 itself can skip, of the tiny models, in the first or the last block in turn
SKIPS = {
    "skips scores": skips("pixart", SCORES, 0),  # attention returns its values, by another function of torch
    "skips attention": skips("pixart", ATTENTION, 1),
    "skips an MLP": skips("pixart", MLP, 0),
    **{f"skips scores of {name}": skips(name, SCORES, index) for index, name in enumerate(("z_image", "qwen_masked"))},
    **{
        f"skips a block of {name}": skips(name, BLOCK, index % 2)
        for index, name in enumerate(("cogvideox", "wan", "ltx", "hunyuan", "mochi"))
    },
}

CASES = BLOCKS | PROCESSORS | MODULES | SKIPS
