"""`keep_budget`: which GEMMs have to keep the weights' dtype, so that images in 8 bits keep a PSNR.

GEMMs return to the weights' dtype in groups: those of one role in one class of blocks, and all of the first and the
last block. A probe measures what a group takes away of the squared error of a few images; errors of roundings are
nearly independent, so that these shares about add up. Groups are ordered by their share per weight that leaves 8 bits,
and runs of all prompts find the shortest beginning of this order that keeps the budget.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

from seqpar.loading.parts import transformers_of
from seqpar.transformer import lora as adapters
from seqpar.transformer.budget import Budget, check_budget
from seqpar.transformer.parallelize import calibrations_of, calls_of, keep_dtype
from seqpar.verifying.precision import (
    NO_EIGHT,
    PROMPTS,
    Difference,
    Drawn,
    Gemm,
    PrecisionError,
    Runs,
    decibels,
    differences,
    worst,
)

RUNS = 12
"""The most runs of a search: three of all prompts (8 bits, the weights' dtype, diffusers' modules), probes, and runs of
all prompts for the rest."""
GROUPS = 6  # probes; the cheapest groups are joined
PROBED = 2  # prompts of a probe
TINY = 1e-30  # in place of a squared error of zero


@dataclass(frozen=True)
class Group:
    """GEMMs that return to the weights' dtype together.

    names: TRANSFORMER|BLOCK, MATRIX. cost: weights, which are FLOPs per token; share: of the squared error of images;
    both relative to all GEMMs in 8 bits.
    """

    label: str
    names: tuple[str, ...]
    cost: float
    share: float = 0.0


@dataclass(frozen=True)
class Kept:
    """What a search found: the groups that keep the weights' dtype, and the errors before and after.

    seconds: of the fastest image with all GEMMs in 8 bits, and with these groups in the weights' dtype.
    """

    groups: tuple[Group, ...]
    before: PrecisionError
    after: PrecisionError
    seconds: tuple[float, float]

    @property
    def names(self) -> list[str]:
        return sorted(name for group in self.groups for name in group.names)

    def __str__(self) -> str:
        lines = [
            f"{group.label}: {group.share:.0%} of the error, {group.cost:.0%} of the weights" for group in self.groups
        ]
        before, after = (f"{of.worst_psnr:.1f} dB" for of in (self.before, self.after))
        ms = [f"{1e3 * seconds:.0f} ms" for seconds in self.seconds]
        lines = [f"in the weights' dtype: {line}" for line in lines or ["nothing has to return to it"]]
        lines.append(f"worst PSNR {before} in 8 bits, {after} so; fastest image {ms[0]}, {ms[1]}")
        return "\n".join(f"budget    {line}" for line in lines)


def keep_budget(
    pipe: Any,
    min_psnr: float,
    prompts: Sequence[str] = PROMPTS,
    *,
    seed: int = 0,
    model: str | None = None,
    **arguments: Any,
) -> Kept:
    """Search the GEMMs to keep in the weights' dtype, compute so from now on, and keep the result. Collective.

    pipe: a diffusers pipeline after `parallelize(pipe, precision="fp8")`, with the weights that were loaded and without
    active LoRAs. arguments: of its call. The result is for `num_inference_steps` and the pipeline's scheduler, in the
    cache of rank 0, from which `min_psnr=` of `parallelize` and `load` and --min-psnr read it; in exact mode it is the
    same on any number of GPUs. It takes at most 12 runs, of which up to six draw two prompts. Rank 0 decides and
    prints. Raises FloatingPointError on all ranks if the floor is below `min_psnr`, or if no GEMM could stay in 8 bits;
    the pipeline is then as before.
    """
    check_budget(min_psnr, arguments.get("num_inference_steps"), "fp8")
    if any(call.keeps_attention is not None for _, call in calls_of(pipe)):
        raise ValueError("a budget is searched with one attention in all steps; load it without attention_steps=")
    made, budget = calibrations_of(pipe), Budget.of(pipe, min_psnr, arguments.get("num_inference_steps"), model)
    arguments["num_inference_steps"] = budget.steps
    if not made:
        raise ValueError(NO_EIGHT)
    if any(map(adapters.are_on, transformers_of(pipe).values())):
        raise ValueError("a budget is searched for a model without LoRAs; release and load it without them")
    runs, path = Runs(pipe, prompts, seed, arguments), budget.path(made)
    chosen = [f"{name}|{key}" for name, calibration in made.items() for key in sorted(calibration.kept)]
    try:
        keep_dtype(pipe, ())
        found = _searched(pipe, runs, budget)
        chosen = found.names
    finally:
        keep_dtype(pipe, chosen)
    if runs.mesh.is_main:
        print(found, flush=True)
    runs.mesh.on_all_ranks(lambda: Budget.write(path, chosen) if runs.mesh.is_main else None)
    return found


def _searched(pipe: Any, runs: Runs, budget: Budget) -> Kept:
    def is_kept(error: PrecisionError) -> bool:  # as rank 0 finds
        return runs.mesh.share(error.worst_psnr >= budget.min_psnr, bool)

    measured = runs.measured()
    if not measured.gemms:
        raise ValueError(NO_EIGHT)
    before, plain = measured.error, measured.plain
    if runs.mesh.is_main:
        print(before, flush=True)
    seconds = _fastest(measured.eight)
    if is_kept(before):
        return Kept((), before, before, (seconds, seconds))
    if not runs.mesh.share(worst(before.floor) >= budget.min_psnr, bool):
        raise FloatingPointError(
            f"a PSNR of {budget.min_psnr:g} dB cannot be kept: it is above the floor, {worst(before.floor):.1f} dB, by "
            "which the weights' dtype without 8 bits differs from diffusers' own modules; ask for less"
        )

    # what each group takes away of the squared error of the first prompts
    groups, probed = list[Group](), before.errors[:PROBED]
    for group in _groups(measured.gemms):
        keep_dtype(pipe, group.names)
        left = differences(runs.drawn(PROBED), plain)
        shares = [1 - _squared(now) / max(_squared(was), TINY) for now, was in zip(left, probed, strict=True)]
        groups.append(replace(group, share=max(0.0, sum(shares) / len(shares))))
    order = runs.mesh.share([*sorted(range(len(groups)), key=lambda n: -groups[n].share / groups[n].cost)], list[int])
    ordered = [groups[n] for n in order]

    # the shortest beginning of this order that keeps the budget; all groups would leave nothing in 8 bits
    left_over = [max(0.0, 1 - share) for share in accumulate((group.share for group in ordered), initial=0.0)]
    low, high, error, found = 0, len(ordered), before, None
    wanted = 10 ** (-budget.min_psnr / 10)
    for turn in range(spare := RUNS - 3 - len(ordered)):
        if low + 1 >= high:
            break
        scale = 10 ** (-error.worst_psnr / 10) / left_over[low] if left_over[low] else math.inf
        guess = next((n for n in range(low + 1, high) if scale * left_over[n] <= wanted), high - 1)
        guess = high - 1 if found is None and turn == spare - 1 else guess
        guess = runs.mesh.share(guess, int)
        keep_dtype(pipe, [name for group in ordered[:guess] for name in group.names])
        drawn = runs.drawn()
        now = replace(before, errors=differences(drawn, plain), gemms=())
        if is_kept(now):
            high, found = guess, Kept(tuple(ordered[:guess]), before, now, (seconds, _fastest(drawn)))
        else:
            low, error = guess, now
    if found is None:
        raise FloatingPointError(
            f"a PSNR of {budget.min_psnr:g} dB leaves no GEMMs in 8 bits: with {ordered[-1].label} alone it is "
            f"{error.worst_psnr:.1f} dB (the floor is {worst(before.floor):.1f} dB); ask for less, or leave 8 bits out"
        )
    return found


def _groups(gemms: Sequence[Gemm]) -> list[Group]:
    # by role and class of block; the first and the last block are a group of their own
    ends = {gemm.path for gemm in (gemms[0], gemms[-1])}
    whole, parts = sum(gemm.weights for gemm in gemms), dict[str, list[Gemm]]()
    for gemm in gemms:
        label = "first and last blocks" if gemm.path in ends else f"{gemm.role} of {gemm.block}"
        parts.setdefault(label, []).append(gemm)
    groups = [  # all GEMMs read about the same tokens
        Group(label, tuple(gemm.name for gemm in part), sum(gemm.weights for gemm in part) / whole)
        for label, part in parts.items()
    ]
    while len(groups) > GROUPS:
        first, second, *others = sorted(groups, key=lambda group: (group.cost, group.label))
        joined = Group(f"{first.label}, {second.label}", first.names + second.names, first.cost + second.cost)
        groups = [*others, joined]
    return sorted(groups, key=lambda group: group.label)


def _squared(error: Difference) -> float:
    return 10 ** (-decibels(error) / 10)  # inf for an image that is not finite


def _fastest(drawn: Sequence[Drawn]) -> float:
    return min(image.seconds for image in drawn)  # the first one may compile or capture
