"""A kind of run that the tree does not have: its registration is all that plan, loop and description need."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from cosmos_rl_core.canonical import digest
from cosmos_rl_core.config.base import as_written
from cosmos_rl_core.config.recipe import Recipe
from cosmos_rl_core.errors import ConfigError
from cosmos_rl_core.recipes.reading import checked
from flows.explaining import explain
from flows.ledger.shape import shape_of
from flows.library import open_run
from flows.planning import facts, kinds, plan, requests
from flows.planning.base import BasePlan, BaseRun
from flows.planning.plan import Settings, freeze, plan_of, read_plan
from flows.planning.run import run_of
from flows.planning.steps import Step, Wave
from flows.post_train import steps
from flows.rescoring.plan import plan_of_rescore
from flows.session import loop
from stages import contracts
from stages.artifacts.manifest import Manifest
from stages.artifacts.request import Request
from tests.flows.imagined import Imagined

BARE = "bare"
"""Group of the recipes of this kind."""


class BarePlan(BasePlan[Recipe]):
    """A plan of a run that exports its base and trains nothing."""


class BareRun(BaseRun[BarePlan]):
    """A run of such a plan: it has what runs of every kind have."""


def make_plan(recipe: Any, run_id: str | None, source: str, known: tuple[str, ...], **options: Any) -> BarePlan:
    made = plan.make_plan(recipe, run_id, source, known, **options)
    return BarePlan.model_validate(made.model_dump())


def policy(run: BareRun) -> Request:
    config = contracts.Policy(model=run.plan.model, from_scratch=False, lora=None)
    return run.plan.request(run.slots.policy(0), config)


def export(run: BareRun) -> Request:
    inputs = {"policy": (requests.exported_policy(run, 0),)}
    return run.plan.request(
        run.slots.version(0, "export"), contracts.Export(model=run.plan.model, lora=None), 0, inputs
    )


def waves(run: BareRun, exported: Any = None, judged: Any = None) -> Iterator[Wave]:
    yield Wave(Step("policy", "policy", run.slots.policy(0), partial(policy, run)))
    slot = run.slots.version(0, "export")
    yield Wave(Step("policy-0000/export", "export", slot, partial(export, run), 0))


KIND = kinds.Kind(
    claims=lambda values: values.get("logging", {}).get("group_name") == BARE,
    check=checked,
    plan=BarePlan,
    make_plan=make_plan,
    written=lambda plan: as_written(plan.recipe),
    run=BareRun,
    summary="Export a base.",
    waves=waves,
    stages=lambda recipe: ["policy", "export"],
    shape=lambda plan, launch: {"kind": BARE},
    about=lambda plan: (("trains", "nothing"),),
    data=lambda plan: {},
    explained=lambda plan, store_url, named_by: ("exports its base", [], ""),
    as_json=lambda plan, store_url: {"run": plan.run_id},
    reads=lambda run: iter(()),
)


@pytest.fixture
def settings(recipe: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Settings:
    known = (*kinds.known(), KIND)
    monkeypatch.setattr(kinds, "known", lambda: known)
    return Settings(recipe(), str(tmp_path / "store"), "mine", overrides=(f"logging.group_name={BARE}",))


def test_a_registered_kind_is_planned_made_and_explained(settings: Settings, tmp_path: Path):
    frozen = freeze(plan_of(settings), settings.store)
    assert isinstance(read_plan(settings.store, "mine"), BarePlan)
    run = run_of(frozen, settings.store)
    assert [step.name for step in steps(run)] == ["policy", "policy-0000/export"]
    made: list[str] = []
    imagined = Imagined(run, tmp_path)

    def launch(name: str, *asked: Request) -> list[Manifest]:
        made.append(name)
        return imagined.launch(name, *asked)

    loop.make(run, launch)
    assert made == ["policy", "policy-0000/export"]
    assert requests.rewards_ahead(run, steps(run)[0].request()) == []
    assert open_run("mine", settings.store).now().current == 2
    assert facts.about(frozen) == (("trains", "nothing"),)
    assert [*explain.explained(frozen, settings.store)] == ["exports its base"]
    assert explain.as_json(frozen, settings.store) == {"run": "mine"}
    assert shape_of(frozen) == digest({"kind": BARE})[:32]
    with pytest.raises(ConfigError, match="mine generates no pictures or videos"):
        plan_of_rescore(settings.store, "mine", "jpeg")
