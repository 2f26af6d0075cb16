"""Names of models: those of the package, random models (with random weights), paths and hub ids.

A random model is chosen by its exact name alone, so that none stands in for a model of the hub. Those of pipelines and
of UniDiffuser, which the hub has by the same names, are named `random:NAME`; those of DiT and Large-DiT also by NAME.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import HfApi, constants, errors, snapshot_download
from huggingface_hub.utils import logging
from torch import Tensor

from seqpar.families import Published, _find

OF_MODELS = (  # random models of `seqpar.loop.models`, whose files hold their sizes
    *(f"dit-{size}/{patch}" for size in ("s", "b", "l", "xl") for patch in (2, 4, 8)),
    *(f"large-dit-{size}" for size in ("600m", "3b", "7b")),
    *(f"unidiffuser-v{number}" for number in (0, 1)),
)


@dataclass(frozen=True)
class RandomModel:
    """A pipeline of diffusers with random weights, as its family describes it (`seqpar.families`)."""

    name: str
    pipeline: str
    parts: Mapping[str, tuple[str, Mapping[str, Any]]]
    texts: Mapping[str, tuple[int, ...]]

    @property
    def index(self) -> dict[str, Any]:
        parts = {name: ["diffusers", kind] for name, (kind, _) in self.parts.items()}
        return {"_class_name": self.pipeline, **parts}

    def encoded(self, count: int, seed: int) -> dict[str, Tensor]:
        """Random numbers in place of so many encoded prompts, in fp32; the same on every rank."""
        generator = torch.Generator().manual_seed(seed)
        return {name: torch.randn(count, *shape, generator=generator) for name, shape in self.texts.items()}


RANDOM_MODELS = {name: RandomModel(name, *fields) for name, fields in _find.RANDOM_MODELS.items()}


ONE_MODEL = ("config.json", "diffusion_pytorch_model*")
# a pipeline's parts, without files of other formats at the top of many repositories
DOWNLOADED = [
    *("model_index.json", "modular_model_index.json", *ONE_MODEL),
    *("transformer/*", "transformer_2/*", "unconditional_transformer/*", "unet/*", "vae/*", "scheduler/*"),
    *("text_encoder/*", "text_encoder_2/*", "text_encoder_3/*", "tokenizer/*", "tokenizer_2/*", "tokenizer_3/*"),
    *("text_decoder/*", "text_tokenizer/*", "clip_tokenizer/*", "clip_image_processor/*"),
    *("image_encoder/*", "image_processor/*", "feature_extractor/*", "processor/*", "connectors/*"),
    *("audio_vae/*", "vocoder/*", "audio_scheduler/*"),
]
OF_PART = ["*.json", "*.safetensors", "*.txt", "*.model", "*.jinja"]  # of a part that is a whole repository
ID = r"[\w-][\w.-]{0,95}/[\w-][\w.-]{0,95}"  # owner/name
# the last one is the base of what its HTTP client raises
NETWORK = (OSError, errors.HfHubHTTPError, getattr(errors, "HTTPError", OSError))
SHOWN = 200  # characters of a name in a message
NEAR = 0.8  # how alike a name and a known one are (`difflib`) that is suggested in its place
FIRST = 4  # known names in a message, at most
ASK_S = 5.0  # seconds that the hub has to say whether it knows a name


def download(
    name: str,
    random: Sequence[str],
    models: Sequence[str] = (),
    files: Sequence[str] = DOWNLOADED,
    revision: str | None = None,
    what: str = "model",
) -> Path:
    """Return the folder of a hub id, downloaded or from the cache; ValueError, with a line, if there is none.

    random, models: the names that were tried before, for the message: random models, and those of the package. files:
    patterns of their names. what: the name stands for, for the message.
    """
    names = {known.lower(): known for known in (*models, *random, *PUBLISHED)}
    names |= {short_name(known): known for known in PUBLISHED}
    known = _alike(name, names) if what == "model" else ""
    if not re.fullmatch(ID, name):
        first = [short_name(known) for known in PUBLISHED][:FIRST]
        listed = f"; known models: {', '.join(first)}, ... ({len(PUBLISHED)}); with random weights: {', '.join(random)}"
        known = known or (listed if random else "")
        short = repr(name if len(name) <= SHOWN else f"{name[:SHOWN]}...")
        raise ValueError(f"got {what} {short}: there is no such path{known}")
    reason = None
    try:
        with errors_only(logging):
            reason = _why_not(name)
            # one process at a time writes a file
            options: Any = {"allow_patterns": list(files), "local_files_only": reason is not None}
            options |= {} if revision is None else {"revision": revision}
            return Path(snapshot_download(name, **options))
    except (*NETWORK, errors.HFValidationError) as error:
        if reason is not None and isinstance(error, errors.LocalEntryNotFoundError):
            nowhere = "no files of it were downloaded before, and there is no such path"
            raise ValueError(f"got {what} {name!r}: {reason}, {nowhere}{known}") from error
        raise ValueError(f"got {what} {name!r}, which cannot be downloaded from the hub: {_first(error)}") from error


def _alike(name: str, names: Mapping[str, str]) -> str:
    """Return "; did you mean NAME?" for the most similar name, or for names that contain this one; otherwise nothing.

    names: as they are compared -> as they are written.
    """
    near = [names[other] for other in get_close_matches(name.lower()[:SHOWN], names, 1, NEAR)]
    part = _squeezed(name)
    if not near and len(part) > 2 and "/" not in name:
        near = [*dict.fromkeys(names[other] for other in names if part in _squeezed(other))][:FIRST]
    return f"; did you mean {' or '.join(near)}?" if near else ""


def _squeezed(name: str) -> str:
    return re.sub(r"[^a-z0-9.]", "", re.sub(r"^sd(?=\d)", "stable-diffusion-", name.lower()))


def _why_not(name: str) -> str | None:
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


@contextmanager
def errors_only(logging: Any) -> Iterator[None]:
    """Silence the warnings of a library of Hugging Face; logging: its module of that name."""
    before = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(before)


@contextmanager
def importing_pipelines() -> Iterator[None]:
    """Silence transformers while a module of diffusers imports its image processors.

    Without torchvision it warns of each that PIL takes its place, in every process.
    """
    from transformers.utils import logging

    with errors_only(logging):
        yield


@contextmanager
def building(dtype: torch.dtype | None = None) -> Iterator[None]:
    """Silence what torch says of older functions of its own, by which models of diffusers are built.

    dtype: of their weights and of what they compute; None: torch's default.
    """
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype or before)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            yield
    finally:
        torch.set_default_dtype(before)


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


def _first(error: BaseException) -> str:
    """Return the first line of a message, or the name of an error without one."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


DEMO = Path(__file__).parents[2] / "seqpar_demo"  # next to this package in a clone, and where pip installs it
BUILTIN = DEMO / "emoji-dit"  # the model of classes
NAMES = {"builtin": BUILTIN, "builtin-text": DEMO / "emoji-flux"}
LORAS = {"outline": DEMO / "outline.safetensors"}  # of "builtin-text": it draws with lines
RANDOM = "random:"  # before the name of a random model
BARE = ("dit-", "large-dit-")  # how names begin that need no prefix: the hub has no such model
PUBLISHED = _find.PUBLISHED
# ids of the hub that are asked for when their owner is left out
HUB = (*(name for name in PUBLISHED if "/" in name), "thu-ml/unidiffuser-v0", "thu-ml/unidiffuser-v1")


def short_name(name: str) -> str:
    """Return a hub id without its owner, as people write it."""
    return name.rpartition("/")[2].lower().removesuffix("-diffusers")


def published_of(name: str) -> tuple[str, Published] | None:
    """Return the id and the facts of a published model that has this name, also a short one; None for a path."""
    found = next((known for known in PUBLISHED if name.lower() in (known.lower(), short_name(known))), None)
    return None if found is None or Path(name).exists() else (found, PUBLISHED[found])


def random_model_of(name: str | Path) -> str | None:
    """Return the random model that a name stands for, without its prefix, or None."""
    own = str(name).removeprefix(RANDOM)
    known = own in OF_MODELS or own in RANDOM_MODELS
    return own if known and (own != str(name) or own.startswith(BARE)) else None


ORIGINAL = (".pt", ".pth", ".ckpt", ".bin")


def check_format(path: Path) -> None:
    """Raise ValueError for a checkpoint in a format of its authors, which only `seqpar convert` reads."""
    if path.is_dir():
        diffusers = any((path / f"{name}.json").is_file() for name in ("model_index", "modular_model_index", "config"))
        files = () if diffusers else tuple(path.iterdir())
    else:
        files = (path,)
    if any(file.suffix in ORIGINAL or file.name.startswith("consolidated") for file in files):
        raise ValueError(f"{path} is in its authors' format; run seqpar convert {path} FOLDER, then use FOLDER")
    if any(file.suffix == ".pdparams" for file in files):
        raise ValueError(f"{path} is in PaddlePaddle's format; use the model's diffusers folder or its authors' files")


def resolve(name: str | Path) -> Path | None:
    """Return the path of the file or folder that a name stands for, or None for a random model. A hub id is downloaded.

    Raises ValueError if nothing has this name, and for a format that must be converted first.
    """
    path, random = Path(name), random_model_of(name)
    if str(name) in NAMES:
        if not DEMO.is_dir():
            raise ValueError(
                f"demo model {name!r} is not installed; run `pip install ./seqpar_demo` in a clone of seqpar"
            )
        return NAMES[str(name)]
    if random is not None:
        if path.exists():
            raise ValueError(f"{name} is a model with random weights and a path; write {RANDOM}{random} or ./{name}")
        return None
    if not is_path(str(name)):
        if meant := _meant(str(name)):
            raise ValueError(f"got model {str(name)!r}, which does not exist: did you mean {' or '.join(meant)}?")
        path = download(str(name), _random_models(), list(NAMES))
    check_format(path)
    return path


def controlnet_of(name: str, weights: bool = True) -> Path:
    """Return the path of a ControlNet. A hub id is downloaded; ValueError if nothing has this name.

    weights: whether they are downloaded, too, or config.json alone.
    """
    if name and is_path(name):
        return Path(name)
    return download(name, (), files=ONE_MODEL if weights else ONE_MODEL[:1], what="ControlNet")


def is_path(name: str) -> bool:
    """Return whether a file or folder of this name exists; no name beyond the file system's limit does."""
    try:
        return Path(name).exists()
    except OSError:
        return False


def _random_models() -> list[str]:
    return [name if name.startswith(BARE) else f"{RANDOM}{name}" for name in (*OF_MODELS, *RANDOM_MODELS)]


def _meant(name: str) -> list[str]:
    wanted = name.lower().removeprefix(RANDOM)
    hub = [known for known in HUB if known.lower() != wanted and known.lower().partition("/")[2] == wanted]
    own = [known for known in NAMES if known == wanted]
    random = [f"{known} (random weights)" for known in _random_models() if known.removeprefix(RANDOM).lower() == wanted]
    return [*hub, *own, *random]
