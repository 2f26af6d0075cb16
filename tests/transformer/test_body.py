"""Tests that diffusers' transformers with their tokens split over ranks equal the same transformers in one process.

The truth is the unchanged module with its own attention processors; only its roundings to fp32 are left out on both
sides (`StayDouble`). What remains is the order of sums, 1e-15 of the largest value, so 1e-12 leaves no room for errors.
Among the models are those on which diffusers' own context parallelism (0.42.1) is wrong or fails: masks with token
counts that the ranks do not divide (qwen_masked: padding in the middle of its sequence), LTX with a mask or with a
timestep for each token, and heads that the ranks do not divide (all of them).
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from diffusers.models.transformers.transformer_flux import FluxIPAdapterAttnProcessor
from torch import Tensor

from seqpar.families._find import cuts_of
from seqpar.graphs.graphs import Graphs
from seqpar.graphs.signature import form_of
from seqpar.planner.plan import Choice
from seqpar.transformer.call import ShardedCall
from seqpar.transformer.forward import CallState
from seqpar.transformer.hooks import ShardedModule
from tests.support.calls import Captures
from tests.support.diffusers_tiny import MODELS, few, flat, random, short_truth
from tests.support.foreign import StayDouble, in_double
from tests.support.meshes import LAYOUTS, TRANSPORTS, counted_calls, existing, mesh_for
from tests.support.pool import Pool

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:In CPU autocast")]  # Mochi asks for fp32

TOLERANCE = 1e-12
VISIBLE = 1e-3
CPU = torch.device("cpu")
Outputs = tuple[Tensor, ...]


def body_of(
    module: Any,
    world: int,
    device: torch.device,
    strategy: str,
    transport: str = "collective",
    cuts: Any = None,
    fused: bool = False,
    exact: bool = False,
) -> ShardedCall:
    """Return a call on the mesh on which a strategy is tested."""
    choices = {"strategy": strategy, "transport": transport, "local": "sdpa" if device.type == "cpu" else "reference"}
    plan: Any = SimpleNamespace(**{name: Choice(choice, "test") for name, choice in choices.items()}, exact=exact)
    return ShardedCall(ShardedModule(module, mesh_for(strategy, world, device), plan, cuts_of(module, cuts), fused))


def captured(body: ShardedCall) -> tuple[ShardedCall, Captures]:
    """Let a call compute in fp64 and capture on the CPU."""
    captures = Captures()
    in_double(body).graphs = Graphs(body.mesh, captures, body.check_delivered)
    return body, captures


def computed(body: ShardedCall, arguments: Mapping[str, Any]) -> Outputs:
    """Return the outputs of a call, which the next one overwrites."""
    return body.compute(form_of(dict(arguments)))


def called(body: ShardedCall, arguments: Mapping[str, Any]) -> Outputs:
    """Return the outputs of a call, kept from being overwritten by the next one."""
    with StayDouble():
        return tuple(x.clone() for x in flat(computed(body, arguments)))


def error(got: Outputs, wanted: Outputs) -> float:
    """Return the largest difference relative to the largest value."""
    errors = [(mine - other).abs().max() / other.abs().max() for mine, other in zip(got, wanted, strict=True)]
    return torch.stack(errors).max().item()


JOINT = ("flux", "flux2", "qwen", "qwen_masked", "qwen_edit", "sd3_dual", "cogvideox", "mochi")
FEW = [
    (3 + index % 2, strategy, transport, JOINT[index % len(JOINT)])
    for index, (strategy, transport) in enumerate(itertools.product(LAYOUTS, TRANSPORTS))
]


def with_few(rank: int, world: int, device: torch.device, strategy: str, transport: str, name: str) -> list[Outputs]:
    """Return the outputs of a split transformer in its second calls with texts of two tokens and of one."""
    tiny, results = MODELS[name], list[Outputs]()
    body = body_of(tiny.build().to(device), world, device, strategy, transport)
    for tokens in (2, 1):
        arguments = few(tiny.arguments(device), tokens)
        called(body, arguments)
        results.append(called(body, arguments))
    return results


@pytest.mark.parametrize(("world", "strategy", "transport", "name"), FEW)
def test_ranks_without_tokens_of_the_text_are_right(
    ranks: Pool, world: int, strategy: str, transport: str, name: str
) -> None:
    for two, one in ranks.run(world, with_few, strategy, transport, name):
        assert error(two, short_truth(name, ranks.device)) < TOLERANCE
        assert error(one, short_truth(name, ranks.device, 1)) < TOLERANCE


def left(rank: int, world: int, device: torch.device) -> int:
    """Return how many more `CallState` exist after models were split, called and dropped without a release."""
    before = existing(CallState)
    for name in ("flux", "qwen", "sd3_dual", "wan", "hunyuan", "lumina2"):  # of one code each
        called(body_of(MODELS[name].build().to(device), world, device, "ulysses"), MODELS[name].arguments(device))
    return existing(CallState) - before


def test_a_dropped_transformer_leaves_no_exchanges(ranks: Pool) -> None:
    """Qwen-Image's rotary embedding outlives its transformer in a cache of diffusers; our hook on it must not."""
    assert ranks.run(2, left) == [0, 0]


# The module stays the caller's ---------------------------------------------------------------------------------


def changed(rank: int, world: int, device: torch.device, name: str) -> list[float]:
    """Return the errors of a module that is called whole between split calls, changed, released and split again."""
    tiny = MODELS[name]
    module, arguments = tiny.build().to(device), tiny.arguments(device)
    whole, own = tiny.whole(module, arguments), [one.processor for one in module.modules() if hasattr(one, "processor")]
    body = body_of(module, world, device, "ulysses")
    found = [error(called(body, arguments), whole), error(tiny.whole(module, arguments), whole)]
    if hasattr(module, "fuse_qkv_projections"):
        module.fuse_qkv_projections()  # on some models this sets other processors
        found.append(error(called(body, arguments), whole))
        module.unfuse_qkv_projections()
    found.append(error(called(body, arguments), whole))
    body.release()
    again = [one.processor for one in module.modules() if hasattr(one, "processor")]
    assert all(mine is other for mine, other in zip(own, again, strict=True))
    found.append(error(tiny.whole(module, arguments), whole))
    return [*found, error(called(body, arguments), whole)]


@pytest.mark.parametrize("name", ["flux", "cogvideox", "qwen_masked"])
def test_the_module_runs_whole_outside_of_calls_and_after_release(ranks: Pool, name: str) -> None:
    for errors in ranks.run(2, changed, name):
        assert max(errors) < TOLERANCE
    single = changed(0, 1, CPU, name)
    assert max(single) < TOLERANCE


def lengths(rank: int, world: int, device: torch.device) -> list[float]:
    """Return the errors of calls with more lengths of texts than exchanges are kept for, and of the first one again."""
    tiny = MODELS["qwen"]
    body, found, releases = body_of(tiny.build().to(device), world, device, "ulysses"), [], []
    for length in [*range(2, 21), 2]:
        arguments = {**tiny.arguments(device), "encoder_hidden_states": random((1, length, 24), length, device)}
        got = called(body, arguments)
        found += [error(got, tiny.whole(None, arguments, device))] if length in (2, 20) else []
        releases.append(body.sharded.key())
    assert releases[0] != releases[-1]
    return found


def test_texts_of_ever_new_lengths_do_not_fill_the_memory(ranks: Pool) -> None:
    for errors in ranks.run(2, lengths):
        assert max(errors) < TOLERANCE


def with_pictures(rank: int, world: int, device: torch.device) -> list[float]:
    """Return the errors of FLUX with an IP-adapter, set before and after the transformer is split."""
    tiny, found = MODELS["flux"], []
    arguments = tiny.arguments(device)
    arguments["joint_attention_kwargs"] = {"ip_hidden_states": [random((2, 4, 16), 20, device)]}
    for after in (False, True):
        module = tiny.build().to(device)
        body = body_of(module, world, device, "ulysses") if after else None
        for block in module.transformer_blocks:
            torch.manual_seed(3)
            made = FluxIPAdapterAttnProcessor(module.inner_dim, 16).double().to(device).requires_grad_(False)
            block.attn.set_processor(made)
        body = body or body_of(module, world, device, "ulysses")
        got = called(body, arguments)
        body.release()
        found.append(error(got, tiny.whole(module, arguments)))
    assert error(got, tiny.whole(device=device)) > VISIBLE
    return found


def test_an_ip_adapter_reads_its_pictures_whole_on_every_rank(ranks: Pool) -> None:
    for errors in ranks.run(3, with_pictures):
        assert max(errors) < TOLERANCE


# Costs ---------------------------------------------------------------------------------------------------------


def collectives(rank: int, world: int, device: torch.device, name: str) -> dict[str, int]:
    """Return the collectives of a call after the first one."""
    tiny = MODELS[name]
    body = body_of(tiny.build().to(device), world, device, "ulysses")
    called(body, tiny.arguments(device))
    return counted_calls(lambda: computed(body, tiny.arguments(device)))


@pytest.mark.parametrize(
    ("name", "attentions"), [("flux", 4), ("qwen_masked", 2), ("wan", 2), ("ltx", 2), ("pixart", 2)]
)
def test_an_attention_takes_two_collectives_and_cross_attention_none(ranks: Pool, name: str, attentions: int) -> None:
    for counts in ranks.run(3, collectives, name):
        assert sum(counts.values()) == 2 * attentions + 1, counts  # and one gather of the output
