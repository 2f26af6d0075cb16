"""Whether a transformer's pipelines compute two branches of guidance."""

from __future__ import annotations

from typing import Any

from torch import nn


def is_guided(module: nn.Module) -> bool:
    """Return whether pipelines of this family compute an unconditional branch: not where guidance is an input."""
    config: Any = getattr(module, "config", {})
    return not config.get("guidance_embeds", False) and type(module).__name__ != "FluxTransformer2DModel"
