"""Tests that what is added to `seqpar` is one file: a strategy, transport, local attention, kernel, model or family.

The new files of `tests/support/one_file` are put into the folders of a copy of the repository. There the whole test
files below run, as they are. They iterate over the folders, so that each new member is tested like those that were
there before. Cases of the old members alone are left out: these have run outside of the copy.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.support.one_file import FOLDER, members

pytestmark = [pytest.mark.slow, pytest.mark.whole]
ROOT = Path(__file__).parents[1]
FILES = (
    "tests/test_members.py",
    "tests/attention/test_strategies.py",
    "tests/attention/test_late.py",
    "tests/planner/test_costs.py",
    "tests/planner/test_plan.py",
    "tests/local/test_local_attention.py",
    "tests/transports/test_contract.py",
    "tests/transports/test_halo.py",
    "tests/transports/test_moves.py",
)


# names that a new model and a new family of pipelines add to a list, besides their file
NAMED = (
    ("seqpar/loading/names.py", "OF_MODELS = (", 'OF_MODELS = ("two-streams", '),
    ("seqpar/pipelines/find.py", 'FAMILIES = ("classes"', 'FAMILIES = ("toy_texts", "classes"'),
)
ROOMS = {"models": "loop/models"}  # rooms inside of others
WRONG = "halves_off"  # a strategy with a mistake: the negative control


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a copy of the repository's code and tests with the new files and the wrong one in their folders."""
    root = tmp_path_factory.mktemp("copy")
    for name in ("seqpar", "launch", "tests", "docs/planner.md", "pyproject.toml"):
        target = root / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, target)  # with compiled files, which are as old as their sources
        else:
            shutil.copy(ROOT / name, target)
    rooms = root / FOLDER.relative_to(ROOT)
    right = (rooms / "attention" / "halves.py").read_text()
    wrong = right.replace("begin = start + ", "begin = start + 0 * ")
    assert wrong != right
    (rooms / "attention" / f"{WRONG}.py").write_text(wrong)
    for room in members():
        shutil.copytree(rooms / room, root / "seqpar" / ROOMS.get(room, room), dirs_exist_ok=True)
    for name, old, new in NAMED:
        text = (root / name).read_text()
        assert text.count(old) == 1
        (root / name).write_text(text.replace(old, new))
    return root


@pytest.mark.timeout(900)
def test_new_members_pass_the_tests_of_the_old_ones_and_a_wrong_one_fails(copy: Path) -> None:
    """With one GPU nothing fails: one rank alone exchanges nothing."""
    command = [sys.executable, "-m", "pytest", "-p", "tests.support.one_file.selected", "-p", "no:cacheprovider"]
    flags = ("-n", "0", "-rf", "--tb=no", "-k", "not by_the_kernels_themselves")  # which are of old members alone
    path = os.pathsep.join(filter(None, (str(copy), os.environ.get("PYTHONPATH"))))
    environment = {**os.environ, "PYTHONPATH": path, "COLUMNS": "200"}
    done = subprocess.run(
        [*command, *flags, *FILES], cwd=copy, env=environment, capture_output=True, text=True, check=False
    )
    failed = [line for line in done.stdout.splitlines() if line.startswith("FAILED ")]
    assert done.returncode == (1 if failed else 0), done.stdout[-4000:] + done.stderr[-2000:]
    assert not [line for line in failed if WRONG not in line]
    unequal = "tests/attention/test_strategies.py::test_strategy_equals_unsharded_attention["
    assert any(unequal in line for line in failed) or torch.cuda.device_count() == 1, failed
    names = done.stdout.partition("new members tested: ")[2].partition("\n")[0].split(", ")
    run_by_name = {name for room in ("attention", "transports", "local", "models") for name in members()[room]}
    assert run_by_name <= set(names), names
