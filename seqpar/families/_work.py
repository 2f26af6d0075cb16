"""The operations of blocks that several families have, for the planner: what `work` of their files is made of.

An activation is in the product before it, so that it takes no separate pass.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from seqpar.types.facts import Blocks, Cross, Gemms, Work


def double(count: int, width: int, hidden: int, up: int = 1) -> Blocks:
    """Return blocks in which text and image have their own weights, attend together, and have an MLP each.

    up: products that enter the MLP, 2 for SwiGLU.
    """
    gemms = ((width, 3 * width), (width, width), (width, up * hidden), (hidden, width))
    modulation = ((width, 6 * width),) * 2
    return Blocks(count, gemms, passes=(4 * width, 4 * width), apart=(gemms,), modulation=modulation)


def parallel(count: int, width: int, hidden: int, up: int = 1) -> Blocks:
    """Return blocks of one stream in which attention and an MLP are side by side; see `double`.

    Their output takes 2 E more than a gated norm, because two products add up.
    """
    return Blocks(
        count=count,
        gemms=((width, 3 * width), (width, up * hidden), (width + hidden, width)),
        passes=(6 * width,),
        modulation=((width, 3 * width),),
        beside=((width, up * hidden), (hidden, width)),
    )


def crossed(config: Mapping[str, Any], hidden: int, area: int, text: int, sizes: Gemms) -> Work:
    """Return the operations of blocks that attend to the video, then to a text that is whole on every rank.

    hidden: the width of the MLP. area: values of a channel in a token. text: tokens of the text. sizes: those of the
    layers that embed the text, then the timestep.
    """
    heads, dim, layers = config["num_attention_heads"], config["attention_head_dim"], config["num_layers"]
    width, outputs = heads * dim, config.get("out_channels") or config["in_channels"]
    gemms = ((width, 3 * width), (width, width), (width, width), (width, width), (width, hidden), (hidden, width))
    passes, cross = (4 * width,) * 3, Cross(text, ((width, 2 * width),))
    of_text, of_time = sizes
    return Work(
        width=width,
        heads=heads,
        kv_heads=heads,
        head_dim=dim,
        blocks=(Blocks(layers, gemms, passes, cross=cross),),
        prepares=True,
        once=((config["in_channels"] * area, width), (width, outputs * area)),
        table=6 * width * layers + 2 * width,
        live=4 * width + 2 * hidden,
        text=(of_text, (width, width)),
        conditioning=(of_time, (width, width), (width, 6 * width)),
    )
