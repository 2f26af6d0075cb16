# pyright cannot infer the types of diffusers' and peft's modules
# pyright: reportAttributeAccessIssue=false, reportArgumentType=false, reportCallIssue=false, reportIndexIssue=false
"""Tests that changes of a transformer are noticed at the next call, also at a replay, and compared over the ranks."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from diffusers.hooks.hooks import HookRegistry, ModelHook
from diffusers.models.transformers.transformer_flux import FluxAttnProcessor, FluxIPAdapterAttnProcessor
from torch import Tensor

import seqpar
from seqpar.graphs.graphs import Graphs
from seqpar.mesh.mesh import Mesh
from seqpar.transformer.changes import Changes
from tests.support.meshes import mesh_for, random
from tests.support.pool import Pool
from tests.support.tiny_flux import TOLERANCE, arguments, error, theirs, tiny
from tests.transformer.test_lora import add, pipeline

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # peft warns of what is tested here


@dataclass
class Still:
    """A captured call whose replays leave the results of the capture, as a graph's do if its inputs are the same."""

    results: Any

    def replay(self) -> None:
        """Compute nothing: what has changed since the capture is not seen."""

    def release(self) -> None:
        """Nothing is held."""


class Captures:
    """Captures calls as `Still` and counts them."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, work: Callable[[], Any], warm_up: int) -> Still:
        """Return a captured call, after a run to warm up."""
        self.count += 1
        return Still((work(), tuple(x.clone() for x in work()))[1])


def captured(module: Any, mesh: Mesh, wished: bool) -> Captures:
    """Parallelize a transformer with captures that run on the CPU."""
    captures = Captures()
    seqpar.parallelize(module, mesh, native=wished)
    module.forward.graphs = Graphs(mesh, captures, module.forward.check_delivered)
    return captures


class Louder(FluxAttnProcessor):
    """A user's own processor."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return three times what diffusers' processor does."""
        out = super().__call__(*args, **kwargs)
        return tuple(3 * x for x in out) if isinstance(out, tuple) else 3 * out


def with_ip_adapter() -> Any:
    """Return a transformer with an IP-adapter, as a pipeline loads it."""
    module: Any = tiny()
    for seed, block in enumerate(module.transformer_blocks):
        processor = FluxIPAdapterAttnProcessor(40, 12, dtype=torch.float64).requires_grad_(False)
        for weight in processor.parameters():
            weight.copy_(random(tuple(weight.shape), 70 + seed + len(weight)))
        block.attn.set_processor(processor)
    module.encoder_hid_proj = SimpleNamespace(num_ip_adapters=1)
    return module


def in_place(module: Any) -> None:
    module.transformer_blocks[1].attn.processor.scale[0] = 0.25


IP: dict[str, Callable[[Any], object]] = {
    "scale": lambda module: pipeline(module).set_ip_adapter_scale(0.6),
    "scale in place": in_place,
    "scales": lambda module: pipeline(module).set_ip_adapter_scale([0.1, 0.9]),
}
PROCESSORS: dict[str, Callable[[Any], object]] = {
    "processor": lambda module: module.single_transformer_blocks[1].attn.set_processor(Louder()),
    "processors": lambda module: module.set_attn_processor(Louder()),
    "back": lambda module: module.set_attn_processor(FluxAttnProcessor()),
}


LORA: dict[str, Callable[[Any], object]] = {
    "load": lambda module: add(module, "a", seed=1),
    "disable": lambda module: module.disable_lora(),
    "enable": lambda module: module.enable_lora(),
    "unload": lambda module: module.unload_lora(),
}


class Times(ModelHook):
    """A hook that a guider puts on and takes off again; diffusers leaves a forward on the module's object then."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self._factor = factor

    def new_forward(self, module: Any, *args: Any, **kwargs: Any) -> Any:
        """Return a multiple of what the module returns."""
        return self._factor * self.fn_ref.original_forward(*args, **kwargs)  # pyright: ignore[reportOptionalCall]


def hooked(factor: float | None) -> Callable[[Any], object]:
    """Return what puts a hook onto the module whose output is gathered, or takes it off."""

    def change(module: Any) -> None:
        registry = HookRegistry.check_if_exists_or_initialize(module.proj_out)
        registry.register_hook(Times(factor), "times") if factor else registry.remove_hook("times", recurse=False)

    return change


HOOKS = {
    "on": hooked(2.0),
    "off": hooked(None),
    "on again": hooked(3.0),
    "off again": hooked(None),
    "left": hooked(4.0),
}


@pytest.mark.parametrize("wished", [True, False], ids=["fused", "generic"])
@pytest.mark.parametrize("story", [IP, PROCESSORS, HOOKS, LORA], ids=["ip-adapter", "processors", "hooks", "lora"])
def test_replays_follow_processors_hooks_and_adapters(story: dict[str, Callable[[Any], object]], wished: bool) -> None:
    """The call after a change has its result; later ones soon replay it, and `release` keeps what was set."""
    module, given = (with_ip_adapter() if story is IP else tiny()), arguments("dev")
    if story is IP:
        given["joint_attention_kwargs"] = {"ip_hidden_states": [random((2, 4, 12), 9)]}
    whole = copy.deepcopy(module)
    captures = captured(module, Mesh.single(), wished)
    before = [theirs(module, given) for _ in range(4)][-1]
    assert error(before, theirs(whole, given)) < TOLERANCE
    for change in story.values():
        change(module)
        change(whole)
        truth = theirs(whole, given)
        results = [theirs(module, given) for _ in range(3)]
        count = captures.count
        results.append(theirs(module, given))
        assert error(truth, before) > 1e-3
        assert max(error(x, truth) for x in results) < TOLERANCE
        assert captures.count == count
        before = truth
    seqpar.release(module)
    assert torch.equal(theirs(module, given), before)


@pytest.mark.parametrize("wished", [True, False], ids=["fused", "generic"])
def test_an_attention_backend_is_refused_until_it_is_reset(wished: bool) -> None:
    module, given = tiny(), arguments("dev")
    captured(module, Mesh.single(), wished)
    truth = [theirs(module, given) for _ in range(3)][-1]
    module.set_attention_backend("native")
    for _ in range(2):
        with pytest.raises(ValueError, match="Attention backend native is not supported by a parallelized"):
            theirs(module, given)
    module.reset_attention_backend()
    assert torch.equal(theirs(module, given), truth)
    seqpar.release(module)
    module.set_attention_backend("native")
    with pytest.raises(ValueError, match="Attention backend native is not supported by a parallelized"):
        seqpar.parallelize(module, Mesh.single(), native=wished)


def test_the_watch_compares_attributes_of_all_kinds() -> None:
    """Values are compared, also inside of containers; tensors and other objects by identity, as graphs read them."""
    module: Any = tiny(num_layers=1, num_single_layers=1)
    processor = module.single_transformer_blocks[0].attn.processor
    processor.held = {"tensors": [random((2,), 1), random((2,), 2)], "scales": (0.5, [1, {2}])}
    watch = Changes(module)
    first = watch.count()
    processor.held["tensors"][0].mul_(2)
    processor.held["scales"] = (0.5, [1, {2}])
    assert watch.count() == first
    for number, change in enumerate(
        (
            lambda: processor.held["scales"][1].append(3),
            lambda: processor.held["scales"][1][1].add(4),
            lambda: processor.held["tensors"].__setitem__(0, random((2,), 1)),
            lambda: setattr(processor, "scale", 0.5),
            lambda: delattr(processor, "scale"),
        )
    ):
        change()
        assert watch.count() == first + 1 + number == watch.count()


# Ranks that differ ---------------------------------------------------------------------------------------------


def refused(module: Any, given: dict[str, Any]) -> str:
    with pytest.raises(ValueError, match="rank 1") as raised:
        theirs(module, given)
    return str(raised.value)


ONLY_HERE: dict[str, tuple[Callable[[Any], object], Callable[[Any], object], str]] = {
    "adapter": (
        lambda module: add(module, "b", seed=2),
        lambda module: module.delete_adapters("b"),
        "got adapters '12 x b (",
    ),
    "scale": (
        lambda module: module.set_adapters(["a"], [0.25]),
        lambda module: module.set_adapters(["a"], [1.0]),
        "got scales of adapters '12 x a 0.5 (",
    ),
    "values": (
        lambda module: module.transformer_blocks[0].attn.to_q.lora_B["a"].weight.detach().mul_(2),
        lambda module: module.transformer_blocks[0].attn.to_q.lora_B["a"].weight.detach().div_(2),
        "got values of adapters",
    ),
    "processor": (
        lambda module: module.transformer_blocks[0].attn.set_processor(Louder()),
        lambda module: module.transformer_blocks[0].attn.set_processor(FluxAttnProcessor()),
        "got attention processors '3 x FluxAttnProcessor, 1 x Louder",
    ),
    "setting": (
        lambda module: setattr(module.transformer_blocks[0].attn.processor, "scale", [0.5]),
        lambda module: delattr(module.transformer_blocks[0].attn.processor, "scale"),
        "got settings of attention processors '1 x scale [0.5]",
    ),
    "backend": (
        lambda module: module.set_attention_backend("native"),
        lambda module: module.reset_attention_backend(),
        "rank 1: Attention backend native",
    ),
}


def differing(rank: int, world: int, device: torch.device, wished: bool) -> tuple[list[str], list[Tensor], int]:
    """Return the messages of calls where rank 1 alone has changed something, and results when that is undone."""
    module, given = tiny().to(device), arguments("dev", device=device)
    captures = captured(module, mesh_for("ulysses", world, device), wished)
    messages, results = [], [theirs(module, given)]
    if rank == 1:
        add(module, "a", seed=1)
    messages.append(refused(module, given))  # the second call, before anything was captured
    if rank == 0:
        add(module, "a", seed=1)
    truth = [theirs(module, given) for _ in range(3)][-1]
    for change, undo, _ in ONLY_HERE.values():
        if rank == 1:
            change(module)
        messages += [refused(module, given) for _ in range(2)]
        if rank == 1:
            undo(module)
        results.append(theirs(module, given) - truth)
    return messages, results, captures.count


@pytest.mark.parametrize("wished", [True, False], ids=["fused", "generic"])
def test_ranks_that_differ_raise_the_same_error(ranks: Pool, wished: bool) -> None:
    (messages, results, count), (others, _, _) = ranks.run(2, differing, wished)
    assert messages == others
    assert messages[0].startswith("got adapters '12 x a (")
    assert " on rank 1, expected 'none' as on rank 0" in messages[0]
    for i, (_, _, told) in enumerate(ONLY_HERE.values()):
        assert messages[1 + 2 * i].startswith(told)
        assert messages[1 + 2 * i] == messages[2 + 2 * i]
    assert max(x.abs().max() for x in results[1:]) < TOLERANCE
    assert count > 0


def choosing(rank: int, world: int, device: torch.device) -> list[str]:
    """Return the messages of `parallelize` where rank 1 alone has a backend, or no wish for fused blocks."""
    messages, mesh = [], mesh_for("ulysses", world, device)
    cases: list[Callable[[Any], object]] = [lambda module: module.set_attention_backend("native"), lambda module: None]
    for number, change in enumerate(cases):
        module = tiny().to(device)
        if rank == 1:
            change(module)
        with pytest.raises(ValueError, match="native") as raised:
            seqpar.parallelize(module, mesh, native=number < 1 or rank == 0)
        messages.append(str(raised.value))
    return messages


def test_ranks_that_would_choose_differently_raise_the_same_error(ranks: Pool) -> None:
    messages, others = ranks.run(2, choosing)
    assert messages == others
    backend, unwished = messages
    assert backend.startswith("rank 1: Attention backend native")
    assert unwished.startswith("got native False on rank 1, expected True as on rank 0")
