"""What a file of the diffusers path says a run is: its kind, its length, its prompts."""

import math
from pathlib import Path
from typing import Any

from cosmos_rl_core.errors import ConfigError
from cosmos_rl_core.importers.cosmos_rl.rows import Meaning, Upstream, count, number

ENDLESS_EPOCHS = 1000
"""So many passes mean "until it is stopped" in cosmos-rl's recipes."""
ENDLESS_ITERATIONS = 1000
"""What they are here: a first goal."""
PROMPT_SETS = {"pickscore": ".txt", "ocr": ".txt", "dance_grpo_t2v": ".txt", "geneval": "_metadata.jsonl"}
"""Prompt sets that cosmos-rl knows by name, and how their files' names end after the split's."""
PROMPT_FOLDER = "~/.cache/cosmos_rl/diffusion_nft"
"""Where cosmos-rl downloads them to, unless COSMOS_CACHE_DIR says otherwise."""

POLICY, SAMPLE = "train.train_policy", "policy.diffusers.sample"
DATASET = f"{POLICY}.dataset"


def is_supervised(upstream: Upstream) -> bool:
    """Whether it is supervised fine-tuning; where there is no ``type``, cosmos-rl looks for settings of rewards."""
    kind = upstream[f"{POLICY}.type"]
    hints = ("temperature", "epsilon_low", "epsilon_high", "kl_beta", "use_remote_reward")
    return kind == "sft" or (kind is None and not any(upstream.says(f"{POLICY}.{hint}") for hint in hints))


def is_nft(upstream: Upstream) -> bool:
    """Whether it is DiffusionNFT, the other algorithm of this path."""
    return not is_supervised(upstream)


def is_sana(upstream: Upstream) -> bool:
    """Whether the model is SANA, of images or of videos."""
    return "sana" in str(upstream["policy.model_name_or_path"]).lower()


def has_lora(upstream: Upstream) -> bool:
    """Whether adapters are trained."""
    return upstream.says("policy.lora")


def validates(upstream: Upstream) -> bool:
    """Whether there are evaluations."""
    return upstream["validation.enable"] is True


def asks_service(upstream: Upstream) -> bool:
    """Whether a reward service scores."""
    return is_nft(upstream) and upstream[f"{POLICY}.use_remote_reward"] is True


def ranks(upstream: Upstream) -> int:
    """Processes that have samples of their own."""
    sizes = ("dp_shard_size", "dp_replicate_size", "n_init_replicas")
    return math.prod(count(upstream[f"policy.parallelism.{size}"] or 1) for size in sizes)


def _global_batch(upstream: Upstream) -> int:
    """Samples of one step over all ranks: cosmos-rl counts them of a rank in supervised training, of a replica else."""
    each = upstream.count("train.train_batch_per_replica")
    return each * (ranks(upstream) if is_supervised(upstream) else _replicas(upstream))


def _replicas(upstream: Upstream) -> int:
    return count(upstream["policy.parallelism.n_init_replicas"] or 1)


def _num_steps(upstream: Upstream) -> int | None:
    """cosmos-rl's training steps; None where they depend on files that are not there, or have no end."""
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
    """Items, or prompts, of the training set; None if it does not lie where the file says."""
    if is_supervised(upstream):
        folder = Path(str(upstream[f"{DATASET}.local_dir"]))
        return len(list(folder.glob("*.json"))) or None if upstream[f"{DATASET}.local_dir"] else None
    file = prompt_file(upstream, "train.train_policy.dataset")
    if file is None or not Path(file).is_file():
        return None
    return sum(bool(line.strip()) for line in Path(file).read_text(encoding="utf-8").splitlines()) or None


def steps_per_iteration(upstream: Upstream) -> int:
    """Of supervised training: an iteration ends where cosmos-rl saves, at the latest with the run."""
    save = upstream.count("train.ckpt.save_freq")
    total = _num_steps(upstream)
    return save if total is None else min(save, total)


def _iterations(upstream: Upstream) -> int | None:
    total = _num_steps(upstream)
    if total is None or is_nft(upstream):
        return total
    return math.ceil(total / steps_per_iteration(upstream))


def epoch_row(_: str, value: Any, upstream: Upstream) -> Meaning:
    """Passes over the data as iterations."""
    if upstream["train.max_num_steps"] is not None:
        return Meaning("no effect here", why="train.max_num_steps ends the run")
    if count(value) >= ENDLESS_EPOCHS:
        why = "so many epochs go on until they are stopped; here a run has an end, which --iterations moves at no loss"
        return Meaning("translated", {"train.num_iterations": ENDLESS_ITERATIONS}, why)
    if (iterations := _iterations(upstream)) is None:
        why = "how many iterations these are depends on the dataset, which is not there: say --iterations"
        return Meaning("open", {"train.num_iterations": None}, why)
    return Meaning("translated", {"train.num_iterations": iterations}, f"{_num_steps(upstream)} steps")


def max_num_steps_row(_: str, value: Any, upstream: Upstream) -> Meaning:
    """The same from steps."""
    count(value)
    return Meaning("translated", {"train.num_iterations": _iterations(upstream)}, "a run ends with its iterations")


def save_freq_row(_: str, value: Any, upstream: Upstream) -> Meaning:
    """Of supervised training: where an iteration ends."""
    count(value)
    steps = {f"{POLICY}.steps_per_iteration": steps_per_iteration(upstream)}
    return Meaning("translated", steps, "every iteration ends with a policy on disk")


def batch_row(key: str, value: Any, upstream: Upstream) -> Meaning:
    """Samples of a step, over all ranks."""
    total = _global_batch(upstream)
    if total == value:
        return Meaning("taken", {key: value})
    return Meaning("translated", {key: total}, f"of all {total // value} ranks together")


def batch_per_optimize_row(key: str, value: Any, upstream: Upstream) -> Meaning:
    """Samples of an optimizer step, over all ranks."""
    return Meaning("translated", {key: count(value) * ranks(upstream)}, "of all ranks together")


def summed_row(key: str, value: Any, upstream: Upstream) -> Meaning:
    """A number that cosmos-rl compares with gradients: in supervised training it adds those of a rank's micro-batches.

    Ours are their mean; less by that factor, the same number scales, clips and decays them alike.
    """
    if not is_supervised(upstream):
        return Meaning("taken", {key: value})
    added = math.ceil(upstream.count("train.train_batch_per_replica") / upstream.count(f"{POLICY}.mini_batch"))
    if added == 1:
        return Meaning("taken", {key: value})
    why = f"cosmos-rl adds the gradients of {added} micro-batches, of which ours is the mean"
    return Meaning("translated", {key: number(value) / added}, why)


def _optimizer_steps(upstream: Upstream) -> int | None:
    steps = _num_steps(upstream)
    if steps is None or is_supervised(upstream):
        return steps
    per_step = upstream[f"{POLICY}.batch_size_per_optimize"]
    each = 1 if per_step is None else _global_batch(upstream) // (count(per_step) * ranks(upstream))
    return steps * max(1, each) * count(upstream[f"{POLICY}.mu_iterations"] or 1)


def decay_type_row(key: str, value: Any, upstream: Upstream) -> Meaning:
    """The decay and, where there is one, its length."""
    if value == "none":
        return Meaning("taken", {key: value})
    total = _optimizer_steps(upstream)
    if total is None:
        return Meaning(
            "open",
            {key: value, "train.max_num_steps": None},
            "the decay's length is the run's: set train.max_num_steps",
        )
    return Meaning("translated", {key: value, "train.max_num_steps": total}, "stretched over the optimizer steps")


def warmup_row(key: str, value: Any, upstream: Upstream) -> Meaning:
    """Steps, or a share of them."""
    if number(value) == int(value) and not (isinstance(value, float) and value == 1):
        return Meaning("taken", {key: int(value)})
    if value > 1:
        raise ConfigError("a share of the steps is at most 1")
    if (total := _optimizer_steps(upstream)) is None:
        return Meaning("open", {key: None}, f"{value:g} of a number of steps that is not known: set it in steps")
    return Meaning("translated", {key: round(total * value)}, f"{value:g} of {total} steps")


def prompt_file(upstream: Upstream, place: str) -> str | None:
    """The text file of a prompt set that cosmos-rl knows by name; None for another."""
    name, split = str(upstream[f"{place}.name"]), upstream[f"{place}.split"]
    split = split[0] if isinstance(split, list) and split else split
    if name not in PROMPT_SETS:
        return None
    return str(Path(PROMPT_FOLDER).expanduser() / name / f"{split or 'train'}{PROMPT_SETS[name]}")
