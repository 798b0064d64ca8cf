"""The length of a run in cosmos-rl's units, and the rows of settings that depend on it."""

import math
from pathlib import Path
from typing import Any

from cosmos_rl_core.errors import ConfigError
from cosmos_rl_core.importers.cosmos_rl.chats import num_conversations
from cosmos_rl_core.importers.cosmos_rl.kinds import POLICY, is_supervised, is_vlm
from cosmos_rl_core.importers.cosmos_rl.rows import Answer, Upstream, count, number
from cosmos_rl_core.storage import cache

ENDLESS_EPOCHS = 1000
"""Number of passes over the data from which cosmos-rl's recipes mean "until stopped"."""
ENDLESS_ITERATIONS = 1000
"""Number of iterations of a run that cosmos-rl would continue until it is stopped."""
PROMPT_SETS = {"pickscore": ".txt", "ocr": ".txt", "dance_grpo_t2v": ".txt", "geneval": "_metadata.jsonl"}
"""Suffixes of the files of cosmos-rl's named prompt sets, after the name of the split."""

DATASET = f"{POLICY}.dataset"


def is_nft(upstream: Upstream) -> bool:
    """Return whether a file asks for DiffusionNFT, the other algorithm of this path."""
    return not is_supervised(upstream)


def validates(upstream: Upstream) -> bool:
    """Return whether the file asks for evaluations."""
    return upstream["validation.enable"] is True


def ranks(upstream: Upstream) -> int:
    """Return the number of ranks with samples of their own."""
    keys = [f"policy.parallelism.{size}" for size in ("dp_shard_size", "dp_replicate_size", "n_init_replicas")]
    return math.prod(upstream.count(key) for key in keys if upstream[key] is not None)


def _global_batch(upstream: Upstream) -> int:
    """Return the samples of a step over all ranks; cosmos-rl counts per rank (supervised) or per replica."""
    each = upstream.count("train.train_batch_per_replica")
    return each * (ranks(upstream) if is_supervised(upstream) else _replicas(upstream))


def _replicas(upstream: Upstream) -> int:
    return count(upstream["policy.parallelism.n_init_replicas"] or 1)


def _num_steps(upstream: Upstream) -> int | None:
    """Return cosmos-rl's training steps; None if they depend on missing files or have no end."""
    if upstream["train.max_num_steps"] is not None:
        return upstream.count("train.max_num_steps")
    epochs = upstream.count("train.epoch")
    if epochs >= ENDLESS_EPOCHS or (size := _dataset_size(upstream)) is None:
        return None
    batch = _global_batch(upstream)
    if is_supervised(upstream):
        return max(1, epochs * (size // batch))
    return max(1, size * upstream.count("rollout.n_generation") * epochs // batch)


def _dataset_size(upstream: Upstream) -> int | None:
    """Return the number of items or prompts of the training set; None if the set is not found."""
    if is_vlm(upstream):
        return num_conversations(upstream)
    if is_supervised(upstream):
        folder = upstream[f"{DATASET}.local_dir"]
        return len(list(Path(str(folder)).glob("*.json"))) or None if folder else None
    named, downloads = prompt_set(upstream, DATASET), cache.of_cosmos_rl()
    if named is None or downloads is None:
        return None
    name, split = named
    file = downloads / "diffusion_nft" / name / f"{split}{PROMPT_SETS[name]}"
    lines = file.read_bytes().splitlines() if file.is_file() else ()
    return sum(bool(line.strip()) for line in lines) or None


def steps_per_iteration(upstream: Upstream) -> int:
    """Return the steps of a supervised iteration: up to cosmos-rl's next save or validation, or to the end of the run.

    Validations count only if every save is made at a validation.
    """
    save, total = upstream.count("train.ckpt.save_freq"), _num_steps(upstream)
    if validates(upstream) and save % (freq := upstream.count("validation.freq")) == 0:
        save = freq
    return save if total is None else min(save, total)


def _iterations(upstream: Upstream) -> int | None:
    total = _num_steps(upstream)
    if total is None or is_nft(upstream):
        return total
    return math.ceil(total / steps_per_iteration(upstream))


def epoch_row(_: str, value: Any, upstream: Upstream) -> Answer:
    """Return the number of iterations that the file's number of passes over the data takes."""
    if upstream["train.max_num_steps"] is not None:
        return "train.max_num_steps ends the run"
    if count(value) >= ENDLESS_EPOCHS:
        why = "cosmos-rl runs until it is stopped; here a run has an end, which --iterations can move later"
        return {"train.num_iterations": ENDLESS_ITERATIONS}, why
    if (iterations := _iterations(upstream)) is None:
        return {"train.num_iterations": None}, "no dataset found to count: set --iterations"
    return {"train.num_iterations": iterations}, f"{_num_steps(upstream)} steps"


def max_num_steps_row(_: str, value: Any, upstream: Upstream) -> Answer:
    """Return the number of iterations that the file's number of steps takes."""
    count(value)
    return {"train.num_iterations": _iterations(upstream)}, "a run ends with its iterations"


def save_freq_row(_: str, value: Any, upstream: Upstream) -> Answer:
    """Return the steps of an iteration of supervised training: it ends where cosmos-rl saves or validates."""
    count(value)
    steps = steps_per_iteration(upstream)
    return {f"{POLICY}.steps_per_iteration": steps}, "every iteration saves a policy"


def validation_iterations(upstream: Upstream) -> int:
    """Return the iterations of supervised training between validations, at least one."""
    return max(1, round(upstream.count("validation.freq") / steps_per_iteration(upstream)))


def validation_freq_row(key: str, value: Any, upstream: Upstream) -> Answer:
    """Return the iterations of supervised training between validations."""
    steps, iterations = steps_per_iteration(upstream), validation_iterations(upstream)
    exact = iterations * steps == value
    return {key: iterations}, f"every {iterations * steps} steps" + ("" if exact else f" instead of {value}")


def batch_row(key: str, value: Any, upstream: Upstream) -> Answer:
    """Return the samples of a step over all ranks."""
    total = _global_batch(upstream)
    return {key: total}, f"over all {total // value} ranks"


def _optimizer_steps(upstream: Upstream) -> int | None:
    steps = _num_steps(upstream)
    if steps is None or is_supervised(upstream):
        return steps
    per_step = upstream[f"{POLICY}.batch_size_per_optimize"]
    each = 1 if per_step is None else _global_batch(upstream) // (count(per_step) * ranks(upstream))
    return steps * max(1, each) * count(upstream[f"{POLICY}.mu_iterations"] or 1)


def decay_type_row(key: str, value: Any, upstream: Upstream) -> Answer:
    """Return the decay of the learning rate and its length, the whole run."""
    if value == "none":
        return {key: value}
    total = _optimizer_steps(upstream)
    return {key: value, "train.max_num_steps": total}, "over all optimizer steps of the run"


def warmup_row(key: str, value: Any, upstream: Upstream) -> Answer:
    """Return warm-up steps from steps or from a share of all steps."""
    if number(value) == int(value) and not (isinstance(value, float) and value == 1):
        return {key: int(value)}
    if value > 1:
        raise ConfigError("a share of the steps is at most 1")
    if (total := _optimizer_steps(upstream)) is None:
        return {key: None}, f"{value:g} of an unknown number of steps: set it in steps"
    return {key: round(total * value)}, f"{value:g} of {total} steps"


def prompt_set(upstream: Upstream, place: str) -> tuple[str, str] | None:
    """Return name and split of a prompt set that cosmos-rl knows; None for other names and splits."""
    name, split = str(upstream[f"{place}.name"]), upstream[f"{place}.split"]
    split = split[0] if isinstance(split, list) and split else split
    return (name, split or "train") if name in PROMPT_SETS and split in (None, "", "train", "test") else None
