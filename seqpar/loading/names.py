"""Names of the models and LoRAs that come with the package."""

from __future__ import annotations

from pathlib import Path

from seqpar.loading.hub import download
from seqpar.loading.presets import OF_MODELS, PRESETS

ASSETS = Path(__file__).parents[1] / "assets"
BUILTIN = ASSETS / "emoji-dit"  # the model of classes that comes with the package
NAMES = {"builtin": BUILTIN, "builtin-text": ASSETS / "emoji-flux"}  # of the models that come with the package
LORAS = {"outline": ASSETS / "outline.safetensors"}  # of "builtin-text": it draws with lines


def resolve(name: str | Path) -> Path | None:
    """Return the path of the file or folder that a name stands for, or None for a preset.

    A hub id is downloaded; a path costs nothing. Raises ValueError if nothing has this name, or if it is a pipe or a
    device.
    """
    known = (*OF_MODELS, *PRESETS)
    if str(name).lower() in NAMES:
        return NAMES[str(name).lower()]
    if str(name).lower() in known:
        return None
    path = Path(name)
    if not path.exists():
        path = download(str(name), list(known), list(NAMES))
    if not (path.is_file() or path.is_dir()):
        raise ValueError(f"got model {name}, expected a file or folder; it is a pipe or a device")
    return path
