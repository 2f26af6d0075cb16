"""SiLU as a device function of the kernels of norms.

As machine code it takes five instructions. Triton's own exponential and division scale around denormal numbers, which
takes about as long as the memory that a norm moves. The error is a few units in the last place of fp32.
"""

from __future__ import annotations

from seqpar.kernels._triton import jit, tl


@jit
def activated(x, MACHINE: tl.constexpr):
    # MACHINE: the kernel runs as machine code, because Triton's interpreter has no assembly
    if MACHINE:
        # x / (1 + 2 ** (-x log2 e)); 0fBFB8AA3B is -log2 e and 0f3F800000 is 1
        return tl.inline_asm_elementwise(
            "{ .reg .f32 p; mul.f32 p, $1, 0fBFB8AA3B; ex2.approx.ftz.f32 p, p; add.f32 p, p, 0f3F800000; "
            "rcp.approx.ftz.f32 p, p; mul.f32 $0, $1, p; }",
            "=f,f",
            [x],
            dtype=tl.float32,
            is_pure=True,
            pack=1,
        )
    else:  # noqa: RET505 (Triton needs both ways)
        return x / (1.0 + tl.exp(-x))
