# pyright cannot infer the types of diffusers' and peft's modules
# pyright: reportAttributeAccessIssue=false, reportArgumentType=false, reportCallIssue=false, reportIndexIssue=false
"""Tests code of users and of diffusers on a transformer: blocks, processors, hooks, forwards, quantised layers.

Whatever attends joins the ranks' tokens or is refused on all of them, before `parallelize` and after it. A mean over
tokens in a hook cannot be seen from outside: it is named in one printed line. The truth is the changed transformer in
one process.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from contextlib import redirect_stdout
from dataclasses import dataclass
from typing import Any

import diffusers
import pytest
import torch
from diffusers.hooks.hooks import HookRegistry, ModelHook
from diffusers.hooks.layer_skip import LayerSkipConfig, apply_layer_skip
from diffusers.hooks.smoothed_energy_guidance_utils import (
    SmoothedEnergyGuidanceConfig,
    _apply_smoothed_energy_guidance_hook,
)
from diffusers.hooks.taylorseer_cache import TaylorSeerCacheConfig, apply_taylorseer_cache
from diffusers.models.transformers.transformer_wan import WanAttnProcessor
from peft import LoraConfig
from torch import Tensor, nn
from torch.ao.quantization import quantize_dynamic

import seqpar
from seqpar.families._cuts import block_lists
from seqpar.families._find import cuts_of
from seqpar.mesh.mesh import Mesh
from seqpar.transformer.attention import parts_of_users
from seqpar.transformer.foreign import look
from seqpar.transformer.parallelize import cfg_by_default
from tests.support.diffusers_tiny import MODELS, flat, truth
from tests.support.foreign import StayDouble
from tests.support.meshes import mesh_for
from tests.support.pool import Pool
from tests.support.sharded import TOLERANCE, VISIBLE, error, raised
from tests.transformer.users_code import CASES, COMPILED, H3, NOTHING, Alone, Case, Held, by_hand, unreached, wrapped

pytestmark = [
    pytest.mark.filterwarnings(f"ignore:{text}")
    for text in ("In CPU autocast", "flex_attention called without torch.compile")
]
pytestmark += [pytest.mark.slow, pytest.mark.filterwarnings("ignore::UserWarning")]  # of peft and torch.ao


def outputs(module: Any, arguments: dict[str, Any]) -> tuple[Tensor, ...]:
    with StayDouble(), torch.no_grad():
        return tuple(x.clone() for x in flat(module(**arguments, return_dict=False)))


@dataclass(frozen=True)
class Answer:
    """What came of a case on a rank. errors: of calls with the change, and of one after it was undone."""

    message: str
    errors: list[float]
    matters: float


Truths = tuple[tuple[Tensor, ...], tuple[Tensor, ...]]
"""The outputs of the unchanged transformer and of the changed one in one process."""


def truths_of(case: Case, kind: str) -> Truths:
    device, unchanged = torch.device(kind), truth(case.model, kind)
    if case.refused == COMPILED:
        return unchanged, unchanged
    tiny = MODELS[case.model]
    other = tiny.build().to(device)
    case.change(other)
    return unchanged, tiny.whole(other, {**tiny.arguments(device), **case.more(device)})


def attempted(case: Case, early: bool, mesh: Mesh, truths: Truths) -> Answer:
    """Return what comes of a case that is there before `parallelize`, or from the second call on."""
    tiny, device = MODELS[case.model], mesh.device
    plain, arguments = tiny.arguments(device), {**tiny.arguments(device), **case.more(device)}
    module, errors = tiny.build().to(device), list[float]()
    unchanged, expected = (tuple(x.to(device) for x in of) for of in truths)

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


def tried(rank: int, world: int, device: torch.device, every: dict[str, Truths]) -> dict[tuple[str, bool], Answer]:
    mesh, answers = mesh_for("ulysses", world, device), dict[tuple[str, bool], Answer]()
    for name, truths in every.items():
        answers |= {(name, early): attempted(CASES[name], early, mesh, truths) for early in (True, False)}
    return answers


WORLDS = [(2 + (index % 4 == 3), name) for index, name in enumerate(CASES)]


@pytest.mark.parametrize(("world", "name"), WORLDS)
def test_users_code_is_right_or_refused_on_every_rank(ranks: Pool, world: int, name: str) -> None:
    first, *others = ranks.run(world, tried, {name: truths_of(CASES[name], ranks.device)})
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
    names += ["skips scores of z_image", "skips a block of hunyuan"]
    (answers,) = ranks.run(1, tried, {name: truths_of(CASES[name], ranks.device) for name in names})
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
