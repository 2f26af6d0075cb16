"""A small classifier that says what is on a picture: which thing, in which colour, on which background, and how drawn.

It is trained on decoded pictures of all pairs of colour and name, so that it can judge those that the model never saw.

Legend: B batch, C channels, H and W pixels.
"""

import torch
import torch.nn.functional as F
from _networks import autocast
from _prompts import NONE, Facts
from torch import Tensor, nn

WIDTHS = (32, 64, 128, 256)
ASPECTS = ("name", "colour", "background", "lines")


class Judge(nn.Module):
    """Four convolutions of stride 2, the mean over positions, and a linear head for each aspect."""

    def __init__(self, names: int) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for before, width in zip((3, *WIDTHS), WIDTHS, strict=False):
            layers += [nn.Conv2d(before, width, 3, stride=2, padding=1), nn.GroupNorm(8, width), nn.GELU()]
            layers += [nn.Conv2d(width, width, 3, padding=1), nn.GroupNorm(8, width), nn.GELU()]
        self.body = nn.Sequential(*layers)
        classes = {"name": names, "colour": NONE, "background": NONE, "lines": 2}
        self.heads = nn.ModuleDict({aspect: nn.Linear(WIDTHS[-1], classes[aspect]) for aspect in ASPECTS})

    def forward(self, images_BCHW: Tensor) -> dict[str, Tensor]:
        """Return the logits of each aspect. images: in [-1, 1]."""
        with autocast(images_BCHW.device):
            body_BCHW = self.body(images_BCHW)
        body_BC = body_BCHW.float().mean((2, 3))
        return {aspect: head(body_BC) for aspect, head in self.heads.items()}


def expected(facts: Facts, lines: bool) -> dict[str, Tensor]:
    """Return the class of each aspect; `NONE` where the prompt does not say it."""
    drawn = torch.full_like(facts.name_B, int(lines))
    return {"name": facts.name_B, "colour": facts.colour_B, "background": facts.background_B, "lines": drawn}


def judge_loss(judge: Judge, images: Tensor, name: Tensor, colour: Tensor, background: Tensor, lines: Tensor) -> Tensor:
    """Return the sum of the cross entropies; attributes that a prompt leaves out do not count."""
    wanted = {"name": name, "colour": colour, "background": background, "lines": lines}
    losses = []
    for aspect, logits in judge(images).items():
        unsaid = NONE if aspect in ("colour", "background") else -1
        losses.append(F.cross_entropy(logits, wanted[aspect], ignore_index=unsaid, label_smoothing=0.05))
    return torch.stack(losses).sum()


@torch.no_grad()
def right(judge: Judge, images: Tensor, facts: Facts, *, lines: bool = False) -> dict[str, Tensor]:
    """Return for each aspect, and for "all" of them, whether each picture shows what its prompt says."""
    answers, logits = {}, judge(images)
    for aspect, wanted in expected(facts, lines).items():
        unsaid = wanted == NONE if aspect in ("colour", "background") else torch.zeros_like(wanted, dtype=torch.bool)
        answers[aspect] = (logits[aspect].argmax(1) == wanted) | unsaid
    return answers | {"all": torch.stack(list(answers.values())).all(0)}
