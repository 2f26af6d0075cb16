"""Requests of the bench `serve`: the models and files that they need, and the bits of answers.

All images and videos of the same entry of `PICTURES` must have the same bits, whichever of the `kinds` asked for them.
"""

from __future__ import annotations

import base64
import hashlib
import io
import json
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import av
import numpy as np
import torch
from PIL import Image
from safetensors import safe_open
from safetensors.numpy import load, save

from launch.baselines.pipelines import saved_controlnet, saved_loras
from launch.benches import served
from launch.benches.loading import write
from seqpar.loading.names import LORAS
from seqpar.pipelines.pictures import grid

GENERATIONS, EDITS, VIDEOS = "/v1/images/generations", "/v1/images/edits", "/v1/videos"
TEXT, CLASS, EDITOR, FILM = "builtin-text", "builtin", "editor", "film"
OUTLINE, STYLE, POSE = "outline", "style", "pose"  # LoRAs and a ControlNet
SMALL: Mapping[str, Any] = {"size": "64x64", "steps": 3}
CLIP: Mapping[str, Any] = {"model": FILM, "prompt": "a frog jumps", "size": "64x32", "steps": 2, "fps": 8}
PICTURES: tuple[Mapping[str, Any], ...] = (
    {"model": TEXT, "prompt": "a red frog", **SMALL, "seed": 0},
    {"model": TEXT, "prompt": "a red frog", **SMALL, "seed": 1},
    {"model": TEXT, "prompt": "a green cat", "size": "48x64", "steps": 4, "seed": 2, "guidance": 5.0},
    {"model": TEXT, "prompt": "a blue rocket", "size": "64x32", "steps": 6, "seed": 3},
    {"model": CLASS, "prompt": "cat", "steps": 4, "seed": 4, "guidance": 2.0},
    {"model": CLASS, "prompt": "frog", "steps": 6, "seed": 5, "guidance": 4.0},
    {"model": EDITOR, "prompt": "a red house", **SMALL, "seed": 6, "strength": 0.7},
    {"model": EDITOR, "prompt": "a fish", "size": "64x64", "steps": 5, "seed": 7, "strength": 0.5},
    {"model": TEXT, "prompt": "a red frog", **SMALL, "seed": 8, "lora": OUTLINE},
    {"model": EDITOR, "prompt": "a red house", **SMALL, "seed": 9, "lora": {"name": STYLE, "scale": 0.5}},
    {"model": EDITOR, "prompt": "a fish", **SMALL, "seed": 10, "true_guidance": 2.0, "negative_prompt": "red"},
    {**CLIP, "seed": 11, "frames": 5},
    {**CLIP, "seed": 12, "frames": 9, "guidance": 4.0, "negative_prompt": "blue"},
    # without a command: masks, ControlNets, latents
    {"model": EDITOR, "prompt": "a hat", **SMALL, "seed": 13, "strength": 0.9},
    {"model": EDITOR, "prompt": "a hat", **SMALL, "seed": 14, "controlnet": POSE, "control_scale": 0.7},
    {"model": EDITOR, "prompt": "a hat", **SMALL, "seed": 15, "strength": 0.9, "controlnet": POSE},
    {"model": EDITOR, "prompt": "a fish", **SMALL, "seed": 16, "output_format": "latents"},
)
WITH_COMMAND = 13
START, FOLLOWED = np.random.default_rng(0).integers(0, 256, (2, 64, 64, 3), np.uint8)
REPAINTED = np.dstack([START, np.repeat([[0, 255]], 32, 1).repeat(64, 0).astype(np.uint8)])  # transparent at the left


@dataclass(frozen=True)
class Kind:
    """Fields of a request. pictures: places in PICTURES of what it makes, or status and param of its refusal.

    files: of a form, by field. is_form: whether it is one. key: "" for none, None for the client's.
    """

    fields: Mapping[str, Any]
    pictures: tuple[int, ...] = ()
    status: int = 200
    param: str | None = None
    files: Mapping[str, bytes] = field(default_factory=dict[str, bytes])
    is_form: bool = False
    path: str = GENERATIONS
    key: str | None = None

    @property
    def body(self) -> tuple[bytes, str]:
        """The body and its content type."""
        if not (self.files or self.is_form):
            return json.dumps(self.fields).encode(), "application/json"
        texts = {name: x if isinstance(x, str) else json.dumps(x) for name, x in self.fields.items()}
        head = "--x\r\ncontent-disposition: form-data; name="
        parts = [f'{head}"{name}"\r\n\r\n{text}\r\n'.encode() for name, text in texts.items()]
        parts += [
            b'%s"%s"; filename="x"\r\n\r\n%s\r\n' % (head.encode(), name.encode(), x) for name, x in self.files.items()
        ]
        return b"".join([*parts, b"--x--\r\n"]), "multipart/form-data; boundary=x"


def kinds() -> list[Kind]:
    """The kinds of requests, good ones before wrong ones."""

    def fields(place: int, *without: str, **more: Any) -> dict[str, Any]:
        return {k: v for k, v in PICTURES[place].items() if k not in without} | more

    def of(place: int, *without: str, **more: Any) -> Kind:
        return Kind(fields(place, *without, **more), (place,))

    def edit(place: int, **more: Any) -> Kind:
        files = {name: x for name, x in more.items() if isinstance(x, bytes)}
        rest = {name: x for name, x in more.items() if name not in files}
        return Kind(fields(place, **rest), (place,), files=files, path=EDITS)

    def video(place: int, *without: str, is_form: bool = False, **more: Any) -> Kind:
        return Kind(fields(place, *without, **more), (place,), is_form=is_form, path=VIDEOS)

    def wrong(place: int, status: int, param: str | None, path: str = GENERATIONS, **more: Any) -> Kind:
        files = {name: x for name, x in more.items() if isinstance(x, bytes)}
        rest = {name: x for name, x in more.items() if name not in files}
        return Kind(fields(place, **rest), (), status, param, files, path=path)

    png, mask, pose = map(png_of, (START, REPAINTED, FOLLOWED))
    raw, url = save({"image": START}), f"data:image/png;base64,{base64.b64encode(pose).decode()}"
    return [
        *map(of, range(6)),
        of(0, "steps", "size", num_inference_steps=3, width=64, height=64),
        of(2, "steps", "guidance", num_inference_steps=4, guidance_scale=5.0),
        of(4, "steps", "guidance", num_inference_steps=4, guidance_scale=2.0),
        of(1, "model"),
        of(1, user="someone", quality="high"),
        of(2, output_format="safetensors"),
        of(5, output_format="safetensors"),
        of(2, response_format="file"),
        of(0, response_format="url"),
        of(3, stream=True, partial_images=2, stream_steps=True),
        Kind({**PICTURES[0], "n": 2}, (0, 1)),
        of(3, priority="low", deadline_s=500),
        edit(6, image=png),
        edit(6, image=raw, output_format="safetensors"),
        edit(7, image=png, response_format="url"),
        of(8),
        of(8, "lora", lora=[{"lora_name": OUTLINE, "lora_scale": 1.0}]),
        of(9),
        of(9, "lora", lora={"name": STYLE, "scale": 0.5}, stream=True),
        of(10),
        video(11),
        video(11, "frames", is_form=True, seconds="0.6"),
        video(11, "steps", num_inference_steps=2, output_format="safetensors"),
        video(12),
        edit(13, image=png, mask=mask),
        of(14, control_image=url),
        edit(14, control_image=pose),
        edit(15, image=png, mask=mask, control_image=pose),
        of(16),
        wrong(0, 400, "size", size="65x64"),
        wrong(0, 400, "lora", lora="none"),
        wrong(0, 400, "scheduler", scheduler="None"),
        wrong(4, 400, "prompt", prompt="unicorn"),
        wrong(0, 404, "model", model="none"),
        wrong(0, 400, "steps", steps=0),
        wrong(6, 400, "image", EDITS, image=png[:-30]),
        wrong(13, 400, "mask", EDITS, image=png, mask=png_of(REPAINTED[:32])),
        wrong(14, 400, "controlnet", control_image=url, controlnet="none"),
        wrong(11, 400, "frames", VIDEOS, frames=4),
        wrong(0, 400, "model", VIDEOS),
        Kind(PICTURES[0], (), 401, key=""),
    ]


@dataclass(frozen=True)
class Models:
    """The folders of models, LoRAs and a ControlNet, and the flags of a server for them."""

    folder: Path

    @staticmethod
    def written(folder: Path) -> Models:
        write("flux.1-dev", folder / EDITOR)
        write("wan2.1-14b", folder / FILM)
        saved_loras(folder / "loras", folder / EDITOR / "transformer", (STYLE,), rank=2)
        shutil.copy(LORAS[OUTLINE], folder / "loras" / f"{OUTLINE}.safetensors")
        saved_controlnet(folder / POSE, folder / EDITOR / "transformer")
        return Models(folder)

    @property
    def names(self) -> tuple[str, ...]:
        return CLASS, TEXT, str(self.folder / EDITOR), str(self.folder / FILM)

    @property
    def flags(self) -> tuple[str, ...]:
        return "--loras", str(self.folder / "loras"), "--controlnet", f"{POSE}={self.folder / POSE}"

    def of_command(self, place: int, ranks: int) -> str:
        """The bits of an entry of PICTURES that `seqpar sample` writes, or the end of its errors."""
        body = PICTURES[place]
        with tempfile.TemporaryDirectory() as name:
            is_video = body["model"] == FILM
            file, start = Path(name, "x.mp4" if is_video else "x.png"), Path(name, "start.png")
            start.write_bytes(png_of(START))
            words = ["--seed", body["seed"], "--out", file]
            words += ["--prompt", body["prompt"]] if body["model"] != CLASS else ["--classes", body["prompt"]]
            words += ["--size", "x".join(reversed(body["size"].split("x")))] if "size" in body else []
            for field in ("steps", "guidance", "true_guidance", "negative_prompt", "strength", "frames", "fps"):
                words += [f"--{field.replace('_', '-')}", body[field]] if field in body else []
            words += ["--image", start] if "strength" in body else []
            if (lora := body.get("lora")) is not None:
                lora, scale = (lora, 1.0) if isinstance(lora, str) else (lora["name"], lora["scale"])
                words += ["--lora", f"{self.folder / 'loras' / lora}.safetensors:{scale}"]
            count = ["--gpus" if torch.cuda.is_available() else "--ranks", ranks]
            model = self.folder / body["model"] if body["model"] in (EDITOR, FILM) else body["model"]
            done = served.ended(["sample", "--model", model, *words, *count])
            if done.returncode:
                return done.stderr[-300:]
            return bits_of(pixels_of(file.read_bytes())) if not is_video else digest_of(file.read_bytes())


def png_of(pixels: np.ndarray) -> bytes:
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "png")
    return file.getvalue()


def pixels_of(file: bytes) -> np.ndarray:
    """The pixels of a file, or its latents."""
    if file[:4] == b"\x89PNG":
        return np.asarray(Image.open(io.BytesIO(file)).convert("RGB"))
    tensors = load(file)
    return tensors["latents" if "latents" in tensors else "image"]


def bits_of(pixels: np.ndarray) -> str:
    return hashlib.sha256(np.ascontiguousarray(pixels).tobytes()).hexdigest()[:16]


def digest_of(video: bytes) -> str:
    """The digest of the frames of a video before they were encoded, of which an mp4's bytes are no function."""
    if video[4:8] == b"ftyp":
        with av.open(io.BytesIO(video), "r") as file:
            return json.loads(file.metadata["comment"])["pixels"]
    with tempfile.NamedTemporaryFile() as file:
        file.write(video)
        file.flush()
        with safe_open(file.name, "np") as tensors:
            return json.loads(tensors.metadata()["seqpar"])["pixels"]


def shown_bits(sent: Kind, file: bytes) -> str:
    """The bits of a file; of a model of classes on a sheet with its label, as the command writes it."""
    body = PICTURES[sent.pictures[0]]
    if body["model"] == FILM:
        return digest_of(file)
    pixels = pixels_of(file)
    if body["model"] == CLASS:
        pixels = np.asarray(grid([Image.fromarray(pixels)], [body["prompt"]]))
    return bits_of(pixels)
