"""Names of models: those of the package, presets with random weights, paths and hub ids.

A preset is chosen by its exact name alone, so that none stands in for a model of the hub. Presets of pipelines and of
UniDiffuser, which the hub has by the same names, are named `random:NAME`; those of DiT and Large-DiT also by NAME.
"""

from __future__ import annotations

from pathlib import Path

from seqpar.loading.hub import download
from seqpar.loading.presets import OF_MODELS, PRESETS

ASSETS = Path(__file__).parents[1] / "assets"
BUILTIN = ASSETS / "emoji-dit"  # the model of classes that comes with the package
NAMES = {"builtin": BUILTIN, "builtin-text": ASSETS / "emoji-flux"}  # of the models that come with the package
LORAS = {"outline": ASSETS / "outline.safetensors"}  # of "builtin-text": it draws with lines
RANDOM = "random:"  # before the name of a preset
BARE = ("dit-", "large-dit-")  # how names of presets begin that need no prefix: the hub has no such model
# ids of the hub that are asked for when their owner is left out
HUB = (
    *(f"black-forest-labs/FLUX.{name}" for name in ("1-dev", "1-schnell", "1-Kontext-dev", "2-dev", "2-klein-4B")),
    *("Qwen/Qwen-Image", "Qwen/Qwen-Image-Edit", "Qwen/Qwen-Image-Edit-2509", "Tongyi-MAI/Z-Image-Turbo"),
    *(f"stabilityai/stable-diffusion-3.5-{size}" for size in ("large", "medium")),
    *("Wan-AI/Wan2.1-T2V-14B-Diffusers", "Wan-AI/Wan2.1-I2V-14B-480P-Diffusers", "Wan-AI/Wan2.2-I2V-A14B-Diffusers"),
    *("Wan-AI/Wan2.2-TI2V-5B-Diffusers", "hunyuanvideo-community/HunyuanVideo", "THUDM/CogVideoX-5b"),
    *("Lightricks/LTX-Video", "Lightricks/LTX-2", "lodestones/Chroma1-HD", "facebook/DiT-XL-2-256"),
    *("thu-ml/unidiffuser-v0", "thu-ml/unidiffuser-v1"),
)


def preset_of(name: str | Path) -> str | None:
    """Return the preset that a name stands for, without its prefix, or None."""
    own = str(name).removeprefix(RANDOM)
    known = own in OF_MODELS or own in PRESETS
    return own if known and (own != str(name) or own.startswith(BARE)) else None


def resolve(name: str | Path) -> Path | None:
    """Return the path of the file or folder that a name stands for, or None for a preset.

    A hub id is downloaded; a path costs nothing. Raises ValueError if nothing has this name, or if it is a pipe or a
    device.
    """
    path, preset = Path(name), preset_of(name)
    if str(name) in NAMES:
        return NAMES[str(name)]
    if preset is not None:
        if path.exists():
            raise ValueError(f"{name} is a preset with random weights and a path; write {RANDOM}{preset} or ./{name}")
        return None
    if not path.exists():
        if meant := _meant(str(name)):
            raise ValueError(f"got model {str(name)!r}, which does not exist: did you mean {' or '.join(meant)}?")
        path = download(str(name), _presets(), list(NAMES))
    if not (path.is_file() or path.is_dir()):
        raise ValueError(f"got model {name}, expected a file or folder; it is a pipe or a device")
    return path


def _presets() -> list[str]:
    """Return the names by which presets are chosen."""
    return [name if name.startswith(BARE) else f"{RANDOM}{name}" for name in (*OF_MODELS, *PRESETS)]


def _meant(name: str) -> list[str]:
    """Return the names that differ from one by the hub's owner, by `random:` or by case."""
    wanted = name.lower().removeprefix(RANDOM)
    hub = [known for known in HUB if known.lower() != wanted and known.lower().partition("/")[2] == wanted]
    own = [known for known in NAMES if known == wanted]
    random = [f"{known} (random weights)" for known in _presets() if known.removeprefix(RANDOM).lower() == wanted]
    return [*hub, *own, *random]
