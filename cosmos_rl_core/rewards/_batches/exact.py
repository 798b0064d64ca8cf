"""A test, on the machine that computes scores, that a sample's scores do not depend on the other samples of its batch.

Forward passes of one size give a sample the same bits in every place of a batch only if the machine's kernels compute
all rows alike. The test runs when a scorer has loaded. If it fails, each item gets a forward pass of its own, and the
scorer's version says so.
"""

from collections.abc import Callable, Sequence
from typing import Any

from cosmos_rl_core.config.train import RewardOptions
from cosmos_rl_core.errors import ConfigError
from cosmos_rl_core.rewards._base import ProbedReward, Reward, Sample
from cosmos_rl_core.rewards._base.answers import brief, words
from cosmos_rl_core.rewards._batches.trial import trial_samples

ONE_BY_ONE = "batches of 1"
"""Words added to the version of a scorer whose batches changed scores."""


def batch_sizes(options: RewardOptions) -> dict[str, int]:
    """Return the batch sizes above 1 among a scorer's settings, by name: with them items share a forward pass."""
    facts = options.facts
    sizes = {name: int(getattr(options, name)) for name in facts.batches} if facts.torch else {}
    return {name: size for name, size in sizes.items() if size > 1}


def why_not_exact(reward: Reward, options: RewardOptions) -> str | None:
    """Return why batches change the scores of this loaded reward; None if they do not.

    A test sample is scored alone, then first and then last in a batch. The other samples thereby change places, too.
    """
    if not (sizes := batch_sizes(options)):
        return None
    one, *others = trial_samples(options.facts.input, max(sizes.values()))
    (alone,), first, last = (_found(reward, some) for some in ([one], [one, *others], [*others, one]))
    if isinstance(alone, Exception):
        return f"a test picture has no score that would show whether scores depend on each other ({words(alone)})"
    for name, found in (("first", first), ("last", [*last[-1:], *last[:-1]])):
        if repr(found[0]) != repr(alone):
            return f"a test picture has {brief(alone)} alone and {brief(found[0])} {name} among others"
        if repr(found) != repr(first):
            return "test pictures have other scores in other places of a batch"
    return None


def one_by_one(make: Callable[[Any], Reward], options: RewardOptions) -> Reward:
    """Return the reward with a forward pass for each item. ``make`` is the plugin's class.

    Raises :class:`ConfigError` if scores are not repeatable even then.
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
    """Return the reward, and whether each item needs a forward pass of its own for its scores to depend on no other.

    ``say`` gets the reason if so. Loads the model if items may share forward passes. Raises like :func:`one_by_one`.
    """
    reward = make(options)
    if (why := why_not_exact(reward, options)) is None:
        return reward, False
    say(f"{options.label} scores in {ONE_BY_ONE}: {why}")
    del reward  # before its model is loaded a second time
    return one_by_one(make, options), True


def named(version: str, *, alone: bool) -> str:
    """Return a scorer's version, with :data:`ONE_BY_ONE` added if each item gets a forward pass ``alone``."""
    return f"{version}, {ONE_BY_ONE}" if alone else version


def _found(reward: Reward, samples: Sequence[Sample]) -> list[Any]:
    """Return the reward's probe of each sample, or its scores if it has no probes. A ``ValueError`` counts for all.

    Other errors, :class:`ConfigError` among them, are raised.
    """
    probe = reward.probe if isinstance(reward, ProbedReward) else reward.score
    try:
        return [*probe([*samples])]
    except ConfigError:
        raise
    except ValueError as error:
        return [error] * len(samples)
