"""A stage whose scorer's batches change scores on its machine: it takes batches of 1, says so, and adopts no others."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cosmos_rl_core import plugins
from cosmos_rl_core.datasets._base import Prompt
from flows.auditing import contents
from flows.auditing.checks.faults import Findings
from stages.execution.execution import Execution
from stages.execution.outcome import Outcome
from stages.execution.runner import execute
from stages.generating.encoding import with_media
from stages.generating.plans import plan_samples
from stages.scoring.scorer import Scorer, is_of
from tests import uneven
from tests.stages.artifacts.test_damaged_work import Dying, Killed
from tests.stages.test_reward import run, scoring, table_of, write_units

MEANS = [1.0, 2.0, 4.0, 8.0]


@pytest.fixture(autouse=True)
def known() -> Iterator[None]:
    plugins.register("rewards", "uneven", uneven)  # type: ignore[arg-type]
    yield
    plugins.forget()


def request_of(folder: Path, **options: Any) -> Any:
    """A request to score four pictures, two a unit."""
    prompts = tuple(Prompt(id=f"p{number}", text="x") for number in range(4))
    planned = plan_samples(prompts, 1, run_seed=0, iteration=None)
    pictures = [np.full((1, 4, 4, 3), value, np.uint8) for value in MEANS]
    stored = [with_media(s, one, None, {"policy": "c"}) for s, one in zip(planned, pictures, strict=True)]
    source = write_units(str(folder / "rollout"), stored, 2)
    return scoring(str(folder / "scores"), source, options=uneven.Options.model_validate(options))


@pytest.mark.parametrize(("kernel", "scorer"), [("even", "uneven 1"), ("neighbours", "uneven 1, batches of 1")])
def test_scores_equal_scores_of_lone_samples_and_name_batches_of_1(kernel: str, scorer: str, tmp_path: Path):
    request = request_of(tmp_path, kernel=kernel)
    _, notes = run(request, tmp_path)
    table = table_of(request.slot, "scores.parquet")
    assert table["score"] == MEANS
    assert table["scorer"] == [scorer] * 4
    assert [note.partition(":")[0] for note in notes] == ["uneven scores in batches of 1"] * (kernel != "even")


def test_an_audit_recognises_a_scorer_by_its_version_with_any_suffix(tmp_path: Path):
    request = request_of(tmp_path, kernel="place")
    manifest, _ = run(request, tmp_path)
    findings = Findings(str(tmp_path))
    contents.check(manifest, request, lambda source: source, {}, findings)
    assert findings.faults == []
    assert is_of("remote 1, 0123abcd", "remote 1")
    assert not is_of("remote 11", "remote 1")


def test_scores_made_in_whole_batches_on_another_machine_are_not_adopted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    request = request_of(tmp_path)
    with pytest.raises(Killed):
        execute(request, Execution(), Dying(tmp_path / "outcome", ("scoring", 1)))
    even = uneven.Reward.forward
    monkeypatch.setattr(
        uneven.Reward, "forward", lambda self, means: [m + len({*means}) * uneven.ULP for m in even(self, means)]
    )
    execute(request, Execution(), Outcome(tmp_path / "outcome", 0))
    table = table_of(request.slot, "scores.parquet")
    assert table["scorer"] == ["uneven 1, batches of 1"] * 4
    assert table["score"] == [mean + uneven.ULP for mean in MEANS]
    assert table_of(request.slot, "records/calls.parquet")["shard_samples"] == [2, 2]


def test_ranks_agree_if_one_of_them_needs_batches_of_1(tmp_path: Path):
    """The other one of two ranks found that its kernels do not give the same bits in larger batches."""
    scorer = Scorer(request_of(tmp_path))
    assert scorer.make_exact(lambda mine: [mine, True], print)
    assert scorer.name == "uneven 1, batches of 1"
    assert isinstance(scorer.reward, uneven.Reward)
    assert scorer.reward.options.batch_size == 1
