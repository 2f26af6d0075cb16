"""Makes Triton's interpreter faster: it looks through all of Triton's language at each call of each function.

It replaces the language's operations by its own before a call and puts them back after it. Processes of tests only
interpret, so the replacements may stay.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import triton.language as tl
from triton.runtime import interpreter

KEPT = SimpleNamespace(restore=lambda: None)
LANGUAGES = (tl, tl.core)


def keep_language() -> None:
    """Let this process replace the operations of Triton's language once, when they are first needed."""
    replace: Callable[[Any], object] = interpreter._patch_lang
    replaced = set[int]()

    def once(function: Any) -> SimpleNamespace:
        seen = {index for index, one in enumerate(LANGUAGES) if any(one is x for x in function.__globals__.values())}
        if not seen <= replaced:
            replace(function)
            replaced.update(seen)
        return KEPT

    interpreter._patch_lang = once  # pyright: ignore[reportAttributeAccessIssue]
