"""Tests of the exact mode: what it refuses, and on GPUs that a row's bits depend on that row alone."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from seqpar.local import flash, sdpa
from seqpar.loop.distributed import DistributedDiT
from seqpar.loop.models import dit
from seqpar.mesh import exact
from seqpar.mesh.mesh import Mesh
from seqpar.planner.plan import choose_local
from seqpar.planner.predict import Load
from seqpar.planner.rates import CPU
from seqpar.planner.search import Preferences, search
from seqpar.types.masks import key_bias
from seqpar.types.protocols import project
from tests.support.meshes import TRANSPORTS

ROOT = Path(__file__).parents[2]
# (rows, first row) of each part of the whole product: odd, few and many rows
CUTS = [(16, 0), (85, 3), (86, 0), (128, 129), (1025, 1), (2048, 5)]
WHOLE = 4100
# (K, N) of DiT-XL/2 and Large-DiT-7B: qkv, output, feed-forward in and out, final layer, embedding
OF_LOOP = [
    *((1152, n) for n in (32, 1152, 3456, 4608)),
    *((4096, n) for n in (32, 4096, 12288, 22016)),
    *((4608, 1152), (11008, 4096), (16, 1152), (16, 4096)),
]
# (rows, first row) of products for an image or a text of few tokens per rank; one is of a matrix and a vector
FEW = [(1, 7), (2, 5), (3, 0)]
# (K, N) of FLUX.1, Qwen-Image, Stable Diffusion 3.5 and Wan 2.1
OF_PIPELINES = [
    *((3072, n) for n in (64, 3072, 9216, 12288)),
    *((n, 3072) for n in (64, 3584, 4096, 12288)),
    *((1536, n) for n in (64, 1536, 4608, 6144, 8960)),
    *((n, 1536) for n in (64, 4096, 6144, 8960)),
    *((2432, n) for n in (64, 2432, 7296, 9728)),
    *((5120, n) for n in (64, 5120, 15360, 13824)),
    *((9728, 2432), (13824, 5120)),
]
BF16 = torch.bfloat16
BATCHED = ("ulysses:1:1", "kv_gather:1:1", "kv_first:1:1")
# layouts with the guidance branches in one batch, and on the cfg axis
LAYOUTS = {1: BATCHED[:1], 2: (*BATCHED, "ulysses:2:1"), 3: BATCHED, 4: (*BATCHED, "ulysses:2:1", "kv_first:2:1")}


def test_exact_mode_refuses_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match="exact mode requires a GPU"):
        exact.turn_on()


def test_exact_mode_refuses_to_come_too_late(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    with pytest.raises(ValueError, match="CUBLAS_WORKSPACE_CONFIG=:16:8"):
        exact.turn_on()
    assert not exact.is_on()


def test_exact_mode_refuses_rings_and_attentions_that_may_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exact, "is_on", lambda: True)
    load = Load(1, 64, True, 25, 4, 1000, 16, 2, 1 << 20)

    def taken(strategy: str, ring: int) -> str:
        wish = Preferences(axes={"cfg": 1, "ring": ring, "ulysses": 1}, strategy=strategy, exact=True)
        return search(dit.work(dit.SIZES["dit-s/8"]), load, ring, wish, CPU, "gloo", None).best.strategy

    for name in ("auto", "ring", "usp"):
        with pytest.raises(ValueError, match="in exact mode, expected kv_gather or ulysses or kv_first and no ring"):
            taken(name, 2)
    for name in ("kv_gather", "kv_first"):
        assert taken(name, 2) == name
    assert taken("auto", 1) == "ulysses"
    model = dit.Model(dit.Config(2, 64, 1, num_classes=5))
    with pytest.raises(ValueError, match="row counts"):  # the planner reads the mode
        DistributedDiT(model, Mesh.single(), local="sdpa")
    for name in ("auto", "sdpa", "reference"):
        with pytest.raises(ValueError, match="row counts"):
            choose_local(name, torch.device("cpu"), torch.float32, 64)


@pytest.mark.parametrize("shape", [(1,), (2, 3), (1, 1, 7), (3, 0), (40, 5)])
@pytest.mark.parametrize("bias", [False, True])
def test_few_rows_of_a_product_become_more_and_have_the_same_values(
    monkeypatch: pytest.MonkeyPatch, shape: tuple[int, ...], bias: bool
) -> None:
    x, weight, b = torch.randn(*shape, 6).double(), torch.randn(64, 6).double(), torch.randn(64).double()
    wanted, seen = F.linear(x, weight, b if bias else None), list[int]()
    own = F.linear
    monkeypatch.setattr(F, "linear", lambda x, *rest: (seen.append(x[..., 0].numel() * 64), own(x, *rest))[1])
    got = exact.linear(x, weight, b if bias else None)
    assert got.shape == wanted.shape
    torch.testing.assert_close(got, wanted)
    assert 0 in shape or min(seen) >= exact.LEAST_RESULTS


def differing_products(products: Sequence[tuple[int, int]] = (*OF_LOOP, *OF_PIPELINES)) -> list[str]:
    """Return the matrix products, with and without bias, whose rows differ from those of the whole product."""
    wrong = []
    for k, n in products:
        x, weight, bias = _random(WHOLE, k), _random(n, k), _random(n)
        for name, b in (("", None), (" + bias", bias)):
            whole = F.linear(x, weight, b)
            cut = {rows: exact.linear(x[start : start + rows], weight, b) for rows, start in (*CUTS, *FEW)}
            wrong += [
                f"{k} -> {n}{name}, {rows} rows"
                for rows, start in (*CUTS, *FEW)
                if not torch.equal(cut[rows], whole[start : start + rows])
            ]
    return wrong


def differing_columns() -> list[str]:
    """Return the q, k and v projections that differ when `kv_first` splits them into three products."""
    wrong = []
    for k, n in OF_LOOP:
        if n != 3 * k:
            continue
        x, weight, bias = _random(WHOLE, k), _random(n, k), _random(n)
        for name, b in (("", None), (" + bias", bias)):
            cuts = [(weight[start : start + k], None if b is None else b[start : start + k]) for start in (0, k, 2 * k)]
            rooms = (None, None, x.new_zeros(1, WHOLE, k // 64, 64))
            parts = [project(x[None], *cut, 64, room) for cut, room in zip(cuts, rooms, strict=True)]
            wrong += (
                []
                if torch.equal(torch.cat(parts, dim=2)[0].flatten(1), F.linear(x, weight, b))
                else [f"{k} -> {n}{name}"]
            )
    return wrong


def differing_attentions() -> list[str]:
    """Return the attention calls whose queries, heads or batch rows differ from those of the whole call."""
    wrong, device = [], torch.device("cuda")
    for dim in (64, 72, 128):
        for module in (flash, sdpa):
            if module.why_not(device, BF16, dim) is not None or module.invariant(device, BF16, dim) is not None:
                continue
            q, k, v = (_random(2, 1025, 8, dim) for _ in range(3))
            bias = key_bias(torch.rand(2, 1025, device=device) > 0.3, BF16)
            for mask in (None, bias) if module.why_not(device, BF16, dim, mask=True) is None else (None,):
                whole, last = module.attend(q, k, v, mask)[0], None if mask is None else mask[1:]
                few = module.attend(q[:, :, 3:5], k[:, :, 3:5], v[:, :, 3:5], mask)[0]
                parts = {
                    "queries": torch.equal(module.attend(q[:, 3:88], k, v, mask)[0], whole[:, 3:88]),
                    "heads": torch.equal(few, whole[:, :, 3:5]),
                    "batch": torch.equal(module.attend(q[1:], k[1:], v[1:], last)[0], whole[1:]),
                }
                name = f"{module.__name__}, head dim {dim}{', masked' if mask is not None else ''}"
                wrong += [f"{name}: {part}" for part, equal in parts.items() if not equal]
    return wrong


def _random(*shape: int) -> Tensor:
    return torch.randn(shape, device="cuda").to(BF16)


def in_exact_mode(work: str) -> str:
    """Return what a function of this module returns in a process that has turned the exact mode on."""
    code = "from seqpar.mesh import exact; exact.turn_on(); import tests.mesh.test_exact as t; assert exact.is_on(); "
    code += f"print(t.{work}())"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.gpu
@pytest.mark.parametrize("work", ["differing_products", "differing_columns", "differing_attentions"])
def test_gpu_rows_do_not_depend_on_each_other_in_exact_mode(work: str) -> None:
    assert in_exact_mode(work) == "[]"


@pytest.mark.gpu
def test_gpu_negative_control_the_check_sees_rows_that_depend_on_each_other() -> None:
    """By default cuBLAS splits the final layer's sums when there are few rows; otherwise the mode would be useless."""
    assert any("4096 -> 32" in text for text in differing_products(OF_LOOP))


def digests(folder: Path, gpus: int, transport: str) -> list[str]:
    """Return digests of the latents of 64 tokens after 25 exact steps, for every exact strategy and cfg axis."""
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={gpus}"]
    out = folder / f"{gpus}.jsonl"
    flags = f"--model dit-xl/2 --tokens 64 --no-peers --rounds 1 --exact --transport {transport} --out {out} --layouts"
    command = [*start, "launch/bench.py", "steps", *flags.split(), *LAYOUTS[gpus]]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert len(lines) == len(LAYOUTS[gpus])
    assert all(line["case"]["exact"] for line in lines)
    return [line["digest"] for line in lines]


@pytest.mark.gpu
@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("world", [2, 3, 4])
def test_gpu_latents_of_64_tokens_have_one_gpus_bits_in_exact_mode(tmp_path: Path, world: int, transport: str) -> None:
    assert set(digests(tmp_path, world, transport)) == set(digests(tmp_path, 1, "auto"))
