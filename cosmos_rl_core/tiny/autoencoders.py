"""VAEs of toy size that several models use."""

from typing import Any

from diffusers import (
    AutoencoderKL,
    AutoencoderKLWan,
)


def kl_vae() -> AutoencoderKL:
    return AutoencoderKL(
        block_out_channels=(8, 8, 8),  # pyright: ignore[reportArgumentType]
        down_block_types=("DownEncoderBlock2D",) * 3,  # pyright: ignore[reportArgumentType]
        up_block_types=("UpDecoderBlock2D",) * 3,  # pyright: ignore[reportArgumentType]
        layers_per_block=1,
        latent_channels=4,
        norm_num_groups=2,
        sample_size=32,
        use_quant_conv=False,
        use_post_quant_conv=False,
        scaling_factor=1.5305,
        shift_factor=0.0609,
    )


def wan_vae(channels: int = 4, *, patched: bool = False) -> AutoencoderKLWan:
    """Return a VAE like Wan 2.1's; with ``patched``, like Wan 2.2's, which takes patches of 2 x 2 pixels."""
    patches: dict[str, Any] = {
        "patch_size": 2, "in_channels": 12, "out_channels": 12, "is_residual": True, "scale_factor_spatial": 16,
    }  # fmt: skip
    return AutoencoderKLWan(
        **(patches if patched else {}),
        base_dim=4,
        z_dim=channels,
        dim_mult=[1, 1, 1, 1],
        num_res_blocks=1,
        latents_mean=[0.1, -0.2, 0.3, 0.0] * (channels // 4),
        latents_std=[1.5, 0.7, 2.0, 1.0] * (channels // 4),
    )
