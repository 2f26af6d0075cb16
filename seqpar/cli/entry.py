"""The `seqpar` command: the front of a server starts without torch, which all other commands import."""

from __future__ import annotations

import sys

from seqpar.cli.quick_exit import quick_exit

SERVE = "serve"


def main() -> None:
    """Run the command that the first word names, and end with its exit code."""
    if sys.argv[1:2] == [SERVE]:
        from seqpar.serve.front.command import MISTAKE
        from seqpar.serve.front.command import main as serve

        code = serve(sys.argv[2:])
        if code == MISTAKE:  # nothing has started
            raise SystemExit(code)
        quick_exit(code)
    from seqpar.cli.main import main as other

    other()
