"""cosmos-rl's remote rewards as ``[[rewards]]``, each with the plugin ``remote``."""

from typing import Any

from cosmos_rl_core.importers.cosmos_rl.rows import Meaning, Row, Upstream, no_effect, number

CLIP = 5.0
"""cosmos-rl's bounds of a score, on either side, where a file says nothing."""
_REMOTE = "train.train_policy.remote_reward"


def remote(label: str, reward_fn: str, **options: Any) -> dict[str, Any]:
    """Settings of one reward, bounded as cosmos-rl does; ``options`` are further ones of the plugin."""
    fn = {"name": "remote", "reward_fn": reward_fn, "clip_min": -CLIP, "clip_max": CLIP, **options}
    return {f"rewards[{label}].fn.{name}": value for name, value in fn.items()}


def default_reward() -> dict[str, Any]:
    """What both schemas ask for where no reward is named."""
    return remote("dance_grpo", "dance_grpo", score_key="overall_reward")


def _label(key: str) -> str:
    return key[key.index("[") + 1 : key.index("]")]


def _name(key: str, value: Any, upstream: Upstream) -> Meaning:
    settings = remote(_label(key), value)
    said = {
        f"rewards[{_label(key)}].fn.{name}" for name in ("clip_min", "clip_max") if upstream.says(_beside(key, name))
    }
    return Meaning("translated", {name: held for name, held in settings.items() if name not in said})


def _beside(key: str, name: str) -> str:
    return f"{key.rpartition('.')[0]}.{name}"


def _weight(key: str, value: Any, _: Upstream) -> Meaning:
    return Meaning("translated", {f"rewards[{_label(key)}].weight": value})


def _option(key: str, value: Any, _: Upstream) -> Meaning:
    return Meaning("translated", {f"rewards[{_label(key)}].fn.{key.rpartition('.')[2]}": value})


def _scale(key: str, value: Any, upstream: Upstream) -> Meaning:
    if number(value) == 1:
        return Meaning("no effect here", why="a factor of 1")
    named = [_label(name) for name in upstream.values if name.startswith(f"{_REMOTE}.reward_fns[")]
    labels = dict.fromkeys(named or ["dance_grpo"])
    return Meaning("translated", {f"rewards[{label}].fn.scale": value for label in labels})


def _total_bound(key: str, value: Any, upstream: Upstream) -> Meaning:
    if abs(number(value)) >= CLIP:
        return Meaning("no effect here", why="each reward is bounded by itself, their sum is not")
    return Meaning("refused", why="the sum of rewards has no bounds here: bound each of them by clip_min and clip_max")


REMOTE_ROWS: dict[str, Row] = {
    f"{_REMOTE}.reward_fns": no_effect("an empty list"),
    f"{_REMOTE}.reward_fns[*].name": _name,
    f"{_REMOTE}.reward_fns[*].weight": _weight,
    f"{_REMOTE}.reward_fns[*].score_key": _option,
    f"{_REMOTE}.reward_fns[*].clip_min": _option,
    f"{_REMOTE}.reward_fns[*].clip_max": _option,
    f"{_REMOTE}.scale": _scale,
    f"{_REMOTE}.reward_clip_min": _total_bound,
    f"{_REMOTE}.reward_clip_max": _total_bound,
    f"{_REMOTE}.batch_size": no_effect("how many samples one request has is the plugin's batch_size"),
}
"""Of the diffusers path."""
