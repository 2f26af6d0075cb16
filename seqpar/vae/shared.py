"""Shares a VAE among the ranks of a mesh, in place: its `decode` and `encode` take rank 0's input.

A diffusers pipeline steps its own latents on every rank. If noise or generators differ between ranks, these latents
differ, although the transformer uses rank 0's. Every rank must call a shared method at the same time.
When it wins: it is how all ranks of a diffusers pipeline end with one picture.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import update_wrapper
from typing import Any, NoReturn, TypeVar

import torch

from seqpar.mesh.inputs import CALL, from_rank_0
from seqpar.mesh.mesh import Mesh

T = TypeVar("T")
Look = tuple[Callable[[], None], Callable[[Any], None]]

HALF = 2  # bytes of a 16-bit weight
METHODS = ("decode", "encode")  # those of a VAE that are shared
SHARED = "_seqpar_"  # how the names of a VAE's attributes begin that hold them, because users wrap `vae.decode`


def _nothing() -> None:
    pass


@dataclass(frozen=True)
class User:
    """A pipeline that shares a VAE among the ranks of its mesh.

    check: called before each call. decode, encode: called in place of the VAE's own on every rank, with this rank's
    input. Without `decode` the VAE's own takes rank 0's input; without `encode` the VAE's own is not replaced.
    """

    mesh: Mesh
    check: Callable[[], None] = _nothing
    decode: Callable[..., Any] | None = None
    encode: Callable[..., Any] | None = None


def share(vae: Any, user: User) -> Callable[[], None]:
    """Change a VAE in place, so that its `decode` takes rank 0's input on every rank; return what ends that.

    Its `encode` does so, too, for a user that has one.
    Pipelines may share a VAE: the mesh of the first one computes, and the VAE's own methods are put back when the last
    of them ends it.
    """
    names = METHODS if user.encode is not None else METHODS[:1]
    ends = [_shared(vae, name).join(user) for name in names]

    def end() -> None:
        for each in ends:
            each()

    return end


@contextmanager
def looked_at(vae: Any, name: str, look: Callable[[Any], None], begin: Callable[[], None] = _nothing) -> Iterator[None]:
    """Call `begin` before each call of a VAE's `decode` or `encode`, and `look` with its result.

    An error that they raise ends the call.

    The method stays the one that `own` finds, so that the VAE may be shared before, and ranks may call it alone.
    """
    end = _shared(vae, name).look((begin, look))
    try:
        yield
    finally:
        end()


def own(vae: Any, name: str) -> Callable[..., Any]:
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
    """Return an input as it is, or in the dtype of the weights if these have 16 bits and would not take more."""
    dtype = next((weight.dtype for weight in vae.parameters() if weight.is_floating_point()), x.dtype)
    return x.to(dtype) if dtype.itemsize == HALF and x.is_floating_point() and x.itemsize > HALF else x


class Shared:
    """A method of a VAE whose input is shared among ranks. alone: the VAE's own, which takes this rank's input."""

    def __init__(self, vae: Any, name: str) -> None:
        self.alone: Callable[..., Any] = getattr(vae, name)
        self._vae, self._name = vae, name
        self._before = {key: x for key, x in vars(vae).items() if key == name}
        self._first = next(iter(inspect.signature(self.alone).parameters), "")  # the input, which may come by its name
        self._users: dict[object, User] = {}
        self._looks: dict[object, Look] = {}
        update_wrapper(self, self.alone)  # pyright: ignore[reportArgumentType]

    @torch.compiler.disable  # of a user's torch.compile(vae.decode)
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the VAE makes of rank 0's input."""
        for begin, _ in self._looks.values():
            begin()
        result = self._compute(args, kwargs)
        for _, look in self._looks.values():
            look(result)
        return result

    def _compute(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        users = [*self._users.values()]
        for user in users:
            user.check()
        if not users:
            return self.alone(*args, **kwargs)
        x, *rest = args or [kwargs.pop(self._first)]
        x = _narrowed(x, self._vae)
        if (compute := getattr(users[0], self._name)) is not None:
            return compute(x, *rest, **kwargs)
        rank_0s = from_rank_0(users[0].mesh, {self._first: x}, {CALL: f"calls the VAE's {self._name}"})
        return self.alone(rank_0s[self._first], *rest, **kwargs)

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        """Refuse to be pickled with the VAE or its pipeline."""
        raise ValueError("got a VAE that ranks share to pickle, expected a plain one; call seqpar.release first")

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[..., Any]:
        """Return the own method of the VAE's copy, which no mesh shares and which has weights of its own."""
        return copy.deepcopy(self.alone, memo)

    def join(self, user: User) -> Callable[[], None]:
        """Add a user; return what takes it away again."""
        return self._add(self._users, user)

    def look(self, look: Look) -> Callable[[], None]:
        """Call the first function before each call, and the second with each result; return what ends that."""
        return self._add(self._looks, look)

    def _add(self, to: dict[object, T], one: T) -> Callable[[], None]:
        key = object()
        to[key] = one

        def end() -> None:
            to.pop(key, None)
            if self._users or self._looks:
                return
            vars(self._vae).pop(SHARED + self._name, None)
            if vars(self._vae).get(self._name) is self:
                delattr(self._vae, self._name)
                vars(self._vae).update(self._before)
            elif isinstance(one, User) and one.mesh.is_main:
                print(f"seqpar: the {self._name} that was set on the {type(self._vae).__name__} stays", flush=True)

        return end
