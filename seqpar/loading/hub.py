"""Gets a model's files from the Hugging Face hub: asks once, with a short time-out, and then downloads.

A name that is neither a path nor a preset may be a hub id. Whether the hub has it costs one question, which is not
repeated; without a network, or with the hub's own switch (HF_HUB_OFFLINE=1), files that were downloaded before are
used, at once.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi, constants, errors, snapshot_download
from huggingface_hub.utils import logging

# a pipeline's parts, without files of other formats at the top of many repositories
DOWNLOADED = [
    *("model_index.json", "config.json", "diffusion_pytorch_model*"),
    *("transformer/*", "transformer_2/*", "unet/*", "vae/*", "scheduler/*"),
    *("text_encoder/*", "text_encoder_2/*", "text_encoder_3/*", "tokenizer/*", "tokenizer_2/*", "tokenizer_3/*"),
    *("text_decoder/*", "text_tokenizer/*", "clip_tokenizer/*", "clip_image_processor/*"),
    *("image_encoder/*", "image_processor/*", "feature_extractor/*", "processor/*", "connectors/*"),
]
ID = r"[\w-][\w.-]{0,95}/[\w-][\w.-]{0,95}"  # owner/name
# the last one is the base of what its HTTP client raises
NETWORK = (OSError, errors.HfHubHTTPError, getattr(errors, "HTTPError", OSError))
SHOWN = 200  # characters of a name in a message
NEAR = 0.8  # how alike a name and a known one are (`difflib`) that is suggested in its place
ASK_S = 5.0  # seconds that the hub has to say whether it knows a name


def download(name: str, presets: Sequence[str], models: Sequence[str] = ()) -> Path:
    """Return the folder of a hub id, downloaded or from the cache; ValueError, with a line, if there is none.

    presets, models: the names that were tried before, for the message: presets, and models of the package.
    """
    near = get_close_matches(name.lower()[:SHOWN], (*models, *presets), 1, NEAR)
    known = f"; did you mean {near[0]}?" if near else ""
    if not re.fullmatch(ID, name):
        known = known or f"; presets with random weights: {', '.join(presets)}"
        raise ValueError(f"got model {_short(name)}: there is no such path{known}")
    try:
        with errors_only(logging):
            reason = _why_not(name)
            if reason is not None:
                return _cached(name, reason, known)
            return Path(snapshot_download(name, allow_patterns=DOWNLOADED))  # a process at a time writes a file
    except (*NETWORK, errors.HFValidationError) as error:
        raise ValueError(f"got model {name!r}, which cannot be downloaded from the hub: {_first(error)}") from error


def _why_not(name: str) -> str | None:
    """Return why nothing can be downloaded from the hub now, or None."""
    if constants.HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE says not to ask the hub"
    try:
        HfApi().model_info(name, timeout=ASK_S)
    except errors.GatedRepoError:
        return "the hub gives it to users who accepted its terms (set HF_TOKEN)"
    except errors.RepositoryNotFoundError:
        return "the hub has none of this name, or it is private (set HF_TOKEN)"
    except NETWORK as error:
        return f"the hub gave no answer ({_first(error)})"
    return None


def _cached(name: str, reason: str, known: str) -> Path:
    """Return the folder of files that were downloaded before; without them ValueError, which begins with the reason.

    known: how its message ends.
    """
    try:
        return Path(snapshot_download(name, allow_patterns=DOWNLOADED, local_files_only=True))
    except errors.LocalEntryNotFoundError as error:
        nowhere = "no files of it were downloaded before, and there is no such path"
        raise ValueError(f"got model {name!r}: {reason}, {nowhere}{known}") from error


@contextmanager
def errors_only(logging: Any) -> Iterator[None]:
    """Silence the warnings of a library of Hugging Face, which are in our message; logging: its module of that name."""
    before = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(before)


@contextmanager
def importing_pipelines() -> Iterator[None]:
    """Silence transformers while a module of diffusers imports its image processors, whether or not they will be used.

    Without torchvision it warns of each that PIL takes its place, in every process.
    """
    from transformers.utils import logging

    with errors_only(logging):
        yield


@contextmanager
def no_bars(*logging: Any) -> Iterator[None]:
    """Show no progress bars of libraries of Hugging Face; logging: their modules of that name."""
    shown = [library for library in logging if library.is_progress_bar_enabled()]
    for library in shown:
        library.disable_progress_bar()
    try:
        yield
    finally:
        for library in shown:
            library.enable_progress_bar()


def _short(name: str) -> str:
    return repr(name if len(name) <= SHOWN else f"{name[:SHOWN]}...")


def _first(error: BaseException) -> str:
    """Return the first line of a message, or the name of an error without one."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
