"""Rows of cosmos-rl's own Cosmos-Predict2.5 path for settings that need more than a new name."""

import math
from pathlib import Path
from typing import Any

from cosmos_rl_core.errors import ConfigError
from cosmos_rl_core.importers.cosmos_rl.rewards import remote
from cosmos_rl_core.importers.cosmos_rl.rows import Answer, Upstream, count, number

POLICY, SAMPLE = "train.train_policy", "policy.diffusers.sample"
RL, REWARDS = "model.rl", "model.rl.reward_config"
VIDEO = "dataloader_train.video_dataloader"
_MADE_UP = f"{VIDEO}.dataloader.dataset"

BASES = {"nvidia/Cosmos-Predict2.5-2B", "nvidia/Cosmos-Predict2.5-14B"}
"""Repositories that hold cosmos-rl's own checkpoints and, in other revisions, diffusers pipelines of them."""
CHANNELS_OF_14B = 5120
LATENT_FRAMES = 4
"""Frames of a video per latent frame, after the first."""
SIZES = {"256": (192, 320), "480": (432, 768), "480p": (480, 832), "512": (384, 640), "720": (704, 1280),
         "720p": (720, 1280), "1024": (768, 1280), "1080": (1072, 1920)}  # fmt: skip
"""Height and width of cosmos-rl's made-up clips, by ``resolution``."""
NONFINITE_STEPS = 10
"""Consecutive non-finite steps that are skipped before the run ends; cosmos-rl never ends a run."""


def trains_on_data(upstream: Upstream) -> bool:
    """Return whether there is a diffusion loss on data."""
    return number(upstream[f"{RL}.data_beta"]) > 0


def has_data(upstream: Upstream) -> bool:
    """Return whether media are needed, for a diffusion loss or for given frames of rollouts."""
    return trains_on_data(upstream) or number(upstream[f"{RL}.max_num_conditional_frames"]) > 0


def guidance_scale(guidance: Any) -> float:
    """Return our guidance scale, where 1 is no guidance, for cosmos-rl's ``guidance``, where 0 is no guidance."""
    return 1 + number(guidance)


# The model.


def model_row(_: str, __: Any, upstream: Upstream) -> Answer:
    """Return the pipeline with the weights of a checkpoint of cosmos-rl; without a checkpoint, train from scratch."""
    target, path = "policy.model_name_or_path", upstream["checkpoint.load_path"]
    revision = _revision(upstream)
    if path == "":
        large = upstream["model.net.model_channels"] == CHANNELS_OF_14B
        name = f"nvidia/Cosmos-Predict2.5-{'14B' if large else '2B'}@{revision}"
        return {target: name, "policy.from_scratch": True}, "no checkpoint: weights are drawn"
    if str(path) in BASES and revision is not None:
        return {target: f"{path}@{revision}"}, "the same weights as a pipeline"
    if Path(str(path), "model_index.json").is_file():
        return {target: path}
    why = f"weights of cosmos's own code: make a pipeline of them (cosmos-flows import-weights) and set {target}"
    return {target: None}, why


def _revision(upstream: Upstream) -> str | None:
    """Return the hub's revision that holds a checkpoint's pipeline, or None."""
    kind = "/".join(str(upstream["checkpoint.model_id"] or "base/pre-trained").split("/")[:2])
    return f"diffusers/{kind}" if kind in ("base/pre-trained", "base/post-trained") else None


# Batch and media.


def instances_row(_: str, value: Any, upstream: Upstream) -> Answer:
    """Return the samples of an iteration: cosmos-rl makes one on each of its model instances."""
    count(value)
    factors = ("model.fsdp_shard_size", "model.dp_replicate_size", "trainer.grad_accum_iter")
    why = "one sample per model instance, fsdp_shard_size x dp_replicate_size; the cluster profile sets GPUs and shards"
    return {"train.train_batch_per_replica": math.prod(map(upstream.count, factors))}, why


def _size(upstream: Upstream) -> list[int]:
    """Return height and width, the smaller side first, because cosmos-rl's recipes write the width first."""
    written = upstream[f"{VIDEO}.video_size"]
    if written is None:
        resolution = upstream[f"{_MADE_UP}.resolution"] or upstream["model.resolution"]
        if str(resolution) not in SIZES:
            raise ConfigError(f"unknown resolution {resolution!r}; known: {', '.join(SIZES)}")
        return list(SIZES[str(resolution)])
    if not isinstance(written, list) or len(written) != 2:
        raise ConfigError(f"{VIDEO}.video_size must be two numbers")
    return sorted(map(count, written))


def _frames(upstream: Upstream) -> int:
    written = upstream[f"{VIDEO}.num_frames"] or upstream[f"{_MADE_UP}.num_video_frames"]
    return count(written) if written else 1 + LATENT_FRAMES * (upstream.count("model.state_t") - 1)


def size_row(_: str, value: Any, upstream: Upstream) -> Answer:
    """Return the size of the clips, at which the model is trained."""
    size, why = _size(upstream), "the size of the clips"
    if upstream[f"{VIDEO}.video_size"] not in (None, size):
        why = "width comes first, which cosmos-rl reads as the height, squeezing the clips"
    return {"policy.diffusers.inference_size": size}, why


def frames_row(_: str, value: Any, upstream: Upstream) -> Answer:
    """Return the number of frames of the clips, at which the model is trained."""
    return {"policy.diffusers.train_frames": _frames(upstream)}, "the frames of the clips"


def dataset_row(_: str, __: Any, upstream: Upstream) -> Answer:
    """Return the dataset of clips, whose captions are the prompts."""
    kind = upstream["dataloader_train.type"]
    if kind == "local" and not upstream[f"{VIDEO}.dataset_dir"]:
        return {f"{POLICY}.dataset": None}, "no dataset_dir: set it to a dataset"
    if kind != "local" and not (kind == "web" and upstream[f"{_MADE_UP}.len_t5"]):
        raise ConfigError("no such dataset in cosmos-rl; set type = local and a folder of clips")
    return media(upstream, f"{POLICY}.dataset"), "captions are the prompts"


def media(upstream: Upstream, place: str) -> dict[str, Any]:
    """Return settings of the dataset of clips at ``place``: a folder, or made-up media."""
    folder = upstream[f"{VIDEO}.dataset_dir"]
    known = {"name": "local", "local_dir": folder} if folder else {"name": "mock"}
    settings = known | {"size": _size(upstream), "frames": _frames(upstream)}
    return {f"{place}.{name}": value for name, value in settings.items()}


# Algorithm and optimizer.


def reference_row(_: str, value: Any, upstream: Upstream) -> Answer:
    """Return the iterations between updates of the reference, if anything reads the reference."""
    if number(upstream[f"{RL}.kl_beta"]) == 0 and upstream[f"{RL}.on_policy"] is not False:
        return "kl_beta = 0 and on_policy: nothing reads the reference"
    return {f"{POLICY}.update_ref_every_iter": value}


def remote_row(_: str, __: Any, upstream: Upstream) -> Answer:
    """Return a reward of a service, the only kind that works on this path; bounds have shorter names here."""
    if upstream[f"{REWARDS}.remote_reward.enabled"] is not True:
        return {"rewards": None}, "no other reward of cosmos-rl works: set [[rewards]]"
    names = {"name": "reward_fn", "clip_min": "reward_clip_min", "clip_max": "reward_clip_max"}
    names |= {"score_key": "score_key", "scale": "scale"}
    told = {ours: upstream[f"{REWARDS}.remote_reward.{name}"] for ours, name in names.items()}
    return {"rewards": [remote(told)]}


def noise_row(key: str, value: Any, upstream: Upstream) -> Answer:
    """Return a setting of the sampler's noise."""
    if value == math.inf:
        return "no bound"
    name = key.rpartition(".")[2]
    if upstream[f"{RL}.s_churn"] == 0 and name != "s_churn":
        return "s_churn = 0 adds no noise"
    return {f"{SAMPLE}.{name}": value}


def _only(key: str, upstream: Upstream) -> Any:
    """Return the number of the one cycle of a schedule. Raises :class:`ConfigError` if there are more cycles."""
    values = upstream[f"scheduler.{key}"]
    try:
        (value,) = values
        return number(value)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"scheduler.{key} must be a list of one number: there is one cycle here") from error


DECAYS = {"lambda_linear": "linear", "lambda_warmpup_cos": "cosine"}
"""Our decays by cosmos-rl's schedulers, which it misspells."""


def lr_row(_: str, value: Any, upstream: Upstream) -> Answer:
    """Return the highest learning rate."""
    return {"train.optm_lr": number(value) * _only("f_max", upstream)}, "lr x f_max"


def schedule_row(_: str, __: Any, upstream: Upstream) -> Answer:
    """Return the schedule of the learning rate, from all of cosmos-rl's settings of it."""
    start, peak, floor = (_only(key, upstream) for key in ("f_start", "f_max", "f_min"))
    warmup, cycle = (_only(key, upstream) for key in ("warm_up_steps", "cycle_lengths"))
    if peak <= 0:
        raise ConfigError("scheduler.f_max must be above 0")
    settings: dict[str, Any] = {"train.optm_warmup_steps": int(warmup)}
    if warmup:
        settings["train.optm_peak_after_warmup"] = True
        settings["train.optm_warmup_start_factor"] = start / peak
    if floor == peak:
        return settings | {"train.optm_decay_type": "none"}, "the peak comes after the warm-up"
    decay = DECAYS.get(str(upstream["scheduler.scheduler_type"]), "none")
    settings |= {"train.optm_decay_type": decay, "train.max_num_steps": int(cycle)}
    return settings | {"train.optm_min_lr_factor": floor / peak}, "the peak comes after the warm-up"


def force_finite_row(_: str, value: Any, upstream: Upstream) -> Answer:
    """Return the number of consecutive non-finite steps that are skipped."""
    if value is not True:
        return "the first non-finite gradient ends the run"
    why = "cosmos-rl replaces non-finite gradients by 0; here such a step is skipped, and more in a row end the run"
    return {"train.max_nonfinite_steps": NONFINITE_STEPS}, why


def wandb_row(_: str, value: Any, upstream: Upstream) -> Answer:
    """Return the loggers of the callback."""
    if upstream["job.wandb_mode"] == "disabled":
        return "job.wandb_mode = disabled"
    return {"logging.logger": ["console", "wandb"]}
