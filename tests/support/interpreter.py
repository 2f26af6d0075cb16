"""Makes Triton's interpreter faster: it looks through all of Triton's language at each call of each function.

It replaces the language's operations by its own before a call and puts them back after it. Processes of tests only
interpret, so the replacements may stay. It also makes the same types and shapes anew for each number that a kernel
computes; here they are kept.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from types import SimpleNamespace
from typing import Any

import triton.language as tl
from triton.runtime import interpreter

KEPT = SimpleNamespace(restore=lambda: None)
LANGUAGES = (tl, tl.core)


def keep_language() -> None:
    """Let this process replace the operations of Triton's language once, when they are first needed."""
    replace: Callable[[Any], object] = interpreter._patch_lang
    replaced, looked_at = set[int](), set[Any]()

    def once(function: Any) -> SimpleNamespace:
        if function not in looked_at:
            values = function.__globals__.values()
            seen = {index for index, one in enumerate(LANGUAGES) if any(one is x for x in values)}
            if not seen <= replaced:
                replace(function)
                replaced.update(seen)
            looked_at.add(function)
        return KEPT

    interpreter._patch_lang = once  # pyright: ignore[reportAttributeAccessIssue]


def keep_types() -> None:
    """Let this process keep numpy's dtypes, blocks' numbers and names, and the shapes of tensors."""
    own_dtype: Any = interpreter._get_np_dtype
    own_block: Any = tl.block_type.__init__
    dtypes, blocks = dict[str, Any](), dict[tuple[str, tuple[int, ...]] | None, dict[str, Any]]()

    def dtype_of(given: Any) -> Any:
        name = given.scalar.name
        if name not in dtypes:
            dtypes[name] = own_dtype(given)
        return dtypes[name]

    def block(self: Any, element_ty: Any, shape: Any) -> None:
        sizes = tuple(shape)
        key = (element_ty.name, sizes) if all(type(size) is int for size in sizes) else None
        if key not in blocks:
            own_block(self, element_ty, shape)
            if key is not None:
                blocks[key] = {name: value for name, value in vars(self).items() if name != "element_ty"}
        else:
            vars(self).update(blocks[key], element_ty=element_ty)

    def tensor(self: Any, handle: Any, type: Any) -> None:
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.numel, self.shape = _sizes(tuple(type.shape) if type.is_block() else ())

    interpreter._get_np_dtype = dtype_of
    tl.block_type.__init__, tl.tensor.__init__ = block, tensor


@cache
def _sizes(shape: tuple[int, ...]) -> tuple[Any, Any]:
    """Return the number of a tensor's numbers and its shape, as Triton's tensors have them."""
    return tl.constexpr(math.prod(shape)), tl.tuple([tl.constexpr(size) for size in shape])
