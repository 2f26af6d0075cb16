# pyright: strict
"""A user's script: everything that it calls has complete types. pyright checks it (`.ci/run`); nothing runs it."""

from __future__ import annotations

import torch
from diffusers.models.transformers.transformer_flux import FluxTransformer2DModel
from diffusers.pipelines.flux.pipeline_flux import FluxPipeline
from PIL import Image

import seqpar
from seqpar.pipelines.load import LoadedPipeline


def load(folder: str) -> LoadedPipeline:
    pipe = seqpar.load(folder, dtype=torch.bfloat16, mesh="cfg=2,ulysses=2", loras=["style.safetensors:0.8"])
    pipe.load_lora_weights("other.safetensors")
    pipe.scheduler = pipe.scheduler.from_config(pipe.scheduler.config, shift=5.0)
    seqpar.refresh(pipe)
    return pipe


def generate(pipe: LoadedPipeline, prompt: str) -> Image.Image:
    image: Image.Image = pipe(prompt, num_inference_steps=28).images[0]
    seqpar.release(pipe)
    return image


def parallelize(pipe: FluxPipeline, transformer: FluxTransformer2DModel) -> FluxPipeline:
    whole: FluxTransformer2DModel = seqpar.parallelize(transformer, strategy="ulysses", cfg=False)
    seqpar.release(whole)
    return seqpar.parallelize(pipe, precision="fp8", vae="tiled")


def measure(pipe: FluxPipeline, folder: str) -> tuple[str | None, float, float]:
    verdict = seqpar.verify(pipe, "a fox", evaluations=2)

    def run() -> None:
        pipe("a fox", num_inference_steps=12)

    print(seqpar.profile(run, folder))
    error = seqpar.measure_precision(pipe, ["a fox"], num_inference_steps=28)
    seqpar.keep_budget(pipe, 30.0, ["a fox"])
    return verdict.finding, verdict.ratio, error.worst_psnr


def sample(path: str) -> torch.Tensor:
    mesh = seqpar.Mesh.joined()
    model = seqpar.DistributedDiT.from_pretrained(path, mesh)
    noise, prompt = torch.randn(1, 4, 32, 32), {"class_labels": torch.tensor([207])}
    with seqpar.Sampler(model) as sampler:
        first = sampler(None, noise, prompt, steps=25, guidance=seqpar.Guidance(4.0))
    return first + seqpar.sample(model, None, noise, prompt, steps=25, on_step=print)
