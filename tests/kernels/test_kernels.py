"""One table of the kernels between products: the truth rounded once, row by row, and mistakes are noticed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from seqpar.kernels import activations, adaln, group_norm, images, post_norm
from seqpar.kernels.adaln import BranchNorm, Gated, Norm, Summed
from tests.conftest import DEVICE
from tests.kernels.shared import DTYPES, gpu, rms, turned
from tests.support.meshes import random
from tests.support.pairs import covering

# numpy warns in the interpreter: exp(-x) is infinite far below 0, and x / inf is the right limit
pytestmark = pytest.mark.filterwarnings("ignore:overflow:RuntimeWarning")
MANY = 85 if DEVICE == "cuda" else 21  # tokens, an odd number
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
        branch = branch if own is None else normed(branch, own.eps, False) * own.weight_E
        x = x + gate[:, None] * branch  # pyright: ignore[reportOperatorIssue, reportCallIssue, reportArgumentType]
    h = normed(x, norm.eps, norm.kind == "layer") * (1 if norm.weight is None else norm.weight)
    return x, h * (1 + scale[:, None]) + shift[:, None]


def of_adaln(x: Tensor, gated: Gated | None, shift: Tensor, scale: Tensor, norm: Norm) -> tuple[Tensor, Tensor]:
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
    case = {"batch": 3, "tokens": MANY, "width": width, "pad": 2 * (width % 2)}
    kernel = KERNELS[name]
    args = kernel.inputs(case, torch.float16)
    whole = results(kernel.launch(*args))
    for row, some in ((slice(0, 1), slice(0, 1)), (slice(2, 3), slice(MANY - 5, MANY)), (slice(1, 2), slice(3, 20))):

        def part(x: Tensor, row: slice = row, some: slice = some) -> Tensor:
            x = x[row] if x.dim() > 1 else x
            return x[:, some] if x.dim() == 3 else x

        some_args = changed(args, part)
        if name == "sigmoid gate":
            some_args = some_args[0], some_args[1].contiguous()
        got = results(kernel.launch(*some_args))
        assert all(torch.equal(a, b[row, some]) for a, b in zip(got, whole, strict=True))
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


@gpu
@pytest.mark.parametrize("name", of_rows())
def test_gradients_flow_where_they_are_asked_for(name: str) -> None:
    kernel = KERNELS[name]
    args = kernel.inputs(kernel.cases[-1], torch.bfloat16)
    assert results(kernel.public(*args))[-1].equal(results(kernel.launch(*args))[-1])
    args = args[0].clone().requires_grad_(), *args[1:]
    assert results(kernel.public(*args))[-1].requires_grad


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


# What single kernels promise -------------------------------------------------------------------------------------


def test_results_may_take_the_place_of_inputs_or_lie_beside_others() -> None:
    x, bias = with_bias(activations.CASES[-1], torch.float16)
    over = x.clone()
    assert activations.launch_gelu(over, bias, reuse=True) is over
    assert torch.equal(over, activations.launch_gelu(x, bias))
    x, y, norm = of_sum(post_norm.CASES[2], torch.float16)
    for call in (post_norm.launch, post_norm.reference):
        left, right = torch.full((*x.shape[:2], 2 * x.shape[2]), 7.0, dtype=x.dtype, device=DEVICE).chunk(2, -1)
        assert call(x, y, norm, left) is left
        assert torch.equal(left, call(x, y, norm))
        assert bool((right == 7.0).all())
    first, second = shifted("xy")({"shape": images.CASES[1]}, torch.float16)
    for call in (images.launch_sum, images.reference_sum):
        inside = first[0].clone()
        assert call((inside, first[1]), second, inside) is inside
        assert torch.equal(inside, call(first, second))


X, E = random((2, 3, 24), 0, DEVICE, FP32), random((24,), 1, DEVICE, FP32)
IMAGE = random((2, 24, 3, 5), 0, DEVICE, FP32)
STRIDED = X.repeat_interleave(2, -1)[..., ::2]
REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "adaln, strides": (lambda: adaln.launch(STRIDED, None, X[:, 0], X[:, 1], Norm()), "contiguous last dim"),
    "post_norm, strides": (lambda: post_norm.launch(STRIDED, X, post_norm.Affine(E, E)), "contiguous last dim"),
    "post_norm, shapes": (
        lambda: post_norm.launch(X, X[:, :2], post_norm.Affine(E, E)),
        r"of shapes \[\(2, 2, 24\), \(2, 3, 24\)\], expected \(2, 3, 24\)",
    ),
    "gelu": (
        lambda: activations.launch_gelu(X.transpose(0, 1), None, reuse=True),
        "with reuse, expected a contiguous tensor",
    ),
    "gate": (lambda: activations.launch_gate(X, X.transpose(0, 1)), "expected a contiguous one"),
    "channel_norm": (lambda: images.launch_norm(IMAGE, E[:12]), r"got weights of shapes \[\(12,\)\], expected \(24,\)"),
    "residual": (lambda: images.launch_sum((turned(IMAGE), None), (IMAGE, None)), "in channels-last memory"),
    "groups": (lambda: group_norm.launch_moments(IMAGE, 5), "got 24 channels and 5 groups"),
    "group_norm, shift": (lambda: group_norm.launch_moments(IMAGE, 4, E), "expected channels-last memory"),
    "group_norm, format": (
        lambda: group_norm.launch_normalise(
            *(turned(IMAGE), group_norm.launch_moments(IMAGE, 4), group_norm.Affine(E, E), False, IMAGE)
        ),
        "memory format",
    ),
    "group_norm, moments": (
        lambda: group_norm.launch_normalise(IMAGE, X, group_norm.Affine(E, E)),
        r"moments \(2, 3, 24\)",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_arguments_that_do_not_fit_are_refused(name: str) -> None:
    call, message = REFUSED[name]
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize(("case", "kind"), [(adaln.CASES[1], "layer"), (adaln.CASES[2], "rms"), (ROWS, "layer")])
def test_tokens_may_have_rows_of_a_table(case: Case, kind: str) -> None:
    """The truth modulates each token as a batch row; one row for each image gives the bits of no index."""
    x, gated, shift, scale, norm = modulation(kind, True, True)(case, torch.float32)
    batch, tokens, width = x.shape
    index = torch.randint(5, (batch, tokens), generator=torch.Generator().manual_seed(3)).to(DEVICE)
    # five rows, of which one is the same for all and two share a vector; rows of other vectors lie between
    table, shared = 0.5 * random((5, 3, width), 4, DEVICE, FP32), 0.5 * random((3, width), 5, DEVICE, FP32)
    gate, low, high = Summed(table[:, 0], shared[0]), table[:1, 1], Summed(table[:, 2], shared[2])
    per_token = [table[:, 0][index] + shared[0], table[0, 1].expand_as(x), table[:, 2][index] + shared[2]]
    flat = [y.double().flatten(0, 1) for y in (*per_token, x, gated.branch_BlE)]
    want = modulated(flat[3][:, None], Gated(flat[0], flat[4][:, None]), flat[1], flat[2], *double((norm,)))
    of = Gated(gate, gated.branch_BlE)
    for call in (adaln.launch, adaln.reference):
        got = call(x, of, low, high, norm, index_Bl=index.int())
        assert error(tuple(y.flatten(0, 1)[:, None] for y in got), want) < 2e-5
        other = call(x, of, low, high, norm, index_Bl=(index.int() + 1) % 5)
        assert error(tuple(y.flatten(0, 1)[:, None] for y in other), want) > 0.1
        same = torch.arange(batch, device=DEVICE, dtype=torch.int32)[:, None]
        bits = zip(call(x, gated, shift, scale, norm, index_Bl=same), call(x, gated, shift, scale, norm), strict=True)
        assert all(torch.equal(a, b) for a, b in bits)
    assert torch.equal(
        adaln.launch(x, of, index_Bl=index.int())[0], adaln.launch(x, of, low, high, norm, index_Bl=index.int())[0]
    )
    plain = adaln.added(x, gate, gated.branch_BlE, index_Bl=index.int())
    assert error(plain.flatten(0, 1)[:, None], want[0]) < 2e-5


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("normed_branch", [False, True])
def test_the_sum_alone_has_the_bits_of_the_sum_before_a_norm(dtype: torch.dtype, normed_branch: bool) -> None:
    x, gated, shift, scale, norm = modulation("rms", True, True, normed_branch)(adaln.CASES[2], dtype)
    got = adaln.launch(x, gated)[0]
    assert torch.equal(got, adaln.launch(x, gated, shift, scale, norm)[0])
    want = modulated(*double((x, gated, shift, scale, norm)))[0]
    plain = adaln.added(x, gated.gate_BE, gated.branch_BlE, branch_norm=gated.norm)
    assert plain.dtype == dtype
    assert error((got, plain), (want, want)) <= max(2e-5, torch.finfo(dtype).eps)
    assert error(x, want) > 0.1


def test_adaln_of_the_last_layer_constant_rows_and_one_vector_for_all() -> None:
    x, gated, shift, scale, norm = modulation("layer", True, True)(ROWS, torch.float16)
    whole = adaln.launch(x, gated, shift, scale, norm)
    for call in (adaln.launch, adaln.reference):
        x_new, h = call(x, gated, shift, scale, norm, keep=False)
        assert x_new is x  # the sum is not written
        assert torch.equal(h, call(x, gated, shift, scale, norm)[1])
    expanded = adaln.launch(x, gated, shift[:1].expand_as(shift), scale, norm)
    assert torch.equal(expanded[1], adaln.launch(x, gated, shift[:1], scale, norm)[1])
    # the norm sees the sum before it is rounded
    want = modulated(*double((x, gated, shift, scale, norm)))[1]
    late = adaln.launch(whole[0], None, shift, scale, norm)[1]
    assert rms(whole[1], want) < 0.9 * rms(late, want)
    x = torch.tensor([0.0, 3.0]).repeat_interleave(384).view(1, 2, 384).to(DEVICE)
    shift, scale = torch.ones(1, 384, device=DEVICE), torch.zeros(1, 384, device=DEVICE)
    # the mean may be off by one unit in the last place, times 1 / sqrt(eps); torch's own norm is no better
    assert (adaln.launch(x, None, shift, scale, Norm())[1] - 1).abs().max() < 1e-3
    assert torch.equal(adaln.launch(x[:, :1], None, shift, scale, Norm("rms"))[1], torch.ones_like(x[:, :1]))


def test_activations_far_out_are_their_limits() -> None:
    far = torch.tensor([[[-1e4, -100.0, -20.0, 0.0, 20.0, 100.0, 1e4, 1.0]]], device=DEVICE)
    for got, want in (
        (activations.launch_swiglu(torch.cat((far, torch.ones_like(far)), -1)), silu(far.double())),
        (activations.launch_gelu(far, None), gelu(far.double(), None)),
        (activations.launch_gelu(far, None, exact=True), exact_gelu(far.double(), None)),
        (activations.launch_gelu(far.half(), None, exact=True), exact_gelu(far.double(), None)),
    ):
        torch.testing.assert_close(got.double(), want, rtol=1e-5 if got.dtype == torch.float32 else 1e-3, atol=1e-6)
    broken = torch.full((1, 1, 8), float("nan"), device=DEVICE, dtype=torch.float16)
    assert bool(activations.launch_gelu(broken, None, exact=True).isnan().all())  # bounds must not hide it
    assert error(gelu(far, None), exact_gelu(far, None)) > 1e-5 < error(gelu(X, None), exact_gelu(X, None))


@pytest.mark.parametrize("tile", [(4, 256, 2), (2, 1024, 4)])
@pytest.mark.parametrize("width", [40, 1544])
def test_tiles_of_activations_change_no_bits(
    tile: tuple[int, int, int], width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows and columns do not fill a tile, and a program has more rows than there are."""
    case = {"batch": 3, "tokens": 3, "width": width}
    packed, (x, bias) = projected(case, torch.float16, 2), with_bias(case, torch.float16)
    want = activations.launch_swiglu(packed), activations.launch_gelu(x, bias)
    monkeypatch.setattr(activations, "tile", lambda width, rows=1: activations.Tile(*tile))
    assert torch.equal(activations.launch_swiglu(packed), want[0])
    assert torch.equal(activations.launch_gelu(x, bias), want[1])
    assert torch.equal(activations.launch_gelu(x[:1, :1], bias), want[1][:1, :1])


@pytest.mark.parametrize("last", [True, False], ids=["contiguous", "channels-last"])
@pytest.mark.parametrize("dim", [2, 3, 4])
def test_a_norm_between_the_rows_of_neighbours_has_the_same_bits(last: bool, dim: int) -> None:
    """The rows, columns or frames around it keep their values; a tensor with gaps along two dims is refused."""
    case = {"shape": (2, 12, 3, 5, 7), "groups": 2, "last": last, "silu": False}
    x, groups, affine, _ = grouped(case, torch.float16)
    moments = group_norm.launch_moments(x, groups)
    want = group_norm.launch_normalise(x, moments, affine)
    shape = list(x.shape)
    shape[dim] += 3
    for normalise in (group_norm.launch_normalise, group_norm.reference_normalise):
        wide = turned(torch.full(shape, 7.0, dtype=x.dtype, device=DEVICE), last)
        inside = wide.narrow(dim, 1, x.shape[dim])
        assert normalise(x, moments, affine, False, inside) is inside
        torch.testing.assert_close(inside, want, rtol=2e-3, atol=2e-3)
        assert bool((wide.narrow(dim, 0, 1) == 7.0).all())
        assert bool((wide.narrow(dim, x.shape[dim] + 1, 2) == 7.0).all())
        assert normalise is group_norm.reference_normalise or torch.equal(inside, want)
    gaps = turned(torch.zeros(2, 12, 4, 7, 9, dtype=x.dtype, device=DEVICE), last)[:, :, 1:, 1:6, 1:8]
    with pytest.raises(ValueError, match="expected gaps along one dim"):
        group_norm.launch_normalise(x, moments, affine, False, gaps)


def test_moments_of_no_places_count_nothing_and_memory_in_another_order_is_copied() -> None:
    x = random((2, 24, 3, 5, 7), 0, DEVICE, torch.float16)
    whole, plain = group_norm.launch_moments(x, 4), group_norm.Affine(None, None)
    for moments in (group_norm.launch_moments, group_norm.reference_moments):
        nothing = moments(x[:, :, :0], 4)
        assert not nothing.any()
        torch.testing.assert_close(group_norm.launch_combine(torch.stack((nothing, whole))), whole)
        assert torch.equal(group_norm.reference_combine(torch.stack((nothing, nothing))), nothing)
    apart = x.transpose(3, 4).contiguous().transpose(3, 4)
    assert torch.equal(group_norm.launch_moments(apart, 4), whole)
    got = group_norm.launch_normalise(apart, whole, plain, True)
    assert torch.equal(got, group_norm.launch_normalise(x, whole, plain, True))
    assert error(got, of_groups(x.double(), 4, plain, True)) < 5e-3


def test_moments_and_norms_of_a_shifted_input(monkeypatch: pytest.MonkeyPatch) -> None:
    """A shift is added without rounding; public functions take the kernels on GPUs."""
    x, shift = turned(IMAGE.half()), E.half()
    affine = group_norm.Affine(E.half(), None, shift_C=shift)
    want = of_groups(x.double() + vector(shift.double(), x), 4, group_norm.Affine(E.half().double(), None), False)
    for uses, way in ((True, "launch"), (False, "reference")):
        monkeypatch.setattr(group_norm, "fused", lambda *tensors, uses=uses: uses)
        moments = group_norm.moments(x, 4, shift)
        assert torch.equal(moments, getattr(group_norm, f"{way}_moments")(x, 4, shift))
        assert error(group_norm.normalise(x, moments, affine), want) < 5e-3
        assert error(group_norm.normalise(x, group_norm.moments(x, 4), affine), want) > VISIBLE


PICTURES = [pytest.param(case, marks=gpu if case[-1] > 16 else ()) for case in images.UPSAMPLED]


@pytest.mark.parametrize("shape", PICTURES, ids=lambda shape: "-".join(map(str, shape)))
@pytest.mark.parametrize("last", [True, False], ids=["contiguous", "channels-last"])
def test_upsampling_copies_bits(shape: tuple[int, ...], last: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    x = turned(random(shape, 0, DEVICE, torch.float16), last)
    for uses in (True, False):
        monkeypatch.setattr(images, "fused", lambda *tensors, uses=uses: uses)
        got = images.double(x)
        assert torch.equal(got, x.repeat_interleave(2, -1).repeat_interleave(2, -2))
        assert last or got.is_contiguous(memory_format=torch.channels_last)


def test_channels_beyond_a_programs_registers_and_no_places(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(images, "fused", lambda *tensors: True)
    wide = random((1, 4096, 2), 0, DEVICE, FP32)
    assert torch.equal(images.channel_norm(wide, wide[0, :, 0]), images.reference_norm(wide, wide[0, :, 0]))
    assert images.launch_norm(IMAGE[:, :, :0], E).shape == (2, 24, 0, 5)
    assert images.launch_double(IMAGE[:, :, :0]).shape == (2, 24, 0, 10)
