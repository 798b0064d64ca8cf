"""The check that a model plugin supports a pipeline directory: torch-free, so that plans can check first."""

from cosmos_rl_core.errors import ConfigError
from cosmos_rl_core.pipelines import directories, sizes


def check(path: str) -> None:
    """Raise :class:`ConfigError`, listing what is supported, if the plugin cannot run the pipeline like stock does.

    The reasons are a VAE or transformer of another class than the spec has, one of its ``refused_settings``, input
    channels of the transformer that do not fit the VAE, and patches of several frames in a model with given frames.
    """
    geometry, spec = sizes.vae_geometry(path), directories.spec(path)
    index, transformer = directories.read_json(path, directories.INDEX), directories.settings(path, "transformer")
    for setting, meaning in spec.refused_settings.items():
        if value := index.get(setting, transformer.get(setting)):
            kind, semicolon, advice = meaning.partition("; ")
            refused = f"{path!r} has {setting} = {value}, so it is {kind}; that is not supported"
            raise ConfigError(f"{refused}{semicolon and ': '}{advice}")
    if (found := transformer.get("_class_name")) != spec.transformer_class:
        raise ConfigError(f"{path!r} has the transformer {found}; supported here: {spec.transformer_class}")
    channels, masks = geometry.channels * spec.packing**2, spec.mask_channels
    if (taken := transformer["in_channels"]) != channels + masks:
        mask = f", plus {masks} of a mask" if masks else ""
        raise ConfigError(
            f"{path!r}: the transformer takes {taken} channels and the VAE makes {channels}{mask}: not a model that "
            "generates from noise alone"
        )
    if spec.max_given_frames and (frames := sizes.patch_shape(path)[0]) != 1:
        raise ConfigError(
            f"{path!r}: patches have {frames} latent frames, expected 1: each given frame needs its own noise level"
        )
