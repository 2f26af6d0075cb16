"""Error of each step of the engine and of the plain bf16 model, against the plain model in full precision.

This is teacher forcing: the plain model in fp32 (fp64 on CPUs) makes a trajectory, and from each of its states the
engine (with kernels and graph on a GPU) and the plain bf16 model take one step. A step's error is the rms of the
difference between the states after it, relative to the prediction's part of the step: for DDIM, the relative error of
the guided prediction. All three models have the same weights, rounded to bf16, so the errors come from arithmetic
alone, and their ratio says what our kernels add to plain bf16 or take from it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from diffusers.models.transformers.dit_transformer_2d import DiTTransformer2DModel
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from launch.baselines.plain import cast, guided, plain_model, predict
from launch.baselines.plain_large_dit import PlainLargeDiT
from launch.benches.timing import append, command, environment, spread
from seqpar.distributed import DistributedDiT
from seqpar.mesh import Mesh, pick_device
from seqpar.models import large_dit
from seqpar.pipelines.class_labels import Files
from seqpar.protocols import SequenceModel
from seqpar.sampling.guidance import Guidance
from seqpar.sampling.loop import draw_noise, why_no_graph
from seqpar.sampling.request import Request
from seqpar.sampling.run import begin
from seqpar.sampling.steppers import steps_locally
from seqpar.weights.checkpoint import from_state_dict
from seqpar.weights.find import Blueprint, from_diffusers

BF16 = torch.bfloat16
GUIDANCE = Guidance(4.0)
ENGINE, PLAIN = "engine", "plain bf16"


@dataclass(frozen=True)
class Numerics:
    """Measure each denoising step's error against the plain model in full precision, on the same inputs."""

    models: tuple[str, ...] = ("builtin",)
    """"builtin", diffusers pipeline folders, or presets (random weights), each at the size it was made for."""
    steps: int = 25
    """Denoising steps."""
    out: Path | None = None
    """Append JSON lines here."""


def main(args: Numerics) -> None:
    """Measure each model, print a row, append the line."""
    if not args.models:
        raise ValueError("got --models without a name, expected builtin, folders or presets")
    every = [locate(model, args.steps) for model in args.models]
    for model, files in zip(args.models, every, strict=True):
        line = measure(model, files, args.steps, pick_device(1))
        print(row(line), flush=True)
        append([line], args.out)


def locate(model: str, steps: int) -> Files:
    """The model's files; `ValueError` if no plain model matches it, or if its scheduler remembers earlier steps."""
    files = Files.locate(model)
    if files.blueprint.checkpoint is not None and files.source is None:
        raise ValueError(
            f"got model {model}, expected builtin, a diffusers pipeline folder or a preset: others "
            "have no plain model here"
        )
    scheduler = files.schedule(None, steps)
    if not steps_locally(scheduler):
        raise ValueError(
            f"got {type(scheduler).__name__}, expected DDIMScheduler: a step must depend on its state alone"
        )
    return files


def measure(model: str, files: Files, steps: int, device: torch.device) -> dict[str, Any]:
    """The line of one model."""
    truth = plain_truth(files, torch.float32 if device.type == "cuda" else torch.float64, device)
    plain = cast(deepcopy(truth), BF16)
    dit = DistributedDiT(engine_of(plain, BF16), Mesh.single(device))
    scheduler = files.schedule(None, steps)
    errors = compare(truth, plain, dit, scheduler, steps)
    side, patch = dit.config.sample_size, dit.config.patch_size
    case = {
        "model": model,
        "tokens": (side // patch) ** 2,
        "steps": steps,
        "local": dit.local.name,
        "dtype": "bfloat16",
    }
    case |= {"truth": _name(truth), "graph": why_no_graph(dit, scheduler) is None}
    ratios = [ours / theirs for ours, theirs in zip(errors[ENGINE], errors[PLAIN], strict=True)]
    return {
        "bench": "numerics",
        "case": case,
        "gpus": 1,
        "error": errors,
        "ratio": spread(ratios),
        "command": command(),
        "env": environment(device),
    }


def plain_truth(files: Files, dtype: torch.dtype, device: torch.device) -> nn.Module:
    """The plain model in a wider dtype, with weights rounded to bf16."""
    config = files.blueprint.config
    if files.source is not None:
        made: Any = DiTTransformer2DModel.from_pretrained(files.source, subfolder="transformer")
        made = cast(made.to(device), dtype).requires_grad_(False).eval()
    else:
        made = plain_model(config, config.sample_size, dtype, device)
    for parameter in made.parameters():
        parameter.copy_(parameter.to(BF16))
    if isinstance(made, DiTTransformer2DModel):  # every block has the first one's embedders, as trained
        blocks: Any = made.transformer_blocks
        for block in blocks[1:]:
            block.norm1.emb.load_state_dict(blocks[0].norm1.emb.state_dict())
    return made


def engine_of(plain: nn.Module, dtype: torch.dtype) -> SequenceModel:
    """Our model with the plain model's weights."""
    device = next(plain.parameters()).device
    if not isinstance(plain, PlainLargeDiT):
        return from_diffusers(plain).build(dtype, device)
    keys, checkpoint = large_dit.KEY_MAPS["original"](plain.config), from_state_dict("plain", plain.state_dict())
    return Blueprint("plain", large_dit, plain.config, checkpoint, keys).build(dtype, device)


@torch.no_grad()
def compare(
    truth: nn.Module, plain: nn.Module, dit: DistributedDiT, scheduler: Any, steps: int
) -> dict[str, list[float]]:
    """Each step's error of the engine and of plain bf16, both from the true state before the step."""
    config, label = dit.config, torch.zeros(1, dtype=torch.int64)
    noise = draw_noise((1, config.in_channels, *[config.sample_size] * 2), torch.Generator().manual_seed(0))
    run = begin(dit, Request(scheduler, noise, {"class_labels": label}, steps, GUIDANCE))
    both_labels = torch.cat((label, torch.full_like(label, config.num_classes))).to(dit.device)
    state, errors = noise.to(next(truth.parameters())), {ENGINE: [], PLAIN: []}
    if run.why_no_graph is None:
        run.capture()
    for t in run.timesteps:
        with exact():
            after = step(truth, scheduler, state, t, both_labels)
        share = rms(after - scheduler.step(torch.zeros_like(state), t, state).prev_sample)
        errors[PLAIN].append(rms(step(plain, scheduler, state, t, both_labels) - after) / share)
        run.place(state)
        run.step()
        errors[ENGINE].append(rms(run.latents().to(after.dtype) - after) / share)
        state = after
    run.release()
    return errors


@contextmanager
def exact() -> Iterator[None]:
    """Turn TF32 off in convolutions, where torch allows it by default, and in attention."""
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False), sdpa_kernel(SDPBackend.MATH):
        yield


def step(plain: nn.Module, scheduler: Any, state_BCHW: Tensor, t: Tensor, both_labels: Tensor) -> Tensor:
    """One step of a plain model; guidance and DDIM (diffusers') in the state's dtype."""
    channels = state_BCHW.shape[1]
    out = predict(plain, torch.cat((state_BCHW, state_BCHW)), t.to(state_BCHW.device).expand(2), both_labels)
    return scheduler.step(guided(out[:, :channels].to(state_BCHW.dtype), GUIDANCE.scale), t, state_BCHW).prev_sample


def rms(x: Tensor) -> float:
    """Root of the mean square."""
    return float(x.double().square().mean().sqrt())


def _name(model: nn.Module) -> str:
    return str(next(model.parameters()).dtype).removeprefix("torch.")


def row(line: dict[str, Any]) -> str:
    """One line of the table."""
    case, ratio, errors = line["case"], line["ratio"], line["error"]
    told = "   ".join(f"{way} {median(values):.2e} (most {max(values):.2e})" for way, values in errors.items())
    return (
        f"{case['model']:<14} {case['tokens']:>6} tokens  {case['steps']} steps against {case['truth']}:  {told}   "
        f"ratio {ratio['median']:.3f} ({ratio['min']:.3f} - {ratio['max']:.3f})"
    )
