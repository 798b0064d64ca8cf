"""Facts of the VAEs of diffusers that several models use."""

from cosmos_rl_core.models._spec import Geometry, Settings, Vae


def _kl(vae: Settings) -> Geometry:
    return Geometry(vae["latent_channels"], 2 ** (len(vae["block_out_channels"]) - 1))


def _wan(vae: Settings) -> Geometry:
    return Geometry(vae["z_dim"], vae["scale_factor_spatial"], vae["scale_factor_temporal"])


KL = {"AutoencoderKL": Vae(_kl, {"latent_channels": 4, "block_out_channels": (64,)})}
WAN = {"AutoencoderKLWan": Vae(_wan, {"z_dim": 16, "scale_factor_spatial": 8, "scale_factor_temporal": 4})}
