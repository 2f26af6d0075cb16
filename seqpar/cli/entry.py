"""The `seqpar` command: help, version and unknown commands without torch, which all commands but `serve` import."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from difflib import get_close_matches

from seqpar import __version__
from seqpar.cli.signals import Handler, leaves, quick_exit, take

SERVE = "serve"
COMMANDS = {
    "sample": "Generate images or videos",
    SERVE: "Start an OpenAI-compatible server",
    "plan": "Predict time and memory per layout (loads no weights)",
    "profile": "Measure where step time goes, per rank",
    "verify": "Compare all strategies and data types with one rank",
    "convert": "Convert a published checkpoint to diffusers format",
}
INTERNAL = ("replica",)  # the ranks of a server
RENAMED = {"fidelity": "verify"}
HELP = f"""usage: seqpar COMMAND [options]

Generate images and videos with diffusion transformers on one or more GPUs.

commands:
{chr(10).join(f"  {name:<9} {text}" for name, text in COMMANDS.items())}

options:
  -h, --help  Show this help; after a command, its options
  --version   Show the version

examples:
  seqpar sample --prompt "a green frog on white"
  seqpar sample --gpus 2 --model black-forest-labs/FLUX.1-dev --prompt "a red fox"
  seqpar serve black-forest-labs/FLUX.1-dev --gpus 2"""
MISTAKE = 2


def main() -> None:
    """Run the command that the first word names, and exit with its code."""
    words = sys.argv[1:]
    if not words or words[0] not in (*COMMANDS, *INTERNAL):
        raise SystemExit(_without_command(words))
    take(Handler("leave", leaves()))  # imports take seconds
    if words[0] == SERVE:
        from seqpar.serve.api.command import main as serve

        code = serve(words[1:])
        if code == MISTAKE:  # nothing has started
            raise SystemExit(code)
        quick_exit(code)
    from seqpar.cli.main import main as other

    other()


def _without_command(words: Sequence[str]) -> int:
    text, code = HELP, 0
    if not words:
        code = MISTAKE
    elif words[0] == "--version":
        text = f"seqpar {__version__}"
    elif words[0] in RENAMED:
        text, code = f"error: seqpar {words[0]} is now seqpar {RENAMED[words[0]]}", MISTAKE
    elif words[0] not in ("-h", "--help"):
        near = get_close_matches(words[0], COMMANDS, 1)
        fix = f"did you mean {near[0]}?" if near else "seqpar --help lists the commands"
        text, code = f"error: {words[0][:60]!r} is not a command; {fix}", MISTAKE
    if os.environ.get("RANK", "0") == "0":
        print(text, file=sys.stderr if code else sys.stdout)
    return code
