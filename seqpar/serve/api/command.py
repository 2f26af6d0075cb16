"""`seqpar serve`: an API server and the ranks that it starts; runs until a signal or a failure of the ranks.

    seqpar serve builtin builtin-text --ranks 2
    seqpar serve black-forest-labs/FLUX.1-dev --gpus 4 --host 0.0.0.0 --keys keys.txt

Exit codes: 0 after SIGTERM or Ctrl-C, 2 for invalid flags, 1 for a failure.
"""

from __future__ import annotations

import asyncio
import importlib.util
import sys
from collections.abc import Sequence

from seqpar.serve.api.args import ServeArgs
from seqpar.types.flags import parsed

EXTRA = ("fastapi", "uvicorn", "multipart", "prometheus_client")
FAILURE, MISTAKE = 1, 2


def main(words: Sequence[str], child: Sequence[str] | None = None) -> int:
    """Run `seqpar serve WORDS`; return its exit code. child: the command of the ranks in place of `seqpar replica`.

    Prints one line "error: ..." for invalid flags and failures.
    """
    missing = [name for name in EXTRA if importlib.util.find_spec(name) is None]
    try:
        args = parsed(ServeArgs, words, "seqpar serve", __doc__)
        if missing:
            raise ValueError(f"serving requires {', '.join(missing)}: pip install -e '.[serve]' in a clone")
        # imported when the extra is known to be installed
        from seqpar.serve.api.server import run

        args = args.checked()
        ended = asyncio.run(run(args, child or args.replica))
        code, text = ended.code, ended.text
    except ValueError as error:
        code, text = MISTAKE, f"error: {error}"
    except OSError as error:
        code, text = FAILURE, f"error: {error}"
    if code:
        print(text, file=sys.stderr, flush=True)
    return code
