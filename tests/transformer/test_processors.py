# pyright cannot infer the types of diffusers' modules
# pyright: reportAttributeAccessIssue=false, reportArgumentType=false, reportCallIssue=false
"""Tests attention processors of users and of diffusers: each is right on several ranks, or refused on all of them.

Attention that is neither torch's `scaled_dot_product_attention` nor diffusers' dispatcher sees the tokens of one rank.
On one rank nothing is split, so everything is right there.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from types import MethodType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from diffusers.hooks.hooks import HookRegistry, ModelHook
from diffusers.models import attention_processor as theirs
from diffusers.models.attention_dispatch import dispatch_attention_fn
from diffusers.models.embeddings import apply_rotary_emb
from diffusers.models.transformers.transformer_flux import FluxAttnProcessor
from diffusers.models.transformers.transformer_wan import WanAttention, WanAttnProcessor
from torch import Tensor, nn
from torch.nn.attention.flex_attention import flex_attention

from tests.support.diffusers_tiny import MODELS
from tests.support.pool import Pool
from tests.transformer.test_body import TOLERANCE, body_of, called, error
from tests.transformer.test_cuts import raised

UNREACHED = "attends to one rank's tokens only"
pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")


def softmax(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Return attention (B, H, l, D) by its formula, as users write it by hand."""
    return ((q @ k.transpose(-1, -2)) / math.sqrt(q.shape[-1])).softmax(-1) @ v


class OnFlux(FluxAttnProcessor):
    """FLUX's processor with another attention in it; it inherits what diffusers' dispatcher is told."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Return attention of (B, H, l, D)."""
        raise NotImplementedError

    def __call__(
        self, attn: Any, hidden_states: Tensor, encoder_hidden_states: Any = None, mask: Any = None, rows: Any = None
    ) -> Any:
        """Return attention for `FluxAttention.forward`."""
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


class Softmax(OnFlux):
    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return softmax(q, k, v)


class Flex(OnFlux):
    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return flex_attention(q, k, v)


class Torch(OnFlux):
    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v)


class Twice(OnFlux):
    """Both ways to be reached, one after the other."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        first = F.scaled_dot_product_attention(q, k, 2 * v)
        more = {"backend": self._attention_backend, "parallel_config": self._parallel_config}
        return first - dispatch_attention_fn(*(x.transpose(1, 2) for x in (q, k, v)), **more).transpose(1, 2)


class Picture(OnFlux):
    """A second attention by hand to keys that every rank has whole, as IP-adapters have it."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        whole = torch.linspace(-1, 1, 3 * k.shape[-1], dtype=k.dtype, device=k.device).view(1, 1, 3, -1)
        return F.scaled_dot_product_attention(q, k, v) + softmax(q, whole, whole)


class OnlyPicture(OnFlux):
    """Torch's attention to whole keys alone; that to the tokens of all ranks is by hand."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        whole = k.new_ones((1, 1, 3, k.shape[-1])).expand(len(k), k.shape[1], -1, -1)
        return softmax(q, k, v) + F.scaled_dot_product_attention(q, whole, whole)


# model -> (processor, whether several ranks are right)
PROCESSORS: dict[str, tuple[str, Callable[[], Any], bool]] = {
    "softmax": ("flux", Softmax, False),
    "flex_attention": ("flux", Flex, False),
    "only a picture": ("flux", OnlyPicture, False),
    "torch's": ("flux", Torch, True),
    "twice": ("flux", Twice, True),
    "a picture": ("flux", Picture, True),
    "AttnProcessor": ("pixart", theirs.AttnProcessor, False),
    "SlicedAttnProcessor": ("dit", lambda: theirs.SlicedAttnProcessor(2), False),
    "PAG of one stream": ("pixart", theirs.PAGIdentitySelfAttnProcessor2_0, True),
    "PAG of two streams": ("sd3_dual", theirs.PAGJointAttnProcessor2_0, False),
}


def seat(module: Any, make: Callable[[], Any]) -> None:
    """Put processors onto the attention of split tokens in all blocks."""
    for name, one in module.named_modules():
        if name.endswith((".attn", ".attn1")):
            one.set_processor(make())


def processed(rank: int, world: int, device: torch.device, case: str, before: bool) -> tuple[list[float], str]:
    """Return the error with other processors, or how much they matter, that with the own ones, and the message.

    before: whether they are set before the transformer is split.
    """
    name, make, _ = PROCESSORS[case]
    tiny = MODELS[name]
    module, arguments = tiny.build().to(device), tiny.arguments(device)
    own = {path: one.processor for path, one in module.named_modules() if hasattr(one, "processor")}
    whole = tiny.whole(module, arguments)
    body = None if before else body_of(module, world, device, "ulysses")
    seat(module, make)
    if body is None:
        changed = tiny.whole(module, arguments)
    else:
        other = tiny.build().to(device)
        seat(other, make)
        changed = tiny.whole(other, arguments)
    got, outputs = [error(changed, changed)], None

    def call() -> None:
        nonlocal body, outputs
        body = body or body_of(module, world, device, "ulysses")
        outputs = called(body, arguments)

    message = raised(call)
    if outputs is not None:
        got = [error(outputs, changed)]
    for path, one in module.named_modules():
        if hasattr(one, "processor"):
            one.set_processor(own[path])
    body = body or body_of(module, world, device, "ulysses")
    return [*got, error(called(body, arguments), whole)], message


# (ranks, whether it is set before): the common ones both ways, others in turn; one rank is right with any
LAYOUTS = [
    *((case, 1, False) for case in ("softmax", "PAG of two streams")),
    *((case, *layout) for case in ("softmax", "torch's", "only a picture") for layout in ((2, False), (3, True))),
    *((case, 2, False) for case in ("flex_attention", "twice", "AttnProcessor", "PAG of one stream")),
    *((case, 3, True) for case in ("a picture", "SlicedAttnProcessor", "PAG of two streams")),
]


@pytest.mark.parametrize(("case", "world", "before"), LAYOUTS)
def test_a_processor_is_right_or_refused_on_every_rank(ranks: Pool, case: str, world: int, before: bool) -> None:
    """A processor that ran without split attention is named; with its own ones the transformer is right again."""
    _, make, right = PROCESSORS[case]
    answers = ranks.run(world, processed, case, before)
    for errors, _ in answers:
        assert max(errors) < TOLERANCE
    (message,) = {message for _, message in answers}
    if right or world == 1:
        assert message == "nothing was raised"
    else:
        assert type(make()).__name__ in message
        assert UNREACHED in message or "not supported on several ranks: its mask" in message


# Attention modules of users ------------------------------------------------------------------------------------


def by_hand(attn: Any, x: Tensor, others: Tensor | None = None, *args: Any, **kwargs: Any) -> Tensor:
    """Return Wan's attention without positions, by its formula."""
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


class Alone(nn.Module):
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


@dataclass(frozen=True)
class Frozen:
    factor: float = 1.0

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        return by_hand(*args, **kwargs)


class Slots:
    __slots__ = ("factor",)

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        return by_hand(*args, **kwargs)


def fresh(attn: Any, kind: type = WanAttention) -> Any:
    """Return another attention module with the same weights."""
    width, each = attn.to_q.in_features, attn.to_q.out_features // attn.heads
    other = kind(dim=width, heads=attn.heads, dim_head=each, processor=WanAttnProcessor()).to(attn.to_q.weight)
    other.load_state_dict(attn.state_dict())
    return other


def cached(attn: Any) -> Any:
    """Return a user's attention module inside of a cache."""
    other = fresh(attn, Doubled)
    HookRegistry.check_if_exists_or_initialize(other).register_hook(Repeated(), "repeated")
    return other


def with_forward(attn: Any) -> Any:
    """Return it with another forward, which is set on the object."""
    attn.forward = MethodType(by_hand, attn)
    return attn


def with_processor(attn: Any, processor: Any) -> Any:
    """Return it with another processor."""
    attn.processor = processor
    return attn


# case -> (what replaces an attention module, the words with which several ranks refuse it, None where they are right)
MODULES: dict[str, tuple[Callable[[Any], Any], str | None]] = {
    "fresh": (fresh, None),
    "doubled": (lambda attn: fresh(attn, Doubled), None),
    "cached": (cached, None),
    "by hand": (lambda attn: fresh(attn, ByHand), f"ByHand at blocks.0.attn1 (processor WanAttnProcessor) {UNREACHED}"),
    "forward": (with_forward, f"WanAttention at blocks.0.attn1 (processor WanAttnProcessor) {UNREACHED}"),
    "alone": (
        Alone,
        "WanAttention at blocks.0.attn1.attn of WanTransformer3DModel inside Alone at blocks.0.attn1 would attend",
    ),
    "function": (
        lambda attn: with_processor(attn, by_hand),
        f"WanAttention at blocks.0.attn1 (processor by_hand) {UNREACHED}",
    ),
    "frozen": (
        lambda attn: with_processor(attn, Frozen()),
        f"WanAttention at blocks.0.attn1 (processor Frozen) {UNREACHED}",
    ),
    "slots": (
        lambda attn: with_processor(attn, Slots()),
        f"WanAttention at blocks.0.attn1 (processor Slots) {UNREACHED}",
    ),
}


def put(module: Any, case: str) -> Any:
    """Replace the attention modules of split tokens in all blocks, and return the transformer."""
    for block in module.blocks:
        block.attn1 = MODULES[case][0](block.attn1)
    return module


def exchanged(rank: int, world: int, device: torch.device, case: str, before: bool) -> tuple[list[float], str]:
    """Return the errors of three calls with other attention modules, and the message of the ValueError."""
    tiny = MODELS["wan"]
    module, arguments, errors = tiny.build().to(device), tiny.arguments(device), list[float]()
    changed = tiny.whole(put(tiny.build().to(device), case), arguments)

    def call() -> None:
        body = body_of(put(module, case) if before else module, world, device, "ulysses")
        if not before:
            called(body, arguments)
            put(module, case)
        errors.extend(error(called(body, arguments), changed) for _ in range(3))

    return errors, raised(call)


@pytest.mark.parametrize("before", [True, False], ids=["before", "after"])
@pytest.mark.parametrize("case", MODULES)
def test_an_attention_module_of_a_user_is_right_or_refused(ranks: Pool, case: str, before: bool) -> None:
    for errors, message in ranks.run(2, exchanged, case, before):
        expected = MODULES[case][1]
        if expected is None:
            assert message == "nothing was raised"
            assert len(errors) == 3
            assert max(errors) < TOLERANCE
        else:
            assert message.startswith(expected)


def patched(rank: int, world: int, device: torch.device) -> tuple[list[str], float]:
    """Return the messages where a class of diffusers computes by hand, before and after, and the error at the end."""
    tiny, messages = MODELS["wan"], list[str]()
    module, arguments = tiny.build().to(device), tiny.arguments(device)
    whole, body = tiny.whole(module, arguments), body_of(module, world, device, "ulysses")
    called(body, arguments)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(WanAttnProcessor, "__call__", lambda self, *args, **kwargs: by_hand(*args, **kwargs))
        other = body_of(tiny.build().to(device), world, device, "ulysses")
        messages += [raised(lambda one=one: called(one, arguments)) for one in (other, body)]
    return messages, error(called(body, arguments), whole)


def test_a_class_of_diffusers_that_a_user_changed_is_refused_until_it_is_changed_back(ranks: Pool) -> None:
    for messages, last in ranks.run(2, patched):
        assert messages == [messages[0]] * 2
        assert messages[0].startswith(f"WanAttention at blocks.0.attn1 (processor WanAttnProcessor) {UNREACHED}")
        assert last < TOLERANCE
