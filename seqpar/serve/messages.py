"""Messages between the API server and rank 0: length-prefixed MessagePack. Nothing is unpickled or executed.

No torch import.
"""

from __future__ import annotations

import re
import socket
from math import prod
from typing import Any, Literal

import msgspec

SOCKET = "SEQPAR_SERVE"  # environment of the ranks: the path of the API server's socket
HEAD = 4  # bytes of the length before a message
LONGEST = 1 << 28  # bytes of a message: holds the pixels of an 8192 x 8192 image
SIZE = re.compile(r"([1-9][0-9]{0,4})x([1-9][0-9]{0,4})")
Kind = Literal["classes", "texts"]
TEXT, IMAGE, MASK, CONTROL = "text", "image", "mask", "control"  # what a request starts from
MOST_STEPS = 1000
# fields that no image file keeps
NOT_STORED = (
    *("id", "deadline_s", "partial_images", "images", "mask", "control", "pixels", "loras", "latents", "returns"),
)
Why = Literal["mistake", "failure", "cancelled", "deadline"]


def size_of(text: str) -> tuple[int, int] | None:
    """(height, width) of "WIDTHxHEIGHT", the format of requests and flags of a server; None for other text."""
    match = SIZE.fullmatch(text)
    return (int(match[2]), int(match[1])) if match else None


class InputImage(msgspec.Struct, frozen=True):
    """An input image of a request. digest: 16 hex digits over its pixels, rows of RGB bytes, or of one of a mask."""

    height: int
    width: int
    digest: str
    channels: int = 3

    @property
    def nbytes(self) -> int:
        return self.channels * self.height * self.width


class InputLatents(msgspec.Struct, frozen=True):
    """Input latents of a request: fp32 values. digest: 16 hex digits over them."""

    shape: tuple[int, ...]
    digest: str

    @property
    def nbytes(self) -> int:
        return 4 * prod(self.shape)


class ImageRequest(msgspec.Struct, frozen=True, tag="request"):
    """A request for one image or video. size: (height, width) in pixels. None leaves a value to the model.

    id: of this attempt. prompt: a text, or the name or number of a class. deadline_s: seconds until it times out.
    loras: names and scales. partial_images: maximum number of previews. images: input images; mask: 255 where the only
    one is repainted; control: what the ControlNet of this name follows; pixels: path of the file that holds the pixels
    of `inputs` one after another. The API server decodes clients' files, so ranks never parse them; rank 0 reads this
    one. strength: of image-to-image. frames, fps: of a video. preset: one of the model's, which sets steps and
    scheduler. sigmas: of the steps, in place of the scheduler's. latents: the image that it starts from, as latents in
    the file `pixels`; with 0 steps they are only decoded. returns: "arrays" for the frames and sound of a video in a
    safetensors file.
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
    mask: InputImage | None = None
    control: InputImage | None = None
    controlnet: str | None = None
    control_scale: float | None = None
    pixels: str | None = None
    strength: float | None = None
    frames: int | None = None
    fps: int | None = None
    preset: str | None = None
    sigmas: tuple[float, ...] = ()
    latents: InputLatents | None = None
    returns: Literal["file", "arrays", "latents"] = "file"

    @property
    def start(self) -> str:
        """What the request starts from, in the words of `ServedModel.takes`."""
        images = self.images or self.latents
        parts = {IMAGE: images, MASK: self.mask, CONTROL: self.control}
        return "+".join(name for name, given in parts.items() if given) or TEXT

    @property
    def inputs(self) -> list[InputImage]:
        """All input images, in the order of their pixels."""
        return [*self.images, *filter(None, (self.mask, self.control))]

    def parameters(self, steps: int, size: tuple[int, int], computed: tuple[int, int] | None = None) -> dict[str, Any]:
        """Parameters stored in an output file: those of the request, and the steps and size that the model chose.

        computed: steps, as `seqpar sample` stores them.
        """
        fields = msgspec.structs.asdict(self)
        stored = {name: value for name, value in fields.items() if value not in (None, ()) and name not in NOT_STORED}
        images = [_stored(image) for image in self.images]
        parted = [(*name.partition("@"), scale) for name, scale in self.loras]
        loras = [f"{name}:{scale:g}{at}{transformer}" for name, at, transformer, scale in parted]
        lists = {
            "images": images,
            "mask": None if self.mask is None else _stored(self.mask),
            "control": None if self.control is None else _stored(self.control),
            "latents": None if self.latents is None else self.latents.digest,
            "lora": loras,
            "steps_computed": [*(computed or ())],
        }
        return {**stored, **{name: values for name, values in lists.items() if values}, "steps": steps, "size": [*size]}


def _stored(image: InputImage) -> dict[str, str]:
    return {"size": f"{image.height}x{image.width}", "pixels": image.digest}


class Cancel(msgspec.Struct, frozen=True, tag="cancel"):
    """Cancel a request, waiting or running."""

    id: str


class Change(msgspec.Struct, frozen=True, tag="change"):
    """Unload some models and load others, between two requests; `Changed` or `Failed` is the answer."""

    id: str
    load: tuple[str, ...] = ()
    unload: tuple[str, ...] = ()


class Finish(msgspec.Struct, frozen=True, tag="finish"):
    """Stop all ranks after the running request."""


class VideoFacts(msgspec.Struct, frozen=True):
    """Defaults of a video model. Frame counts differ by multiples of `unit`, from `least` to `most`."""

    fps: float
    frames: int
    unit: int = 1
    least: int = 1
    most: int | None = None


class Takes(msgspec.Struct, frozen=True):
    """What a model takes beside some inputs. refused: field of a request -> why it is not taken.

    several: whether it takes several images. beside: field -> the field without which it has no effect.
    """

    refused: dict[str, str] = {}
    several: bool = False
    beside: dict[str, str] = {}


class ServedModel(msgspec.Struct, frozen=True):
    """A loaded model and the requests that it accepts (`seqpar.serve.rules`).

    size: default (height, width). layout: for people. step_s: predicted seconds per step at `size`. loras: names of the
    LoRAs that fit it, NAME@TRANSFORMER if it has several transformers. video: None for image models. sizes: sizes it
    takes, `size` first; unit: divides the sides of every size. schedulers: the least and most steps of each that fits;
    own: of the model's own. labels: the names of each class, by number. precision: of GEMMs, None for the dtype of the
    weights; min_psnr: its bound of the error. cache: which steps are computed, None for all. presets: the number of
    steps of each. controlnets: by name. takes: by what a request starts from, as `ImageRequest.start`. loads: pixels of
    all frames, ascending, and predicted seconds of a step; memory does not suffice from `limit` pixels on, and from
    `beside` on only while no other model is loaded. ratios: predicted seconds of a step with other guidance ("guidance
    off", "guidance on", "true guidance", or a preset's name), in those of the model's own. loaded: whether its weights
    are in memory. memory: predicted bytes per rank. load_s: seconds that its last load took, None if there was none.
    latent_pixels: along a side of a latent; None where requests have no latents.
    """

    name: str
    kind: Kind
    size: tuple[int, int]
    steps: int
    layout: str
    step_s: float
    classes: tuple[str, ...] = ()
    loras: tuple[str, ...] = ()
    video: VideoFacts | None = None
    sizes: tuple[tuple[int, int], ...] = ()
    unit: int = 1
    schedulers: dict[str, tuple[int, int]] = {}
    own: tuple[int, int] = (1, MOST_STEPS)
    labels: dict[int, tuple[str, ...]] = {}
    precision: str | None = None
    cache: str | None = None
    presets: dict[str, int] = {}
    controlnets: tuple[str, ...] = ()
    takes: dict[str, Takes] = msgspec.field(default_factory=lambda: {TEXT: Takes()})
    loads: tuple[tuple[int, float], ...] = ()
    limit: int | None = None
    loaded: bool = True
    memory: int = 0
    load_s: float | None = None
    min_psnr: float | None = None
    latent_pixels: int | None = None
    ratios: dict[str, float] = {}
    beside: int | None = None

    @property
    def edits(self) -> bool:
        """Whether it takes input images."""
        return any(start.startswith(IMAGE) for start in self.takes)

    @property
    def needs_picture(self) -> bool:
        return TEXT not in self.takes

    def lora(self, name: str) -> str | None:
        """The entry of `loras` that NAME or NAME@TRANSFORMER means; None if there is none, or more than one."""
        matches = [lora for lora in self.loras if name in (lora, lora.partition("@")[0], f"{lora}@transformer")]
        return matches[0] if len(matches) == 1 else None


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """The ranks take requests for the models that are loaded. device: "cpu" or the name of the GPU.

    loaded_s: seconds of loading, before the first request.
    """

    models: tuple[ServedModel, ...]
    ranks: int
    device: str
    loaded_s: float


class Step(msgspec.Struct, frozen=True, tag="step"):
    """A step of a request has been queued on the device. index: from 1 to count."""

    id: str
    index: int
    count: int


class Partial(msgspec.Struct, frozen=True, tag="partial"):
    """A preview: rows of RGB bytes, one pixel per latent pixel. index: from 0. size: (height, width) to enlarge to."""

    id: str
    index: int
    height: int
    width: int
    pixels: bytes
    size: tuple[int, int]


class ImageResult(msgspec.Struct, frozen=True, tag="image"):
    """An image: rows of RGB bytes. parts_s: seconds per part (encode, steps, decode). memory: bytes per rank.

    computed: how many steps a step cache has computed, and of how many. file: a safetensors file with latents, in place
    of pixels.
    """

    id: str
    height: int
    width: int
    pixels: bytes
    steps: int
    parts_s: dict[str, float]
    memory: tuple[int, ...] = ()
    computed: tuple[int, int] | None = None
    file: bytes = b""


class VideoResult(msgspec.Struct, frozen=True, tag="video"):
    """A video as a file, mp4 or safetensors, which rank 0 encodes: long ones would not fit into one message as frames.

    computed: as of images.
    """

    id: str
    height: int
    width: int
    frames: int
    fps: float
    file: bytes
    steps: int
    parts_s: dict[str, float]
    memory: tuple[int, ...] = ()
    computed: tuple[int, int] | None = None


class Changed(msgspec.Struct, frozen=True, tag="changed"):
    """The loaded models have changed on all ranks. ready: as they are now."""

    id: str
    ready: Ready


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """A request failed in the same way on every rank; the ranks go on. text: one line for people.

    why: "mistake" (invalid request), "failure" (non-finite numbers, memory), "cancelled" or "deadline".
    """

    id: str
    why: Why
    text: str


class Alive(msgspec.Struct, frozen=True, tag="alive"):
    """All ranks wait for a request. memory: bytes per rank, of its GPU or else of its host."""

    memory: tuple[int, ...]


ToRanks = ImageRequest | Change | Cancel | Finish
Answer = ImageResult | VideoResult | Failed
ToServer = Ready | Step | Partial | Answer | Changed | Alive


def packed(message: ToRanks | ToServer) -> bytes:
    """A message with its length before it."""
    body = msgspec.msgpack.encode(message)
    if len(body) > LONGEST:
        raise ValueError(f"message of {len(body)} bytes exceeds the limit of {LONGEST} bytes")
    return len(body).to_bytes(HEAD, "big") + body


def length(head: bytes) -> int:
    """The length in the head of a message; longer messages are rejected before allocation (ValueError)."""
    stated = int.from_bytes(head, "big")
    if stated > LONGEST:
        raise ValueError(f"message of {stated} bytes exceeds the limit of {LONGEST} bytes")
    return stated


def read(connection: socket.socket, kind: Any) -> Any:
    """The next message of type `kind` from a blocking socket; None if the other side has disconnected."""
    head = _exactly(connection, HEAD)
    body = None if head is None else _exactly(connection, length(head))
    return None if body is None else msgspec.msgpack.decode(body, type=kind)


def _exactly(connection: socket.socket, count: int) -> bytes | None:
    parts = bytearray()
    while len(parts) < count:
        part = connection.recv(min(count - len(parts), 1 << 20))
        if not part:
            return None
        parts += part
    return bytes(parts)
