"""Compares pictures: PSNR, SSIM by its formula, and LPIPS where a file has the weights of its network."""

from __future__ import annotations

import importlib.util
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from seqpar.weights.pickles import read_state

WINDOW, SIGMA = 11, 1.5  # of SSIM's Gaussian weights, in pixels
C1, C2 = 0.01**2, 0.03**2  # (K1 L)^2 and (K2 L)^2 for values in [0, 1], L = 1
LPIPS_LEAST = 64  # pixels; AlexNet pools smaller pictures away, so that they are enlarged


@dataclass(frozen=True)
class Likeness:
    """How like two sets of pictures are, by the worst picture: psnr in dB (infinite for equal ones), ssim, lpips."""

    psnr: float
    ssim: float
    lpips: float | None


def likeness(got_N3HW: Tensor, truth_N3HW: Tensor, lpips: Any = None) -> Likeness:
    """Return the worst PSNR, SSIM and LPIPS of pairs of pictures with values in [0, 1]. lpips: from `load_lpips`."""
    pair, distance = (got_N3HW.cpu(), truth_N3HW.cpu()), None
    if lpips is not None:  # its network takes values in [-1, 1]
        scale = math.ceil(LPIPS_LEAST / min(pair[0].shape[2:]))
        enlarged = (x.float().repeat_interleave(scale, 2).repeat_interleave(scale, 3) * 2 - 1 for x in pair)
        distance = float(lpips(*enlarged).max())
    return Likeness(float(psnr(*pair).min()), float(ssim(*pair).min()), distance)


def psnr(got_N3HW: Tensor, truth_N3HW: Tensor) -> Tensor:
    """Return the peak signal-to-noise ratio of each picture in dB, (N,): 10 log10(1 / mean squared difference)."""
    mean = (got_N3HW.double() - truth_N3HW.double()).square().mean(dim=(1, 2, 3))
    return -10 * mean.log10()


def ssim(got_N3HW: Tensor, truth_N3HW: Tensor) -> Tensor:
    """Return the mean structural similarity of each picture, (N,).

    Wang et al., "Image quality assessment: from error visibility to structural similarity" (2004), formula 13 with an
    11 x 11 Gaussian window of standard deviation 1.5, where the whole window lies in the picture, mean over colours.
    Raises ValueError for pictures smaller than the window.
    """
    if min(got_N3HW.shape[2:]) < WINDOW:
        raise ValueError(f"got pictures of {tuple(got_N3HW.shape[2:])} pixels, expected at least {WINDOW} x {WINDOW}")
    offset = torch.arange(WINDOW, dtype=torch.float64) - WINDOW // 2
    weights = (-(offset**2) / (2 * SIGMA**2)).exp()
    window = (torch.outer(weights, weights) / weights.sum() ** 2)[None, None]
    x, y = got_N3HW.double(), truth_N3HW.double()
    products = torch.stack((x, y, x * x, y * y, x * y))
    means = F.conv2d(products.flatten(0, 2)[:, None], window).unflatten(0, products.shape[:3])
    mean_x, mean_y = means[0], means[1]
    variances = means[2] + means[3] - mean_x**2 - mean_y**2
    above = (2 * mean_x * mean_y + C1) * (2 * (means[4] - mean_x * mean_y) + C2)
    return (above / ((mean_x**2 + mean_y**2 + C1) * (variances + C2))).flatten(1).mean(dim=1)


def why_no_lpips(weights: Path | None) -> str | None:
    """Return why LPIPS cannot be computed, or None if it can."""
    if weights is None:
        return "no file with the weights of its network was given (--lpips)"
    missing = [name for name in ("lpips", "torchvision") if importlib.util.find_spec(name) is None]
    return f"the package {' and '.join(missing)} is not installed" if missing else None


def load_lpips(weights: Path) -> Any:
    """Return the LPIPS network of the package `lpips` (arXiv 1801.03924, AlexNet), which has its linear weights.

    weights: torchvision's AlexNet as a file of tensors ("features.0.weight", ...). Nothing is downloaded. Raises
    ValueError if the file does not have these tensors.
    """
    network = importlib.import_module("lpips").LPIPS(net="alex", pnet_rand=True, verbose=False)
    tensors, _ = read_state(weights)
    for name, parameter in network.net.named_parameters():  # "slice2.3.weight" is torchvision's "features.3.weight"
        key = f"features.{name.partition('.')[2]}"
        if key not in tensors or tensors[key].shape != parameter.shape:
            raise ValueError(f"got {weights} without {key} of shape {tuple(parameter.shape)}, expected an AlexNet")
        parameter.data.copy_(tensors[key])
    return network.eval().requires_grad_(False)
