"""What a single setting of cosmos-rl's own Cosmos-Predict2.5 path is here, where that takes more than another name."""

import math
from pathlib import Path
from typing import Any

from cosmos_rl_core.errors import ConfigError
from cosmos_rl_core.importers.cosmos_rl.rows import Meaning, Upstream, count, number

POLICY, SAMPLE = "train.train_policy", "policy.diffusers.sample"
RL, REWARDS = "model.rl", "model.rl.reward_config"
VIDEO = "dataloader_train.video_dataloader"

BASES = {"nvidia/Cosmos-Predict2.5-2B", "nvidia/Cosmos-Predict2.5-14B"}
"""Repositories that hold cosmos-rl's own checkpoints and, in other revisions, diffusers pipelines of them."""
CHANNELS_OF_14B = 5120
LATENT_FRAMES = 4
"""Frames of a video to one of its latents, after the first."""
SIZES = {"256": (192, 320), "480": (432, 768), "480p": (480, 832), "512": (384, 640), "720": (704, 1280),
         "720p": (720, 1280), "1024": (768, 1280), "1080": (1072, 1920)}  # fmt: skip
"""Height and width of cosmos-rl's made-up clips, by ``resolution``."""
NONFINITE_STEPS = 10
"""Steps in a row that are left out where cosmos-rl never ends a run; after so many a policy is lost."""


def trains_on_data(upstream: Upstream) -> bool:
    """Whether there is a diffusion loss on data."""
    return number(upstream[f"{RL}.data_beta"]) > 0


def has_data(upstream: Upstream) -> bool:
    """Whether media are needed: for that loss, or for frames that rollouts are given."""
    return trains_on_data(upstream) or number(upstream[f"{RL}.max_num_conditional_frames"]) > 0


def asks_service(upstream: Upstream) -> bool:
    """Whether a reward service scores."""
    return upstream[f"{REWARDS}.remote_reward.enabled"] is True


def guidance_scale(guidance: Any) -> float:
    """Ours, where 1 is none, from cosmos-rl's, where 0 is."""
    return 1 + number(guidance)


# The model.


def model_row(_: str, value: Any, upstream: Upstream) -> Meaning:
    """The pipeline of a checkpoint of cosmos-rl's; without one it trains from scratch."""
    target = "policy.model_name_or_path"
    if value == "":
        large = upstream["model.net.model_channels"] == CHANNELS_OF_14B
        name = f"nvidia/Cosmos-Predict2.5-{'14B' if large else '2B'}@{_revision(upstream)}"
        return Meaning("translated", {target: name, "policy.from_scratch": True}, "no checkpoint: weights are drawn")
    if str(value) in BASES and (revision := _revision(upstream)) is not None:
        return Meaning("translated", {target: f"{value}@{revision}"}, "the same weights as a pipeline")
    if Path(str(value), "model_index.json").is_file():
        return Meaning("translated", {target: value})
    why = f"weights of cosmos's own code: make a pipeline of them (cosmos-flows import-weights) and set {target}"
    return Meaning("open", {target: None}, why)


def _revision(upstream: Upstream) -> str | None:
    """The hub's revision with the pipeline of a checkpoint; None if there is none of it."""
    kind = "/".join(str(upstream["checkpoint.model_id"] or "base/pre-trained").split("/")[:2])
    return f"diffusers/{kind}" if kind in ("base/pre-trained", "base/post-trained") else None


def model_id_row(_: str, value: Any, upstream: Upstream) -> Meaning:
    """Which weights of a repository."""
    return model_row("checkpoint.load_path", upstream["checkpoint.load_path"], upstream)


# Batch and media.


def instances_row(_: str, value: Any, upstream: Upstream) -> Meaning:
    """Samples of an iteration: cosmos-rl makes one on each of its model instances."""
    count(value)
    shards, copies = upstream.count("model.fsdp_shard_size"), upstream.count("model.dp_replicate_size")
    batch = shards * copies * upstream.count("trainer.grad_accum_iter")
    why = "one sample a model instance, fsdp_shard_size x dp_replicate_size; GPUs and shards are the cluster profile's"
    return Meaning("translated", {"train.train_batch_per_replica": batch}, why)


def _size(upstream: Upstream) -> list[int]:
    """Height and width. A width that was written first, as in cosmos-rl's recipes, is turned round."""
    written = upstream[f"{VIDEO}.video_size"]
    if written is None:
        resolution = str(upstream[f"{VIDEO}.dataloader.dataset.resolution"] or upstream["model.resolution"])
        if resolution not in SIZES:
            raise ConfigError(f"no size is known for the resolution {resolution!r}; known: {', '.join(SIZES)}")
        return list(SIZES[resolution])
    if not isinstance(written, list) or len(written) != 2:
        raise ConfigError(f"{VIDEO}.video_size must be two numbers")
    return sorted(map(count, written))


def _frames(upstream: Upstream) -> int:
    written = upstream[f"{VIDEO}.num_frames"] or upstream[f"{VIDEO}.dataloader.dataset.num_video_frames"]
    return count(written) if written else 1 + LATENT_FRAMES * (upstream.count("model.state_t") - 1)


def size_row(_: str, value: Any, upstream: Upstream) -> Meaning:
    """What is trained on is as large as the clips."""
    written = upstream[f"{VIDEO}.video_size"]
    size = _size(upstream)
    turned = written not in (None, size)
    why = "width was written first, which cosmos-rl reads as the height, squeezing the clips" if turned else ""
    return Meaning("translated", {"policy.diffusers.inference_size": size}, why or "that of the clips")


def frames_row(_: str, value: Any, upstream: Upstream) -> Meaning:
    """What is trained on is as long as the clips."""
    return Meaning("translated", {"policy.diffusers.train_frames": _frames(upstream)}, "as many as the clips have")


def dataset_row(_: str, value: Any, upstream: Upstream) -> Meaning:
    """Prompts are the captions of the clips."""
    if value == "local" and not upstream[f"{VIDEO}.dataset_dir"]:
        return Meaning("open", {f"{POLICY}.dataset": None}, "no dataset_dir: set it to a dataset")
    if value not in ("local", "web") or (value == "web" and not upstream[f"{VIDEO}.dataloader.dataset.len_t5"]):
        raise ConfigError("cosmos-rl has no dataset of this kind; put clips into a folder and take type = local")
    return Meaning("translated", media(upstream, f"{POLICY}.dataset"), "prompts are the captions")


def folder_row(_: str, value: Any, upstream: Upstream) -> Meaning:
    """Where the clips are."""
    return dataset_row("dataloader_train.type", upstream["dataloader_train.type"], upstream)


def media(upstream: Upstream, place: str) -> dict[str, Any]:
    """Settings of the dataset of clips at ``place``: a folder, or made-up media."""
    folder = upstream[f"{VIDEO}.dataset_dir"]
    known = {"name": "local", "local_dir": folder} if folder else {"name": "mock"}
    return {
        f"{place}.{name}": value
        for name, value in (known | {"size": _size(upstream), "frames": _frames(upstream)}).items()
    }


def validates_row(_: str, value: Any, upstream: Upstream) -> Meaning:
    """Prompts that are judged, and clips whose diffusion loss is measured."""
    if value is not True:
        return Meaning("no effect here", why="there is no [validation] unless one is added")
    raise ConfigError("cosmos-rl stops with an error at it; add [validation] to the translated recipe")


# Algorithm and optimizer.


def reference_row(_: str, value: Any, upstream: Upstream) -> Meaning:
    """How often the reference is renewed, where anything reads it."""
    target = f"{POLICY}.update_ref_every_iter"
    if number(upstream[f"{RL}.kl_beta"]) == 0 and upstream[f"{RL}.on_policy"] is not False:
        return Meaning("no effect here", why="kl_beta = 0 and on_policy: nothing reads the reference")
    return Meaning("translated", {target: value})


def remote_row(_: str, value: Any, upstream: Upstream) -> Meaning:
    """The one reward of this path that works."""
    if value is not True:
        return Meaning("open", {"rewards": None}, "no other reward of cosmos-rl works: set [[rewards]]")
    return Meaning("translated", {"rewards[service].fn.name": "remote"}, "[[rewards]] of the plugin remote")


def remote_option_row(key: str, value: Any, _: Upstream) -> Meaning:
    """Its settings."""
    name = key.rpartition(".")[2].removeprefix("reward_clip_")
    option = {"min": "clip_min", "max": "clip_max"}.get(name, name)
    return Meaning("translated", {f"rewards[service].fn.{option}": value})


def _only(key: str, upstream: Upstream) -> Any:
    """The one cycle of a schedule. Raises :class:`ConfigError` if there are more."""
    values = upstream[f"scheduler.{key}"]
    if not isinstance(values, list) or len(values) != 1:
        raise ConfigError(f"scheduler.{key} must be a list of one number: there is one cycle here")
    return number(values[0])


def peak_row(_: str, value: Any, upstream: Upstream) -> Meaning:
    """The learning rate at its highest."""
    peak = _only("f_max", upstream)
    return Meaning("translated", {"train.optm_lr": number(value) * peak}, "" if peak == 1 else "times f_max")


def f_max_row(_: str, value: Any, upstream: Upstream) -> Meaning:
    """A factor of the learning rate."""
    return Meaning("no effect here", why="a factor of 1" if _only("f_max", upstream) == 1 else "in train.optm_lr")


def scheduler_row(_: str, value: Any, upstream: Upstream) -> Meaning:
    """Linear warm-up, then a decay."""
    if str(value) not in _DECAYS:
        raise ConfigError(f"known: {', '.join(_DECAYS)}")
    return Meaning("no effect here", why="warm_up_steps and f_min say it")


def warmup_row(_: str, value: Any, upstream: Upstream) -> Meaning:
    """As many steps, and the peak after them."""
    steps = int(_only("warm_up_steps", upstream))
    peak = {"train.optm_peak_after_warmup": True} if steps else {}
    return Meaning("translated", {"train.optm_warmup_steps": steps, **peak}, "the peak comes after them")


def start_row(_: str, value: Any, upstream: Upstream) -> Meaning:
    """Where the warm-up begins, of the peak."""
    if _only("warm_up_steps", upstream) == 0:
        return Meaning("no effect here", why="there is no warm-up")
    start = _only("f_start", upstream) / _only("f_max", upstream)
    return Meaning("translated", {"train.optm_warmup_start_factor": start})


_DECAYS = {"lambda_linear": "linear", "lambda_warmpup_cos": "cosine"}


def decay_row(_: str, value: Any, upstream: Upstream) -> Meaning:
    """The decay after the warm-up."""
    floor = _only("f_min", upstream) / _only("f_max", upstream)
    if floor == 1 or math.isinf(_only("cycle_lengths", upstream)):
        return Meaning("translated", {"train.optm_decay_type": "none"}, "flat after the warm-up")
    settings = {
        "train.optm_decay_type": _DECAYS.get(str(upstream["scheduler.scheduler_type"])),
        "train.max_num_steps": int(_only("cycle_lengths", upstream)),
        "train.optm_min_lr_factor": floor,
    }
    return Meaning("translated", settings, "over the cycle")


def force_finite_row(_: str, value: Any, upstream: Upstream) -> Meaning:
    """What becomes of a step whose gradients are not finite."""
    if value is not True:
        return Meaning("no effect here", why="gradients that are not finite end the run")
    why = "cosmos-rl puts 0 for what is not finite; here such a step is left out, and more in a row end the run"
    return Meaning("translated", {"train.max_nonfinite_steps": NONFINITE_STEPS}, why)


def wandb_row(_: str, value: Any, upstream: Upstream) -> Meaning:
    """The callback is there, and so is the logger."""
    if upstream["job.wandb_mode"] == "disabled":
        return Meaning("no effect here", why="job.wandb_mode = disabled")
    return Meaning("translated", {"logging.logger": ["console", "wandb"]})
