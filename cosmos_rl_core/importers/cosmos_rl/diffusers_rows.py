"""Rows of the diffusers path for settings that take more than another name."""

from pathlib import Path
from typing import Any

from cosmos_rl_core.errors import ConfigError
from cosmos_rl_core.importers.cosmos_rl.diffusers_run import (
    DATASET,
    POLICY,
    PROMPT_SETS,
    SAMPLE,
    is_sana,
    is_supervised,
    prompt_file,
    validates,
)
from cosmos_rl_core.importers.cosmos_rl.rows import Answer, Row, Upstream, number

SANA_VIDEO_FRAMES = 81
"""Frames that cosmos-rl generates with SANA-Video, whatever the file sets."""
NEGATIVE_SEED = 42
"""cosmos-rl's replacement of negative seeds."""
_ALGORITHMS = {"sft": ("sft", "diffusers_sft"), "nft": ("diffusion_nft",)}
"""Our algorithms, and cosmos-rl's values of ``trainer_type`` for each."""


def type_row(key: str, value: Any, upstream: Upstream) -> Answer:
    """Return the algorithm; cosmos-rl calls every algorithm with rewards "grpo"."""
    if value not in (None, "grpo", "sft"):
        raise ConfigError("must be grpo or sft")
    if is_supervised(upstream):
        return {key: "sft"}
    if upstream[f"{POLICY}.trainer_type"] != "diffusion_nft":
        raise ConfigError('needs trainer_type = "diffusion_nft"; for FlowGRPO use configs/grpo')
    return {key: "nft"}, "with trainer_type"


def trainer_row(_: str, value: Any, upstream: Upstream) -> Answer:
    """Return the algorithm that ``type`` and ``trainer_type`` name together."""
    algorithm = "sft" if is_supervised(upstream) else "nft"
    known = _ALGORITHMS[algorithm]
    if value not in known:
        raise ConfigError(f"diffusion models have {' or '.join(known)} with this type")
    return {f"{POLICY}.type": algorithm}, "with type"


def model_row(_: str, __: Any, upstream: Upstream) -> Answer:
    """Return the pipeline with its revision; a directory has none."""
    key = "policy.model_name_or_path"
    name, revision = upstream[key], upstream["policy.model_revision"]
    if revision is None or Path(str(name)).is_dir():
        return {key: name}
    return {key: f"{name}@{revision}"}, "with its revision"


def is_video_row(_: str, value: Any, upstream: Upstream) -> Answer:
    """Return one frame for images."""
    if value is True:
        return "policy.diffusers.train_frames sets it"
    return {"policy.diffusers.train_frames": 1}, "images"


def train_frames_row(key: str, value: Any, upstream: Upstream) -> Answer:
    """Return the number of frames of clips and rollouts."""
    if upstream["policy.diffusers.is_video"] is not True:
        return "images"
    if not upstream.says(key) and is_sana(upstream) and not is_supervised(upstream):
        return {key: SANA_VIDEO_FRAMES}, "cosmos-rl's frames of SANA-Video"
    return {key: value}


def weighting_row(key: str, value: Any, _: Upstream) -> Answer:
    """Return the density of the noise levels."""
    if value == "mode":
        raise ConfigError("cosmos-rl stops with an error at it; choose logit_normal or uniform")
    ours = "logit_normal" if value == "logit_normal" else "uniform"
    return {key: ours}, "cosmos-rl is uniform for every name but logit_normal"


def logit_row(key: str, value: Any, upstream: Upstream) -> Answer:
    """Return mean or deviation of the logit-normal density."""
    scheme = upstream["policy.diffusers.weighting_scheme"]
    return {key: value} if scheme in (None, "logit_normal") else f"weighting_scheme = {scheme!r}"


def init_lora_row(key: str, value: Any, _: Upstream) -> Answer:
    """Return how the adapters are initialized."""
    if value is True:
        return {key: "kaiming"}, "peft's default"
    if value != "gaussian":
        raise ConfigError("the adapters start from the base model: choose true or gaussian")
    return {key: value}


def pattern_row(key: str, value: Any, upstream: Upstream) -> Answer:
    """Return the whole table of patterns for each of its keys: dots in patterns do not separate tables."""
    table = "policy.lora." + key.split(".")[2]
    if key == table:
        return {table: value}
    prefix, values = f"{table}.", upstream.values
    return {table: {name.removeprefix(prefix): values[name] for name in values if name.startswith(prefix)}}


_NOISELESS = {"flow": "euler", "ddim": "euler", "dpm1": "euler", "dpm2": "dpm2"}
_NOISY = {"flow": "flow_sde"}
"""Our solvers by cosmos-rl's names; its ddim and dpm1 without noise take Euler's steps."""


def _solver(upstream: Upstream) -> str:
    """Return our solver. Raises :class:`ConfigError` if there is none."""
    if is_sana(upstream):
        return "dpm2"
    name, quiet = str(upstream[f"{SAMPLE}.solver"]), upstream[f"{SAMPLE}.deterministic_sampling"]
    known = _NOISELESS if quiet is True else _NOISY
    if name in known:
        return known[name]
    if name.startswith("dpm"):
        raise ConfigError("cosmos-rl itself needs deterministic_sampling = true for it")
    raise ConfigError(f"no such sampler at this deterministic_sampling; known: {', '.join(known)}")


def solver_row(_: str, value: Any, upstream: Upstream) -> Answer:
    """Return the solver."""
    return {f"{SAMPLE}.solver": _solver(upstream)}, "for SANA always the pipeline's solver"


def deterministic_row(_: str, value: Any, upstream: Upstream) -> Answer:
    """Return the solver, whose name here also decides about noise."""
    why = "part of the solver's name here"
    if _is_cosmos(upstream) and value is True:
        why += "; cosmos-rl misspells the keyword for this model and adds noise all the same"
    return {f"{SAMPLE}.solver": _solver(upstream)}, why


def noise_level_row(key: str, value: Any, upstream: Upstream) -> Answer:
    """Return the noise level of a solver with noise."""
    solver = _solver(upstream)
    return {key: value} if solver == "flow_sde" else f"there is no noise in {solver}"


def guidance_row(key: str, value: Any, upstream: Upstream) -> Answer:
    """Return the guidance scale in our convention, where 1 is no guidance."""
    if number(value) > 1 and _is_cosmos(upstream):
        return {key: 1 + value}, "Cosmos-Predict2.5 counts guidance from 0, we from 1"
    return {key: value}


def _is_cosmos(upstream: Upstream) -> bool:
    return "cosmos" in str(upstream["policy.model_name_or_path"]).lower()


_OLD_DECAYS = {0: "none", 1: "linear", 2: "delayed"}


def old_decay_row(_: str, value: Any, upstream: Upstream) -> Answer:
    """Return our name of a decay that cosmos-rl numbers."""
    if not isinstance(value, int) or value not in _OLD_DECAYS:
        raise ConfigError("must be 0, 1 or 2")
    return {f"{POLICY}.weight_copy_decay_type": _OLD_DECAYS[value]}


def misspelt_fraction_row(_: str, value: Any, upstream: Upstream) -> Answer:
    """Return the fraction that cosmos-rl's own recipes misspell."""
    if upstream.says("policy.diffusers.timesteps_fraction"):
        return "policy.diffusers.timesteps_fraction, the right spelling, takes precedence"
    why = "misspelt timesteps_fraction; cosmos-rl ignores it and trains on all steps"
    return {f"{POLICY}.timesteps_fraction": value}, why


def fraction_row(key: str, value: Any, upstream: Upstream) -> Answer:
    """Return the fraction under its right spelling."""
    if not upstream.says(key) and upstream.says("policy.diffusers.timestep_fraction"):
        return "timestep_fraction sets it"
    return {f"{POLICY}.timesteps_fraction": value}


def prompts_row(place: str) -> Row:
    """Return a row for the prompt set at ``place``: its name becomes the file that cosmos-rl downloads."""

    def row(_: str, value: Any, upstream: Upstream) -> Answer:
        if (file := prompt_file(upstream, place)) is None:
            known = ", ".join(PROMPT_SETS)
            why = f'set it to {{ name = "prompts", path = "a text file" }}; known by name: {known}'
            return {place: None}, why
        why = "cosmos-rl's download folder, unless COSMOS_CACHE_DIR names another"
        return {f"{place}.name": "prompts", f"{place}.path": file}, why

    return row


def folder_row(_: str, value: Any, upstream: Upstream) -> Answer:
    """Return a folder of media with captions."""
    if not value:
        return {DATASET: None}, 'set it to { name = "local", local_dir = "a folder" } and a size'
    is_video = upstream["policy.diffusers.is_video"] is True
    return {
        f"{DATASET}.name": "local",
        f"{DATASET}.local_dir": value,
        f"{DATASET}.size": upstream["policy.diffusers.inference_size"],
        f"{DATASET}.frames": upstream["policy.diffusers.train_frames"] if is_video else 1,
    }


def validates_row(_: str, value: Any, upstream: Upstream) -> Answer:
    """Return the first setting of ``[validation]`` if the file asks for evaluations."""
    if not validates(upstream):
        return "there is no [validation]"
    return {"validation.freq": upstream["validation.freq"]}, "[validation] turns evaluations on"


def optimizer_row(key: str, value: Any, _: Upstream) -> Answer:
    """Return the optimizer."""
    return "AdamW is the default" if value == "AdamW" else {key: value}


def interval_row(key: str, value: Any, _: Upstream) -> Answer:
    """Return the steps between updates of the average; cosmos-rl's 0 means every step."""
    return {key: value or 1}


def max_keep_row(key: str, value: Any, _: Upstream) -> Answer:
    """Return how many policies are kept; cosmos-rl's -1 means all."""
    return "every policy is kept" if value == -1 else {key: value}


def seed_row(key: str, value: Any, _: Upstream) -> Answer:
    """Return the seed, with cosmos-rl's replacement of negative ones."""
    return {key: NEGATIVE_SEED if number(value) < 0 else value}, "replaces negative seeds"


def logger_row(key: str, value: Any, _: Upstream) -> Answer:
    """Return the loggers in lower case."""
    if not isinstance(value, list):
        raise ConfigError("must be a list")
    return {key: [str(name).lower() for name in value]}
