"""Translate cosmos-rl's remote rewards to ``[[rewards]]`` of the plugin ``remote``."""

from typing import Any

from cosmos_rl_core.errors import ConfigError
from cosmos_rl_core.importers.cosmos_rl.rows import Answer, Upstream, number, table

CLIP = 5.0
"""cosmos-rl's default bound of a score, on either side."""
_REMOTE = "train.train_policy.remote_reward"


def remote_row(_: str, value: Any, upstream: Upstream) -> Answer:
    """Return rewards of a service; cosmos-rl's own reward functions have no counterpart."""
    if value is not True:
        return {"rewards": None}, "cosmos-rl's own rewards do not exist here: set [[rewards]]"
    if not upstream.says(f"{_REMOTE}.reward_fns"):
        return default_reward(), "cosmos-rl's reward if the file names none"
    return {f"rewards[{label}].fn.name": "remote" for label in _labels(upstream)}


def default_reward() -> dict[str, Any]:
    """Return the reward that both schemas use if a file names none."""
    score_key = {"rewards[dance_grpo].fn.score_key": "overall_reward"}
    return _remote("dance_grpo", "dance_grpo") | score_key


def _remote(label: str, reward_fn: Any) -> dict[str, Any]:
    fn = {"name": "remote", "reward_fn": reward_fn, "clip_min": -CLIP, "clip_max": CLIP}
    return {f"rewards[{label}].fn.{name}": value for name, value in fn.items()}


def _labels(upstream: Upstream) -> dict[str, None]:
    rewards = (name for name in upstream.values if name.startswith(f"{_REMOTE}.reward_fns["))
    return dict.fromkeys(map(_label, rewards))


def _label(key: str) -> str:
    return key[key.index("[") + 1 : key.index("]")]


def _name(key: str, value: Any, upstream: Upstream) -> Answer:
    settings = _remote(_label(key), value)
    for bound in ("clip_min", "clip_max"):
        if upstream.says(key.removesuffix("name") + bound):
            del settings[f"rewards[{_label(key)}].fn.{bound}"]
    return settings


def _weight(key: str, value: Any, _: Upstream) -> Answer:
    return {f"rewards[{_label(key)}].weight": value}


def _option(key: str, value: Any, _: Upstream) -> Answer:
    return {f"rewards[{_label(key)}].fn.{key.rpartition('.')[2]}": value}


def _scale(key: str, value: Any, upstream: Upstream) -> Answer:
    if number(value) == 1:
        return "a factor of 1"
    return {f"rewards[{label}].fn.scale": value for label in _labels(upstream) or ["dance_grpo"]}


def _total_bound(key: str, value: Any, upstream: Upstream) -> Answer:
    if abs(number(value)) < CLIP:
        raise ConfigError("a sum has no bounds here: bound each reward by clip_min and clip_max")
    return "each reward has its own bounds; their sum has none"


REMOTE_ROWS = table({
    f"{_REMOTE}.reward_fns": "an empty list",
    f"{_REMOTE}.reward_fns[*].name": _name,
    f"{_REMOTE}.reward_fns[*].weight": _weight,
    f"{_REMOTE}: reward_fns[*].score_key reward_fns[*].clip_min reward_fns[*].clip_max": _option,
    f"{_REMOTE}.scale": _scale,
    f"{_REMOTE}: reward_clip_min reward_clip_max": _total_bound,
    f"{_REMOTE}.batch_size": "the plugin's batch_size sets the number of samples of a request",
})  # fmt: skip
"""Rows of the diffusers path."""
