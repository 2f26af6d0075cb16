"""Runs diffusers' modules on a strip: a function mode that calls the rule of each torch function.

When it wins: the modules and their weights stay diffusers' own, so there is no copy of a model that could differ.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any

from torch.overrides import TorchFunctionMode, resolve_name

from seqpar.vae.known import LOCAL
from seqpar.vae.place import Place
from seqpar.vae.rules import RULES, TAKERS, Rule


class StripMode(TorchFunctionMode):
    """While it is entered, torch functions of this thread act on this rank's strip. It computes no gradients.

    rules: function -> rule; by default those of `seqpar.vae.rules`. before: called with (function, arguments, keyword
    arguments) before every function. Raises ValueError, which names the module, for a function that has no rule and is
    not known to act on each pixel alone.
    """

    def __init__(
        self,
        place: Place,
        rules: Mapping[Callable[..., Any], Rule] = RULES,
        before: Callable[[Any, tuple[Any, ...], dict[str, Any]], None] | None = None,
    ) -> None:
        super().__init__()
        self._place, self._rules, self._before = place, rules, before

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        super().__exit__(kind, error, at)
        later = self._place.later
        (later.finish if kind is None else later.drop)()

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call the function's rule, or the function itself where it is local."""
        kwargs = kwargs or {}
        if func not in TAKERS:
            self._place.later.settle(func, args, kwargs)
        if self._before is not None:
            self._before(func, args, kwargs)
        rule = self._rules.get(func)
        if rule is not None:
            return rule(self._place, func, args, kwargs)
        if func not in LOCAL:
            name = resolve_name(func) or getattr(func, "__name__", repr(func))
            self._place.refuse(f"got the function {name}, which has no rule for strips")
        return func(*args, **kwargs)
