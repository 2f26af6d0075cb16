"""Turns errors of diffusers and transformers over a model's files into one message, which names the files.

Both libraries fail deep inside on a value that they do not check. What the machine is to blame for stays as it is, and
so does what comes from this package.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from huggingface_hub.errors import StrictDataclassError

from seqpar.mesh.errors import is_failure

FAILURES = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    ImportError,
    LookupError,
    NotImplementedError,
    RuntimeError,
    TypeError,
    ValueError,
)


# what loaders of diffusers and transformers raise; NameError for a name that no branch on a config has set
BROKEN = (OSError, NameError, StrictDataclassError, *FAILURES)
THEIRS = ("diffusers", "transformers")
DEVICE = ("CUDA error", "cuDNN error", "CUBLAS_STATUS")  # in errors of a GPU's libraries, which have no class


@contextmanager
def context(what: str) -> Iterator[None]:
    """Raise ValueError, with `what` before the reason, where diffusers or transformers fail on the files of a model."""
    try:
        yield
    except BROKEN as error:
        if _is_machines(error):
            raise
        raise ValueError(f"{what}: {_reason(error)}") from error


@contextmanager
def loop_context(what: str, split: bool) -> Iterator[None]:
    """Raise ValueError, with `what` and the line that fails, where diffusers fails in a pipeline's own loop.

    Errors that come from this package stay as they are; what the pipeline's own check of its arguments refuses is the
    flags' fault and not that of its files. split: whether it splits the transformer's tokens; then errors
    from inside of the transformer stay, too, because we may have given it wrong ones: a bug, which needs its traceback.
    """
    try:
        yield
    except BROKEN as error:
        modules, place = _calls(error)
        inside = split and any(name.startswith("seqpar.transformer.") for name in modules)
        if _is_machines(error) or modules[-1].startswith("seqpar.") or inside:
            raise
        if any(frame.f_code.co_name == "check_inputs" for frame, _ in traceback.walk_tb(error.__traceback__)):
            raise ValueError(f"got flags that the pipeline refuses: {_reason(error)}") from error
        raise ValueError(f"{what} ({place}): {_reason(error)}") from error


def _calls(error: BaseException) -> tuple[list[str], str]:
    """Return the modules of ours and theirs that an error came through, the innermost last, and its file and line."""
    modules, place = [__name__], ""
    for frame, line in traceback.walk_tb(error.__traceback__):
        name = str(frame.f_globals.get("__name__"))
        if name.partition(".")[0] in ("seqpar", *THEIRS):
            modules.append(name)
            place = f"{Path(frame.f_code.co_filename).name}, line {line}"
    return modules, place


def _is_machines(error: BaseException) -> bool:
    """Return whether the machine is to blame: memory, disk, network, another rank, or the GPU's libraries."""
    return is_failure(error) or isinstance(error, torch.AcceleratorError) or any(text in str(error) for text in DEVICE)


def _reason(error: BaseException) -> str:
    return " ".join(str(error).split())[:400] or type(error).__name__
