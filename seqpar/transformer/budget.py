"""A budget for the error of 8 bits: GEMMs that keep the weights' dtype, so that images keep a PSNR.

`seqpar.verifying.budget` searches them by measuring images, and rank 0 keeps the result beside the calibrations, from
where loading reads it: no request and no server chooses a GEMM.
"""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from seqpar.families._modular import parameters_of
from seqpar.mesh.mesh import Mesh
from seqpar.planner.rates import cache_folder
from seqpar.transformer.calibration import Calibration, key_of
from seqpar.types.arguments import check_whole
from seqpar.types.say import say

MOST_PSNR = 200.0  # dB


@dataclass(frozen=True)
class Budget:
    """The least PSNR of an image in 8 bits against the weights' dtype, in dB, for a number of steps and a scheduler.

    scheduler: its class and settings. model: as `seqpar verify` takes it, for messages.
    """

    min_psnr: float
    steps: int
    scheduler: str
    model: str

    @staticmethod
    def of(pipe: Any, min_psnr: float, steps: int | None, model: str | None = None, scheduler: Any = None) -> Budget:
        """Return the budget of a pipeline; steps, model, scheduler: None takes the pipeline's own."""
        scheduler = getattr(pipe, "scheduler", None) if scheduler is None else scheduler
        if scheduler is None:
            raise ValueError(f"min_psnr= needs a pipeline with a scheduler, got {type(pipe).__name__}")
        steps = steps_of(pipe) if steps is None else steps
        settings = sorted((key, x) for key, x in dict(scheduler.config).items() if not key.startswith("_"))
        own = getattr(pipe.config, "_name_or_path", None) or "MODEL"
        return Budget(min_psnr, steps, f"{type(scheduler).__name__} {settings}", own if model is None else model)

    def __str__(self) -> str:
        return f"{self.min_psnr:g} dB in {self.steps} steps of {self.scheduler.partition(' ')[0]}"

    def path(self, made: Mapping[str, Calibration]) -> Path:
        """Return the file of the result for the weights of these calibrations, this GPU and these libraries."""
        key = key_of((self.scheduler, [(name, of.weights, bool(of.attention)) for name, of in made.items()]), ())
        return cache_folder() / f"{_name(self.min_psnr, self.steps)}-{key}.json"

    def read(self, mesh: Mesh, made: Mapping[str, Calibration]) -> list[str]:
        """Return the names of the GEMMs that keep the weights' dtype; ValueError if there is no result. Collective."""
        names = mesh.share(_read(self.path(made)) if mesh.is_main else None, list[str] | None)
        if names is None:
            raise ValueError(missing(self, self.min_psnr, self.steps, self.model))
        return names

    @staticmethod
    def write(path: Path, names: list[str]) -> None:
        """Keep the result of a search; OSError if the cache cannot be written."""
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(f".{os.getpid()}.part")
        part.write_text(json.dumps(sorted(names)), encoding="utf-8")
        os.replace(part, path)


def check_searched(mesh: Mesh, min_psnr: float, steps: int, model: str) -> None:
    """Raise ValueError on all ranks if no model has a result for a budget, before weights load. Collective."""
    if not mesh.share(any(cache_folder().glob(f"{_name(min_psnr, steps)}-*.json")), bool):
        raise ValueError(missing(f"{min_psnr:g} dB in {steps} steps", min_psnr, steps, model))


def missing(budget: object, min_psnr: float, steps: int, model: str) -> str:
    """Return the text of the error where there is no result, with the command that makes one."""
    return (
        f"no search was made for {budget} with these weights, this GPU and these libraries; run: seqpar verify "
        f"--precision fp8 --min-psnr {min_psnr:g} --steps {steps} --model {model}, with the --scheduler and "
        f"--local-attention of this run; for a pipeline that parallelize was given, call seqpar.keep_budget"
    )


def budgeted(mesh: Mesh, made: Mapping[str, Calibration], budget: Budget) -> dict[str, Calibration]:
    """Return calibrations whose GEMMs keep the weights' dtype as the budget's search found; rank 0 prints how many.

    Collective; ValueError on all ranks if there is no result for these weights.
    """
    names = budget.read(mesh, made)
    if mesh.is_main:
        say(f"{len(names)} GEMMs keep the dtype of the weights for {budget}")
    return {name: replace(of, kept=kept_in(name, names)) for name, of in made.items()}


def kept_in(transformer: str, names: Collection[str]) -> frozenset[str]:
    """Return the GEMMs of one transformer among names of the form TRANSFORMER|BLOCK, MATRIX."""
    return frozenset(key for name in names for whose, _, key in [name.partition("|")] if whose == transformer)


def check_budget(min_psnr: object, steps: object, precision: object) -> None:
    """Raise ValueError for a budget that is none."""
    if min_psnr is None and steps is None:
        return
    if min_psnr is None:
        raise ValueError("got budget_steps= without min_psnr=")
    if precision is None:
        raise ValueError('got min_psnr= without precision="fp8", whose error it bounds')
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


def _name(min_psnr: float, steps: int) -> str:
    return f"budget-{min_psnr:g}-{steps}"


def _read(path: Path) -> list[str] | None:
    try:
        names = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return names if isinstance(names, list) and all(isinstance(name, str) for name in names) else None
