"""The plan of a re-score: its rewards, and the samples of the run that are scored, checked before anything runs."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import Field

from cosmos_rl_core import outside_plugins, plugins
from cosmos_rl_core.config.base import Section
from cosmos_rl_core.config.reading import rewards_in, validated
from cosmos_rl_core.config.train import RewardConfig
from cosmos_rl_core.datasets._base import Prompt
from cosmos_rl_core.errors import ConfigError, Mistakes, counted
from cosmos_rl_core.rewards._base import NamedReward, ServedReward
from flows.checking.checks import check_prompts
from flows.planning.run import Run
from flows.planning.steps import read_run
from flows.rescoring.record import Rescoring
from flows.rescoring.rescore import Rescore
from flows.rescoring.stock import Stock, evaluations_of, rollouts_of
from flows.terminal.numbers import parsed, ranges
from stages.artifacts.slots import one_look
from stages.registry import STAGES

_STAGES = ("decode", "reward", "judge")
_LONGEST_NAME = 60


class _Rewards(Section):
    rewards: tuple[RewardConfig, ...] = Field(min_length=1)


@dataclass(frozen=True)
class Wanted:
    """A re-score, and the samples that one command scores."""

    rescore: Rescore
    stocks: tuple[Stock, ...]


@dataclass(frozen=True)
class PlannedRescore:
    """The cost of a re-score before it is made."""

    run: str
    rescore: str
    """Folder of the re-score."""
    iterations: list[int]
    policy_versions: list[int]
    """Policy versions whose evaluations are scored."""
    samples: int
    decoded: int
    """Samples whose pictures are decoded first."""
    scored: dict[str, int]
    """Samples that each reward scores, by its label."""

    def lines(self) -> Iterator[str]:
        """Yield the lines to print."""
        of = [f"iterations {ranges(self.iterations)}"] if self.iterations else []
        of += [f"evaluations of policies {ranges(self.policy_versions)}"] if self.policy_versions else []
        yield f"{'re-score':<10}{self.rescore}"
        yield f"{'of':<10}{' and '.join(of)}: {self.samples:,} samples"
        yield f"{'generates':<10}nothing"
        yield f"{'decodes':<10}{self.decoded:,} samples"
        yield f"{'scores':<10}{', '.join(f'{count:,} samples by {label}' for label, count in self.scored.items())}"


def plan_of_rescore(
    store_url: str, run_id: str, reward: str, iterations: str | None = None, *, evaluations: bool = False
) -> Wanted:
    """Return the plan of a re-score. Writes nothing.

    ``reward`` is the name of a reward, or the path of a TOML file with ``[[rewards]]``. ``iterations``, such as
    ``3-7,9``, selects the rollouts to score; by default all that the run has. Raises one :class:`ConfigError` with
    every mistake, or with the numbers of samples whose stored files no longer suffice to score them.
    """
    run, mistakes = read_run(store_url, run_id), Mistakes()
    if not isinstance(run, Run):
        raise ConfigError(f"run {run_id} generates no pictures or videos, which a reward could score again")
    rewards = mistakes.catch(_rewards_of, run, reward)
    with one_look():
        stocks = mistakes.catch(_chosen, run, iterations, evaluations) or []
        scorers = {} if rewards is None else _scorers(rewards, _prompts_of(run, stocks), mistakes)
        if mistakes or rewards is None:
            raise ConfigError("\n  ".join([f"re-score of {run_id}:", *mistakes]))
        record = Rescoring(
            run_id=run_id,
            name=_name_of(reward, rewards),
            rewards=rewards,
            scorers=scorers,
            versions={name: STAGES[name].version for name in _STAGES},
            served=tuple(one.fn.label for one in rewards if _is_served(one)),
            plugins=outside_plugins.pins(run.plan.model.adapter),
        )
        wanted = Wanted(Rescore(run, record), tuple(stocks))
        if lost := [*_lost(wanted)]:
            raise ConfigError("\n  ".join([f"re-score of {run_id}:", *lost]))
    return wanted


def cost_of(wanted: Wanted) -> PlannedRescore:
    """Return the numbers of samples that a re-score will decode and score. Writes nothing."""
    rescore, stocks = wanted.rescore, wanted.stocks
    with one_look():
        scored = {
            reward.fn.label: sum(stock.counts.samples for stock in stocks if rescore.found(stock, reward) is None)
            for reward in rescore.record.rewards
        }
        return PlannedRescore(
            run=rescore.run.plan.run_id,
            rescore=rescore.url,
            iterations=[stock.k for stock in stocks if not stock.held_out],
            policy_versions=[stock.k for stock in stocks if stock.held_out],
            samples=sum(stock.counts.samples for stock in stocks),
            decoded=sum(map(rescore.decodes, stocks)),
            scored=scored,
        )


def _is_file(reward: str) -> bool:
    return reward.endswith(".toml")


def _name_of(reward: str, rewards: Sequence[RewardConfig]) -> str:
    name = Path(reward).stem if _is_file(reward) else rewards[0].fn.label
    return re.sub(r"[^A-Za-z0-9._-]", "-", name)[:_LONGEST_NAME]


def _rewards_of(run: Run, reward: str) -> tuple[RewardConfig, ...]:
    """Return the rewards of a file, or the one with a name, as a recipe would have them."""
    # As many samples may fail as in the run: among them are samples that are not finite.
    allowed = max((one.max_failed_fraction for one in run.recipe.rewards), default=0.0)
    alone = {"fn": {"name": reward}} | ({"max_failed_fraction": allowed} if allowed else {})
    values = rewards_in(reward) if _is_file(reward) else [alone]
    rewards = validated(_Rewards, {"rewards": values}, reward).rewards
    labels = [one.fn.label for one in rewards]
    if twice := sorted({label for label in labels if labels.count(label) > 1}):
        raise ConfigError(f"{reward} has {', '.join(twice)} more than once; expected each reward once")
    if not any(one.role == "train" for one in rewards):
        raise ConfigError(f"{reward} has no reward with role = 'train'; their weighted sum is what is compared")
    return rewards


def _scorers(rewards: Sequence[RewardConfig], prompts: Sequence[Prompt], mistakes: Mistakes) -> dict[str, str]:
    """Return the version of the scorer of each reward. Adds rewards that lack files or cannot score the prompts."""
    found = {one.fn.label: mistakes.catch(_version, one) for one in rewards}
    for one in rewards:
        if found[one.fn.label] is not None:
            mistakes.catch(check_prompts, one, prompts)
    return {label: version for label, version in found.items() if version is not None}


def _version(reward: RewardConfig) -> str:
    kind = plugins.load("rewards", reward.fn.name)
    with plugins.errors_of("rewards", reward.fn.name):
        version = kind.Reward(reward.fn).version
    if not isinstance(version, str):
        raise ConfigError(f"{reward.fn.label}: version must be a string, found {version!r}")
    return version


def _is_served(reward: RewardConfig) -> bool:
    return isinstance(plugins.load("rewards", reward.fn.name).Reward(reward.fn), NamedReward | ServedReward)


def _prompts_of(run: Run, stocks: Sequence[Stock]) -> list[Prompt]:
    """Return the prompts of samples, each once."""
    rollouts = (prompt for stock in stocks if not stock.held_out for prompt in run.plan.prompts_of(stock.k))
    judged = run.plan.validation_prompts if any(stock.held_out for stock in stocks) else ()
    return [*{prompt.id: prompt for prompt in (*rollouts, *judged)}.values()]


def _chosen(run: Run, iterations: str | None, evaluations: bool) -> list[Stock]:
    """Return the samples that are asked for. Raises :class:`ConfigError` if there are none."""
    run_id, rollouts = run.plan.run_id, rollouts_of(run)
    if not run.trains_on_rewards and (iterations is not None or not evaluations):
        raise ConfigError(
            f"run {run_id} trains on data and has no rollouts; --evaluations re-scores its held-out samples"
        )
    judged = evaluations_of(run) if evaluations else []
    if evaluations and not judged:
        raise ConfigError(f"run {run_id} has no evaluations yet")
    if iterations is None:
        if not rollouts and not judged:
            raise ConfigError(f"run {run_id} has no rollout yet; re-score it once it has one")
        return [*rollouts, *judged]
    there, asked = {stock.k: stock for stock in rollouts}, parsed(iterations)
    if unknown := [k for k in asked if k not in there]:
        raise ConfigError(
            f"--iterations {iterations}: run {run_id} has no rollout of {ranges(unknown)}; "
            f"it has {ranges([*there]) or 'none yet'}"
        )
    return [*(there[k] for k in asked), *judged]


def _lost(wanted: Wanted) -> Iterator[str]:
    """Yield lines on samples that cannot be scored any more."""
    for held_out in (False, True):
        some = [stock for stock in wanted.stocks if stock.held_out == held_out]
        lost = {stock.k: count for stock in some if (count := wanted.rescore.lacks(stock))}
        if not lost:
            continue
        where = f"{'policies' if held_out else 'iterations'} {ranges([*lost])}"
        left = [stock.k for stock in some if stock.k not in lost]
        option = "" if held_out else f"; --iterations {ranges(left, to='-', sep=',')} leaves them out" if left else ""
        yield (
            f"{counted(sum(lost.values()), 'sample')} of {where} cannot be scored: what the rewards read was not kept "
            f"(rollout.keep, rollout.decode_share){option}"
        )
