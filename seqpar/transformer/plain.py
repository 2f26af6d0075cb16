"""Says where a transformer's modules are not as diffusers builds them: replaced or quantised layers, other settings.

Code of ours that computes on a transformer's weights knows the arithmetic of the modules that diffusers builds from its
config. What is different there is computed by the modules themselves.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from copy import deepcopy
from functools import cache
from typing import Any

import torch
from torch import nn

from seqpar.families import _processors as processors
from seqpar.loading.meta import WithoutValues
from seqpar.transformer import lora as adapters

Built = tuple[type, type, dict[str, Any]]  # class, class of the attention processor, settings that are plain values
CHANGED = ("training", "gradient_checkpointing", "fused_projections")  # settings that change nothing here


def differences(module: Any) -> Iterator[tuple[str, str]]:
    """Yield (path, reason) for modules of another class, or with other settings, than the config gives them.

    Paths are those without adapters. An attention processor counts as a part of its module.
    """
    plain = expected(module)
    for path, one in adapters.without_adapters(module):
        if path in plain:
            yield from ((path, reason) for reason in _of(path, one, *plain[path]))


def expected(module: Any) -> Mapping[str, Built]:
    """Return how diffusers builds the modules of a transformer from its config, by their paths; it is kept.

    A config may hold keys that its class does not know, which diffusers keeps.
    """
    known = inspect.signature(type(module).__init__).parameters
    return _built(type(module), _Config({key: value for key, value in module.config.items() if key in known}))


class _Config(dict[str, Any]):
    """The arguments of a class of transformers, for a cache."""

    def __hash__(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        return hash(frozenset(self))


def _of(path: str, one: Any, kind: type, processor: type, settings: Mapping[str, Any]) -> Iterator[str]:
    if type(one) is not kind:
        yield f"{path} is a {type(one).__name__} and no {kind.__name__}"
    for key, value in settings.items():
        if (mine := vars(one).get(key, value)) != value:
            yield f"{path}.{key} is {mine!r} and not {value!r}"
    if type(own := processors.own_of(getattr(one, "processor", None))) is not processor:
        yield f"an attention processor is a {type(own).__name__}"


@cache
def _built(kind: type, config: _Config) -> dict[str, Built]:
    """Return how the modules of a new transformer are built, by their paths."""
    with torch.device("meta"), WithoutValues():
        module: nn.Module = kind(**deepcopy(config))
    return {
        path: (type(one), type(getattr(one, "processor", None)), _settings(one)) for path, one in module.named_modules()
    }


def _settings(one: nn.Module) -> dict[str, Any]:
    plain = (bool, int, float, str)
    return {key: x for key, x in vars(one).items() if isinstance(x, plain) and key not in CHANGED}
