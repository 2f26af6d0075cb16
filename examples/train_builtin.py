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

import copy
import json
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import tyro
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
from diffusers import AutoencoderKL, DiTPipeline, DiTTransformer2DModel
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor, nn

EMA_DECAY = 0.9995
REFRESH = 16  # steps between replacements of a batch in the pool, because encoding a batch takes longer than a step


@dataclass(frozen=True)
class Clock:
    """Measures the share of a stage's time that has passed, compilation included."""

    started: float
    minutes: float

    def done(self) -> float:
        return (time.monotonic() - self.started) / (60 * self.minutes)


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


# --- one training loop for both networks ---


def fit(
    name: str, loss: Callable[[], Tensor], params: list[nn.Parameter], *, clock: Clock, lr: float
) -> Iterator[tuple[int, float]]:
    """Train with AdamW until the time is up, with a learning rate that falls to zero; yields (step, last loss read)."""
    optimizer = torch.optim.AdamW(params, lr=lr, betas=(0.9, 0.99), weight_decay=0.0, fused=params[0].is_cuda)
    optimizer.zero_grad()  # clears the gradients of torch.compile's trial run
    step, value, said = 0, math.nan, time.monotonic()
    while (done := clock.done()) < 1:
        rate = lr * min(1.0, (step + 1) / 200) * (0.5 + 0.5 * math.cos(math.pi * done))
        for group in optimizer.param_groups:
            group["lr"] = rate
        current = loss()
        current.backward()
        nn.utils.clip_grad_norm_(params, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        if step % 20 == 1:
            value = current.item()  # waits for the GPU, so that the clock measures finished steps
            if step == 1 or time.monotonic() - said > 10:
                said = time.monotonic()
                print(f"{name}: {done:4.0%} step {step} loss {value:.4f} lr {rate:.2e}", flush=True)
        yield step, value


def compiled(loss: Callable[..., Tensor], trial: tuple[object, ...], enabled: bool) -> Callable[..., Tensor]:
    """Return `torch.compile(loss)` if a trial run of both passes works here, else `loss` itself."""
    if not enabled:
        return loss
    candidate = torch.compile(loss)
    try:
        candidate(*trial).backward()
    except RuntimeError as error:  # the base class of all torch.compile errors
        print(f"not compiled: {type(error).__name__}: {str(error)[:300]}")
        return loss
    return candidate


# --- the VAE ---


def train_vae(config: Train, bank: GlyphBank, rng: torch.Generator) -> tuple[AutoencoderKL, dict[str, float]]:
    clock = Clock(time.monotonic(), config.vae_minutes)
    batch = max(config.batch // 4, 1)
    vae = build_vae().to(rng.device, memory_format=torch.channels_last)

    def pictures() -> Tensor:
        return draw_batch(bank, batch, pixels=PIXELS, rng=rng)[0].to(memory_format=torch.channels_last)

    loss = compiled(vae_loss, (vae, pictures()), config.compile and rng.device.type == "cuda")
    steps = fit("vae", lambda: loss(vae, pictures()), list(vae.parameters()), clock=clock, lr=config.vae_lr)
    *_, (step, value) = steps
    vae.eval().requires_grad_(False)
    centre_latents(vae, torch.cat([pictures() for _ in range(4)]))
    return vae, {"vae_steps": step, "vae_loss": value}


# --- the DiT ---


class LatentPool:
    """A pool of encoded pictures that are replaced one batch at a time."""

    def __init__(self, bank: GlyphBank, vae: AutoencoderKL, *, batch: int, slots: int, rng: torch.Generator) -> None:
        self.bank, self.vae, self.batch, self.slots, self.rng = bank, vae, batch, slots, rng
        self.latents = torch.empty(slots * batch, 4, PIXELS // 4, PIXELS // 4, device=rng.device)
        self.labels = torch.empty(slots * batch, dtype=torch.long, device=rng.device)
        for slot in range(slots):
            self.replace(slot)

    @torch.no_grad()
    def replace(self, slot: int) -> None:
        images, labels = draw_batch(self.bank, self.batch, pixels=PIXELS, rng=self.rng)
        mean, _ = encode(self.vae, images.to(memory_format=torch.channels_last))
        rows = slice(slot * self.batch, (slot + 1) * self.batch)
        self.latents[rows] = mean * self.vae.config.scaling_factor
        self.labels[rows] = labels

    def draw(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return latents, noise, times and labels for one step; a tenth of the labels become the null class."""
        count, device, rng = (self.batch,), self.rng.device, self.rng
        rows = torch.randint(len(self.labels), count, device=device, generator=rng)
        dropped = torch.rand(count, device=device, generator=rng) < 0.1
        times = torch.randint(1000, count, device=device, generator=rng)
        latents = self.latents[rows]
        noise = torch.randn(latents.shape, device=device, generator=rng)
        return latents, noise, times, self.labels[rows].masked_fill(dropped, NULL_CLASS)


def train_dit(
    config: Train, bank: GlyphBank, vae: AutoencoderKL, kept_T: Tensor, rng: torch.Generator
) -> tuple[DiTTransformer2DModel, dict[str, float]]:
    """Train the DiT and return the moving average of its weights, and metrics."""
    clock = Clock(time.monotonic(), config.dit_minutes)
    model = build_dit()
    prepare_dit(model)
    average = copy.deepcopy(model.to(rng.device)).requires_grad_(False)
    params, averages = list(model.parameters()), list(average.parameters())
    values = [param.detach() for param in params]
    pool = LatentPool(bank, vae, batch=config.batch, slots=config.pool, rng=rng)
    loss = compiled(dit_loss, (model, *pool.draw(), kept_T), config.compile and rng.device.type == "cuda")
    metrics = {}
    steps = fit("dit", lambda: loss(model, *pool.draw(), kept_T), params, clock=clock, lr=config.dit_lr)
    for step, value in steps:
        torch._foreach_lerp_(averages, values, 1 - min(EMA_DECAY, (1 + step) / (10 + step)))
        if step % REFRESH == 0:
            pool.replace(step // REFRESH % config.pool)
        metrics = {"dit_steps": step, "dit_loss": value}
    unshare_embedder(average, len(bank.names))
    return average.eval(), metrics


# --- results ---


def save_grid(path: Path, images_NHWC: Tensor, columns: int, captions: tuple[str, ...]) -> None:
    """Save pictures in [0, 1] as a grid, in rows of `columns`; groups of equal length share a caption."""
    count, height, width, _ = images_NHWC.shape
    group = count // len(captions)
    page = Image.new("RGB", (columns * (width + 4), -(-count // columns) * (height + 18)), "white")
    draw, font = ImageDraw.Draw(page), ImageFont.load_default(11)
    for i, pixels in enumerate((images_NHWC.clamp(0, 1) * 255).round().byte().cpu().numpy()):
        x, y = i % columns * (width + 4), i // columns * (height + 18)
        page.paste(Image.fromarray(pixels), (x, y))
        if i % group == 0:
            draw.text((x, y + height + 1), captions[i // group], font=font, fill="black")
    page.save(path)


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
    main(tyro.cli(Render | Train))
