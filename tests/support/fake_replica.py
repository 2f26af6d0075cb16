"""Ranks of a server without a model, run as a script: images are a function of seed and size.

A prompt is words that say what to do: `wait` (until cancelled), `hold NAME` (until a file NAME exists), `die`,
`die-once NAME`, `deaf` (ignores cancellations), `mistake`, `failure`, `short` (too few bytes), `nonsense` (malformed
message). Received messages are appended to the file `heard` of the folder FAKE_FOLDER, a line of JSON each. Previews
follow the first step, before the prompt is obeyed; they have a quarter of the sides. The file of a video is no mp4, but
the bytes of an image, unless the prompt is `film`; an edit is the last input image, or with the prompt `drawn` a new
one.
"""

from __future__ import annotations

import io
import json
import os
import select
import socket
import sys
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import msgspec

from seqpar.serve.messages import (
    Alive,
    Cancel,
    Change,
    Changed,
    Failed,
    Finish,
    ImageRequest,
    ImageResult,
    Partial,
    Ready,
    ServedModel,
    Step,
    Takes,
    ToRanks,
    ToServer,
    VideoFacts,
    VideoResult,
    packed,
    read,
)

STEPS, SIZE = 4, (24, 16)  # by default; (height, width)
VIDEO = VideoFacts(fps=8.0, frames=9, unit=4, most=401)
COMMON: dict[str, Any] = {
    "kind": "texts",
    "size": SIZE,
    "steps": STEPS,
    "layout": "one rank",
    "step_s": 0.5,
    "precision": "fp8",
    "min_psnr": 30.0,
}
FACTS: dict[str, dict[str, Any]] = {
    "toy": {"loras": ("style", "lines"), "sizes": (SIZE, (24, 40)), "latent_pixels": 8},
    "other": {"loads": ((100, 0.1),), "limit": 4_000_000, "beside": 1_000_000},
    "editor": {
        "takes": {
            "text": Takes({"strength": "it changes an input image"}),
            "image": Takes(several=True),
            "image+mask": Takes(),
            "control": Takes(),
        },
        "controlnets": ("pose",),
        "loras": ("style",),
        "latent_pixels": 8,
        "schedulers": dict.fromkeys(("FlowMatchEulerDiscreteScheduler", "DPMSolverMultistepScheduler"), (1, 1000)),
    },
    "changer": {"takes": {"image": Takes()}},
    "movie": {
        "video": VIDEO,
        "loras": ("high@transformer", "low@transformer_2", "style@transformer", "style@transformer_2"),
    },
    "clip": {"video": VIDEO, "takes": {"image": Takes()}},
    "strict": {
        "unit": 8,
        "schedulers": {"DDIMScheduler": (1, 1000), "PNDMScheduler": (4, 1000), "LCMScheduler": (1, 50)},
        "own": (2, 1000),
        "presets": {"lightning-4": 4},
        "takes": {
            "text": Takes({"true_guidance": "", "negative_prompt": "it has one branch"}),
            "image": Takes(beside={"negative_prompt": "true_guidance"}),
        },
        "loads": ((100, 0.1), (1_000_000, 100.0)),
        "limit": 5_000_000,
    },
    "breeds": {"kind": "classes", "labels": {0: ("cat", "crane"), 1: ("tench", "Tinca tinca"), 2: ("crane",)}},
    "dall-e-2": {},
    "filler": {"takes": {"image+mask": Takes()}},
}
MODELS = tuple(ServedModel(**{**COMMON, "name": name, **facts}) for name, facts in FACTS.items())
SHRINK = 4


def pixels_of(seed: int, height: int, width: int) -> bytes:
    """Rows of RGB bytes."""
    return bytes((seed * 7 + index) % 256 for index in range(3 * height * width))


def preview_of(seed: int, index: int, height: int, width: int) -> tuple[int, int, bytes]:
    """Height, width and pixels of a preview."""
    small = height // SHRINK, width // SHRINK
    return *small, pixels_of(seed + 100 * (index + 1), *small)


def film(frames: int, height: int, width: int) -> bytes:
    """An mp4 with sound, which a browser can play."""
    import av  # not needed by other prompts
    import numpy as np

    file = io.BytesIO()
    with av.open(file, "w", format="mp4") as out:
        video, sound = out.add_stream("libx264", int(VIDEO.fps)), out.add_stream("aac", 8000, layout="mono")
        video.width, video.height, video.pix_fmt = width, height, "yuv420p"
        for index in range(frames):
            image = np.full((height, width, 3), 20 * index % 256, np.uint8)
            out.mux(video.encode(av.VideoFrame.from_ndarray(image)))
        tone = np.sin(np.arange(8000, dtype=np.float32))[None]
        samples = av.AudioFrame.from_ndarray(tone, "fltp", "mono")
        samples.sample_rate = 8000
        out.mux([*video.encode(), *sound.encode(samples), *sound.encode()])
    return file.getvalue()


def arrays_of(seed: int, frames: int, height: int, width: int) -> bytes:
    """The file of a video with sound, as arrays; frame i is the image of seed + i."""
    import numpy as np
    from safetensors.numpy import save

    pixels = b"".join(pixels_of(seed + index, height, width) for index in range(frames))
    shown = np.frombuffer(pixels, np.uint8).reshape(frames, height, width, 3)
    tensors = {"frames": shown, "sound": np.linspace(-1, 1, 20, dtype=np.float32).reshape(2, 10)}
    return save(tensors, {"fps": "8.0", "rate": "24000"})


def of_latents(order: ImageRequest, steps: int, height: int, width: int) -> ImageResult:
    """Latents that are all the seed, plus those that are given; decoded, an image that is all their sum."""
    import numpy as np
    from safetensors.numpy import save

    latents = np.full((1, 4, height // 8, width // 8), order.seed, np.float32)
    if order.latents is not None:
        given = np.frombuffer(Path(order.pixels or "").read_bytes(), np.float32).reshape(order.latents.shape)
        latents = given if order.steps == 0 else given + order.seed
    height, width = latents.shape[2] * 8, latents.shape[3] * 8
    if order.returns == "latents":
        return ImageResult(order.id, height, width, b"", steps, {"steps": 8.0}, file=save({"latents": latents}))
    pixels = bytes([int(latents[0, 0, 0, 0])]) * (3 * height * width)
    return ImageResult(order.id, height, width, pixels, steps, {"decode": 1.0})


class Fake:
    """The connection, and the ids of cancelled requests."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.line = socket.socket(socket.AF_UNIX)
        self.line.connect(os.environ["SEQPAR_SERVE"])
        self.cancelled: set[str] = set()
        self.left = False

    def send(self, message: ToServer) -> None:
        self.line.sendall(packed(message))

    def hear(self, seconds: float | None) -> ImageRequest | Change | Finish | None:
        """The next request, change or end within some seconds."""
        if not select.select([self.line], [], [], seconds)[0]:
            return None
        message = read(self.line, ToRanks)
        if message is None:
            raise SystemExit(0)
        with (self.folder / "heard").open("a") as file:
            file.write(json.dumps(msgspec.to_builtins(message)) + "\n")
        if isinstance(message, Cancel):
            self.cancelled.add(message.id)
        return message if isinstance(message, ImageRequest | Change | Finish) else None

    def wait_while(self, order: ImageRequest, holds: Callable[[], bool]) -> None:
        """Wait while something holds, but not after a cancellation."""
        while holds() and order.id not in self.cancelled:
            if isinstance(self.hear(0.01), Finish):
                self.left = True


def obeyed(fake: Fake, order: ImageRequest) -> Failed | None:
    """Do what the prompt says; return how the request fails, if it does."""
    match order.prompt.split():
        case ["wait"]:
            fake.wait_while(order, lambda: True)
        case ["hold", name]:
            fake.wait_while(order, lambda: not (fake.folder / name).exists())
        case ["die"]:
            print("about to die", file=sys.stderr, flush=True)
            os._exit(9)
        case ["die-once", name] if not (fake.folder / name).exists():
            (fake.folder / name).touch()
            os._exit(9)
        case ["deaf"]:
            time.sleep(3600)
        case ["nonsense"]:
            fake.line.sendall(b"\x00\x00\x00\x02no")
            time.sleep(0.1)
        case ["mistake" | "failure" as why]:
            return Failed(order.id, why, f"got a prompt that asks for a {why}")
        case _:
            pass
    return Failed(order.id, "cancelled", "cancelled") if order.id in fake.cancelled else None


def answer(fake: Fake, order: ImageRequest) -> ToServer:
    steps, (height, width) = order.steps or len(order.sigmas) or STEPS, order.size or SIZE
    fake.send(Step(order.id, 1, steps))
    for index in range(order.partial_images):
        fake.send(Partial(order.id, index, *preview_of(order.seed, index, height, width), (height, width)))
    failed = obeyed(fake, order)
    if failed is not None:
        return failed
    for index in range(2, steps + 1):
        fake.send(Step(order.id, index, steps))
    if FACTS[order.model].get("video") is not None:
        frames = order.frames or VIDEO.frames
        file = film(frames, height, width) if order.prompt == "film" else pixels_of(order.seed, height, width)
        if order.returns == "arrays":
            file = arrays_of(order.seed, frames, height, width)
        return VideoResult(
            order.id, height, width, frames, order.fps or VIDEO.fps, file, steps, {"steps": 8.0}, (), (3, steps)
        )
    if order.returns == "latents" or order.latents is not None:
        return of_latents(order, steps, height, width)
    if order.images and order.prompt != "drawn":  # the last one, so that a test sees that it was sent
        last = order.images[-1]
        pixels = Path(order.pixels or "").read_bytes()[: sum(x.nbytes for x in order.images)][-last.nbytes :]
        return ImageResult(order.id, last.height, last.width, pixels, steps, {"steps": 8.0})
    pixels = pixels_of(order.seed, height, width)[: 5 if order.prompt == "short" else None]
    computed = (1, steps) if order.prompt == "cats" else None  # as by a step cache
    return ImageResult(order.id, height, width, pixels, steps, {"steps": 8.0, "decode": 1.0}, (1000, 2000), computed)


def ready(loaded: Collection[str]) -> Ready:
    return Ready(tuple(msgspec.structs.replace(x, loaded=x.name in loaded, load_s=0.25) for x in MODELS), 2, "cpu", 0.5)


def changed(fake: Fake, order: Change, loaded: set[str]) -> ToServer:
    """Change the loaded models, unless a file `no-load` or `die-load` says how that fails."""
    if (fake.folder / "die-load").exists():
        (fake.folder / "die-load").unlink()
        os._exit(9)
    if (fake.folder / "no-load").exists():
        return Failed(order.id, "failure", "no weights in the folder")
    loaded -= {*order.unload}
    loaded |= {*order.load}
    return Changed(order.id, ready(loaded))


def main() -> None:
    folder = Path(os.environ["FAKE_FOLDER"])
    if (folder / "refuse").exists():
        print("error: no model is given", file=sys.stderr, flush=True)
        raise SystemExit(2)
    print("fake ranks start", flush=True)
    while (folder / "slow-start").exists():
        time.sleep(0.01)
    fake = Fake(folder)
    loaded = {*sys.argv[2:]} if "--first" in sys.argv else {*FACTS}
    fake.send(ready(loaded))
    fake.send(Alive((1000, 2000)))
    while not fake.left:
        heard = fake.hear(None)
        if isinstance(heard, Finish):
            return
        if heard is not None:
            fake.send(changed(fake, heard, loaded) if isinstance(heard, Change) else answer(fake, heard))


if __name__ == "__main__":
    main()
