"""Every dataset: prompts with ids of their own, and media that are the same in every order."""

import json
import re
import tarfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from PIL import Image

from cosmos_rl_core import plugins
from cosmos_rl_core.config.train import SnapshotOptions
from cosmos_rl_core.conformance.kinds import hf_folder
from cosmos_rl_core.conformance.kinds.members import options_of, runnable


def folder_of_pictures(folder: Path) -> str:
    """Write two captioned images, for a dataset that reads files."""
    for index, caption in enumerate(("a dog", "a cat")):
        Image.new("RGB", (8, 8), (index, 0, 0)).save(folder / f"{index}.png")
        (folder / f"{index}.json").write_text(json.dumps({"prompt": caption}), encoding="utf-8")
    return str(folder)


def folder_of_rows(folder: Path) -> str:
    """Write two prompts as `datasets` writes them."""
    return str(hf_folder.save(folder, {"text": pa.array(["a dog", "a cat"])}, {}))


FOLDERS = {"hf": folder_of_rows}
"""Functions that write a folder of another layout than pictures with captions, by the plugin that reads it."""


def shard_of_pictures(folder: Path) -> str:
    """Write the same two images to a tar, for a dataset that reads tar shards."""
    folder_of_pictures(folder)
    with tarfile.open(folder / "000.tar", "w") as tar:
        for file in sorted({*folder.iterdir()} - {folder / "000.tar"}):
            tar.add(file, file.name)
    return str(folder / "000.tar")


def given_to(name: str, folder: Path) -> dict[str, Any]:
    """Write files for a dataset to ``folder``, and return its settings with their place."""
    fields = plugins.load("datasets", name).Options.model_fields
    if "urls" in fields:
        return {"urls": shard_of_pictures(folder)}
    if "path" in fields:
        (folder / "prompts.txt").write_text("a dog\na cat\n", encoding="utf-8")
        return {"path": str(folder / "prompts.txt")}
    if "local_dir" in fields and fields["local_dir"].is_required():
        return {"local_dir": FOLDERS.get(name, folder_of_pictures)(folder)}
    return {}


@dataclass(frozen=True)
class Subject:
    """A dataset with its options."""

    module: Any
    options: Any

    @property
    def file(self) -> str:
        """Return the plugin's file, for messages."""
        return str(self.module.__file__)


@pytest.fixture(scope="module", params=runnable("datasets"))
def dataset(
    request: pytest.FixtureRequest, plugin_settings: Mapping[str, Any], tmp_path_factory: pytest.TempPathFactory
) -> Subject:
    """Return each dataset."""
    name = request.param
    module = plugins.load("datasets", name)
    if issubclass(module.Options, SnapshotOptions):
        pytest.skip("its prompts and media are in a store")
    options = options_of("datasets", name, plugin_settings, **given_to(name, tmp_path_factory.mktemp(name)))
    if options is None:
        pytest.skip("its settings have no defaults")
    return Subject(module, options)


def test_prompts_are_the_same_twice_and_have_ids_of_their_own(dataset: Subject):
    prompts, file = dataset.module.prompts(dataset.options), dataset.file
    assert isinstance(prompts, tuple), f"{file}: prompts returned {type(prompts).__name__}, expected a tuple"
    assert prompts == dataset.module.prompts(dataset.options), f"{file}: prompts returned others the second time"
    assert prompts, f"{file}: prompts returned none"
    ids = [prompt.id for prompt in prompts]
    twice = sorted({one for one in ids if ids.count(one) > 1})
    assert not twice, f"{file}: several prompts have the id {', '.join(twice)}; prompt_id(text) makes one of each text"
    odd = [one for one in ids if not re.fullmatch(r"[\w.-]+", one)]
    assert not odd, f"{file}: ids must be safe as file names, found {', '.join(odd)}"


def test_media_are_the_same_in_every_order(dataset: Subject):
    if not hasattr(dataset.module, "Media"):
        return
    make, file = dataset.module.Media, dataset.file
    forwards, backwards = make(dataset.options), make(dataset.options)
    indices = sorted({0, 1, len(forwards) // 2, len(forwards) - 1} & {*range(len(forwards))})
    first = {i: forwards.item(i) for i in indices}
    for i in reversed(indices):
        pixels, prompt = backwards.item(i)
        assert pixels.dtype == np.uint8, f"{file}: item({i}) has pixels of {pixels.dtype}, expected uint8"
        expected = (*forwards.shape, 3)
        assert pixels.shape == expected, f"{file}: item({i}) has pixels {pixels.shape}, expected {expected}"
        assert forwards.fault(i) is None, f"{file}: fault({i}) says {forwards.fault(i)!r} of an item that can be read"
        same = np.array_equal(pixels, first[i][0])
        assert same, f"{file}: item({i}) has other pixels when it is read after others"
        assert prompt == first[i][1] == forwards.prompt_of(i), f"{file}: item({i}) and prompt_of({i}) differ"
        assert prompt in forwards.prompts, f"{file}: Media.prompts lacks the prompt of item {i}"


def test_media_have_ids_of_their_own_and_end(dataset: Subject):
    if not hasattr(dataset.module, "Media"):
        return
    media, file = dataset.module.Media(dataset.options), dataset.file
    assert media.prompts == dataset.module.prompts(dataset.options), f"{file}: Media.prompts differ from prompts()"
    ids = media.item_ids
    assert len(set(ids)) == len(ids) == len(media), f"{file}: {len(media)} items have {len(set(ids))} ids"
    odd = [one for one in ids if not re.fullmatch(r"[\w.-]{1,80}", one)]
    assert not odd, f"{file}: ids of items must be safe as file names, found {', '.join(odd)}"
    for read in (media.item, media.prompt_of):
        with pytest.raises(IndexError):
            read(len(media))


def test_the_digest_of_media_is_a_sha256_and_the_same_twice(dataset: Subject):
    if not hasattr(dataset.module, "Media"):
        return
    found = dataset.module.digest(dataset.options)
    assert re.fullmatch("|[0-9a-f]{64}", found), f"{dataset.file}: digest returned {found!r}"
    assert found == dataset.module.digest(dataset.options), f"{dataset.file}: digest returned another the second time"
