# pyright cannot infer the types of diffusers' and peft's modules
# pyright: reportAttributeAccessIssue=false, reportArgumentType=false, reportCallIssue=false, reportIndexIssue=false
"""Tests that changes of a transformer are noticed at the next call, also at a replay, and compared over the ranks.

The module's weights stay its own: fused blocks read its memory.
"""

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
from torch import Tensor, nn

import seqpar
from seqpar.graphs.graphs import Graphs
from seqpar.mesh.mesh import Mesh
from seqpar.transformer.changes import Changes
from tests.support.meshes import mesh_for, random
from tests.support.pool import Pool
from tests.support.sharded import TOLERANCE, VISIBLE, arguments, body_of, error, ours, theirs, tiny
from tests.transformer.test_lora import add, pipeline

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # peft warns of what is tested here


@dataclass
class Still:
    """A captured call whose replays leave the results of the capture, as a graph's do if its inputs are the same."""

    results: Any

    def replay(self) -> None:
        pass

    def release(self) -> None:
        pass


class Captures:
    """Captures calls as `Still` and counts them."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, work: Callable[[], Any], warm_up: int) -> Still:
        self.count += 1
        return Still((work(), tuple(x.clone() for x in work()))[1])


def captured(module: Any, mesh: Mesh, wished: bool) -> Captures:
    captures = Captures()
    seqpar.parallelize(module, mesh, native=wished)
    module.forward.graphs = Graphs(mesh, captures, module.forward.check_delivered)
    return captures


class Louder(FluxAttnProcessor):
    """A user's own processor."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        out = super().__call__(*args, **kwargs)
        return tuple(3 * x for x in out) if isinstance(out, tuple) else 3 * out


def with_ip_adapter() -> Any:
    module: Any = tiny()
    for seed, block in enumerate(module.transformer_blocks):
        processor = FluxIPAdapterAttnProcessor(80, 24, dtype=torch.float64).requires_grad_(False)
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
        return self._factor * self.fn_ref.original_forward(*args, **kwargs)  # pyright: ignore[reportOptionalCall]


def hooked(factor: float | None) -> Callable[[Any], object]:

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
    module, given = (with_ip_adapter() if story is IP else tiny()), arguments()
    if story is IP:
        given["joint_attention_kwargs"] = {"ip_hidden_states": [random((2, 4, 24), 9)]}
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


# Weights -------------------------------------------------------------------------------------------------------


def test_weights_are_shared_and_stay_the_modules() -> None:
    """Their bits and names stay, the fused weights have the module's memory, and nothing is held twice."""
    module, given = tiny(), arguments()
    before = {key: x.clone() for key, x in module.state_dict().items()}
    body = body_of(module, fused=True)
    ours(body, given)
    assert [*module.state_dict()] == [*before]
    assert all(torch.equal(x, before[key]) for key, x in module.state_dict().items())
    storages = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in module.parameters()}
    assert len(storages) < len(before)  # those of q, k and v lie in one memory
    assert sum(storages.values()) == sum(x.numel() * x.element_size() for x in module.parameters())
    attn = module.transformer_blocks[0].attn
    attn.to_k.weight.mul_(1.5)  # in place, as peft fuses: the blocks read it
    assert error(ours(body, given), theirs(module, given)) < TOLERANCE
    assert not torch.equal(attn.to_k.weight, before["transformer_blocks.0.attn.to_k.weight"])
    body.release()  # its hooks cannot be copied
    copied = copy.deepcopy(module)
    pairs = zip(module.parameters(), copied.parameters(), strict=True)
    assert all(torch.equal(x, y) and x.data_ptr() != y.data_ptr() for x, y in pairs)


def replaced(module: Any) -> None:
    layer = module.transformer_blocks[1].attn.to_v
    layer.weight = nn.Parameter(layer.weight * 2, requires_grad=False)


def layer_replaced(module: Any) -> None:
    module.transformer_blocks[1].ff.net[2] = copy.deepcopy(module.transformer_blocks[0].ff.net[2])


def data_replaced(module: Any) -> None:
    weight = module.single_transformer_blocks[0].attn.to_q.weight
    weight.data = weight.data * 2


def scaled_state(module: Any) -> dict[str, Tensor]:
    return {key: x * 1.25 for key, x in module.state_dict().items()}


ALONE = ("a weight's data", "a parameter", "a setting")  # which calls do not compare: `seqpar.refresh` is for them
WEIGHTS: dict[str, Callable[[Any], object]] = {
    "a weight's data": data_replaced,
    "a parameter": replaced,
    "a setting": lambda module: setattr(module.transformer_blocks[0].norm2, "eps", 0.5),
    "a layer": layer_replaced,
    "a state dict, assigned": lambda module: module.load_state_dict(scaled_state(module), assign=True),
    "a state dict, copied": lambda module: module.load_state_dict(scaled_state(module)),
    "moved and back": lambda module: module.float().double(),
}


@pytest.mark.parametrize("change", WEIGHTS)
def test_a_transformer_follows_changes_of_its_weights(change: str) -> None:
    module, given = tiny(), arguments()
    seqpar.parallelize(module, Mesh.single())
    body: Any = module.forward
    old, state = theirs(module, given), body.sharded.key()
    assert body.sharded.key() == state
    WEIGHTS[change](module)
    if change in ALONE:
        seqpar.refresh(module)
    assert (body.sharded.key() == state) is (change == "a state dict, copied")  # which writes to the same addresses
    got = theirs(module, given)
    seqpar.release(module)
    truth = theirs(module, given)
    assert error(got, truth) < TOLERANCE
    assert change == "moved and back" or error(old, truth) > VISIBLE


def spoiled(rank: int, world: int, device: torch.device) -> float:
    module, given = tiny().to(device), arguments(device)
    truth = theirs(module, given)
    if rank == world - 1:
        module.single_transformer_blocks[1].attn.to_k.weight.data[0] += 0.5
    return error(ours(body_of(module, world, device, fused=True), given), truth)


def test_negative_control_a_weight_of_one_rank_shows(ranks: Pool) -> None:
    assert max(ranks.run(2, spoiled)) > VISIBLE


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
    module, given = tiny().to(device), arguments(device)
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
