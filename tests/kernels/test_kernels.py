"""One table of the kernels between products: the truth rounded once, row by row, and mistakes are noticed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import partial
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from seqpar.kernels import activations, adaln, group_norm, images, post_norm
from seqpar.kernels.adaln import BranchNorm, Gated, Norm
from tests.conftest import DEVICE
from tests.kernels.shared import DTYPES, gpu, turned
from tests.support.meshes import random
from tests.support.pairs import covering

# numpy warns in the interpreter: exp(-x) is infinite far below 0, and x / inf is the right limit
pytestmark = pytest.mark.filterwarnings("ignore:overflow:RuntimeWarning")
MANY = 85 if DEVICE == "cuda" else 11  # tokens, an odd number
ROWS = {"batch": 2, "tokens": 5, "width": 1152, "pad": 0}
FP32 = torch.float32
VISIBLE = 0.02
Args = tuple[Any, ...]
Case = Any


@dataclass(frozen=True)
class Kernel:
    """A kernel as tests call it: `launch`, `reference`, `public` and `formula` take what `inputs` returns.

    formula: the truth, in the dtype of its arguments. wrong: name -> changed arguments that give a visibly different
    result. bound: the error of fp32 arithmetic, relative to the value or to 1.
    """

    module: ModuleType
    inputs: Callable[[Case, torch.dtype], Args]
    cases: Sequence[Case]
    launch: Callable[..., Any]
    reference: Callable[..., Any]
    public: Callable[..., Any]
    formula: Callable[..., Any]
    wrong: Mapping[str, Callable[..., Args]]
    bound: float = 2e-5
    of_images: bool = False  # images (N, C, ...) in any memory format, not rows (B, l, E)


def changed(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Return arguments with `change` applied to all tensors in them."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, tuple):
        items = [changed(item, change) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{field.name: changed(getattr(value, field.name), change) for field in fields(value)})
    return value


def double(args: Args) -> Args:
    return changed(args, lambda x: x.double() if x.is_floating_point() else x)


def results(value: Any) -> tuple[Tensor, ...]:
    return value if isinstance(value, tuple) else (value,)


def error(got: Any, want: Any) -> float:
    """Return the largest error, relative to the value where that is larger than 1."""
    pairs = zip(results(got), results(want), strict=True)
    return max(float(((a - b).abs() / b.abs().clamp(min=1)).nan_to_num(1e9).max()) for a, b in pairs)


# adaLN and LayerNorm of a sum ------------------------------------------------------------------------------------


def normed(x: Tensor, eps: float, centre: bool) -> Tensor:
    x = x - x.mean(-1, keepdim=True) if centre else x
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt()


def modulation(
    kind: Any, affine: bool, branched: bool, branch_norm: bool = False
) -> Callable[[Case, torch.dtype], Args]:
    """Return x, branch, shift, scale and norm as models pass them: views of padded tokens and of a modulation table."""

    def inputs(case: Case, dtype: torch.dtype) -> Args:
        batch, tokens, width, pad = (case[name] for name in ("batch", "tokens", "width", "pad"))
        x, branch = random((2, batch, min(tokens, MANY) if tokens == 85 else tokens, width + pad), 0, DEVICE, dtype)
        table = 0.5 * random((batch, 3, 6, width), 1, DEVICE, torch.float32)
        weight, of_branch = 1 + 0.1 * random((2, width), 2, DEVICE, dtype)
        own = BranchNorm(of_branch, 1e-2) if branch_norm else None
        gated = Gated(table[:, 1, 2], branch[..., :width], own) if branched else None
        return x[..., :width], gated, table[:, 1, 3], table[:, 1, 4], Norm(kind, 1e-6, weight if affine else None)

    return inputs


def modulated(x: Tensor, gated: Gated | None, shift: Any, scale: Any, norm: Norm) -> tuple[Tensor, Tensor]:
    if gated is not None:
        gate, branch, own = gated
        if own is not None:
            branch = normed(branch, own.eps, False) * own.weight_E  # pyright: ignore[reportArgumentType]
        x = x + gate[:, None] * branch  # pyright: ignore[reportOperatorIssue, reportCallIssue, reportArgumentType]
    h = normed(x, norm.eps, norm.kind == "layer") * (1 if norm.weight is None else norm.weight)
    return x, h * (1 + scale[:, None]) + shift[:, None]


def of_adaln(x: Tensor, gated: Gated | None, shift: Tensor, scale: Tensor, norm: Norm) -> tuple[Tensor, Any]:
    if gated is None:
        return x, adaln.norm_modulate(x, shift, scale, norm)
    gate, branch, own = gated
    return adaln.gate_norm_modulate(x, gate, branch, shift, scale, norm, branch_norm=own)


def of_sum(case: Case, dtype: torch.dtype) -> Args:
    """Return x, which is a part of wider rows, y, and a norm with weights."""
    batch, tokens, width, pad = (case[name] for name in ("batch", "tokens", "width", "pad"))
    x = random((batch, tokens, pad + width), 0, DEVICE, dtype)[..., pad:]
    weight, bias = 1 + 0.3 * random((width,), 2, DEVICE, dtype), random((width,), 3, DEVICE, dtype)
    return x, random((batch, tokens, width), 1, DEVICE, dtype), post_norm.Affine(weight, bias)


ADALN = {
    "adaln": modulation("layer", False, False),
    "adaln, rms and weight": modulation("rms", True, False),
    "adaln, branch": modulation("layer", True, True),
    "adaln, rms and branch": modulation("rms", False, True),
    "adaln, normed branch": modulation("rms", True, True, True),
}
KERNELS = {
    name: Kernel(
        *(adaln, inputs, adaln.CASES, adaln.launch, adaln.reference, of_adaln, modulated),
        wrong={
            "shift and scale swapped": lambda x, gated, shift, scale, norm: (x, gated, scale, shift, norm),
            "another row's shift": lambda x, gated, shift, scale, norm: (x, gated, shift.flip(0), scale, norm),
            "the other norm": lambda x, gated, shift, scale, norm: (
                *(x + 0.5, gated, shift, scale),
                replace(norm, kind="rms" if norm.kind == "layer" else "layer"),
            ),
            "another branch": lambda x, gated, *rest: (
                x if gated else x.flip(1),
                gated and gated._replace(gate_BE=gated.gate_BE.flip(0), norm=None),
                *rest,
            ),
        },
    )
    for name, inputs in ADALN.items()
}
KERNELS["post_norm"] = Kernel(
    *(post_norm, of_sum, post_norm.CASES, post_norm.launch, post_norm.reference, post_norm.post_norm),
    lambda x, y, norm: normed(x + y, norm.eps, True) * norm.weight_E + norm.bias_E,
    wrong={
        "no branch": lambda x, y, norm: (x, None, norm),
        "another row's branch": lambda x, y, norm: (x, y.flip(0), norm),
        "weight and bias swapped": lambda x, y, norm: (x, y, norm._replace(weight_E=norm.bias_E, bias_E=norm.weight_E)),
        "another eps": lambda x, y, norm: (x, y, norm._replace(eps=0.1)),
    },
)
KERNELS["post_norm, no branch"] = replace(
    KERNELS["post_norm"],
    inputs=lambda case, dtype: (of_sum(case, dtype)[0], None, of_sum(case, dtype)[2]),
    formula=lambda x, y, norm: normed(x, norm.eps, True) * norm.weight_E + norm.bias_E,
    wrong={"its own branch": lambda x, y, norm: (x, x.flip(0) + 1, norm)},
)

# Activations -----------------------------------------------------------------------------------------------------


def projected(case: Case, dtype: torch.dtype, halves: int = 1) -> Tensor:
    """Return rows of a wider projection, with some large values."""
    shape = case["batch"], case["tokens"], halves * case["width"] + 16
    return (3 * random(shape, 0, DEVICE, dtype))[..., : halves * case["width"]]


def with_bias(case: Case, dtype: torch.dtype) -> Args:
    return projected(case, dtype), random((case["width"],), 1, DEVICE, dtype)


def with_gate(case: Case, dtype: torch.dtype) -> Args:
    return projected(case, dtype), projected(case, dtype, 2)[..., case["width"] :].contiguous()


def gelu(x: Tensor, bias: Tensor | None) -> Tensor:
    x = x if bias is None else x + bias
    return 0.5 * x * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (x + 0.044715 * x**3)))


def exact_gelu(x: Tensor, bias: Tensor | None) -> Tensor:
    x = x if bias is None else x + bias
    return 0.5 * x * (1 + torch.erf(x / 2**0.5))


def silu(x: Tensor) -> Tensor:
    return x / (1 + (-x).exp())


KERNELS["swiglu"] = Kernel(
    *(activations, lambda case, dtype: (projected(case, dtype, 2),), activations.CASES),
    *(activations.launch_swiglu, activations.reference_swiglu, activations.swiglu),
    lambda packed: silu(packed.chunk(2, -1)[0]) * packed.chunk(2, -1)[1],
    wrong={"halves swapped": lambda packed: (torch.cat(packed.chunk(2, -1)[::-1], -1),)},
    bound=4e-6,
)
KERNELS["swiglu, gate last"] = replace(
    KERNELS["swiglu"],
    launch=partial(activations.launch_swiglu, gate_last=True),
    reference=partial(activations.reference_swiglu, gate_last=True),
    public=partial(activations.swiglu, gate_last=True),
    formula=lambda packed: packed.chunk(2, -1)[0] * silu(packed.chunk(2, -1)[1]),
)
KERNELS["gelu"] = Kernel(
    *(activations, with_bias, activations.CASES, activations.launch_gelu, activations.reference_gelu),
    *(activations.bias_gelu, gelu),
    wrong={"no bias": lambda x, bias: (x, None), "minus the bias": lambda x, bias: (x, -bias)},
    bound=4e-6,
)
KERNELS["gelu, no bias"] = replace(
    KERNELS["gelu"],
    inputs=lambda case, dtype: (projected(case, dtype), None),
    wrong={"another row": lambda x, bias: (x.flip(1), bias)},
)
KERNELS["exact gelu"] = replace(
    KERNELS["gelu"],
    launch=lambda x, bias: activations.launch_gelu(x, bias, exact=True),
    reference=lambda x, bias: activations.reference_gelu(x, bias, exact=True),
    public=lambda x, bias: activations.bias_gelu(x, bias, exact=True),
    formula=exact_gelu,
)
KERNELS["sigmoid gate"] = Kernel(
    *(activations, with_gate, activations.CASES),
    lambda x, gate: activations.launch_gate(x, gate.clone()),  # it writes over the gate
    activations.reference_gate,
    lambda x, gate: activations.sigmoid_gate(x, gate.clone()),
    lambda x, gate: x / (1 + (-gate).exp()),
    wrong={"swapped": lambda x, gate: (gate, x.contiguous()), "another row": lambda x, gate: (x, gate.flip(1))},
    bound=4e-6,
)

# Images of a VAE -------------------------------------------------------------------------------------------------


def layouts(shapes: Sequence[Any]) -> list[Any]:
    return [{"shape": shape, "last": last} for shape in shapes for last in (True, False)]


def vector(x: Tensor | None, like: Tensor) -> Tensor | float:
    return 0.0 if x is None else x.view(-1, *[1] * (like.dim() - 2))


def of_channels(bias: bool, activated: bool) -> Callable[[Case, torch.dtype], Args]:
    def inputs(case: Case, dtype: torch.dtype) -> Args:
        x = turned(random(case["shape"], 0, DEVICE, dtype), case["last"])
        x[0].select(-1, 1).zero_()  # a place without a direction stays zero, or becomes the bias
        weight, other = (random(case["shape"][1:2], seed, DEVICE, dtype) for seed in (1, 2))
        return x, weight, other if bias else None, activated

    return inputs


def over_channels(x: Tensor, weight: Tensor, bias: Tensor | None, activated: bool) -> Tensor:
    x = x / x.norm(dim=1, keepdim=True).clamp(min=1e-12) * x.shape[1] ** 0.5 * vector(weight, x) + vector(bias, x)
    return silu(x) if activated else x


def shifted(biases: str) -> Callable[[Case, torch.dtype], Args]:
    """biases: which images have one; "x" alone means a single image."""

    def inputs(case: Case, dtype: torch.dtype) -> Args:
        x, y = (turned(random(case["shape"], seed, DEVICE, dtype)) for seed in (0, 1))
        of_x, of_y = (random(case["shape"][1:2], seed, DEVICE, dtype) for seed in (2, 3))
        return (x, of_x if "x" in biases else None), None if biases == "x" else (y, of_y)

    return inputs


def total(first: Any, second: Any) -> Tensor:
    x, y = (image[0] + vector(image[1], image[0]) for image in (first, second or (0 * first[0], None)))
    return x + y


def grouped(case: Case, dtype: torch.dtype) -> Args:
    channels = case["shape"][1]
    weight, bias = 1 + 0.3 * random((channels,), 1, DEVICE, dtype), random((channels,), 2, DEVICE, dtype)
    x = turned(random(case["shape"], 0, DEVICE, dtype), case["last"])
    return x, case["groups"], group_norm.Affine(weight, bias), case["silu"]


def in_halves(way: str) -> Callable[..., Tensor]:
    """Return GroupNorm by the moments of two parts of the places, as two ranks compute it."""
    moments, combine, normalise = (getattr(group_norm, f"{way}_{name}") for name in ("moments", "combine", "normalise"))

    def compute(x: Tensor, groups: int, affine: group_norm.Affine, activated: bool) -> Tensor:
        last = group_norm.places_last(x) or False
        parts = [moments(turned(part, last), groups) for part in (x[:, :, :3], x[:, :, 3:])]
        return normalise(x, combine(torch.stack(parts)), affine, activated)

    return compute


def of_groups(x: Tensor, groups: int, affine: group_norm.Affine, activated: bool) -> Tensor:
    out = normed(x.reshape(len(x), groups, -1), affine.eps, True).view(x.shape)
    out = out * (1 if affine.weight_C is None else vector(affine.weight_C, x)) + vector(affine.bias_C, x)
    return silu(out) if activated else out


# on CPUs there are half as many groups, because the interpreter needs milliseconds for each
GROUPS = [
    {"shape": (shape[0], shape[1] // part, *shape[2:]), "groups": groups // part, "last": last, "silu": activated}
    for shape, groups in (case.values() for case in group_norm.CASES)
    for part in ((2,) if shape[-1] <= 40 else (1,))
    for last in (True, False)
    for activated in (True, False)
]
for name, (bias, activated) in {", SiLU": (False, True), ", bias": (True, False), "": (True, True)}.items():
    KERNELS[f"channel_norm{name}"] = Kernel(
        *(images, of_channels(bias, activated), layouts(images.CASES)),
        *(images.launch_norm, images.reference_norm, images.channel_norm, over_channels),
        wrong={
            "SiLU or not": lambda x, weight, bias, activated: (x, weight, bias, not activated),
            "other weights": lambda x, weight, bias, activated: (x, weight.flip(0), bias, activated),
        },
        of_images=True,
    )
for name, biases in {"": "xy", ", one bias": "y", ", one image": "x"}.items():
    KERNELS[f"residual{name}"] = Kernel(
        *(images, shifted(biases), [{"shape": shape} for shape in images.CASES]),
        *(images.launch_sum, images.reference_sum, images.add, total),
        wrong={"other biases": lambda first, second: ((first[0], first[0][0, :, 0, 0].contiguous()), second)},
        bound=2e-6,
        of_images=True,
    )
KERNELS["group_norm"] = Kernel(
    *(group_norm, grouped, GROUPS, in_halves("launch"), in_halves("reference")),
    lambda x, groups, affine, activated: in_halves("launch")(x, groups, affine, activated),  # see its own test
    of_groups,
    wrong={
        "SiLU or not": lambda x, groups, affine, activated: (x, groups, affine, not activated),
        "fewer groups": lambda x, groups, affine, activated: (x, groups // 2, affine, activated),
        "weight and bias swapped": lambda x, groups, affine, activated: (
            *(x, groups, affine._replace(weight_C=affine.bias_C, bias_C=affine.weight_C)),
            activated,
        ),
    },
    of_images=True,
)


# Tests of all kernels --------------------------------------------------------------------------------------------


def small(case: Case) -> bool:
    return case["shape"][-1] <= 40 if "shape" in case else case["tokens"] <= 85


def cases() -> list[Any]:
    """Return every kernel with its cases; large ones, and bf16, run on GPUs alone."""
    found = []
    for name, kernel in KERNELS.items():
        sizes = [pytest.param(name, case, marks=() if small(case) else gpu) for case in kernel.cases]
        found += covering(sizes, turns=DTYPES, rest=gpu)
    return found


def of_rows() -> list[str]:
    return [name for name, kernel in KERNELS.items() if not kernel.of_images]


@pytest.mark.parametrize(("name", "case", "dtype"), cases())
def test_kernel_and_reference_round_the_truth_once(name: str, case: Case, dtype: torch.dtype) -> None:
    kernel = KERNELS[name]
    args = kernel.inputs(case, dtype)
    want, x = results(kernel.formula(*double(args))), args[0] if isinstance(args[0], Tensor) else args[0][0]
    for call in (kernel.launch, kernel.reference):
        for got, truth in zip(results(call(*args)), want, strict=True):
            assert (got.dtype, got.shape) == (dtype, truth.shape)
            assert got is x or (got.stride() == x.stride() if kernel.of_images else got.is_contiguous())
            bound = torch.finfo(dtype).eps / 2 * truth.abs() + kernel.bound * truth.abs().clamp(min=1)
            assert bool(((got - truth).abs() <= bound).all())


@pytest.mark.parametrize("name", KERNELS)
def test_mistakes_are_noticed(name: str) -> None:
    """This is a negative control of the bounds above."""
    kernel = KERNELS[name]
    case = next((case for case in kernel.cases if small(case) and (case.get("batch") or 2) > 1), kernel.cases[0])
    args = kernel.inputs(case, torch.float32)
    want = kernel.formula(*double(args))
    assert error(kernel.launch(*args), want) < VISIBLE
    for mistake, change in kernel.wrong.items():
        assert error(kernel.launch(*change(*args)), want) > VISIBLE, mistake


@pytest.mark.parametrize("width", [385, 1160])  # an odd one, and one of several blocks
@pytest.mark.parametrize("name", of_rows())
def test_a_row_depends_on_neither_other_rows_nor_strides(name: str, width: int) -> None:
    count = MANY if DEVICE == "cuda" else 6
    case = {"batch": 3, "tokens": count, "width": width, "pad": 2 * (width % 2)}
    kernel = KERNELS[name]
    args = kernel.inputs(case, torch.float16)
    whole = results(kernel.launch(*args))
    for row, first, last in ((0, 0, 1), (2, count - 5, count), (1, 3, count - 1)):

        def part(x: Tensor, row: int = row, first: int = first, last: int = last) -> Tensor:
            x = x[row : row + 1] if x.dim() > 1 else x
            return x[:, first:last] if x.dim() == 3 else x

        some_args = changed(args, part)
        if name == "sigmoid gate":
            some_args = some_args[0], some_args[1].contiguous()
        got = results(kernel.launch(*some_args))
        assert all(torch.equal(a, b[row : row + 1, first:last]) for a, b in zip(got, whole, strict=True))
    apart = args[0].transpose(0, 1).contiguous().transpose(0, 1)
    assert all(torch.equal(a, b) for a, b in zip(results(kernel.launch(apart, *args[1:])), whole, strict=True))
    nothing = changed(args, lambda x: x[:, :0] if x.dim() == 3 else x)
    assert {x.shape[:2] for x in results(kernel.launch(*nothing))} == {(3, 0)}


@pytest.mark.parametrize("name", [name for name in KERNELS if name != "group_norm"])
def test_public_functions_launch_kernels_on_gpus(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = KERNELS[name]
    args = kernel.inputs(next(filter(small, kernel.cases)), torch.float16)
    for uses, call in ((True, kernel.launch), (False, kernel.reference)):
        monkeypatch.setattr(kernel.module, "fused", lambda *tensors, uses=uses: uses)
        pairs = zip(results(kernel.public(*args)), results(call(*args)), strict=True)
        assert all(torch.equal(got, want) for got, want in pairs)


@pytest.mark.parametrize("last", [True, False])
@pytest.mark.parametrize("name", ["adaln", "post_norm", "group_norm"])
def test_a_large_mean_does_not_cancel(name: str, last: bool) -> None:
    """E[x^2] - mean^2 has an error of 1e8 * 6e-8 = 6 here, for a variance of 1."""
    if name == "group_norm":
        x, ones, zeros = turned(random((2, 64, 40), 0, DEVICE, FP32) + 1e4, last), None, None
        args: Args = x, 16, group_norm.Affine(None, None), False
        rows = x.reshape(2, 16, -1)
    else:
        x = random((1, MANY, 384), 0, DEVICE, FP32) + (1e4 if last else -1e4)
        rows, ones, zeros = x, torch.ones(384, device=DEVICE), torch.zeros(1, 384, device=DEVICE)
        args = (x, None, zeros, zeros, Norm()) if name == "adaln" else (x, None, post_norm.Affine(ones, zeros[0]))
    kernel = KERNELS["post_norm, no branch" if name == "post_norm" else name]
    want, eps = results(kernel.formula(*double(args)))[-1], 1e-6 if name == "adaln" else 1e-5
    mean, squares = rows.mean(-1, keepdim=True), rows.square().mean(-1, keepdim=True)
    careless = ((rows - mean) * torch.rsqrt(squares - mean.square() + eps)).view(x.shape)
    assert error(results(kernel.launch(*args))[-1], want) < VISIBLE / 2 < error(careless, want)
