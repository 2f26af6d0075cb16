"""Calls of a VAE as CUDA graphs: what is captured, which settings a graph keeps, and the memory that it takes."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch

from seqpar.graphs.graphs import Capture, Captured, CudaCapture
from seqpar.mesh.mesh import Mesh

GRAPHS = 2  # kinds of calls that are kept as graphs, because each keeps the memory of a decoding
# Pixels that one rank decodes in a call that is captured. The host bounds strips: with AutoencoderKL on two H200s
# 1024 x 1024 pixels take 12.8 ms as a graph and 48.8 eagerly, and 2048 x 2048 take 49.2 and 54.4, so that larger
# pictures hide the launches. A graph of this size keeps 3 to 4 GiB.
PIXELS = 2048 * 1024
INPUT = "the VAE's input"


class Method:
    """What graphs run: a method of a VAE, or its like. Arguments have names, the input `INPUT`."""

    def __init__(self, compute: Callable[..., Any], check: Callable[[], None] = lambda: None) -> None:
        self.compute, self.check_delivered = compute, check

    def __call__(self, arguments: Mapping[str, Any], /) -> Any:
        """Return what the method returns."""
        z, others = input_and_others(arguments)
        return self.compute(z, **others)


def input_and_others(arguments: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Return the input of a call and its other arguments by their names."""
    return arguments[INPUT], {name: value for name, value in arguments.items() if name != INPUT}


def named(method: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call by their names; the first one is named `INPUT`."""
    arguments = inspect.signature(method).bind(*args, **kwargs).arguments
    first = next(iter(arguments))
    return {INPUT if name == first else name: value for name, value in arguments.items()}


def arithmetic() -> tuple[object, ...]:
    """Return the settings of this process by which kernels are chosen, which a CUDA graph keeps as they were.

    TF32 is read by its newer name, which knows both; the older one raises an error if both were used.
    """
    cudnn, matmul = torch.backends.cudnn, torch.backends.cuda.matmul
    precision = (cudnn.conv.fp32_precision, cudnn.fp32_precision, matmul.fp32_precision)
    return *precision, cudnn.enabled, cudnn.deterministic, cudnn.benchmark, torch.are_deterministic_algorithms_enabled()


def telling_capture(mesh: Mesh) -> Capture:
    """Return a capture of CUDA graphs that prints on rank 0 how much memory each graph keeps."""
    capture = CudaCapture()

    def captured(work: Callable[[], Any], warm_up: int) -> Captured:
        torch.cuda.empty_cache()
        before = torch.cuda.memory_reserved(mesh.device)
        graph = capture(work, warm_up)
        torch.cuda.empty_cache()  # what the runs before the capture needed
        kept = (torch.cuda.memory_reserved(mesh.device) - before) / 2**30
        if mesh.is_main:
            print(f"seqpar: pictures of this size are decoded by a CUDA graph, which keeps {kept:.2f} GiB", flush=True)
        return graph

    return captured
