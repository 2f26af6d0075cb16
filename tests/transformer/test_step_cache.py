# pyright cannot infer the types of diffusers' modules
# pyright: reportAttributeAccessIssue=false, reportArgumentType=false, reportCallIssue=false
"""Tests the step cache: each family's blocks, decisions that no split changes, and that no run reuses another's steps.

The truth of a schedule of steps is the unchanged transformer in fp64, whose blocks are left out by a few lines here.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import seqpar
from seqpar.families._cuts import StepBlocks, parameters, submodules
from seqpar.families._find import STEPS
from seqpar.mesh.boundary import CancelledError, StepBoundary
from seqpar.transformer.parallelize import call_of
from seqpar.transformer.step_cache import StepCache
from tests.support.diffusers_tiny import MODELS, Tiny, flat, of_family
from tests.support.foreign import StayDouble
from tests.support.meshes import mesh as make_mesh
from tests.support.pool import Pool
from tests.support.row_by_row import by_rows, exact_mode

pytestmark = pytest.mark.filterwarnings("ignore:In CPU autocast")
TOLERANCE = 1e-10
KINDS = tuple(sorted(STEPS))
MASKS = ("11010", "11010", "111010")  # by order: residuals are dropped, and the ones that stay are used
LONG = 8  # steps of runs that decide


def tiny_of(kind: str) -> Tiny:
    named = next((tiny for tiny in MODELS.values() if tiny.kind == kind), None)
    return of_family(kind) if named is None else named


class Plain:
    """Leaves out blocks of an unchanged transformer by a mask. weights: of kept residuals, newest first, by step."""

    def __init__(self, module: nn.Module, steps: StepBlocks, head: int, back: int, order: int) -> None:
        blocks = [(part, names) for path, names in steps.lists.items() for part in submodules(module, f"{path}.*?")]
        self.computes, self.step, self.order = True, 0, order
        self.kept: dict[str, list[tuple[int, list[Tensor]]]] = {}
        self.branch, self.before = "", list[Tensor]()
        last = len(blocks) - 1 - back
        self.joins = blocks[last][1] != blocks[0][1]
        for index, (part, names) in enumerate(blocks[head : last + 1], head):
            part.forward = self.wrapped(part, part.forward, names, index == head, index == last)

    def wrapped(
        self, part: nn.Module, own: Callable[..., Any], names: tuple[str, ...], first: bool, last: bool
    ) -> Callable[..., Any]:
        def forward(*args: Any, **kwargs: Any) -> Any:
            given = dict(zip(parameters(part), args, strict=False)) | kwargs
            if first:
                self.before = [given[name] for name in names]
            if self.computes:
                out = own(*args, **kwargs)
                if last:
                    outputs = [x for x in (out if isinstance(out, tuple) else (out,)) if x is not None]
                    residual = [x - y for x, y in zip(outputs, self.starts(outputs), strict=True)]
                    kept = self.kept.setdefault(self.branch, [])
                    kept.insert(0, (self.step, residual))
                    del kept[self.order + 1 :]
                return out
            if not last:
                return given[names[0]] if len(names) == 1 else tuple(given[name] for name in names)
            result = self.starts(self.kept[self.branch][0][1])
            for at, residual in self.kept[self.branch]:
                weight = 1.0
                for other, _ in self.kept[self.branch]:
                    weight *= (self.step - other) / (at - other) if other != at else 1.0
                result = [x + weight * y for x, y in zip(result, residual, strict=True)]
            return result[0] if len(names) == 1 else (*[None] * (len(names) - len(result)), *result)

        return forward

    def starts(self, outputs: Sequence[Tensor]) -> list[Tensor]:
        if len(self.before) == len(outputs):
            return self.before
        return [torch.cat(self.before, 1)] if self.joins else self.before[-len(outputs) :]


def latents_of(given: dict[str, Any]) -> str:
    return "hidden_states" if "hidden_states" in given else "x"


def loop(
    tiny: Tiny,
    module: Any,
    device: torch.device | str,
    steps: int = LONG,
    branches: int = 2,
    begin: Callable[[int, int], None] = lambda step, branch: None,
    times: Sequence[float] = (),
    shift: float = 0.0,
    guided: str = "1",
    named: bool = True,
) -> list[Tensor]:
    """Return the first result of each call of a loop with guidance.

    guided: "1" for each step with guidance, and "0" for each other one; it repeats.
    named: whether the loop names its branches, if the transformer can.
    begin: called before each call. times: factors of the timestep. shift: of the texts, by which they are others.
    """
    given, made, result = tiny.arguments(device), list[Tensor](), torch.empty(0)
    name, text, time = latents_of(given), STEPS[tiny.kind].text, STEPS[tiny.kind].time
    latents, timestep = given[name], given[time]
    texts = [pytree.tree_map(partial(operator.add, branch + shift), given.get(text)) for branch in range(branches)]
    with torch.no_grad(), StayDouble():
        for step in range(steps):
            given[time] = timestep * (1 - 0.1 * step if not times else times[step])
            results = list[Tensor]()
            for branch in range(branches if guided[step % len(guided)] == "1" else 1):
                begin(step, branch)
                if text in given:
                    given[text] = texts[branch]
                named = named and hasattr(module, "cache_context")
                with module.cache_context("uncond" if branch else "cond") if named else nullcontext():
                    result = flat(module(**{**given, name: latents}, return_dict=False))[0]
                results.append(result)
            made += [x.clone() for x in results]  # the first branch's may be computed beside the last one's
            if isinstance(latents, Tensor) and result.shape == latents.shape:
                latents = latents - 0.05 * result
    return made


@cache
def truth(kind: str, device: str, order: int, back: int) -> list[Tensor]:
    tiny = tiny_of(kind)
    module, steps = tiny.build().to(device), STEPS[kind]
    plain = Plain(module, steps, steps.head, back, order)

    def begin(step: int, branch: int) -> None:
        plain.step, plain.branch, plain.computes = step, str(branch), MASKS[order][step] == "1"

    return [x.cpu() for x in loop(tiny, module, device, len(MASKS[order]), begin=begin)]


def counted(counts: Counter[str], function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    counts["calls"] += 1
    return function(*args, **kwargs)


def cached(
    rank: int,
    world: int,
    device: torch.device,
    kind: str,
    options: StepCache,
    layout: dict[str, Any],
    branches: int = 2,
    guided: str = "1",
) -> tuple[list[Tensor], list[tuple[bool, float | None]]]:
    tiny, sizes = tiny_of(kind), {name: size for name, size in layout.items() if isinstance(size, int)}
    module = tiny.build().to(device)
    named = {name: value for name, value in layout.items() if isinstance(value, str)}
    seqpar.parallelize(module, make_mesh(device, **sizes), cache=options, **named)
    call, counts = call_of(module), Counter[str]()
    assert call is not None
    for hook in call.sharded.fused.hooks.values():
        hook._function = partial(counted, counts, hook._function)
    made = loop(tiny, module, device, len(options.mask or "") or LONG, branches, guided=guided)
    assert bool(counts) == bool(call.sharded.fused.hooks), "fused blocks did not compute"
    assert call.steps is not None
    return [x.cpu() for x in made], [(step.computed, step.change) for step in call.steps.log]


@pytest.mark.parametrize("kind", KINDS)
def test_blocks_of_a_family_are_left_out(ranks: Pool, kind: str) -> None:
    index = KINDS.index(kind)
    world, order, config = (2, 3, 1)[index % 3], index // 3 % 3, tiny_of(kind).config
    back = int(config.get("num_layers", 0) + config.get("num_single_layers", 0) > 2)
    wanted = truth(kind, ranks.device, order, back)
    for made, log in ranks.run(world, cached, kind, StepCache(order=order, back=back, mask=MASKS[order]), {"cfg": 1}):
        assert [computed for computed, _ in log] == [step == "1" for step in MASKS[order]]
        errors = [float((x - y).abs().max() / y.abs().max()) for x, y in zip(made, wanted, strict=True)]
        assert max(errors) <= TOLERANCE, errors


# Decisions --------------------------------------------------------------------------------------------------------

CHANGES = StepCache(threshold=0.38, warmup=2, most=2)


@cache
def decided(device: str, branches: int, guided: str) -> tuple[list[Tensor], list[tuple[bool, float | None]]]:
    return cached(0, 1, torch.device(device), "FluxTransformer2DModel", CHANGES, {"cfg": 1}, branches, guided)


# rows without guidance on a step have calls that wait for a second one, and are computed where they are read
@pytest.mark.parametrize(
    ("world", "layout", "branches", "guided"),
    [
        (2, {"cfg": 1, "ring": 2, "strategy": "ring"}, 2, "1"),
        (2, {"cfg": 1, "strategy": "kv_gather"}, 2, "1"),
        (3, {"cfg": 1, "strategy": "kv_first"}, 2, "1"),
        (3, {"cfg": 1, "strategy": "ulysses"}, 2, "1"),
        (4, {"cfg": 1, "strategy": "usp", "ring": 2}, 2, "1"),
        (4, {"cfg": 1, "data": 2}, 2, "1"),
        (4, {"cfg": 2, "data": 2}, 1, "1"),
        (2, {"cfg": 2}, 2, "11100011"),
        (4, {"cfg": 2}, 2, "00011100"),
    ],
)
def test_every_split_decides_alike(ranks: Pool, world: int, layout: dict[str, Any], branches: int, guided: str) -> None:
    wanted, log = decided(ranks.device, branches, guided)
    assert {computed for computed, _ in log[2:]} == {True, False}  # both kinds of decisions
    made = ranks.run(world, cached, "FluxTransformer2DModel", CHANGES, layout, branches, guided)
    for results, steps in made:
        assert [computed for computed, _ in steps] == [computed for computed, _ in log]
        assert max(float((x - y).abs().max()) for x, y in zip(results, wanted, strict=True)) <= TOLERANCE
    assert all(steps == made[0][1] for _, steps in made)  # the very same numbers on all ranks


def in_exact_mode(rank: int, world: int, device: torch.device, kind: str, layout: dict[str, Any]) -> Any:
    with exact_mode(), by_rows():
        return cached(rank, world, device, kind, replace(CHANGES, order=1), layout, branches=1)


@pytest.mark.parametrize(("kind", "world"), [("FluxTransformer2DModel", 3), ("WanTransformer3DModel", 2)])
def test_exact_mode_has_one_ranks_bits_with_a_step_cache(cpu_ranks: Pool, kind: str, world: int) -> None:
    wanted, log = in_exact_mode(0, 1, torch.device("cpu"), kind, {"cfg": 1})
    assert {computed for computed, _ in log[2:]} == {True, False}
    for results, steps in cpu_ranks.run(world, in_exact_mode, kind, {"cfg": 1}):
        assert steps == log
        assert all(map(torch.equal, results, wanted))


def guided_and_not(rank: int, world: int, device: torch.device, cfg: int) -> Any:
    tiny = tiny_of("FluxTransformer2DModel")
    module = tiny.build().to(device)
    seqpar.parallelize(module, make_mesh(device, cfg=cfg), cache=CHANGES)
    call = call_of(module)
    assert call is not None
    steps: Any = call.steps
    runs, marks = list[Any](), list[tuple[Any, int | None]]()
    enter = steps.enter

    def noted(*args: Any) -> Any:
        mark = enter(*args)
        marks.append((mark, steps.home))
        return mark

    steps.enter = noted
    for guided, shift in (("0", 0.0), ("11100000", 0.0), ("00011100", 0.5), ("0", 0.5)):
        call.reset()
        made = loop(tiny, module, device, guided=guided, shift=shift)
        runs.append(([x.cpu() for x in made], [step.computed for step in steps.log], marks.copy()))
        marks.clear()
    return runs


def test_runs_with_guidance_and_without_decide_as_one_rank(ranks: Pool) -> None:
    alone = guided_and_not(0, 1, torch.device(ranks.device), 1)
    for runs in ranks.run(2, guided_and_not, 2):
        for (made, log, _), (wanted, wanted_log, _) in zip(runs, alone, strict=True):
            assert log == wanted_log
            assert max(float((x - y).abs().max()) for x, y in zip(made, wanted, strict=True)) <= TOLERANCE
        *_, last = (marks for _, _, marks in runs)
        assert {home for _, home in last} == {None}  # both halves have the residuals: they exchange no results
        homes = {(mark, home) for _, _, marks in runs for mark, home in marks}
        assert len(homes) == len({mark for mark, _ in homes})  # a graph is captured for one half, or for both


EARLY = StepCache(threshold=0.38, warmup=1, most=1)


def test_the_first_run_decides_as_one_rank_though_its_calls_build_exchanges(ranks: Pool) -> None:
    given = ("FluxTransformer2DModel", EARLY, {"cfg": 1}, 2, "00010000")
    wanted, log = cached(0, 1, torch.device(ranks.device), *given)
    assert [computed for computed, _ in log][:2] == [True, False]
    for made, other in ranks.run(2, cached, *given[:2], {"cfg": 2}, *given[3:]):
        assert [computed for computed, _ in other] == [computed for computed, _ in log]
        assert max(float((x - y).abs().max()) for x, y in zip(made, wanted, strict=True)) <= TOLERANCE


def one_name(rank: int, world: int, device: torch.device) -> Any:
    tiny = tiny_of("FluxTransformer2DModel")
    module: Any = tiny.build().to(device)
    given, made = tiny.arguments(device), list[Tensor]()
    if world > 1:
        seqpar.parallelize(module, make_mesh(device, cfg=2), cache=StepCache(threshold=10.0, warmup=1, most=9))
    call = call_of(module)
    with torch.no_grad(), StayDouble():
        for step in range(5):
            calls = list[Any]()
            for shift in (0.0, 0.5):
                changed = {"timestep": given["timestep"] * 0.9**step, "hidden_states": given["hidden_states"] + shift}
                with module.cache_context("cond"):
                    calls.append(flat(module(**given | changed, return_dict=False))[0])
            made += [x.clone() for x in calls]
    return made, call.steps.counted if call and call.steps else None


def test_two_calls_of_a_step_with_one_name_are_computed_and_not_counted(ranks: Pool) -> None:
    alone, _ = one_name(0, 1, torch.device(ranks.device))
    for made, counted in ranks.run(2, one_name):
        assert counted == [3, 4]  # of two steps, whose calls are not yet computed beside each other
        assert max(float((x - y).abs().max()) for x, y in zip(made[4:], alone[4:], strict=True)) <= TOLERANCE


# Runs -------------------------------------------------------------------------------------------------------------


def two_runs(rank: int, world: int, device: torch.device, second: str) -> tuple[list[Tensor], list[Tensor]]:
    tiny, options = tiny_of("FluxTransformer2DModel"), StepCache(threshold=10.0, warmup=1, most=9)
    module = tiny.build().to(device)
    seqpar.parallelize(module, make_mesh(device, cfg=1), cache=options)
    call = call_of(module)
    assert call is not None
    unnamed = second == "two branches without names"
    run = partial(loop, tiny, module, device, branches=1 + unnamed, named=not unnamed)
    # a run that ends early, and then another one that nothing announces
    times = (0.1, 0.2, 0.3, 0.4) if second == "timesteps that grow" else (1.0, 0.9, 0.8, 0.7)
    run(steps=3, times=times)
    shift = 0.5 if second == "another text" else 0.0
    if second == "an error":
        with pytest.raises(ValueError, match="finite"):
            module(**tiny.arguments(device) | {"timestep": torch.tensor(torch.nan)})
    if second == "a cancel":
        call.boundary = StepBoundary(call.mesh, lambda: "cancelled")
        with pytest.raises(CancelledError):
            module(**tiny.arguments(device))
        call.boundary = None
    if second in ("the end of a pipeline", "two branches without names"):  # whose texts have other addresses
        module._reset_stateful_cache()
    if second in ("another text", "a cancel", "the end of a pipeline"):
        times = (0.75, 0.7, 0.6, 0.5)  # as if the first run went on
    made = run(steps=4, shift=shift, times=times)
    call.reset()
    return made, run(steps=4, shift=shift, times=times)


RUNS = (
    "another text",
    "the same text",
    "an error",
    "a cancel",
    "the end of a pipeline",
    "timesteps that grow",
    "two branches without names",
)


@pytest.mark.parametrize("second", RUNS)
def test_a_run_reuses_nothing_of_another_one(ranks: Pool, second: str) -> None:
    for made, alone in ranks.run(2, two_runs, second):
        assert len({tuple(x.flatten()[:4].tolist()) for x in alone}) == len(alone)
        assert all(map(torch.equal, made, alone))


def logged(
    rank: int, world: int, device: torch.device, dtype: torch.dtype, times: Sequence[float], changed: int
) -> list[bool]:
    tiny = tiny_of("FluxTransformer2DModel")
    module, given = tiny.build().to(device), tiny.arguments(device)
    seqpar.parallelize(module, make_mesh(device), cache=StepCache(mask="1000"))
    for step, time in enumerate(times):
        if step == changed:
            seqpar.refresh(module)  # as adapters that are switched in a run
        module(**given | {"timestep": torch.full_like(given["timestep"], time, dtype=dtype)})
    call = call_of(module)
    assert call is not None
    assert call.steps is not None
    return [step.computed for step in call.steps.log]


# twice the same timestep is another run, unless 16 bits round two timesteps to one number
@pytest.mark.parametrize(
    ("dtype", "times", "changed", "log"),
    [
        (torch.float32, (1.0, 1.0, 0.5, 0.5), -1, [True]),
        (torch.bfloat16, (1.0, 1.0, 0.5, 0.5), -1, [True, False, False, False]),
        (torch.float32, (1.0, 0.8, 0.6, 0.4), 2, [True, False, True, False]),
    ],
)
def test_a_run_goes_on_until_timesteps_or_weights_change(
    ranks: Pool, dtype: torch.dtype, times: Sequence[float], changed: int, log: list[bool]
) -> None:
    assert ranks.run(2, logged, dtype, times, changed) == [log, log]


def without(rank: int, world: int, device: torch.device, layers: list[int], cached: bool) -> list[Tensor] | str:
    tiny = tiny_of("SD3Transformer2DModel")
    module: Any = tiny.build().to(device)
    given: dict[str, Any] = tiny.arguments(device) | {"skip_layers": layers}
    if cached:
        seqpar.parallelize(module, make_mesh(device), cache=StepCache(mask="10"))
    with torch.no_grad(), StayDouble():
        try:
            timesteps = [{"timestep": given["timestep"] * time} for time in (1.0, 0.5, 0.25)]
            return [flat(module(**given | time, return_dict=False))[0].cpu() for time in timesteps]
        except ValueError as error:
            return str(error)


@pytest.mark.parametrize("layers", [[0], [1], [-1]])
def test_blocks_that_a_call_leaves_out_itself_hide_no_result(ranks: Pool, layers: list[int]) -> None:
    layers = [tiny_of("SD3Transformer2DModel").config["num_layers"] - 1] if layers == [-1] else layers
    wanted = without(0, 1, torch.device(ranks.device), layers, False)
    for made in ranks.run(2, without, layers, True):
        if layers in ([0], [1]):
            assert all(torch.allclose(x, y, rtol=TOLERANCE, atol=TOLERANCE) for x, y in zip(made, wanted, strict=True))
        else:
            assert "left out the last block" in made
