# pyright cannot infer the types of diffusers' modules
# pyright: reportAttributeAccessIssue=false, reportPrivateImportUsage=false, reportArgumentType=false
# pyright: reportOptionalCall=false, reportOptionalSubscript=false, reportOptionalMemberAccess=false
# pyright: reportOptionalOperand=false, reportOperatorIssue=false, reportIndexIssue=false, reportCallIssue=false
"""Trains the small built-in model, a class-conditional latent DiT and its VAE, and saves it as a diffusers folder.

The package contains this model so that it makes real pictures right after installation. The model is trained from
scratch on renders of the Noto Color Emoji font (SIL Open Font License 1.1); its weights are under Apache-2.0. Training
takes minutes on one GPU:

    python examples/train_builtin.py render --font /usr/share/fonts/truetype/noto/NotoColorEmoji.ttf
    python examples/train_builtin.py train --out builtin
"""

import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from _emoji import GlyphBank, draw_batch, load_bank, render_font
from _networks import (
    NULL_CLASS,
    PIXELS,
    build_dit,
    build_scheduler,
    build_vae,
    centre_latents,
    dit_loss,
    encode,
    prepare_dit,
    save_folder,
    unshare_embedder,
    vae_loss,
)
from _training import Average, Clock, Pool, compiled, fit, save_grid
from diffusers import AutoencoderKL, DiTPipeline, DiTTransformer2DModel
from torch import Tensor

from seqpar.types.flags import chosen


@dataclass(frozen=True)
class Render:
    """Render the font's glyphs into one .npz file."""

    font: Path = Path("/usr/share/fonts/truetype/noto/NotoColorEmoji.ttf")
    out: Path = Path(".data/emoji.npz")


@dataclass(frozen=True)
class Train:
    """Train the VAE, then the DiT, and write the model folder, with sample pictures and metrics beside it."""

    data: Path = Path(".data/emoji.npz")
    out: Path = Path("builtin")
    vae_minutes: float = 4.0
    dit_minutes: float = 14.0
    batch: int = 1024
    """Batch size of the DiT; the VAE, which sees whole pictures, uses a quarter of it."""
    vae_lr: float = 1e-3
    dit_lr: float = 1e-3
    pool: int = 128
    """Number of batches of encoded pictures to draw from; the oldest is replaced every few steps."""
    guidance: float = 3.5
    samples: int = 3
    """Number of pictures per class in the sample grid."""
    sample_steps: int = 50
    device: str = "auto"
    compile: bool = True
    """Use torch.compile on CUDA."""
    seed: int = 0


# --- the VAE ---


def train_vae(config: Train, bank: GlyphBank, rng: torch.Generator) -> tuple[AutoencoderKL, dict[str, float]]:
    clock = Clock.now(config.vae_minutes)
    batch = max(config.batch // 4, 1)
    vae = build_vae().to(rng.device, memory_format=torch.channels_last)

    def pictures() -> Tensor:
        return draw_batch(bank, batch, pixels=PIXELS, rng=rng)[0].to(memory_format=torch.channels_last)

    loss = compiled(vae_loss, config.compile and rng.device.type == "cuda", (vae, pictures()))
    steps = fit("vae", lambda: loss(vae, pictures()), list(vae.parameters()), clock=clock, lr=config.vae_lr)
    *_, (step, value) = steps
    vae.eval().requires_grad_(False)
    centre_latents(vae, torch.cat([pictures() for _ in range(4)]))
    return vae, {"vae_steps": step, "vae_loss": value}


# --- the DiT ---


def train_dit(
    config: Train, bank: GlyphBank, vae: AutoencoderKL, kept_T: Tensor, rng: torch.Generator
) -> tuple[DiTTransformer2DModel, dict[str, float]]:
    """Train the DiT and return the moving average of its weights, and metrics."""
    clock = Clock.now(config.dit_minutes)
    model = build_dit()
    prepare_dit(model)
    params, count = list(model.to(rng.device).parameters()), (config.batch,)
    average = Average(params)

    @torch.no_grad()
    def encoded() -> tuple[Tensor, Tensor]:
        images, labels = draw_batch(bank, config.batch, pixels=PIXELS, rng=rng)
        mean, _ = encode(vae, images.to(memory_format=torch.channels_last))
        return mean * vae.config.scaling_factor, labels

    def batch() -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return latents, noise, times and labels for one step; a tenth of the labels become the null class."""
        latents, labels = pool.draw(config.batch, rng)
        dropped = torch.rand(count, device=rng.device, generator=rng) < 0.1
        times = torch.randint(1000, count, device=rng.device, generator=rng)
        noise = torch.randn(latents.shape, device=rng.device, generator=rng)
        return latents, noise, times, labels.masked_fill(dropped, NULL_CLASS)

    pool = Pool(encoded, config.pool)
    loss = compiled(dit_loss, config.compile and rng.device.type == "cuda", (model, *batch(), kept_T))
    metrics = {}
    steps = fit("dit", lambda: loss(model, *batch(), kept_T), params, clock=clock, lr=config.dit_lr)
    for step, value in steps:
        average.update(step)
        pool.refresh(step)
        metrics = {"dit_steps": step, "dit_loss": value}
    average.write(params)
    unshare_embedder(model, len(bank.names))
    return model.requires_grad_(False).eval(), metrics


# --- results ---


@torch.no_grad()
def sample_grid(config: Train, pipe: DiTPipeline, names: tuple[str, ...]) -> None:
    labels = [class_id for class_id in range(len(names)) for _ in range(config.samples)]
    pipe.set_progress_bar_config(disable=True)
    images = pipe(
        labels,
        guidance_scale=config.guidance,
        generator=torch.Generator("cpu").manual_seed(config.seed),
        num_inference_steps=config.sample_steps,
        output_type="np",
    ).images
    path = config.out.with_name(config.out.name + "_samples.png")
    save_grid(path, torch.from_numpy(images), 6 * config.samples, names)


@torch.no_grad()
def vae_report(config: Train, vae: AutoencoderKL, bank: GlyphBank) -> dict[str, float]:
    """Return PSNR and latent statistics on pictures that were not trained on, and save a grid of pairs."""
    rng = torch.Generator(bank.first.device).manual_seed(config.seed + 1)
    images, labels = draw_batch(bank, 4 * len(bank.names), pixels=PIXELS, rng=rng)
    mean = vae.encode(images).latent_dist.mean
    found = vae.decode(mean).sample.clamp(-1, 1)
    error = (found - images).square().mean((1, 2, 3)) / 4
    latents = mean * vae.config.scaling_factor
    pairs = torch.stack([images[:72], found[:72]], dim=1).flatten(0, 1).permute(0, 2, 3, 1) / 2 + 0.5
    captions = tuple(bank.names[label] for label in labels[:72].tolist())
    save_grid(config.out.with_name(config.out.name + "_vae.png"), pairs, 18, captions)
    return {
        "vae_psnr_db": -10 * error.mean().log10().item(),
        "vae_psnr_db_worst": -10 * error.max().log10().item(),
        "latent_mean": latents.mean().item(),
        "latent_std": latents.std().item(),
        "scaling_factor": vae.config.scaling_factor,
    }


def train(config: Train) -> None:
    started = time.monotonic()
    fallback = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(fallback if config.device == "auto" else config.device)
    torch.manual_seed(config.seed)
    torch.set_float32_matmul_precision("high")
    rng = torch.Generator(device).manual_seed(config.seed)
    bank, scheduler = load_bank(config.data, device), build_scheduler()
    vae, metrics = train_vae(config, bank, rng)
    dit, dit_metrics = train_dit(config, bank, vae, scheduler.alphas_cumprod.to(device), rng)
    save_folder(config.out, vae, dit, scheduler, bank.names)
    # Load the saved files, so that the pictures show what a user gets.
    pipe = DiTPipeline.from_pretrained(config.out).to(device)
    metrics |= dit_metrics | vae_report(config, pipe.vae, bank)
    sample_grid(config, pipe, bank.names)
    metrics |= {
        "dit_parameters": pipe.transformer.num_parameters(),
        "vae_parameters": pipe.vae.num_parameters(),
        "folder_mb": sum(file.stat().st_size for file in config.out.rglob("*") if file.is_file()) / 1e6,
        "seconds": time.monotonic() - started,
    }
    report = json.dumps(metrics, indent=2)
    config.out.with_name(config.out.name + "_metrics.json").write_text(report + "\n")
    print(report)


def main(config: Render | Train) -> None:
    if isinstance(config, Render):
        render_font(config.font, config.out)
    else:
        train(config)


if __name__ == "__main__":
    main(chosen({"render": Render, "train": Train}, sys.argv[1:], "train_builtin.py"))
