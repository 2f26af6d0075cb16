"""Facts about VAEs: types of modules tested on strips, local functions, and bytes per pixel.

A function is local if its result on a strip is the strip of its result: pointwise functions, views, and joining or
splitting along channels and time. The check at the next convolution finds joins along the cut dim.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from seqpar.vae.shared import METHODS, original

_TORCH = {
    "activation": ("SiLU",),
    "batchnorm": ("BatchNorm2d",),  # holds numbers that FLUX.2's pipelines read; it is never called
    "container": ("ModuleList", "Sequential"),
    "conv": ("Conv2d", "Conv3d"),
    "dropout": ("Dropout",),
    "linear": ("Linear", "Identity"),
    "normalization": ("GroupNorm", "LayerNorm"),
    "padding": ("ZeroPad2d",),
}
# Wan's blocks, which Qwen-Image has under its own name
_CAUSAL = (
    *("AttentionBlock", "CausalConv3d", "Decoder3d", "Encoder3d", "MidBlock"),
    *("RMS_norm", "Resample", "ResidualBlock", "UpBlock", "Upsample"),
)
_DIFFUSERS = {
    "attention_processor": ("Attention",),
    "autoencoders.autoencoder_kl": ("AutoencoderKL",),
    "autoencoders.autoencoder_kl_flux2": ("AutoencoderKLFlux2",),
    "autoencoders.autoencoder_kl_hunyuan_video": (
        "AutoencoderKLHunyuanVideo",
        *(f"HunyuanVideo{name}Causal3D" for name in ("Upsample", "Downsample", "ResnetBlock")),
        *(f"HunyuanVideo{name}3D" for name in ("Decoder", "Encoder", "MidBlock", "DownBlock", "UpBlock")),
        "HunyuanVideoCausalConv3d",
    ),
    "autoencoders.autoencoder_kl_ltx": (
        "AutoencoderKLLTXVideo",
        *(f"LTXVideo{name}3d" for name in ("CausalConv", "Decoder", "Encoder", "MidBlock", "ResnetBlock", "UpBlock")),
        *(f"LTXVideo{name}" for name in ("DownBlock3D", "095DownBlock3D", "Downsampler3d", "Upsampler3d")),
    ),
    "autoencoders.autoencoder_kl_qwenimage": ("AutoencoderKLQwenImage", *(f"QwenImage{name}" for name in _CAUSAL)),
    "autoencoders.autoencoder_kl_wan": (
        "AutoencoderKLWan",
        *(f"Wan{name}" for name in _CAUSAL),
        *("AvgDown3D", "DupUp3D", "WanResidualDownBlock", "WanResidualUpBlock"),
    ),
    "autoencoders.vae": ("Decoder", "Encoder"),
    "downsampling": ("Downsample2D",),
    "embeddings": ("PixArtAlphaCombinedTimestepSizeEmbeddings", "TimestepEmbedding", "Timesteps"),
    "normalization": ("RMSNorm",),
    "resnet": ("ResnetBlock2D",),
    "unets.unet_2d_blocks": ("DownEncoderBlock2D", "UNetMidBlock2D", "UpDecoderBlock2D"),
    "upsampling": ("Upsample2D",),
}
MODULES = frozenset(
    f"{prefix}.{module}.{name}"
    for prefix, table in (("torch.nn.modules", _TORCH), ("diffusers.models", _DIFFUSERS))
    for module, names in table.items()
    for name in names
)
"""The types of modules whose strips were tested, as module path and class name."""
PROCESSORS = frozenset(f"diffusers.models.attention_processor.{name}AttnProcessor2_0" for name in ("", "Fused"))
"""The types of attention processors whose strips were tested: diffusers' choice, also after `fuse_qkv_projections`."""


# Classes that compute by functions of `norms.py`: residual blocks of images and videos, norms over channels, upsampling
IMAGE_BLOCKS = ("ResnetBlock2D",)
VIDEO_BLOCKS = ("WanResidualBlock", "QwenImageResidualBlock")
CHANNEL_NORMS = ("WanRMS_norm", "QwenImageRMS_norm")
UPSAMPLINGS = ("WanUpsample", "QwenImageUpsample")
ACTIVATED = {
    **dict.fromkeys(
        ("Encoder", "Decoder", "HunyuanVideoEncoder3D", "HunyuanVideoDecoder3D"), ("conv_act", "conv_norm_out")
    ),
    **dict.fromkeys(
        ("WanEncoder3d", "WanDecoder3d", "QwenImageEncoder3d", "QwenImageDecoder3d"), ("nonlinearity", "norm_out")
    ),
    "HunyuanVideoResnetBlockCausal3D": ("nonlinearity", "norm1", "norm2"),
}
"""Class -> the name of its SiLU, and the names of the only norms before it."""
CHANNELS_LAST_VIDEOS = ("AutoencoderKLWan", "AutoencoderKLQwenImage")  # faster in channels-last memory


def why_untested(vae: nn.Module) -> str | None:
    """Return why strips do not support a VAE, or None: the first module of another type, or `why_changed`."""
    for name, module in vae.named_modules():
        kind = _kind(module)
        if kind not in MODULES:
            return (
                f"its module {name or '(the VAE itself)'} is a {kind}, which was not tested on strips; decode whole "
                f"images, or add rules and a test for it"
            )
        if getattr(module, "per_channel_scale1", None) is not None:
            return (
                f"its module {name} ({kind}) draws noise for its pixels (inject_noise), which strips would draw "
                f"differently; decode whole images"
            )
    return why_changed(vae)


def why_unknown(vae: Any) -> str | None:
    """Return why a VAE is never cut into strips, or None: `why_untested`, or a method that is not diffusers' own."""
    for name in filter(partial(hasattr, vae), METHODS):
        if getattr(original(vae, name), "__func__", None) is not getattr(type(vae), name):
            return f"its {name} was replaced by another function"
    return why_untested(vae)


def why_changed(vae: nn.Module) -> str | None:
    """Return why a VAE of tested modules cannot be cut into strips at the moment, or None.

    Users switch on and off: hooks that move or convert the weights of single modules (group and sequential offloading,
    layerwise casting), and other attention processors. The hook that offloads the whole VAE does not matter.
    """
    for name, module in vae.named_modules():
        names = vars(module)
        registry, processor = names.get("_diffusers_hook"), names.get("processor", names["_modules"].get("processor"))
        hooked = names["_forward_hooks"] or names["_forward_pre_hooks"] or ("forward" in names and registry is None)
        if name and ("_hf_hook" in names or hooked):
            fault = "has a hook or a replaced forward"
        elif registry is not None and registry.hooks:
            fault = "has a hook (offloading or layerwise casting)"
        elif processor is not None and _kind(processor) not in PROCESSORS:
            fault = f"has the attention processor {_kind(processor)}, which was not tested on strips"
        else:
            continue
        return f"its module {name or '(the VAE itself)'} {fault}; decode whole images, or remove it"
    return None


def _kind(value: object) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"


def _getters(*names: str) -> list[Any]:
    return [getattr(Tensor, name).__get__ for name in names]


LOCAL = frozenset(
    [
        *_getters("shape", "dtype", "device", "ndim", "is_cuda", "requires_grad", "layout", "data"),
        *(Tensor.size, Tensor.dim, Tensor.numel, Tensor.stride, Tensor.is_contiguous, Tensor.is_floating_point),
        *(Tensor.add, Tensor.sub, Tensor.mul, Tensor.div, Tensor.pow, Tensor.neg, Tensor.__eq__),
        *(Tensor.add_, Tensor.mul_, Tensor.div_, torch.add, torch.mul, torch.div, torch.rsqrt, torch.sqrt),
        *(torch.exp, torch.clamp, Tensor.clamp, Tensor.le, torch.where, F.silu, F.relu, F.gelu, torch.sigmoid),
        *(Tensor.to, Tensor.float, Tensor.type_as, Tensor.clone, Tensor.contiguous, Tensor.detach, Tensor.copy_),
        *(Tensor.view, Tensor.reshape, Tensor.permute, Tensor.transpose, Tensor.movedim, Tensor.flatten),
        *(Tensor.unflatten, Tensor.squeeze, Tensor.unsqueeze, Tensor.expand, Tensor.chunk, Tensor.split),
        *(Tensor.unbind, Tensor.repeat, Tensor.repeat_interleave, Tensor.__getitem__, Tensor.__setitem__),
        *(Tensor.narrow, torch.sin, torch.cos, torch.arange),
        *(torch.cat, torch.concatenate, torch.stack, torch.chunk, torch.split),
        *(torch.zeros_like, torch.ones_like, torch.zeros, torch.functional.meshgrid, F.linear),
    ]
)
"""Functions whose result on a strip is the strip of their result.

Some are local only as the modules in `MODULES` call them: `arange`, `meshgrid` and the indexing of rows depend on
positions; views, `cat` and `linear` on the dims. Arguments are not checked. A type of module is listed only after its
strips were compared with whole images; check these functions when you add one.
"""


# Bytes that decoding takes in 16 bits, as measured on an H200: for each pixel, and for each pixel of each frame
BYTES = {
    "AutoencoderKL": (1600, 0),
    "AutoencoderKLFlux2": (1600, 0),
    "AutoencoderKLHunyuanVideo": (0, 750),
    "AutoencoderKLLTXVideo": (0, 115),
    "AutoencoderKLQwenImage": (4400, 0),
    "AutoencoderKLWan": (9000, 18),  # frame after frame
}


def decoding_bytes(vae: Any, shape: Sequence[int]) -> float:
    """Return the bytes of decoding a latent (C, h, w) or (C, F, h, w) of a known VAE, in strips or whole."""
    each, each_frame = BYTES[type(vae).__name__]
    frames = (shape[1] - 1) * temporal_factor(vae) + 1 if len(shape) == 4 else 1
    pixels = shape[-2] * shape[-1] * spatial_factor(vae) ** 2
    itemsize = next(vae.parameters()).dtype.itemsize  # diffusers' `dtype` visits every module, in each call of `decode`
    return pixels * (each + each_frame * frames) * itemsize / 2


def spatial_factor(vae: Any) -> int:
    """Return the pixels along each side of a latent pixel."""
    config: Mapping[str, Any] = vae.config
    for name in ("scale_factor_spatial", "spatial_compression_ratio"):
        if config.get(name) is not None:
            return config[name]
    if hasattr(vae, "spatial_compression_ratio"):
        return vae.spatial_compression_ratio
    return 2 ** (len(config["block_out_channels"]) - 1)


def temporal_factor(vae: Any) -> int:
    """Return the frames of a latent frame after the first one."""
    known = (vae.config.get(name) for name in ("scale_factor_temporal", "temporal_compression_ratio"))
    return int(next(filter(None, known), None) or getattr(vae, "temporal_compression_ratio", 1))


def latent_frames(vae: Any, frames: int) -> int:
    """Return the latent frames of a video; MiniMax-H3's are made of clips, of which the last ones are dropped."""
    factor, clip = temporal_factor(vae), vae.config.get("clip_length")
    if clip is None:
        return (frames - 1) // factor + 1
    return -(-frames // clip) * -(-clip // factor) - vae.config["token_drop"]
