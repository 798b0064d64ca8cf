"""VAEs that several families of models have."""

from cosmos_rl_core.pipelines.spec import Geometry, Settings, Vae


def _kl(vae: Settings) -> Geometry:
    return Geometry(vae["latent_channels"], 2 ** (len(vae["block_out_channels"]) - 1))


def _wan(vae: Settings) -> Geometry:
    return Geometry(vae["z_dim"], vae["scale_factor_spatial"], vae["scale_factor_temporal"])


KL_VAE = {"AutoencoderKL": Vae(_kl, {"latent_channels": 4, "block_out_channels": (64,)}, posterior=True)}
"""The VAE of most image models."""
_WAN_DEFAULTS = {"z_dim": 16, "scale_factor_spatial": 8, "scale_factor_temporal": 4}
WAN_VAE = {"AutoencoderKLWan": Vae(_wan, _WAN_DEFAULTS, posterior=True)}
"""The VAE of Wan, which other video models have too."""
