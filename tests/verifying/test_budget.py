"""Tests of budgets: the search keeps its bound on any number of ranks, and its result is that of its weights alone."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import seqpar
from seqpar.verifying import budget
from seqpar.verifying.budget import GROUPS, RUNS, Kept
from seqpar.verifying.precision import Drawn, Runs
from tests.support.pool import Pool
from tests.support.row_by_row import by_rows, exact_mode
from tests.support.sharded import CPU, raised
from tests.transformer.test_pipelines import CASES

PROMPTS = ("a cat", "two dogs")
SIZE: Any = {"height": 32, "width": 32, "num_inference_steps": 2, "max_sequence_length": 16}
PROBED = 1  # prompts of a probe, here
CACHE = "dbcache:warmup=1"
GAIN = 2.0  # dB over all in 8 bits
FEW = {"GROUPS": 2, "RUNS": 6}  # of a search that many ranks repeat


def eight(change: float = 0.0, precision: str | None = "fp8", **budget: Any) -> Any:
    pipe = CASES["flux"].pipe()
    pipe.set_progress_bar_config(disable=True)
    with torch.no_grad():
        pipe.transformer.proj_out.weight += change

    def run() -> None:
        pipe("a house", output_type="latent", generator=torch.Generator().manual_seed(0), **SIZE)

    eight: Any = {} if precision is None else {"precision": precision, "calibrate": run}
    return seqpar.parallelize(pipe, **eight, **budget)


def searched(
    rank: int,
    world: int,
    device: torch.device,
    cache: Path,
    bound: float,
    prompts: Sequence[str] = PROMPTS,
    **limits: int,
) -> tuple[Kept, list[int]]:
    """Return what a search finds, and how many prompts each of its runs draws. limits: names of `budget`."""
    counts, drawn = list[int](), Runs.drawn

    def counting(self: Runs, count: int | None = None) -> list[Drawn]:
        made = drawn(self, count)
        counts.append(len(made))
        return made

    with pytest.MonkeyPatch.context() as patch, exact_mode(), by_rows():
        patch.setenv("SEQPAR_CACHE", str(cache))
        patch.setattr(Runs, "drawn", counting)
        for name, value in {"PROBED": PROBED, **limits}.items():
            patch.setattr(budget, name, value)
        pipe = eight()
        found = seqpar.keep_budget(pipe, bound, prompts, seed=3, model="tiny", **SIZE)
        seqpar.release(pipe)
    return found, counts


def searched_few(rank: int, world: int, device: torch.device, cache: Path, bound: float) -> tuple[Kept, list[int]]:
    return searched(rank, world, device, cache, bound, PROMPTS[:1], **FEW)


@pytest.fixture(scope="module")
def bound() -> float:
    pipe = eight()
    before = seqpar.measure_precision(pipe, PROMPTS, seed=3, **SIZE)
    seqpar.release(pipe)
    return round(before.worst_psnr + GAIN, 1)


@pytest.fixture(scope="module")
def alone(bound: float, tmp_path_factory: pytest.TempPathFactory) -> tuple[Kept, list[int], Path]:
    cache = tmp_path_factory.mktemp("alone")
    return *searched(0, 1, CPU, cache, bound), cache


def test_the_budget_is_kept_in_few_runs_and_gemms_stay_in_8_bits(
    alone: tuple[Kept, list[int], Path], bound: float
) -> None:
    found, counts, _ = alone
    assert found.before.worst_psnr < bound <= found.after.worst_psnr < math.inf
    assert 0 < len(found.names) < 22  # of all in 8 bits
    assert counts[:3] == [len(PROMPTS)] * 3
    assert sum(count == PROBED for count in counts) <= GROUPS
    assert len(counts) <= RUNS
    assert counts.count(len(PROMPTS)) > 3
    assert sum(group.cost for group in found.groups) < 1
    before = f"worst PSNR {found.before.worst_psnr:.1f} dB in 8 bits"
    for text in ("in the weights' dtype: ", "% of the error, ", before):
        assert text in str(found)


def test_any_number_of_ranks_keeps_the_same_file(cpu_ranks: Pool, bound: float, tmp_path: Path) -> None:
    wanted, _ = searched_few(0, 1, CPU, tmp_path / "1", bound)
    (file,) = (tmp_path / "1").iterdir()
    assert wanted.names
    cache = tmp_path / "2"
    for found, _ in cpu_ranks.run(2, searched_few, cache, bound):
        assert found.names == wanted.names
    assert [(made.name, made.read_bytes()) for made in cache.iterdir()] == [(file.name, file.read_bytes())]


def test_loading_reads_the_result_of_its_own_weights_steps_and_bound(
    monkeypatch: pytest.MonkeyPatch, alone: tuple[Kept, list[int], Path], bound: float, capsys: Any
) -> None:
    found, _, cache = alone
    monkeypatch.setenv("SEQPAR_CACHE", str(cache))
    with exact_mode(), by_rows():
        pipe = eight(min_psnr=bound, budget_steps=2)
        again = seqpar.measure_precision(pipe, PROMPTS, seed=3, **SIZE)
        seqpar.release(pipe)
    assert again.errors == found.after.errors
    said = f"{len(found.names)} GEMMs keep the dtype of the weights for {bound:g} dB in 2 steps"
    assert said in capsys.readouterr().out
    command = "run: seqpar verify --precision fp8 --min-psnr"
    for other in ({"change": 1.0}, {"budget_steps": 3}, {"min_psnr": bound + 1}):
        assert command in raised(lambda other=other: eight(**{"min_psnr": bound, "budget_steps": 2, **other}))


@pytest.mark.parametrize(("least", "says"), [(199.0, "it is above the floor"), (90.0, "leaves no GEMMs in 8 bits")])
def test_a_budget_that_cannot_be_kept_is_said_and_changes_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, least: float, says: str
) -> None:
    monkeypatch.setenv("SEQPAR_CACHE", str(tmp_path))
    pipe = eight()
    with pytest.raises(FloatingPointError, match=says):
        seqpar.keep_budget(pipe, least, PROMPTS[:1], **SIZE)
    assert not list(tmp_path.iterdir())
    assert seqpar.measure_precision(pipe, PROMPTS[:1], **SIZE).worst_psnr < 90
    seqpar.release(pipe)


def test_a_threshold_is_searched_for_what_8_bits_leave_of_the_budget(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Any
) -> None:
    monkeypatch.setenv("SEQPAR_CACHE", str(tmp_path))
    size, drawn, runs = {**SIZE, "num_inference_steps": 5}, Runs.drawn, list[Runs]()
    monkeypatch.setattr(Runs, "drawn", lambda self, count=None: (runs.append(self), drawn(self, count))[1])
    found = dict[str | None, Kept]()
    for precision in (None, "fp8"):
        runs.clear()
        pipe = eight(precision=precision, cache=CACHE)
        found[precision] = now = seqpar.keep_budget(pipe, 30.0, PROMPTS[:1], seed=3, **size)
        seqpar.release(pipe)
        assert 3 < len(runs) <= (RUNS if precision is None else 2 * RUNS)
        assert 30 <= now.after.worst_psnr < now.before.worst_psnr
        assert all(1 <= count < 5 == steps for count, steps in now.after.computed)
        assert f"threshold {now.threshold:g}: " in str(now)

        # the result is that of this cache and precision, and has the same images
        budget: Any = {"precision": precision, "min_psnr": 30.0, "budget_steps": 5}
        pipe = eight(cache=CACHE, **budget)
        again = seqpar.measure_precision(pipe, PROMPTS[:1], seed=3, **size)
        seqpar.release(pipe)
        assert (again.errors, again.computed) == (now.after.errors, now.after.computed)
        assert 0 < again.floor[0].pixels < 1e-4
        assert f"step cache {CACHE.replace(':', f':threshold={now.threshold:g},')} for 30 dB" in capsys.readouterr().out
        command = f"run: seqpar verify {'--precision fp8 ' if precision else ''}--cache taylorseer"
        assert command in raised(lambda budget=budget: eight(cache="taylorseer:warmup=1", **budget))
    assert found["fp8"].after.errors != found[None].after.errors


def gemms(*sizes: tuple[str, str, int]) -> Sequence[budget.Gemm]:
    return [budget.Gemm(f"transformer|{path}, {role}", path, "Block", role, size, 0.0) for path, role, size in sizes]


def test_groups_are_roles_and_ends_and_the_cheapest_are_joined() -> None:
    roles = ("a", "b", "c", "d", "e", "f", "g")
    made = budget._groups(gemms(*((f"blocks.{n}", role, 1 + 10 * k) for n in range(4) for k, role in enumerate(roles))))
    labels = [group.label for group in made]
    assert labels == [
        "a of Block, b of Block, c of Block",
        *(f"{x} of Block" for x in "def"),
        "first and last blocks",
        "g of Block",
    ]
    assert math.isclose(sum(group.cost for group in made), 1)
    assert sorted(name for group in made for name in group.names) == sorted(
        f"transformer|blocks.{n}, {role}" for n in range(4) for role in roles
    )


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"min_psnr": 30.0}, 'min_psnr= without precision="fp8" or cache='),
        ({"cache": "dbcache:threshold=0.2", "min_psnr": 30.0}, "leave threshold and mask out"),
        ({"precision": "fp8", "min_psnr": math.inf}, "min_psnr=inf, expected more than 0 and at most 200 dB"),
        ({"precision": "fp8", "min_psnr": True}, "min_psnr=True"),
        ({"precision": "fp8", "budget_steps": 2}, "budget_steps= without min_psnr="),
        ({"precision": "fp8", "min_psnr": 30.0, "budget_steps": 0}, "budget_steps=0, expected a whole number"),
    ],
)
def test_wrong_budgets_are_refused(options: Any, says: str) -> None:
    assert says in raised(lambda: seqpar.parallelize(CASES["flux"].pipe(), **options))
    assert "needs a pipeline with a scheduler" in raised(
        lambda: seqpar.parallelize(CASES["flux"].pipe().transformer, precision="fp8", min_psnr=30.0)
    )
