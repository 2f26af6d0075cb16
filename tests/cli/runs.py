"""Runs of `seqpar sample` in this process or on ranks of the pool, and the same by diffusers alone."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
from PIL import Image

from seqpar.cli.args import Args
from seqpar.cli.sample import run

SAME = 2.5 / 255  # of a pixel: two ranks add in another order, and a file has 8 bits


def shown(rank: int, world: int, device: torch.device, args: Args) -> tuple[str, str]:
    """What a run prints on this rank, and its bars."""
    out, bars = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(bars):
        run(args)
    return out.getvalue(), bars.getvalue()


def refused(model: object, out: Path, **flags: Any) -> str:
    with pytest.raises((ValueError, FloatingPointError)) as error:  # (the caller looks at the message)
        run(Args(str(model), **{"steps": 2, "size": "24x32", "out": out, **flags}))
    return str(error.value)


def pixels(path: Path) -> np.ndarray:
    """A picture's numbers from 0 to 1."""
    with Image.open(path) as picture:
        return np.asarray(picture.convert("RGB")) / 255


def parameters(path: Path) -> dict[str, Any]:
    with Image.open(path) as picture:
        return json.loads(picture.info["seqpar"])


def theirs(
    folder: Path,
    kind: str = "DiffusionPipeline",
    dtype: torch.dtype = torch.float32,
    loras: Mapping[Path, float] | None = None,
    parts: Mapping[str, Any] | None = None,
    **arguments: Any,
) -> np.ndarray:
    """The picture or video that a class of diffusers alone makes of "a red cat" with seed 3."""
    pipe: Any = getattr(diffusers, kind).from_pretrained(folder, torch_dtype=dtype, **(parts or {}))
    pipe.set_progress_bar_config(disable=True)
    for path in loras or ():
        pipe.load_lora_weights(str(path.parent), weight_name=path.name, adapter_name=path.stem)
    if loras:
        pipe.set_adapters([path.stem for path in loras], list(loras.values()))
    arguments = {"num_inference_steps": 2, "output_type": "np", **arguments}
    made = pipe(prompt="a red cat", generator=torch.Generator().manual_seed(3), **arguments)
    return np.asarray(made.images[0] if hasattr(made, "images") else made.frames[0])
