"""Prepared datasets whose captions refer to pictures: training conditions on the folder's own references."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from PIL import Image

from cosmos_rl_core import seeds
from cosmos_rl_core.conformance.kinds import hf_folder
from cosmos_rl_core.errors import ConfigError
from cosmos_rl_core.models._conditioning import Conditioning
from cosmos_rl_core.storage.media import encode
from cosmos_rl_core.training.noise_levels import FINE_GRID, DrawKey, sft_time, training_noise
from flows.operations.show_data import show
from flows.planning import requests
from flows.planning.run import Run
from stages.artifacts.artifact import Artifact
from stages.artifacts.slots import input_of
from stages.artifacts.snapshots import Snapshot
from stages.formats.embeddings import Embeddings
from stages.formats.latents import Latents
from stages.formats.policies import read_part
from stages.formats.tables import read_table
from tests.flows.prepared import prepare
from tests.hand_made import rewards
from tests.stages.conftest import make, make_on_ranks, make_run
from tests.stages.training.test_reference_clips import clip_of, continued
from tests.stages.training.test_reference_media import (
    SEED,
    SOURCES,
    ByHand,
    next_to_rewards,
    on_first_frames,
    prepared,
    supervised,
)
from tests.stages.training.test_sharded_training import aside, require_close
from tests.stages.training.test_transitions import tensors_of


def snapshot_of(name: str, dataset: dict[str, Any], url: Path) -> Snapshot:
    """The newest snapshot of a folder that a recipe names itself."""
    settings = {name: value for name, value in dataset.items() if name in ("size", "first_frame")}
    source = {"name": "local", "local_dir": dataset["local_dir"]} | settings
    return prepare(Path(dataset["local_dir"]), str(url), name=name, sources={"mine": source})


def on_snapshots(values: dict[str, Any], url: Path) -> dict[str, Any]:
    """The recipe on prepared datasets of the same folders."""
    values = json.loads(json.dumps(values))
    policy = values["train"]["train_policy"]
    held_out = values.get("validation", {})
    for holder, key, name in ((policy, "dataset", "clips"), (policy, "data", "data"), (held_out, "data", "held")):
        if holder.get(key, {}).get("name") == "local":
            snapshot_of(name, holder[key], url)
            holder[key] = {"name": "snapshot", "dataset": name}
    return values


def both(tmp_path: Path, values: dict[str, Any]) -> tuple[Run, Run]:
    """The run on folders, and the run on prepared datasets, in two stores."""
    stores = [tmp_path / "folders", tmp_path / "parts"]
    for store in stores:
        store.mkdir()
    return prepared(stores[0], values), prepared(stores[1], on_snapshots(values, stores[1]))


def names_of(latents: Latents) -> dict[str, str]:
    """The name in the folder of each item of parts."""
    assert latents.parts is not None
    return dict(zip(latents.parts.items["item"], latents.parts.items["name"], strict=True))


def require_equal(found: Conditioning, expected: Conditioning) -> None:
    """Every bit of two conditionings is equal."""
    assert {*found} == {*expected}
    assert all(torch.equal(found[one], expected[one]) for one in expected)
    assert found.shapes == expected.shapes


@pytest.mark.parametrize("name", ["flux2_klein", "qwen_image_edit"])
def test_a_prepared_dataset_conditions_on_the_bits_of_its_folder_and_trains_on_them(name: str, tmp_path: Path):
    (inputs := tmp_path / "inputs").mkdir()
    folders, parts = both(tmp_path, supervised(name, inputs))
    steps = ["embed-part-0000", "encode-part-0000", "embed-held-out-part-0000", "encode-held-out-part-0000"]
    assert [*parts.prepared.steps()] == steps
    make(request := requests.finetune(parts, 0), tmp_path)
    latents, embeddings = Latents.of(request), Embeddings(request.inputs["embeddings"], ())
    plain = requests.finetune(folders, 0)
    expected, conditions = Latents.of(plain), Embeddings(plain.inputs["embeddings"], ())
    by_hand = ByHand(folders, folders.recipe.train.train_policy.dataset)
    names, shape, density = names_of(latents), folders.plan.media, folders.recipe.policy.diffusers.density
    sigmas = by_hand.model.schedule(FINE_GRID, shape.size, shape.frames).sigmas
    losses: list[float] = []
    assert sorted(names.values()) == sorted(by_hand.media.item_ids)
    for item, stem in names.items():
        index = by_hand.media.item_ids.index(stem)
        assert torch.equal(latents[item], expected[stem])
        prompt = by_hand.media.prompt_of(index).id
        assert latents.index.set_index("item_id")["prompt_id"][item] == prompt
        require_equal(embeddings[prompt], conditions[prompt])
        require_equal(embeddings.without_text(prompt), conditions.without_text(prompt))
        for epoch in (0, 1):
            x_0, key = latents[item], DrawKey(SEED, 0, epoch, item)
            noise, t = training_noise(tuple(x_0.shape), key, 0), sft_time(sigmas, density, key)
            text = seeds.generator("text dropout", *key).random() >= 0.5
            losses.append(by_hand.error(x_0, noise, t, by_hand.conditioning(index, text=text)))
    metrics = read_table(Artifact(input_of(parts.slots.policy(1))), "metrics.parquet").iloc[0]
    assert metrics["loss"] == pytest.approx(np.mean(losses), rel=1e-4)
    before, after = (read_part(input_of(slot), "current") for slot in (parts.slots.policy(0), parts.slots.policy(1)))
    assert max(float((after[name] - before[name]).abs().max()) for name in before) > 1e-4


def test_held_out_losses_of_a_prepared_dataset_condition_each_item_on_its_reference(tmp_path: Path):
    (inputs := tmp_path / "inputs").mkdir()
    folders, parts = both(tmp_path, supervised("flux2_klein", inputs))
    make(request := requests.validate(parts, 0), tmp_path)
    assert folders.recipe.validation is not None
    by_hand, names = ByHand(folders, folders.recipe.validation.data), names_of(Latents.of(request))
    found = read_table(Artifact(input_of(request.slot)), "losses.parquet")
    assert len(found) == 2 * len({*found["t"]})
    for item, group in found.groupby("item_id"):
        index = by_hand.media.item_ids.index(names[str(item)])
        x_0, own = by_hand.latents(index), by_hand.conditioning(index)
        for level, row in enumerate(group.sort_values("t").to_dict("records")):
            noise = torch.from_numpy(seeds.normal(tuple(x_0.shape), "validation noise", request.seed, str(item), level))
            assert row["loss"] == pytest.approx(by_hand.error(x_0, noise, row["t"], own), rel=1e-4)


def test_two_ranks_take_the_step_of_one_on_a_prepared_dataset(tmp_path: Path):
    (inputs := tmp_path / "inputs").mkdir()
    run = prepared(tmp_path, on_snapshots(supervised("flux2_klein", inputs), tmp_path))
    make(finetune := requests.finetune(run, 0), tmp_path)
    make_on_ranks(two := aside(finetune, "two"), tmp_path, 2)
    require_close(finetune, two, {"current": 1e-5})


def test_the_data_term_on_prepared_media_equals_the_one_on_their_folder(tmp_path: Path):
    (inputs := tmp_path / "inputs").mkdir()
    runs = both(tmp_path, next_to_rewards(inputs, [(64, 96)] * 4))
    losses: list[float] = []
    for run in runs:
        make(requests.rollout(run, 0), tmp_path)
        for request in rewards(run, run.slots.iteration(0, "rollout"), 0):
            make(request, tmp_path)
        make(requests.update(run, 0), tmp_path)
        losses.append(read_table(Artifact(input_of(run.slots.policy(1))), "metrics.parquet").iloc[0]["data_loss"])
    samples = [tensors_of(run) for run in runs]
    assert samples[0].keys() == samples[1].keys()
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    policies = [read_part(input_of(run.slots.policy(1)), "current") for run in runs]
    for name, tensor in policies[0].items():
        torch.testing.assert_close(policies[1][name], tensor, rtol=1e-5, atol=1e-7)


def test_first_frames_of_a_prepared_dataset_equal_its_folders(tmp_path: Path):
    (inputs := tmp_path / "inputs").mkdir()
    values = on_first_frames("wan_i2v", inputs)
    folders, parts = both(tmp_path, values)
    make(request := requests.finetune(parts, 0), tmp_path)
    embeddings, plain = Embeddings(request.inputs["embeddings"], ()), requests.finetune(folders, 0)
    conditions = Embeddings(plain.inputs["embeddings"], ())
    ids = [prompt.id for prompt in folders.plan.prompts]
    assert sorted(Latents.of(request).prompt_ids) == sorted(ids)
    assert len(ids) == len(SOURCES)
    for prompt in ids:
        require_equal(embeddings[prompt], conditions[prompt])
    dataset = {"name": "snapshot", "dataset": "clips"}
    for change, said in (
        ({"windows_per_item": 2}, "leave out windows_per_item and crop"),
        ({"crop": "buckets"}, "leave out windows_per_item and crop"),
    ):
        values["train"]["train_policy"]["dataset"] = dataset | change
        with pytest.raises(ConfigError, match=said):
            make_run(tmp_path / "parts", values, "other")
    values["policy"]["diffusers"]["inference_size"] = [32, 64]
    values["train"]["train_policy"]["dataset"] = dataset
    with pytest.raises(ConfigError, match=r"size = \[32, 32\], inference_size is \[32, 64\]"):
        make_run(tmp_path / "parts", values, "other")


def test_models_that_take_no_references_refuse_prepared_media_with_some(tmp_path: Path):
    (inputs := tmp_path / "inputs").mkdir()
    values = on_snapshots(supervised("flux2_klein", inputs), tmp_path)
    values["policy"] = {
        "model_name_or_path": "package:tiny-sd3",
        "lora": {"r": 2},
        "diffusers": {"inference_size": [32, 64], "max_prompt_length": 12},
    }
    with pytest.raises(ConfigError, match="takes no references; 4 prompts have some") as raised:
        make_run(tmp_path, values)
    assert "takes no references; 2 prompts have some" in str(raised.value)


def test_references_that_were_not_kept_are_named(tmp_path: Path):
    """As a column of paths has them."""
    rows = {
        "image": hf_folder.media([encode(np.zeros((1, 32, 64, 3), np.uint8))[1]]),
        "references": pa.array([["before/0.png"]]),
        "text": pa.array(["a hat"]),
    }
    hf_folder.save(tmp_path / "rows", rows, {"image": {"_type": "Image"}})
    prepare(tmp_path, str(tmp_path), sources={"mine": {"name": "hf", "local_dir": str(tmp_path / "rows")}})
    (inputs := tmp_path / "inputs").mkdir()
    values = supervised("flux2_klein", inputs)
    values["train"]["train_policy"]["dataset"] = {"name": "snapshot", "dataset": "clips"}
    with pytest.raises(
        ConfigError, match=r"1 items of snapshot 1 of 'clips' have a column or key `references` without pictures"
    ):
        make_run(tmp_path, values)


def test_unequal_numbers_and_sizes_of_prepared_references_are_refused_by_name(tmp_path: Path):
    (inputs := tmp_path / "inputs").mkdir()
    values = supervised("flux2_klein", inputs)
    (inputs / "media" / "metas" / "0.json").write_text('{"prompt": "no picture"}', encoding="utf-8")
    with pytest.raises(ConfigError, match="prompts have 0 and 1 references; expected equally many"):
        make_run(tmp_path, on_snapshots(values, tmp_path))
    Image.new("RGB", (16, 16)).save(inputs / "media" / "sources" / "0.png")
    (inputs / "media" / "metas" / "0.json").write_text('{"prompt": "x", "references": ["sources/0.png"]}')
    with pytest.raises(ConfigError, match=r"mine/0: "):
        make_run(tmp_path, on_snapshots(values, tmp_path))


def test_prepared_media_continue_the_clips_of_their_folder(tmp_path: Path):
    (inputs := tmp_path / "inputs").mkdir()
    values = continued(inputs)
    folders, parts = both(tmp_path, values)
    make(request := requests.finetune(parts, 0), tmp_path)
    embeddings = Embeddings(request.inputs["embeddings"], ())
    conditions = Embeddings(requests.finetune(folders, 0).inputs["embeddings"], ())
    ids = [prompt.id for prompt in folders.plan.prompts]
    for prompt in ids:
        require_equal(embeddings[prompt], conditions[prompt])
    assert [int(embeddings[one]["conditional_mask"].sum()) for one in ids] == [2, 1, 2, 1]
    # A folder with clips alone is looked at for changes, too.
    for number in (1, 3):
        (inputs / "longer" / "metas" / f"{number}.json").write_text('{"prompt": "x", "references": ["sources/0.mkv"]}')
    for file in (inputs / "longer" / "sources").glob("*.png"):
        file.unlink()
    dataset = values["train"]["train_policy"]["dataset"]
    assert snapshot_of("clips", dataset, tmp_path / "parts").number == 2
    clip_of(inputs / "longer" / "sources", "2", 20)
    assert snapshot_of("clips", dataset, tmp_path / "parts").number == 3
    show(str(tmp_path / "parts"), "clips", str(tmp_path / "shown"), 100, all_pages=False)
    page = (tmp_path / "shown" / "1.html").read_text(encoding="utf-8")
    assert page.count('alt="reference 1"') == 4
