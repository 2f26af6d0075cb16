"""`seqpar doctor`: what it says about machines and environments, some of which are made up."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import sys
from importlib.machinery import ModuleSpec

import pytest
import torch

from seqpar.cli import doctor, entry
from seqpar.mesh.mesh import Mesh
from tests.support.pool import Pool

ROWS = ["seqpar", "versions", "optional", "GPUs", "dtype", "kernels", "attention", "product", "transport", "missing"]
SMI = "| NVIDIA-SMI 580.65.06   Driver Version: 580.65.06   CUDA Version: 13.0 |"
TOPOLOGY = """\x1b[4m\tGPU0\tGPU1\tGPU2\tNIC0\tCPU Affinity\x1b[0m
GPU0\t X \tNV18\tPIX\tPXB\t0-31
GPU1\tNV18\t X \tNV18\tPXB\t0-31
GPU2\tPIX\tNV18\t X \tSYS\t32-63
"""
Captured = pytest.CaptureFixture[str]


@pytest.mark.usefixtures("no_gpu")
def test_a_machine_without_gpus_is_described_with_exit_code_0(
    capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr(doctor, "PRODUCT", (64, 64, 64))
    monkeypatch.setattr(doctor, "_smi", lambda *words: "")
    monkeypatch.setattr(entry, "quick_exit", lambda code: (_ for _ in ()).throw(SystemExit(code)))
    monkeypatch.setattr(sys, "argv", ["seqpar", "doctor"])
    with pytest.raises(SystemExit) as stop:
        entry.main()
    assert stop.value.code == 0
    told = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert [*told] == ROWS
    assert (
        f"torch {torch.__version__.partition('+')[0]}" in told["versions"]
    )  # some wheels lack the rest in their metadata
    assert told["attention"] == "sdpa (first choice for cpu, head dim 128, float32)"
    assert "TFLOP/s" in told["product"]


def test_what_is_missing_is_named_with_the_command_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = [
        "torch>=2.11",
        "old<2",
        "gone==1.0b2; python_version > '3'",
        "never; python_version < '3'",
        "fast; extra == 'flash'",
        "web>=3; extra == 'serve'",
    ]
    versions = {"seqpar": "1", "torch": "2.13.0+cpu", "old": "2.1"}

    def version(name: str) -> str:
        if name not in versions:
            raise importlib.metadata.PackageNotFoundError(name)
        return versions[name]

    monkeypatch.setattr(importlib.metadata, "requires", lambda name: lines)
    monkeypatch.setattr(importlib.metadata, "version", version)
    assert (doctor.unmet(), doctor.unmet("flash"), doctor.unmet("serve")) == (
        ["old<2", "gone==1.0b2"],
        ["fast"],
        ["web>=3"],
    )
    assert doctor._install(doctor.unmet(), "required") == "old, gone (required): pip install 'old<2' gone==1.0b2"
    advice = doctor._install(doctor.unmet("serve"), "seqpar serve", "serve")
    assert advice == "web (seqpar serve): pip install -e '.[serve]' in a clone"
    versions.clear()  # a clone on PYTHONPATH
    assert doctor.unmet() == []


def test_without_torch_it_says_so(capsys: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    find: list[ModuleSpec | None] = [None]
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: find[0])
    monkeypatch.delenv("RANK", raising=False)
    assert doctor.main() == 1
    assert "torch, without which nothing runs" in capsys.readouterr().out.splitlines()[-1]


@pytest.mark.usefixtures("no_gpu")
@pytest.mark.parametrize(
    ("cuda", "fault"),
    [
        (None, "CUDA in torch {}, for the GPUs of this machine: pip install --force-reinstall torch"),
        ("12.8", "the GPUs: driver 580.65.06 runs CUDA 13.0, torch has 12.8; CUDA_VISIBLE_DEVICES may hide them"),
    ],
)
def test_gpus_that_torch_cannot_use_are_missing(monkeypatch: pytest.MonkeyPatch, cuda: str | None, fault: str) -> None:
    monkeypatch.setattr(doctor, "_smi", lambda *words: SMI)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    assert doctor._gpus()[2] == [fault.format(torch.__version__)]


def test_pairs_of_gpus_with_one_link_are_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(doctor, "_smi", lambda *words: TOPOLOGY)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda a, b: {a, b} != {0, 2})
    assert doctor._links(2) == "NV18 with peer access between all GPUs"
    assert doctor._links(3) == "NV18 with peer access (0-1, 1-2); PIX without peer access (0-2)"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,2")  # nvidia-smi counts all GPUs
    assert doctor._links(2) == "with peer access between all GPUs"


def test_ranks_time_an_exchange(ranks: Pool) -> None:
    for rows in ranks.run(2, timed):
        (transport, why), (exchange, text) = rows
        assert (transport, exchange) == ("transport", "exchange")
        assert why.startswith("collective" if ranks.device == "cpu" else "peer")
        assert "from each GPU to 1 other(s) in " in text
        assert "GB/s" in text


def timed(rank: int, world: int, device: torch.device) -> list[doctor.Row]:
    return doctor.exchanged(Mesh.joined(device), 1)
