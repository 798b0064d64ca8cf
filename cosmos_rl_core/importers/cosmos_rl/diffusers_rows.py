"""What a single setting of the diffusers path is here, where that takes more than another name."""

from pathlib import Path
from typing import Any

from cosmos_rl_core.errors import ConfigError
from cosmos_rl_core.importers.cosmos_rl.diffusers_run import (
    DATASET,
    POLICY,
    PROMPT_SETS,
    SAMPLE,
    is_nft,
    is_sana,
    is_supervised,
    prompt_file,
    validates,
)
from cosmos_rl_core.importers.cosmos_rl.rewards import default_reward
from cosmos_rl_core.importers.cosmos_rl.rows import Meaning, Row, Upstream, number

SANA_VIDEO_FRAMES = 81
"""What cosmos-rl makes with it, whatever is written."""


def type_row(key: str, value: Any, upstream: Upstream) -> Meaning:
    """The algorithm; every one with rewards is "grpo" to cosmos-rl."""
    if value not in (None, "grpo", "sft"):
        raise ConfigError("must be grpo or sft")
    if is_supervised(upstream):
        return Meaning("taken", {key: "sft"})
    if upstream[f"{POLICY}.trainer_type"] != "diffusion_nft":
        raise ConfigError(
            'trains language models without trainer_type = "diffusion_nft"; FlowGRPO is configs/grpo here'
        )
    return Meaning("translated", {key: "nft"}, "with trainer_type")


def trainer_row(_: str, value: Any, upstream: Upstream) -> Meaning:
    """A part of the algorithm's name."""
    known = ("sft", "diffusers_sft") if is_supervised(upstream) else ("diffusion_nft",)
    if value not in known:
        raise ConfigError(f"diffusion models have {' or '.join(known)} with this type")
    return Meaning("translated", why="with type it is the algorithm")


def model_row(key: str, value: Any, upstream: Upstream) -> Meaning:
    """The pipeline, with its revision."""
    revision = upstream["policy.model_revision"]
    if revision is None or Path(str(value)).is_dir():
        return Meaning("taken", {key: value})
    return Meaning("translated", {key: f"{value}@{revision}"}, "with its revision")


def revision_row(_: str, value: Any, upstream: Upstream) -> Meaning:
    """A part of the pipeline's name."""
    return model_row("policy.model_name_or_path", upstream["policy.model_name_or_path"], upstream)


def is_video_row(_: str, value: Any, upstream: Upstream) -> Meaning:
    """One frame for images."""
    if value is True:
        return Meaning("no effect here", why="policy.diffusers.train_frames says it")
    return Meaning("translated", {"policy.diffusers.train_frames": 1}, "images")


def train_frames_row(key: str, value: Any, upstream: Upstream) -> Meaning:
    """Frames of clips and rollouts."""
    if upstream["policy.diffusers.is_video"] is not True:
        return Meaning("no effect here", why="images")
    if not upstream.says(key) and is_sana(upstream) and is_nft(upstream):
        return Meaning("translated", {key: SANA_VIDEO_FRAMES}, "what cosmos-rl makes with SANA-Video, unless told here")
    return Meaning("taken", {key: value})


def _media_size(upstream: Upstream) -> dict[str, Any]:
    frames = upstream["policy.diffusers.train_frames"] if upstream["policy.diffusers.is_video"] is True else 1
    return {"size": upstream["policy.diffusers.inference_size"], "frames": frames}


def weighting_row(key: str, value: Any, _: Upstream) -> Meaning:
    """Density of the noise levels."""
    if value == "logit_normal":
        return Meaning("taken", {key: value})
    if value == "mode":
        raise ConfigError("cosmos-rl stops with an error at it; choose logit_normal or uniform")
    return Meaning("translated", {key: "uniform"}, "what cosmos-rl does at any name but logit_normal")


def logit_row(key: str, value: Any, upstream: Upstream) -> Meaning:
    """Mean and deviation of that density."""
    scheme = upstream["policy.diffusers.weighting_scheme"]
    if scheme not in (None, "logit_normal"):
        return Meaning("no effect here", why=f"weighting_scheme = {scheme!r}")
    return Meaning("taken", {key: value})


def init_lora_row(key: str, value: Any, _: Upstream) -> Meaning:
    """How the adapters begin."""
    if value == "gaussian":
        return Meaning("taken", {key: value})
    if value is True:
        return Meaning("translated", {key: "kaiming"}, "peft's own way")
    raise ConfigError("the adapters begin at the base model: choose true or gaussian")


def pattern_row(key: str, value: Any, upstream: Upstream) -> Meaning:
    """The whole table of patterns, of whichever it is asked: the dots in them are no tables' names."""
    table = "policy.lora." + key.split(".")[2]
    within = f"{table}."
    patterns = {name.removeprefix(within): held for name, held in upstream.values.items() if name.startswith(within)}
    return Meaning("taken", {table: value if key == table else patterns})


_SOLVERS = {
    ("flow", True): "euler", ("ddim", True): "euler", ("dpm1", True): "euler", ("dpm2", True): "dpm2",
    ("flow", False): "flow_sde",
}  # fmt: skip
"""By cosmos-rl's name and whether it is deterministic; its ddim and dpm1 without noise take Euler's steps."""


def _solver_name(upstream: Upstream) -> str:
    """Ours. Raises :class:`ConfigError` if there is none."""
    if is_sana(upstream):
        return "dpm2"
    name, quiet = str(upstream[f"{SAMPLE}.solver"]), upstream[f"{SAMPLE}.deterministic_sampling"] is True
    if (name, quiet) in _SOLVERS:
        return _SOLVERS[name, quiet]
    if name.startswith("dpm"):
        raise ConfigError("cosmos-rl itself needs deterministic_sampling = true for it")
    known = ", ".join(f"{name} ({'without' if quiet else 'with'} noise)" for name, quiet in _SOLVERS)
    raise ConfigError(f"there is no such sampler here {'without' if quiet else 'with'} noise; known: {known}")


def solver_row(_: str, value: Any, upstream: Upstream) -> Meaning:
    """The sampler."""
    ours = {f"{SAMPLE}.solver": _solver_name(upstream)}
    if is_sana(upstream):
        return Meaning(
            "translated", ours, "cosmos-rl ignores it for SANA, which it samples by the pipeline's own solver"
        )
    return Meaning("taken" if value == ours[f"{SAMPLE}.solver"] else "translated", ours)


def deterministic_row(_: str, value: Any, upstream: Upstream) -> Meaning:
    """A part of the sampler's name here."""
    why = "the solver says it"
    if "cosmos" in str(upstream["policy.model_name_or_path"]).lower() and value is True:
        why += "; cosmos-rl misspells the keyword for this model and adds noise all the same"
    return Meaning("translated", {f"{SAMPLE}.solver": _solver_name(upstream)}, why)


def noise_level_row(key: str, value: Any, upstream: Upstream) -> Meaning:
    """Read by samplers with noise."""
    if _solver_name(upstream) != "flow_sde":
        return Meaning("no effect here", why=f"there is no noise in {_solver_name(upstream)}")
    return Meaning("taken", {key: value})


def guidance_row(key: str, value: Any, upstream: Upstream) -> Meaning:
    """In our convention, where 1 is none."""
    if number(value) > 1 and "cosmos" in str(upstream["policy.model_name_or_path"]).lower():
        return Meaning("translated", {key: 1 + value}, "Cosmos-Predict2.5 counts guidance from 0, we from 1")
    return Meaning("taken", {key: value})


_OLD_DECAYS = {0: "none", 1: "linear", 2: "delayed"}


def old_decay_row(_: str, value: Any, upstream: Upstream) -> Meaning:
    """Return the name of a decay that cosmos-rl numbers."""
    if not isinstance(value, int) or value not in _OLD_DECAYS:
        raise ConfigError("must be 0, 1 or 2")
    return Meaning("translated", {f"{POLICY}.weight_copy_decay_type": _OLD_DECAYS[value]})


def misspelt_fraction_row(_: str, value: Any, upstream: Upstream) -> Meaning:
    """What cosmos-rl's own recipes write."""
    right = "policy.diffusers.timesteps_fraction"
    if upstream.says(right):
        return Meaning("no effect here", why=f"{right}, which is spelt right, counts")
    why = "misspelt: timesteps_fraction is meant; cosmos-rl ignores it and trains on all steps"
    return Meaning("translated", {f"{POLICY}.timesteps_fraction": value}, why)


def fraction_row(_: str, value: Any, upstream: Upstream) -> Meaning:
    """What its code reads."""
    if not upstream.says("policy.diffusers.timesteps_fraction") and upstream.says("policy.diffusers.timestep_fraction"):
        return Meaning("no effect here", why="timestep_fraction is meant")
    return Meaning("translated", {f"{POLICY}.timesteps_fraction": value})


def prompts_row(place: str) -> Row:
    """A prompt set by name, as the file it is downloaded to."""

    def row(_: str, value: Any, upstream: Upstream) -> Meaning:
        if (file := prompt_file(upstream, place)) is None:
            choices = ", ".join(PROMPT_SETS)
            why = f'not one of {choices}; set {place} to {{ name = "prompts", path = "a text file, a prompt a line" }}'
            return Meaning("open", {place: None}, why)
        why = "where cosmos-rl downloads it to, unless COSMOS_CACHE_DIR says otherwise"
        return Meaning("translated", {f"{place}.name": "prompts", f"{place}.path": file}, why)

    return row


def folder_row(_: str, value: Any, upstream: Upstream) -> Meaning:
    """A folder of media with captions."""
    if not value:
        why = f'set {DATASET} to {{ name = "local", local_dir = "a folder" }} and its size'
        return Meaning("open", {DATASET: None}, why)
    settings = {"name": "local", "local_dir": value, **_media_size(upstream)}
    return Meaning("translated", {f"{DATASET}.{name}": held for name, held in settings.items()})


def validates_row(_: str, value: Any, upstream: Upstream) -> Meaning:
    """Whether there is the table."""
    return Meaning("translated", why="[validation] is there" if validates(upstream) else "there is no [validation]")


def remote_row(_: str, value: Any, upstream: Upstream) -> Meaning:
    """Whether a service scores."""
    if value is not True:
        return Meaning("open", {"rewards": None}, "cosmos-rl's own reward functions are not here: set [[rewards]]")
    if upstream.says(f"{POLICY}.remote_reward.reward_fns"):
        return Meaning("translated", {}, "[[rewards]] of the plugin remote")
    return Meaning("translated", default_reward(), "the reward that cosmos-rl asks for where none is named")


def seed_row(key: str, value: Any, _: Upstream) -> Meaning:
    """cosmos-rl replaces negative seeds."""
    if number(value) < 0:
        return Meaning("translated", {key: 42}, "cosmos-rl's seed in the place of negative ones")
    return Meaning("taken", {key: value})


def logger_row(key: str, value: Any, _: Upstream) -> Meaning:
    """In lower case."""
    if not isinstance(value, list):
        raise ConfigError("must be a list")
    return Meaning("taken", {key: [str(name).lower() for name in value]})
