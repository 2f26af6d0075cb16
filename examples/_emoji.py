"""Emoji pictures as training data: renders of the Noto Color Emoji font, and random variations of them.

The font (Noto Color Emoji) is free under the SIL Open Font License 1.1, and anybody can see at a glance whether a
sampled emoji is right. Training needs only the renders (`.npz`), not the font.

Legend: N glyphs, B batch, C channels, H and W pixels.
"""

import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

FONT_PIXELS = 109  # the only bitmap size in the font
GLYPH_PIXELS = 128  # twice the training size, so that a warped glyph can be smoothed by averaging

# Class name -> its glyphs. Names are everyday words; their order gives the class ids.
GLYPHS: dict[str, str] = {
    "cat": "🐱🐈",
    "dog": "🐶🐕",
    "rabbit": "🐰🐇",
    "panda": "🐼",
    "frog": "🐸",
    "pig": "🐷🐖",
    "penguin": "🐧",
    "elephant": "🐘",
    "turtle": "🐢",
    "fish": "🐟🐠🐡",
    "octopus": "🐙",
    "whale": "🐳🐋",
    "butterfly": "🦋",
    "ladybug": "🐞",
    "dinosaur": "🦕🦖",
    "mushroom": "🍄",
    "flower": "🌸🌼🌺🌻",
    "tree": "🌳🌲",
    "cactus": "🌵",
    "apple": "🍎🍏",
    "banana": "🍌",
    "strawberry": "🍓",
    "watermelon": "🍉",
    "pineapple": "🍍",
    "carrot": "🥕",
    "pizza": "🍕",
    "hamburger": "🍔",
    "ice cream": "🍦🍨",
    "donut": "🍩",
    "cake": "🎂🍰",
    "sun": "☀🌞",
    "moon": "🌙",
    "star": "⭐",
    "heart": "❤🧡💛💚💙💜🖤🤎🩷🩵",
    "rainbow": "🌈",
    "snowman": "⛄",
    "house": "🏠🏡",
    "car": "🚗🚙🚘",
    "airplane": "✈🛩",
    "rocket": "🚀",
    "sailboat": "⛵",
    "balloon": "🎈",
    "guitar": "🎸",
    "umbrella": "☂☔",
    "crown": "👑",
    "book": "📕📗📘📙",
    "robot": "🤖",
    "pumpkin": "🎃",
}

# Things of any colour: augmentation rotates their hue by any angle, and the hue of other classes slightly.
ANY_COLOUR = frozenset({"balloon", "car", "umbrella"})
HUE_JITTER = 0.12  # radians


@dataclass(frozen=True)
class GlyphBank:
    """All glyphs, premultiplied by their alpha, with the first glyph and the number of glyphs of each class."""

    rgba: Tensor  # NCHW
    first: Tensor
    count: Tensor
    hue: Tensor  # largest rotation of the hue for each class, in radians
    names: tuple[str, ...]


def render_glyph(font: ImageFont.FreeTypeFont, glyph: str) -> np.ndarray:
    """Return one glyph, cropped to its ink and centred in a square with a thin margin."""
    page = Image.new("RGBA", (2 * FONT_PIXELS, 2 * FONT_PIXELS))
    ImageDraw.Draw(page).text((16, 16), glyph, font=font, embedded_color=True)
    box = page.getchannel("A").getbbox()
    if box is None:
        raise ValueError(f"got {glyph!r}, expected a glyph that the font can draw")
    ink = page.crop(box)
    side = round(max(ink.size) * 1.06)
    square = Image.new("RGBA", (side, side))
    square.paste(ink, ((side - ink.width) // 2, (side - ink.height) // 2))
    return np.asarray(square.resize((GLYPH_PIXELS, GLYPH_PIXELS), Image.Resampling.LANCZOS))


def render_font(font_path: Path, out: Path) -> None:
    """Write all glyphs (RGBA), their class ids and the class names to one compressed file."""
    font = ImageFont.truetype(str(font_path), FONT_PIXELS)
    pairs = [(class_id, glyph) for class_id, glyphs in enumerate(GLYPHS.values()) for glyph in glyphs]
    rgba = np.stack([render_glyph(font, glyph) for _, glyph in pairs])
    out.parent.mkdir(parents=True, exist_ok=True)
    ids = np.array([class_id for class_id, _ in pairs], dtype=np.int64)
    np.savez_compressed(out, rgba=rgba, class_ids=ids, names=np.array(list(GLYPHS)))
    print(f"{out}: {len(pairs)} glyphs of {len(GLYPHS)} classes, {out.stat().st_size / 1e6:.2f} MB")


def load_bank(path: Path, device: torch.device) -> GlyphBank:
    """Read the file of `render_font`, in which the glyphs of a class are consecutive."""
    with np.load(path) as data:
        rgba, ids, names = data["rgba"], torch.from_numpy(data["class_ids"]), tuple(data["names"].tolist())
    rgba_NCHW = torch.from_numpy(rgba).to(device).permute(0, 3, 1, 2).float() / 255
    # With premultiplied colours, interpolation does not mix in the colour of transparent pixels.
    colour, alpha = rgba_NCHW.split([3, 1], dim=1)
    count = torch.bincount(ids, minlength=len(names))
    hue = torch.tensor([math.pi if name in ANY_COLOUR else HUE_JITTER for name in names])
    return GlyphBank(
        rgba=torch.cat([colour * alpha, alpha], dim=1).contiguous(),
        first=(count.cumsum(0) - count).to(device),
        count=count.to(device),
        hue=hue.to(device),
        names=names,
    )


def draw_batch(bank: GlyphBank, batch: int, *, pixels: int, rng: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return new pictures in [-1, 1] and their class ids; classes are equally likely, and so are a class's glyphs."""
    device = bank.first.device
    labels_B = torch.randint(len(bank.names), (batch,), device=device, generator=rng)
    within = torch.rand(batch, device=device, generator=rng) * bank.count[labels_B]
    warped = warp(bank.rgba[bank.first[labels_B] + within.long()], rng)
    colour, alpha = F.avg_pool2d(warped, GLYPH_PIXELS // pixels).split([3, 1], dim=1)
    recolour = colour_matrices(bank.hue[labels_B], rng)
    colour = torch.einsum("bij,bjhw->bihw", recolour, colour).clamp(min=0).minimum(alpha)
    images = colour + (1 - alpha) * backgrounds(batch, pixels, rng)
    return images * 2 - 1, labels_B


def uniform(low: float, high: float, *shape: int, rng: torch.Generator) -> Tensor:
    return torch.rand(*shape, device=rng.device, generator=rng) * (high - low) + low


def warp(rgba_BCHW: Tensor, rng: torch.Generator) -> Tensor:
    """Scale, rotate, shift and mirror each glyph by its own random amounts."""
    batch = rgba_BCHW.shape[0]
    angle = uniform(-1, 1, batch, rng=rng) * math.radians(12)
    shrink = 1 / uniform(0.78, 1.0, batch, rng=rng)
    mirror = torch.where(uniform(0, 1, batch, rng=rng) < 0.5, -1.0, 1.0)
    cos, sin = angle.cos() * shrink, angle.sin() * shrink
    shift = uniform(-0.06, 0.06, 2, batch, rng=rng)
    rows = [torch.stack([cos * mirror, -sin * mirror, shift[0]], -1), torch.stack([sin, cos, shift[1]], -1)]
    grid = F.affine_grid(torch.stack(rows, dim=1), list(rgba_BCHW.shape), align_corners=False)
    return F.grid_sample(rgba_BCHW, grid, mode="bilinear", padding_mode="zeros", align_corners=False)


def colour_matrices(hue_B: Tensor, rng: torch.Generator) -> Tensor:
    """Return random changes of brightness, saturation and hue (a rotation about grey) as one 3x3 matrix per picture."""
    batch, device = hue_B.shape[0], hue_B.device
    angle = (uniform(-1, 1, batch, rng=rng) * hue_B)[:, None, None]
    saturation = uniform(0.85, 1.15, batch, 1, 1, rng=rng)
    brightness = uniform(0.9, 1.08, batch, 1, 1, rng=rng)
    grey = torch.full((3, 3), 1 / 3, device=device)
    cross = torch.tensor([[0.0, -1.0, 1.0], [1.0, 0.0, -1.0], [-1.0, 1.0, 0.0]], device=device) / math.sqrt(3)
    # Rodrigues' rotation about (1, 1, 1): the part of a colour that is not grey rotates by the angle.
    turned = (torch.eye(3, device=device) - grey) * angle.cos() + cross * angle.sin()
    return brightness * (grey + saturation * turned)


def backgrounds(batch: int, pixels: int, rng: torch.Generator) -> Tensor:
    """Return white or pastel backgrounds; half of them fade to a second pastel from top to bottom."""
    strength = uniform(0.1, 0.45, batch, 1, 1, rng=rng) * (uniform(0, 1, batch, 1, 1, rng=rng) > 0.15)
    top_bottom = 1 - strength * uniform(0, 1, batch, 2, 3, rng=rng)
    top = top_bottom[:, 0]
    fades = uniform(0, 1, batch, 1, rng=rng) < 0.5
    bottom = torch.where(fades, top_bottom[:, 1], top)
    ramp = torch.linspace(0, 1, pixels, device=rng.device)[None, None, :, None]
    return torch.lerp(top[:, :, None, None], bottom[:, :, None, None], ramp).expand(-1, -1, -1, pixels)
