"""Writes the table of fused blocks in docs/families.md from the result lines in docs/benchmarks.

python -m tests.support.families_page --write
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from docs.tools.benchmarks_page import newest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "families.md"
BEGIN, END = "<!-- families: python -m tests.support.families_page --write -->\n", "<!-- end of families -->"
# the family's file, what it computes, what the bench calls it, and its transformers' blocks that stay diffusers' own
EDIT = "options for attention processors in a call"
SD3 = "MLPs in chunks (`enable_forward_chunking`), options for attention processors in a call"
LTX = "texts with a mask that differs between queries"
LTX2 = "calls in which some pictures are perturbed and others are not, or with a mask that differs between queries"
WAN = "ChronoEdit's, which have another class"
FAMILIES = (
    ("qwen_image", "Qwen-Image: 4096 + 128 tokens; Layered has its blocks", "qwen-image", EDIT),
    ("qwen_image", "Qwen-Image Edit: 4096 + 4096 of a reference + 128", "qwen-image-edit", EDIT),
    ("wan", "Wan 2.1 14B: 32,760; VACE has its blocks", "wan2.1-14b", WAN),
    ("wan", "Wan 2.2 14B: 75,600", "wan2.2-14b", WAN),
    ("wan", "Wan 2.2 5B, a timestep for each token: 27,280", "wan2.2-ti2v-5b", WAN),
    (
        "flux2",
        "FLUX.2-dev: 4096 + 512; klein has its blocks",
        "flux.2-dev",
        "reference images with a key cache (refused)",
    ),
    ("flux", "FLUX.1: 4096 + 512", "flux.1-dev", "IP-adapters"),
    ("chroma", "Chroma1-HD: 4096 + 512", "chroma1-hd", "IP-adapters"),
    ("chroma", "Chroma1-HD: 4096 + 64, padded to 512", "chroma1-hd-prompt", "IP-adapters"),
    ("cogvideox", "CogVideoX-5B: 17,550 + 226; 2B and 1.5 have its blocks", "cogvideox-5b", EDIT),
    ("krea2", "Krea 2: 4096 + 512", "krea-2", "those that fuse the layers of the text"),
    ("krea2", "Krea 2: 4096 + 64, padded to 512", "krea-2-prompt", "those that fuse the layers of the text"),
    ("flux3", "FLUX.3: 4096 + 512", "flux.3", "none"),
    ("z_image", "Z-Image: 4096 + 128", "z-image", "the two that refine the text; pictures with two timesteps (Omni)"),
    ("hunyuan_video", "HunyuanVideo, 544 x 960: 67,320 + 64", "hunyuan-video", "those of `token_replace` models"),
    ("hunyuan_video", "HunyuanVideo 1.5, 480p: 49,290 + 64", "hunyuan-video-1.5", "none"),
    ("ltx", "LTX-Video 2B: 7392", "ltx-video-2b", LTX),
    ("ltx", "LTX-Video 13B: 13,376", "ltx-video-13b", LTX),
    ("ltx2", "LTX-2: 6144 and 126 of sound; 2.3 has its blocks", "ltx-2", LTX2),
    ("minimax_h3", "MiniMax-H3, 768 x 1344: 37,296 + 414 of sound + 256", "minimax-h3", "the two of the text alone"),
    ("sd3", "SD3.5-large: 4096 + 333; SD3 and SD3.5-medium have its blocks", "sd3.5-large", SD3),
)
HEAD = "| file | models | GPUs | ms per call | x ceiling | best other way | commit | diffusers' own blocks compute |"


def table() -> str:
    rows = [HEAD, "| --- | --- | --- | --- | --- | --- | --- | --- |"]
    for file, models, name, own in FAMILIES:
        for gpus in (1, 2):
            numbers = _numbers(name, gpus) or ("not measured", "", "", "")
            rows.append(f"| `{file}.py` | {models} | {gpus} | {' | '.join(numbers)} | {own} |")
    return "\n".join(rows) + "\n"


def _numbers(name: str, gpus: int) -> tuple[str, str, str, str] | None:
    """Return milliseconds, ratio, best peer and commit of the last file that has the call by fused blocks."""
    for path in newest("*.jsonl"):
        lines = [line for line in _calls(path) if line["gpus"] == gpus and line["case"]["model"] == name]
        lines = [line for line in lines if not line["case"].get("masked")]
        if any(line["case"].get("precision") for line in lines):
            continue  # its rows in bf16 are only what 8 bits are compared with
        ours = next((line for line in lines if line["case"].get("launch") == "fused blocks"), None)
        if ours is not None:
            peers = [line["ms"]["median"] for line in lines if line["case"]["kind"] == "peer"]
            best = f"{min(peers):.1f}" if peers else "not measured"
            return f"{ours['ms']['median']:.1f}", f"{ours['over']:.2f}", best, ours["commit"]
    return None


def _calls(path: Path) -> Iterator[dict[str, Any]]:
    for text in path.read_text().splitlines():
        line = json.loads(text)
        if line.get("bench") == "calls" and isinstance(line.get("case"), dict) and line.get("ms"):
            yield line


def written() -> str:
    before, _, rest = PAGE.read_text().partition(BEGIN)
    return f"{before}{BEGIN}\n{table()}\n{END}{rest.partition(END)[2]}"


if __name__ == "__main__":
    if "--write" in sys.argv:
        PAGE.write_text(written())
    print(table())
