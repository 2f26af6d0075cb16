"""`keep_budget`: which GEMMs have to keep the weights' dtype, and which threshold a step cache may have, for a PSNR.

GEMMs return to the weights' dtype in groups: those of one role in one class of blocks, and all of the first and the
last block. A probe measures what a group takes away of the squared error of a few images; errors of roundings are
nearly independent, so that these shares about add up. Groups are ordered by their share per weight that leaves 8 bits,
and runs of all prompts find the shortest beginning of this order that keeps the budget. A threshold is searched after
them, with these GEMMs: doubled or halved from where it was until it is between two, and then bisected.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

from seqpar.loading.parts import transformers_of
from seqpar.transformer import lora as adapters
from seqpar.transformer.budget import Budget, Found, check_budget
from seqpar.transformer.lossy import calibrations_of, computed_by, keep_dtype, set_threshold
from seqpar.transformer.parallelize import calls_of
from seqpar.verifying.precision import (
    EXACT,
    PROMPTS,
    Difference,
    Drawn,
    Gemm,
    Measured,
    PrecisionError,
    Runs,
    computed,
    decibels,
    differences,
    steps_text,
    worst,
)

RUNS = 12
"""The most runs of a search: three of all prompts (as it is, the weights' dtype with all steps, diffusers' modules),
probes of GEMMs, and runs of all prompts for the rest. A threshold after GEMMs takes as many again."""
GROUPS = 6  # probes; the cheapest groups are joined
PROBED = 2  # prompts of a probe
FIRST = 0.1  # threshold of a search that begins with none
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
    """What a search found: the groups that keep the weights' dtype, a cache's threshold, and errors before and after.

    before: with all GEMMs in 8 bits and no cache, or else with the first threshold. seconds: of the fastest image,
    before and after.
    """

    groups: tuple[Group, ...]
    before: PrecisionError
    after: PrecisionError
    seconds: tuple[float, float]
    threshold: float | None = None

    @property
    def names(self) -> list[str]:
        return sorted(name for group in self.groups for name in group.names)

    def __str__(self) -> str:
        lines = [
            f"{group.label}: {group.share:.0%} of the error, {group.cost:.0%} of the weights" for group in self.groups
        ]
        before, after = (f"{of.worst_psnr:.1f} dB" for of in (self.before, self.after))
        ms = [f"{1e3 * seconds:.0f} ms" for seconds in self.seconds]
        eight = "8 bits" in self.before.whose
        lines = [f"in the weights' dtype: {line}" for line in lines or ["nothing has to return to it"]] if eight else []
        if self.threshold is not None:
            lines.append(f"threshold {self.threshold:g}: {steps_text(self.after.computed)} steps are computed")
        first = "in 8 bits" if eight else "with the first threshold"
        lines.append(f"worst PSNR {before} {first}, {after} so; fastest image {ms[0]}, {ms[1]}")
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
    """Search what to compute as without 8 bits and cache, compute so from now on, and keep the result. Collective.

    pipe: a diffusers pipeline after `parallelize` with precision="fp8", cache= or both, with the weights that were
    loaded and without active LoRAs. arguments: of its call. The result, GEMMs to keep in the weights' dtype and the
    cache's threshold, is for `num_inference_steps` and the pipeline's scheduler, in the cache of rank 0, from which
    `min_psnr=` of `parallelize` and `load` and --min-psnr read it; in exact mode it is the same on any number of GPUs.
    It takes at most 12 runs, of which up to six draw two prompts, and with both 12 more. Rank 0 decides and prints.
    Raises FloatingPointError on all ranks if the floor is below `min_psnr`, or if no GEMM could stay in 8 bits or no
    step be left out; the pipeline is then as before.
    """
    made, calls = calibrations_of(pipe), [call for _, call in calls_of(pipe)]
    if any(call.keeps_attention is not None for call in calls):
        raise ValueError("a budget is searched with one attention in all steps; load it without attention_steps=")
    before = next((call.steps.options for call in calls if call.steps is not None), None)
    whose: Any = {"precision": "fp8" if made else None, "cache": before and replace(before, threshold=None)}
    if not made and before is None:
        raise ValueError(EXACT)
    check_budget(min_psnr, arguments.get("num_inference_steps"), **whose)
    whose["attention"] = any(call.sharded.attentions_in_8_bits for call in calls)
    budget = Budget.of(pipe, min_psnr, arguments.get("num_inference_steps"), model=model, **whose)
    arguments["num_inference_steps"] = budget.steps
    modules = transformers_of(pipe)
    if any(map(adapters.are_on, modules.values())):
        raise ValueError("a budget is searched for a model without LoRAs; release and load it without them")
    runs, path = Runs(pipe, prompts, seed, arguments), budget.path(modules, made)
    chosen = [f"{name}|{key}" for name, calibration in made.items() for key in sorted(calibration.kept)]
    threshold = None if before is None else before.threshold
    try:
        keep_dtype(pipe, ())
        with computed_by(pipe, cache=not made):
            measured = runs.measured()
            if runs.mesh.is_main:
                print(measured.error, flush=True)
            found = _with_gemms(pipe, runs, budget, measured) if made else None
        if before is not None:
            keep_dtype(pipe, [] if found is None else found.names)
            found = _with_threshold(pipe, runs, budget, measured, found, before.threshold)
        assert found is not None
        chosen, threshold = found.names, found.threshold
    finally:
        keep_dtype(pipe, chosen)
        set_threshold(pipe, threshold)
    if runs.mesh.is_main:
        print(found, flush=True)
    runs.mesh.on_all_ranks(lambda: Budget.write(path, Found(chosen, threshold)) if runs.mesh.is_main else None)
    return found


def _with_gemms(pipe: Any, runs: Runs, budget: Budget, measured: Measured) -> Kept:
    def is_kept(error: PrecisionError) -> bool:  # as rank 0 finds
        return runs.mesh.share(error.worst_psnr >= budget.min_psnr, bool)

    if not measured.gemms:
        raise ValueError(EXACT)
    before, plain = measured.error, measured.plain
    seconds = _fastest(measured.lossy)
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


def _with_threshold(
    pipe: Any, runs: Runs, budget: Budget, measured: Measured, kept: Kept | None, threshold: float | None
) -> Kept:
    # a threshold that computes as few steps as the budget allows; kept: what the GEMMs need, None without 8 bits
    drawn, turns = None if kept is not None else measured.lossy, RUNS if kept is not None else RUNS - 2
    seconds = _fastest(measured.lossy)
    kept = kept or Kept((), measured.error, measured.error, (seconds, seconds))
    threshold = threshold or FIRST
    low, high, fewest, most, found = 0.0, math.inf, math.inf, 0, None
    now, failed = kept.after, None
    whose = now.whose if "cache" in now.whose else f"{now.whose}, cache"
    for _ in range(turns):
        if drawn is None:
            set_threshold(pipe, threshold)
            drawn = runs.drawn()
        now = replace(now, errors=differences(drawn, measured.plain), whose=whose, computed=computed(drawn))
        count, whole = map(sum, zip(*now.computed, strict=True))
        is_kept, count = runs.mesh.share((now.worst_psnr >= budget.min_psnr, count), tuple[bool, int])
        if is_kept:
            is_last = high == math.inf and count == fewest < whole  # twice the threshold leaves no more steps out
            if count < min(fewest, whole):
                found = replace(kept, after=now, seconds=(kept.seconds[0], _fastest(drawn)), threshold=threshold)
            low, fewest = threshold, count
        else:
            is_last, high, most, failed = False, threshold, count, now
        threshold = 2 * low if high == math.inf else high / 2 if not low else math.sqrt(low * high)
        threshold, drawn = float(f"{threshold:.2g}"), None
        if is_last or most == min(fewest, whole) or threshold in (low, high):
            break
    if found is None and failed is None:
        raise FloatingPointError(f"no threshold leaves one of {budget.steps} steps out; use a smaller warmup")
    if found is None:
        assert failed is not None
        raise FloatingPointError(
            f"a PSNR of {budget.min_psnr:g} dB leaves no step out: with a threshold of {high:g}, "
            f"{steps_text(failed.computed)} steps are computed and it is {failed.worst_psnr:.1f} dB; ask for less, or "
            "leave the cache out"
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
