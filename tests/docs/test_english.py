"""Tests that texts use the field's nouns and verbs: the riddles of earlier versions stay rare."""

from __future__ import annotations

import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

from tests.support.pages import FENCE, pages
from tests.support.structure import files

MOST = 40  # per 100,000 words of code; well-edited packages have none
MOST_ON_PAGES = 20
PATTERNS = [
    r", expected (none|neither|it|them|both|those|these|one(?! of [{a-z])|some(?! of))\b",
    r"\bexpected (ones?|those|that|it) (that|which|with|from|to|for|less)\b",
    r"\b(in vain|anew|given up|nobody|last words|signs? of life|everyone's|one after the other)\b",
    r"\bwhen it wins\b|\bsee `[^`]+`\.?$",
    r"\b(is|are|was|were|be|been) told\b|\btold (apart|by|of|from)\b",
    r"\btells? (of|that|what|whether|where|which|why|how|both|apart|it|them)\b",
    (
        r"\bwhat (ends|comes|is (told|known|kept|there)|was made|has come|they (are|have|make|made|take|hold)|"
        r"it (has|makes|made|takes|holds|is given)|others (have|put|keep)|a \w+ (makes|made|is|has|does|"
        r"holds))\b"
    ),
    r"\bof (others|theirs|ours|yours|its own|their own)\b(?! (size|accord))",
    r"\b(the|all) ranks (end|ended|ends|speak|spoke)\b|\bends? (the|all) (ranks|child|server)\b",
    (
        r"\b(ranks|every rank) alike\b|\balike (however|whatever)\b|\bhowever many\b|\bwhatever the (number|"
        r"size|group|strategy)\b"
    ),
    (
        r"\b(once|twice|ms|milliseconds|seconds?|bytes|calls|exchanges?|numbers?|one|two|three) an? (step|"
        r"call|block|rank|token|row|layer|picture|image|GPU|host|head|pixel)\b"
    ),
    r"\bround(s|ed)? (otherwise|alike)\b|\bdo(es)? no harm\b|\bin words\b|\bas far as\b",
    r"\b(has|have) (come|gone)\b(?! (from|through))",
    r"\bmakes? (pictures|videos|a picture|a video)\b",
]
RIDDLES = [re.compile(pattern, re.IGNORECASE) for pattern in PATTERNS]
TEXTS = {tokenize.COMMENT, tokenize.STRING, getattr(tokenize, "FSTRING_MIDDLE", tokenize.STRING)}


def texts(source: str) -> Iterator[str]:
    """Yield comments, docstrings and messages of a Python file, without their code spans."""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type in TEXTS and " " in token.string:
            prose = token.type == tokenize.COMMENT or token.string.lstrip("rbf").startswith('"""')
            text = re.sub(r"`[^`\n]+`", "`X`", token.string) if prose else token.string
            yield re.sub(r"\s+", " ", text)


def paragraphs(page: str) -> Iterator[str]:
    """Yield the paragraphs of a page, without its blocks and code spans."""
    prose = re.sub(r"`[^`\n]+`", "`X`", FENCE.sub("\n\n", page))
    for paragraph in re.split(r"\n\s*\n", prose):
        yield re.sub(r"\s+", " ", paragraph).strip()


def riddles(found: list[str]) -> list[str]:
    return [match[0] for text in found for riddle in RIDDLES for match in riddle.finditer(text)]


def test_riddles_are_rare() -> None:
    sources = {path: list(texts(path.read_text(encoding="utf-8"))) for path in files("seqpar", "launch", "examples")}
    rate, places = rarity(sources)
    assert rate <= MOST, places


def test_riddles_are_rare_on_pages() -> None:
    rate, places = rarity({path: list(paragraphs(path.read_text(encoding="utf-8"))) for path in pages()})
    assert rate <= MOST_ON_PAGES, places


def rarity(sources: dict[Path, list[str]]) -> tuple[float, dict[Path, list[str]]]:
    """Return riddles per 100,000 words, and those of each file."""
    words = sum(len(text.split()) for found in sources.values() for text in found)
    places = {path: hits for path, found in sources.items() if (hits := riddles(found))}
    return 1e5 * sum(map(len, places.values())) / words, places


def test_riddles_are_found() -> None:
    wrong = 'x = 1  # the ranks end in vain\nraise ValueError("got 2 masks, expected none")'
    assert riddles(list(texts(wrong))) == ["in vain", "the ranks end", ", expected none"]
    assert not riddles(list(texts('"""Return the mask of every token. The `ranks end` here."""')))
    page = "The ranks\nend `in vain`.\n\n```\nnobody\n```\nIt starts anew."
    assert riddles(list(paragraphs(page))) == ["The ranks end", "anew"]
