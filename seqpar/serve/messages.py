"""What the front and rank 0 tell each other: MessagePack of these types, each message behind its length.

Both sides know all types, so that nothing that comes from the socket is unpickled or run. This file imports no torch.
"""

from __future__ import annotations

import re
import socket
from typing import Any, Literal

import msgspec

HEAD = 4  # bytes of a message's length
LONGEST = 1 << 28  # bytes of a message: the pixels of a picture of 8192 x 8192 and more
SIZE = re.compile(r"([1-9][0-9]{0,4})x([1-9][0-9]{0,4})")
Kind = Literal["classes", "texts"]
UNTOLD = ("id", "deadline_s", "partial_images", "images", "pixels", "loras")  # fields of an order that no file keeps
Why = Literal["mistake", "failure", "cancelled", "deadline"]


def size_of(text: str) -> tuple[int, int] | None:
    """Return (height, width) of a text WIDTHxHEIGHT, as a server's requests and flags have it; None for others."""
    match = SIZE.fullmatch(text)
    return (int(match[2]), int(match[1])) if match else None


class InputImage(msgspec.Struct, frozen=True):
    """A picture that a run begins with. digest: 16 hex digits over its pixels, rows of RGB bytes."""

    height: int
    width: int
    digest: str

    @property
    def nbytes(self) -> int:
        """Return the number of bytes of its pixels."""
        return 3 * self.height * self.width


class ImageRequest(msgspec.Struct, frozen=True, tag="order"):
    """One picture or video. id: of this attempt. size: (height, width) in pixels. None leaves a choice to the model.

    prompt: a text, or the name or number of a class. deadline_s: seconds from now after which it is given up. loras:
    names and scales. partial_images: how many pictures of what is denoised so far are told, at most. images: those that
    it begins with. pixels: the file with their pixels, one picture after another. The front decodes what clients send,
    so that ranks never read a file of theirs; rank 0 reads this one. strength: how far pictures are changed. frames,
    fps: of a video.
    """

    id: str
    model: str
    prompt: str
    seed: int = 0
    size: tuple[int, int] | None = None
    steps: int | None = None
    guidance: float | None = None
    true_guidance: float | None = None
    negative_prompt: str | None = None
    scheduler: str | None = None
    deadline_s: float | None = None
    loras: tuple[tuple[str, float], ...] = ()
    partial_images: int = 0
    images: tuple[InputImage, ...] = ()
    pixels: str | None = None
    strength: float | None = None
    frames: int | None = None
    fps: int | None = None

    def about(self, steps: int, size: tuple[int, int]) -> dict[str, Any]:
        """Return the parameters that a file keeps: what was asked for, and what the model chose."""
        told = msgspec.structs.asdict(self)
        images = [{"size": f"{each.height}x{each.width}", "pixels": each.digest} for each in self.images]
        left = {name: value for name, value in told.items() if value not in (None, ()) and name not in UNTOLD}
        parted = [(*name.partition("@"), scale) for name, scale in self.loras]
        loras = [f"{name}:{scale:g}{at}{transformer}" for name, at, transformer, scale in parted]
        more: dict[str, Any] = {"images": images, "lora": loras}
        return {**left, **{name: each for name, each in more.items() if each}, "steps": steps, "size": list(size)}


class Cancel(msgspec.Struct, frozen=True, tag="cancel"):
    """Give an order up, whether it waits or runs."""

    id: str


class Finish(msgspec.Struct, frozen=True, tag="finish"):
    """End all ranks when the running order has ended."""


class VideoFacts(msgspec.Struct, frozen=True):
    """What a model makes of an order that names nothing. Numbers of frames differ by multiples of `unit`."""

    fps: float
    frames: int
    unit: int = 1


class ServedModel(msgspec.Struct, frozen=True):
    """A model that is loaded. size: (height, width) of what it makes if an order names none. layout: for people.

    step_s: seconds of a step then, as the planner predicts them. loras: names of those that fit it, NAME@TRANSFORMER if
    it has several transformers. edits: whether it takes pictures. needs_picture: whether it makes nothing without one.
    video: None for pictures. sizes: some that it takes, its own first.
    """

    name: str
    kind: Kind
    size: tuple[int, int]
    steps: int
    layout: str
    step_s: float
    classes: tuple[str, ...] = ()
    loras: tuple[str, ...] = ()
    edits: bool = False
    needs_picture: bool = False
    video: VideoFacts | None = None
    sizes: tuple[tuple[int, int], ...] = ()

    def lora(self, name: str) -> str | None:
        """Return the one of `loras` that NAME or NAME@TRANSFORMER means; None if there is none, or more than one."""
        meant = [each for each in self.loras if name in (each, each.partition("@")[0], f"{each}@transformer")]
        return meant[0] if len(meant) == 1 else None


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """All models are loaded on all ranks. device: "cpu" or the name of the GPU. loaded_s: seconds that it took."""

    models: tuple[ServedModel, ...]
    ranks: int
    device: str
    loaded_s: float


class Step(msgspec.Struct, frozen=True, tag="step"):
    """A step of an order has been queued. index: from 1 to count."""

    id: str
    index: int
    count: int


class Partial(msgspec.Struct, frozen=True, tag="partial"):
    """What an order's picture will look like, by its latents so far: rows of RGB bytes, one pixel a latent's.

    index: from 0. size: (height, width) of the picture, to which this one is to be enlarged.
    """

    id: str
    index: int
    height: int
    width: int
    pixels: bytes
    size: tuple[int, int]


class Made(msgspec.Struct, frozen=True, tag="made"):
    """The picture of an order: rows of RGB bytes. parts_s: seconds of its parts (encode, steps, decode)."""

    id: str
    height: int
    width: int
    pixels: bytes
    steps: int
    parts_s: dict[str, float]
    memory: tuple[int, ...] = ()


class MadeVideo(msgspec.Struct, frozen=True, tag="video"):
    """The video of an order as an mp4 file, which rank 0 writes: its frames would not fit into one message."""

    id: str
    height: int
    width: int
    frames: int
    fps: float
    file: bytes
    steps: int
    parts_s: dict[str, float]
    memory: tuple[int, ...] = ()


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """An order has ended without a picture, on all ranks alike, which go on. text: one line for people.

    why: "mistake" of the order, "failure" of the run (numbers that are not finite, memory), or given up.
    """

    id: str
    why: Why
    text: str


class Alive(msgspec.Struct, frozen=True, tag="alive"):
    """All ranks wait for an order. memory: bytes of each rank, of its GPU or else of its host."""

    memory: tuple[int, ...]


ToRanks = ImageRequest | Cancel | Finish
Answer = Made | MadeVideo | Failed
ToFront = Ready | Step | Partial | Answer | Alive


def packed(message: ToRanks | ToFront) -> bytes:
    """Return a message with its length before it."""
    text = msgspec.msgpack.encode(message)
    if len(text) > LONGEST:
        raise ValueError(f"got a message of {len(text)} bytes, expected at most {LONGEST}")
    return len(text).to_bytes(HEAD, "big") + text


def length(head: bytes) -> int:
    """Return the length that stands before a message; ValueError if no message is so long."""
    stated = int.from_bytes(head, "big")
    if stated > LONGEST:
        raise ValueError(f"got a message of {stated} bytes, expected at most {LONGEST}")
    return stated


def read(line: socket.socket, kind: Any) -> Any:
    """Return the next message of a blocking socket, of the type `kind`, or None if the other side has left."""
    head = _exactly(line, HEAD)
    text = None if head is None else _exactly(line, length(head))
    return None if text is None else msgspec.msgpack.decode(text, type=kind)


def _exactly(line: socket.socket, count: int) -> bytes | None:
    parts = bytearray()
    while len(parts) < count:
        part = line.recv(min(count - len(parts), 1 << 20))
        if not part:
            return None
        parts += part
    return bytes(parts)
