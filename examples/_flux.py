# pyright cannot infer the types of diffusers' and transformers' modules
# pyright: reportAttributeAccessIssue=false, reportPrivateImportUsage=false, reportArgumentType=false
# pyright: reportOptionalCall=false, reportOptionalSubscript=false, reportOptionalMemberAccess=false
# pyright: reportOptionalOperand=false, reportOperatorIssue=false, reportIndexIssue=false, reportCallIssue=false
"""The built-in text-to-image model's networks: a small FLUX with small CLIP and T5 encoders, its losses and its folder.

Legend: B batch, C channels, L text tokens, S picture tokens.
"""

from pathlib import Path

import torch
import torch.nn.functional as F
from diffusers import AutoencoderKL, FlowMatchEulerDiscreteScheduler, FluxPipeline, FluxTransformer2DModel
from peft import LoraConfig
from peft.utils import get_peft_model_state_dict
from torch import Tensor, nn
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTokenizer, T5Config, T5EncoderModel, T5TokenizerFast

TEXT_WIDTH = 64  # of both encoders
SIDE = 8  # picture tokens along each side of a latent of 16 x 16
GUIDED = (1.0, 6.0)  # the scales of guidance that the model takes as an input
STYLED = (1.0, 1.0)  # a LoRA learns the flow itself; at a higher scale it would unlearn guidance


class Parts(nn.Module):
    """The networks that are trained together; a prediction of the flow from tokens of prompts and noisy latents."""

    def __init__(self, clip: CLIPTokenizer, t5: T5TokenizerFast) -> None:
        super().__init__()
        eager = {"attn_implementation": "eager"}  # fused attention has no fast gradient of T5's bias
        self.clip = CLIPTextModel(
            CLIPTextConfig(
                vocab_size=len(clip),
                hidden_size=TEXT_WIDTH,
                intermediate_size=2 * TEXT_WIDTH,
                bos_token_id=clip.bos_token_id,
                eos_token_id=clip.eos_token_id,
                pad_token_id=clip.pad_token_id,
                num_hidden_layers=2,
                num_attention_heads=2,
                **eager,
            )
        )
        self.t5 = T5EncoderModel(
            T5Config(
                vocab_size=len(t5),
                d_model=TEXT_WIDTH,
                d_kv=TEXT_WIDTH // 2,
                d_ff=2 * TEXT_WIDTH,
                num_layers=2,
                num_heads=2,
                dropout_rate=0.0,
                **eager,
            )
        )
        self.transformer = FluxTransformer2DModel(
            patch_size=1,
            in_channels=16,
            num_layers=1,
            num_single_layers=3,
            attention_head_dim=64,
            num_attention_heads=4,
            joint_attention_dim=TEXT_WIDTH,
            pooled_projection_dim=TEXT_WIDTH,
            guidance_embeds=True,
            axes_dims_rope=(16, 24, 24),
        )
        self._start()

    def _start(self) -> None:
        """Set the transformer's initial weights: every block starts as the identity, the prediction at zero."""
        for name, module in self.transformer.named_modules():
            if isinstance(module, nn.Linear):
                nn.init.zeros_(module.bias)
                if "norm" in name or name == "proj_out":
                    nn.init.zeros_(module.weight)
                else:
                    nn.init.xavier_uniform_(module.weight)

    def texts(self, clip_BL: Tensor, t5_BL: Tensor) -> tuple[Tensor, Tensor]:
        """Return T5's text tokens and CLIP's pooled vector."""
        return self.t5(input_ids=t5_BL)[0], self.clip(input_ids=clip_BL).pooler_output

    def forward(
        self, noisy_BSC: Tensor, sigma_B: Tensor, scale_B: Tensor, text_BLC: Tensor, pooled_BC: Tensor
    ) -> Tensor:
        """Return the flow, from picture to noise. sigma_B: the share of noise. scale_B: of guidance."""
        device, dtype = noisy_BSC.device, self.transformer.dtype
        ids = torch.zeros(SIDE, SIDE, 3, device=device)
        ids[..., 1] += torch.arange(SIDE, device=device)[:, None]
        ids[..., 2] += torch.arange(SIDE, device=device)[None]
        flow = self.transformer(
            hidden_states=noisy_BSC.to(dtype),
            timestep=sigma_B.to(dtype),
            guidance=scale_B.to(dtype),
            encoder_hidden_states=text_BLC,
            pooled_projections=pooled_BC,
            img_ids=ids.view(-1, 3),
            txt_ids=torch.zeros(text_BLC.shape[1], 3, device=device),
            return_dict=False,
        )[0]
        return flow.float()


def packed(latents_BCHW: Tensor) -> Tensor:
    """Return 2 x 2 latent pixels as one token, in FLUX's order."""
    batch, channels, height, width = latents_BCHW.shape
    cells = latents_BCHW.view(batch, channels, height // 2, 2, width // 2, 2)
    return cells.permute(0, 2, 4, 1, 3, 5).reshape(batch, -1, 4 * channels)


def mixed(latents_BSC: Tensor, noise_BSC: Tensor, sigma_B: Tensor) -> Tensor:
    return torch.lerp(latents_BSC, noise_BSC, sigma_B[:, None, None])


def flow_loss(
    parts: Parts,
    latents_BSC: Tensor,
    noise_BSC: Tensor,
    sigma_B: Tensor,
    scale_B: Tensor,
    clip_BL: Tensor,
    t5_BL: Tensor,
) -> Tensor:
    """Return the squared error of the flow."""
    texts = parts.texts(clip_BL, t5_BL)
    flow = parts(mixed(latents_BSC, noise_BSC, sigma_B), sigma_B, scale_B, *texts)
    return (flow - (noise_BSC - latents_BSC)).square().mean()


def guided_loss(
    parts: Parts,
    latents_BSC: Tensor,
    noise_BSC: Tensor,
    sigma_B: Tensor,
    scale_B: Tensor,
    clip_BL: Tensor,
    t5_BL: Tensor,
    *,
    teacher: Parts,
    empty: tuple[Tensor, Tensor],
) -> Tensor:
    """Return the squared error to the guided flow of a teacher, whose encoders the student shares.

    empty: CLIP's and T5's tokens of the empty prompt, one row, which is padded as the prompts are.
    """
    noisy, one = mixed(latents_BSC, noise_BSC, sigma_B), torch.ones_like(scale_B)
    with torch.no_grad():
        text_BLC, pooled_BC = teacher.texts(clip_BL, t5_BL)
        padded = F.pad(empty[1], (0, t5_BL.shape[1] - empty[1].shape[1]))
        none_BLC, none_BC = (x.expand(len(noisy), *x.shape[1:]) for x in teacher.texts(empty[0], padded))
        said, unsaid = (
            teacher(noisy, sigma_B, one, text_BLC, pooled_BC),
            teacher(noisy, sigma_B, one, none_BLC, none_BC),
        )
        target = torch.lerp(unsaid, said, scale_B[:, None, None])
    return (parts(noisy, sigma_B, scale_B, text_BLC, pooled_BC) - target).square().mean()


LORA_ENDS = ("to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out")
LORA_ENDS += ("net.0.proj", "net.2", "proj_mlp", "proj_out")  # of the names of blocks' projections


def add_lora(parts: Parts, rank: int = 16) -> list[nn.Parameter]:
    """Add a LoRA to the projections of the blocks, and return its parameters, which alone are trained."""
    parts.requires_grad_(False)
    ends = tuple(f".{end}" for end in LORA_ENDS)  # with the dot, so that the last layer, proj_out itself, is left out
    names = [name for name, _ in parts.transformer.named_modules() if name.endswith(ends)]
    parts.transformer.add_adapter(LoraConfig(r=rank, lora_alpha=rank, init_lora_weights=True, target_modules=names))
    return [param for param in parts.transformer.parameters() if param.requires_grad]


def save_lora(parts: Parts, path: Path) -> None:
    """Write the LoRA's half-precision weights to one safetensors file, as diffusers does."""
    layers = {name: value.half() for name, value in get_peft_model_state_dict(parts.transformer).items()}
    FluxPipeline.save_lora_weights(path.parent, transformer_lora_layers=layers, weight_name=path.name)
    path.chmod(0o644)  # safetensors makes files that only their owner can read


def save_pipeline(
    out: Path, parts: Parts, vae: AutoencoderKL, tokenizers: tuple[CLIPTokenizer, T5TokenizerFast]
) -> None:
    """Save an unchanged FluxPipeline folder with half-precision weights."""
    vae.register_to_config(shift_factor=0.0)
    FluxPipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(shift=1.0),
        vae=vae.to(memory_format=torch.contiguous_format).half(),
        text_encoder=parts.clip.half(),
        tokenizer=tokenizers[0],
        text_encoder_2=parts.t5.half(),
        tokenizer_2=tokenizers[1],
        transformer=parts.transformer.half(),
    ).save_pretrained(out)
    for weights in out.rglob("*.safetensors"):
        weights.chmod(0o644)


def parameters(*modules: nn.Module) -> int:
    return sum(param.numel() for module in modules for param in module.parameters())
