# pyright cannot infer the types of diffusers' modules
# pyright: reportAttributeAccessIssue=false, reportArgumentType=false, reportCallIssue=false, reportIndexIssue=false
"""Tests what users do with a transformer besides calling it: offload, wrap its methods, replace its VAE, train it.

Last: what stays of pipelines that are parallelized, called and released or dropped, in long Python sessions.
"""

from __future__ import annotations

import contextlib
import gc
import io
import os
import threading
from collections.abc import Callable
from contextlib import redirect_stdout
from dataclasses import replace
from functools import partial, wraps
from pathlib import Path
from types import MethodType
from typing import Any, NoReturn

import accelerate
import pytest
import torch
import torch.distributed as dist
from diffusers.models.transformers.transformer_flux import FluxTransformer2DModel
from torch import nn

import seqpar
from seqpar.graphs.graphs import Graphs
from seqpar.mesh import mesh as meshes
from seqpar.mesh.mesh import Mesh
from seqpar.transformer import parallelize
from seqpar.transformer.parallelize import passing
from tests.support import pipelines
from tests.support.foreign import StayDouble
from tests.support.meshes import mesh as make_mesh
from tests.support.meshes import mesh_for
from tests.support.pool import Pool
from tests.support.sharded import CPU, TOLERANCE, VISIBLE, arguments, error, raised, theirs, tiny
from tests.transformer.test_changes import Captures
from tests.transformer.test_lora import add
from tests.transformer.test_pipelines import CASES
from tests.transformer.test_pipelines import TOLERANCE as PICTURE

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::UserWarning")]  # peft warns of what is tested here


MANAGED: dict[str, Callable[[Any], object]] = {
    "sequential offload": lambda module: accelerate.cpu_offload(module, execution_device=CPU),
    "group offload": lambda module: module.enable_group_offload(CPU, CPU, offload_type="leaf_level"),
    "model offload": lambda module: accelerate.cpu_offload_with_hook(module, execution_device=CPU),
}


def offloaded(rank: int, world: int, device: torch.device, how: str, wished: bool) -> str:
    module, given = tiny().to(device), arguments(device)
    mesh = mesh_for("ulysses", world, device)
    before = tiny().to(device)
    MANAGED[how](before)
    with pytest.raises(ValueError, match="has offloaded weights"):
        seqpar.parallelize(before, mesh, native=wished)
    seqpar.parallelize(module, mesh, native=wished)
    theirs(module, given)
    MANAGED[how](module)
    with pytest.raises(ValueError, match=r"offload|move the pipeline") as raised:
        theirs(module, given)
    return str(raised.value)


@pytest.mark.parametrize(
    ("how", "wished"),
    [("sequential offload", True), ("sequential offload", False), ("group offload", True), ("model offload", False)],
)
def test_offload_is_refused_in_one_sentence(ranks: Pool, how: str, wished: bool) -> None:
    for message in ranks.run(2, offloaded, how, wished):
        assert "has offloaded weights" in message or "move the pipeline there" in message


class Louder(nn.Linear):
    """A layer of others, as quantised ones are."""


def others(layer: Any) -> None:
    layer.__class__ = Louder  # as GGUF, bitsandbytes and quanto do


def hooked(layer: Any) -> None:
    accelerate.hooks.add_hook_to_module(layer, accelerate.hooks.ModelHook())


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (others, "transformer_blocks.0.norm1.linear is a Louder and no Linear"),
        (hooked, "accelerate's hook ModelHook is on transformer_blocks.0.norm1.linear"),
    ],
)
def test_reasons_of_one_kind_are_one_line(
    capfd: pytest.CaptureFixture[str], change: Callable[[Any], None], reason: str
) -> None:
    module, given = tiny(), arguments()
    truth = theirs(module, given)
    for path, layer in [*module.named_modules()]:
        if type(layer) is nn.Linear and "blocks." in path:
            change(layer)
    seqpar.parallelize(module, Mesh.single())
    assert error(theirs(module, given), truth) < TOLERANCE
    printed = capfd.readouterr().out
    assert printed.count("blocks are diffusers' own") == 1
    assert f"4 of 4 blocks are diffusers' own, because {reason} (first of 4)\n" in printed


def dispatched(rank: int, world: int, device: torch.device, wished: bool) -> tuple[float, str]:
    module, given = tiny().to(device), arguments(device)
    truth = theirs(module, given)
    accelerate.dispatch_model(module, {"": device}, force_hooks=True)
    with contextlib.redirect_stdout(io.StringIO()) as out:
        seqpar.parallelize(module, mesh_for("ulysses", world, device), native=wished)
    found = max(error(theirs(module, given), truth) for _ in range(3))
    seqpar.release(module)
    assert torch.equal(theirs(module, given), truth)
    return found, out.getvalue()


@pytest.mark.parametrize("wished", [True, False], ids=["fused", "generic"])
@pytest.mark.parametrize("world", [1, 3])
def test_a_transformer_on_one_device_is_not_offloaded(ranks: Pool, world: int, wished: bool) -> None:
    (found, printed), *others = ranks.run(world, dispatched, wished)
    assert max(found, *(error for error, _ in others), 0.0) < TOLERANCE
    assert "diffusers' own" not in printed
    assert ("4 blocks by fused kernels" in printed) == wished


def refreshed(rank: int, world: int, device: torch.device, wished: bool) -> list[float]:
    """Return the errors of calls before and after a weight is replaced, which calls notice only after `refresh`.

    It is called without need, and between a step's two calls, as well.
    """
    module, given = tiny().to(device), arguments(device)
    seqpar.parallelize(module, mesh_for("ulysses", world, device), native=wished)
    call: Any = module.forward
    call.graphs, truth = Graphs(call.mesh, Captures(), call.check_delivered), theirs(tiny().to(device), given)
    errors = [error(theirs(module, given), truth) for _ in range(3)]
    seqpar.refresh(module)
    errors += [error(theirs(module, given), truth) for _ in range(3)]
    module.proj_out.weight = nn.Parameter(module.proj_out.weight * 2, requires_grad=False)
    seqpar.refresh(module)
    after = [theirs(module, given) for _ in range(3)]
    seqpar.release(module)
    truth = theirs(module, given)
    return errors + [error(x, truth) for x in after]


@pytest.mark.parametrize("wished", [True, False], ids=["fused", "generic"])
def test_refresh_changes_nothing_but_what_calls_know(ranks: Pool, wished: bool) -> None:
    for errors in ranks.run(2, refreshed, wished):
        assert max(errors) < TOLERANCE
    with pytest.raises(ValueError, match="is not parallelized"):
        seqpar.refresh(tiny())


# Forwards of users ---------------------------------------------------------------------------------------------

LIMIT = 0.7  # of `step_cache`, between what the ranks' own tokens move by in the second call of `three`


def step_cache(before: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method that returns its last result until the mean of its input moves, as users' TeaCache does."""
    last: dict[str, Any] = {}

    def teacache(self: Any, *args: Any, **kwargs: Any) -> Any:
        x = kwargs["hidden_states"]
        if not last or (x - last["x"]).abs().mean() > LIMIT:
            last.update(x=x, out=before(self, *args, **kwargs))
        return last["out"]

    return teacache


def three(module: Any, device: torch.device) -> list[torch.Tensor]:
    given = arguments(device)
    tokens = torch.arange(15, device=device)[:, None]
    moves = (tokens < 0, tokens < 7, tokens >= 0)
    return [theirs(module, {**given, "hidden_states": given["hidden_states"] + move}) for move in moves]


def as_method(module: Any) -> None:
    before = module.forward
    module.forward = MethodType(step_cache(lambda self, *args, **kwargs: before(*args, **kwargs)), module)


def timed(module: Any) -> None:
    before = module.forward
    module.forward = wraps(before)(lambda *args, **kwargs: before(*args, **kwargs))


def compiled_forward(module: Any) -> None:
    module.forward = torch.compile(module.forward, backend="eager")


def replace_forward(module: Any) -> None:
    module.forward = MethodType(step_cache(FluxTransformer2DModel.forward), module)


def replace_class(module: Any) -> None:
    """Undone by `restored`."""
    FluxTransformer2DModel.forward = step_cache(FluxTransformer2DModel.forward)


def subclass(module: Any) -> None:
    members = {"forward": step_cache(FluxTransformer2DModel.forward)}
    module.__class__ = type("TeaFlux", (FluxTransformer2DModel,), members)


def restored(work: Callable[[], Any]) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FluxTransformer2DModel, "forward", FluxTransformer2DModel.forward)
        try:
            return work()
        except ValueError as error:
            return str(error)


def largest(outs: list[torch.Tensor], change: Callable[[Any], None], device: torch.device) -> float:

    def true() -> list[torch.Tensor]:
        module = tiny().to(device)
        if change not in (timed, compiled_forward):
            change(module)
        return three(module, device)

    return max(error(x, y) for x, y in zip(outs, restored(true), strict=True))


# what users do -> with what it is refused before `parallelize` where tokens are split, and after it; None: right
OWN = "its forward step_cache.<locals>.teacache may decide by one rank's tokens"
NOT_CALLED = "was replaced after parallelize by step_cache.<locals>.teacache, which does not call the one before it"
FORWARDS: dict[str, tuple[Callable[[Any], None], str | None, str | None]] = {
    "method": (as_method, OWN, None),
    "timer": (
        timed,
        "its forward <lambda> around FluxTransformer2DModel.forward may decide by one rank's tokens",
        None,
    ),
    "compiled": (compiled_forward, "Compiled modules are not supported", None),
    "another forward": (replace_forward, OWN, NOT_CALLED),
    "another forward of the class": (replace_class, OWN, OWN),
    "a class of its own": (subclass, "TeaFlux overrides forward, which may decide by one rank's tokens", ""),
}


def with_forward(rank: int, world: int, device: torch.device, name: str, cfg: int, early: bool) -> Any:
    """Return the largest errors of calls with a user's forward and after the release, or the message of a ValueError.

    early: whether the forward is there before `parallelize`.
    """
    change, module = FORWARDS[name][0], tiny().to(device)

    def work() -> tuple[float, float]:
        if early:
            change(module)
        seqpar.parallelize(module, make_mesh(device, cfg=cfg), native=False)
        if not early:
            change(module)
        found = largest(three(module, device), change, device)
        seqpar.release(module)
        return found, largest(three(module, device), change, device)

    return restored(work)


EARLY = [(name, early) for name in FORWARDS for early in (True, False)][:-1]
# tokens that are shared by two or three ranks; one rank, or two with branches of their own
LAYOUTS = [
    (*layouts[index % 2], *row) for layouts in (((2, 1), (3, 1)), ((2, 2), (1, 1))) for index, row in enumerate(EARLY)
]


@pytest.mark.parametrize(("world", "cfg", "name", "early"), LAYOUTS)
def test_a_users_forward_is_right_or_refused(ranks: Pool, world: int, cfg: int, name: str, early: bool) -> None:
    """Ranks that decided by their own tokens would decide otherwise than each other.

    What may decide so is refused where tokens are split, and runs as it is elsewhere.
    """
    _, before, after = FORWARDS[name]
    told = before if early else after
    runs = told is None or (world == cfg and told.endswith("tokens"))
    for found in ranks.run(world, with_forward, name, cfg, early):
        assert max(found) < TOLERANCE if runs else told in found, found


def test_negative_control_the_cache_skips_a_call() -> None:
    module = tiny()
    as_method(module)
    first, second, third = three(module, CPU)
    assert torch.equal(first, second)
    assert error(first, third) > VISIBLE
    assert largest([first, second, third], lambda module: None, CPU) > VISIBLE
    moves = (torch.arange(15) < 7).double()
    for world in (2, 3):  # ranks that decided by their own tokens would decide otherwise
        assert len({bool(part.mean() > LIMIT) for part in moves.tensor_split(world)}) == 2


def alone(rank: int, world: int, device: torch.device) -> tuple[str, str]:
    """Return the messages where the last rank alone has another forward, and where no rank has ours any more."""
    module, given = tiny().to(device), arguments(device)
    seqpar.parallelize(module, make_mesh(device, cfg=1), native=False)
    call = module.forward
    if rank == world - 1:
        replace_forward(module)
    told = [restored(lambda: theirs(module, given))]
    module.forward = call
    theirs(module, given)
    del module.forward
    told.append(restored(lambda: theirs(module, given)))
    seqpar.release(module)
    return told[0], told[1]


def test_a_forward_that_is_replaced_on_one_rank_is_one_error_on_all(ranks: Pool) -> None:
    ((one, every),) = set(ranks.run(2, alone))
    assert "rank 1 calls FluxTransformer2DModel with another forward than that of parallelize" in one
    assert "was replaced after parallelize by that of its class, so that each rank computes alone" in every


# Wrappers around a pipeline's transformer and VAE ------------------------------------------------------------


WRAPPERS: dict[str, Callable[[Any], Any]] = {
    "wraps": lambda method: wraps(method)(lambda *args, **kwargs: method(*args, **kwargs)),
    "partial": partial,
    "compile": lambda method: torch.compile(method, backend="eager"),
    "nothing copied": lambda method: lambda *args, **kwargs: method(*args, **kwargs),
}


def wrapped_pipeline(rank: int, world: int, device: torch.device, wrapper: str) -> tuple[list[float], str]:
    """Return a pipeline's errors with wrappers around its methods, after the release and again; and what is printed."""
    case = replace(CASES["flux"], output="pt")
    truth, pipe = case.pictures(case.pipe().to(device), steps=2), case.pipe().to(device)
    with redirect_stdout(io.StringIO()) as out:
        seqpar.parallelize(pipe, make_mesh(device, cfg=1))
        for part, name in ((pipe.transformer, "forward"), (pipe.vae, "decode")):
            setattr(part, name, WRAPPERS[wrapper](getattr(part, name)))
        pictures = [case.pictures(pipe, rank, 2) for _ in range(2)]
        with passing(pipe, lambda: None):
            pictures.append(case.pictures(pipe, rank, 2))
        seqpar.release(pipe)
        pictures.append(case.pictures(pipe, steps=2))
        del pipe.transformer.forward
        pictures.append(case.pictures(seqpar.parallelize(pipe, make_mesh(device, cfg=1)), rank, 2))
        seqpar.release(pipe)
    return [float((x - truth).abs().max()) for x in pictures], out.getvalue()


@pytest.mark.parametrize(("world", "wrapper"), [(1, "wraps"), (3, "partial"), (2, "compile"), (1, "nothing copied")])
def test_methods_of_a_pipelines_parts_may_be_wrapped(ranks: Pool, world: int, wrapper: str) -> None:
    """A wrapper stays after the release; a VAE that is shared with a decode of its own decodes whole images."""
    for rank, (errors, said) in enumerate(ranks.run(world, wrapped_pipeline, wrapper)):
        assert max(errors) < PICTURE
        assert said.count("stays the forward of the released FluxTransformer2DModel") == (rank == 0)
        assert said.count("the decode that was set on the AutoencoderKL stays") == (rank == 0)
        whole = "every rank decodes whole images, because its decode was replaced by another function"
        assert said.count(whole) == (rank == 0 and world > 1)


# What stays ----------------------------------------------------------------------------------------------------

ROUNDS = 12
KEPT = ("descriptors", "threads", "process groups", "mappings")


def kept() -> list[int]:
    groups = len(dist.distributed_c10d._world.pg_map)
    lines = Path("/proc/self/maps").read_bytes().count(b"\n")
    return [*(len(os.listdir(f"/proc/self/{name}")) for name in ("fd", "task")), groups, lines]


def by_collection(module: nn.Module, rank: int, number: int) -> None:
    """Rank 1 collects later than rank 0, after its next call."""


def by_another_thread(module: nn.Module, rank: int, number: int) -> None:
    """Collect what the round before has left in another thread, as a group of NCCL is: its ranks end it together."""
    thread = threading.Thread(target=gc.collect)
    thread.start()
    thread.join()


def by_error(module: nn.Module, rank: int, number: int) -> None:
    """Release it; then a call finds another transformer wrong only when its mesh is there."""
    seqpar.release(module)
    other = tiny()
    other.set_attention_backend("native")
    with pytest.raises(ValueError, match="Attention backend native"):
        seqpar.parallelize(other)


ENDS: dict[str, Callable[[nn.Module, int, int], None]] = {
    "collected": by_collection,
    "collected by another thread": by_another_thread,
    "released and refused": by_error,
}


def grown(rank: int, world: int, device: torch.device, how: str, transport: str) -> dict[str, int]:
    before = list[int]()
    gc.freeze()  # what tests before this one have left is not looked through in each round
    for number in range(ROUNDS + 4):
        module = tiny(num_layers=1, num_single_layers=1).to(device)
        seqpar.parallelize(module, transport=transport)
        theirs(module, arguments(device))
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
    """A socket, a thread or a group that stayed of every round would be there so often."""
    for more in ranks.run(2, grown, how, "peer" if how == "released and refused" else "collective"):
        assert max(more.values()) < ROUNDS // 2, more
        assert more["process groups"] <= 1  # that which the next `parallelize` ends


def test_release_restores_what_was_set_on_the_objects_before() -> None:
    pipe = pipelines.flux()
    objects = (pipe.transformer, pipe.vae)
    for part in objects:
        for name in ("forward", "decode", "cache_context"):
            if hasattr(part, name):
                setattr(part, name, getattr(part, name))  # a bound method, now the object's own attribute
    before = [{name: x for name, x in vars(part).items() if not name.startswith("_")} for part in objects]
    other = pipelines.flux()
    other.vae = pipe.vae  # a decoder that two pipelines share
    for each in (pipe, other):
        seqpar.parallelize(each, Mesh.single())
    seqpar.release(pipe)
    assert vars(pipe.vae)["decode"] is not before[1]["decode"]
    seqpar.release(other)
    for part, wanted in zip(objects, before, strict=True):
        assert {name: x for name, x in vars(part).items() if not name.startswith("_")} == wanted


def rounds(rank: int, world: int, device: torch.device) -> list[int]:
    """Return the numbers of process groups after rounds of `parallelize` and `release`, one with a caller's mesh.

    In each round, calls fail first: rank 1 cannot move the transformer, and then it cannot be computed.
    """

    def fails(*_: object) -> NoReturn:
        raise ValueError("failed")

    given, counts, module = mesh_for("ulysses", world, device), [], tiny().to(device)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(meshes, "_has_host", lambda mesh: False)
        patch.setattr(meshes, "BACKENDS", "gloo" if device.type == "cpu" else meshes.BACKENDS)
        for mesh in (given, None, given, None):
            for name in ["refuse", "_move"][: 1 + rank]:
                with pytest.MonkeyPatch.context() as broken:
                    broken.setattr(parallelize, name, fails)
                    assert "failed" in raised(lambda mesh=mesh: seqpar.parallelize(module, mesh))
            if rank != 1:
                assert raised(lambda mesh=mesh: seqpar.parallelize(module, mesh)) == "rank 1: failed"
            counts.append(len(dist.distributed_c10d._world.pg_names))
            seqpar.parallelize(module, mesh)
            counts.append(len(dist.distributed_c10d._world.pg_names))
            theirs(module, arguments(device))
            seqpar.release(module)
    seqpar.parallelize(module, given)  # the caller's mesh still works
    theirs(module, arguments(device))
    seqpar.release(module)
    return counts


def test_release_frees_the_process_groups_of_parallelize(ranks: Pool) -> None:
    for counts in ranks.run(2, rounds):
        assert len(set(counts[::2])) == 1
        assert min(counts[1::2]) > counts[0]


# Another VAE ---------------------------------------------------------------------------------------------------

CALL: dict[str, Any] = {"prompt": "a red cat", "height": 16, "width": 16, "num_inference_steps": 2}
CALL |= {"max_sequence_length": 16, "output_type": "pt"}


class Around(nn.Module):
    """A user's own class around a VAE."""

    def __init__(self, vae: Any) -> None:
        super().__init__()
        self.vae = vae

    def __getattr__(self, name: str) -> Any:
        return getattr(super().__getattr__("vae"), name) if name != "vae" else super().__getattr__(name)


def with_another_vae(rank: int, world: int, device: torch.device) -> tuple[list[str], Any]:
    """Return the messages where the VAE is replaced on all ranks or on one, and pictures with a wrapper around it."""
    pipe: Any = seqpar.parallelize(pipelines.flux().to(device), make_mesh(device, cfg=1))
    shared, messages = pipe.vae, list[str]()

    def picture() -> torch.Tensor:
        return pipe(**CALL, generator=torch.Generator().manual_seed(rank)).images  # ranks draw other noise

    pictures = [picture()]
    for on in ((0, 1), (1,)):
        pipe.vae = pipelines.decoder(9).to(device) if rank in on else shared
        with pytest.raises(ValueError, match="VAE was replaced after parallelize") as raised:
            picture()
        messages.append(str(raised.value))
    for pipe.vae in (shared, Around(shared), torch.compile(shared, backend="eager")):
        pictures.append(picture())
    pipe.vae = pipelines.decoder(9).to(device)
    seqpar.release(pipe)
    pipe = seqpar.parallelize(pipe, make_mesh(device, cfg=1))
    return messages, torch.stack([*pictures, picture()])


def test_another_vae_is_refused_alike_on_all_ranks(ranks: Pool) -> None:
    (first, pictures), (second, others) = ranks.run(2, with_another_vae)
    assert first == second
    assert all("Call seqpar.release, replace the VAE" in message for message in first)
    assert torch.equal(pictures, others)
    assert (pictures[:4] - pictures[0]).abs().max() < 1e-9
    assert (pictures[4] - pictures[0]).abs().max() > 1e-2


# Gradients -----------------------------------------------------------------------------------------------------


def adapted(module: Any) -> None:
    add(module, "a", seed=1)
    for name, weight in module.named_parameters():
        weight.requires_grad_("lora" in name)


def trained(module: Any) -> None:
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
    module, given, errors = tiny(num_layers=1).to(device), arguments(device), [0.0]
    change(module)
    truth = theirs(module, given)

    def calls() -> None:
        for _ in range(2):
            with torch.set_grad_enabled(wants and on in (None, rank)), StayDouble():
                result = module(**given).sample
            assert not result.requires_grad
            errors.append(error(result, truth))

    with contextlib.redirect_stdout(io.StringIO()) as out:
        seqpar.parallelize(module, make_mesh(device, cfg=1))
        before = len(out.getvalue())
        message = raised(calls)
    return message, out.getvalue()[before:], max(errors)


@pytest.mark.parametrize(
    ("how", "world"), [*((how, 1 + index % 2) for index, how in enumerate(GRADS)), ("training", 2)]
)
def test_calls_in_grad_mode_say_that_they_have_no_gradients(ranks: Pool, how: str, world: int) -> None:
    text = GRADS[how][-1]
    for rank, (message, printed, wrong) in enumerate(ranks.run(world, in_grad_mode, how, None)):
        assert wrong < 1e-9
        if how == "training":
            assert str(text) in message
        else:
            assert message == "nothing was raised"
            assert printed.count("\n") == (1 if text and rank == 0 else 0)
            assert text is None or rank > 0 or text in printed


def test_training_on_one_rank_alone_is_refused_on_all(ranks: Pool) -> None:
    first, second = (message for message, *_ in ranks.run(2, in_grad_mode, "training", 1))
    assert first == second
    assert first.startswith("rank 1: FluxTransformer2DModel is in training mode")


# Models without some blocks ------------------------------------------------------------------------------------


def without_blocks(rank: int, world: int, device: torch.device, native: bool) -> list[float]:
    """Return the errors of transformers without one kind of blocks, for a text of one token, too."""
    found, given = [], arguments(device)
    few = {name: given[name].narrow(dim, 0, 1) for name, dim in (("encoder_hidden_states", 1), ("txt_ids", 0))}
    for name in ("num_layers", "num_single_layers"):
        module: Any = tiny(**{name: 0}).to(device)
        for call in (given, {**given, **few}):
            truth = theirs(module, call)
            seqpar.parallelize(module, mesh_for("ulysses", world, device), native=native)
            found.append((theirs(module, call) - truth).abs().max().item())
            seqpar.release(module)
    return found


@pytest.mark.parametrize(("world", "native"), [(1, True), (3, True), (3, False)])
def test_an_empty_list_of_blocks_is_skipped(ranks: Pool, world: int, native: bool) -> None:
    for found in ranks.run(world, without_blocks, native):
        assert max(found) < 1e-12
