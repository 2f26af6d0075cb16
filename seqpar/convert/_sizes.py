"""Sizes of DiT and Large-DiT that the shapes of an original checkpoint do not state: attention heads."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from seqpar.loop.models._label_dit import confirm


def heads_of(
    kind: str, width: int, layers: int, args: Mapping[str, Any], heads: int | None, released: Iterable[Any]
) -> int:
    """Return the number of attention heads, never guessed.

    args: arguments of the training script, which may have num_heads. heads: the user's --heads. released: configs of
    published models, recognised by width and depth. Raises ValueError if nothing states the number, or if it does not
    fit.
    """
    trained = args.get("num_heads")
    if isinstance(trained, int):
        confirm(kind, {"heads": heads}, {"heads": trained})
    by_size = {(config.width, config.num_layers): config.num_attention_heads for config in released}
    count = heads or (trained if isinstance(trained, int) else by_size.get((width, layers)))
    if count is None:
        raise ValueError(
            f"the file does not state the attention heads of this {kind} (width {width}, {layers} layers), and no "
            f"released model has this size; add --heads"
        )
    if count < 1 or width % count or width // count % 2:
        raise ValueError(f"{count} heads do not divide a {kind} of width {width} into heads of equal, even width")
    return count


def confirm_heads(kind: str, args: Mapping[str, Any], heads: int | None, model: Any) -> None:
    """Raise ValueError if --heads or args.num_heads contradict the released model that args.model names."""
    for what, count in {"--heads": heads, "args.num_heads": args.get("num_heads")}.items():
        if count not in (None, model.num_attention_heads):
            raise ValueError(
                f"{what} is {count}, but args.model is {args['model']}, a {kind} of {model.num_attention_heads} heads"
            )
