"""Rows of the diffusers path for settings that need more than a new name."""

import math
from pathlib import Path
from typing import Any

from cosmos_rl_core.errors import ConfigError
from cosmos_rl_core.importers.cosmos_rl.lengths import (
    DATASET,
    POLICY,
    PROMPT_SETS,
    is_nft,
    is_supervised,
    prompt_set,
    ranks,
    validates,
    validation_iterations,
)
from cosmos_rl_core.importers.cosmos_rl.rows import Answer, Row, Upstream, count, number, taken

VALIDATION_GUIDANCE = 4.5
"""Guidance scale of the held-out samples of cosmos-rl's supervised training."""

SAMPLE = "policy.diffusers.sample"


def is_sana(upstream: Upstream) -> bool:
    """Return whether the model is SANA, for images or videos."""
    return "sana" in str(upstream["policy.model_name_or_path"]).lower()


def is_sd3(upstream: Upstream) -> bool:
    """Return whether the model is Stable Diffusion 3 or 3.5."""
    name = str(upstream["policy.model_name_or_path"]).lower()
    return "stable-diffusion-3" in name or "sd3" in name


def asks_service(upstream: Upstream) -> bool:
    """Return whether a reward service scores samples, as the file says."""
    return is_nft(upstream) and upstream[f"{POLICY}.use_remote_reward"] is True


def num_steps_row(_: str, value: Any, __: Upstream) -> Answer:
    """Return the solver steps of held-out samples, which cosmos-rl's supervised training takes from ``num_steps``."""
    return {f"{SAMPLE}.eval_num_steps": value}, "of held-out samples"


def validation_guidance_row(key: str, _: Any, upstream: Upstream) -> Answer:
    """Return the guidance scale of held-out samples, which cosmos-rl's supervised training fixes."""
    ours = guidance_row(key, VALIDATION_GUIDANCE, upstream)
    settings = ours[0] if isinstance(ours, tuple) else ours
    assert isinstance(settings, dict)
    return settings, f"cosmos-rl validates supervised training with {VALIDATION_GUIDANCE}, whatever the file sets"


def prompt_list_row(_: str, value: Any, __: Upstream) -> Answer:
    """Return the JSON list of prompts that supervised training validates with."""
    if not value:
        return {"validation.dataset": None}, 'set it to { name = "prompts", path = "a JSON list of { prompt }" }'
    return {"validation.dataset.name": "prompts", "validation.dataset.path": value}, "a JSON list of prompts"


def batch_per_optimize_row(key: str, value: Any, upstream: Upstream) -> Answer:
    """Return the samples of an optimizer step over all ranks."""
    return {key: count(value) * ranks(upstream)}, "over all ranks"


def summed_row(key: str, value: Any, upstream: Upstream) -> Answer:
    """Return a number on the scale of the gradients, divided by the micro-batches of a rank in supervised training.

    cosmos-rl adds the gradients of those micro-batches; ours are their mean.
    """
    if not is_supervised(upstream):
        return {key: value}
    batch = upstream.count("train.train_batch_per_replica")
    added = math.ceil(batch / upstream.count(f"{POLICY}.mini_batch"))
    if added == 1:
        return {key: value}
    why = f"cosmos-rl adds the gradients of {added} micro-batches; ours are their mean"
    return {key: number(value) / added}, why


def weight_decay_row(key: str, value: Any, upstream: Upstream) -> Answer:
    """Return the weight decay, which is part of the gradient in Adam alone."""
    row = summed_row if upstream["train.optm_name"] == "Adam" else taken
    return row(key, value, upstream)


# Model, media and sampling.

SANA_VIDEO_FRAMES = 81
"""Frames that cosmos-rl generates with SANA-Video, whatever the file sets."""


def type_row(_: str, __: Any, upstream: Upstream) -> Answer:
    """Return the algorithm; cosmos-rl calls each one with rewards "grpo", and ``trainer_type`` tells them apart."""
    if upstream[f"{POLICY}.type"] not in (None, "grpo", "sft"):
        raise ConfigError("type must be grpo or sft")
    ours, known = "nft", ("diffusion_nft",)
    if is_supervised(upstream):
        ours, known = "sft", (None, "sft", "diffusers_sft")
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
    """Return one frame if the file is for images."""
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
    """Answer any key of a table of patterns with the whole table: a dot in a pattern begins no table inside it."""
    table = "policy.lora." + key.split(".")[2]
    if key == table:
        return {table: value}
    names = [name for name in upstream.values if name.startswith(f"{table}.")]
    return {table: {name.removeprefix(f"{table}."): upstream.values[name] for name in names}}


_NOISELESS = {"flow": "euler", "ddim": "euler", "dpm1": "euler", "dpm2": "dpm2"}
_NOISY = {"flow": "flow_sde"}
"""Our solvers by cosmos-rl's names; its ddim and dpm1 without noise take Euler's steps."""


def _solver(upstream: Upstream) -> str:
    """Return our name of the solver. Raises :class:`ConfigError` if no solver here fits the file."""
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
    """Return the solver. Its name here also says whether it adds noise."""
    why = "its name says whether it adds noise; SANA has its pipeline's own"
    return {f"{SAMPLE}.solver": _solver(upstream)}, why


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
    """Return a row for the prompt set at ``place``, which has the same name here."""

    def row(_: str, value: Any, upstream: Upstream) -> Answer:
        if (named := prompt_set(upstream, place)) is None:
            known = ", ".join(PROMPT_SETS)
            why = f'set it to {{ name = "prompts", path = "a text file" }}; known by name, train and test: {known}'
            return {place: None}, why
        name, split = named
        why = "the plan downloads it if it is not in COSMOS_CACHE_DIR or ~/.cache/cosmos_rl"
        return {f"{place}.name": "prompt_set", f"{place}.set": name, f"{place}.split": split}, why

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
    """Return ``validation.freq`` if the file asks for evaluations."""
    if not validates(upstream):
        return "there is no [validation]"
    freq = upstream["validation.freq"]
    if is_supervised(upstream):
        freq = validation_iterations(upstream)
    return {"validation.freq": freq}, "[validation] turns evaluations on"


def logger_row(key: str, value: Any, _: Upstream) -> Answer:
    """Return the loggers in lower case."""
    if not isinstance(value, list):
        raise ConfigError("must be a list")
    return {key: [str(name).lower() for name in value]}
