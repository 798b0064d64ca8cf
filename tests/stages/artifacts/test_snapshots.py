"""Training on a prepared dataset: which captions and latents are made, by whom they are shared, and what is read."""

import json
import secrets
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from cosmos_rl_core.datasets import _clips
from cosmos_rl_core.datasets._base import ItemError, prompt_id
from cosmos_rl_core.errors import ArtifactError, ConfigError, DatasetError
from cosmos_rl_core.recipes.dataset import DatasetConfig, read_dataset
from cosmos_rl_core.recipes.reading import check
from cosmos_rl_core.storage import media as media_files
from flows.operations.preprocess import missing, preprocess
from flows.planning import requests
from flows.planning.plan import freeze, make_plan
from flows.planning.run import Run
from stages.artifacts.artifact import Artifact
from stages.artifacts.request import Request
from stages.artifacts.slots import current_of, input_of
from stages.contracts import Split
from stages.formats.embeddings import EMPTY, Embeddings
from stages.formats.latents import Latents
from stages.formats.parts import Parts, side_of
from stages.training.loading import load_model
from stages.training.order import ItemOrder
from tests.stages.conftest import make

CPU = torch.device("cpu")


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    """Six pictures, the first two with one caption."""
    folder = tmp_path / "pictures"
    folder.mkdir()
    for number in range(6):
        add(folder, number, f"picture {max(number, 1)}")
    return folder


def add(folder: Path, number: int, caption: str) -> None:
    pixels = np.random.default_rng(number).integers(0, 256, (40, 64, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(folder / f"{number:04d}.png")
    (folder / f"{number:04d}.json").write_text(json.dumps({"prompt": caption}), encoding="utf-8")


def prepare(folder: Path, tmp_path: Path, **settings: Any) -> None:
    values = {"name": "mine", "sources": {"here": {"name": "local", "local_dir": str(folder)}}} | settings
    preprocess(
        DatasetConfig.model_validate(values),
        str(tmp_path),
        lambda _, request: [make(request, tmp_path / "outcome" / secrets.token_hex(4))],
    )


def recipe(dataset: dict[str, Any], **sections: Any) -> dict[str, Any]:
    diffusers = {"inference_size": [32, 64], "max_prompt_length": 12}
    train = {"num_iterations": 1, "train_batch_per_replica": 4, "optm_lr": 1e-3}
    sft = {"type": "sft", "mini_batch": 2, "steps_per_iteration": 2, "dataset": {"name": "snapshot"} | dataset}
    policy = {"model_name_or_path": "package:tiny-sd3", "diffusers": diffusers, "lora": {"r": 2}}
    return {"policy": policy, "train": train | {"train_policy": sft}} | sections


def plan(tmp_path: Path, name: str = "run", **dataset: Any) -> Run:
    values = recipe({"dataset": "mine"} | dataset)
    made = make_plan(check(values, "test"), name, "test.toml", (), str(tmp_path))
    return Run(freeze(made, str(tmp_path)), str(tmp_path))


def make_prepared(run: Run, tmp_path: Path) -> list[str]:
    """Make what is not current; return the names."""
    made: list[str] = []
    for name, request in run.prepared.steps().items():
        if current_of(request.slot)[1] is None:
            make(request, tmp_path / "outcome" / secrets.token_hex(4))
            made.append(name)
    return made


def counts(run: Run) -> list[tuple[Any, Any]]:
    """Captions and latents of each part."""
    pairs = zip(run.prepared.data.embeds, run.prepared.data.encodes, strict=True)
    summaries: list[Any] = [[Artifact(input_of(one.slot)).manifest.summary for one in pair] for pair in pairs]
    return [(embed["prompts"], encode["items"]) for embed, encode in summaries]


def latents_of(run: Run, split: Split | None = None) -> Latents:
    inputs = run.prepared.data.inputs()
    return Latents(
        inputs["data"], Parts([*map(Artifact, inputs["parts"])], [*map(Artifact, inputs["captions"])]), split
    )


def test_only_new_files_are_captioned_and_encoded(pictures: Path, tmp_path: Path):
    prepare(pictures, tmp_path)
    first = plan(tmp_path, "first")
    assert make_prepared(first, tmp_path) == ["embed-part-0000", "encode-part-0000"]
    assert counts(first) == [(5, 6)]
    for number in (6, 7):
        add(pictures, number, f"picture {number - 1}")
    (pictures / "0000.json").unlink()
    (pictures / "0000.png").unlink()
    prepare(pictures, tmp_path)
    second = plan(tmp_path, "second")
    assert make_prepared(second, tmp_path) == ["embed-part-0001", "encode-part-0001"]
    # Picture 6 has the caption of picture 5.
    assert counts(second) == [(5, 6), (1, 2)]
    assert make_prepared(plan(tmp_path, "third"), tmp_path) == []
    assert [len(latents_of(run).index) for run in (first, second)] == [6, 7]


def test_media_that_have_gone_or_have_other_names_do_not_hold_up_a_run(pictures: Path, tmp_path: Path):
    prepare(pictures, tmp_path)
    late = plan(tmp_path, "late")
    for ending in ("png", "json"):
        (pictures / f"0000.{ending}").unlink()
        (pictures / f"0001.{ending}").rename(pictures / f"0007.{ending}")
        (pictures / f"0008.{ending}").write_bytes((pictures / f"0002.{ending}").read_bytes())
    prepare(pictures, tmp_path)
    for ending in ("png", "json"):
        (pictures / f"0002.{ending}").unlink()
    add(pictures, 9, "another")
    prepare(pictures, tmp_path)
    first = plan(tmp_path, "first")
    assert first.plan.data_snapshot is not None
    assert first.plan.data_snapshot.later == ((1, 2), (), ())
    assert make_prepared(first, tmp_path)[1::2] == ["encode-part-0000", "encode-part-0001", "encode-part-0002"]
    assert [encoded for _, encoded in counts(first)] == [5, 0, 1]
    assert len(latents_of(first).index) == 6
    with pytest.raises(DatasetError, match=r"here/000. has changed since it was indexed"):
        make_prepared(late, tmp_path)

    # What was encoded before is used again.
    for ending in ("png", "json"):
        (pictures / f"0003.{ending}").unlink()
    prepare(pictures, tmp_path)
    second = plan(tmp_path, "second")
    assert make_prepared(second, tmp_path) == ["embed-part-0003", "encode-part-0003"]
    assert len(latents_of(second).index) == 5


def test_a_run_keeps_its_snapshot(pictures: Path, tmp_path: Path):
    prepare(pictures, tmp_path)
    run = plan(tmp_path)
    add(pictures, 6, "another")
    prepare(pictures, tmp_path)
    pinned = plan(tmp_path).plan.data_snapshot
    assert pinned is not None
    assert pinned == run.plan.data_snapshot
    assert (pinned.number, pinned.items, pinned.prompts) == (1, 6, 5)
    newer = plan(tmp_path, "newer").plan.data_snapshot
    assert newer is not None
    assert (newer.number, newer.items) == (2, 7)
    first = plan(tmp_path, "first", number=1).plan.data_snapshot
    assert first == pinned
    with pytest.raises(ConfigError, match=r"there is no snapshot 3 of the dataset 'mine' .*its newest is 2"):
        plan(tmp_path, "missing", number=3)
    with pytest.raises(ConfigError, match=r"there is no dataset 'yours' in the store .*name one of: mine"):
        plan(tmp_path, "other", dataset="yours")
    path = tmp_path / "dataset" / "mine" / "snapshots" / "1.json"
    path.unlink()
    with pytest.raises(ArtifactError, match=r"1\.json has gone; restore it"):
        run.prepared.data  # noqa: B018


def test_latents_equal_the_models_latents_of_the_cropped_pictures(pictures: Path, tmp_path: Path):
    prepare(pictures, tmp_path)
    run = plan(tmp_path)
    make_prepared(run, tmp_path)
    latents, model = latents_of(run), load_model(run.plan.base, ("vae",), CPU)
    items = Parts([Artifact(part) for part in run.prepared.data.parts]).items.set_index("item")
    texts = Embeddings([input_of(request.slot) for request in run.prepared.embeddings_at(0)], latents.prompt_ids)
    texts_of = load_model(run.plan.base, ("text",), CPU)
    for item_id, text_id in latents.index[["item_id", "prompt_id"]].itertuples(index=False):
        row = items.loc[item_id]
        pixels = _clips.fit(Image.open(pictures / f"{row['name']}.png"), (32, 64))
        assert torch.equal(latents[item_id], model.encode_media(torch.tensor(pixels)[None, None])[0])
        assert text_id == row["prompt_id"]
        (expected,) = texts_of.encode_prompts([row["caption"]], 12)
        found = texts[text_id]
        assert all(torch.allclose(found[name], expected[name], atol=1e-5) for name in expected)
    assert texts[EMPTY].keys() == texts[latents.prompt_ids[0]].keys()


def test_supervised_steps_read_latents_of_every_part(pictures: Path, tmp_path: Path):
    prepare(pictures, tmp_path)
    add(pictures, 6, "another")
    prepare(pictures, tmp_path)
    run = plan(tmp_path)
    make_prepared(run, tmp_path)
    make(requests.policy(run), tmp_path / "outcome" / "policy")
    request = requests.finetune(run, 0)
    manifest = make(request, tmp_path / "outcome" / "finetune")
    assert np.isfinite(float(manifest.summary["loss"] or "nan"))
    assert [len(request.inputs[role]) for role in ("embeddings", "data", "parts")] == [2, 2, 2]


def test_a_split_separates_media_by_their_bytes(pictures: Path, tmp_path: Path):
    for number in range(6, 40):
        add(pictures, number, f"picture {number}")
    # The same picture under two names, with two captions.
    (pictures / "0100.png").write_bytes((pictures / "0003.png").read_bytes())
    (pictures / "0100.json").write_text('{"prompt": "again"}', encoding="utf-8")
    prepare(pictures, tmp_path)
    train, held_out = (plan(tmp_path, side, side=side, held_out_share=0.3) for side in ("train", "held_out"))
    assert train.prepared.steps().keys() == held_out.prepared.steps().keys()
    assert [r.slot for r in train.prepared.steps().values()] == [r.slot for r in held_out.prepared.steps().values()]
    items = Parts([Artifact(part) for part in train.prepared.data.parts]).items
    sides = [side_of(items, Split(side=side, held_out_share=0.3)) for side in ("train", "held_out")]
    assert sum(map(len, sides)) == len(items) == 41
    assert not {*sides[0]["medium"]} & {*sides[1]["medium"]}
    expected = {m for m in items["medium"] if int(m, 16) / 2**256 < 0.3}
    assert {*sides[1]["medium"]} == expected
    assert 4 <= len(expected) <= 20
    both = recipe(
        {"dataset": "mine", "side": "train"}, validation={"dataset": {"name": "rendered_text"}, "batch_size": 1}
    )
    both["validation"]["data"] = {"name": "snapshot", "dataset": "mine", "side": "held_out"}
    made = make_plan(check(both, "test"), "split", "test.toml", (), str(tmp_path))
    assert [*Run(made, str(tmp_path)).prepared.steps()] == ["embed-part-0000", "encode-part-0000"]
    values = recipe({"dataset": "mine"}, validation={"dataset": {"name": "rendered_text"}, "batch_size": 1})
    values["validation"]["data"] = {"name": "snapshot", "dataset": "mine", "side": "held_out"}
    with pytest.raises(ConfigError, match=r'media that are trained on; set side = "train" there and side = "held_out"'):
        make_plan(check(values, "test"), "both", "test.toml", (), str(tmp_path))


def test_a_file_that_is_not_the_indexed_one_is_never_encoded(pictures: Path, tmp_path: Path):
    prepare(pictures, tmp_path)
    run = plan(tmp_path)
    encode: Request = run.prepared.data.encodes[0]
    whole = (pictures / "0003.png").read_bytes()
    (pictures / "0003.png").write_bytes((pictures / "0004.png").read_bytes())
    with pytest.raises(DatasetError, match="here/0003 has changed since it was indexed"):
        make(encode, tmp_path / "outcome")
    (pictures / "0003.png").unlink()
    with pytest.raises(DatasetError, match="here/0003 has changed since it was indexed"):
        make(encode, tmp_path / "outcome")
    (pictures / "0003.png").write_bytes(whole)
    assert make(encode, tmp_path / "outcome").summary["items"] == 6


def test_the_plan_finds_items_without_a_caption_and_short_videos(pictures: Path, tmp_path: Path):
    (pictures / "0005.json").unlink()
    prepare(pictures, tmp_path, captioned=False)
    with pytest.raises(ConfigError, match=r"1 items of snapshot 1 of 'mine' have no caption, e\.g\. 0005"):
        plan(tmp_path)
    # Written by a captioner, it is embedded like the others.
    prepare(pictures, tmp_path, caption={"by": "text", "text": "a picture"})
    run = plan(tmp_path, "captioned")
    make_prepared(run, tmp_path)
    assert counts(run) == [(5, 6)]
    latents = latents_of(run)
    assert prompt_id("a picture") in latents.prompt_ids
    Embeddings([input_of(run.prepared.data.embeds[0].slot)], latents.prompt_ids)


def test_windows_of_a_video_are_decoded_once_and_equal_its_frames(tmp_path: Path):
    frames = np.random.default_rng(0).integers(0, 256, (9, 16, 24, 3), dtype=np.uint8)
    (tmp_path / "video.mkv").write_bytes(media_files.encode(frames)[1])
    with (tmp_path / "video.mkv").open("rb") as file:
        first, last = _clips.read(file, "video", [[0, 2, 4], [4, 6, 8]], (16, 24))
    assert np.array_equal(first, frames[[0, 2, 4]])
    assert np.array_equal(last, frames[[4, 6, 8]])
    with (tmp_path / "video.mkv").open("rb") as file, pytest.raises(ItemError, match="1 frames can be decoded"):
        _clips.read(file, "video", [[8, 9]], (16, 24))


def test_preparing_a_dataset_also_encodes_for_its_recipes(pictures: Path, tmp_path: Path):
    values = recipe({"dataset": "mine"})
    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes" / "sft.toml").write_text(toml_of(values), encoding="utf-8")
    file = tmp_path / "recipes" / "mine.toml"
    source = f'[sources.here]\nname = "local"\nlocal_dir = "{pictures}"'
    file.write_text(f'name = "mine"\nrecipes = ["sft.toml"]\n{source}\n', encoding="utf-8")
    config = read_dataset(str(file))
    preprocess(config, str(tmp_path), lambda _, request: [make(request, tmp_path / "outcome")])
    assert [name for name, _ in missing(config, str(tmp_path))] == ["embed-part-0000", "encode-part-0000"]
    for name, request in missing(config, str(tmp_path)):
        make(request, tmp_path / "outcome" / name)
    assert missing(config, str(tmp_path)) == []
    # A run of other steps and another seed reads the same.
    values["train"] |= {"seed": 5, "num_iterations": 3}
    made = make_plan(check(values, "test"), "other", "test.toml", (), str(tmp_path))
    assert make_prepared(Run(made, str(tmp_path)), tmp_path) == []


def test_mistakes_of_recipes_are_found_before_anything_is_indexed(pictures: Path, tmp_path: Path):
    values = recipe({"dataset": "mine"})
    values["train"]["optm_lrr"] = 1.0
    (tmp_path / "sft.toml").write_text(toml_of(values), encoding="utf-8")
    file, source = tmp_path / "mine.toml", f'[sources.here]\nname = "local"\nlocal_dir = "{pictures}"'
    lines = 'name = "mine"\nrecipes = ["sft.toml", "nowhere.toml"]\nplugins = ["no.py"]\nmin_frame = 2\n'
    file.write_text(lines + source, encoding="utf-8")
    with pytest.raises(ConfigError, match=r"optm_lrr[\s\S]*nowhere\.toml[\s\S]*no\.py[\s\S]*min_frames"):
        read_dataset(str(file))


def toml_of(values: dict[str, Any], path: str = "") -> str:
    """Tables of plain values, as TOML."""
    own = [f"{key} = {json.dumps(value)}" for key, value in values.items() if not isinstance(value, dict)]
    tables = [
        toml_of(value, f"{path}.{key}" if path else key) for key, value in values.items() if isinstance(value, dict)
    ]
    return "\n".join([*([f"[{path}]"] if path else []), *own, *tables])


def test_sources_are_drawn_by_weight_and_each_item_once_per_pass(pictures: Path, tmp_path: Path):
    others = tmp_path / "others"
    others.mkdir()
    for number in range(100, 102):
        add(others, number, f"other {number}")
    sources = {name: {"name": "local", "local_dir": str(at)} for name, at in (("many", pictures), ("few", others))}
    prepare(pictures, tmp_path, sources=sources)
    run = plan(tmp_path, weights={"many": 1, "few": 3})
    make_prepared(run, tmp_path)
    source = latents_of(run).index["source"]
    assert source.value_counts().to_dict() == {"many": 6, "few": 2}
    source = source.to_numpy()
    order = ItemOrder(source, {"many": 1, "few": 3}, 8, 5)
    drawn = [one for step in range(500) for one in order.of_step(step)]
    few = [(item, epoch) for item, epoch in drawn if source[item] == "few"]
    # Four standard deviations of 4000 draws.
    assert abs(len(few) - 3000) < 4 * (4000 * 0.75 * 0.25) ** 0.5
    assert len({*few}) == len(few) == 2 * (few[-1][1] + 1) - (len(few) % 2)
    assert [epoch for _, epoch in few] == sorted(epoch for _, epoch in few)
    many = [one for one in drawn if source[one[0]] == "many"]
    assert len({*many}) == len(many)
    assert ItemOrder(source, {"few": 3, "many": 1}, 8, 5).of_step(7) == drawn[56:64]
    make(requests.policy(run), tmp_path / "outcome" / "policy")
    assert requests.finetune(run, 0).config.model_dump()["weights"] == {"many": 1, "few": 3}
    manifest = make(requests.finetune(run, 0), tmp_path / "outcome" / "finetune")
    assert np.isfinite(float(manifest.summary["loss"] or "nan"))


def test_weights_of_unknown_sources_are_refused(pictures: Path, tmp_path: Path):
    prepare(pictures, tmp_path)
    with pytest.raises(ConfigError, match=r"weights names her, here; the items of snapshot 1 .* come from here: give"):
        plan(tmp_path, weights={"here": 1, "her": 2})
    with pytest.raises(ConfigError, match="greater than 0"):
        plan(tmp_path, weights={"here": 0})
    values = recipe({"dataset": "mine"}, validation={"dataset": {"name": "rendered_text"}, "batch_size": 1})
    values["validation"]["data"] = {"name": "snapshot", "dataset": "mine", "weights": {"here": 1}}
    with pytest.raises(ConfigError, match=r"validation\.data\.weights: supervised training alone draws"):
        make_plan(check(values, "test"), "both", "test.toml", (), str(tmp_path))
