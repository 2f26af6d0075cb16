"""The nodes. They hold no weights: a server of seqpar computes, and sends pixels and latents as raw arrays."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from io import BytesIO
from pathlib import Path
from typing import Any

import comfy.model_management
import comfy.utils
import folder_paths
import torch
from comfy_api.latest import InputImpl, Types, io
from safetensors.torch import load

from .asking import (
    MODELS,
    OWN,
    SAMPLERS,
    SPACINGS,
    Control,
    Model,
    Text,
    as_images,
    check,
    files_of,
    files_of_latents,
    generated,
    given,
    listed,
    negative_of,
    scheduler_of,
    size_of,
)
from .client import Server, ServerError, as_form, as_json
from .started import Plan

CATEGORY = "seqpar"
URL, KEY = "SEQPAR_URL", "SEQPAR_KEY"  # of the environment: a key in a workflow would be in every image
LOCAL = "http://127.0.0.1:8000"
MOST_SEED = 2**63 - 1
MOST_SIDE = 8192
ASK_S = 0.3  # between two looks at a video's progress
VIDEOS = "/v1/videos"
FOLDERS = ("diffusion_models", "checkpoints")  # of ComfyUI, with single files

ModelType, TextType = io.Custom("SEQPAR_MODEL"), io.Custom("SEQPAR_TEXT")


# models --------------------------------------------------------------------------------------------------------------


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
        return str(cls.server(url).json("GET", MODELS, lambda: None))

    @staticmethod
    def server(url: str) -> Server:
        own = os.environ.get(URL, LOCAL).rstrip("/")
        url = url.strip().rstrip("/") or own
        return Server(url, os.environ.get(KEY) if url == own else None)


class Start(io.ComfyNode):
    """A server with one model, which ComfyUI starts and ends."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        names = [name for folder in FOLDERS for name in folder_paths.get_filename_list(folder)]
        return io.Schema(
            node_id="SeqparStart",
            display_name="seqpar: load model",
            category=CATEGORY,
            description="Starts `seqpar serve` when a node first needs it. One such server runs at a time.",
            inputs=[
                io.String.Input("pipeline", tooltip="Folder in diffusers' layout, id of the hub, or a built-in model."),
                io.Combo.Input("file", ["", *names], default="", tooltip="In place of the folder's transformer."),
                io.Int.Input("gpus", default=1, min=1, max=64),
                io.Combo.Input("precision", ["bf16", "fp8"], default="bf16"),
                io.String.Input("controlnet", default="", optional=True, tooltip="NAME=FOLDER, in diffusers' layout."),
            ],
            outputs=[ModelType.Output(display_name="model")],
        )

    @classmethod
    def execute(cls, pipeline: str, file: str, gpus: int, precision: str, controlnet: str = "") -> io.NodeOutput:
        plan = Plan(pipeline.strip(), cls.path(file), gpus, precision == "fp8", controlnet.strip() or None)
        return io.NodeOutput(Model(plan))

    @classmethod
    def fingerprint_inputs(cls, file: str, **others: Any) -> str:
        """Size and time of the file."""
        path = cls.path(file)
        facts = None if path is None else os.stat(path)
        return "" if facts is None else f"{facts.st_size} {facts.st_mtime_ns}"

    @staticmethod
    def path(file: str) -> str | None:
        paths = (folder_paths.get_full_path(folder, file) for folder in FOLDERS) if file else ()
        path = next(filter(None, paths), None)
        if file and path is None:
            raise ValueError(f"there is no file {file} in ComfyUI's folders {' and '.join(FOLDERS)}")
        return path


class Lora(io.ComfyNode):
    """A model with a LoRA."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="SeqparLora",
            display_name="seqpar: LoRA",
            category=CATEGORY,
            description="Of the server's folder of LoRAs; for a started server, of ComfyUI's.",
            inputs=[
                ModelType.Input("model"),
                io.String.Input("name", tooltip="NAME, or NAME@transformer_2 for one of several transformers."),
                io.Float.Input("strength", default=1.0, min=-100.0, max=100.0, step=0.05),
            ],
            outputs=[ModelType.Output(display_name="model")],
        )

    @classmethod
    def execute(cls, model: Model, name: str, strength: float) -> io.NodeOutput:
        name, at, transformer = name.strip().partition("@")
        if isinstance(model.where, Plan):
            path = cls.path(name)
            model = replace(model, where=model.where.with_lora(path))
            name = Path(path).stem
        return io.NodeOutput(replace(model, loras=(*model.loras, (name + at + transformer, strength))))

    @classmethod
    def fingerprint_inputs(cls, name: str, **others: Any) -> str:
        """Size and time of the file, if it is one of ComfyUI's."""
        try:
            facts = os.stat(cls.path(name.strip().partition("@")[0]))
        except ValueError:
            return ""
        return f"{facts.st_size} {facts.st_mtime_ns}"

    @staticmethod
    def path(name: str) -> str:
        for known in folder_paths.get_filename_list("loras"):
            if name in (known, Path(known).name, Path(known).stem):
                return str(folder_paths.get_full_path("loras", known))
        raise ValueError(f"there is no LoRA {name} in ComfyUI's folder of LoRAs")


# images --------------------------------------------------------------------------------------------------------------


class TextNode(io.ComfyNode):
    """A prompt, and the images that the model edits."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="SeqparText",
            display_name="seqpar: text",
            category=CATEGORY,
            description="A prompt, with images for models that edit and a mask for models that inpaint.",
            inputs=[
                io.String.Input("text", multiline=True, dynamic_prompts=True),
                io.Image.Input("images", optional=True, tooltip="To edit, or to begin with; several as a batch."),
                io.Mask.Input("mask", optional=True, tooltip="What is repainted of a single image of the same size."),
            ],
            outputs=[TextType.Output(display_name="text")],
        )

    @classmethod
    def execute(cls, text: str, images: torch.Tensor | None = None, mask: torch.Tensor | None = None) -> io.NodeOutput:
        if mask is not None and (images is None or len(images) != 1 or mask.shape[:-2].numel() != 1):
            raise ValueError("a mask needs one image, and an image one mask; connect one of each")
        return io.NodeOutput(Text(text, images, None if mask is None else mask.reshape(mask.shape[-2:])))


class ControlNode(io.ComfyNode):
    """A text with a ControlNet that follows an image."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="SeqparControlNet",
            display_name="seqpar: ControlNet",
            category=CATEGORY,
            description="One of the server's ControlNets (`seqpar serve --controlnet NAME=FOLDER`).",
            inputs=[
                TextType.Input("text"),
                io.String.Input("name", tooltip="Its name at the server."),
                io.Image.Input("image", tooltip="What it follows, such as edges or a pose."),
                io.Float.Input("strength", default=1.0, min=0.0, max=10.0, step=0.05),
            ],
            outputs=[TextType.Output(display_name="text")],
        )

    @classmethod
    def execute(cls, text: Text, name: str, image: torch.Tensor, strength: float) -> io.NodeOutput:
        if text.control is not None or len(image) != 1:
            raise ValueError("a text takes one ControlNet, which follows one image; disconnect others")
        return io.NodeOutput(replace(text, control=Control(name.strip(), image, strength)))


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


def side_input(name: str) -> io.Input:
    return io.Int.Input(name, default=0, min=0, max=MOST_SIDE, step=8, tooltip="0: the model's own.")


def previews_input() -> io.Input:
    return io.Int.Input("previews", default=0, min=0, max=3, tooltip="Images shown while it samples.")


class Generate(io.ComfyNode):
    """Images from a prompt, or of images."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="SeqparGenerate",
            display_name="seqpar: generate",
            category=CATEGORY,
            description="Samples and decodes in one request.",
            inputs=[
                *sampling_inputs(),
                side_input("width"),
                side_input("height"),
                io.Int.Input("batch_size", default=1, min=1, max=10, tooltip="Image i has the seed plus i."),
                io.Float.Input(
                    "strength",
                    default=-1.0,
                    min=-1.0,
                    max=1.0,
                    step=0.05,
                    tooltip="Of image-to-image; -1: the model's.",
                ),
                previews_input(),
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
        strength: float,
        previews: int,
        negative: Text | None = None,
    ) -> io.NodeOutput:
        fields = given(
            seed=seed,
            steps=steps,
            guidance=guidance,
            negative_prompt=negative_of(negative),
            size=size_of(width, height),
            strength=strength,
            partial_images=previews or None,
            output_format="safetensors",
        )
        made = generated(model, positive, fields, count=batch_size)
        return io.NodeOutput(as_images(made))


class Sample(io.ComfyNode):
    """Latents from a prompt, or of latents."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="SeqparSample",
            display_name="seqpar: sample",
            category=CATEGORY,
            description="As ComfyUI's KSampler: latents of the model's VAE in and out.",
            inputs=[
                *sampling_inputs(),
                io.Combo.Input("sampler_name", [*SAMPLERS], default=OWN),
                io.Combo.Input("scheduler", [*SPACINGS], default=OWN),
                io.Float.Input("denoise", default=1.0, min=0.01, max=1.0, step=0.01),
                previews_input(),
                io.Latent.Input("latent_image", optional=True, tooltip="Without it the model's own size."),
                io.Sigmas.Input("sigmas", optional=True, tooltip="In place of steps, scheduler and denoise."),
            ],
            outputs=[io.Latent.Output()],
        )

    @classmethod
    def execute(
        cls,
        model: Model,
        positive: Text,
        seed: int,
        steps: int,
        guidance: float,
        sampler_name: str,
        scheduler: str,
        denoise: float,
        previews: int,
        negative: Text | None = None,
        latent_image: dict[str, Any] | None = None,
        sigmas: torch.Tensor | None = None,
    ) -> io.NodeOutput:
        fields = given(
            guidance=guidance,
            negative_prompt=negative_of(negative),
            partial_images=previews or None,
            output_format="latents",
        )
        start = 1.0
        if sigmas is not None:
            fields["sigmas"] = listed(sigmas, sampler_name)
            start = fields["sigmas"][0]
        else:
            fields |= given(steps=steps, scheduler=scheduler_of(sampler_name, scheduler))
        samples = None if latent_image is None else latent_image["samples"]
        if latent_image is not None and "noise_mask" in latent_image:
            raise ValueError("the latents have a mask, which no server takes; remove it")
        if denoise == start == 1:  # latents are all noise then: only their size counts
            count = 1
            if samples is not None:
                side, count = cls.side(model), len(samples)
                fields["size"] = f"{samples.shape[-1] * side}x{samples.shape[-2] * side}"
            made = generated(model, positive, fields | {"seed": seed}, count=count)
            return io.NodeOutput({"samples": torch.cat([tensors["latents"] for tensors in made])})
        if samples is None or positive.files:
            raise ValueError("denoise below 1 needs latents to begin with, and no images or ControlNet in the text")
        if sigmas is None:  # so many of more steps, as ComfyUI counts
            few = model.facts()["steps"] if steps == -1 else steps
            fields |= {"steps": int(few / denoise), "strength": (few - 0.5) / int(few / denoise)}
        else:
            fields["strength"] = 1
        files = files_of_latents(samples)
        made = [
            generated(model, positive, fields | {"seed": seed + index}, [file])[0]["latents"]
            for index, file in enumerate(files)
        ]
        return io.NodeOutput({"samples": torch.cat(made)})

    @staticmethod
    def side(model: Model) -> int:
        side = model.facts()["latent_pixels"]
        if side is None:
            raise ServerError("this model has no latents in requests; use the node seqpar: generate")
        return side


class Decode(io.ComfyNode):
    """The images of latents."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="SeqparDecode",
            display_name="seqpar: decode",
            category=CATEGORY,
            description="Latents of the model's VAE as images, decoded by all GPUs of the server.",
            inputs=[ModelType.Input("model"), io.Latent.Input("samples")],
            outputs=[io.Image.Output()],
        )

    @classmethod
    def execute(cls, model: Model, samples: dict[str, Any]) -> io.NodeOutput:
        fields = {"steps": 0, "output_format": "safetensors"}
        files = files_of_latents(samples["samples"])
        plain = replace(model, loras=())
        return io.NodeOutput(as_images([generated(plain, Text("decode"), fields, [file])[0] for file in files]))


# videos --------------------------------------------------------------------------------------------------------------


class Video(io.ComfyNode):
    """A video from a prompt, or of an image."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="SeqparVideo",
            display_name="seqpar: video",
            category=CATEGORY,
            description="A video with its frames and sound.",
            inputs=[
                *sampling_inputs(),
                side_input("width"),
                side_input("height"),
                io.Int.Input("frames", default=-1, min=-1, max=4096, tooltip="-1: the model's own."),
                io.Int.Input("fps", default=-1, min=-1, max=1000, tooltip="-1: the model's own."),
                io.Combo.Input("sampler_name", [*SAMPLERS], default=OWN),
                io.Combo.Input("transfer", ["raw", "mp4"], default="raw", tooltip="mp4: compressed, for long videos."),
            ],
            outputs=[io.Video.Output(), io.Image.Output(display_name="frames"), io.Audio.Output()],
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
        frames: int,
        fps: int,
        sampler_name: str,
        transfer: str,
        negative: Text | None = None,
    ) -> io.NodeOutput:
        fields = model.fields | given(
            prompt=positive.text,
            seed=seed,
            steps=steps,
            guidance=guidance,
            negative_prompt=negative_of(negative),
            size=size_of(width, height),
            frames=frames,
            fps=fps,
            scheduler=scheduler_of(sampler_name),
            output_format="safetensors" if transfer == "raw" else "mp4",
        )
        if positive.mask_HW is not None or positive.control is not None:
            raise ValueError("videos take no mask and no ControlNet; disconnect them")
        file = cls.made(model.server, fields, files_of(positive.images_BHW3))
        if transfer == "mp4":
            video = InputImpl.VideoFromFile(BytesIO(file))
            parts = video.get_components()
            return io.NodeOutput(video, parts.images, parts.audio)
        tensors, facts = load(file), json.loads(file[8 : 8 + int.from_bytes(file[:8], "little")])["__metadata__"]
        images = as_images([{"image": frame} for frame in tensors["frames"]])
        audio = None
        if "sound" in tensors:
            audio = {"waveform": tensors["sound"][None], "sample_rate": int(facts["rate"])}
        rate = Fraction(facts["fps"]).limit_denominator(1001)
        video = InputImpl.VideoFromComponents(Types.VideoComponents(images=images, audio=audio, frame_rate=rate))
        return io.NodeOutput(video, images, audio)

    @staticmethod
    def made(server: Server, fields: Mapping[str, Any], files: Sequence[bytes]) -> bytes:
        """The file of a video; an interrupt cancels its job."""
        body = as_form(fields, [("input_reference", file) for file in files]) if files else as_json(fields)
        video, bar = server.json("POST", VIDEOS, check, body), comfy.utils.ProgressBar(1)
        path = f"{VIDEOS}/{video['id']}"
        try:
            while video["status"] in ("queued", "in_progress"):
                time.sleep(ASK_S)
                video = server.json("GET", path, check)
                if video["seqpar"]["steps"]:
                    bar.update_absolute(video["seqpar"]["step"], video["seqpar"]["steps"])
            if video["status"] != "completed":
                raise ServerError(video["error"]["message"])
            return server.get(f"{path}/content", check)
        finally:
            server.json("DELETE", path, lambda: None)


NODES = (Connect, Start, Lora, TextNode, ControlNode, Generate, Sample, Decode, Video)
