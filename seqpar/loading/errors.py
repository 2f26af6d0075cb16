"""Turns errors of diffusers and transformers over a model's files into one message, which names the files.

Both libraries fail deep inside on a value that they do not check. What the machine is to blame for stays as it is, and
so does what comes from this package.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError

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
BROKEN = (OSError, NameError, StrictDataclassError, SafetensorError, *FAILURES)
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
    """Raise ValueError, with `what` before the reason, where diffusers fails in a pipeline's own loop.

    A ValueError stays as it is: the pipeline's check of its arguments and this package raise it with a sentence. split:
    whether tokens are split over ranks; then all errors stay, because they may be bugs of this package.
    """
    try:
        yield
    except BROKEN as error:
        if split or isinstance(error, ValueError) or _is_machines(error):
            raise
        raise ValueError(f"{what}: {_reason(error)}") from error


def _is_machines(error: BaseException) -> bool:
    """Return whether the machine is to blame: memory, disk, network, another rank, or the GPU's libraries."""
    return is_failure(error) or isinstance(error, torch.AcceleratorError) or any(text in str(error) for text in DEVICE)


def _reason(error: BaseException) -> str:
    return " ".join(str(error).split())[:400] or type(error).__name__
