"""Writes a video as mp4 (H.264), whole or not at all, with the parameters that produced it.

diffusers' exporter writes no metadata, and scales frames to sizes that 16 divides.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from fractions import Fraction
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np

from seqpar.pipelines.pictures import written

CODEC = "libx264"
QUALITY = {"crf": "17"}  # of libx264: a loss that is hard to see
BT_709 = 1  # the number of the usual colours of videos, in ffmpeg's lists of primaries, transfers and matrices


def check_encoder() -> None:
    """Raise ValueError where PyAV has no encoder for the videos that are written here."""
    import av  # loads ffmpeg's libraries, which pictures do not need

    try:
        av.Codec(CODEC, "w")
    except ValueError as error:
        raise ValueError(f"got PyAV without {CODEC}, expected this encoder for mp4 files; install av by pip") from error


def save_video(frames_FHW3: Iterable[Any], path: Path, fps: float, parameters: Mapping[str, Any]) -> None:
    """Write frames in one atomic step; the file's comment holds every parameter as JSON.

    frames_FHW3: pictures of Pillow, or arrays of values in [0, 1], with even numbers of rows and columns. fps: frames a
    second.
    """
    video = encoded(frames_FHW3, fps, json.dumps(parameters))
    with written(path) as temporary, open(temporary, "xb") as file:  # mkstemp would ignore the umask
        file.write(video.getbuffer())


def encoded(frames_FHW3: Iterable[Any], fps: float, comment: str) -> BytesIO:
    """Return the bytes of an mp4; in memory, because a full disk would be another error inside of ffmpeg."""
    import av  # loads ffmpeg's libraries, which pictures do not need

    video, stream = BytesIO(), None
    with av.open(video, "w", format="mp4") as file:
        file.metadata["comment"] = comment
        for frame in frames_FHW3:
            pixels_HW3 = _bytes(frame)
            if stream is None:
                stream: Any = file.add_stream(CODEC, rate=Fraction(fps).limit_denominator(1001), options=QUALITY)
                stream.height, stream.width, stream.pix_fmt = *pixels_HW3.shape[:2], "yuv420p"
                colours = stream.codec_context
                colours.color_primaries = colours.color_trc = colours.colorspace = BT_709
            shown = av.VideoFrame.from_ndarray(pixels_HW3, format="rgb24")
            file.mux(stream.encode(shown.reformat(format="yuv420p", dst_colorspace=BT_709)))
        file.mux(stream.encode())
    return video


def digest(made: Sequence[Any]) -> str:
    """Return 16 hex digits over all pixels of pictures or videos, to compare runs.

    libx264 encodes the same frames in other bytes once in a thousand times, so that files and decoded frames cannot.
    """
    return hashlib.sha256(b"".join(np.ascontiguousarray(one).tobytes() for one in made)).hexdigest()[:16]


def _bytes(frame: Any) -> np.ndarray:
    """Return a frame as bytes (height, width, 3)."""
    values = np.asarray(frame)
    return values if values.dtype == np.uint8 else (values * 255).round().astype(np.uint8)
