"""The pool of text embeddings: each text is encoded once for all runs, by any number of ranks, whoever asks for it."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load, save

from cosmos_rl_core.config.shared import ModelRef
from cosmos_rl_core.conformance.models import tiny_pipelines
from cosmos_rl_core.datasets._base import Prompt, prompt_id
from cosmos_rl_core.errors import ArtifactError
from cosmos_rl_core.models._conditioning import Conditioning
from cosmos_rl_core.weights.policy_weights import to_bytes
from stages.artifacts.artifact import Artifact
from stages.artifacts.pool import INDEX, entries_of
from stages.artifacts.request import Request
from stages.artifacts.slots import input_of
from stages.contracts import Embed
from stages.formats.embeddings import EMPTY, NEGATIVE, Embeddings
from stages.training.loading import load_model
from tests.stages.conftest import make

CPU = torch.device("cpu")
TINY = ModelRef(path="package:tiny-sd3", adapter="sd3", digest="d")


def request(folder: Path, *texts: str, slot: str = "", **settings: Any) -> Request:
    prompts = tuple(Prompt(id=prompt_id(text), text=text) for text in texts)
    config = Embed(model=TINY, prompts=prompts, max_prompt_length=12, **settings)
    asked = Request(stage="embed", slot="?", seed=0, config=config)
    return asked.model_copy(update={"slot": f"{folder}/dataset/{slot or asked.fingerprint}"})


def pool(folder: Path) -> dict[str, int]:
    """Files of the pool by name, with the time at which each was written."""
    found = [path for path in (folder / "dataset" / "embeddings").rglob("*") if path.is_file()]
    assert all(path.name.endswith(".safetensors") for path in found)
    return {path.stem: path.stat().st_mtime_ns for path in found}


def read(asked: Request, *texts: str) -> list[Conditioning]:
    stored = Embeddings([input_of(asked.slot)], [prompt_id(text) for text in texts])
    return [stored[prompt_id(text)] for text in texts]


def test_a_text_is_encoded_once_in_any_set_of_texts(tmp_path: Path):
    make(first := request(tmp_path, "a", "b"), tmp_path / "outcome")
    before = pool(tmp_path)
    names = {prompt_id("a"), prompt_id("b"), "negative", f"negative-{prompt_id('')}"}
    assert before.keys() == names
    make(second := request(tmp_path, "b", "c", negative_prompt="blurry"), tmp_path / "outcome")
    after = pool(tmp_path)
    assert after.keys() == names | {prompt_id("c"), f"negative-{prompt_id('blurry')}"}
    assert before.items() <= after.items()
    (ours,), (theirs,) = read(first, "b"), read(second, "b")
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_embeddings_equal_the_models_embeddings_of_each_text_alone(tmp_path: Path):
    make(asked := request(tmp_path, "a sign", "another", negative_prompt="blurry"), tmp_path / "outcome")
    model = load_model(TINY, ("text",), CPU)
    expected = [
        *model.encode_prompts(["a sign", "another"], 12),
        *(model.encode_negative(t, 12) for t in ("blurry", "")),
    ]
    stored = Embeddings([input_of(asked.slot)], [])
    found = [*read(asked, "a sign", "another"), stored[NEGATIVE], stored[EMPTY]]
    for one, other in zip(found, expected, strict=True):
        assert one.keys() == other.keys()
        assert all(torch.equal(one[name], other[name]) for name in one)


def test_another_encoding_has_files_of_its_own(tmp_path: Path):
    make(request(tmp_path, "a"), tmp_path / "outcome")
    longer = request(tmp_path, "a")
    config = longer.settings(Embed).model_copy(update={"max_prompt_length": 20})
    make(longer.model_copy(update={"config": config, "slot": f"{tmp_path}/dataset/longer"}), tmp_path / "outcome")
    folders = [*(tmp_path / "dataset" / "embeddings").iterdir()]
    assert [len([*folder.iterdir()]) for folder in folders] == [3, 3]


def test_the_index_does_not_depend_on_the_files_that_were_there_before(tmp_path: Path):
    texts = [f"prompt {number}" for number in range(5)]
    contents = []
    for number, earlier in enumerate(((), texts[:2], texts)):
        folder = tmp_path / str(number)
        if earlier:
            make(request(folder, *earlier, slot="earlier"), tmp_path / "outcome")
        contents.append(make(request(folder, *texts), tmp_path / "outcome").content)
    assert len(set(contents)) == 1


def test_an_embedding_cut_short_is_never_used(tmp_path: Path):
    make(asked := request(tmp_path, "a", "b"), tmp_path / "outcome")
    entry = entries_of(Artifact(input_of(asked.slot)))[prompt_id("a")]
    path = tmp_path / "dataset" / entry.path
    whole = path.read_bytes()
    other = path.with_name(f"{prompt_id('b')}.safetensors").read_bytes()
    for damaged in (whole[:-4], whole[:-1] + bytes([whole[-1] ^ 1]), b"", other, save(load(whole))):
        path.unlink()
        path.write_bytes(damaged)
        with pytest.raises(ArtifactError, match=r"\.safetensors is not what was committed"):
            read(asked, "a")
        with pytest.raises(ArtifactError, match="is damaged, or not the embedding of its prompt; restore it, or"):
            make(request(tmp_path, "a", slot="again"), tmp_path / "outcome")
    os.remove(path)
    with pytest.raises(ArtifactError, match=r"is missing; its manifest lists it"):
        read(asked, "a")
    make(request(tmp_path, "a", slot="again"), tmp_path / "outcome")
    assert path.read_bytes() == whole


def test_an_id_that_was_not_embedded_is_named(tmp_path: Path):
    make(asked := request(tmp_path, "a"), tmp_path / "outcome")
    with pytest.raises(ArtifactError, match=rf"has no embedding of {prompt_id('b')}; embed the prompts of this plan"):
        read(asked, "b")
    assert Artifact(input_of(asked.slot)).names() == [INDEX]


@pytest.mark.parametrize("family", ["wan", "sana", "sana_video", "sd3"])
def test_unread_padding_is_not_stored_and_is_put_back_on_reading(family: str, tmp_path: Path):
    ref = ModelRef(path=str(tiny_pipelines.save(family, tmp_path / "base")), adapter=family, digest="d")
    asked = request(tmp_path, "a b")
    config = asked.settings(Embed).model_copy(update={"model": ref, "max_prompt_length": 40})
    make(asked := asked.model_copy(update={"config": config}), tmp_path / "outcome")
    model = load_model(ref, ("text",), CPU)
    (expected,) = model.encode_prompts(["a b"], 40)
    (found,) = read(asked, "a b")
    assert found.keys() == expected.keys()
    rows = expected.get("prompt_attention_mask", expected["prompt_embeds"]).reshape(len(expected["prompt_embeds"]), -1)
    padding = ~rows.any(dim=1)
    for name in expected:
        assert found[name].shape == expected[name].shape
        read_of = ~padding if name == "prompt_embeds" else slice(None)
        assert torch.equal(found[name][read_of], expected[name][read_of])
    assert not found["prompt_embeds"][padding].any()
    stored = entries_of(Artifact(input_of(asked.slot)))[prompt_id("a b")].size
    whole = len(to_bytes(expected))
    assert stored > whole if family == "sd3" else stored < 0.6 * whole
