"""Captions of a dataset by a model that is loaded: on ranks, killed, with more media, and media that cannot be used."""

import secrets
from pathlib import Path
from typing import Any

import pytest

from cosmos_rl_core.captioners import vlm
from cosmos_rl_core.captioners._base import digest_of
from cosmos_rl_core.errors import ConfigError, DatasetError
from cosmos_rl_core.recipes.dataset import DatasetConfig
from flows.operations.preprocess import outcome_of, preprocess, unchanged
from stages import contracts
from stages.artifacts import snapshots
from stages.artifacts.artifact import Artifact
from stages.artifacts.manifest import Manifest
from stages.artifacts.request import Input, Request
from stages.artifacts.slots import input_of
from stages.execution.execution import Execution
from stages.execution.outcome import Outcome
from stages.execution.runner import execute
from stages.formats.parts import Parts
from stages.formats.tables import read_table
from tests.core.vlms import tiny
from tests.core.vlms.cases import QWEN3, QWEN25
from tests.stages.artifacts.test_damaged_work import Dying, Killed
from tests.stages.conftest import make
from tests.stages.test_index import Dataset, image, video

NUMBERS = range(1, 6)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny.save_talker(tmp_path_factory.mktemp("model"), QWEN3)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Five images and a video without captions, and an image with one."""
    folder = tmp_path / "source"
    for number in (0, *NUMBERS):
        image(folder / f"{number:04d}.png", number)
    video(folder / "0009.mp4", 0, 5)
    (folder / "0000.json").write_text('{"prompt": "by hand"}', encoding="utf-8")
    return folder


def options_of(model: str, **settings: Any) -> vlm.Options:
    values = {"by": "vlm", "model": model, "instruction": "?", "max_new_tokens": 12, "param_dtype": "float32"}
    return vlm.Options.model_validate(values | settings).pinned()


def request_of(dataset: Dataset, tmp_path: Path, name: str, captioner: vlm.Options, **settings: Any) -> Request:
    """Captions of the first part, under a name."""
    config = contracts.Describe(
        captioner=captioner, part=0, sources=dataset.sources, **{"media_per_shard": 2, "max_left_out": 1.0} | settings
    )
    inputs: dict[str, tuple[Input, ...]] = {"parts": tuple(dataset.parts)}
    return Request(stage="describe", slot=str(tmp_path / "store" / name), seed=0, config=config, inputs=inputs)


def answers_of(request: Request) -> list[str]:
    """What became of each medium, in order."""
    table = read_table(Artifact(input_of(request.slot)), contracts.Describe.ASKED)
    return [str(row["caption"] or row["reason"]) for row in table.to_dict("records")]


@pytest.mark.parametrize("architecture", [pytest.param(QWEN25, marks=pytest.mark.slow), QWEN3])
def test_describe_writes_the_models_captions_of_media_without_one(architecture: str, folder: Path, tmp_path: Path):
    captioner = options_of(tiny.save_talker(tmp_path / "model", architecture))
    dataset = Dataset(folder, tmp_path, captioned=False)
    dataset.make()
    asked = request_of(dataset, tmp_path, "alone", captioner)
    manifest = make(asked, tmp_path)
    counts: dict[str, Any] = manifest.summary
    assert counts["captioned"] + counts["left_out"] == counts["asked"] == 6
    assert len({*answers_of(asked)}) > 1
    assert manifest.numerics["compute_dtype"] == "float32"
    found = Parts([Artifact(dataset.parts[0])], [Artifact(input_of(asked.slot))])
    items = found.items.set_index("name")
    assert items.loc["0000", "caption"] == "by hand"
    assert set(items["captioner"].dropna()) == {digest_of(captioner, ())}
    assert set(found.written["instruction"]) == {"?"}


def test_a_killed_captioning_goes_on_with_its_finished_shards(folder: Path, tmp_path: Path, model: str):
    dataset = Dataset(folder, tmp_path, captioned=False)
    dataset.make()
    captioner = options_of(model)
    whole, killed = (request_of(dataset, tmp_path, name, captioner) for name in ("whole", "killed"))
    make(whole, tmp_path)
    with pytest.raises(Killed):
        execute(killed, Execution(), Dying(tmp_path / "outcome", ("captioning", 5)))
    outcome = Outcome(tmp_path / "outcome", 0)
    manifest = execute(killed, Execution(), outcome)
    assert manifest.content == input_of(whole.slot).content
    # Two shards of two were whole; the one medium of the third that had its caption is asked for again.
    attempts = {Path(entry.path).parts[1] for name, entry in manifest.files.items() if "answers" in name}
    assert len(attempts) == 2


def test_media_that_cannot_be_used_are_left_out_with_the_reason(folder: Path, tmp_path: Path, model: str):
    dataset = Dataset(folder, tmp_path, captioned=False)
    dataset.make()
    captioner = options_of(model, num_frames=4, max_new_tokens=2)
    with pytest.raises(DatasetError, match="the caption is cut at max_new_tokens = 2; raise it"):
        make(request_of(dataset, tmp_path, "few", captioner, max_left_out=0.0), tmp_path)
    request = request_of(dataset, tmp_path, "many", captioner)
    counts: dict[str, Any] = make(request, tmp_path).summary
    refused = read_table(Artifact(input_of(request.slot)), contracts.Describe.REFUSED)
    assert counts["left_out"] == len(refused) > 0
    assert counts["captioned"] == 6 - len(refused) > 0
    assert set(refused["reason"]) == {"the caption is cut at max_new_tokens = 2; raise it"}


def config_of(folder: Path, model: str, **caption: Any) -> DatasetConfig:
    values: dict[str, Any] = {"name": "clips", "max_left_out": 0.9}
    values["sources"] = {"mine": {"name": "local", "local_dir": str(folder)}}
    asked = {"by": "vlm", "model": model, "instruction": "?", "max_new_tokens": 12, "param_dtype": "float32"}
    return DatasetConfig.model_validate(values | {"caption": asked | caption})


def prepare(config: DatasetConfig, tmp_path: Path, made: list[Manifest]) -> str:
    def launch(name: str, request: Request) -> list[Manifest]:
        made.append(make(request, tmp_path / secrets.token_hex(4)))
        return made[-1:]

    return outcome_of(*preprocess(config, str(tmp_path / "store"), launch))


def test_a_dataset_is_captioned_and_three_new_media_are_three_calls(folder: Path, tmp_path: Path, model: str):
    made = list[Manifest]()
    config = config_of(folder, model)
    assert prepare(config, tmp_path, made) == "clips: snapshot 1: 7 new, 0 removed, 0 left out, 6 captioned"
    assert [one.stage for one in made] == ["index", "describe"]
    assert unchanged(config, str(tmp_path / "store")) is not None
    for number in (6, 7, 8):
        image(folder / f"{number:04d}.png", number)
    assert prepare(config, tmp_path, made) == "clips: snapshot 2: 3 new, 0 removed, 0 left out, 3 captioned"
    assert made[-1].summary["asked"] == 3
    head = snapshots.newest(str(tmp_path / "store"), "clips")
    assert head is not None
    parts = Parts([Artifact(part) for part in head.parts], [Artifact(part) for part in head.captions])
    assert parts.items["caption"].notna().sum() == 10
    # Another instruction captions both parts again, and reads no file of the index.
    prepare(config_of(folder, model, instruction="What is it?"), tmp_path, made)
    assert [one.stage for one in made[4:]] == ["describe", "describe"]
    assert [one.summary["asked"] for one in made[4:]] == [6, 3]


def test_a_model_that_cannot_be_used_is_refused_before_any_stage(folder: Path, tmp_path: Path):
    made = list[Manifest]()
    with pytest.raises(ConfigError, match="'/no/model' is not a directory here"):
        prepare(config_of(folder, "/no/model"), tmp_path, made)
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(ConfigError, match=r"has no config\.json; expected the folder of a VLM of transformers"):
        prepare(config_of(folder, str(empty)), tmp_path, made)
    assert made == []
    assert not (tmp_path / "store").exists()
