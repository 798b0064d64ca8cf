"""Models by their names on the hub: found in its local cache, never downloaded."""

import os
import shutil
from pathlib import Path

import pytest

from cosmos_rl_core.errors import ConfigError
from cosmos_rl_core.pipelines import directories
from flows.planning.plan import Settings, plan_of

COMMIT = "865baf084d4c9e850eac59a021277d5a9b9e8b63"
SHIPPED = "package:tiny-sd3"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The hub's cache with one repository in its own layout: a commit whose files are links to blobs."""
    cache = tmp_path / "hub"
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(cache))
    repository, shipped = cache / "models--owner--tiny", Path(directories.resolve_path(SHIPPED))
    for number, name in enumerate(directories.pipeline_files(shipped)):
        blob, link = repository / f"blobs/{number}", repository / "snapshots" / COMMIT / name
        for file in (blob, link):
            file.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(shipped / name, blob)
        link.symlink_to(os.path.relpath(blob, link.parent))
    for branch in ("main", "diffusers/base"):
        (repository / "refs" / branch).parent.mkdir(parents=True, exist_ok=True)
        (repository / "refs" / branch).write_text(COMMIT)
    return repository


@pytest.mark.parametrize("name", ["owner/tiny", "owner/tiny@main", "owner/tiny@diffusers/base", f"owner/tiny@{COMMIT}"])
def test_a_name_is_the_directory_of_its_commit(cache: Path, name: str):
    assert directories.resolve_path(name) == str(cache / "snapshots" / COMMIT)
    assert directories.pipeline_digest(directories.resolve_path(name)) == directories.pipeline_digest(
        directories.resolve_path(SHIPPED)
    )


@pytest.mark.parametrize(
    ("name", "command"),
    [
        ("owner/other", "hf download owner/other"),
        ("nvidia/Cosmos-Predict2.5-2B",
         "hf download nvidia/Cosmos-Predict2.5-2B --revision diffusers/base/post-trained"),
        ("owner/tiny@v2", "hf download owner/tiny --revision v2"),
        ("nvidia/Cosmos-Predict2.5-2B@diffusers/base/post-trained",
         "hf download nvidia/Cosmos-Predict2.5-2B --revision diffusers/base/post-trained"),
    ],
)  # fmt: skip
def test_a_model_that_is_not_cached_is_a_mistake_with_the_command_to_download_it(cache: Path, name: str, command: str):
    with pytest.raises(ConfigError) as caught:
        directories.resolve_path(name)
    assert str(caught.value).endswith(f": {command}")


def test_cached_weights_of_another_layout_get_the_command_that_converts_them(cache: Path):
    snapshot = cache / "snapshots" / COMMIT
    (snapshot / directories.INDEX).unlink()
    (snapshot / "model.pt").write_bytes(b"")
    with pytest.raises(ConfigError, match=r"cosmos-flows import-weights .*model\.pt BASE DIRECTORY"):
        directories.resolve_path("owner/tiny")


@pytest.mark.parametrize("name", ["/no/such/folder", "a/b/c", "tiny", "owner/"])
def test_a_path_that_is_no_name_of_a_hub_is_looked_for_as_a_directory(cache: Path, name: str):
    with pytest.raises(ConfigError, match="is not a directory here: pass"):
        directories.resolve_path(name)


def test_a_plan_pins_the_commit_and_the_bytes(cache: Path):
    overrides = ("policy.model_name_or_path=owner/tiny",)
    named = plan_of(Settings("configs/tiny/nft.toml", overrides=overrides))
    assert named.model.path == str(cache / "snapshots" / COMMIT)
    assert named.model.digest == plan_of(Settings("configs/tiny/nft.toml")).model.digest
