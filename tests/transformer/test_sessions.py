# pyright cannot infer the types of diffusers' modules
# pyright: reportAttributeAccessIssue=false, reportArgumentType=false, reportCallIssue=false
"""Tests of long Python sessions: what stays of pipelines that are parallelized, called and released or dropped."""

from __future__ import annotations

import contextlib
import gc
import io
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import seqpar
from tests.support import pipelines
from tests.support.foreign import StayDouble
from tests.support.meshes import mesh as make_mesh
from tests.support.meshes import mesh_for
from tests.support.pool import Pool
from tests.support.tiny_flux import arguments, theirs, tiny
from tests.transformer.test_lora import add

ROUNDS = 20
KEPT = ("descriptors", "threads", "process groups", "mappings")


def kept() -> list[int]:
    """Return how many things of each kind of `KEPT` this process has."""
    groups = len(dist.distributed_c10d._world.pg_map)
    lines = Path("/proc/self/maps").read_bytes().count(b"\n")
    return [*(len(os.listdir(f"/proc/self/{name}")) for name in ("fd", "task")), groups, lines]


def by_release(module: nn.Module, rank: int, number: int) -> None:
    seqpar.release(module)


def by_collection(module: nn.Module, rank: int, number: int) -> None:
    """Rank 1 collects later than rank 0, after its next call."""


def by_another_thread(module: nn.Module, rank: int, number: int) -> None:
    """Collect what the round before has left in another thread, as a group of NCCL is: its ranks end it together."""
    thread = threading.Thread(target=gc.collect)
    thread.start()
    thread.join()


def by_error(module: nn.Module, rank: int, number: int) -> None:
    """After the release, a call that finds the transformer wrong only when its mesh is there."""
    seqpar.release(module)
    other = tiny()
    other.set_attention_backend("native")
    with pytest.raises(ValueError, match="Attention backend native"):
        seqpar.parallelize(other)


ENDS: dict[str, Callable[[nn.Module, int, int], None]] = {
    "released": by_release,
    "collected": by_collection,
    "collected by another thread": by_another_thread,
    "refused": by_error,
}


def grown(rank: int, world: int, device: torch.device, how: str, transport: str) -> dict[str, int]:
    """Return how much more is kept after many rounds than after the first ones."""
    before = list[int]()
    for number in range(ROUNDS + 4):
        module = tiny(num_layers=1, num_single_layers=1).to(device)
        seqpar.parallelize(module, transport=transport)
        theirs(module, arguments("dev", device=device))
        ENDS[how](module, rank, number)
        del module
        if how != "collected" or rank == 0 or number % 2:
            gc.collect()
        if number == 3:
            before = kept()
    return {name: new - old for name, new, old in zip(KEPT, kept(), before, strict=True)}


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="reads /proc")
@pytest.mark.parametrize("how", ENDS)
def test_nothing_stays_of_a_session(ranks: Pool, how: str) -> None:
    """A socket, a thread or a group that stayed of every round would be there 20 times."""
    for more in ranks.run(2, grown, how, "peer" if how == "released" else "collective"):
        assert max(more.values()) < ROUNDS // 2, more
        assert more["process groups"] <= 1  # that which the next `parallelize` ends


# Another VAE ---------------------------------------------------------------------------------------------------

CALL: dict[str, Any] = {"prompt": "a red cat", "height": 16, "width": 16, "num_inference_steps": 2}
CALL |= {"max_sequence_length": 16, "output_type": "pt"}


class Around(nn.Module):
    """A user's own class around a VAE."""

    def __init__(self, vae: Any) -> None:
        super().__init__()
        self.vae = vae

    def __getattr__(self, name: str) -> Any:
        """Return what the VAE has."""
        return getattr(super().__getattr__("vae"), name) if name != "vae" else super().__getattr__(name)


def with_another_vae(rank: int, world: int, device: torch.device, on: tuple[int, ...]) -> tuple[list[str], Any]:
    """Return the messages of a pipeline whose VAE is replaced on some ranks, and pictures with a wrapper around it."""
    pipe: Any = seqpar.parallelize(pipelines.flux().to(device), make_mesh(device, cfg=1))
    shared, messages = pipe.vae, list[str]()

    def picture() -> torch.Tensor:
        return pipe(**CALL, generator=torch.Generator().manual_seed(rank)).images  # ranks draw other noise

    pictures = [picture()]
    for _ in range(2):
        if rank in on:
            pipe.vae = pipelines.decoder(9).to(device)
        with pytest.raises(ValueError, match="VAE was replaced after parallelize") as raised:
            picture()
        messages.append(str(raised.value))
    for pipe.vae in (shared, Around(shared), torch.compile(shared)):
        pictures.append(picture())
    pipe.vae = pipelines.decoder(9).to(device)
    seqpar.release(pipe)
    pipe = seqpar.parallelize(pipe, make_mesh(device, cfg=1))
    return messages, torch.stack([*pictures, picture()])


@pytest.mark.parametrize("on", [(0, 1), (0,), (1,)], ids=str)
def test_another_vae_is_refused_alike_on_all_ranks(ranks: Pool, on: tuple[int, ...]) -> None:
    (first, pictures), (second, others) = ranks.run(2, with_another_vae, on)
    assert first == second
    assert "Call seqpar.release, replace the VAE" in first[0]
    assert torch.equal(pictures, others)
    assert (pictures[:4] - pictures[0]).abs().max() < 1e-9
    assert (pictures[4] - pictures[0]).abs().max() > 1e-2


# Gradients -----------------------------------------------------------------------------------------------------


def adapted(module: Any) -> None:
    """Add a LoRA that is trained, alone."""
    add(module, "a", seed=1)
    for name, weight in module.named_parameters():
        weight.requires_grad_("lora" in name)


def trained(module: Any) -> None:
    """Do as a training script does."""
    adapted(module)
    module.train()


GRADS: dict[str, tuple[Callable[[Any], object], bool, str | None]] = {
    "frozen": (lambda module: None, True, None),
    "no_grad": (lambda module: module.requires_grad_(), False, None),
    "fresh": (lambda module: module.requires_grad_(), True, "require gradients, but parallelize supports inference"),
    "adapter": (adapted, True, "require gradients, but parallelize supports inference"),
    "training": (trained, True, "is in training mode"),
    "validation": (trained, False, None),
}


def in_grad_mode(rank: int, world: int, device: torch.device, how: str, on: int | None) -> tuple[str, str, float]:
    """Return what is raised and printed by calls in grad mode, or without, and the error of a result.

    on: the only rank in grad mode, or None for all.
    """
    change, wants, _ = GRADS[how]
    module: Any = tiny(num_layers=1).to(device)
    change(module)
    truth, raised = theirs(module, arguments("dev", device=device)), ""
    with contextlib.redirect_stdout(io.StringIO()) as out:
        seqpar.parallelize(module, make_mesh(device, cfg=1))
        said = len(out.getvalue())
        try:
            for _ in range(2):
                with torch.set_grad_enabled(wants and on in (None, rank)), StayDouble():
                    result = module(**arguments("dev", device=device)).sample
                assert not result.requires_grad
                truth = (result - truth).abs().max() if truth.dim() else truth
        except ValueError as error:
            raised, truth = str(error), torch.zeros(())
    return raised, out.getvalue()[said:], truth.item()


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("how", GRADS)
def test_calls_in_grad_mode_say_that_they_have_no_gradients(ranks: Pool, how: str, world: int) -> None:
    text = GRADS[how][-1]
    for rank, (raised, said, error) in enumerate(ranks.run(world, in_grad_mode, how, None)):
        assert error < 1e-9
        if how == "training":
            assert text in raised
        else:
            assert raised == ""
            assert said.count("\n") == (1 if text and rank == 0 else 0)
            assert text is None or rank > 0 or text in said


def test_training_on_one_rank_alone_is_refused_on_all(ranks: Pool) -> None:
    first, second = (raised for raised, *_ in ranks.run(2, in_grad_mode, "training", 1))
    assert first == second
    assert first.startswith("rank 1: FluxTransformer2DModel is in training mode")


# Models without some blocks ------------------------------------------------------------------------------------


def without_blocks(rank: int, world: int, device: torch.device, native: bool) -> list[float]:
    """Return the errors of transformers without one kind of blocks, for a text of one token, too."""
    found, given = [], arguments("dev", device=device)
    few = {name: given[name].narrow(dim, 0, 1) for name, dim in (("encoder_hidden_states", 1), ("txt_ids", 0))}
    for name in ("num_layers", "num_single_layers"):
        module: Any = tiny(**{name: 0}).to(device)
        for call in (given, {**given, **few}):
            truth = theirs(module, call)
            seqpar.parallelize(module, mesh_for("ulysses", world, device), native=native)
            found.append((theirs(module, call) - truth).abs().max().item())
            seqpar.release(module)
    return found


@pytest.mark.parametrize("native", [True, False], ids=["fused", "generic"])
@pytest.mark.parametrize("world", [1, 3])
def test_an_empty_list_of_blocks_is_skipped(ranks: Pool, world: int, native: bool) -> None:
    for found in ranks.run(world, without_blocks, native):
        assert max(found) < 1e-12
