"""Files of images and videos: input images (`--image`) are read on rank 0; results are written in one atomic step.

An input file may differ between the hosts of a run, or be missing on one: all ranks use rank 0's pixels. PNG and mp4
(H.264) files hold the parameters that produced them; diffusers' own exporter of videos writes none, and scales frames
to sizes that 16 divides. `check_writable` finds what is wrong with a file's name before anything is generated.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import stat
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from fractions import Fraction
from io import BytesIO
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont
from PIL.PngImagePlugin import PngInfo
from torch import Tensor

from seqpar.mesh.inputs import streams_of_rank_0
from seqpar.mesh.mesh import Mesh
from seqpar.pipelines.image_files import Picture

SHOWN = 128  # pixels; smaller images are enlarged so that they can be seen
GAP = 8
INK, PAPER = (30, 30, 30), (255, 255, 255)


def to_pil(images_N3HW: Tensor) -> list[Image.Image]:
    """Convert values in [0, 1] to images, one at a time: intermediate values take three times an image's memory."""
    bytes_HW3 = ((image_3HW * 255).round().to(torch.uint8).permute(1, 2, 0).contiguous() for image_3HW in images_N3HW)
    return [Image.fromarray(image_HW3.cpu().numpy()) for image_HW3 in bytes_HW3]


def grid(images: Sequence[Image.Image], labels: Sequence[str]) -> Image.Image:
    """Return a sheet of all images in rows as even as possible, each with its label below."""
    scale = max(1, SHOWN // max(images[0].size))
    width, height = (side * scale for side in images[0].size)
    line, columns = max(16, width // 7), _columns(len(images), round((len(images) * height / width) ** 0.5 * 1.25))
    step_x, step_y = width + GAP, height + line + GAP
    size = columns * step_x + GAP, -(-len(images) // columns) * step_y + GAP
    font, sheet = ImageFont.load_default(size=max(11, width // 9)), Image.new("RGB", size, PAPER)
    draw = ImageDraw.Draw(sheet)
    for index, (image, label) in enumerate(zip(images, labels, strict=True)):
        x, y = GAP + index % columns * step_x, GAP + index // columns * step_y
        sheet.paste(image.resize((width, height), Image.Resampling.LANCZOS), (x, y))
        draw.text((x + width / 2, y + height + line / 2), label, INK, font, anchor="mm")
    return sheet


# near `target`, with the fewest empty cells
def _columns(count: int, target: int) -> int:
    target = min(target, count)  # tall images are shown in one row
    near = range(max(1, target - 1), min(count, target + 1) + 1)
    return min(near, key=lambda columns: (-count % columns, abs(columns - target), -columns))


def save(image: Image.Image, path: Path, parameters: Mapping[str, Any]) -> None:
    """Write a PNG in one atomic step; its metadata holds every parameter as JSON under the key "seqpar"."""
    info = PngInfo()
    info.add_text("seqpar", json.dumps(parameters))
    info.add_text("Software", "seqpar")
    with written(path) as temporary, open(temporary, "xb") as file:  # mkstemp would ignore the umask
        write_png(image, file, info)


def write_png(image: Image.Image, file: IO[bytes], info: PngInfo | None = None) -> None:
    # higher levels of zlib take several times as long for a few percent
    image.save(file, "png", pnginfo=info, compress_level=1)


@contextmanager
def written(path: Path) -> Iterator[Path]:
    """Yield a temporary path next to `path`, renamed to it at the end, or removed after an error.

    A link at `path` stays one: its target is replaced. Raises OSError with `path` as its file name.
    """
    target = Path(os.path.realpath(path))
    temporary = target.with_name(f".{secrets.token_hex(4)}{target.suffix}")  # short: the system bounds names
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        yield temporary
        os.replace(temporary, target)
    except OSError as error:  # of a full disk, which has no file name, or that of the temporary file
        temporary.unlink(missing_ok=True)
        if error.errno is None or error.filename not in (None, str(temporary)):
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def numbered(path: Path, count: int) -> list[Path]:
    """Return a path for each of several images (seqpar-1.png, seqpar-2.png); a single one keeps the name."""
    width = len(str(count))
    return [path.with_stem(f"{path.stem}-{number:0{width}}") for number in range(1, count + 1)] if count > 1 else [path]


def check_writable(path: Path, suffix: str = ".png", others: Sequence[Path] = ()) -> None:
    """Raise ValueError if `written` could not write to this path, so that a long run does not fail at its end.

    suffix: required ending of the name. others: further files of the run, in the same folder with names no longer.
    """
    if path.suffix.lower() != suffix:
        raise ValueError(f"got output {path}, expected a name that ends in {suffix}")
    target = Path(os.path.realpath(path))
    try:
        for file in (*others, path):
            _check_file(file)
        parent = next(parent for parent in target.parents if parent.exists())
        for name in target.relative_to(parent).parts:  # new folders and the file
            with suppress(FileNotFoundError):
                os.lstat(parent / name)  # raises if the name is too long
        with tempfile.TemporaryFile(dir=parent):
            pass
    except OSError as error:
        # without the random name of the trial file, so that every rank raises the same message
        raise ValueError(f"got output {path}, which cannot be written: {error.strerror or error}") from error


def _check_file(path: Path) -> None:
    if path.is_dir():
        raise ValueError(f"got output {path}, which is a folder; expected the name of a file")
    # the mode too: a user who may write everything has a reason to protect a file
    writable = stat.S_IWUSR | stat.S_IWGRP | stat.S_IWOTH
    if path.is_file() and not (path.stat().st_mode & writable and os.access(path, os.W_OK)):
        raise ValueError(f"got output {path}, which is read-only; name another file, or make it writable (chmod +w)")


# Videos -------------------------------------------------------------------------------------------------------

CODEC, SOUND = "libx264", "aac"
QUALITY = {"crf": "17"}  # of libx264: a loss that is hard to see
BIT_RATE = 192_000  # of a sound, bits per second
BT_709 = 1  # the number of the usual colours of videos, in ffmpeg's lists of primaries, transfers and matrices


@dataclass(frozen=True)
class Sound:
    """The sound of a video: samples (channels, T) with values in [-1, 1], `rate` of them per second."""

    samples_CT: np.ndarray
    rate: int


def check_encoder() -> None:
    """Raise ValueError where PyAV has no encoder for the videos that are written here."""
    import av  # loads ffmpeg's libraries, which pictures do not need

    for codec in (CODEC, SOUND):
        try:
            av.Codec(codec, "w")
        except ValueError as error:
            expected = "expected this encoder for mp4 files; install av by pip"
            raise ValueError(f"got PyAV without {codec}, {expected}") from error


def save_video(
    frames_FHW3: Iterable[Any], path: Path, fps: float, parameters: Mapping[str, Any], sound: Sound | None = None
) -> None:
    """Write frames in one atomic step; the file's comment holds every parameter as JSON.

    frames_FHW3: PIL images, or arrays of values in [0, 1], with even sides.
    """
    video = encoded(frames_FHW3, fps, json.dumps(parameters), sound)
    with written(path) as temporary, open(temporary, "xb") as file:  # mkstemp would ignore the umask
        file.write(video.getbuffer())


def encoded(frames_FHW3: Iterable[Any], fps: float, comment: str, sound: Sound | None = None) -> BytesIO:
    """Return an mp4 file. It is in memory, because a full disk would be another error inside of ffmpeg."""
    import av  # loads ffmpeg's libraries, which pictures do not need

    video, stream, track = BytesIO(), None, None
    with av.open(video, "w", format="mp4") as file:
        file.metadata["comment"] = comment
        for frame in frames_FHW3:
            pixels_HW3 = _bytes(frame)
            if stream is None:
                stream: Any = file.add_stream(CODEC, rate=Fraction(fps).limit_denominator(1001), options=QUALITY)
                stream.height, stream.width, stream.pix_fmt = *pixels_HW3.shape[:2], "yuv420p"
                colours = stream.codec_context
                colours.color_primaries = colours.color_trc = colours.colorspace = BT_709
                if sound is not None:  # all streams are known before the first packet
                    layout = "mono" if len(sound.samples_CT) == 1 else "stereo"
                    track = file.add_stream(SOUND, rate=sound.rate, layout=layout, bit_rate=BIT_RATE)
            shown = av.VideoFrame.from_ndarray(pixels_HW3, format="rgb24")
            file.mux(stream.encode(shown.reformat(format="yuv420p", dst_colorspace=BT_709)))
        file.mux(stream.encode())
        if track is not None and sound is not None:
            samples_CT = np.ascontiguousarray(sound.samples_CT, dtype=np.float32).clip(-1, 1)
            heard: Any = av.AudioFrame.from_ndarray(samples_CT, format="fltp", layout=track.layout.name)
            heard.sample_rate, heard.pts = sound.rate, 0  # without a time, players hear the encoder's delay
            file.mux(track.encode(heard))
            file.mux(track.encode())
    return video


def digest(made: Sequence[Any]) -> str:
    """Return 16 hex digits over all pixels of images or videos, and samples of sounds, to compare runs.

    Not of files: libx264 encodes the same frames in other bytes once in a thousand times.
    """
    return hashlib.sha256(b"".join(np.ascontiguousarray(one).tobytes() for one in made)).hexdigest()[:16]


def _bytes(frame: Any) -> np.ndarray:
    values = np.asarray(frame)
    return values if values.dtype == np.uint8 else (values * 255).round().astype(np.uint8)


# Input images -------------------------------------------------------------------------------------------------

NUMBER = 5  # digits of a picture's number, which stand before its name while it travels


def shared(pictures: Callable[[], Sequence[Picture]], mesh: Mesh) -> tuple[Picture, ...]:
    """Call a function on rank 0 alone, and return its pictures on every rank; if it fails, raise one error on all."""

    def pixels() -> dict[str, Tensor]:
        read = enumerate(pictures())
        return {f"{number:0{NUMBER}}{x.name}": torch.from_numpy(np.array(x.image)) for number, x in read}

    tensors = streams_of_rank_0(mesh, pixels)
    return tuple(Picture(name[NUMBER:], Image.fromarray(x_HW3.numpy())) for name, x_HW3 in tensors.items())
