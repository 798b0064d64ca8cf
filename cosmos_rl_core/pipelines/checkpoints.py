"""Whether a pipeline directory is of a kind that its model plugin runs: torch-free, so that a plan can ask first."""

from cosmos_rl_core.errors import ConfigError
from cosmos_rl_core.pipelines import directories, sizes


def check(path: str) -> None:
    """Raise :class:`ConfigError`, naming what is known, for a pipeline that its plugin cannot run as the stock does.

    That is one with another VAE than the plugin's ``vae_classes``, with one of its ``refused_settings``, or whose
    transformer does not take what its VAE makes.
    """
    spec = directories.spec(path)
    _check_vae(path, tuple(spec.vaes))
    index, transformer = directories.read_json(path, directories.INDEX), directories.settings(path, "transformer")
    for setting, meaning in spec.refused_settings.items():
        if value := index.get(setting, transformer.get(setting)):
            raise ConfigError(f"{path!r} has {setting} = {value}, so it is {meaning}; that is not supported")
    if (found := transformer.get("_class_name")) != spec.transformer_class:
        raise ConfigError(f"{path!r} has the transformer {found}; supported here: {spec.transformer_class}")
    geometry, masks = sizes.vae_geometry(path), spec.mask_channels
    if geometry is None:
        raise ConfigError(f"{path!r}: vae/config.json does not say how many pixels and frames a latent stands for")
    channels = geometry.channels * spec.packing**2
    if transformer["in_channels"] != channels + masks:
        besides = f" beside {masks} of a mask" if masks else ""
        raise ConfigError(
            f"{path!r}: the transformer takes {transformer['in_channels']} channels and the VAE makes {channels}"
            f"{besides}: not a model that generates from noise alone"
        )
    if spec.max_given_frames and (frames := sizes.patch_shape(path)[0]) != 1:
        raise ConfigError(f"{path!r}: patches of {frames} latent frames have no noise level of their own each")


def _check_vae(path: str, known: tuple[str, ...]) -> None:
    found = directories.settings(path, "vae").get("_class_name")
    if found not in known:
        raise ConfigError(f"{path!r} has the VAE {found}; supported here: {', '.join(known)}")
