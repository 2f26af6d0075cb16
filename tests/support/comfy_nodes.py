"""A stand-in for ComfyUI's node protocol (schema V3), of which the nodes in integrations/comfyui use this much.

The nodes are tested against ComfyUI itself by hand (docs/comfyui.md says with which version): it cannot be installed
as a package.
"""

from __future__ import annotations

import importlib.util
import sys
import types
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

NODES = Path(__file__).resolve().parents[2] / "integrations" / "comfyui"


class InterruptProcessingError(Exception):
    """As ComfyUI's InterruptProcessingException."""


@dataclass
class Comfy:
    """What the nodes have told ComfyUI, and what they are told. bar: (value, total, preview). interrupt: at a value."""

    bar: list[tuple[int, int, Any]] = field(default_factory=list[tuple[int, int, Any]])
    interrupt: int | None = None
    folders: dict[str, dict[str, Path]] = field(default_factory=dict[str, dict[str, Path]])

    def check(self) -> None:
        if self.interrupt is not None and self.bar and self.bar[-1][0] >= self.interrupt:
            self.interrupt = None
            raise InterruptProcessingError

    def file(self, folder: str, name: str) -> str | None:
        path = self.folders.get(folder, {}).get(name)
        return None if path is None else str(path)


@dataclass
class Bar:
    """comfy.utils.ProgressBar"""

    comfy: Comfy
    total: int

    def update_absolute(self, value: int, total: int | None = None, preview: Any = None) -> None:
        self.total = total or self.total
        self.comfy.bar.append((value, self.total, preview))


class Socket:
    """An input or output of a schema: its type, name and options."""

    def __init__(self, kind: str, name: str | None, options: dict[str, Any]) -> None:
        self.kind, self.id, self.options = kind, name, options


class Kind:
    """A type of inputs and outputs, as io.Image."""

    def __init__(self, name: str) -> None:
        self.name = name

    def Input(self, id: str, *args: Any, **options: Any) -> Socket:  # noqa: N802
        return Socket(self.name, id, options | ({"options": args[0]} if args else {}))

    def Output(self, id: str | None = None, **options: Any) -> Socket:  # noqa: N802
        return Socket(self.name, id, options)


class NodeOutput:
    """io.NodeOutput"""

    def __init__(self, *args: Any, **more: Any) -> None:
        self.args, self.more = args, more


@dataclass
class Schema:
    """io.Schema"""

    node_id: str
    display_name: str
    category: str
    description: str
    inputs: list[Socket]
    outputs: list[Socket]


@dataclass
class Components:
    """VideoComponents"""

    images: Any
    frame_rate: Any
    audio: Any = None


@dataclass
class Video:
    """VideoFromComponents, or VideoFromFile"""

    made_of: Any


def load_nodes(comfy: Comfy) -> Any:
    """Import the package of nodes with this stand-in in place of ComfyUI; return it."""
    kinds = ("Image", "Mask", "Latent", "Sigmas", "Audio", "Video", "String", "Int", "Float", "Boolean", "Combo")
    classes = {"Schema": Schema, "NodeOutput": NodeOutput, "ComfyNode": object, "Custom": Kind, "Input": Socket}
    io = types.SimpleNamespace(**classes, **{name: Kind(name.upper()) for name in kinds})
    modules: dict[str, dict[str, Any]] = {
        "comfy": {},
        "comfy.model_management": {"throw_exception_if_processing_interrupted": comfy.check},
        "comfy.utils": {"ProgressBar": lambda total: Bar(comfy, total)},
        "comfy_api": {},
        "comfy_api.latest": {
            "io": io,
            "ComfyExtension": object,
            "InputImpl": types.SimpleNamespace(VideoFromComponents=Video, VideoFromFile=Video),
            "Types": types.SimpleNamespace(VideoComponents=Components),
        },
        "folder_paths": {
            "get_filename_list": lambda folder: sorted(comfy.folders.get(folder, {})),
            "get_full_path": comfy.file,
        },
    }
    for name, contents in modules.items():
        module = types.ModuleType(name)
        vars(module).update(contents)
        sys.modules[name] = module
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], child, module)
    spec = importlib.util.spec_from_file_location("seqpar_comfyui", NODES / "__init__.py")
    assert spec is not None
    assert spec.loader is not None
    package = importlib.util.module_from_spec(spec)
    for name in [name for name in sys.modules if name.startswith("seqpar_comfyui.")]:
        del sys.modules[name]  # of a test before
    sys.modules["seqpar_comfyui"] = package
    spec.loader.exec_module(package)
    return sys.modules["seqpar_comfyui.nodes"]
