"""Kind, length and prompts of a run, from a file of the diffusers path."""

import math
from pathlib import Path
from typing import Any

from cosmos_rl_core.errors import ConfigError
from cosmos_rl_core.importers.cosmos_rl.rows import Answer, Upstream, count, number, taken

ENDLESS_EPOCHS = 1000
"""Passes from which on cosmos-rl's recipes mean "until stopped"."""
ENDLESS_ITERATIONS = 1000
"""Iterations of a run that cosmos-rl would continue until stopped."""
_LINES, _OBJECTS = ".txt", "_metadata.jsonl"
PROMPT_SETS = {"pickscore": _LINES, "ocr": _LINES, "dance_grpo_t2v": _LINES, "geneval": _OBJECTS}
"""Suffixes of the files of cosmos-rl's named prompt sets, after the name of the split."""
PROMPT_FOLDER = "~/.cache/cosmos_rl/diffusion_nft"
"""Folder of cosmos-rl's downloads, unless COSMOS_CACHE_DIR names another."""

POLICY, SAMPLE = "train.train_policy", "policy.diffusers.sample"
DATASET = f"{POLICY}.dataset"


def is_supervised(upstream: Upstream) -> bool:
    """Return whether a file is of supervised fine-tuning; without ``type`` cosmos-rl looks for settings of rewards."""
    kind = upstream[f"{POLICY}.type"]
    if kind is not None:
        return kind == "sft"
    hints = ("temperature", "epsilon_low", "epsilon_high", "kl_beta", "use_remote_reward")
    return not any(upstream.says(f"{POLICY}.{hint}") for hint in hints)


def is_nft(upstream: Upstream) -> bool:
    """Return whether a file is of DiffusionNFT, the other algorithm of this path."""
    return not is_supervised(upstream)


def is_sana(upstream: Upstream) -> bool:
    """Return whether the model is SANA, for images or videos."""
    return "sana" in str(upstream["policy.model_name_or_path"]).lower()


def validates(upstream: Upstream) -> bool:
    """Return whether there are evaluations."""
    return upstream["validation.enable"] is True


def asks_service(upstream: Upstream) -> bool:
    """Return whether a reward service scores."""
    return is_nft(upstream) and upstream[f"{POLICY}.use_remote_reward"] is True


def ranks(upstream: Upstream) -> int:
    """Return the number of ranks with samples of their own."""
    sizes = ("dp_shard_size", "dp_replicate_size", "n_init_replicas")
    return math.prod(count(upstream[f"policy.parallelism.{size}"] or 1) for size in sizes)


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
    """Return the number of items or prompts of the training set; None if it is not found."""
    if is_supervised(upstream):
        folder = upstream[f"{DATASET}.local_dir"]
        return len(list(Path(str(folder)).glob("*.json"))) or None if folder else None
    file = prompt_file(upstream, "train.train_policy.dataset")
    if file is None or not Path(file).is_file():
        return None
    lines = Path(file).read_text(encoding="utf-8").splitlines()
    return sum(bool(line.strip()) for line in lines) or None


def steps_per_iteration(upstream: Upstream) -> int:
    """Return the steps of a supervised iteration: up to cosmos-rl's next save, or to the end of the run."""
    save = upstream.count("train.ckpt.save_freq")
    total = _num_steps(upstream)
    return save if total is None else min(save, total)


def _iterations(upstream: Upstream) -> int | None:
    total = _num_steps(upstream)
    if total is None or is_nft(upstream):
        return total
    return math.ceil(total / steps_per_iteration(upstream))


def epoch_row(_: str, value: Any, upstream: Upstream) -> Answer:
    """Return the number of iterations of so many passes over the data."""
    if upstream["train.max_num_steps"] is not None:
        return "train.max_num_steps ends the run"
    if count(value) >= ENDLESS_EPOCHS:
        why = "cosmos-rl runs until it is stopped; here a run has an end, which --iterations can move later"
        return {"train.num_iterations": ENDLESS_ITERATIONS}, why
    if (iterations := _iterations(upstream)) is None:
        return {"train.num_iterations": None}, "no dataset found to count: set --iterations"
    return {"train.num_iterations": iterations}, f"{_num_steps(upstream)} steps"


def max_num_steps_row(_: str, value: Any, upstream: Upstream) -> Answer:
    """Return the number of iterations of so many steps."""
    count(value)
    return {"train.num_iterations": _iterations(upstream)}, "a run ends with its iterations"


def save_freq_row(_: str, value: Any, upstream: Upstream) -> Answer:
    """Return the steps of an iteration of supervised training, which ends where cosmos-rl saves."""
    count(value)
    steps = steps_per_iteration(upstream)
    return {f"{POLICY}.steps_per_iteration": steps}, "every iteration saves a policy"


def batch_row(key: str, value: Any, upstream: Upstream) -> Answer:
    """Return the samples of a step over all ranks."""
    total = _global_batch(upstream)
    return {key: total}, f"over all {total // value} ranks"


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


def prompt_file(upstream: Upstream, place: str) -> str | None:
    """Return the path of a prompt set that cosmos-rl names; None for other names."""
    name, split = str(upstream[f"{place}.name"]), upstream[f"{place}.split"]
    split = split[0] if isinstance(split, list) and split else split
    if name not in PROMPT_SETS:
        return None
    return str(Path(PROMPT_FOLDER).expanduser() / name / f"{split or 'train'}{PROMPT_SETS[name]}")
