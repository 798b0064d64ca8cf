"""Scores that depend on no other sample, made sure of on the machine that computes them.

Forwards of one size give a sample equal bits in every place of a batch only if the machine's kernels compute all its
rows alike. Whether they do is tried out when a scorer has loaded. If not, each item gets a forward of its own, and what
names the scorer says so.
"""

from collections.abc import Callable, Sequence
from typing import Any

from cosmos_rl_core.config.train import RewardOptions
from cosmos_rl_core.errors import ConfigError
from cosmos_rl_core.rewards._base import ProbedReward, Reward, Sample
from cosmos_rl_core.rewards._base.answers import brief, words
from cosmos_rl_core.rewards._batches.trial import trial_samples

ONE_BY_ONE = "batches of 1"
"""What follows the version of a scorer whose batches changed scores."""


def batch_sizes(options: RewardOptions) -> dict[str, int]:
    """Return the settings by which several items share a forward, and their values."""
    facts = options.facts
    sizes = {name: int(getattr(options, name)) for name in facts.batches} if facts.torch else {}
    return {name: size for name, size in sizes.items() if size > 1}


def why_not_exact(reward: Reward, options: RewardOptions) -> str | None:
    """Return why batches of this loaded reward change scores, or None.

    A test sample is scored alone, first and last among others, which thereby change their places too.
    """
    if not (sizes := batch_sizes(options)):
        return None
    one, *others = trial_samples(options.facts.input, max(sizes.values()))
    (alone,), first, last = (_found(reward, some) for some in ([one], [one, *others], [*others, one]))
    if isinstance(alone, Exception):
        return f"no score of a test picture shows whether they depend on each other ({words(alone)})"
    for name, found in (("first", first), ("last", [*last[-1:], *last[:-1]])):
        if repr(found[0]) != repr(alone):
            return f"a test picture has {brief(alone)} alone and {brief(found[0])} {name} among others"
        if repr(found) != repr(first):
            return "test pictures have other scores in other places of a batch"
    return None


def one_by_one(make: Callable[[Any], Reward], options: RewardOptions) -> Reward:
    """Return the reward with a forward for each item. ``make`` is the plugin's class.

    Raises :class:`ConfigError` if that does not make scores repeatable either.
    """
    reward = make(options.model_copy(update=dict.fromkeys(batch_sizes(options), 1)))
    pair = trial_samples(options.facts.input, 2)
    once, again = _found(reward, pair), _found(reward, pair[::-1])
    if repr(once) != repr(again[::-1]):
        raise ConfigError(
            f"{options.label} gives the same picture {brief(once[0])} and then {brief(again[1])}, in forwards of its "
            'own: its kernels are not repeatable here. Use another device, or a service with batching = "fast"'
        )
    return reward


def exact(make: Callable[[Any], Reward], options: RewardOptions, say: Callable[[str], None]) -> tuple[Reward, bool]:
    """Return the reward whose scores depend on no other sample, and whether its items get forwards of their own.

    ``say`` gets the reason. Loads models, if they share forwards.
    """
    reward = make(options)
    if (why := why_not_exact(reward, options)) is None:
        return reward, False
    say(f"{options.label} scores in {ONE_BY_ONE}: {why}")
    del reward  # before its model is loaded a second time
    return one_by_one(make, options), True


def named(version: str, *, alone: bool) -> str:
    """Return a scorer's version, followed by how it batches if it does not batch as its settings say."""
    return f"{version}, {ONE_BY_ONE}" if alone else version


def _found(reward: Reward, samples: Sequence[Sample]) -> list[Any]:
    """Return what the reward finds of each sample, or its error. Raises errors of service and settings."""
    probe = reward.probe if isinstance(reward, ProbedReward) else reward.score
    try:
        return [*probe([*samples])]
    except ConfigError:
        raise
    except ValueError as error:
        return [error] * len(samples)
