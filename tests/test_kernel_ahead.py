"""Weights fetched ahead: what is asked for and when, every row once, no bit changed, always the next weight."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from seqpar.kernels import adaln, gelu, prepare, swiglu
from seqpar.kernels import ahead as module
from seqpar.kernels.adaln import Gated, Norm
from seqpar.kernels.ahead import BYTES, Ahead, Budget, ahead, asked, spread
from seqpar.kernels.gated_linear import gated_linear
from seqpar.kernels.residual_linear import linear_gate_norm_modulate
from seqpar.models import dit, large_dit
from seqpar.protocols import Outbox, Outboxes, Prepare
from tests.conftest import DEVICE
from tests.meshes import random
from tests.test_kernel_gated_linear import interpreted

# numpy's, in the interpreter's activations
pytestmark = pytest.mark.filterwarnings("ignore:overflow:RuntimeWarning")
gpu = pytest.mark.gpu
told = pytest.mark.skipif(DEVICE != "cpu", reason="Triton's interpreter tells what is asked for")
KERNELS = (adaln, gelu, prepare, swiglu)
DIMS = {"batch": 2, "tokens": 3, "heads": 4, "dim": 32}
WIDTH = 128
LANES = 64  # of one program, in these tests
LAUNCHES = ("norm", "gate, norm", "SwiGLU", "GELU", "prepare", "outboxes")
Launch = Callable[[Ahead | None], tuple[Tensor, ...]]


def weight(rows: int = 700, columns: int = 96, device: str = DEVICE) -> Tensor:
    """By default more rows than the lanes of a few programs."""
    return torch.zeros(rows, columns, dtype=torch.float16, device=device)


def launches() -> dict[str, Launch]:
    """Every kernel that a product follows, on a few rows: `LAUNCHES`."""
    x, branch = (random((2, 3, WIDTH), seed, DEVICE, torch.float16) for seed in range(2))
    gate, shift, scale = random((2, 3, WIDTH), 2, DEVICE, torch.float32).unbind(1)
    q, k, v = random((2, 3, 3, 4, 32), 3, DEVICE, torch.float16).unbind(2)
    norm, how = Norm("rms"), Prepare("rms", True)

    def boxed(fetching: Ahead | None) -> tuple[Tensor, ...]:
        made = outboxes(q)
        prepare.launch_into(q, k, v, how, made, fetching=fetching)
        return tuple(view for box in made for view in (box.q, box.k, box.v) if view is not None)

    return {
        "norm": lambda what: adaln.launch(x, None, shift, scale, norm, fetching=what),
        "gate, norm": lambda what: adaln.launch(x, Gated(gate, branch), shift, scale, norm, fetching=what),
        "SwiGLU": lambda what: (swiglu.launch(x, fetching=what),),
        "GELU": lambda what: (gelu.launch(x, None, fetching=what),),
        "prepare": lambda what: prepare.launch(q, k, how, fetching=what),
        "outboxes": boxed,
    }


def outboxes(q_BlHD: Tensor) -> Outboxes:
    """All heads to one reader."""
    batch, tokens, heads, dim = q_BlHD.shape
    views = q_BlHD.new_zeros(3, tokens, batch, heads, dim)
    return Outboxes([Outbox(views[0], views[1], views[2], slice(0, heads), slice(0, heads))])


def needs_hopper() -> None:
    """For tests that run the instruction: older GPUs do not have it, and `BYTES` will not name them."""
    if DEVICE != "cpu" and torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("the instruction is Hopper's")


# What is asked for ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rows", "columns", "size", "each"),
    [
        (12288, 4096, 8 << 20, 640),  # 682 bytes of each row, in whole lines
        (12288, 4096, 1 << 20, 128),  # 85 bytes: at least one line
        (4096, 4096, 64 << 20, 8192),  # more than there is: the whole weight
        (3456, 1152, 64 << 20, 2304),
        (40, 72, 64 << 20, 128),  # rows of 144 bytes: the one whole line
    ],
)
def test_bytes_are_spread_over_the_rows_in_whole_lines(rows: int, columns: int, size: int, each: int) -> None:
    matrix = torch.empty(rows, columns, dtype=torch.bfloat16)
    found = spread(matrix, size)
    assert found is not None
    assert found.weight_FE is matrix
    assert found.size == each


def test_weights_that_cannot_be_fetched_are_left_alone() -> None:
    store = torch.empty(64 * 80 + 8, dtype=torch.float16)
    aligned = store[-store.data_ptr() // 2 % 8 :][: 64 * 72]
    assert spread(aligned.view(64, 72), 1 << 20) is not None
    for name, matrix in {
        "starts on 2 bytes": store[-store.data_ptr() // 2 % 8 + 1 :][: 64 * 72].view(64, 72),
        "rows of 146 bytes": store[: 64 * 73].view(64, 73),
        "strided": store[: 64 * 80].view(64, 80)[:, :72],
        "transposed": store[: 64 * 72].view(72, 64).t(),
        "rows of less than a line": store[: 64 * 56].view(64, 56),
    }.items():
        assert spread(matrix, 1 << 20) is None, name


def test_nothing_is_asked_for_until_it_is_measured() -> None:
    assert not BYTES
    assert ahead(weight(), 1) is None


def test_one_line_switches_it_on(monkeypatch: pytest.MonkeyPatch) -> None:
    matrix = weight(256, 4096)
    monkeypatch.setattr(module, "BYTES", {(9, 0): Budget(rows=256, size=1 << 20)})
    if DEVICE == "cpu":
        assert ahead(matrix, 1) is None  # not on a GPU
        monkeypatch.setattr(module, "fused", lambda *tensors: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert ahead(matrix, 256) == spread(matrix, 1 << 20) == Ahead(matrix, 4096)
    monkeypatch.setattr(module, "BYTES", {(9, 0): Budget(rows=256, size=1 << 20, early=True)})
    assert ahead(matrix, 256) == Ahead(matrix, 4096, early=True)
    assert ahead(matrix, 257) is None
    assert ahead(None, 1) is None
    assert ahead(matrix[:, 1:], 1) is None
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    assert ahead(matrix, 1) is None


@pytest.mark.parametrize(
    "what",
    [*(Ahead(weight(device="cpu"), size) for size in (24, 0, 208)), Ahead(weight(device="cpu")[:, 1:], 64),
     Ahead(weight(8, 90, "cpu")[:, :64], 64), Ahead(weight(device="cpu").t(), 64)],
    ids=["24 bytes", "none", "longer than a row", "starts on 2 bytes", "stride of 180 bytes", "transposed"],
)  # fmt: skip
def test_what_the_instruction_cannot_take_is_refused(what: Ahead) -> None:
    with pytest.raises(ValueError, match="expected a multiple of 16 inside of contiguous rows"):
        asked(what)


# What kernels do with it ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("kernel", LAUNCHES)
def test_no_bit_changes(kernel: str) -> None:
    needs_hopper()
    launch, what = launches()[kernel], spread(weight(), 1 << 14)
    assert what is not None
    assert all(torch.equal(a, b) for a, b in zip(launch(what), launch(None), strict=True))


@pytest.mark.parametrize("kernel", LAUNCHES)
def test_no_bit_changes_where_a_kernel_starts_early(kernel: str) -> None:
    needs_hopper()
    launch, what = launches()[kernel], Ahead(None, 0, early=True)
    assert all(torch.equal(a, b) for a, b in zip(launch(what), launch(None), strict=True))


@pytest.fixture
def requests(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """(address, bytes) of every request that the interpreter comes across, instead of the instruction."""
    made: list[tuple[int, int]] = []

    def instruction(asm: str, constraints: str, args: Sequence[Any], *rest: Any, **how: Any) -> None:
        addresses, mine = (x.handle.data.ravel() for x in args[:2])
        made.extend((int(address), int(args[2])) for address, wanted in zip(addresses, mine, strict=True) if wanted)

    monkeypatch.setattr(module, "compiled", lambda kernel: True)
    monkeypatch.setattr(module.tl, "inline_asm_elementwise", instruction)
    extra: Any = module.tl.extra
    monkeypatch.setattr(extra.cuda, "num_threads", lambda: LANES)
    return made


@told
@interpreted
@pytest.mark.parametrize("kernel", LAUNCHES)
@pytest.mark.parametrize("rows", [1, 5, 64, 700])
def test_every_row_is_asked_for_once(kernel: str, rows: int, requests: list[tuple[int, int]]) -> None:
    matrix = weight(rows)
    launches()[kernel](Ahead(matrix, 128))
    assert sorted(requests) == [(row.data_ptr(), 128) for row in matrix]


@told
def test_nothing_is_asked_for_where_nothing_was_given(requests: list[tuple[int, int]]) -> None:
    for launch in launches().values():
        launch(None)
    assert requests == []


# Which weight --------------------------------------------------------------------------------------------------


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[str, Any]]]:
    """("next", weight) where a kernel decides what to ask for, ("read", weight) where a product reads it, in order."""
    seen: list[tuple[str, Any]] = []
    product = F.linear

    def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        seen.append(("read", weight))
        return product(x, weight, bias)

    def decide(next_weight: Tensor | None, rows: int) -> None:
        seen.append(("next", next_weight))
        assert rows == DIMS["batch"] * DIMS["tokens"]

    monkeypatch.setattr(F, "linear", linear)
    for kernel in KERNELS:
        monkeypatch.setattr(kernel, "fused", lambda *tensors: True)
        monkeypatch.setattr(kernel, "ahead", decide)
    with torch.no_grad():
        yield seen


def announced(seen: Sequence[tuple[str, Any]]) -> list[bool]:
    """For each product, whether the event before it was that this weight is next."""
    return [i > 0 and seen[i - 1][0] == "next" and seen[i - 1][1] is seen[i][1]
            for i in range(len(seen)) if seen[i][0] == "read"]  # fmt: skip


def attend(q_BlHD: Tensor, k_BlGD: Tensor, v_BlGD: Tensor, how: Prepare, /) -> Tensor:
    """As on several ranks: also a q and k without norm and rotary go into outboxes. The output is v."""
    made = outboxes(q_BlHD)
    prepare.prepare_into(q_BlHD, k_BlGD, v_BlGD, how, made)
    assert made[0].v is not None
    return made[0].v.transpose(0, 1)


MODELS: dict[str, Callable[[], Any]] = {
    "Large-DiT": lambda: large_dit.Model(large_dit.Config(WIDTH, 3, 4, 4, 48, num_classes=10)),
    "Large-DiT without QK-norm": lambda: large_dit.Model(large_dit.Config(WIDTH, 2, 4, 4, 48, qk_norm=False)),
    "DiT": lambda: dit.Model(dit.Config(4, 32, 3, num_classes=10)),
}


@pytest.mark.parametrize("name", MODELS)
def test_a_model_names_the_weight_that_is_read_next(name: str, events: list[tuple[str, Any]]) -> None:
    """By identity: a wrong weight would be fetched in vain, and nothing else would tell."""
    model = MODELS[name]().to(DEVICE)
    condition = model.condition(torch.tensor([3.0, 4.0], device=DEVICE), class_labels=torch.tensor([1, 2]).to(DEVICE))
    tokens, rows = random((2, 3, 16), 0, DEVICE), model.positions(6, 2)
    events.clear()
    model.forward_tokens({"tokens": tokens}, rows, condition, attend)
    blocks = 4 * len(model.blocks)
    # the first product follows nothing, the last one (few columns) is not worth it
    assert announced(events) == [False, *[True] * blocks, False]
    assert [weight for kind, weight in events if kind == "read"][-1] is model.final.weight
    assert [kind for kind, _ in events].count("next") == blocks + 1
    # negative control: every time the weight of the product after the next
    later = [weight for kind, weight in events if kind == "next"]
    later = iter([*later[1:], later[0]])
    assert not any(announced([(kind, next(later) if kind == "next" else weight) for kind, weight in events]))


def test_public_functions_pass_it_on(events: list[tuple[str, Any]]) -> None:
    """Those that models of others may call; what they compute is tested elsewhere."""
    x, vectors, square = (random(shape, 0, DEVICE, torch.float32) for shape in ((2, 3, WIDTH),) * 2 + ((WIDTH,) * 2,))
    (gate, shift, scale), norm, last = vectors.unbind(1), Norm("layer"), weight()
    adaln.norm_modulate(x, shift, scale, norm, next_weight=last)
    adaln.gate_norm_modulate(x, gate, x, shift, scale, norm, next_weight=last)
    swiglu.swiglu(x, next_weight=last)
    gelu.bias_gelu(x, None, next_weight=last)
    gelu.linear_gelu(x, square, square[0], next_weight=last)
    gated_linear(x, square, next_weight=last)
    linear_gate_norm_modulate(x, gate, x, square, shift, scale, norm, next_weight=last)
    q, k = random((2, 2, 3, 4, 32), 3, DEVICE, torch.float32).unbind(0)
    prepare.prepare(q, k, Prepare("rms", next_weight=last))
    given = [weight for kind, weight in events if kind == "next"]
    assert len(given) == 8
    assert all(weight is last for weight in given)


@gpu
def test_gpu_no_bit_changes_at_real_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The norm before the 7B's qkv and the product itself, with all that the instruction can do on the way."""
    x = random((2, 64, 4096), 0, DEVICE, torch.bfloat16)
    shift, scale = random((2, 2, 4096), 1, DEVICE, torch.float32).unbind(1)
    needs_hopper()
    qkv = random((12288, 4096), 2, DEVICE, torch.bfloat16)

    def projected() -> Tensor:
        return F.linear(adaln.norm_modulate(x, shift, scale, Norm("rms"), next_weight=qkv), qkv)

    want = projected()
    for size in (1 << 20, 8 << 20, 128 << 20):
        budget = Budget(rows=128, size=size)
        monkeypatch.setattr(module, "BYTES", {torch.cuda.get_device_capability(): budget})
        assert ahead(qkv, 128) is not None
        assert torch.equal(projected(), want)
