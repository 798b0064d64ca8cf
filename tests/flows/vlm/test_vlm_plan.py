"""Plans of runs that fine-tune a VLM. No torch, no stage runs."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from cosmos_rl_core.config.toml import dumps
from cosmos_rl_core.errors import ConfigError, UnavailableError
from flows.explaining import explain
from flows.forking.plan import plan_of_fork
from flows.library.best import best_of
from flows.library.exports import export
from flows.library.states import states
from flows.operations.upgrades import settled
from flows.planning.base import AnyRun
from flows.planning.plan import ForkOf, Settings, freeze, plan_of, read_plan
from flows.planning.run import run_of
from flows.planning.steps import read_run
from flows.post_train import steps
from flows.session import loop
from flows.vlm.explain import as_json, explained
from flows.vlm.plan import VlmPlan
from flows.vlm.run import VlmRun
from stages.artifacts.manifest import Manifest
from stages.artifacts.request import Request
from stages.artifacts.slots import current_manifest
from tests.core.vlms import tiny
from tests.core.vlms.cases import QWEN3
from tests.hand_made import make

AWAY = """
from typing import Literal

from cosmos_rl_core.config.vlm.chat_datasets import ChatDatasetOptions
from cosmos_rl_core.errors import UnavailableError

KIND = "chat_datasets"


class Options(ChatDatasetOptions):
    name: Literal["away"] = "away"
    answers: bool = False


def files(options: Options) -> list[str]:
    if not options.answers:
        raise UnavailableError("nobody answers for files")
    return []


def rows(options: Options):
    raise UnavailableError("nobody answers for rows")
    yield
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("vlm")
    save_file({"one": np.zeros(1, dtype=np.float32)}, folder / "model.safetensors")
    return tiny.save(folder, QWEN3)


@pytest.fixture
def values(tmp_path: Path, model: str) -> dict[str, Any]:
    """A recipe of two iterations, and its conversations."""
    turns = [{"from": "human", "value": "Hello"}, {"from": "gpt", "value": "Hi."}]
    for name, count in (("train", 6), ("held_out", 2)):
        rows = [{"id": number, "conversations": turns} for number in range(count)]
        (tmp_path / f"{name}.json").write_text(json.dumps(rows), encoding="utf-8")

    def dataset(name: str) -> dict[str, Any]:
        return {"mine": {"name": "llava", "annotation_path": str(tmp_path / f"{name}.json")}}

    policy = {"type": "vlm_sft", "steps_per_iteration": 3, "model_max_length": 64, "datasets": dataset("train")}
    return {
        "policy": {"model_name_or_path": model},
        "train": {"num_iterations": 2, "train_batch_per_replica": 4, "train_policy": policy},
        "validation": {"datasets": dataset("held_out")},
    }


def plan(folder: Path, values: dict[str, Any], **settings: Any) -> VlmPlan:
    file = folder / "mine.toml"
    file.write_text(dumps(values), encoding="utf-8")
    planned = plan_of(Settings(str(file), str(folder / "store"), **settings))
    assert isinstance(planned, VlmPlan)
    return planned


def test_a_plan_names_every_stage_in_order(tmp_path: Path, values):
    names = [step.name for step in steps(run_of(plan(tmp_path, values), str(tmp_path / "store")))]
    before = ["policy", "index", "index-held-out", "tokenize", "tokenize-held-out"]
    first, last = (["policy-0000/export", "policy-0000/validate"], ["policy-0002/export", "policy-0002/validate"])
    assert names == [*before, *first, "iteration-0000/finetune", "iteration-0001/finetune", *last, "report"]


def test_equal_data_on_both_sides_are_prepared_once(tmp_path: Path, values):
    values["validation"]["datasets"] = values["train"]["train_policy"]["datasets"]
    values["train"]["train_policy"]["max_left_out"] = 0.0
    names = [step.name for step in steps(run_of(plan(tmp_path, values), str(tmp_path / "store")))]
    assert [name for name in names if "index" in name or "tokenize" in name] == ["index", "tokenize"]


def test_every_mistake_is_found_at_once(tmp_path: Path, values):
    (tmp_path / "broken.json").write_text("{}", encoding="utf-8")
    empty = {"from": "gpt", "value": ""}
    rows = [{"conversations": [{"from": "human", "value": "<image>Who?"}, empty]}]
    (tmp_path / "wrong.json").write_text(json.dumps(rows), encoding="utf-8")
    options = values["train"]["train_policy"]
    options["datasets"] = {
        "away": {"name": "llava", "annotation_path": str(tmp_path / "away.json")},
        "broken": {"name": "llava", "annotation_path": str(tmp_path / "broken.json")},
        "wrong": {"name": "llava", "annotation_path": str(tmp_path / "wrong.json")},
        "folder": options["datasets"]["mine"] | {"media_path": str(tmp_path / "nowhere")},
        "both": {
            "name": "llava",
            "annotation_path": str(tmp_path / "wrong.json"),
            "media_path": str(tmp_path / "nowhere"),
        },
    }
    values["policy"]["model_name_or_path"] = str(tmp_path)
    with pytest.raises(ConfigError) as caught:
        plan(tmp_path, values, run_id="-")
    text = str(caught.value)
    for said in (
        "has no config.json",
        "run id '-' must be",
        "datasets.away: no file at annotation_path",
        "datasets.broken: ",
        "is dict, expected a list",
        "datasets.wrong: 1 of 1 conversations cannot be used, and max_left_out = 0.05: row 0: ",
        "datasets.folder: no folder at media_path",
        "datasets.both: no folder at media_path",
        "datasets.both: 1 of 1 conversations cannot be used",
    ):
        assert said in text


def test_a_service_that_does_not_answer_is_no_mistake_and_hides_none(tmp_path: Path, values):
    (tmp_path / "away.py").write_text(AWAY, encoding="utf-8")
    values["plugins"] = [str(tmp_path / "away.py")]
    values["train"]["train_policy"]["datasets"] = {
        "silent": {"name": "away", "media_path": str(tmp_path)},
        "lost": {"name": "away", "answers": True, "media_path": str(tmp_path)},
    }
    lines = [
        f"  train.train_policy.datasets.{name}: nobody answers for {what}"
        for name, what in (("silent", "files"), ("lost", "rows"))
    ]
    with pytest.raises(UnavailableError) as alone:
        plan(tmp_path, values)
    assert str(alone.value).splitlines() == [f"{tmp_path}/mine.toml:", *lines]
    values["train"]["train_policy"]["datasets"]["silent"]["media_path"] = str(tmp_path / "nowhere")
    values["validation"]["datasets"]["mine"]["annotation_path"] = str(tmp_path / "none.json")
    with pytest.raises(ConfigError) as together:
        plan(tmp_path, values, run_id="-")
    found = str(together.value).splitlines()
    assert found[-2:] == lines
    said = ["run id '-' must be", "datasets.silent: no folder at media_path", "validation.datasets.mine: no file at"]
    assert all(one in line for one, line in zip(said, found[1:-2], strict=True))


def test_an_unknown_architecture_is_refused_by_name(tmp_path: Path, values):
    config = {"architectures": ["LlavaForConditionalGeneration"], "model_type": "llava"}
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    values["policy"]["model_name_or_path"] = str(tmp_path)
    with pytest.raises(ConfigError, match=r"LlavaForConditionalGeneration.*known: .*Qwen3VLForConditionalGeneration"):
        plan(tmp_path, values)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"architectures": ["Qwen2VLRewardModelBT"]}, "Qwen2VLRewardModelBT scores media and writes no answers"),
        ({"text_config": {"attention_dropout": 0.25}}, "text_config.attention_dropout = 0.25: training has no dropout"),
    ],
)
def test_a_model_that_cannot_be_trained_is_refused(tmp_path: Path, values, change: dict[str, Any], said: str):
    folder = Path(shutil.copytree(values["policy"]["model_name_or_path"], tmp_path / "model"))
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    nested = {name: config[name] | value for name, value in change.items() if isinstance(value, dict)}
    (folder / "config.json").write_text(json.dumps(config | change | nested), encoding="utf-8")
    values["policy"]["model_name_or_path"] = str(folder)
    with pytest.raises(ConfigError) as caught:
        plan(tmp_path, values)
    assert said in str(caught.value)


def test_rows_that_are_left_out_are_counted_in_the_description(tmp_path: Path, values):
    file = tmp_path / "train.json"
    rows = [*json.loads(file.read_text(encoding="utf-8")), {"conversations": [{"from": "human", "value": "?"}]}]
    file.write_text(json.dumps(rows), encoding="utf-8")
    values["train"]["train_policy"]["max_left_out"] = 0.5
    text = explained(plan(tmp_path, values), str(tmp_path / "store"))
    assert "mine: 6 conversations, as far as their texts say; 1 rows cannot be used, `index` lists them" in text


MEASURED: dict[int, dict[str, float | None]] = {
    0: {"loss": 3.0, "correct_mine": 0.25, "correct_other": 0.5},
    1: {"loss": 1.0, "correct_mine": 0.5, "correct_other": 0.75},
    2: {"loss": 2.0, "correct_mine": 0.75, "correct_other": 0.75},
}
"""What the evaluation of each policy version says of itself."""


def judged_by(tmp_path: Path, values: dict[str, Any], **validation: Any) -> AnyRun:
    """A run of two iterations, whose three versions are measured as above."""
    held_out = values["validation"]["datasets"]["mine"]
    values["validation"] = {"datasets": {"mine": held_out, "other": held_out}, "freq": 1, **validation}
    run = run_of(freeze(plan(tmp_path, values, run_id="judged"), str(tmp_path / "store")), str(tmp_path / "store"))

    def launch(_: str, *wanted: Request) -> list[Manifest]:
        return [current_manifest(request) or one(request) for request in wanted]

    def one(request: Request) -> Manifest:
        found: Any = MEASURED[request.iteration or 0] if request.stage == "vlm_evaluate" else {}
        return make(request, {"current/w": request.slot.encode()}, **found)

    loop.make(run, launch)
    return run


@pytest.mark.parametrize(
    ("best_by", "expected"),
    [
        (None, (1, "held-out loss", 1.0)),
        ("loss", (1, "held-out loss", 1.0)),
        ("mine", (2, "held-out correct answers: mine", 0.75)),
        # Of equal ones the earliest.
        ("other", (1, "held-out correct answers: other", 0.75)),
    ],
)
def test_policies_are_ranked_by_the_loss_or_by_the_correct_answers_to_a_dataset(
    tmp_path: Path, values, best_by: str | None, expected: Any
):
    chosen = {} if best_by is None else {"best_by": best_by}
    run = judged_by(tmp_path, values, max_new_tokens=4, **chosen)
    found = best_of(run, states(run))
    assert found is not None
    assert (found.k, found.by, found.figure) == expected
    said = next(export(run.store_url, "judged", str(tmp_path / "out"), "best").lines())
    assert said == "best of 0, 1, 2: policy {}, {} {:.4g}".format(*expected)


@pytest.mark.parametrize(
    ("best_by", "most_tokens", "known"),
    [("yours", 4, "loss, mine, other"), ("reward", 4, "loss, mine, other"), ("mine", 0, "loss")],
)
def test_a_number_that_no_evaluation_measures_cannot_rank(
    tmp_path: Path, values, best_by: str, most_tokens: int, known: str
):
    said = f"validation.best_by = '{best_by}' is not measured by this recipe; known: {known}"
    with pytest.raises(ConfigError, match=said) as caught:
        judged_by(tmp_path, values, best_by=best_by, max_new_tokens=most_tokens)
    assert ("set max_new_tokens" in str(caught.value)) == (most_tokens == 0)


def test_a_dataset_called_loss_is_not_taken_for_the_loss(tmp_path: Path, values):
    values["validation"] = {"datasets": {"loss": values["validation"]["datasets"]["mine"]}, "best_by": "loss"}
    with pytest.raises(ConfigError, match=r"validation\.best_by = 'loss' names the loss and a dataset; give"):
        plan(tmp_path, values)


def test_the_number_that_ranks_policies_is_no_part_of_a_runs_identity(tmp_path: Path, values):
    made = list[VlmPlan]()
    for chosen in ({}, {"best_by": "loss"}, {"best_by": "mine"}):
        values["validation"] |= {"max_new_tokens": 4, **chosen}
        made.append(plan(tmp_path, values))
    assert len({one.run_id for one in made}) == 1
    assert not any("best_by" in json.dumps(one.identity()) for one in made)


def test_a_finished_run_goes_on_with_another_number_that_ranks_its_policies(tmp_path: Path, values):
    run = judged_by(tmp_path, values, max_new_tokens=4)
    values["validation"]["best_by"] = "mine"
    again = run_of(freeze(plan(tmp_path, values, run_id="judged"), run.store_url), run.store_url)
    assert best_of(settled(again, remake=False), states(again)) == best_of(again, states(again))
    opened = read_run(run.store_url, "judged")
    found = best_of(opened, states(opened))
    assert found is not None
    assert (found.k, found.by, found.figure) == (2, "held-out correct answers: mine", 0.75)


def test_a_run_goes_on_with_more_iterations_and_not_with_another_seed(tmp_path: Path, values):
    store = str(tmp_path / "store")
    first = freeze(plan(tmp_path, values), store)
    longer = plan(tmp_path, values, iterations=5)
    assert longer.run_id == first.run_id
    assert freeze(longer, store).recipe.train.num_iterations == 5
    kept = read_plan(store, first.run_id)
    assert isinstance(kept, VlmPlan)
    assert kept.recipe == first.recipe
    assert [step.name for step in steps(read_run(store, first.run_id))] == [
        step.name for step in steps(run_of(first, store))
    ]
    other = plan(tmp_path, values, overrides=["train.seed=1"])
    assert other.run_id != first.run_id
    with pytest.raises(ConfigError, match="planned otherwise"):
        freeze(other.model_copy(update={"run_id": first.run_id}), store)


def test_another_answer_in_the_file_is_another_run(tmp_path: Path, values):
    before = plan(tmp_path, values).run_id
    file = tmp_path / "train.json"
    file.write_text(file.read_text().replace("Hi.", "Ho."), encoding="utf-8")
    assert plan(tmp_path, values).run_id != before


def test_a_description_counts_conversations_and_passes(tmp_path: Path, values):
    planned, store = plan(tmp_path, values), str(tmp_path / "store")
    assert "mine: 6 conversations" in explained(planned, store)
    found = as_json(planned, store)
    # 2 iterations of 3 steps of 4 conversations.
    assert found["passes"] == 24 / 6
    assert found["conversations"] == {"train": {"mine": 6}, "held_out": {"mine": 2}}
    assert found["stages"]["finetune"] == 2


def test_a_plan_counts_parameters_and_the_memory_of_a_rank(tmp_path: Path, values):
    store = str(tmp_path / "store")
    values["policy"]["trains"] = ["vision", "projector", "language"]
    found = as_json(plan(tmp_path, values), store)
    assert found["parameters"] == {"total": 27_360, "trained": 27_360}
    stages = {stage["stage"]: stage for stage in found["memory"]}
    assert [*stages] == ["policy", "finetune", "validate", "export"]
    rows = {name: held["device"] for name, held in stages["finetune"]["rows"].items()}
    weights = 4 * 27_360
    # Float32 throughout: weights, gradients, two averages, the buffer of the step. 64 tokens of 4 x 96 values, and
    # logits of 263 words with their gradients.
    assert rows["model"] == rows["gradients"] == rows["optimizer"] / 2 == rows["optimizer's buffers"] == weights
    assert rows["micro-batch"] == 4 * 64 * 4 * 96
    assert rows["logits"] == 2 * 4 * 64 * 263
    # Of the files one tensor at a time, at most the table of words of width 16; the bytes of a file of both averages.
    table = 4 * 263 * 16
    device = 5 * weights + rows["micro-batch"] + rows["logits"]
    assert stages["finetune"]["peak"] == {"device": device, "cpu": 2 * weights}
    assert (stages["finetune"]["moment"], stages["finetune"]["moments"]["reading"]["cpu"]) == ("step", table)
    assert stages["policy"]["peak"] == {"device": weights, "cpu": 2 * weights}
    lines = list(explain.explained(plan(tmp_path, values), store))
    assert "27,360 parameters; the model has 27,360" in str(lines[0])
    assert len(lines) == 4


def test_adapters_are_counted_on_the_linear_modules_of_the_parts(tmp_path: Path, values):
    values["policy"] |= {"trains": ["language"], "lora": {"r": 2}}
    found = as_json(plan(tmp_path, values), str(tmp_path / "store"))
    # Two layers of width 16: queries, keys, values, output, gate, up and down, whose sides add up to 208.
    assert found["parameters"]["trained"] == 2 * 2 * (32 + 24 + 24 + 32 + 32 + 32 + 32)
    values["policy"]["lora"]["target_modules"] = ["qq_proj"]
    with pytest.raises(ConfigError, match=r"no linear module of language ends in qq_proj; known: .*q_proj"):
        plan(tmp_path, values)


def test_a_run_is_the_same_from_another_directory(tmp_path: Path, values, monkeypatch):
    """Folders of media may be named from the directory that the run was planned in."""
    (tmp_path / "here").mkdir()
    values["train"]["train_policy"]["datasets"]["mine"]["media_path"] = "here"
    monkeypatch.chdir(tmp_path)
    run = run_of(plan(tmp_path, values), str(tmp_path / "store"))
    assert isinstance(run, VlmRun)
    before = run.index().slot
    monkeypatch.chdir("/")
    assert run.index().slot == before


def test_equal_texts_with_media_of_other_folders_are_indexed_apart(tmp_path: Path, values):
    slots: list[str] = []
    for folder in ("one", "other", "one"):
        (tmp_path / folder).mkdir(exist_ok=True)
        values["train"]["train_policy"]["datasets"]["mine"]["media_path"] = str(tmp_path / folder)
        run = run_of(plan(tmp_path, values), str(tmp_path / "store"))
        assert isinstance(run, VlmRun)
        slots.append(run.index().slot)
    assert slots[0] == slots[2] != slots[1]


def test_a_fork_with_rewards_is_refused_with_the_reason(tmp_path: Path, values):
    settings = Settings("", str(tmp_path / "store"))
    freeze(plan(tmp_path, values, run_id="v"), settings.store)
    with pytest.raises(ConfigError, match=r"no file at nowhere\.toml"):
        plan_of_fork(ForkOf("v", 0, "nowhere.toml"), settings)
