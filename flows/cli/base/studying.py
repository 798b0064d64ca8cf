"""The last part of commands that make studies, which prints the cost of a study or makes it."""

from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

from flows.cli.base.flowing import flowing
from flows.cli.base.printing import print_found, print_json
from flows.running.tags import tags_of


def make_study(
    study: Any, planned: Sequence[Any], store: str, make: Callable[[Any], object], *, dry_run: bool, as_json: bool
) -> None:
    """Print the cost of a planned study or, without ``dry_run``, make it: ``make`` gets the module of its flows."""
    if dry_run:
        cost = import_module("flows.studying.members").planned_study(study, planned, store)
        print_found(cost, cost.lines(), as_json=as_json)
        return
    plan = planned[0].plan
    tags = tags_of(plan.recipe.train.train_policy.type, plan.model.adapter)
    with flowing(tags, f"the same command continues {study.name}", as_json=as_json):
        make(import_module("flows.branches.study"))
    if as_json:
        print_json(import_module("flows.studying.study").numbers_of(study, store))
