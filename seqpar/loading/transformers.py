"""The transformers of a pipeline."""

from __future__ import annotations

from typing import Any

from torch import nn

from seqpar.types.arguments import shown

NAMES = ("transformer", "transformer_2")  # a pipeline's transformers; Wan 2.2 has one for early and one for late steps


def transformers_of(pipe_or_transformer: Any) -> dict[str, nn.Module]:
    """Return the transformers of a pipeline by name, or the transformer itself; ValueError if there is none."""
    if isinstance(pipe_or_transformer, nn.Module):
        return {"transformer": pipe_or_transformer}
    parts = {name: getattr(pipe_or_transformer, name, None) for name in NAMES}
    modules = {name: module for name, module in parts.items() if isinstance(module, nn.Module)}
    if not modules:
        raise ValueError(
            f"got pipe_or_transformer={shown(pipe_or_transformer)} without {' or '.join(NAMES)}, expected a diffusers "
            f"transformer or a pipeline that has one"
        )
    return modules
