"""Benches that start processes of their own: two versions in alternating rounds, and jobs with faults in them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import seqpar
from launch.baselines import pipelines
from launch.benches import compare, compare_job, faults, loading
from launch.benches.compare import ROOT, Compare
from launch.benches.compare_job import WORKS, Setting
from launch.benches.faults import Faults
from launch.benches.loading import Loading
from seqpar.families.flux import VAE
from tests.faults.test_faults import forked
from tests.support.forked_benches import fork
from tests.support.pool import Pool, server

pytestmark = pytest.mark.bench


# a new Python takes ten seconds
@pytest.mark.parametrize("forked", [True, pytest.param(False, marks=pytest.mark.hand)])
def test_two_versions_are_timed_in_turn_and_their_bits_compared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, forked: bool
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    if forked:
        fork(monkeypatch)
    other = tmp_path / "other"
    other.symlink_to(ROOT)
    out = tmp_path / "lines.jsonl"
    works = ("call:flux.1-dev",)
    compare.main(Compare(trees=(other,), works=works, gpus=1, small=True, rounds=2, calls=2, out=out))
    (line,) = [json.loads(text) for text in out.read_text().splitlines()]
    assert {name: len(ms) for name, ms in line["ms"].items()} == {"other": 2, "this": 2}
    assert all(ms > 0 for each in line["ms"].values() for ms in each)
    assert len(line["digests"]) == 1
    assert "same bits" in capsys.readouterr().out


def test_what_ranks_of_another_version_import_needs_nothing_of_this_version() -> None:
    """So the decoder's config, which is in `seqpar` too, stands in `launch` once more."""
    assert pipelines.VAE == VAE
    named = set(re.findall(r'import_module\("(launch[.a-z_]+)"\)', Path(compare_job.__file__).read_text()))
    assert named
    for module in named:
        path = ROOT / (module.replace(".", "/") + ".py")
        assert not re.findall(r"^ *(?:from|import) (?:seqpar|launch\.benches)", path.read_text(), re.MULTILINE), path


def timers(rank: int, world: int, device: torch.device) -> dict[str, tuple[float, str]]:
    setting = Setting(seqpar, device, world, small=True)
    words = {"call": ("qwen-image", "cfg"), "step": ("dit-s/8", "4", "strategy=ring", "ring=2"), "unidiffuser": ()}
    words |= {"decode": ("64",), "picture": ("64", "2")}
    assert words.keys() == WORKS.keys()
    made = {name: WORKS[name](setting, *words[name]) for name in WORKS}
    return {name: (timer.ms(1), timer.bits()) for name, timer in made.items()}


def test_every_work_is_timed_and_has_one_set_of_bits_on_both_ranks(ranks: Pool) -> None:
    if ranks.device == "cuda":
        pytest.skip("tiny models are for CPUs")
    first, second = ranks.run(2, timers)
    assert {name: bits for name, (_, bits) in first.items()} == {name: bits for name, (_, bits) in second.items()}
    assert all(ms > 0 for ms, _ in first.values())


def test_a_job_with_a_fault_is_judged(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    server()
    monkeypatch.setitem(faults.STARTERS, "seqpar", forked)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.delenv("WORLD_SIZE", raising=False)  # the command starts ranks only where nobody has started them
    out = tmp_path / "lines.jsonl"
    faults.main(Faults(only=("raises",), transports=("peer",), starters=("seqpar",), out=out))
    clean, raised, jobs = (json.loads(text) for text in out.read_text().splitlines())
    assert clean["latents"] is not None
    assert raised["code"] == 1
    assert "planted bug" in raised["message"]
    assert clean["wrong"] == raised["wrong"] == []
    assert jobs["jobs"] == 2
    table: Any = capsys.readouterr().out
    assert table.count("| right |") == 2


def test_both_ways_load_a_whole_pipeline(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    fork(monkeypatch)
    out = tmp_path / "lines.jsonl"
    loading.main(Loading("flux.1-dev", tmp_path / "flux", ranks=1, rounds=1, out=out))
    ours, theirs = map(json.loads, out.read_text().splitlines())
    assert (ours["way"], [len(each["rounds"][0]) for each in (ours, theirs)]) == ("seqpar.load", [1, 1])
    assert ours["bytes"] > 0
    assert min(rank["seconds"] for line in (ours, theirs) for rank in line["rounds"][0]) > 0
    assert capsys.readouterr().out.count("GB of files") == 2
