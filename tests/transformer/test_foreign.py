# pyright cannot infer the types of diffusers' and peft's modules
# pyright: reportAttributeAccessIssue=false, reportArgumentType=false, reportCallIssue=false, reportIndexIssue=false
"""Tests code of users and of diffusers on a transformer: blocks, processors, hooks, forwards, quantised layers.

Whatever attends joins the ranks' tokens or is refused on all of them, before `parallelize` and after it. A mean over
tokens in a hook cannot be seen from outside: it is named in one printed line. The truth is the changed transformer in
one process.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Callable
from contextlib import redirect_stdout
from dataclasses import dataclass
from functools import partial
from types import MethodType
from typing import Any

import diffusers
import pytest
import torch
import torch.nn.functional as F
from diffusers.hooks.hooks import HookRegistry, ModelHook
from diffusers.hooks.layer_skip import LayerSkipConfig, apply_layer_skip
from diffusers.hooks.smoothed_energy_guidance_utils import (
    SmoothedEnergyGuidanceConfig,
    _apply_smoothed_energy_guidance_hook,
)
from diffusers.hooks.taylorseer_cache import TaylorSeerCacheConfig, apply_taylorseer_cache
from diffusers.models import attention_processor as theirs
from diffusers.models.attention_dispatch import dispatch_attention_fn
from diffusers.models.embeddings import apply_rotary_emb
from diffusers.models.transformers.transformer_flux import FluxAttnProcessor, FluxIPAdapterAttnProcessor
from diffusers.models.transformers.transformer_wan import WanAttention, WanAttnProcessor
from peft import LoraConfig
from torch import Tensor, nn
from torch.ao.quantization import quantize_dynamic
from torch.nn.attention.flex_attention import flex_attention

import seqpar
from seqpar.families._cuts import block_lists
from seqpar.families._find import cuts_of
from seqpar.mesh.mesh import Mesh
from seqpar.transformer.attention import parts_of_users
from seqpar.transformer.foreign import look
from seqpar.transformer.parallelize import cfg_by_default
from tests.support.diffusers_tiny import MODELS, flat, truth
from tests.support.foreign import StayDouble
from tests.support.meshes import mesh_for, random
from tests.support.pool import Pool
from tests.support.sharded import TOLERANCE, VISIBLE, error, raised

pytestmark = [
    pytest.mark.filterwarnings(f"ignore:{text}")
    for text in ("In CPU autocast", "flex_attention called without torch.compile")
]
pytestmark += [pytest.mark.slow, pytest.mark.filterwarnings("ignore::UserWarning")]  # of peft and torch.ao
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
    **{f"all held in {name}": Case(name, wrapped(Held, slice(None))) for name in ("flux", H3)},
    **{f"a partial in {name}": Case(name, by_partial) for name in ("flux", H3)},
    **{f"inserted into {name}": Case(name, inserted(name)) for name in ("flux", H3)},
    **{f"removed from {name}": Case(name, lambda m: blocks_of(m).pop(0)) for name in ("pixart", H3)},
    **{f"swapped in {name}": Case(name, swapped) for name in ("flux", H3)},
    **{
        f"hidden in {name}": Case(name, wrapped(Hidden), "inside Hidden at|a wrapper must hold its block as .module")
        for name in ("flux", "wan", "qwen", "pixart", H3)
    },
    **{
        f"all hidden in {name}": Case(name, wrapped(Hidden, slice(None)), "inside Hidden at|a wrapper must hold")
        for name in ("flux", H3)
    },
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
            attention.set_processor(attention.own)


def seated(model: str, make: Callable[[], Any], refused: str | None = None) -> Case:
    return Case(model, seat(make), refused, unseat)


def with_ip_adapter(module: Any) -> None:
    for block in module.transformer_blocks:
        torch.manual_seed(3)
        processor = FluxIPAdapterAttnProcessor(module.inner_dim, 16).to(block.attn.to_q.weight)
        block.attn.set_processor(processor.requires_grad_(False))


def pictures(tokens: int) -> Callable[[torch.device], dict[str, Any]]:
    return lambda device: {"joint_attention_kwargs": {"ip_hidden_states": [random((2, tokens, 16), 20, device)]}}


PROCESSORS = {
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


def outputs(module: Any, arguments: dict[str, Any]) -> tuple[Tensor, ...]:
    with StayDouble(), torch.no_grad():
        return tuple(x.clone() for x in flat(module(**arguments, return_dict=False)))


@dataclass(frozen=True)
class Answer:
    """What came of a case on a rank. errors: of calls with the change, and of one after it was undone."""

    message: str
    errors: list[float]
    matters: float


def truths_of(case: Case, device: torch.device) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """Return the outputs of the unchanged transformer and of the changed one in one process."""
    unchanged = tuple(x.to(device) for x in truth(case.model, device.type))
    if case.refused == COMPILED:
        return unchanged, unchanged
    tiny = MODELS[case.model]
    other = tiny.build().to(device)
    case.change(other)
    return unchanged, tiny.whole(other, {**tiny.arguments(device), **case.more(device)})


def attempted(case: Case, early: bool, mesh: Mesh, truths: tuple[tuple[Tensor, ...], tuple[Tensor, ...]]) -> Answer:
    """Return what comes of a case that is there before `parallelize`, or from the second call on."""
    tiny, device = MODELS[case.model], mesh.device
    plain, arguments = tiny.arguments(device), {**tiny.arguments(device), **case.more(device)}
    module, errors = tiny.build().to(device), list[float]()
    unchanged, expected = truths

    def work() -> None:
        if early:
            case.change(module)
        seqpar.parallelize(module, mesh, cuts=module._cp_plan if case.model == H3 else None)
        if not early:
            outputs(module, plain)
            case.change(module)
        errors.extend(error(outputs(module, arguments), expected) for _ in range(case.calls))

    message = raised(work)
    if case.undo is not None:
        case.undo(module)
        if message == NOTHING or not early:
            errors.append(error(outputs(module, plain), unchanged))
    if message == NOTHING:
        seqpar.release(module)
    return Answer(message, errors, error(expected, unchanged))


def tried(rank: int, world: int, device: torch.device, names: tuple[str, ...]) -> dict[tuple[str, bool], Answer]:
    mesh, answers = mesh_for("ulysses", world, device), dict[tuple[str, bool], Answer]()
    for name in names:
        truths = truths_of(CASES[name], device)
        answers |= {(name, early): attempted(CASES[name], early, mesh, truths) for early in (True, False)}
    return answers


WORLDS = [(2 + index % 2, name) for index, name in enumerate(CASES)]


@pytest.mark.parametrize(("world", "name"), WORLDS)
def test_users_code_is_right_or_refused_on_every_rank(ranks: Pool, world: int, name: str) -> None:
    first, *others = ranks.run(world, tried, (name,))
    words = (CASES[name].refused or NOTHING).split("|")
    for (_, early), answer in first.items():
        assert all(other[name, early].message == answer.message for other in others)
        assert any(text in answer.message for text in words), (early, answer.message)
    for answers in (first, *others):
        assert max((x for answer in answers.values() for x in answer.errors), default=0.0) < TOLERANCE
        matters = min(answer.matters for answer in answers.values())  # a negative control
        assert matters > VISIBLE or name in SAME or CASES[name].refused


SAME = {"torch's", "twice", "fresh"}  # these compute what diffusers' own do


def test_on_one_rank_nothing_is_split_and_all_is_right(ranks: Pool) -> None:
    refused = (name for name, case in CASES.items() if case.refused and "wrapper" not in case.refused)
    names = [name for name in refused if CASES[name].refused != COMPILED]
    (answers,) = ranks.run(1, tried, (*names, "skips scores of z_image", "skips a block of hunyuan"))
    for which, answer in answers.items():
        assert answer.message == NOTHING, which
        assert max(answer.errors) < TOLERANCE, which


def patched(rank: int, world: int, device: torch.device, native: bool) -> tuple[list[str], float]:
    """Return the messages where a class of diffusers computes by hand, before and after, and the error at the end."""
    tiny, mesh = MODELS["wan"], mesh_for("ulysses", world, device)
    arguments, (early, late) = tiny.arguments(device), (tiny.build().to(device) for _ in range(2))
    outputs(seqpar.parallelize(late, mesh, native=native), arguments)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(WanAttnProcessor, "__call__", lambda self, *args, **kwargs: by_hand(*args, **kwargs))
        messages = [raised(lambda: outputs(seqpar.parallelize(early, mesh, native=native), arguments))]
        messages.append(raised(lambda: outputs(late, arguments)))
    return messages, error(outputs(late, arguments), tiny.whole(None, arguments, device))


@pytest.mark.parametrize("native", [True, False])
def test_a_class_of_diffusers_that_a_user_changed_is_refused_until_changed_back(ranks: Pool, native: bool) -> None:
    for messages, last in ranks.run(2, patched, native):
        assert messages == [messages[0]] * 2
        assert messages[0].startswith(unreached("WanAttention", "WanAttnProcessor"))
        assert last < TOLERANCE


# Hooks and layers that may couple tokens -----------------------------------------------------------------------


def mean(module: nn.Module, args: Any, out: Any) -> Any:
    return tuple(mean(module, args, x) for x in out) if isinstance(out, tuple) else out + out.mean(1, keepdim=True)


class Mean(ModelHook):
    """The same as a hook of diffusers."""

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        return mean(module, (), output)


def by_torch(module: Any) -> None:
    for block in module.transformer_blocks:
        block.register_forward_hook(mean)


def by_diffusers(module: Any) -> None:
    HookRegistry.check_if_exists_or_initialize(module.transformer_blocks[1].ff).register_hook(Mean(), "mean")


def replaced(module: Any) -> None:
    before = module.proj_out.forward

    def shifted(x: Tensor) -> Tensor:
        return before(x.roll(1, dims=1))

    module.proj_out.forward = shifted


# what is done to a FLUX -> what the line names
NAMED: dict[str, tuple[Callable[[Any], object], str]] = {
    "torch": (by_torch, "hook mean on transformer_blocks.0 and 1 more"),
    "diffusers": (by_diffusers, "hook Mean on transformer_blocks.1.ff"),
    "replaced": (replaced, "forward replaced.<locals>.shifted on proj_out"),
    "held": (wrapped(Held), "class Held on transformer_blocks.1"),
}


def said(rank: int, world: int, device: torch.device, case: str) -> tuple[str, list[float]]:
    tiny, (module, other) = MODELS["flux"], (MODELS["flux"].build().to(device) for _ in range(2))
    arguments = tiny.arguments(device)
    NAMED[case][0](other)
    truth = tiny.whole(other, arguments)
    with redirect_stdout(io.StringIO()) as out:
        seqpar.parallelize(module, mesh_for("ulysses", world, device), native=False)
        outputs(module, arguments)
        before = len(out.getvalue())
        NAMED[case][0](module)
        errors = [error(outputs(module, arguments), truth) for _ in range(2)]
    seqpar.release(module)
    return out.getvalue()[before:], errors


@pytest.mark.parametrize("case", NAMED)
def test_what_others_have_put_on_is_named_once(ranks: Pool, case: str) -> None:
    ((line, errors), *others) = ranks.run(3, said, case)
    assert line.count("\n") == 1
    assert line == (
        f"seqpar: each rank's tokens alone pass {NAMED[case][1]}; where that needs all tokens results are wrong: "
        f"seqpar.verify tells\n"
    )
    assert (min(errors) > VISIBLE) == (case != "held")
    assert all(other == "" for other, _ in others)
    ((nothing, errors),) = ranks.run(1, said, case)
    assert nothing == ""
    assert max(errors) < TOLERANCE


def only_here(rank: int, world: int, device: torch.device) -> str:
    module = MODELS["flux"].build().to(device)
    seqpar.parallelize(module, mesh_for("ulysses", world, device), native=False)
    if rank == 1:
        by_diffusers(module)
    return raised(lambda: module(**MODELS["flux"].arguments(device)))


def test_hooks_of_one_rank_alone_are_one_error(ranks: Pool) -> None:
    (message,) = set(ranks.run(2, only_here))
    assert message.startswith("got hooks '1 x hook Mean (")
    assert "' on rank 1, expected 'none' as on rank 0" in message


def with_lora(module: Any) -> None:
    module.add_adapter(LoraConfig(r=2, target_modules=["to_q", "to_k", "proj_out"]), "a")


def with_harmless(module: Any) -> None:
    """Put on what diffusers and torch have that computes each token by itself."""
    apply_layer_skip(module, LayerSkipConfig([0], "single_transformer_blocks", skip_attention=True, skip_ff=True))
    apply_taylorseer_cache(module, TaylorSeerCacheConfig())
    torch.nn.utils.spectral_norm(module.proj_out)


@pytest.mark.parametrize("change", [lambda module: None, with_lora, with_harmless], ids=["plain", "lora", "harmless"])
def test_what_computes_each_token_by_itself_is_not_named(change: Callable[[Any], object]) -> None:
    module = MODELS["flux"].build()
    seqpar.parallelize(module, Mesh.single(), native=False)  # our own hooks are on the module, too
    change(module)
    assert look(module).named == ""


def test_the_line_has_a_limited_length() -> None:
    module = MODELS["flux"].build()
    for number, one in enumerate(module.modules()):
        hook = type(f"Hook{number}{'x' * 500}", (), {"__call__": lambda self, *_: None})()
        one.register_forward_pre_hook(hook)
    named = look(module).named
    assert len(named) < 400
    assert re.search(r"and \d+ more|\d+ others$", named)


def blurred(module: Any) -> Any:
    config = SmoothedEnergyGuidanceConfig([0], fqn="transformer_blocks")
    _apply_smoothed_energy_guidance_hook(module, config, blur_sigma=1.0)
    return module


def dynamic(module: Any, dtype: torch.dtype = torch.qint8) -> Any:
    return quantize_dynamic(module.float(), {nn.Linear}, dtype=dtype)


COUPLED: dict[str, tuple[Callable[[Any], Any], str]] = {
    "smoothed energy guidance": (blurred, "smoothed energy guidance blurs the queries of the whole picture"),
    "dynamic quantisation": (dynamic, "with one scale for all tokens"),
    "dynamic float16": (lambda module: dynamic(module, torch.float16), NOTHING),
}


def coupled(rank: int, world: int, device: torch.device, case: str) -> str:
    module = COUPLED[case][0](MODELS["pixart"].build())
    return raised(lambda: seqpar.parallelize(module, mesh_for("ulysses", world, device), native=False))


@pytest.mark.parametrize("case", COUPLED)
def test_what_surely_needs_all_tokens_is_refused_on_every_rank(ranks: Pool, case: str) -> None:
    if ranks.device != "cpu":
        pytest.skip("torch.ao quantises for CPUs")
    assert ranks.run(1, coupled, case) == [NOTHING]
    (message,) = set(ranks.run(2, coupled, case))
    assert COUPLED[case][1] in message


# What counts as a user's ---------------------------------------------------------------------------------------


class Quantised(nn.Linear):
    """A layer of another package, as bitsandbytes and quanto have them."""


def test_layers_of_other_packages_are_no_blocks_of_users() -> None:
    module = MODELS["wan"].build()
    assert block_lists(module)
    for block in module.blocks:
        block.attn1.to_out[0].__class__ = Quantised
    assert look(module).coupled is None
    assert parts_of_users(module) == {}
    module.blocks.append(Alone())
    assert look(module).coupled is not None
    assert [*parts_of_users(module)] == ["blocks.2"]


def test_a_forward_of_a_mixin_is_not_split() -> None:
    class Mixin:
        """A step cache of a user."""

        def forward(self, *args: Any, **kwargs: Any) -> Any:
            """Decide by the tokens that are given."""

    plain: Any = MODELS["wan"].build()
    plain.__class__ = type("Cached", (Mixin, type(plain)), {})
    assert "overrides forward" in str(cuts_of(plain).why_not(plain))
    assert cuts_of(MODELS["wan"].build()).why_not(plain) is None


def test_only_families_and_pipelines_that_call_twice_get_a_cfg_axis() -> None:
    class Own:
        """A user's pipeline."""

    class Derived(diffusers.WanPipeline):  # pyright: ignore[reportPrivateImportUsage]
        """A user's variant of a known one."""

    modules = {name: MODELS[name].build() for name in ("flux", "wan", "minimax_h3", "sd3")} | {"other": nn.Linear(1, 1)}
    splits = {name: cfg_by_default(module, module) for name, module in modules.items()}
    assert splits == {"flux": False, "wan": True, "minimax_h3": False, "sd3": True, "other": False}
    assert cfg_by_default(Own.__new__(Own), modules["wan"]) is False
    assert cfg_by_default(Derived.__new__(Derived), modules["wan"]) is True
