"""The `seqpar` command: helps, the version and invalid words without torch, whose import takes seconds."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence

from seqpar import __version__
from seqpar.cli import args
from seqpar.cli.signals import Handler, leaves, quick_exit, take
from seqpar.types.flags import near, parsed

SERVE, DOCTOR = "serve", "doctor"
COMMANDS = {
    "sample": "Generate images or videos",
    SERVE: "Start an OpenAI-compatible server",
    "plan": "Predict time and memory per layout (loads no weights)",
    "profile": "Measure where step time goes, per rank",
    "verify": "Compare all strategies and data types with one rank",
    "convert": "Convert a published checkpoint to diffusers format",
    DOCTOR: "Show GPUs, links, versions, what will be used and what is missing",
}
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
  seqpar sample --gpus 2 --model Qwen/Qwen-Image --prompt "a red fox"
  seqpar serve Qwen/Qwen-Image --gpus 2"""
MISTAKE = 2


def main() -> None:
    """Run the command that the first word names, and exit with its code."""
    words = sys.argv[1:]
    if not words or words[0] not in (*COMMANDS, *args.COMMANDS):
        try:
            code = _without_command(words)
            sys.stdout.flush()
        except BrokenPipeError:  # of `seqpar --help | head`
            os._exit(128 + signal.SIGPIPE)
        raise SystemExit(code)
    take(Handler("leave", leaves()))  # imports take seconds
    if words[0] == SERVE:
        from seqpar.serve.api.command import main as serve

        code = serve(words[1:])
        if code == MISTAKE:  # nothing has started
            raise SystemExit(code)
        quick_exit(code)
    if "RANK" not in os.environ:  # a rank reports errors to the process that started it
        try:
            parsed(args.COMMANDS[words[0]], words[1:], f"seqpar {words[0]}", args.GROUPS)
        except ValueError as error:
            print(f"error: {error}", file=sys.stderr)
            raise SystemExit(MISTAKE) from None
        except BrokenPipeError:
            os._exit(128 + signal.SIGPIPE)
    if words[0] == DOCTOR:
        from seqpar.cli.doctor import main as doctor

        quick_exit(doctor())
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
        fix = near(words[0], COMMANDS) or "; seqpar --help lists the commands"
        text, code = f"error: {words[0][:60]!r} is not a command{fix}", MISTAKE
    if os.environ.get("RANK", "0") == "0":
        print(text, file=sys.stderr if code else sys.stdout)
    return code
