"""Training on media of several ratios: what they are cut to, what a micro-batch holds, and that each is drawn once."""

import json
import secrets
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from cosmos_rl_core.conformance.models import tiny_pipelines
from cosmos_rl_core.datasets import _clips
from cosmos_rl_core.errors import ConfigError
from cosmos_rl_core.pipelines.buckets import nearest
from cosmos_rl_core.recipes.reading import check
from cosmos_rl_core.training.noise_levels import DrawKey
from flows.explaining.explain import explain_plan
from flows.planning import requests
from flows.planning.plan import freeze, make_plan
from flows.planning.run import Run
from stages.artifacts.artifact import Artifact
from stages.artifacts.layouts import cut_alike, difference
from stages.artifacts.slots import input_of
from stages.contracts import METRICS, Validate
from stages.formats.latents import Latents
from stages.formats.parts import Parts
from stages.formats.tables import read_table
from stages.training.loading import load_model
from tests.stages.artifacts.test_snapshots import make_prepared, prepare, recipe
from tests.stages.conftest import make

CPU = torch.device("cpu")
SIZES = ((40, 40), (40, 48), (48, 40), (32, 48), (48, 32), (32, 64), (64, 32))
SHAPES = [(40, 80), (80, 40), (50, 50), (40, 60), (60, 40), (40, 80), (10, 100), (41, 60), (90, 90), (33, 34)]


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    """Ten pictures of five ratios, one so flat that it is cut a lot."""
    folder = tmp_path / "pictures"
    folder.mkdir()
    for number, shape in enumerate(SHAPES):
        pixels = np.random.default_rng(number).integers(0, 256, (*shape, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f"{number:04d}.png")
        (folder / f"{number:04d}.json").write_text(json.dumps({"prompt": f"picture {number}"}), encoding="utf-8")
    return folder


@pytest.fixture(scope="session")
def shifting(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A pipeline whose noise levels are shifted by the size, more than any real one's."""
    folder = tiny_pipelines.save("sd3", tmp_path_factory.mktemp("shifting") / "sd3")
    file = folder / "scheduler/scheduler_config.json"
    by_size = {"use_dynamic_shifting": True, "base_shift": 0.5, "base_image_seq_len": 4, "max_image_seq_len": 8}
    file.write_text(json.dumps(json.loads(file.read_text(encoding="utf-8")) | by_size), encoding="utf-8")
    return str(folder)


def values_of(model: str, **dataset: Any) -> dict[str, Any]:
    values = recipe({"dataset": "mine", "crop": "buckets"} | dataset)
    values["policy"]["model_name_or_path"] = model
    return values


def planned(values: dict[str, Any], tmp_path: Path, name: str = "run") -> Run:
    return Run(freeze(make_plan(check(values, "test"), name, "t", (), str(tmp_path)), str(tmp_path)), str(tmp_path))


def started(pictures: Path, model: str, tmp_path: Path, **train: Any) -> Run:
    prepare(pictures, tmp_path)
    values = values_of(model)
    values["train"] |= train
    run = planned(values, tmp_path)
    make_prepared(run, tmp_path)
    make(requests.policy(run), tmp_path)
    return run


def latents_of(run: Run) -> Latents:
    inputs = run.prepared.data.inputs()
    return Latents(inputs["data"], Parts([*map(Artifact, inputs["parts"])]))


def metrics(slot: str) -> Any:
    return read_table(Artifact(input_of(slot)), METRICS)


def test_each_picture_is_cut_to_its_own_bucket_and_encoded_there(pictures: Path, tmp_path: Path):
    prepare(pictures, tmp_path)
    run = planned(values_of("package:tiny-sd3"), tmp_path)
    assert run.plan.buckets == SIZES
    assert "buckets    40 x 40, 40 x 48" in explain_plan(run.plan, str(tmp_path))
    make_prepared(run, tmp_path)
    latents, model = latents_of(run), load_model(run.plan.base, ("vae",), CPU)
    items = Parts([Artifact(part) for part in run.prepared.data.parts]).items.set_index("item")
    found: list[Any] = []
    for item_id in latents.index["item_id"]:
        name = items.loc[item_id, "name"]
        size = nearest(SIZES, SHAPES[int(name)])
        assert latents.size(item_id) == size
        pixels = _clips.fit(Image.open(pictures / f"{name}.png"), size)
        assert torch.equal(latents[item_id], model.encode_media(torch.tensor(pixels)[None, None])[0])
        assert latents[item_id].shape == model.latent_shape(size, 1)
        found.append(size)
    assert Counter(found) == {(32, 64): 3, (40, 40): 3, (32, 48): 2, (64, 32): 1, (48, 32): 1}


def test_buckets_work_with_posterior_draws_and_parts_without_new_media(pictures: Path, tmp_path: Path):
    values = values_of("package:tiny-sd3")
    values["policy"]["diffusers"]["posterior"] = "sample"
    prepare(pictures, tmp_path)
    make_prepared(planned(values, tmp_path, "before"), tmp_path)
    for ending in ("png", "json"):
        (pictures / f"0000.{ending}").unlink()
    prepare(pictures, tmp_path)
    run = planned(values, tmp_path)
    make_prepared(run, tmp_path)
    make(requests.policy(run), tmp_path)
    assert [len(read_table(Artifact(source), "index.parquet")) for source in run.prepared.data.inputs()["data"]] == [
        10,
        0,
    ]
    drawn = Latents.of(requests.finetune(run, 0))
    assert len(drawn.index) == 9
    for item in drawn.index["item_id"]:
        assert drawn.size(item) in SIZES
        latents = drawn.trained(item, DrawKey(0, 0, 0, item))
        assert latents.shape == drawn[item].shape
        assert not torch.equal(latents, drawn[item])
    assert np.isfinite(make(requests.finetune(run, 0), tmp_path).summary["loss"] or np.nan)


def test_the_default_crop_is_as_before_and_changes_no_identity(pictures: Path, tmp_path: Path):
    prepare(pictures, tmp_path)
    plans = [
        make_plan(check(values_of("package:tiny-sd3", **crop), "t"), None, "t", (), str(tmp_path))
        for crop in ({"crop": "centre"}, {})
    ]
    centre, buckets = (Run(plan, str(tmp_path)) for plan in plans)
    encode = centre.prepared.data.encodes[0]
    assert not {"buckets", "deviations"} & encode.config.identity().keys()
    assert "crop" not in json.dumps(centre.plan.recipe.identity())
    assert encode.fingerprint != buckets.prepared.data.encodes[0].fingerprint
    # Captions are of the part, however its media are cut.
    assert centre.prepared.data.embeds == buckets.prepared.data.embeds
    make(encode, tmp_path)
    assert read_table(Artifact(input_of(encode.slot)), "index.parquet").columns.tolist() == [
        "latents_id", "medium", "shard",
    ]  # fmt: skip


def test_a_micro_batch_holds_one_kind_and_the_order_does_not_depend_on_its_size():
    items = [*"abacbadbca"]
    cuts = [cut_alike(items, size, str) for size in (1, 2, 3, 100)]
    assert cuts[1] == [["a", "a"], ["a", "a"], ["b", "b"], ["b"], ["c", "c"], ["d"]]
    for found in cuts:
        assert all(len(set(part)) == 1 for part in found)
        # A retry with smaller batches does not count as other work.
        assert difference({"tiles": found}, {"tiles": cuts[0]}) is None
    assert cut_alike([*range(5)], 2, lambda _: None) == [[0, 1], [2, 3], [4]]
    assert cut_alike([], 2, str) == []


def test_held_out_losses_take_each_item_at_its_own_size(pictures: Path, tmp_path: Path):
    prepare(pictures, tmp_path)
    values = values_of("package:tiny-sd3", side="train", held_out_share=0.6)
    held_out = {"name": "snapshot", "dataset": "mine", "side": "held_out", "held_out_share": 0.6, "crop": "buckets"}
    values["validation"] = {"data": held_out, "batch_size": 2}
    run = planned(values, tmp_path)
    assert [*run.prepared.steps()] == ["embed-part-0000", "encode-part-0000"]
    make_prepared(run, tmp_path)
    make(requests.policy(run), tmp_path)
    request = requests.validate(run, 0)
    tables: list[Any] = []
    for batch in (1, 8):
        config = request.config.model_copy(update={"batch_size": batch, "num_levels": 2})
        asked = request.model_copy(update={"slot": f"{run.url}/{batch}", "config": config})
        make(asked, tmp_path / "outcome" / secrets.token_hex(4))
        tables.append(read_table(Artifact(input_of(asked.slot)), Validate.LOSSES))
    sizes = {latents_of(run).size(item) for item in tables[0]["item_id"]}
    assert len(sizes) >= 3
    for table in tables:
        assert table["item_id"].tolist() == tables[0]["item_id"].tolist()
        assert table["loss"].tolist() == pytest.approx(tables[0]["loss"], rel=1e-4)


def test_the_plan_refuses_training_that_cannot_take_several_sizes(pictures: Path, shifting: str, tmp_path: Path):
    prepare(pictures, tmp_path)
    plan = partial(make_plan, run_id="run", source="t", store_url=str(tmp_path))
    values = values_of(shifting)
    # The tiny model has positions for 8 tokens along a side.
    values["policy"]["diffusers"]["inference_size"] = [64, 64]
    with pytest.raises(ConfigError, match=r"buckets' makes media of .* of inference_size \[64, 64\]"):
        plan(check(values, "test"))
    values = recipe({"dataset": "mine"})
    data = {"name": "snapshot", "dataset": "mine", "crop": "buckets"}
    values["train"]["train_policy"] = {
        "type": "ddrl", "dataset": {"name": "ocr"}, "data": data, "data_beta": 0.5, "text_dropout": 0.0,
    }  # fmt: skip
    values["policy"]["diffusers"]["sample"] = {"solver": "flow_sde"}
    values |= {"rollout": {"n_generation": 2}, "rewards": [{"fn": {"name": "ocr"}}]}
    with pytest.raises(ConfigError, match=r"data: crop = 'buckets' .* rollouts of ddrl have one, inference_size"):
        plan(check(values, "test"))
