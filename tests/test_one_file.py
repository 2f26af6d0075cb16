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

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[1]
FILES = (
    "tests/test_members.py",
    "tests/attention/test_strategies.py",
    "tests/attention/test_streams.py",
    "tests/attention/test_beside.py",
    "tests/planner/test_costs.py",
    "tests/planner/test_plan.py",
    "tests/local/test_local_attention.py",
    "tests/transports/test_contract.py",
    "tests/transports/test_halo.py",
)


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a copy of the repository's code and tests with the new files in their folders."""
    root = tmp_path_factory.mktemp("copy")
    for name in ("seqpar", "launch", "tests", "docs/planner.md", "pyproject.toml"):
        target = root / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, target, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / name, target)
    for room, names in members().items():
        for name in names:
            shutil.copy(FOLDER / room / f"{name}.py", root / "seqpar" / room)
    return root


def pytest_of(root: Path, files: tuple[str, ...], *flags: str) -> subprocess.CompletedProcess[str]:
    """Return what pytest says of these files of a copy."""
    command = [sys.executable, "-m", "pytest", "-p", "tests.support.one_file.selected", "-p", "no:cacheprovider"]
    path = os.pathsep.join(filter(None, (str(root), os.environ.get("PYTHONPATH"))))
    environment = {**os.environ, "PYTHONPATH": path}
    return subprocess.run(
        [*command, "-n", "0", *flags, *files], cwd=root, env=environment, capture_output=True, text=True, check=False
    )


@pytest.mark.timeout(900)
def test_new_members_pass_the_tests_of_the_old_ones(copy: Path) -> None:
    done = pytest_of(copy, FILES, "-rN", "-k", "not by_the_kernels_themselves")  # which are of old members alone
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    names = done.stdout.partition("new members tested: ")[2].partition("\n")[0].split(", ")
    run_by_name = {name for room in ("attention", "transports", "local", "models") for name in members()[room]}
    assert run_by_name <= set(names), names


@pytest.mark.skipif(torch.cuda.device_count() == 1, reason="one rank alone exchanges nothing")
def test_negative_control_a_new_strategy_that_is_wrong_fails(copy: Path) -> None:
    file = copy / "seqpar" / "attention" / "halves.py"
    right = file.read_text()
    wrong = right.replace("begin = start + ", "begin = start + 0 * ")
    assert wrong != right
    file.write_text(wrong)
    try:
        done = pytest_of(copy, ("tests/attention/test_streams.py",), "-k", "halves and unsharded")
    finally:
        file.write_text(right)
    assert done.returncode == 1, done.stdout[-2000:]
    assert "FAILED tests/attention/test_streams.py::test_two_streams_equal_the_unsharded_block[" in done.stdout
