"""Settings of the stages that show a run to people."""

from typing import ClassVar

from pydantic import Field

from cosmos_rl_core.config.shared import StageConfig
from cosmos_rl_core.config.train import Gate

WEIGHTED = "weighted reward"
"""Name of the weighted sum of rewards among the scores of a fragment."""


class Fragment(StageConfig):
    """Numbers and pictures of one iteration or of one judged policy version, for the report.

    It is made before ``rollout.keep`` deletes pictures, so that a report needs no samples.
    """

    name = "fragment"
    version = 3
    torch = False
    inputs = dict.fromkeys(
        ("samples", "scores", "warnings", "validations", "first", "first_scores", "first_validations"), "many"
    )
    FRAGMENT: ClassVar[str] = "fragment.json"
    """Numbers and small pictures, at most 1 MB."""
    FULL: ClassVar[str] = "full"
    """The part with the same pictures in full size; videos in a format that browsers play."""
    held_out: bool
    """Whether the samples are held-out samples of a judged policy version. Then the inputs ``first`` have the samples
    of version 0, with which they are compared."""
    rewards: tuple[str, ...] = ()
    """The reward of each of the inputs ``scores`` and ``first_scores``, in their order."""
    headline: str = ""
    """The reward that pictures are chosen by; "" without rewards."""
    gates: dict[str, Gate] = Field(default={}, json_schema_extra={"neutral": {}})
    """Bounds on scores. They decide which samples count in training and in the weighted sum of rewards."""
    weights: dict[str, float] = Field(default={}, json_schema_extra={"neutral": {}})
    """Weights of the rewards in the sum that is shown, over samples that pass every gate; empty for no sum."""


class Report(StageConfig):
    """One HTML file about a whole run, from its fragments and the numbers of its optimizer steps."""

    name = "report"
    version = 7
    torch = False
    inputs = dict.fromkeys(("fragments", "judged", "updates"), "many")
    PAGE: ClassVar[str] = "index.html"
    title: str
    reward: str
    """The first reward that trains, else the first reward; "" without rewards."""
    ranked_by: str = Field(default="", json_schema_extra={"neutral": ""})
    """The number that ranks policies, which the page begins with: a reward, ``loss``, ``weighted reward`` or
    ``correct answers: NAME``; "" if nothing ranks them."""
    init: str = Field(default="", json_schema_extra={"neutral": ""})
    """The weights that policy version 0 begins with, in words; "" for the base, and for fresh weights."""
    about: tuple[tuple[str, str], ...] = ()
    """Facts of the run (such as model and data): names and values, in order."""
    settings: tuple[tuple[str, str], ...] = ()
    """The settings of the recipe that differ from their defaults: names and values."""
    roles: dict[str, str] = {}
    """Role in training of each reward, by its label."""
    staleness: int = Field(default=0, json_schema_extra={"neutral": 0})
    """Number of updates by which a rollout's policy is behind."""


CONTRACTS: tuple[type[StageConfig], ...] = (Fragment, Report)
