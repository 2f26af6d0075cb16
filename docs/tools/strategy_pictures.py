"""Draws how each strategy moves data between four ranks: who holds what, and who sends it to whom.

    python -m docs.tools.strategy_pictures --write    # docs/pictures/NAME.svg

A picture is a list of moments; what is sent between two of them follows from who holds which cell before and after.
`tests/docs/test_pages.py` compares it with what the strategy's `FACTS` say that each rank sends.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).parents[2] / "docs" / "pictures"
RANKS = range(4)
Cell = tuple[int, int]  # the rank whose tokens it has, and the head
Held = tuple[frozenset[Cell], ...]  # of each rank
TOKENS = tuple(frozenset((rank, head) for head in RANKS) for rank in RANKS)
HEADS = tuple(frozenset((token, head) for token in RANKS) for head in RANKS)
ALL = (frozenset().union(*TOKENS),) * 4
NONE = (frozenset[Cell](),) * 4


@dataclass(frozen=True)
class Moment:
    """What the ranks hold: tensor -> its cells on each rank. after: how it came there from the moment before."""

    text: str
    held: Mapping[str, Held]
    after: str = ""


@dataclass(frozen=True)
class Message:
    """Cells of one tensor that a rank sends to another one."""

    sender: int
    receiver: int
    tensor: str
    cells: frozenset[Cell]


def around_ring(held: Held, places: int, ring: tuple[tuple[int, ...], ...]) -> Held:
    """Return what ranks hold when everything was sent so many places around each ring."""
    moved = dict[int, frozenset[Cell]]()
    for members in ring:
        for index, rank in enumerate(members):
            moved[rank] = held[members[(index - places) % len(members)]]
    return tuple(moved[rank] for rank in RANKS)


RING, PAIRS = (tuple(RANKS),), ((0, 2), (1, 3))
HALVES = tuple(
    frozenset((token, head) for token in RANKS for head in RANKS if token // 2 == rank // 2 and head // 2 == rank % 2)
    for rank in RANKS
)
OWN = "Each rank projects its own tokens, for all heads"
BACK = "2nd exchange: the output goes back"
GATHER = "One exchange: keys and values go to every rank"
TRAVEL = "Keys and values go to the next rank"
PICTURES: dict[str, tuple[Moment, ...]] = {
    "ulysses": (
        Moment(OWN, {"q": TOKENS, "k v": TOKENS}),
        Moment(
            "Each attends to all tokens, for some heads",
            {"q": HEADS, "k v": HEADS, "out": HEADS},
            "1st exchange: heads for tokens",
        ),
        Moment("Each goes on with its own tokens", {"out": TOKENS}, BACK),
    ),
    "ring": (
        Moment("Each attends to its own block", {"q": TOKENS, "k v": TOKENS}),
        *(
            Moment(text, {"q": TOKENS, "k v": around_ring(TOKENS, step, RING)}, TRAVEL)
            for step, text in enumerate(
                ("Each attends to the block that came", "and so on", "until it saw all blocks"), 1
            )
        ),
        Moment("Results were merged; the output is in its place", {"out": TOKENS}),
    ),
    "usp": (
        Moment(OWN, {"q": TOKENS, "k v": TOKENS}),
        Moment(
            "Each attends to the tokens of its pair",
            {"q": HALVES, "k v": HALVES},
            "Heads for tokens, in pairs 0 1 and 2 3",
        ),
        Moment(
            "and to those of the other pair, and merges",
            {"q": HALVES, "k v": around_ring(HALVES, 1, PAIRS), "out": HALVES},
            "A ring of two: 0 2 and 1 3",
        ),
        Moment("Each goes on with its own tokens", {"out": TOKENS}, "The output goes back in pairs"),
    ),
    "kv_gather": (
        Moment(OWN, {"q": TOKENS, "k v": TOKENS}),
        Moment("Queries stay; the output is in its place", {"q": TOKENS, "k v": ALL, "out": TOKENS}, GATHER),
    ),
    "kv_first": (
        Moment("1st product: keys", {"q": NONE, "k": TOKENS, "v": NONE}),
        Moment("2nd product meanwhile: values", {"q": NONE, "k": ALL, "v": TOKENS}, "Keys go to every rank"),
        Moment("3rd product meanwhile: queries", {"q": TOKENS, "k": ALL, "v": ALL}, "Values go to every rank"),
        Moment("The output is in its place", {"out": TOKENS}),
    ),
}
LATENT = (
    Moment("Rank 0 encodes the prompt and draws the noise", {"latent": (ALL[0], *NONE[1:])}),
    Moment("Its inputs go to all", {"latent": ALL}, "Broadcast, once a run"),
    Moment("Each keeps its own tokens; a block projects them", {"latent": TOKENS, "k v": TOKENS}),
    Moment(
        "and attends to all tokens (here by kv_gather)",
        {"latent": TOKENS, "k v": ALL},
        "An exchange, in each block of each step",
    ),
    Moment("After the last step the latent is whole", {"latent": ALL}, "Gather, once a run"),
    Moment("Each decodes a strip, with its neighbours' edges", {"picture": TOKENS}),
    Moment("Rank 0 writes the file", {"picture": ALL}, "Gather, once a run"),
)


def messages(before: Moment, after: Moment) -> list[Message]:
    """Return what is sent between two moments: each cell that a rank gets comes from the nearest rank that had it."""
    sent = list[Message]()
    for tensor, held in after.held.items():
        had = before.held.get(tensor)
        if had is None or not after.after:
            continue
        for receiver in RANKS:
            parts = defaultdict[int, set[Cell]](set)
            for cell in held[receiver] - had[receiver]:
                senders = [rank for rank in RANKS if cell in had[rank]]
                if senders:
                    parts[min(senders, key=lambda rank: (receiver - rank) % 4)].add(cell)
            sent += [Message(sender, receiver, tensor, frozenset(cells)) for sender, cells in sorted(parts.items())]
    return sent


# Drawing -------------------------------------------------------------------------------------------------------

WIDTH, CELL, GAP, TITLE, LABEL, BAND = 400, 6, 5, 24, 14, 62
CENTRES = tuple(52 + 98 * rank + 1 for rank in RANKS)
STYLE = """
.card{fill:#fff;stroke:#c8ccd4}.text{fill:#20242c;font:13px sans-serif}.small{fill:#555b66;font:11px sans-serif}
.none{fill:#eceef2}.t0{fill:#0072b2}.t1{fill:#e69f00}.t2{fill:#009e73}.t3{fill:#cc79a7}
.s0{stroke:#0072b2}.s1{stroke:#c98a00}.s2{stroke:#009e73}.s3{stroke:#cc79a7}line{stroke-width:1.8}
@media (prefers-color-scheme:dark){.card{fill:#20242c;stroke:#454b57}.text{fill:#eceef2}.small{fill:#b4bac6}
.none{fill:#363c47}.t0{fill:#4aa8e0}.s0{stroke:#4aa8e0}}
"""


def svg(moments: tuple[Moment, ...], alt: str) -> str:
    """Return the picture of these moments from top to bottom."""
    body, y = list[str](), 34
    body += [_text(x, 20, f"rank {rank}", "text", "middle") for rank, x in zip(RANKS, CENTRES, strict=True)]
    for index, moment in enumerate(moments):
        if index:
            drawn, y = _band(moments[index - 1], moment, y)
            body += drawn
        drawn, y = _moment(moment, y)
        body += drawn
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {y + 8}" width="{WIDTH}" role="img">'
    empty = "".join(_cell(0, 0, cell).replace(f"t{cell[0]}", "none") for cell in sorted(ALL[0]))
    grid, size = f'<defs><g id="none">{empty}</g></defs>', f'width="{WIDTH - 1}" height="{y + 7}"'
    card = f'<rect class="card" x=".5" y=".5" {size} rx="6"/>'
    return "\n".join((head, f"<title>{alt}</title><style>{STYLE}</style>", grid, card, *body, "</svg>")) + "\n"


def _moment(moment: Moment, y: int) -> tuple[list[str], int]:
    drawn = [_text(WIDTH / 2, y + 14, moment.text, "text", "middle")]
    top, width = y + TITLE + LABEL, 4 * CELL
    for rank, centre in zip(RANKS, CENTRES, strict=True):
        left = centre - (len(moment.held) * (width + GAP) - GAP) / 2
        for place, (tensor, held) in enumerate(moment.held.items()):
            x = left + place * (width + GAP)
            drawn.append(_text(x + width / 2, top - 4, tensor, "small", "middle"))
            drawn.append(f'<use href="#none" x="{x:g}" y="{top}"/>')
            drawn += [_cell(x, top, cell) for cell in sorted(held[rank])]
    return drawn, top + width + 6


def _cell(x: float, y: float, cell: Cell) -> str:
    token, head = cell
    place = f'x="{x + head * CELL:g}" y="{y + token * CELL:g}"'
    return f'<rect class="t{token}" {place} width="{CELL - 1}" height="{CELL - 1}"/>'


def _band(before: Moment, after: Moment, y: int) -> tuple[list[str], int]:
    """Draw who sends to whom, each line in the colour of its sender."""
    pairs = sorted({(message.sender, message.receiver) for message in messages(before, after)})
    if not after.after:
        return [], y + 8
    drawn = [_text(WIDTH / 2, y + 13, after.after, "small", "middle")]
    for sender, receiver in pairs:
        start, end = CENTRES[sender], CENTRES[receiver] - 9 + 6 * sender
        drawn.append(f'<line class="s{sender}" x1="{start}" y1="{y + 20}" x2="{end}" y2="{y + BAND - 7}"/>')
        drawn.append(f'<circle class="t{sender}" cx="{end}" cy="{y + BAND - 6}" r="2.6"/>')
    return drawn, y + (BAND if pairs else 20)


def _text(x: float, y: float, text: str, kind: str, anchor: str) -> str:
    return f'<text class="{kind}" x="{x:g}" y="{y:g}" text-anchor="{anchor}">{text}</text>'


def pictures() -> dict[str, str]:
    drawn = {name: svg(moments, f"What four ranks hold and send by {name}") for name, moments in PICTURES.items()}
    return {**drawn, "latent": svg(LATENT, "The way of a latent over four ranks")}


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for name, text in pictures().items():
        if "--write" in sys.argv:
            (FOLDER / f"{name}.svg").write_text(text, encoding="utf-8")
        print(name, len(text))
