# pyright cannot infer the types of transformers' modules
# pyright: reportAttributeAccessIssue=false, reportPrivateImportUsage=false, reportArgumentType=false
"""Prompts and their pictures as training data: "a green frog on white", and the frog in green on white.

The grammar is [a] [colour] name [on colour]: each part in brackets may be missing, and the two colours differ. A glyph
in a named colour is its shading in that colour; without one it keeps its own. Four pairs of a colour and a name are
never drawn for training, so that they can show whether the model combines what it has learned.

Legend: B batch, C channels, H and W pixels, L text tokens, P prompts of the grammar.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise, product

import torch
import torch.nn.functional as F
from _emoji import GLYPH_PIXELS, GlyphBank, backgrounds, colour_matrices, uniform, warp
from torch import Tensor
from transformers import CLIPTokenizer, T5TokenizerFast

# name -> its red, green and blue, and how far shadows go to black and highlights to white
COLOURS: dict[str, tuple[float, float, float, float, float]] = {
    "red": (0.86, 0.15, 0.17, 0.60, 0.55),
    "orange": (0.98, 0.54, 0.08, 0.60, 0.55),
    "yellow": (0.99, 0.85, 0.15, 0.55, 0.60),
    "green": (0.22, 0.65, 0.26, 0.60, 0.55),
    "blue": (0.16, 0.40, 0.90, 0.60, 0.55),
    "purple": (0.52, 0.24, 0.76, 0.60, 0.55),
    "pink": (0.98, 0.52, 0.74, 0.50, 0.60),
    "brown": (0.47, 0.28, 0.15, 0.60, 0.45),
    "black": (0.15, 0.15, 0.17, 0.75, 0.35),
    "white": (0.91, 0.91, 0.92, 0.45, 0.80),
}
HELD_OUT = (("blue", "frog"), ("green", "penguin"), ("purple", "banana"), ("pink", "rocket"))
NONE = len(COLOURS)  # the index of a colour that a prompt does not name
SHORT, LONG = 32, 512  # T5's tokens of a prompt: all of the grammar fit into the first; FluxPipeline pads to the second
CLIP_TOKENS = 16  # CLIP looks back only, so what follows the end of a prompt has no effect
CLIP_LENGTH = 77  # to which FluxPipeline pads
CLIP_SPECIAL = ("<|startoftext|>", "<|endoftext|>")
NAMED = 0.85  # the share of prompts that name a colour, and of those that name a background


@dataclass(frozen=True)
class Facts:
    """What a batch of prompts says: indices of names, and of colours and backgrounds (`NONE`: not said)."""

    name_B: Tensor
    colour_B: Tensor
    background_B: Tensor

    def rows(self, chosen: Tensor | slice) -> "Facts":
        return Facts(self.name_B[chosen], self.colour_B[chosen], self.background_B[chosen])

    def all_said(self) -> Tensor:
        """Return whether each prompt names both colours."""
        return (self.colour_B < NONE) & (self.background_B < NONE)


@dataclass(frozen=True)
class Grammar:
    """All prompts of the grammar as tokens: row `index(facts)` of the tables; the last row is the empty prompt."""

    names: tuple[str, ...]
    clip_PL: Tensor
    t5_PL: Tensor
    held_out: Tensor  # whether a pair is held out: name x (colours and none)

    def index(self, facts: Facts, article_B: Tensor) -> Tensor:
        """Return the row of each prompt; article_B: whether it begins with "a" or "an"."""
        row = facts.name_B * (NONE + 1) + facts.colour_B
        return (row * (NONE + 1) + facts.background_B) * 2 + article_B.long()


def prompt_of(name: str, colour: str | None, background: str | None, article: bool = True) -> str:
    thing = name if colour is None else f"{colour} {name}"
    first = ("an " if thing[0] in "aeiou" else "a ") if article else ""
    return f"{first}{thing}" + ("" if background is None else f" on {background}")


def all_prompts(names: tuple[str, ...]) -> list[str]:
    """Return the prompts in the order of `Grammar.index`."""
    colours = (*COLOURS, None)
    return [prompt_of(*words) for words in product(names, colours, colours, (False, True))]


# --- tokenizers ---


def build_tokenizers(names: tuple[str, ...]) -> tuple[CLIPTokenizer, T5TokenizerFast]:
    """Return small tokenizers of CLIP's and T5's kind, which have the words of the grammar and all letters."""
    words = sorted({word for text in all_prompts(names) for word in text.split()})
    letters = [chr(code) for code in range(ord("a"), ord("z") + 1)]
    return _clip_tokenizer(words, letters), _t5_tokenizer(words, letters)


def _clip_tokenizer(words: list[str], letters: list[str]) -> CLIPTokenizer:
    merges = _merges(words)
    tokens = [*letters, *(f"{letter}</w>" for letter in letters), *("".join(pair) for pair in merges), *CLIP_SPECIAL]
    vocab = {token: index for index, token in enumerate(tokens)}
    return CLIPTokenizer(vocab=vocab, merges=merges, model_max_length=CLIP_LENGTH)


def _merges(words: list[str]) -> list[tuple[str, str]]:
    """Return the pairs that byte pair encoding joins, in order, until every word is one token.

    The trainer of the tokenizers library breaks ties between pairs in another way in every process, so that the tokens
    of one training would mean other words in the next.
    """
    spelled, merges = [[*word[:-1], f"{word[-1]}</w>"] for word in words], []
    while counts := Counter(pair for pieces in spelled for pair in pairwise(pieces)):
        merges.append(max(counts, key=lambda pair: (counts[pair], pair)))
        spelled = [_joined(pieces, merges[-1]) for pieces in spelled]
    return merges


def _joined(pieces: list[str], pair: tuple[str, str]) -> list[str]:
    """Return a word's pieces with this pair as one piece, wherever it stands."""
    joined: list[str] = []
    for piece in pieces:
        if joined and (joined[-1], piece) == pair:
            joined[-1] += piece
        else:
            joined.append(piece)
    return joined


def _t5_tokenizer(words: list[str], letters: list[str]) -> T5TokenizerFast:
    special = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("\u2581", -8.0)]
    vocab = [*special, *((f"\u2581{word}", -4.0) for word in words if len(word) > 1), *((a, -10.0) for a in letters)]
    return T5TokenizerFast(vocab=vocab, extra_ids=0, model_max_length=LONG)


def build_grammar(names: tuple[str, ...], clip: CLIPTokenizer, t5: T5TokenizerFast, device: torch.device) -> Grammar:
    texts = [*all_prompts(names), ""]
    padded = {"padding": "max_length", "truncation": True, "return_tensors": "pt"}
    held_out = torch.zeros(len(names), NONE + 1, dtype=torch.bool)
    for colour, name in HELD_OUT:
        held_out[names.index(name), tuple(COLOURS).index(colour)] = True
    return Grammar(
        names=names,
        clip_PL=clip(texts, max_length=CLIP_TOKENS, **padded).input_ids.to(device),
        t5_PL=t5(texts, max_length=SHORT, **padded).input_ids.to(device),
        held_out=held_out.to(device),
    )


# --- pictures ---


def draw_facts(grammar: Grammar, batch: int, rng: torch.Generator, *, held_out: bool) -> Facts:
    """Return random facts; held_out: whether the pairs that the model is not trained on may be among them."""
    device = rng.device

    def integers(most: int) -> Tensor:
        return torch.randint(most, (batch,), device=device, generator=rng)

    def said() -> Tensor:
        return torch.rand(batch, device=device, generator=rng) < NAMED

    name, colour = integers(len(grammar.names)), integers(NONE)
    if not held_out:  # another colour, which is held out with no name of these
        colour = torch.where(grammar.held_out[name, colour], tuple(COLOURS).index("orange"), colour)
    background = (colour + 1 + integers(NONE - 1)) % NONE  # never the same colour
    return Facts(name, colour.where(said(), NONE), background.where(said(), NONE))


def facts_of_pairs(grammar: Grammar, pairs: Sequence[tuple[str, str]], rng: torch.Generator) -> Facts:
    """Return facts of these pairs of a colour and a name, on random backgrounds."""
    name_B = torch.tensor([grammar.names.index(name) for _, name in pairs], device=rng.device)
    colour_B = torch.tensor([tuple(COLOURS).index(colour) for colour, _ in pairs], device=rng.device)
    shift_B = torch.randint(1, NONE, (len(pairs),), device=rng.device, generator=rng)
    return Facts(name_B, colour_B, (colour_B + shift_B) % NONE)


def draw_pictures(
    bank: GlyphBank, facts: Facts, *, pixels: int, rng: torch.Generator, outlined: bool = False
) -> Tensor:
    """Return new pictures of these facts in [-1, 1]; outlined: only lines, in the colour, on the background."""
    names = facts.name_B
    within = torch.rand(len(names), device=names.device, generator=rng) * bank.count[names]
    warped = warp(bank.rgba[bank.first[names] + within.long()], rng)
    ground = _grounds(facts.background_B, pixels, rng)
    if outlined:
        return torch.lerp(ground, _line_colours(facts.colour_B), _lines(warped, pixels)) * 2 - 1
    colour, alpha = F.avg_pool2d(warped, GLYPH_PIXELS // pixels).split([3, 1], dim=1)
    recolour = colour_matrices(bank.hue[names] * 0.5, rng)
    own = torch.einsum("bij,bjhw->bihw", recolour, colour).clamp(min=0).minimum(alpha)
    named = (facts.colour_B < NONE)[:, None, None, None]
    return torch.where(named, _tinted(colour, alpha, facts.colour_B), own) * 2 + (1 - alpha) * ground * 2 - 1


def _table(device: torch.device) -> Tensor:
    """Return shadow, colour and highlight of each colour, and grey for no colour (11, 3, 3)."""
    values = torch.tensor([*COLOURS.values(), (0.35, 0.35, 0.38, 0.5, 0.5)], device=device)
    mid, dark, light = values[:, :3], values[:, 3:4], values[:, 4:5]
    return torch.stack([mid * (1 - dark), mid, mid + (1 - mid) * light], dim=1)


def _shading(colour: Tensor, alpha: Tensor) -> Tensor:
    """Return a glyph's light and shadow in [0, 1], about 0.5; a flat glyph stays flat. colour: premultiplied."""
    light = (colour * torch.tensor([0.3, 0.59, 0.11], device=colour.device)[:, None, None]).sum(1, keepdim=True)
    area = alpha.sum((2, 3), keepdim=True)
    mean = light.sum((2, 3), keepdim=True) / area
    light = light / alpha.clamp(min=1e-3)
    spread = (alpha * (light - mean).square()).sum((2, 3), keepdim=True).div(area).sqrt()
    return (0.5 + 0.25 * (light - mean) / spread.clamp(min=0.08)).clamp(0, 1)


def _tinted(colour: Tensor, alpha: Tensor, colour_B: Tensor) -> Tensor:
    """Return the glyph's shading between shadow, colour and highlight of the named colour, premultiplied."""
    shade = _shading(colour, alpha)
    dark, mid, light = (each[:, :, None, None] for each in _table(colour.device)[colour_B].unbind(1))
    return alpha * torch.where(shade < 0.5, torch.lerp(dark, mid, 2 * shade), torch.lerp(mid, light, 2 * shade - 1))


def _lines(warped: Tensor, pixels: int) -> Tensor:
    """Return how much of each pixel is covered by the lines around and inside a glyph."""
    colour, alpha = warped.split([3, 1], dim=1)
    drawn = torch.cat([alpha, 0.9 * alpha * _shading(colour, alpha)], dim=1)
    thick = F.max_pool2d(drawn, 5, 1, 2) + F.max_pool2d(-drawn, 5, 1, 2)
    return F.avg_pool2d((2.2 * thick.amax(1, keepdim=True) - 0.25).clamp(0, 1), GLYPH_PIXELS // pixels)


def _line_colours(colour_B: Tensor) -> Tensor:
    return _table(colour_B.device)[colour_B, 1][:, :, None, None]


def _grounds(background_B: Tensor, pixels: int, rng: torch.Generator) -> Tensor:
    """Return the named backgrounds, each a little lighter or darker, and pastel ones where none is named."""
    pastel = backgrounds(len(background_B), pixels, rng)
    plain = _line_colours(background_B) + uniform(-0.04, 0.04, len(background_B), 1, 1, 1, rng=rng)
    return torch.where((background_B < NONE)[:, None, None, None], plain.clamp(0, 1), pastel)
