"""Ranks of a server without a model, run as a script: pictures are a function of seed and size.

A prompt is words that say what to do: `wait` (until cancelled), `hold NAME` (until a file NAME is there), `die`,
`die-once NAME`, `deaf` (gives nothing up), `mistake`, `failure`, `short` (too few bytes), `nonsense` (no message). What
it hears is appended to the file `heard` of the folder FAKE_FOLDER, a line of JSON each. Partial pictures follow the
first step, before the prompt is obeyed; they have a quarter of the sides. The file of a video is no mp4, but the bytes
that a picture would have; an edit is the last picture that came, or with the prompt `drawn` a new one.
"""

from __future__ import annotations

import json
import os
import select
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from seqpar.serve.messages import (
    Alive,
    Cancel,
    Failed,
    Finish,
    ImageRequest,
    ImageResult,
    Partial,
    Ready,
    ServedModel,
    Step,
    ToRanks,
    ToServer,
    VideoFacts,
    VideoResult,
    packed,
    read,
)

STEPS, SIZE = 4, (24, 16)  # of an order that names none; (height, width)
VIDEO = VideoFacts(fps=8.0, frames=9, unit=4)
FACTS: dict[str, dict[str, Any]] = {
    "toy": {"loras": ("style", "lines"), "sizes": (SIZE, (24, 40))},
    "other": {},
    "editor": {"edits": True},
    "changer": {"edits": True, "needs_picture": True},
    "movie": {
        "video": VIDEO,
        "loras": ("high@transformer", "low@transformer_2", "style@transformer", "style@transformer_2"),
    },
    "clip": {"video": VIDEO, "edits": True, "needs_picture": True},
}
MODELS = tuple(ServedModel(name, "texts", SIZE, STEPS, "one rank", 0.5, **facts) for name, facts in FACTS.items())
SHRINK = 4


def partial_seed(seed: int, index: int) -> int:
    """Return the seed of a partial picture's pixels."""
    return seed + 100 * (index + 1)


def pixels_of(seed: int, height: int, width: int) -> bytes:
    """Return rows of RGB bytes."""
    return bytes((seed * 7 + index) % 256 for index in range(3 * height * width))


class Fake:
    """The connection and what is known of the running order."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.line = socket.socket(socket.AF_UNIX)
        self.line.connect(os.environ["SEQPAR_SERVE"])
        self.cancelled: set[str] = set()
        self.left = False

    def tell(self, message: ToServer) -> None:
        """Send a message."""
        self.line.sendall(packed(message))

    def hear(self, seconds: float | None) -> ImageRequest | Finish | None:
        """Return the next order or end within some seconds."""
        if not select.select([self.line], [], [], seconds)[0]:
            return None
        message = read(self.line, ToRanks)
        if message is None:
            raise SystemExit(0)
        with (self.folder / "heard").open("a") as file:
            file.write(json.dumps(msgspec.to_builtins(message)) + "\n")
        if isinstance(message, Cancel):
            self.cancelled.add(message.id)
        return message if isinstance(message, ImageRequest | Finish) else None

    def until(self, order: ImageRequest, held: Callable[[], bool]) -> bool:
        """Wait while something holds; return False if the order is given up before."""
        while held():
            if isinstance(self.hear(0.01), Finish):
                self.left = True
            if order.id in self.cancelled:
                return False
        return True


def obeyed(fake: Fake, order: ImageRequest, words: list[str]) -> Failed | None:
    """Do what the prompt says; return how the order fails, if it does."""
    match words:
        case ["wait"]:
            fake.until(order, lambda: True)
        case ["hold", name]:
            fake.until(order, lambda: not (fake.folder / name).exists())
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
            return Failed(order.id, why, f"got a prompt that asks for a {why}, expected another one")
        case _:
            pass
    return Failed(order.id, "cancelled", "given up") if order.id in fake.cancelled else None


def answer(fake: Fake, order: ImageRequest) -> ToServer:
    """Return the answer to an order."""
    steps, (height, width) = order.steps or STEPS, order.size or SIZE
    fake.tell(Step(order.id, 1, steps))
    for index in range(order.partial_images):
        small = height // SHRINK, width // SHRINK
        fake.tell(Partial(order.id, index, *small, pixels_of(partial_seed(order.seed, index), *small), (height, width)))
    failed = obeyed(fake, order, order.prompt.split())
    if failed is not None:
        return failed
    for index in range(2, steps + 1):
        fake.tell(Step(order.id, index, steps))
    if FACTS[order.model].get("video") is not None:
        frames, file = order.frames or VIDEO.frames, pixels_of(order.seed, height, width)
        return VideoResult(order.id, height, width, frames, order.fps or VIDEO.fps, file, steps, {"steps": 8.0})
    if order.images and order.prompt != "drawn":  # the last one, so that a test sees that it came
        last = order.images[-1]
        pixels = Path(order.pixels or "").read_bytes()[-last.nbytes :]
        return ImageResult(order.id, last.height, last.width, pixels, steps, {"steps": 8.0})
    pixels = pixels_of(order.seed, height, width)[: 5 if order.prompt == "short" else None]
    return ImageResult(order.id, height, width, pixels, steps, {"steps": 8.0, "decode": 1.0}, (1000, 2000))


def main() -> None:
    """Serve the front of SEQPAR_SERVE."""
    folder = Path(os.environ["FAKE_FOLDER"])
    if (folder / "refuse").exists():
        print("error: got no model, expected one", file=sys.stderr, flush=True)
        raise SystemExit(2)
    fake = Fake(folder)
    print("fake ranks start", flush=True)
    while (folder / "slow-start").exists():
        time.sleep(0.01)
    fake.tell(Ready(MODELS, 2, "cpu", 0.5))
    fake.tell(Alive((1000, 2000)))
    while not fake.left:
        heard = fake.hear(None)
        if isinstance(heard, Finish):
            return
        if heard is not None:
            fake.tell(answer(fake, heard))


if __name__ == "__main__":
    main()
