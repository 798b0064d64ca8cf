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


def type_row(_: str, __: Any, upstream: Upstream) -> Answer:
    """Return the algorithm; cosmos-rl calls each one with rewards "grpo", and ``trainer_type`` tells them apart."""
    if upstream[f"{POLICY}.type"] not in (None, "grpo", "sft"):
        raise ConfigError("type must be grpo or sft")
    ours, known = ("sft", (None, "sft", "diffusers_sft")) if is_supervised(upstream) else ("nft", ("diffusion_nft",))
    if upstream[f"{POLICY}.trainer_type"] not in known:
        raise ConfigError(f'needs trainer_type = "{known[-1]}"; for FlowGRPO use configs/grpo')
    return {f"{POLICY}.type": ours}, "type and trainer_type together"


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


def solver_row(_: str, __: Any, upstream: Upstream) -> Answer:
    """Return the solver, whose name here also decides about noise."""
    return {f"{SAMPLE}.solver": _solver(upstream)}, "its name says whether it adds noise; SANA has its pipeline's own"


def noise_level_row(key: str, value: Any, upstream: Upstream) -> Answer:
    """Return the noise level of a solver with noise."""
    solver = _solver(upstream)
    return {key: value} if solver == "flow_sde" else f"there is no noise in {solver}"


def guidance_row(key: str, value: Any, upstream: Upstream) -> Answer:
    """Return the guidance scale in our convention, where 1 is no guidance."""
    if number(value) > 1 and "cosmos" in str(upstream["policy.model_name_or_path"]).lower():
        return {key: 1 + value}, "Cosmos-Predict2.5 counts guidance from 0, we from 1"
    return {key: value}


def misspelt_fraction_row(_: str, value: Any, upstream: Upstream) -> Answer:
    """Return the fraction that cosmos-rl's own recipes misspell."""
    if upstream.says("policy.diffusers.timesteps_fraction"):
        return "policy.diffusers.timesteps_fraction, the right spelling, takes precedence"
    why = "misspelt timesteps_fraction; cosmos-rl ignores it and trains on all steps"
    return {f"{POLICY}.timesteps_fraction": value}, why


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


def logger_row(key: str, value: Any, _: Upstream) -> Answer:
    """Return the loggers in lower case."""
    if not isinstance(value, list):
        raise ConfigError("must be a list")
    return {key: [str(name).lower() for name in value]}
