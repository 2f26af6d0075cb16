"""A VAE shared among the ranks of a mesh, in place: `decode` and `encode` take rank 0's input.

A diffusers pipeline steps its own latents on every rank. If noise or generators differ between ranks, these latents
differ although the transformer uses rank 0's. Shared methods are collective, and return one image on all ranks.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import update_wrapper
from typing import Any, NoReturn, TypeVar

import torch

from seqpar.mesh.inputs import CALL, from_rank_0
from seqpar.mesh.mesh import Mesh
from seqpar.types.say import say

T = TypeVar("T")
Look = tuple[Callable[[], None], Callable[[Any], None]]

HALF = 2  # bytes of a 16-bit weight
METHODS = ("decode", "encode")  # of a VAE that are shared
SHARED = "_seqpar_"  # prefix of the VAE's attributes that hold them, because users wrap `vae.decode`


def _nothing() -> None:
    pass


@dataclass(frozen=True)
class User:
    """A pipeline that shares a VAE among the ranks of its mesh.

    check: called before each call. decode, encode: replace the VAE's own and take this rank's input. Without `decode`
    the VAE's own takes rank 0's input; without `encode` the VAE's own stays.
    """

    mesh: Mesh
    check: Callable[[], None] = _nothing
    decode: Callable[..., Any] | None = None
    encode: Callable[..., Any] | None = None


def share(vae: Any, user: User) -> Callable[[], None]:
    """Let a VAE's methods take rank 0's input on every rank, in place; return a function that ends this.

    Pipelines may share a VAE: the mesh of the first one computes, and the last one to end restores the VAE's methods.
    """
    names = METHODS if user.encode is not None else METHODS[:1]
    ends = ExitStack()
    for name in names:
        method = _shared(vae, name)
        ends.callback(method.add(method.users, user))
    return ends.close


@contextmanager
def looked_at(vae: Any, name: str, look: Callable[[Any], None], begin: Callable[[], None] = _nothing) -> Iterator[None]:
    """Call `begin` before each call of a VAE's `decode` or `encode`, and `look` with its result; both may raise."""
    method = _shared(vae, name)
    end = method.add(method.looks, (begin, look))
    try:
        yield
    finally:
        end()


def original(vae: Any, name: str) -> Callable[..., Any]:
    """Return a VAE's own `decode` or `encode`, which a rank may call alone, also while the VAE is shared."""
    method = vars(vae).get(SHARED + name, getattr(vae, name))
    return method.alone if isinstance(method, Shared) else method


def _shared(vae: Any, name: str) -> Shared:
    method = vars(vae).get(SHARED + name)
    if not isinstance(method, Shared):
        method = Shared(vae, name)
        vars(vae).update({name: method, SHARED + name: method})
    return method


def _narrowed(x: Any, vae: Any) -> Any:
    """Return an input in the dtype of the weights if these have 16 bits and the input has more."""
    dtype = next((weight.dtype for weight in vae.parameters() if weight.is_floating_point()), x.dtype)
    return x.to(dtype) if dtype.itemsize == HALF and x.is_floating_point() and x.itemsize > HALF else x


class Shared:
    """A method of a VAE that takes rank 0's input.

    alone: the VAE's own, which takes this rank's input. users, looks: see `add`.
    """

    def __init__(self, vae: Any, name: str) -> None:
        self.alone: Callable[..., Any] = getattr(vae, name)
        self._vae, self._name = vae, name
        self._before = {key: x for key, x in vars(vae).items() if key == name}
        self._first = next(iter(inspect.signature(self.alone).parameters), "")  # the input, which may come by its name
        self.users: dict[object, User] = {}
        self.looks: dict[object, Look] = {}
        update_wrapper(self, self.alone)  # pyright: ignore[reportArgumentType]

    @torch.compiler.disable  # of a user's torch.compile(vae.decode)
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        for begin, _ in self.looks.values():
            begin()
        result = self._compute(args, kwargs)
        for _, look in self.looks.values():
            look(result)
        return result

    def _compute(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        users = [*self.users.values()]
        for user in users:
            user.check()
        if not users:
            return self.alone(*args, **kwargs)
        x, *rest = args or [kwargs.pop(self._first)]
        x = _narrowed(x, self._vae)
        if (compute := getattr(users[0], self._name)) is not None:
            return compute(x, *rest, **kwargs)
        shared = from_rank_0(users[0].mesh, {self._first: x}, {CALL: f"calls the VAE's {self._name}"})
        return self.alone(shared[self._first], *rest, **kwargs)

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise ValueError("A VAE that ranks share cannot be pickled; call seqpar.release first")

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[..., Any]:
        return copy.deepcopy(self.alone, memo)

    def add(self, to: dict[object, T], value: T) -> Callable[[], None]:
        """Add a value to `users` or `looks`; return a function that removes it, and at last restores the VAE."""
        key = object()
        to[key] = value

        def end() -> None:
            to.pop(key, None)
            if self.users or self.looks:
                return
            vars(self._vae).pop(SHARED + self._name, None)
            if vars(self._vae).get(self._name) is self:
                delattr(self._vae, self._name)
                vars(self._vae).update(self._before)
            elif isinstance(value, User) and value.mesh.is_main:
                say(f"the {self._name} that was set on the {type(self._vae).__name__} stays")

        return end
