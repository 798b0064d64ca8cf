"""Agreement of two rewards on the same samples: rank correlation within groups, and where the ranks differ most."""

import math
from dataclasses import dataclass, field
from typing import Any, Self

import pandas as pd

from cosmos_rl_core.errors import counted
from cosmos_rl_core.estimates.estimate import Estimate, mean_of

FEWEST = 3
"""Number of samples of a group below which its correlation says nothing: with two it is 1 or -1."""
SHOWN = 12
"""Most samples that are shown."""
GROUP, BOTH = ["k", "prompt_id"], ["old_reward", "new_reward"]


@dataclass(frozen=True)
class Apart:
    """A sample whose ranks in its group differ. Rank 1 has the highest score; equal scores share their mean rank."""

    k: int
    """The iteration, or the policy version."""
    sample: str
    prompt_id: str
    group: int
    """Number of samples of its group that have both scores."""
    old_reward: float
    new_reward: float
    old_rank: float
    new_rank: float


@dataclass(frozen=True)
class Agreement:
    """Agreement on rollouts, or on evaluations."""

    of: str
    """``rollouts`` or ``evaluations``."""
    ks: list[int]
    """The iterations, or the policy versions."""
    samples: int
    failed_old: int
    """Samples without an old score."""
    failed_new: int
    rank_correlation: float | None
    """Mean over groups of Spearman's correlation within a group; None if no group has one."""
    error: float | None
    """Standard error of ``rank_correlation`` over prompts; None with fewer than two."""
    prompts: int
    groups: int
    """Number of groups that ``rank_correlation`` is a mean of: each a prompt of an iteration or a policy version."""
    too_small: int
    """Groups left out because fewer than :data:`FEWEST` of their samples have both scores."""
    without_spread: int
    """Groups left out because all old or all new scores are equal."""
    apart: list[Apart]
    """The samples whose ranks differ most in proportion to the size of the group."""
    table: Any = field(default=None, repr=False, compare=False)
    """One row for each sample of these groups, with both scores; ``old_z``, ``new_z``: standardised in its group."""

    @classmethod
    def between(cls, of: str, table: Any) -> Self:
        """Return the agreement of the columns ``old_reward`` and ``new_reward`` of a table.

        They are NaN where a sample has no score. Its other columns are ``k``, ``sample_id`` and ``prompt_id``.
        """
        both = table.dropna(subset=BOTH)
        sizes = both.groupby(GROUP)["sample_id"].transform("size")
        spread = both.groupby(GROUP)[BOTH].transform("nunique").gt(1).all(axis=1)
        num_groups = len(table[GROUP].drop_duplicates())
        large = both[sizes >= FEWEST]
        num_large = len(large[GROUP].drop_duplicates())
        used = _ranked(large[spread[large.index]])
        found = _correlations(used)
        estimate = mean_of(found["correlation"], found["prompt_id"]) if len(found) else Estimate.missing()
        return cls(
            of=of,
            ks=sorted({int(k) for k in table["k"]}),
            samples=len(table),
            failed_old=int(table["old_reward"].isna().sum()),
            failed_new=int(table["new_reward"].isna().sum()),
            rank_correlation=_finite(estimate.mean),
            error=_finite(estimate.error),
            prompts=estimate.clusters,
            groups=len(found),
            too_small=num_groups - num_large,
            without_spread=num_large - len(found),
            apart=_apart(used),
            table=used,
        )

    @property
    def estimate(self) -> Estimate:
        """Return the rank correlation with its error."""
        mean, error = (math.nan if one is None else one for one in (self.rank_correlation, self.error))
        return Estimate(mean, error, self.groups, self.prompts)

    @property
    def words(self) -> str:
        """Return the rank correlation for people."""
        if self.rank_correlation is None:
            return "no group has a rank correlation"
        shown = f"{self.estimate.shown} {self.estimate.error_shown}".strip()
        return f"rank correlation {shown} over {counted(self.prompts, 'prompt')}, {counted(self.groups, 'group')}"

    @property
    def left_out(self) -> str:
        """Return a phrase on the groups and samples that the correlation leaves out; "" without any."""
        counts = {
            f"with fewer than {FEWEST} samples that both scored": self.too_small,
            "whose scores are all equal": self.without_spread,
        }
        parts = [f"{counted(count, 'group')} {why}" for why, count in counts.items() if count]
        failed = {"old reward": self.failed_old, "new reward": self.failed_new}
        parts += [f"{counted(count, 'sample')} without the {which}" for which, count in failed.items() if count]
        return "; ".join(parts)

    def as_json(self) -> dict[str, Any]:
        """Return everything but the table as plain data."""
        fields = {name: value for name, value in vars(self).items() if name not in ("table", "apart")}
        return fields | {"apart": [vars(one) for one in self.apart]}


def _ranked(table: Any) -> Any:
    """Return samples of groups with ranks within the group, 1 for the highest score, and standardised scores."""
    groups = table.groupby(GROUP)[BOTH]
    ranks = groups.rank(ascending=False).set_axis(["old_rank", "new_rank"], axis=1)
    standardised = (table[BOTH] - groups.transform("mean")) / groups.transform("std", ddof=0)
    sizes = table.groupby(GROUP)["sample_id"].transform("size").rename("size")
    return pd.concat([table, ranks, standardised.set_axis(["old_z", "new_z"], axis=1), sizes], axis=1)


def _correlations(used: Any) -> Any:
    """Return one row for each group with Spearman's correlation, which is Pearson's of the ranks."""
    rows = [
        {"prompt_id": prompt, "correlation": group["old_rank"].corr(group["new_rank"])}
        for (_, prompt), group in used.groupby(GROUP)
    ]
    return pd.DataFrame(rows, columns=["prompt_id", "correlation"])


def _apart(used: Any) -> list[Apart]:
    distance = (used["old_rank"] - used["new_rank"]).abs() / used["size"]
    ordered = used.assign(distance=distance)[distance > 0]
    ordered = ordered.sort_values(["distance", "k", "sample_id"], ascending=[False, True, True]).head(SHOWN)
    return [
        Apart(
            k=int(row["k"]),
            sample=row["sample_id"],
            prompt_id=row["prompt_id"],
            group=int(row["size"]),
            **{name: float(row[name]) for name in (*BOTH, "old_rank", "new_rank")},
        )
        for row in ordered.to_dict("records")
    ]


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
