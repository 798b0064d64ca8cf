"""Sizes and scheduler that tiny pipelines of SANA's images and videos share."""

from typing import Any

from diffusers import (
    DPMSolverMultistepScheduler,
)


def sana_sizes(**given: Any) -> dict[str, Any]:
    return {
        "in_channels": 4, "out_channels": 4, "num_layers": 2, "num_attention_heads": 2, "attention_head_dim": 12,
        "num_cross_attention_heads": 2, "cross_attention_head_dim": 12, "cross_attention_dim": 24,
        "caption_channels": 16, "qk_norm": "rms_norm_across_heads", **given,
    }  # fmt: skip


def sana_scheduler(shift: float) -> DPMSolverMultistepScheduler:
    return DPMSolverMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=shift)
