"""Tests that in exact mode diffusers' transformers have the bits of one rank on any number of ranks.

A CPU's products round by their row count, which exact mode refuses outside of tests. Here they are computed row by row,
which is what exact mode sees to on GPUs, so that everything else is compared bit by bit: the order of the keys, masks,
modulation, cuts and gathers.
"""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import seqpar
from seqpar.loading.parts import transformers_of
from seqpar.mesh.mesh import Mesh
from tests.families.test_blocks import ALIKE, FUSED
from tests.support import exact_bits
from tests.support.diffusers_tiny import MODELS, SPLIT, few, kept
from tests.support.foreign import in_double
from tests.support.meshes import EXACT, TRANSPORTS, mesh_for
from tests.support.meshes import mesh as make_mesh
from tests.support.pool import Pool
from tests.support.row_by_row import by_rows, exact_mode
from tests.support.sharded import CPU, TOLERANCE, Outputs, body_of, called, raised
from tests.transformer.test_pipelines import CASES

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:In CPU autocast")]  # Mochi asks for fp32

ROOT = Path(__file__).parents[2]
Which = tuple[str, bool, bool]
"""A model of `MODELS`, whether functions of `seqpar.families` compute it, and whether its text has two tokens."""
# by functions where there are some; of blocks of diffusers' own, those of each kind of attention
BY_MODULES = ("flux", "qwen_masked", "sd3_dual", "wan", "chroma", "hunyuan", "ltx")
OWN = [name for name in SPLIT if name not in FUSED or name in BY_MODULES]
# another model computes all that these do, and more
LESS = ("sd3", "ltx", "ltx2", "cogvideox_2b", "hunyuan15", "qwen", "wan")
SHORT = (("flux", True), ("qwen_masked", True), ("sd3_dual", False))
ALL: tuple[Which, ...] = (
    *((name, True, False) for name in FUSED if name not in (*ALIKE, *LESS)),
    *((name, False, False) for name in OWN),
    *((*which, True) for which in SHORT),
)


def computed(
    rank: int,
    world: int,
    device: torch.device,
    every: tuple[Which, ...],
    strategy: str,
    transport: str,
    is_exact: bool = True,
) -> list[Outputs]:
    results = []
    for name, fused, short in every:
        body = body_of(kept(name, str(device)), world, device, strategy, transport, fused=fused, exact=is_exact)
        arguments = few(MODELS[name].arguments()) if short else MODELS[name].arguments()
        with by_rows():
            results.append(called(body, arguments))
        body.release()
    return results


@pytest.fixture(scope="module")
def alone() -> dict[Which, Outputs]:
    return dict(zip(ALL, computed(0, 1, CPU, ALL, "ulysses", "collective"), strict=True))


def same(got: Outputs, wanted: Outputs) -> bool:
    return all(map(torch.equal, got, wanted))


@pytest.mark.parametrize("turn", range(6))
def test_transformers_have_one_ranks_bits(cpu_ranks: Pool, alone: dict[Which, Outputs], turn: int) -> None:
    """Strategies, transports and numbers of ranks take turns over all models."""
    strategy, transport, world = EXACT[turn % len(EXACT)], TRANSPORTS[turn % 2], 2 + (turn in (1, 5))
    every = ALL[turn::6]
    for results in cpu_ranks.run(world, computed, every, strategy, transport):
        for which, got in zip(every, results, strict=True):
            assert same(got, alone[which]), which


def test_negative_control_in_the_order_of_the_ranks_bits_differ(cpu_ranks: Pool, alone: dict[Which, Outputs]) -> None:
    every = tuple((name, False, False) for name in ("flux", "qwen_masked", "sd3_dual", "wan"))
    for results in cpu_ranks.run(3, computed, every, "kv_gather", "collective", False):
        differ = [not same(got, alone[which]) for which, got in zip(every, results, strict=True)]
        assert differ[:3] == [True] * 3  # Wan's video is one stream
        for which, got in zip(every, results, strict=True):
            torch.testing.assert_close(got, alone[which], rtol=0, atol=TOLERANCE)


# The doors ------------------------------------------------------------------------------------------------------


def drawn(rank: int, world: int, device: torch.device, name: str, axes: dict[str, int] | None) -> tuple[Tensor, str]:
    pipe, case = CASES[name].pipe(), CASES[name]
    with exact_mode(), by_rows():
        seqpar.parallelize(pipe, None if axes is None else make_mesh(device, **axes))
        for module in transformers_of(pipe).values():
            in_double(module)
        pictures = case.pictures(pipe, rank, steps=2).clone()
        made = str(pipe.transformer.forward.mesh)
        seqpar.release(pipe)
    return pictures, made


LAYOUTS = ((2, None, "ulysses 2"), (3, None, "ulysses 3"), (2, {"cfg": 2}, "cfg 2"))


@pytest.mark.parametrize(
    ("name", "layouts"),
    [("flux, true guidance", LAYOUTS[1:]), ("sd3", LAYOUTS[2:]), ("wan", LAYOUTS[1:2]), ("qwen-image", LAYOUTS[:1])],
)
def test_pipelines_in_exact_mode_have_one_ranks_bits(cpu_ranks: Pool, name: str, layouts: tuple[Any, ...]) -> None:
    """Where the planner decides, all ranks share the tokens: the rows of guidance's branches are not split."""
    wanted, _ = drawn(0, 1, CPU, name, None)
    for world, axes, planned in layouts:
        for pictures, mesh in cpu_ranks.run(world, drawn, name, axes):
            assert torch.equal(pictures, wanted)
            assert mesh == planned


def refusals(rank: int, world: int, device: torch.device) -> list[str]:
    """Return the errors of a ring, of cuts in diffusers' form, which tell no order of streams."""
    ring, ulysses = (mesh_for(name, world, device) for name in ("ring", "ulysses"))
    modules = [MODELS["flux"].build() for _ in range(2)]

    def called(module: Any) -> None:
        module(**MODELS["flux"].arguments())

    with exact_mode():
        return [
            raised(lambda: seqpar.parallelize(modules[0], ring)),
            raised(lambda: called(seqpar.parallelize(modules[1], ulysses, cuts=modules[1]._cp_plan))),
        ]


def test_what_cannot_be_exact_is_refused(cpu_ranks: Pool) -> None:
    for ring, cuts in cpu_ranks.run(2, refusals):
        assert "in exact mode, expected kv_gather or ulysses or kv_first and no ring axis" in ring
        assert "of several streams in exact mode" in cuts
        assert "expected cuts that say what it joins" in cuts


def verified(rank: int, world: int, device: torch.device, name: str) -> str:
    module = MODELS[name].build().float()
    arguments: dict[str, Any] = {
        key: x.float() if isinstance(x, Tensor) and x.dtype == torch.float64 else x
        for key, x in MODELS[name].arguments().items()
    }
    with exact_mode():
        seqpar.parallelize(module, mesh_for("ulysses", world, device), strategy="ulysses")
        verdict = seqpar.verify(module, **arguments)
        seqpar.release(module)
    return str(verdict.finding)


def test_verifying_compares_masked_heads_in_the_order_of_the_keys(cpu_ranks: Pool) -> None:
    assert cpu_ranks.run(2, verified, "qwen_masked") == ["None"] * 2


@pytest.mark.gpu
@pytest.mark.timeout(400)
@pytest.mark.parametrize("world", [2, 3, 4])
def test_gpu_calls_have_one_gpus_bits_in_exact_mode(world: int) -> None:
    """FLUX.1, Qwen-Image, SD3.5 and Wan, by every strategy that only moves data and by every transport."""
    if world > torch.cuda.device_count():
        pytest.skip(f"needs {world} GPUs")
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={world}", "-m"]
    command = [*start, "tests.support.exact_bits"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=350, check=False)
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert [line["model"] for line in lines] == [name for name in exact_bits.MODELS for _ in range(2)]
    for line in lines:
        assert {mine for ranks in line["others"].values() for mine in ranks} == {line["alone"]}, line
        assert len(line["others"]) == (len(EXACT) * len(TRANSPORTS) if line["native"] else 2)
    # with weights whose blocks change nothing, digests would say nothing: two ways to compute them round differently
    assert len({line["alone"] for line in lines}) > len(exact_bits.MODELS)


def one_token(rank: int, world: int, device: torch.device, axis: str, is_exact: bool) -> Outputs:
    module, arguments = MODELS["flux"].build(), MODELS["flux"].arguments()
    arguments |= {"hidden_states": arguments["hidden_states"][:, :1], "img_ids": arguments["img_ids"][:1]}
    mesh = Mesh.single() if world == 1 else mesh_for("ulysses", world, device, **{axis: world})
    with exact_mode() if is_exact else nullcontext():
        seqpar.parallelize(module, mesh)
        in_double(module)
        outputs = tuple(x.clone() for x in module(**arguments, return_dict=False))
        seqpar.release(module)
    return outputs


@pytest.mark.parametrize("axis", ["cfg", "data"])
def test_pictures_of_one_token_have_one_ranks_bits(cpu_ranks: Pool, axis: str) -> None:
    """Their rows stay together: a rank with one of two would multiply a matrix by a vector."""
    wanted = one_token(0, 1, CPU, axis, True)
    for got in cpu_ranks.run(2, one_token, axis, True):
        assert same(got, wanted)
    for got in cpu_ranks.run(2, one_token, axis, False):  # a negative control
        assert not same(got, wanted)
