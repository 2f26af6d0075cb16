"""Tests that a pipeline with 16-bit weights can keep the state of its loop in fp32, and what that is worth."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import diffusers
import pytest
import torch
from torch import Tensor

import seqpar
from seqpar.mesh.mesh import Mesh
from seqpar.transformer.parallelize import keep_fp32
from tests.support import pipelines
from tests.support.foreign import StayDouble
from tests.support.meshes import mesh_for
from tests.support.pool import Pool

STEPS = 28
THEIRS: Any = diffusers
FLOW: Any = {"prediction_type": "flow_prediction", "use_flow_sigmas": True, "flow_shift": 3.0}
SHIFT: Any = {"use_dynamic_shifting": True, "time_shift_type": "exponential"}
PROMPT: dict[str, Any] = {"prompt": "a red cat", "height": 24, "width": 32}
SHORT: dict[str, Any] = {"max_sequence_length": 16}
TRUE: dict[str, Any] = {"negative_prompt": "blurry", "true_cfg_scale": 2.0, **SHORT}
VIDEO: dict[str, Any] = {"num_frames": 5, "height": 32}


def rounded(module: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Round timestep and guidance as FLUX.1 rounds them in bf16, which no state can change."""
    times = ("timestep", "guidance")
    return args, kwargs | {name: (kwargs[name].bfloat16() * 1000).double() / 1000 for name in times if name in kwargs}


SMALL: Any = {"in_channels": 16, "attention_head_dim": 8, "num_attention_heads": 2, "axes_dims_rope": (2, 2, 4)}
SHAPES = {"flux": (1, 48, 16), "sd3": (1, 4, 12, 16), "wan": (1, 16, 2, 4, 4)}


def run(name: str, scheduler: Any, way: str, mesh: Mesh | None = None, **arguments: Any) -> Tensor:
    THEIRS.utils.logging.set_verbosity_error()  # about `to`
    pipe = getattr(pipelines, name)().to(torch.bfloat16).to(torch.float64 if way == "truth" else torch.bfloat16)
    pipe.scheduler = scheduler
    if way == "truth" and name == "flux":
        pipe.transformer.register_forward_pre_hook(rounded, with_kwargs=True)
    prepares, seen = pipe.prepare_latents, list[Tensor]()
    seqpar.parallelize(pipe, mesh or Mesh.single())
    if way == "fp32":
        assert keep_fp32(pipe) is None
    noise = torch.randn(SHAPES[name], generator=torch.Generator().manual_seed(5)).bfloat16()
    with StayDouble() if way == "truth" else nullcontext():
        pipe(
            **{**PROMPT, **arguments},
            latents=noise.to(pipe.transformer.dtype),
            num_inference_steps=STEPS,
            callback_on_step_end=lambda pipe, i, t, tensors: seen.append(tensors["latents"]) or {},
        )
    seqpar.release(pipe)
    assert pipe.prepare_latents == prepares
    return seen[-1]


CASES: list[tuple[str, Callable[[], Any], dict[str, Any], float]] = [
    ("flux", lambda: pipelines.flow(shift=3.0), SHORT, 2.0),
    ("flux", lambda: pipelines.flow(shift=3.0), TRUE, 1.5),
    ("flux", lambda: THEIRS.UniPCMultistepScheduler(**FLOW, **SHIFT), SHORT, 2.0),
    ("flux", lambda: THEIRS.DPMSolverMultistepScheduler(**FLOW, **SHIFT), SHORT, 1.5),
    ("sd3", lambda: pipelines.flow(shift=3.0), SHORT, 1.05),
    ("wan", lambda: pipelines.flow(shift=3.0), VIDEO, 1.3),
]


@pytest.mark.parametrize(("name", "scheduler", "arguments", "factor"), CASES)
def test_latents_are_closer_to_the_truth(
    name: str, scheduler: Callable[[], Any], arguments: dict[str, Any], factor: float
) -> None:
    """Measured: FLUX 2.8 (with two branches 1.8, UniPC 3.0, DPM-Solver 1.6), SD3 1.1, Wan 1.6 times as close."""
    truth = run(name, scheduler(), "truth", **arguments)
    plain, fp32 = (run(name, scheduler(), way, **arguments) for way in ("bf16", "fp32"))
    assert fp32.dtype == torch.float32
    away = [float((x.double() - truth).norm() / truth.norm()) for x in (plain, fp32)]
    assert factor * away[1] < away[0] < 0.1


def on_ranks(rank: int, world: int, device: torch.device, cfg: int) -> Tensor:
    scheduler = pipelines.flow(shift=3.0)
    return run("flux", scheduler, "fp32", mesh_for("ulysses", world, device, cfg), **TRUE)


@pytest.mark.parametrize("cfg", [1, 2])
def test_ranks_keep_it_alike_and_promise_it(ranks: Pool, cfg: int) -> None:
    alone = run("flux", pipelines.flow(shift=3.0), "fp32", **TRUE)
    for latents in ranks.run(2, on_ranks, cfg):
        assert latents.dtype == torch.float32
        assert (latents - alone).norm() / alone.norm() < 0.05


def test_where_it_is_not_kept() -> None:
    """In other data types nothing is rounded, and a ControlNet would be given latents that it does not take."""
    pipe = seqpar.parallelize(pipelines.flux(), Mesh.single())
    assert keep_fp32(pipe) == "the transformer has weights of float64"
    seqpar.release(pipe)
    parts = {name: part for name, part in pipe.components.items() if name not in ("image_encoder", "feature_extractor")}
    net = THEIRS.FluxControlNetModel(num_layers=1, num_single_layers=1, **SMALL)
    pipe = seqpar.parallelize(THEIRS.FluxControlNetPipeline(**parts, controlnet=net), Mesh.single())
    assert keep_fp32(pipe) == "controlnet may read the latents, too"
    seqpar.release(pipe)
