"""What nodes ask of a server: models, texts, and their requests with progress at the running node."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from io import BytesIO
from typing import Any

import comfy.model_management
import comfy.utils
import numpy as np
import torch
from PIL import Image
from safetensors.torch import load, save

from .client import Server, ServerError, as_form, as_json, file_of
from .started import Plan, server_of

PREVIEW = 512  # pixels along the longer side of a preview
GENERATIONS, EDITS, MODELS = "/v1/images/generations", "/v1/images/edits", "/v1/models"
OWN = "default"  # the sampler and spacing of the model's files

# ComfyUI's sampler -> the scheduler class of diffusers that steps alike
SAMPLERS = {
    OWN: None,
    "euler": "FlowMatchEulerDiscreteScheduler",
    "heun": "FlowMatchHeunDiscreteScheduler",
    "lcm": "FlowMatchLCMScheduler",
    "dpmpp_2m": "DPMSolverMultistepScheduler",
    "deis": "DEISMultistepScheduler",
    "uni_pc_bh2": "UniPCMultistepScheduler",
    "sa_solver": "SASolverScheduler",
    "euler_ancestral": "EulerAncestralDiscreteScheduler",
    "dpm_2": "KDPM2DiscreteScheduler",
    "dpm_2_ancestral": "KDPM2AncestralDiscreteScheduler",
    "ddim": "DDIMScheduler",
    "ddpm": "DDPMScheduler",
}
SPACINGS = (OWN, "simple")  # of flow matching, "simple" is what diffusers' pipelines do: equal steps, then the shift


@dataclass(frozen=True)
class Model:
    """A model of a server that runs, or that is started for it. name: None for the first that fits the request."""

    where: Server | Plan
    name: str | None = None
    loras: tuple[tuple[str, float], ...] = ()

    @property
    def server(self) -> Server:
        return server_of(self.where, check) if isinstance(self.where, Plan) else self.where

    @property
    def fields(self) -> dict[str, Any]:
        loras = [{"name": name, "scale": scale} for name, scale in self.loras]
        return ({} if self.name is None else {"model": self.name}) | ({"lora": loras} if loras else {})

    def facts(self) -> dict[str, Any]:
        """What /v1/models says of it."""
        models = self.server.json("GET", MODELS, check)["data"]
        known = [model for model in models if self.name in (None, model["id"])]
        if not known:
            names = ", ".join(model["id"] for model in models)
            raise ServerError(f"the server has no model {self.name}; use one of {names}")
        return known[0]["seqpar"]


@dataclass(frozen=True)
class Control:
    """A ControlNet of the server by its name, the image that it follows (1, H, W, 3), and its weight."""

    name: str
    image_1HW3: torch.Tensor
    scale: float


@dataclass(frozen=True)
class Text:
    """A prompt. images_BHW3: that the model edits, with values in [0, 1]. mask_HW: 1 where one is repainted."""

    text: str
    images_BHW3: torch.Tensor | None = None
    mask_HW: torch.Tensor | None = None
    control: Control | None = None

    @property
    def files(self) -> list[tuple[str, bytes]]:
        """The fields of a form with the images, the mask, and what a ControlNet follows."""
        files = [("image[]", file) for file in files_of(self.images_BHW3)]
        files += [] if self.mask_HW is None else [("mask", mask_file(self.mask_HW))]
        followed = () if self.control is None else files_of(self.control.image_1HW3)
        return [*files, *(("control_image", file) for file in followed)]

    @property
    def fields(self) -> dict[str, Any]:
        named = {} if self.control is None else {"controlnet": self.control.name, "control_scale": self.control.scale}
        return {"prompt": self.text, **named}


# requests ------------------------------------------------------------------------------------------------------------


def check() -> None:
    """Raise ComfyUI's exception if the user has interrupted the workflow."""
    comfy.model_management.throw_exception_if_processing_interrupted()


def given(**fields: Any) -> dict[str, Any]:
    """The fields of a request that a node sets: not None, and not -1, which leaves a number to the model."""
    return {name: value for name, value in fields.items() if value is not None and value != -1}


def size_of(width: int, height: int) -> str | None:
    if bool(width) != bool(height):
        raise ValueError(f"width {width} with height {height}; give both, or 0 for both")
    return f"{width}x{height}" if width else None


def files_of(images_BHW3: torch.Tensor | None) -> list[bytes]:
    """Images as files of 8-bit arrays."""
    images_HW3 = () if images_BHW3 is None else (images_BHW3[..., :3] * 255).round().clamp(0, 255).to(torch.uint8)
    return [save({"image": image.cpu().contiguous()}) for image in images_HW3]


def files_of_latents(samples: torch.Tensor) -> list[tuple[str, bytes]]:
    return [("image[]", save({"latents": latent[None].float().cpu().contiguous()})) for latent in samples]


def mask_file(mask_HW: torch.Tensor) -> bytes:
    """A mask as the server takes it: a PNG that is transparent where the image is repainted."""
    kept, file = (255 - mask_HW.float() * 255).round().clamp(0, 255).to(torch.uint8).cpu().numpy(), BytesIO()
    if kept.min() == 255:  # as ComfyUI loads an image without a mask
        raise ValueError("the mask selects nothing; paint it with ComfyUI's mask editor, or disconnect it")
    Image.fromarray(np.dstack([np.zeros_like(kept), kept]), "LA").save(file, "png")
    return file.getvalue()


def negative_of(text: Text | None) -> str | None:
    """The negative prompt; ValueError if its text has more than a prompt."""
    if text is None:
        return None
    if text.images_BHW3 is not None or text.control is not None:
        raise ValueError("the negative text has images or a ControlNet, which have no effect there; disconnect them")
    return text.text


def generated(
    model: Model, text: Text, fields: Mapping[str, Any], files: Sequence[tuple[str, bytes]] = (), count: int = 1
) -> list[dict[str, torch.Tensor]]:
    """The tensors of each image that a request makes, with progress and previews at the running node.

    files: fields of a form and their contents, beside those of the text.
    Raises ServerError with the server's message; ComfyUI shows it at the node.
    """
    body = {**model.fields, **text.fields, "n": count, "stream": True, "stream_steps": True, **fields}
    files = (*text.files, *files)
    request = (EDITS, as_form(body, files)) if files else (GENERATIONS, as_json(body))
    bar, tensors, done, total = comfy.utils.ProgressBar(count), list[dict[str, torch.Tensor]](), 0, count
    for event in model.server.events(*request, check):
        match event["type"].rpartition(".")[2]:
            case "step":
                done, total = event["picture"] * event["steps"] + event["step"], count * event["steps"]
                bar.update_absolute(done, total)
            case "partial_image":
                shown = Image.fromarray(load(file_of(event))["image"].numpy())
                bar.update_absolute(done, total, ("JPEG", shown, PREVIEW))
            case "completed":
                tensors.append(load(file_of(event)))
    if len(tensors) < count:
        raise ServerError("the server ended the answer before the last image; its log has the reason")
    return tensors


def as_images(made: Sequence[dict[str, torch.Tensor]]) -> torch.Tensor:
    """Values in [0, 1] in fp32, as ComfyUI loads them from PNGs."""
    return torch.stack([torch.from_numpy(tensors["image"].numpy().astype(np.float32) / 255.0) for tensors in made])


def scheduler_of(sampler: str, spacing: str = OWN) -> str | None:
    """The scheduler of a sampler of ComfyUI; ValueError with the list for others."""
    if sampler not in SAMPLERS:
        raise ValueError(f"sampler {sampler} has no counterpart; use one of {', '.join(SAMPLERS)}")
    if spacing not in SPACINGS:
        raise ValueError(f"scheduler {spacing} has no counterpart; use one of {', '.join(SPACINGS)}, or SIGMAS")
    return SAMPLERS[sampler]


def listed(sigmas: torch.Tensor, sampler: str) -> list[float]:
    """Return SIGMAS as the server expects them; ValueError for a schedule that leaves noise or is not flow matching."""
    values = [float(x) for x in sigmas]
    if len(values) < 2 or values[-1] != 0:
        raise ValueError("SIGMAS must end at 0: a server leaves no noise in latents")
    if max(values) > 1:
        raise ValueError(
            f"SIGMAS begin at {max(values):g}, but those of flow matching are at most 1; use such a model's"
        )
    if sampler not in (OWN, "euler"):
        raise ValueError(f"SIGMAS are stepped by euler; got sampler {sampler}")
    return values[:-1]
