"""Attention processors: what one is set to, and ours for models of diffusers whose own cannot be split.

diffusers keeps settings in processors, such as the scale of an IP-adapter and the attention backend, and changes them
in place. Mochi's processor picks the valid text tokens of each batch row by their values, which waits for the device
and gives every rank another number of keys. HunyuanVideo 1.5's makes a mask for all pairs of tokens. Those here mask
keys instead, for all rows at once.
"""

from __future__ import annotations

from enum import Enum
from typing import Any

import torch
from torch import Tensor, nn


def rotated(x_BlHD: Tensor, cos_lHD2: Tensor, sin_lHD2: Tensor) -> Tensor:
    """Return the tokens with interleaved pairs rotated, computed in fp32; each head has its own angles."""
    even, odd = x_BlHD.float().unflatten(-1, (-1, 2)).unbind(-1)
    first, second = even * cos_lHD2 - odd * sin_lHD2, even * sin_lHD2 + odd * cos_lHD2
    return torch.stack((first.to(x_BlHD.dtype), second.to(x_BlHD.dtype)), dim=-1).flatten(-2)


_PLAIN = (type(None), bool, int, float, complex, str, bytes, Enum, torch.dtype, torch.device)
_OF_MODULES = frozenset(vars(nn.Module()))  # attributes of every module; parameters and submodules are not settings


def settings(processor: Any) -> str:
    """Return a processor's public attributes with plain values as a text, which is equal on all ranks."""
    left_out = _OF_MODULES if isinstance(processor, nn.Module) else ()
    every = {name: _shown(value) for name, value in getattr(processor, "__dict__", {}).items() if name not in left_out}
    return ", ".join(f"{name} {text}" for name, text in every.items() if name[0] != "_" and text != "...")


def _shown(value: Any) -> str:
    """Return a text without addresses; "..." for what is neither a plain value nor a container."""
    if isinstance(value, dict):
        return f"{{{', '.join(f'{_shown(key)}: {_shown(each)}' for key, each in value.items())}}}"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_shown, value))}]"
    if isinstance(value, (set, frozenset)):
        return f"{{{', '.join(sorted(map(_shown, value)))}}}"
    return str(value) if isinstance(value, _PLAIN) else "..."


def projected_heads(x_BlE: Tensor, layers: tuple[Any, Any, Any], norms: tuple[Any, Any], heads: int) -> list[Tensor]:
    """Return q, k and v (B, l, H, D) of a stream, q and k normalised over each head where there are norms."""
    projected = [layer(x_BlE).unflatten(2, (heads, -1)) for layer in layers]
    return [x if norm is None else norm(x) for x, norm in zip(projected, (*norms, None), strict=True)]
