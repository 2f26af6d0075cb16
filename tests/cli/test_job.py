"""Options are checked before weights load, and what they may be is read as documented."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tyro

from seqpar.cli import job as decoding
from seqpar.cli.args import Args
from seqpar.cli.job import check, parse_size
from seqpar.loop.blueprint import Blueprint
from seqpar.mesh.mesh import Mesh
from seqpar.pipelines.own_loop import OwnJob
from seqpar.planner.plan import parse_mesh


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seed": -1}, "got --seed=-1, expected a whole number from 0 to 9223372036854775807"),
        ({"seed": 2**63}, "got --seed=9223372036854775808"),
        ({"guidance": 1.0, "guidance_channels": 3}, "--guidance-channels 3 needs guidance over 1, got --guidance 1"),
        ({"guidance_channels": 5}, "got guidance on 5 channels"),
        ({"eta": 2.0}, "got eta 2, expected 0"),
        ({"eta": 0.5, "scheduler": "EulerDiscreteScheduler"}, "this scheduler has no eta"),
        ({"scheduler": "PNDMScheduler", "steps": 3}, "got 3 steps, which PNDMScheduler cannot do"),
        ({"steps": 1001}, "got 1001 steps, expected 1 to 1000"),
        ({"repeat": 0}, "got --repeat=0, expected"),
        ({"respacing": "ddim300"}, "got respacing 'ddim300', expected a number that an integer stride"),
        ({"respacing": "25", "scheduler": "LCMScheduler"}, "got respacing '25' with LCMScheduler, expected DDIM"),
        ({"vae": "strips", "exact": True}, "got --vae strips with --exact, expected pictures"),
        ({"repeat": 10**9}, "got --repeat=1000000000, expected a whole number from 1 to 65536"),
        ({"repeat": 40_000, "classes": ("1", "2")}, "got 2 x --repeat 40000 pictures"),
        ({"dry_run": (10**9,)}, "got GPUs to plan for=1000000000, expected a whole number from 1 to 512"),
        ({"dry_run": (1,) * 10**6}, "got plans for 1000000 GPUs together, expected at most 1024"),
        ({"steps": 10**9}, "got --steps=1000000000, expected a whole number from 1 to 100000"),
        ({"size": "9" * 5000}, "expected 1 to 131072 pixels along a side"),
        ({"size": "64x131073"}, "got --size 64x131073, expected 1 to 131072"),
        ({"size": "0"}, "got --size 0, expected 1 to 131072"),
        ({"size": "64x0"}, "got --size 64x0, expected 1 to 131072"),
        ({"scheduler": ""}, "got scheduler '', expected one of diffusers'"),
        ({"frames": 0}, "got --frames=0, expected"),
        ({"fps": 10**9}, "got --fps=1000000000, expected"),
    ],
    ids=lambda value: str(value)[:60],
)
def test_the_check_refuses_before_weights_load_and_leaves_no_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: dict[str, Any], message: str
) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("weights were read")

    monkeypatch.setattr(Blueprint, "build", refuse)
    args = Args(**{"out": tmp_path / "new" / "x.png", **change})
    started = time.process_time()
    with pytest.raises(ValueError, match=message):
        check(args, Mesh.single())
    assert time.process_time() - started < 5  # whatever the numbers are
    assert not list(tmp_path.iterdir())


@pytest.mark.usefixtures("no_gpu")
def test_more_pictures_than_memory_holds_are_refused(tmp_path: Path) -> None:
    job = check(Args(out=tmp_path / "x.png"), Mesh.single())
    decoding.check_decoding(job, Mesh.single())
    assert isinstance(job, OwnJob)
    large = replace(job.request, size=(1024, 1024))
    many = replace(job, load=replace(job.load, images=10**6), request=large)
    with pytest.raises(ValueError, match=r"got 1000000 pictures of 1024x1024 pixels, which take 11718\.8 GiB"):
        decoding.check_decoding(many, Mesh.single())


def test_local_is_short_for_local_attention() -> None:
    assert tyro.cli(Args, args=["--local", "flash"]) == tyro.cli(Args, args=["--local-attention", "flash"])
    assert tyro.cli(Args, args=["--local", "flash"]).local == "flash" != Args().local


def test_a_mesh_names_an_aim_or_axes() -> None:
    assert parse_mesh("auto") == ("latency", {})
    assert parse_mesh("throughput") == ("throughput", {})
    assert parse_mesh("cfg=2,ulysses=2") == ("latency", {"cfg": 2, "ulysses": 2})


@pytest.mark.parametrize(("text", "size"), [(None, None), ("256", (256, 256)), ("64x96", (64, 96))])
def test_size_is_height_by_width(text: str | None, size: tuple[int, int] | None) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["1x2x3", "big", "-5", "64x"])
def test_a_size_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="expected pixels like 256 or 256x384"):
        parse_size(text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("cfg=2,cfg=1", "each axis once: cfg is there twice"),
        ("rings=2", "expected axes like"),
        ("cfg", "expected axes"),
        ("", "expected axes"),
        ("cfg=-1", "expected axes"),
    ],
)
def test_a_mesh_that_is_none_is_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_mesh(text)
