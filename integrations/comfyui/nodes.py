"""The nodes. They hold no weights: a server of seqpar computes, and sends pixels as raw arrays."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import comfy.model_management
import comfy.utils
import numpy as np
import torch
from comfy_api.latest import io
from PIL import Image
from safetensors.torch import load, save

from .client import Server, ServerError, as_form, as_json, file_of

CATEGORY = "seqpar"
URL, KEY = "SEQPAR_URL", "SEQPAR_KEY"  # of the environment: a key in a workflow would be in every image
LOCAL = "http://127.0.0.1:8000"
MOST_SEED = 2**63 - 1
MOST_SIDE = 8192
PREVIEW = 512  # pixels along the longer side of a preview
ModelType, TextType = io.Custom("SEQPAR_MODEL"), io.Custom("SEQPAR_TEXT")


@dataclass(frozen=True)
class Model:
    """A model of a server. name: None for the first that fits the request. loras: names and scales."""

    server: Server
    name: str | None = None
    loras: tuple[tuple[str, float], ...] = ()

    @property
    def fields(self) -> dict[str, Any]:
        loras = [{"name": name, "scale": scale} for name, scale in self.loras]
        return ({} if self.name is None else {"model": self.name}) | ({"lora": loras} if loras else {})


@dataclass(frozen=True)
class Text:
    """A prompt. images_BHW3: that the model edits, with values in [0, 1]."""

    text: str
    images_BHW3: tuple[torch.Tensor, ...] = ()


def check() -> None:
    """Raise ComfyUI's exception if the user has interrupted the workflow."""
    comfy.model_management.throw_exception_if_processing_interrupted()


def given(**fields: Any) -> dict[str, Any]:
    """The fields of a request that a node sets: not None, and not -1, which leaves a number to the model."""
    return {name: value for name, value in fields.items() if value is not None and value != -1}


def picture_files(images_BHW3: Sequence[torch.Tensor]) -> list[tuple[str, bytes]]:
    """The files of a form for images, as 8-bit arrays."""
    images_HW3 = [(image * 255).round().clamp(0, 255).to(torch.uint8) for batch in images_BHW3 for image in batch]
    return [("image[]", save({"image": image.cpu().contiguous()})) for image in images_HW3]


def generated(
    model: Model, positive: Text, fields: Mapping[str, Any], files: Sequence[tuple[str, bytes]], count: int
) -> list[dict[str, torch.Tensor]]:
    """The tensors of each image that a request makes, with progress and previews at the running node.

    Raises ServerError with the server's message; ComfyUI shows it at the node.
    """
    body = {**model.fields, "prompt": positive.text, "n": count, "stream": True, "stream_steps": True, **fields}
    files = [*picture_files(positive.images_BHW3), *files]
    path, bar, tensors = "/v1/images/edits" if files else "/v1/images/generations", comfy.utils.ProgressBar(count), []
    done, total = 0, count
    for event in model.server.events(path, as_form(body, files) if files else as_json(body), check):
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


class Connect(io.ComfyNode):
    """A model of a server that runs."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="SeqparConnect",
            display_name="seqpar: connect",
            category=CATEGORY,
            description=f"A model of a running `seqpar serve`. A key is taken from {KEY} and sent to {URL} alone.",
            inputs=[
                io.String.Input("model", default="", tooltip="Its name at the server. Empty: the first that fits."),
                io.String.Input("url", default="", tooltip=f"Address of the server. Empty: {URL}, or {LOCAL}."),
            ],
            outputs=[ModelType.Output(display_name="model")],
        )

    @classmethod
    def execute(cls, model: str, url: str) -> io.NodeOutput:
        return io.NodeOutput(Model(cls.server(url), model.strip() or None))

    @classmethod
    def fingerprint_inputs(cls, model: str, url: str) -> str:
        """The models with the server's start: another server may have other weights by the same names."""
        return str(cls.server(url).json("GET", "/v1/models", lambda: None))

    @staticmethod
    def server(url: str) -> Server:
        own = os.environ.get(URL, LOCAL).rstrip("/")
        url = url.strip().rstrip("/") or own
        return Server(url, os.environ.get(KEY) if url == own else None)


class TextNode(io.ComfyNode):
    """A prompt, and the images that the model edits."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="SeqparText",
            display_name="seqpar: text",
            category=CATEGORY,
            description="A prompt; with images for models that edit them. The server encodes it.",
            inputs=[
                io.String.Input("text", multiline=True, dynamic_prompts=True),
                io.Image.Input("images", optional=True, tooltip="To edit, or to begin with; several as a batch."),
            ],
            outputs=[TextType.Output(display_name="text")],
        )

    @classmethod
    def execute(cls, text: str, images: torch.Tensor | None = None) -> io.NodeOutput:
        return io.NodeOutput(Text(text, () if images is None else (images,)))


def sampling_inputs() -> list[io.Input]:
    """Inputs of all nodes that sample. -1 leaves a number to the model."""
    return [
        ModelType.Input("model"),
        TextType.Input("positive"),
        TextType.Input("negative", optional=True),
        io.Int.Input("seed", default=0, min=0, max=MOST_SEED, control_after_generate=True),
        io.Int.Input("steps", default=-1, min=-1, max=1000, tooltip="-1: the model's own."),
        io.Float.Input("guidance", default=-1.0, min=-1.0, max=1000.0, step=0.1, tooltip="-1: the model's own."),
    ]


class Generate(io.ComfyNode):
    """Images from a prompt, or of images."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        side = {"default": 0, "min": 0, "max": MOST_SIDE, "step": 8, "tooltip": "0: the model's own."}
        return io.Schema(
            node_id="SeqparGenerate",
            display_name="seqpar: generate",
            category=CATEGORY,
            description="Samples and decodes in one request.",
            inputs=[
                *sampling_inputs(),
                io.Int.Input("width", **side),
                io.Int.Input("height", **side),
                io.Int.Input("batch_size", default=1, min=1, max=10, tooltip="Image i has the seed plus i."),
                io.Int.Input("previews", default=0, min=0, max=3, tooltip="Images shown while it samples."),
            ],
            outputs=[io.Image.Output()],
        )

    @classmethod
    def execute(
        cls,
        model: Model,
        positive: Text,
        seed: int,
        steps: int,
        guidance: float,
        width: int,
        height: int,
        batch_size: int,
        previews: int,
        negative: Text | None = None,
    ) -> io.NodeOutput:
        fields = given(
            seed=seed,
            steps=steps,
            guidance=guidance,
            negative_prompt=None if negative is None else negative.text,
            size=f"{width}x{height}" if width and height else None,
            partial_images=previews or None,
            output_format="safetensors",
        )
        made = generated(model, positive, fields, [], batch_size)
        return io.NodeOutput(torch.stack([as_image(tensors["image"]) for tensors in made]))


def as_image(pixels_HW3: torch.Tensor) -> torch.Tensor:
    """Values in [0, 1] in fp32, as ComfyUI loads them from a PNG."""
    return torch.from_numpy(pixels_HW3.numpy().astype(np.float32) / 255.0)


NODES = (Connect, TextNode, Generate)
