"""A budget for the error of 8 bits and of a step cache: what is computed as without them, so that images keep a PSNR.

`seqpar.verifying.budget` searches GEMMs and a threshold by measuring images, and rank 0 keeps the result beside the
calibrations, from where loading reads it: no request and no server chooses them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
from torch import nn

from seqpar.families._modular import parameters_of
from seqpar.mesh.mesh import Mesh
from seqpar.planner.rates import cache_folder, keep
from seqpar.transformer.calibration import Calibration, calibrated, key_of, weights_of
from seqpar.transformer.step_cache import StepCache, completed
from seqpar.types.arguments import check_whole
from seqpar.types.say import say

MOST_PSNR = 200.0  # dB


@dataclass(frozen=True)
class Found:
    """The result of a search: GEMMs that keep the weights' dtype, and the threshold of a step cache."""

    gemms: list[str]
    threshold: float | None = None


@dataclass(frozen=True)
class Budget:
    """The least PSNR of an image against all steps in the weights' dtype, in dB, for steps and a scheduler.

    scheduler: its class and settings, empty if not known yet. model: as `seqpar verify` takes it, for messages.
    precision, cache, attention (in 8 bits): whose error it bounds; the cache's threshold is searched.
    """

    min_psnr: float
    steps: int
    scheduler: str
    model: str
    precision: str | None
    cache: StepCache | None
    attention: bool = False

    @staticmethod
    def of(
        pipe: Any, min_psnr: float, steps: int | None, *, model: str | None = None, scheduler: Any = None, **whose: Any
    ) -> Budget:
        """Return the budget of a pipeline; steps, model, scheduler: None takes the pipeline's own. whose: the rest."""
        scheduler = getattr(pipe, "scheduler", None) if scheduler is None else scheduler
        if scheduler is None:
            raise ValueError(f"min_psnr= needs a pipeline with a scheduler, got {type(pipe).__name__}")
        steps = steps_of(pipe) if steps is None else steps
        settings = sorted((key, x) for key, x in dict(scheduler.config).items() if not key.startswith("_"))
        own = getattr(pipe.config, "_name_or_path", None) or "MODEL"
        used = f"{type(scheduler).__name__} {settings}"
        return Budget(min_psnr, steps, used, own if model is None else model, **whose)

    def __str__(self) -> str:
        of = f" of {self.scheduler.partition(' ')[0]}" if self.scheduler else ""
        return f"{self.min_psnr:g} dB in {self.steps} steps{of}"

    def check_searched(self, mesh: Mesh) -> None:
        """Raise ValueError on all ranks if no model has a result for this, before weights load. Collective."""
        if not mesh.share(any(cache_folder().glob(f"{self._name}-*.json")), bool):
            raise ValueError(self.missing())

    def missing(self) -> str:
        """Return the text of the error where there is no result, with the command that makes one."""
        what = "" if self.precision is None else f"--precision {self.precision} "
        what += "" if self.cache is None else f"--cache {self.cache} "
        return (
            f"no search was made for {self} with these weights, this GPU and these libraries; run: seqpar verify "
            f"{what}--min-psnr {self.min_psnr:g} --steps {self.steps} --model {self.model}, with the --scheduler and "
            f"--local-attention of this run; for a pipeline that parallelize was given, call seqpar.keep_budget"
        )

    def path(self, modules: Mapping[str, nn.Module], made: Mapping[str, Calibration]) -> Path:
        """Return the file of the result for the weights of these transformers, this GPU and these libraries."""
        if self.precision is None:
            weights: object = key_of((), weights_of(modules))
        else:  # as they were before they were rounded
            weights = [(name, of.weights) for name, of in made.items()]
        caches = [] if self.cache is None else [completed(self.cache, module)[0] for module in modules.values()]
        key = key_of((self.scheduler, weights, self.attention, [replace(of, threshold=None) for of in caches]), ())
        return cache_folder() / f"{self._name}-{key}.json"

    def read(self, mesh: Mesh, modules: Mapping[str, nn.Module], made: Mapping[str, Calibration]) -> Found:
        """Return the result of the search; ValueError if there is none. Collective."""
        path = mesh.on_all_ranks(lambda: self.path(modules, made))
        found = mesh.share(_read(path) if mesh.is_main else None, Found | None)
        if found is None or (found.threshold is None) != (self.cache is None):
            raise ValueError(self.missing())
        return found

    @staticmethod
    def write(path: Path, found: Found) -> None:
        """Keep the result of a search; OSError if the cache cannot be written."""
        keep(path, msgspec.json.encode(found))

    @property
    def _name(self) -> str:
        whose = [*((self.precision,) if self.precision else ()), *(("cache",) if self.cache else ())]
        return f"budget-{'-'.join(whose)}-{self.min_psnr:g}-{self.steps}"


def budgeted(
    mesh: Mesh, modules: Mapping[str, nn.Module], made: Mapping[str, Calibration], budget: Budget
) -> tuple[dict[str, Calibration], StepCache | None]:
    """Return calibrations whose GEMMs keep the weights' dtype as the budget's search found, and its step cache.

    Rank 0 prints both. Collective; ValueError on all ranks if there is no result for these weights.
    """
    found, cache = budget.read(mesh, modules, made), budget.cache
    if budget.precision is not None:
        say(f"{len(found.gemms)} GEMMs keep the dtype of the weights for {budget}", mesh)
    if cache is not None:
        cache = replace(cache, threshold=found.threshold)
        say(f"step cache {cache} for {budget}", mesh)
    return {name: replace(of, kept=kept_in(name, found.gemms)) for name, of in made.items()}, cache


def kept_in(transformer: str, names: Collection[str]) -> frozenset[str]:
    """Return the GEMMs of one transformer among names of the form TRANSFORMER|BLOCK, MATRIX."""
    return frozenset(key for name in names for whose, _, key in [name.partition("|")] if whose == transformer)


def check_budget(min_psnr: object, steps: object, precision: object, cache: StepCache | None) -> None:
    """Raise ValueError for a budget that is none."""
    if min_psnr is None and steps is None:
        return
    if min_psnr is None:
        raise ValueError("got budget_steps= without min_psnr=")
    if precision is None and cache is None:
        raise ValueError('got min_psnr= without precision="fp8" or cache=, whose error it bounds')
    if cache is not None and (cache.threshold is not None or cache.mask):
        raise ValueError(f"got min_psnr= with cache={cache}, whose threshold it finds; leave threshold and mask out")
    if isinstance(min_psnr, bool) or not isinstance(min_psnr, (int, float)) or not 0 < min_psnr <= MOST_PSNR:
        raise ValueError(f"got min_psnr={min_psnr!r}, expected more than 0 and at most {MOST_PSNR:g} dB")
    if steps is not None:
        check_whole("budget_steps", steps, 1, 100_000)


def steps_of(caller: Any) -> int:
    """Return the number of steps of a pipeline's call by default; ValueError if it has none.

    caller: a pipeline, or the class of one that is not modular.
    """
    known = parameters_of(caller).get("num_inference_steps")
    if known is None or not isinstance(known.default, int):
        kind = caller if isinstance(caller, type) else type(caller)
        raise ValueError(f"{kind.__name__} has no number of steps; pass budget_steps=")
    return known.default


def _read(path: Path) -> Found | None:
    try:
        return msgspec.json.decode(path.read_bytes(), type=Found)
    except (OSError, msgspec.MsgspecError):
        return None


@dataclass(frozen=True)
class Lossy:
    """What may differ from the weights' own arithmetic: GEMMs and attention in 8 bits, a step cache, and their budget.

    calibrate: as of `parallelize`.
    """

    gemms: bool
    attention: bool
    cache: StepCache | None
    calibrate: Callable[[], object] | Mapping[str, Calibration] | None
    budget: Budget | None

    def settled(
        self, mesh: Mesh, pipe_or_transformer: Any, modules: Mapping[str, nn.Module]
    ) -> tuple[Mapping[str, Calibration], StepCache | None]:
        """Return the calibrations, made if the caller has none, and the cache, both as the budget says. Collective."""
        made: Mapping[str, Calibration] = {}
        if isinstance(self.calibrate, Mapping):
            made = self.calibrate
        elif self.gemms or self.attention:
            made = calibrated(mesh, pipe_or_transformer, modules, self.calibrate, self.gemms, self.attention)
        return (made, self.cache) if self.budget is None else budgeted(mesh, modules, made, self.budget)
