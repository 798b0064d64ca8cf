"""What a plan pins of the media that an algorithm trains on, and the Request that encodes them."""

import json

import av
import numpy as np
import pytest
from PIL import Image

from cosmos_rl_core.algorithms import ddrl
from cosmos_rl_core.datasets import local, ocr, rendered_text
from cosmos_rl_core.errors import ConfigError
from cosmos_rl_core.storage import media
from flows.planning.plan import Settings, freeze, make_plan, plan_of
from flows.planning.run import Run
from stages.contracts import Encode, MediaShape

SFT = """
[policy]
model_name_or_path = "package:tiny-sd3"
diffusers = { inference_size = [32, 64] }
[train]
num_iterations = 1
train_policy = { type = "sft", dataset = DATASET }
"""


@pytest.fixture
def pictures(tmp_path):
    folder = tmp_path / "pictures"
    folder.mkdir()
    for index, caption in enumerate(("a cat", 'a sign that says "K7"')):
        _, data = media.encode(np.full((1, 32, 64, 3), index, dtype=np.uint8))
        (folder / f"{index}.png").write_bytes(data)
        (folder / f"{index}.json").write_text(json.dumps({"prompt": caption}), encoding="utf-8")
    return folder


def plan_with(path, data, size=(32, 64)):
    """The recipe's, with DDRL, whose diffusion loss reads ``data``; without any, there is no such loss."""
    recipe = plan_of(Settings(path)).recipe
    dataset, beta = recipe.train.train_policy.dataset, 0.0 if data is None else 0.01
    options = ddrl.Options(type="ddrl", dataset=dataset, data=data, data_beta=beta, train_on=(0,))
    sample = recipe.policy.diffusers.sample.model_copy(update={"solver": "flow_sde"})
    diffusers = recipe.policy.diffusers.model_copy(update={"inference_size": size, "sample": sample})
    policy = recipe.policy.model_copy(update={"diffusers": diffusers})
    train = recipe.train.model_copy(update={"train_policy": options})
    return make_plan(recipe.model_copy(update={"train": train, "policy": policy}), "mine", "test.toml")


def local_data(folder, size=(32, 64)):
    return local.Options(local_dir=str(folder), size=size)


def run_of(plan, tmp_path):
    return Run(plan, str(tmp_path / "store"))


def test_a_plan_pins_the_files_and_captions_of_its_data(recipe, pictures):
    plan = plan_with(recipe(), local_data(pictures))
    assert plan.data_digest == local.digest(local_data(pictures))
    assert [prompt.text for prompt in plan.data_prompts] == ["a cat", 'a sign that says "K7"']
    generated = plan_with(recipe(), rendered_text.Options(num_items=4))
    assert generated.data_digest == ""
    assert generated.data_prompts == rendered_text.prompts(rendered_text.Options())


def test_prompts_of_the_data_are_embedded_once_and_after_the_prompts_trained_on(recipe, pictures, tmp_path):
    without, with_data = (plan_with(recipe(), data) for data in (None, local_data(pictures)))
    texts = [prompt["text"] for prompt in run_of(with_data, tmp_path).prepared.embed.config.model_dump()["prompts"]]
    assert texts == [*(prompt.text for prompt in with_data.prompts), "a cat"]
    assert with_data.prompts == without.prompts
    # A run without data is unchanged since there was none.
    plain = plan_of(Settings(recipe(), overrides=("policy.diffusers.inference_size=[32, 64]",)))
    assert run_of(without, tmp_path).prepared.embed.fingerprint == run_of(plain, tmp_path).prepared.embed.fingerprint
    assert run_of(with_data, tmp_path).prepared.embed.fingerprint != run_of(plain, tmp_path).prepared.embed.fingerprint
    assert not {"data_prompts", "data_digest"} & plain.identity().keys()


def test_encoded_media_are_shared_by_runs_that_ask_for_the_same(recipe, pictures, tmp_path):
    one, two = (
        run_of(plan_with(recipe(replacement), local_data(pictures)), tmp_path)
        for replacement in (("optm_lr = 1e-3", "optm_lr = 2e-3"), ("num_iterations = 2", "num_iterations = 3"))
    )
    request = one.prepared.encode
    assert request.stage == "encode"
    assert request.inputs == {}
    assert request.config == Encode(
        model=one.plan.model,
        dataset=local_data(pictures),
        dataset_digest=one.plan.data_digest,
        media=MediaShape(size=(32, 64), frames=1),
    )
    assert request.slot == one.prepared.encode.slot == two.prepared.encode.slot
    assert request.slot == str(tmp_path / "store" / "dataset" / request.fingerprint)

    (pictures / "0.json").write_text('{"prompt": "a dog"}', encoding="utf-8")
    assert run_of(plan_with(recipe(), local_data(pictures)), tmp_path).prepared.encode.slot != request.slot


def test_every_mistake_of_the_data_is_found_at_plan_time(recipe, pictures, tmp_path):
    (pictures / "0.json").unlink()
    (pictures / "1.json").write_text("{", encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        plan_with(recipe(), local_data(pictures))
    _, where, *lines = str(caught.value).splitlines()
    assert where == f"  {pictures}:"
    assert lines[0] == "    0.png: no caption"
    assert lines[1].startswith("    1.json: cannot be read")
    assert len(lines) == 2


def test_no_medium_is_opened_for_decoding_at_plan_time(recipe, pictures, tmp_path, monkeypatch):
    def opened(*_, **__):
        raise AssertionError

    monkeypatch.setattr(Image, "open", opened)
    monkeypatch.setattr(av, "open", opened)
    whole = (pictures / "1.png").read_bytes()
    (pictures / "1.png").write_bytes(whole[:40] + bytes(len(whole) - 40))
    assert len(plan_with(recipe(), local_data(pictures)).data_prompts) == 2
    assert len(supervised(tmp_path, folder_toml(pictures)).prompts) == 2
    # Nor is its size read: the options say it.
    with pytest.raises(ConfigError, match=r"train_policy\.dataset gives media of 1 x 32 x 32"):
        supervised(tmp_path, folder_toml(pictures).replace("[32, 64]", "[32, 32]"))


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (ocr.Options(), "the dataset 'ocr' has prompts only; with media: local, mock, rendered_text"),
        (rendered_text.Options(size=(32, 32)), "media of 1 x 32 x 32 (frames, height, width), policy.diffusers trains"),
    ],
)
def test_data_that_cannot_be_trained_on_is_refused(recipe, data, expected):
    with pytest.raises(ConfigError) as caught:
        plan_with(recipe(), data)
    assert expected in str(caught.value)


def supervised(tmp_path, dataset):
    path = tmp_path / "sft.toml"
    path.write_text(SFT.replace("DATASET", dataset), encoding="utf-8")
    return plan_of(Settings(str(path), run_id="mine"))


def folder_toml(folder):
    return f'{{ name = "local", local_dir = "{folder}", size = [32, 64] }}'


def test_supervised_training_is_pinned_to_the_files_it_reads(pictures, tmp_path):
    plan = supervised(tmp_path, folder_toml(pictures))
    assert plan.data_digest == local.digest(local_data(pictures))
    assert plan.data_prompts == ()
    assert supervised(tmp_path, '{ name = "rendered_text" }').data_digest == ""
    with pytest.raises(ConfigError, match="has prompts only"):
        supervised(tmp_path, '{ name = "ocr" }')
    with pytest.raises(ConfigError) as caught:
        supervised(tmp_path, '{ name = "local", local_dir = "nowhere" }')
    assert str(caught.value).count("no folder at nowhere") == 1


def test_a_frozen_plan_refuses_files_that_changed_but_not_files_that_moved(pictures, tmp_path):
    store_url = str(tmp_path / "store")
    first = freeze(supervised(tmp_path, folder_toml(pictures)), store_url)
    moved = pictures.rename(tmp_path / "moved")
    again = freeze(supervised(tmp_path, folder_toml(moved)), store_url)
    assert again.data_digest == first.data_digest
    assert again.recipe.train.train_policy.dataset == local_data(moved)
    _, data = media.encode(np.full((1, 32, 64, 3), 9, dtype=np.uint8))
    (moved / "0.png").write_bytes(data)
    with pytest.raises(ConfigError, match=r"planned otherwise:\n  data_digest: '"):
        freeze(supervised(tmp_path, folder_toml(moved)), store_url)


@pytest.mark.parametrize(
    ("held_out", "mistake"),
    [
        ("{ name = 'rendered_text', split = 'test' }", None),
        ("{ name = 'rendered_text', split = 'train', num_items = 9 }", "validation.data has media that are trained on"),
        ("{ name = 'rendered_text', split = 'test', size = [32, 32] }", "validation.data gives media of 1 x 32 x 32"),
        ("{ name = 'ocr' }", "the dataset 'ocr' has prompts only"),
    ],
)
def test_held_out_media_are_media_of_the_trained_size_that_are_not_trained_on(tmp_path, held_out, mistake):
    validation = f"[validation]\ndataset = {{ name = 'ocr', split = 'test' }}\ndata = {held_out}\n"
    path = tmp_path / "sft.toml"
    path.write_text(SFT.replace("DATASET", '{ name = "rendered_text" }') + validation, encoding="utf-8")
    if mistake is None:
        assert plan_of(Settings(str(path))).held_out_prompts
        return
    with pytest.raises(ConfigError) as caught:
        plan_of(Settings(str(path)))
    assert mistake in str(caught.value)


def test_held_out_media_that_are_trained_on_are_refused(pictures, tmp_path):
    path = tmp_path / "sft.toml"
    validation = f"[validation]\ndataset = {{ name = 'ocr', split = 'test' }}\ndata = {folder_toml(pictures)}\n"
    path.write_text(SFT.replace("DATASET", folder_toml(pictures)) + validation, encoding="utf-8")
    with pytest.raises(ConfigError, match=r"validation\.data has media that are trained on"):
        plan_of(Settings(str(path)))
