"""Guidance: from the settings of recipes to the arguments of stock pipelines.

``guidance_scale`` is the weight of classifier-free guidance everywhere here. ``embedded_guidance_scale`` is an input of
guidance-distilled transformers.
"""

from pathlib import Path
from typing import Any

from cosmos_rl_core.config.policy import DiffusersConfig
from cosmos_rl_core.config.shared import ModelRef
from cosmos_rl_core.errors import ConfigError
from cosmos_rl_core.pipelines import directories
from cosmos_rl_core.pipelines.spec import ModelSpec

OPTIONS = ("cfg_normalization", "cfg_truncation")
"""Settings of ``policy.diffusers`` that some stock calls have besides their guidance scale."""


def check(path: str | Path, diffusers: DiffusersConfig) -> None:
    """Raise :class:`ConfigError` for settings of guidance that the pipeline does not take, or that change nothing."""
    spec, name, sample = directories.spec(path), directories.pipeline_class(path), diffusers.sample
    if sample.negative_prompt and not spec.takes_negative:
        raise ConfigError(
            f"policy.diffusers.sample.negative_prompt = {sample.negative_prompt!r}: {name} guides away from the empty "
            "prompt alone; leave it out"
        )
    index = directories.read_json(path, directories.INDEX)
    for setting, meaning in spec.unguided_settings.items():
        if index.get(setting) and sample.guidance_scale != 1:
            raise ConfigError(
                f"policy.diffusers.sample.guidance_scale = {sample.guidance_scale}: {str(path)!r} has {setting} = "
                f"{index[setting]}, so it is {meaning}, which {name} does not guide; set 1"
            )
    for option in OPTIONS:
        if (value := getattr(diffusers, option)) is None:
            continue
        setting = f"policy.diffusers.{option} = {value:g}"
        if option not in spec.guidance_options:
            raise ConfigError(f"{setting}: {name} has no such setting of guidance; leave it out")
        if sample.guidance_scale == 1:
            raise ConfigError(f"{setting} has no effect at guidance_scale = 1; raise guidance_scale, or leave it out")


def stock_options(spec: ModelSpec, ref: ModelRef) -> dict[str, float]:
    """Return the arguments of the stock call for the settings :data:`OPTIONS` of the recipe, as far as it has them."""
    values = ((option, getattr(ref, option)) for option in spec.guidance_options)
    return {option: value for option, value in values if value is not None}


def embedded_scale(path: str | Path, setting: float | None) -> float | None:
    """Return the guidance that the transformer takes as an input, None if it takes none.

    It is ``setting``, the recipe's ``policy.diffusers.embedded_guidance_scale``, or the stock call's default. Raises
    :class:`ConfigError` for a setting that the transformer does not take.
    """
    default = directories.spec(path).embedded_guidance_scale
    if default is not None and directories.settings(path, "transformer").get("guidance_embeds"):
        return default if setting is None else setting
    if setting is not None:
        raise ConfigError(
            f"policy.diffusers.embedded_guidance_scale = {setting}: the transformer of this "
            f"{directories.pipeline_class(path)} takes no guidance as an input; leave it out"
        )
    return None


def supervised_scale(path: str | Path, setting: float | None, embedded: float | None) -> float | None:
    """Return the guidance that the transformer takes in losses on media.

    None means that it equals ``embedded``, or that the transformer takes no guidance.

    ``setting`` is the recipe's ``policy.diffusers.supervised_guidance_scale``. Raises :class:`ConfigError` for a
    setting that the transformer does not take.
    """
    if embedded is None and setting is not None:
        raise ConfigError(
            f"policy.diffusers.supervised_guidance_scale = {setting}: the transformer of this "
            f"{directories.pipeline_class(path)} takes no guidance as an input; leave it out"
        )
    scale = directories.spec(path).supervised_guidance_scale if setting is None else setting
    return None if embedded is None or scale == embedded else scale


def stock_scale(spec: ModelSpec, guidance_scale: float) -> float:
    """Return the stock pipeline's argument for our ``guidance_scale``.

    Our scale of 1 is no guidance. Raises :class:`ConfigError` for a scale that the stock pipeline does not have: it
    guides only above the spec's ``guidance_off``, in its own scale.
    """
    if guidance_scale == 1:
        return spec.guidance_off
    least = spec.guidance_off + spec.guidance_offset
    if guidance_scale <= least:
        raise ConfigError(
            f"policy.diffusers.sample.guidance_scale = {guidance_scale}: evaluations run {spec.pipeline_classes[0]}, "
            f"which has no guidance between 1 and {least} of our scale; set 1, or more than {least}"
        )
    return guidance_scale - spec.guidance_offset


def stock_arguments(
    spec: ModelSpec, guidance_scale: float, negative_prompt: str | None, embedded: float | None, count: int
) -> dict[str, Any]:
    """Return the arguments of the stock call that set guidance, for ``count`` prompts.

    Stock pipelines with ``true_cfg_scale`` guide only with a negative prompt: if ``negative_prompt`` is None they get
    the empty one. Raises like :func:`stock_scale`.
    """
    given: dict[str, Any] = {spec.guidance_argument: stock_scale(spec, guidance_scale)}
    if negative_prompt is None and spec.guidance_argument == "true_cfg_scale" and guidance_scale != 1:
        negative_prompt = ""
    if negative_prompt is not None and spec.takes_negative:
        given["negative_prompt"] = [negative_prompt] * count
    if embedded is not None:
        given["guidance_scale"] = embedded
    return given
