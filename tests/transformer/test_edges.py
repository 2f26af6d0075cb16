# pyright cannot infer the types of diffusers' modules
# pyright: reportAttributeAccessIssue=false, reportArgumentType=false, reportCallIssue=false, reportIndexIssue=false
"""Tests of the adapter's edges: numbers of tokens that mislead a rank, autocast, and what `release` leaves behind."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NoReturn

import pytest
import torch
from diffusers.models._modeling_parallel import ContextParallelInput, ContextParallelOutput
from diffusers.models.attention_processor import Attention, SD3IPAdapterJointAttnProcessor2_0
from diffusers.models.transformers.transformer_flux import FluxIPAdapterAttnProcessor
from torch import Tensor, nn

import seqpar
from seqpar.graphs.exchanges import ATTENDS
from seqpar.graphs.signature import form_of
from seqpar.mesh.mesh import Axis, Mesh
from seqpar.transformer import parallelize
from seqpar.transformer import parallelize as lease
from seqpar.transformer.guidance import cut_rows
from tests.support import pipelines, tiny_flux
from tests.support.diffusers_tiny import MODELS
from tests.support.meshes import mesh_for, random
from tests.support.pool import Pool
from tests.transformer.test_body import TOLERANCE, body_of, called, computed, error
from tests.transformer.test_cuts import raised


class Block(nn.Module):
    """Attention to own tokens, then to a text, by modules of one class whose names tell nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (Attention(query_dim=20, heads=5, dim_head=4) for _ in range(2))

    def forward(self, hidden_states: Tensor, encoder_hidden_states: Tensor) -> Tensor:
        """Return the tokens after both."""
        x = hidden_states + self.first(hidden_states)
        return x + self.second(x, encoder_hidden_states=encoder_hidden_states)


PLAN = {
    "blocks.0": {"hidden_states": ContextParallelInput(split_dim=1, expected_dims=3)},
    "out": ContextParallelOutput(gather_dim=1, expected_dims=3),
}


class Reader(nn.Module):
    """A transformer for which `PLAN`, in diffusers' form, splits its own tokens and leaves the text whole."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.out = nn.ModuleList(Block() for _ in range(2)), nn.Linear(20, 20)

    def forward(self, hidden_states: Tensor, encoder_hidden_states: Tensor, return_dict: bool = True) -> tuple[Tensor]:
        """Return the tokens after all blocks."""
        for block in self.blocks:
            hidden_states = block(hidden_states, encoder_hidden_states)
        return (self.out(hidden_states),)


def reading(rank: int, world: int, device: torch.device, texts: tuple[int, ...]) -> list[str | float]:
    """Return the errors, or messages, of calls with 9 tokens and texts of some lengths."""
    torch.manual_seed(1)
    module: Any = Reader().double().to(device).requires_grad_(False)
    found, state = [], random((2, 9, 20), 1, device)
    body = body_of(module, world, device, "kv_gather", cuts=PLAN)
    for length in texts:
        given = {"hidden_states": state, "encoder_hidden_states": random((2, length, 20), length, device)}
        truth, made = module(**given), []
        message = raised(lambda given=given, made=made: made.append(called(body, given)))
        found.append(error(made[0], truth) if made else message)
    return found


@pytest.mark.parametrize(("world", "texts"), [(2, (7, 4, 9)), (3, (5, 3, 1))])
def test_whole_text_is_read_locally_or_refused_on_every_rank(ranks: Pool, world: int, texts: tuple[int, ...]) -> None:
    """Nine tokens are 5 and 4 on two ranks, where a text of 4 looks like its own tokens to the second rank."""
    every = ranks.run(world, reading, texts)
    for right, unclear, last in every:
        assert right < TOLERANCE
        assert "got cross-attention at blocks.*.first to as many tokens as a rank's share" in unclear
        assert last < TOLERANCE
    assert len({found[1] for found in every}) == 1


def pictures(rank: int, world: int, device: torch.device) -> str:
    """Return the message of a FLUX whose IP-adapter's picture has as many tokens as a rank has of the image."""
    tiny = MODELS["flux"]
    module, arguments = tiny.build().to(device), tiny.arguments(device)
    arguments["joint_attention_kwargs"] = {"ip_hidden_states": [random((2, 7, 16), 20, device)]}
    for block in module.transformer_blocks:
        made = FluxIPAdapterAttnProcessor(module.inner_dim, 16).double().to(device).requires_grad_(False)
        block.attn.set_processor(made)
    body = body_of(module, world, device, "ulysses")
    return raised(lambda: called(body, arguments))


def sd3_pictures(rank: int, world: int, device: torch.device) -> str:
    """Return the message of an SD3 whose IP-adapter joins a rank's image keys with those of the picture."""
    tiny = MODELS["sd3"]
    module = tiny.build().to(device)
    width, head_dim = module.inner_dim, module.config.attention_head_dim
    for block in module.transformer_blocks:
        made = SD3IPAdapterJointAttnProcessor2_0(width, 16, head_dim, 16).double().to(device)
        block.attn.set_processor(made.requires_grad_(False))
    before = list(module.attn_processors.values())
    told = raised(lambda: body_of(module, world, device, "ulysses"))
    kept = [each is own for each, own in zip(module.attn_processors.values(), before, strict=True)]
    assert all(kept)
    return told


def test_an_adapter_that_reads_keys_of_split_tokens_is_refused(ranks: Pool) -> None:
    assert ranks.run(1, sd3_pictures) == ["nothing was raised"]
    messages = ranks.run(2, sd3_pictures)
    assert len(set(messages)) == 1
    assert "SD3's IP-adapter is not supported on several ranks" in messages[0]


def test_a_picture_that_looks_like_split_tokens_to_one_rank_is_refused_on_every_rank(ranks: Pool) -> None:
    first, second = ranks.run(2, pictures)  # 15 tokens of the image are 8 and 7
    assert first == second
    assert "to other tokens than each rank's share of text and image" in first


# Autocast and scales -------------------------------------------------------------------------------------------


def under_autocast(rank: int, world: int, device: torch.device) -> list[float]:
    """Return the largest differences to diffusers' result under autocast, and to that without it."""
    module, given = tiny_flux.tiny(torch.float32).to(device), tiny_flux.arguments("dev", torch.float32, device)
    with torch.no_grad():
        plain = module(**given).sample
        with torch.autocast(device.type, torch.bfloat16):
            truth = module(**given).sample
    seqpar.parallelize(module, mesh_for("ulysses", world, device))
    with torch.autocast(device.type, torch.bfloat16):
        got = module(**given).sample
    assert got.dtype == truth.dtype
    again = module(**given).sample  # without autocast the fused blocks compute
    return [(x.float() - y.float()).abs().max().item() for x, y in ((got, truth), (again, plain), (truth, plain))]


@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")  # of diffusers' own norms
@pytest.mark.parametrize("world", [1, 2])
def test_fp32_weights_under_autocast_compute_what_diffusers_does(ranks: Pool, world: int) -> None:
    for cast, plain, rounded in ranks.run(world, under_autocast):
        assert cast < 0.5 * rounded
        assert plain < 1e-3 * rounded


# What stays, and what does not ---------------------------------------------------------------------------------


def test_release_restores_what_was_set_on_the_objects_before() -> None:
    pipe = pipelines.flux()
    objects = (pipe.transformer, pipe.vae)
    for one in objects:
        for name in ("forward", "decode", "cache_context"):
            if hasattr(one, name):
                setattr(one, name, getattr(one, name))  # a bound method, now the object's own attribute
    before = [{name: x for name, x in vars(one).items() if not name.startswith("_")} for one in objects]
    other = pipelines.flux()
    other.vae = pipe.vae  # a decoder that two pipelines share
    for each in (pipe, other):
        seqpar.parallelize(each, Mesh.single())
    seqpar.release(pipe)
    assert vars(pipe.vae)["decode"] is not before[1]["decode"]
    seqpar.release(other)
    for one, wanted in zip(objects, before, strict=True):
        assert {name: x for name, x in vars(one).items() if not name.startswith("_")} == wanted


def rounds(rank: int, world: int, device: torch.device) -> list[int]:
    """Return the numbers of process groups after rounds of `parallelize` and `release`, one with a caller's mesh.

    In each round, calls fail first: rank 1 cannot move the transformer, and then it cannot be computed.
    """

    def fails(*_: object) -> NoReturn:
        raise ValueError("failed")

    given, counts = mesh_for("ulysses", world, device), []
    module = tiny_flux.tiny().to(device)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lease, "_has_host", lambda mesh: False)
        patch.setattr(lease, "BACKENDS", "gloo" if device.type == "cpu" else lease.BACKENDS)
        for mesh in (given, None, given, None):
            for name in ["refuse", "_move"][: 1 + rank]:
                with pytest.MonkeyPatch.context() as broken:
                    broken.setattr(parallelize, name, fails)
                    assert "failed" in raised(lambda mesh=mesh: seqpar.parallelize(module, mesh))
            if rank != 1:
                assert raised(lambda mesh=mesh: seqpar.parallelize(module, mesh)) == "rank 1: failed"
            counts.append(len(torch.distributed.distributed_c10d._world.pg_names))
            seqpar.parallelize(module, mesh)
            counts.append(len(torch.distributed.distributed_c10d._world.pg_names))
            module(**tiny_flux.arguments("dev", device=device))
            seqpar.release(module)
    seqpar.parallelize(module, given)  # the caller's mesh still works
    module(**tiny_flux.arguments("dev", device=device))
    seqpar.release(module)
    return counts


def test_release_frees_the_process_groups_of_parallelize(ranks: Pool) -> None:
    for counts in ranks.run(2, rounds):
        assert len(set(counts[::2])) == 1
        assert min(counts[1::2]) > counts[0]


def test_exchanges_of_ever_new_batch_sizes_are_freed_before_a_call_and_change_the_state() -> None:
    module = tiny_flux.tiny()
    body, given = tiny_flux.body_of(module), tiny_flux.arguments("dev")
    states = []
    for rows in range(1, ATTENDS + 3):
        more = {name: x[:1].expand(rows, *x.shape[1:]) for name, x in given.items() if x is not None and x.dim() != 2}
        pooled = given["pooled_projections"][:1].expand(rows, -1)
        states.append(body.sharded.key())
        computed(
            body,
            {
                **given,
                **more,
                "guidance": pooled.new_ones(rows),
                "timestep": pooled.new_ones(rows),
                "pooled_projections": pooled,
            },
        )
    assert len(set(states)) <= 3  # the weights are taken over at the first call
    assert states[1] == states[ATTENDS] != states[-1]


def test_weights_of_layers_are_whole_where_there_are_as_many_as_rows() -> None:
    """Each half of a batch of three needs all three weights of VACE's blocks."""
    whole = replace(MODELS["wan_vace"], batch=3).arguments()
    assert len(whole["control_hidden_states_scale"]) == len(whole["hidden_states"])
    for rank, rows in enumerate((slice(0, 2), slice(2, 3))):
        form, _ = cut_rows(form_of(dict(whole)), [Axis("cfg", rank, 2)])
        assert torch.equal(form.tensors["control_hidden_states_scale"], whole["control_hidden_states_scale"])
        assert torch.equal(form.tensors["control_hidden_states"], whole["control_hidden_states"][rows])
