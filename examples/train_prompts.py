# pyright cannot infer the types of diffusers' modules
# pyright: reportAttributeAccessIssue=false, reportPrivateImportUsage=false, reportArgumentType=false
# pyright: reportOptionalCall=false, reportOptionalSubscript=false, reportOptionalMemberAccess=false
# pyright: reportOptionalOperand=false, reportOperatorIssue=false, reportIndexIssue=false, reportCallIssue=false
"""Trains the built-in text-to-image model, a small FLUX with its text encoders and one LoRA, as diffusers' files.

Data are renders of the Noto Color Emoji font in the colours that a prompt names (`_prompts.py`). The stages follow one
another, each reads what the ones before it wrote to --work, and all together take a quarter of an hour on one GPU:

    python examples/train_builtin.py render --out .data/emoji.npz
    python examples/train_prompts.py --work prompts

vae: the class-conditional model's VAE goes on with pictures of strong colours. judge: a classifier that says what is on
a picture. base: the transformer and both encoders learn the flow. guide: the transformer learns what classifier-free
guidance of itself would predict, for a scale that is its input. lora: a LoRA learns to draw with lines. report: 500
prompts, those of held-out pairs, and pictures to look at.
"""

import copy
import json
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from _flux import GUIDED, STYLED, Parts, add_lora, flow_loss, guided_loss, save_lora
from _judge import Judge, expected, judge_loss
from _networks import centre_latents, decode, encode, vae_loss
from _prompts import LONG, SHORT
from _report import judged_renders, report
from _stage import Bench, Train
from _training import Average, Clock, Pool, compiled, fit, masters_of
from diffusers import AutoencoderKL
from safetensors.torch import save_model
from torch import Tensor

from seqpar.types.flags import parsed

VAE = Path(__file__).parents[1] / "seqpar_demo" / "emoji-dit" / "vae"
RATES = {"base": 1.0, "guide": 0.6, "lora": 0.15}  # learning rates beside that of the base


# --- stages: each returns its metrics ---


def train_vae(bench: Bench) -> dict[str, float]:
    config, clock = bench.config, Clock.now(bench.config.vae_minutes)
    vae = AutoencoderKL.from_pretrained(VAE).float().to(bench.device, memory_format=torch.channels_last)
    count = max(config.batch // 4, 2)
    loss = compiled(vae_loss, bench.compiles, (vae, bench.both(count)[0]))
    steps = fit("vae", lambda: loss(vae, bench.both(count)[0]), list(vae.parameters()), clock=clock, lr=config.lr)
    *_, (step, value) = steps
    vae.eval().requires_grad_(False)
    centre_latents(vae, torch.cat([bench.both(count)[0] for _ in range(4)]))
    vae.to(memory_format=torch.contiguous_format).save_pretrained(config.work / "vae")
    with torch.no_grad():
        images, _, _ = bench.both(4 * count)
        error = (decode(vae, encode(vae, images)[0]).clamp(-1, 1) - images).square().mean((1, 2, 3)) / 4
    psnr = {"vae_psnr_db": -10 * error.mean().log10().item(), "vae_psnr_db_worst": -10 * error.max().log10().item()}
    return {"vae_steps": step, "vae_loss": value} | psnr


def train_judge(bench: Bench) -> dict[str, float]:
    config, clock, vae = bench.config, Clock.now(bench.config.judge_minutes), bench.vae()
    judge = Judge(len(bench.bank.names)).to(bench.device, memory_format=torch.channels_last)

    @torch.no_grad()
    def drawn() -> tuple[Tensor, ...]:
        images, plain, lined = bench.both(config.batch)
        wanted = [
            torch.cat(pair)
            for pair in zip(expected(plain, False).values(), expected(lined, True).values(), strict=True)
        ]
        return decode(vae, encode(vae, images)[0]).clamp(-1, 1), *wanted

    pool = Pool(drawn, max(1, config.pool // 4))

    def batch() -> tuple[Tensor, ...]:
        return pool.draw(config.batch, bench.rng)

    metrics: dict[str, float] = {}
    steps = fit("judge", lambda: judge_loss(judge, *batch()), list(judge.parameters()), clock=clock, lr=config.lr)
    for step, value in steps:
        pool.refresh(8 * step)  # drawing and decoding pictures is quick beside what they teach
        metrics = {"judge_steps": step, "judge_loss": value}
    save_model(judge.eval(), config.work / "judge.safetensors")
    return metrics | {f"judge_right_{key}": value for key, value in judged_renders(bench, vae, judge).items()}


def train_base(bench: Bench) -> dict[str, float]:
    """Train on short texts for most of the time, then on short and long ones in turn."""
    clock, pool = Clock.now(bench.config.base_minutes), bench.latents(bench.vae(), outlined=False)
    parts = bench.parts("base" if bench.config.resume else None).requires_grad_(True)
    return _train_parts(bench, "base", parts, flow_loss, pool, clock, scales=(1.0, 1.0), alone=0.65)


def train_guide(bench: Bench) -> dict[str, float]:
    """Train the transformer to predict what guidance of the base model predicts; the encoders stay."""
    clock, pool = Clock.now(bench.config.guide_minutes), bench.latents(bench.vae(), outlined=False)
    teacher, parts = bench.fast(bench.parts("base")), bench.parts("base")
    parts.transformer.requires_grad_(True)
    loss = partial(guided_loss, teacher=teacher, empty=(bench.grammar.clip_PL[-1:], bench.grammar.t5_PL[-1:]))
    return _train_parts(bench, "guide", parts, loss, pool, clock, scales=GUIDED, alone=0.0)


def _train_parts(
    bench: Bench,
    stage: str,
    parts: Parts,
    loss: Callable[..., Tensor],
    pool: Pool,
    clock: Clock,
    *,
    scales: tuple[float, float],
    alone: float,
) -> dict[str, float]:
    """Train those parameters that require gradients, and save their moving average. alone: time of short texts."""
    chosen = [param for param in parts.parameters() if param.requires_grad]
    result, masters = copy.deepcopy(parts), masters_of(chosen)
    average, turn, metrics = Average(masters), [0], {}
    bench.fast(parts)

    def one() -> Tensor:
        turn[0] += 1
        length = LONG if turn[0] % 2 and clock.done() > alone else SHORT
        return loss(parts, *bench.batch(pool, length, scales))

    for step, value in fit(stage, one, chosen, clock=clock, lr=RATES[stage] * bench.config.lr, masters=masters):
        average.update(step)
        pool.refresh(step)
        metrics = {f"{stage}_steps": step, f"{stage}_loss": value}
    average.write([param for param in result.parameters() if param.requires_grad])
    save_model(result, bench.config.work / f"{stage}.safetensors")
    return metrics


def train_lora(bench: Bench) -> dict[str, float]:
    clock, pool = Clock.now(bench.config.lora_minutes), bench.latents(bench.vae(), outlined=True)
    parts = bench.parts("guide")
    params = add_lora(parts)
    masters = masters_of(params)
    bench.fast(parts)
    metrics: dict[str, float] = {}

    def loss() -> Tensor:
        return flow_loss(parts, *bench.batch(pool, SHORT, STYLED))

    for step, value in fit("lora", loss, params, clock=clock, lr=RATES["lora"] * bench.config.lr, masters=masters):
        pool.refresh(step)
        metrics = {"lora_steps": step, "lora_loss": value, "lora_parameters": sum(param.numel() for param in params)}
    save_lora(parts, bench.config.work / "outline.safetensors")
    return metrics


RUN: dict[str, Callable[[Bench], dict[str, float]]] = {
    "vae": train_vae,
    "judge": train_judge,
    "base": train_base,
    "guide": train_guide,
    "lora": train_lora,
    "report": report,
}


def main(config: Train) -> None:
    torch.set_float32_matmul_precision("high")
    torch.backends.cuda.enable_cudnn_sdp(False)  # its backward pass fails for these shapes (torch 2.11)
    config.work.mkdir(parents=True, exist_ok=True)
    path = config.work / "metrics.json"
    for stage in config.stages:
        started = time.monotonic()
        metrics = RUN[stage](Bench(config, stage)) | {f"{stage}_seconds": time.monotonic() - started}
        known = json.loads(path.read_text()) if path.exists() else {}
        path.write_text(json.dumps(known | metrics, indent=2) + "\n")
        print(json.dumps(metrics), flush=True)


if __name__ == "__main__":
    main(parsed(Train, sys.argv[1:], "train_prompts.py"))
