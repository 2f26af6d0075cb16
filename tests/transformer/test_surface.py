# pyright cannot infer the types of diffusers' modules
# pyright: reportAttributeAccessIssue=false, reportArgumentType=false, reportCallIssue=false, reportIndexIssue=false
"""Tests what users do with a transformer besides calling it: offload, compile, copy, save, LoRA between pictures."""

from __future__ import annotations

import contextlib
import copy
import io
import tempfile
from collections.abc import Callable
from contextlib import redirect_stdout
from dataclasses import replace
from functools import partial, wraps
from types import MethodType
from typing import Any

import accelerate
import pytest
import torch
from diffusers.models.transformers.transformer_flux import FluxTransformer2DModel

import seqpar
from seqpar.graphs.graphs import Graphs
from seqpar.mesh.mesh import Mesh
from seqpar.transformer.parallelize import passing
from tests.support.meshes import mesh as make_mesh
from tests.support.meshes import mesh_for
from tests.support.pool import Pool
from tests.support.tiny_flux import TOLERANCE, arguments, error, theirs, tiny
from tests.transformer.test_changes import Captures
from tests.transformer.test_pipelines import CASES
from tests.transformer.test_pipelines import TOLERANCE as PICTURE

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # peft warns of what is tested here
CPU = torch.device("cpu")
VISIBLE = 1e-3


def sequential(module: Any) -> None:
    accelerate.cpu_offload(module, execution_device=CPU)


def grouped(module: Any) -> None:
    module.enable_group_offload(CPU, CPU, offload_type="leaf_level")


def whole_model(module: Any) -> None:
    accelerate.cpu_offload_with_hook(module, execution_device=CPU)


MANAGED: dict[str, Callable[[Any], None]] = {
    "sequential offload": sequential,
    "group offload": grouped,
    "model offload": whole_model,
}


def offloaded(rank: int, world: int, device: torch.device, how: str, wished: bool) -> str:
    """Return the message with which a call refuses weights that travel between host and GPU."""
    module, given = tiny().to(device), arguments("dev", device=device)
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


class Louder(torch.nn.Linear):
    """A layer of others, as quantised ones are."""


def others_everywhere(module: Any) -> None:
    """Give every block a linear layer of another class, as GGUF, bitsandbytes and quanto do."""
    for path, one in [*module.named_modules()]:
        if type(one) is torch.nn.Linear and "blocks." in path:
            one.__class__ = Louder


def hooks_everywhere(module: Any) -> None:
    """Put a hook of accelerate on every layer."""
    for path, one in [*module.named_modules()]:
        if type(one) is torch.nn.Linear and "blocks." in path:
            accelerate.hooks.add_hook_to_module(one, accelerate.hooks.ModelHook())


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (others_everywhere, "transformer_blocks.0.norm1.linear is a Louder and no Linear"),
        (hooks_everywhere, "accelerate's hook ModelHook is on transformer_blocks.0.norm1.linear"),
    ],
)
def test_reasons_of_one_kind_are_one_line(
    capfd: pytest.CaptureFixture[str], change: Callable[[Any], None], reason: str
) -> None:
    module, given = tiny(), arguments("dev")
    truth = theirs(module, given)
    change(module)
    seqpar.parallelize(module, Mesh.single())
    assert error(theirs(module, given), truth) < TOLERANCE
    printed = capfd.readouterr().out
    assert printed.count("blocks are diffusers' own") == 1
    assert f"4 of 4 blocks are diffusers' own, because {reason} (first of 4)\n" in printed


def dispatched(rank: int, world: int, device: torch.device, wished: bool) -> tuple[float, str]:
    """Return the error of a transformer that accelerate has dispatched to one device, and what is printed."""
    module, given = tiny().to(device), arguments("dev", device=device)
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


def surface(rank: int, world: int, device: torch.device) -> str:
    """Check a parallelized transformer's config, folder and contexts; return the message for a copy."""
    module, given = tiny().to(device), arguments("dev", device=device)
    before = {key: x.clone() for key, x in module.state_dict().items()}
    seqpar.parallelize(module, make_mesh(device))
    theirs(module, given)
    assert (module.config.in_channels, module.config["in_channels"], module.dtype) == (8, 8, torch.float64)
    with tempfile.TemporaryDirectory() as folder, module.cache_context("cond"):
        module.save_pretrained(folder)
        read: Any = FluxTransformer2DModel.from_pretrained(folder, torch_dtype=torch.float64)
    assert all(torch.equal(x.to(device), before[key]) for key, x in read.state_dict().items())
    with pytest.raises(ValueError, match="cannot be copied") as raised:
        copy.deepcopy(module)
    seqpar.release(module)
    assert torch.equal(theirs(copy.deepcopy(module), given), theirs(module, given))
    assert all(torch.equal(x, before[key]) for key, x in module.state_dict().items())
    return str(raised.value)


@pytest.mark.parametrize("world", [1, 2])
def test_a_parallelized_transformer_keeps_its_surface(ranks: Pool, world: int) -> None:
    assert all("release" in copied for copied in ranks.run(world, surface))


def refreshed(rank: int, world: int, device: torch.device, wished: bool) -> list[float]:
    """Return the errors of calls before and after a weight is replaced, which calls notice only after `refresh`.

    It is called without need, and between a step's two calls, as well.
    """
    module, given = tiny().to(device), arguments("dev", device=device)
    seqpar.parallelize(module, mesh_for("ulysses", world, device), native=wished)
    call: Any = module.forward
    call.graphs, truth = Graphs(call.mesh, Captures(), call.check_delivered), theirs(tiny().to(device), given)
    errors = [error(theirs(module, given), truth) for _ in range(3)]
    seqpar.refresh(module)
    errors += [error(theirs(module, given), truth) for _ in range(3)]
    module.proj_out.weight = torch.nn.Parameter(module.proj_out.weight * 2, requires_grad=False)
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
    """Return the results of three calls: of the second 7 of 13 tokens have moved by 1, most of them on rank 0."""
    given = arguments("dev", device=device)
    tokens = torch.arange(13, device=device)[:, None]
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


def remove_forward(module: Any) -> None:
    del module.forward


def restored(work: Callable[[], Any]) -> Any:
    """Return the result of work, or the message of its ValueError, with the class of FLUX.1 as it was before."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FluxTransformer2DModel, "forward", FluxTransformer2DModel.forward)
        try:
            return work()
        except ValueError as error:
            return str(error)


def largest(outs: list[torch.Tensor], change: Callable[[Any], None], device: torch.device) -> float:
    """Return the largest error of `three` to those of a plain transformer with the same change."""

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
# (ranks, of them on the cfg axis): alone, branches only, split by two and three
LAYOUTS = [(1, 1), (2, 2), (2, 1), (3, 1)]


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


@pytest.mark.parametrize(("world", "cfg"), LAYOUTS)
@pytest.mark.parametrize(("name", "early"), [(name, early) for name in FORWARDS for early in (True, False)][:-1])
def test_a_users_forward_is_right_or_refused(ranks: Pool, name: str, early: bool, world: int, cfg: int) -> None:
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
    moves = (torch.arange(13) < 7).double()
    for world in (2, 3):  # ranks that decided by their own tokens would decide otherwise
        assert len({bool(part.mean() > LIMIT) for part in moves.tensor_split(world)}) == 2


def alone(rank: int, world: int, device: torch.device) -> tuple[str, str]:
    """Return the messages where the last rank alone has another forward, and where no rank has ours any more."""
    module, given = tiny().to(device), arguments("dev", device=device)
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


def with_partial(method: Callable[..., Any]) -> Callable[..., Any]:
    return partial(method)


def with_wraps(method: Callable[..., Any]) -> Callable[..., Any]:
    return wraps(method)(lambda *args, **kwargs: method(*args, **kwargs))


def with_compile(method: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(method, backend="eager")


def with_nothing_copied(method: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args, **kwargs: method(*args, **kwargs)


def wrapped_pipeline(rank: int, world: int, device: torch.device, wrap: Any) -> tuple[list[float], str]:
    """Return a pipeline's errors with wrappers around its methods, after the release and again; and what is printed."""
    case = replace(CASES["flux"], output="pt")
    truth, pipe = case.pictures(case.pipe().to(device)), case.pipe().to(device)
    with redirect_stdout(io.StringIO()) as out:
        seqpar.parallelize(pipe, make_mesh(device, cfg=1))
        for part, name in ((pipe.transformer, "forward"), (pipe.vae, "decode")):
            setattr(part, name, wrap(getattr(part, name)))
        pictures = [case.pictures(pipe, rank) for _ in range(2)]
        with passing(pipe, lambda: None):
            pictures.append(case.pictures(pipe, rank))
        seqpar.release(pipe)
        pictures.append(case.pictures(pipe))
        del pipe.transformer.forward
        pictures.append(case.pictures(seqpar.parallelize(pipe, make_mesh(device, cfg=1)), rank))
        seqpar.release(pipe)
    return [float((x - truth).abs().max()) for x in pictures], out.getvalue()


@pytest.mark.parametrize("wrap", [with_wraps, with_partial, with_compile, with_nothing_copied])
@pytest.mark.parametrize("world", [1, 2, 3])
def test_methods_of_a_pipelines_parts_may_be_wrapped(ranks: Pool, world: int, wrap: Any) -> None:
    """A wrapper stays after the release; a VAE that is shared with a decode of its own decodes whole images."""
    for rank, (errors, said) in enumerate(ranks.run(world, wrapped_pipeline, wrap)):
        assert max(errors) < PICTURE
        assert said.count("stays the forward of the released FluxTransformer2DModel") == (rank == 0)
        assert said.count("the decode that was set on the AutoencoderKL stays") == (rank == 0)
        whole = "every rank decodes whole images, because its decode was replaced by another function"
        assert said.count(whole) == (rank == 0 and world > 1)
