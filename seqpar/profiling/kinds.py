"""What a kernel of a GPU, or an operation of torch on a CPU, does: told by its name.

Names are those of cuBLAS, CUTLASS, cuDNN, FlashAttention, NCCL and gloo, of torch's operations, and of the kernels in
`seqpar/kernels`. What has none of these names is elementwise.
"""

from __future__ import annotations

from typing import Literal

from seqpar.profiling.columns import Kind

What = Literal["products", "attention", "elementwise", "exchange", "copy", "store"]
"""What an event does. exchange: it sends or receives, or waits until others have sent. copy: it sends and waits for
nobody. store: an elementwise kernel that may write into other ranks' memory, and at its end wait until they have."""

# parts of lower-case names, looked for in this order
ATTENTION = ("flash", "fmha", "sdpa", "attention", "weights_kernel", "parts_kernel")
EXCHANGES = ("nccl", "gloo:", "flags_kernel", "take_kernel")
COPIES = ("memcpy ptop", "memcpy dtod")  # inside of blocks the latter is a copy into memory of another rank, too
STORES = ("prepare_kernel", "push_kernel", "send_kernel")
PRODUCTS = (
    *("gemm", "gemv", "nvjet", "cutlass", "xmma", "cublas", "splitk", "dgrad", "fprop", "convolve", "winograd"),
    *(
        "::linear",
        "::addmm",
        "::mm",
        "::bmm",
        "::matmul",
        "::baddbmm",
        "::addbmm",
        "::conv",
        "::einsum",
        "::_scaled_mm",
    ),
)
PLAIN: tuple[tuple[What, tuple[str, ...]], ...] = (
    ("attention", ATTENTION),
    ("exchange", EXCHANGES),
    ("copy", COPIES),
    ("store", STORES),
    ("products", PRODUCTS),
)
AS_KIND: dict[What, Kind] = {
    "products": "products",
    "attention": "attention",
    "elementwise": "elementwise",
    "exchange": "exchange",
    "copy": "exchange",
    "store": "elementwise",
}


def what_of(name: str) -> What:
    """Return what an event of this name does."""
    lower = name.lower()
    for what, words in PLAIN:
        if any(word in lower for word in words):
            return what
    return "elementwise"
