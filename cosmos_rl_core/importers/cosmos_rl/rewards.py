"""Translate cosmos-rl's remote rewards to ``[[rewards]]`` of the plugin ``remote``."""

import re
from collections.abc import Mapping
from typing import Any

from cosmos_rl_core.errors import ConfigError
from cosmos_rl_core.importers.cosmos_rl.rows import Answer, Upstream, number

REMOTE = "train.train_policy.remote_reward"
CLIP = 5.0
"""cosmos-rl's default bound of a score, on either side."""
_DEFAULT = {"name": "dance_grpo", "score_key": "overall_reward"}
"""cosmos-rl's reward if a file names none."""
_OPTIONS = ("score_key", "clip_min", "clip_max", "scale")


def remote_row(_: str, __: Any, upstream: Upstream) -> Answer:
    """Return rewards of a service; cosmos-rl's own reward functions have no counterpart."""
    if upstream["train.train_policy.use_remote_reward"] is not True:
        return {"rewards": None}, "cosmos-rl's own rewards do not exist here: set [[rewards]]"
    scale = {} if upstream[f"{REMOTE}.scale"] == 1 else {"scale": upstream[f"{REMOTE}.scale"]}
    told: dict[str, dict[str, Any]] = {}
    for key, value in upstream.values.items():
        if found := re.fullmatch(rf"{REMOTE}\.reward_fns(\[.*\])\.(\w+)", key):
            told.setdefault(found[1], {})[found[2]] = value
    rewards = [remote(reward | scale) for reward in told.values() or [_DEFAULT]]
    return {"rewards": rewards}, "rewards of a service"


def remote(told: Mapping[str, Any]) -> dict[str, Any]:
    """Return the ``[[rewards]]`` table of a reward with cosmos-rl's settings ``told``; None means no setting."""
    fn = {"name": "remote", "reward_fn": told.get("name", ""), "clip_min": -CLIP, "clip_max": CLIP}
    fn |= {name: told[name] for name in _OPTIONS if told.get(name) is not None}
    return {"fn": fn} | ({"weight": told["weight"]} if "weight" in told else {})


def total_bound_row(key: str, value: Any, _: Upstream) -> Answer:
    """Refuse a bound of the sum of scores that is narrower than the bound of each score."""
    if abs(number(value)) < CLIP:
        raise ConfigError("a sum has no bounds here: bound each reward by clip_min and clip_max")
    return "each reward has its own bounds; their sum has none"
