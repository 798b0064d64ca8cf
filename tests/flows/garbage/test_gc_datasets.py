"""Garbage of prepared datasets: what no run and no kept snapshot reads goes, and only if it is known what is read."""

import json
import os
import re
import secrets
from pathlib import Path

import pytest

from cosmos_rl_core import outside_plugins
from cosmos_rl_core.errors import ConfigError, CosmosRLError, LeaseError
from cosmos_rl_core.storage import store
from cosmos_rl_core.storage.lease import Lease
from flows.defaults import GRACE_H
from flows.garbage.datasets import DatasetGarbage, gc_datasets
from flows.planning.plan import freeze
from flows.planning.run import Run
from stages.artifacts import snapshots
from stages.artifacts.artifact import Artifact
from stages.artifacts.pool import ENDING, POOL
from stages.artifacts.slots import current_of, input_of
from stages.artifacts.snapshots import Snapshot
from tests import hand_made
from tests.flows.prepared import (
    age,
    collect,
    counts,
    files_of,
    four_snapshots,
    is_there,
    make_prepared,
    plan_on,
    prepare,
    read_items,
    run_on,
    slots_of,
)
from tests.hand_made import begin, commit
from tests.seaweed import BUCKET, SeaweedFS


def test_parts_of_the_newest_snapshots_stay_and_others_go(pictures: Path, store_url: str):
    a_b, m_c = (slots_of(one) for one in four_snapshots(pictures, store_url)[1::2])
    before = files_of(store_url)
    assert collect(store_url, keep=3) == {"used index": (4, 32)}
    age(store_url)
    found = gc_datasets(store_url, keep=2, dry_run=True)
    assert counts(found) == {"unused index": (2, 16), "used index": (2, 16)}
    assert (found.removed, files_of(store_url)) == ({"clips": [1, 2]}, before)
    assert found.bytes == sum(entry.size for slot in a_b for entry in store.listed(slot).values())
    assert gc_datasets(store_url, keep=2) == DatasetGarbage(**{**vars(found), "deleted": True})
    assert [is_there(slot) for slot in (*a_b, *m_c)] == [False, False, True, True]
    assert read_items(store_url, 4) == ["0000", "0001", "0002", "0003", "0004"]
    assert collect(store_url, keep=2) == {"used index": (2, 16)}


def test_the_number_of_a_removed_snapshot_is_refused_and_never_used_again(pictures: Path, store_url: str):
    four_snapshots(pictures, store_url)
    age(store_url)
    gc_datasets(store_url, keep=1)
    for number in (1, 2, 3):
        with pytest.raises(ConfigError, match=f"snapshot {number} of the dataset 'clips' was removed"):
            Snapshot.read(store_url, "clips", number)
        with pytest.raises(ConfigError, match="was removed as nothing needed it; use a newer one"):
            plan_on(store_url, "run", number=number)
    newest = snapshots.newest(store_url, "clips")
    assert newest is not None
    assert newest.number == 4
    # The same files under the settings of the first snapshot: the erased slot gets another generation.
    (pictures / "0003.png").unlink()
    (pictures / "0003.json").unlink()
    (pictures / "0004.png").unlink()
    (pictures / "0004.json").unlink()
    assert prepare(pictures, store_url, merge=True).number == 5
    assert read_items(store_url, 5) == ["0000", "0001", "0002"]


def test_a_plan_keeps_its_data_until_its_folder_is_removed(pictures: Path, store_url: str):
    four_snapshots(pictures, store_url)
    pinned, other = run_on(store_url, "pinned", number=2), run_on(store_url, "other", width=32)
    ours, theirs = make_prepared(pinned), make_prepared(other)
    assert len({*ours, *theirs}) == 8
    age(store_url)
    assert collect(store_url, keep=1) == {"used embed": (4, 12), "used encode": (4, 12), "used index": (4, 32)}
    assert read_items(store_url, 2) == ["0000", "0001", "0002", "0003"]
    for name in store.listed(other.url):
        store.remove(f"{other.url}/{name}")
    assert collect(store_url, keep=1) == {
        "unused embed": (2, 6),
        "unused encode": (2, 6),
        "used embed": (2, 6),
        "used encode": (2, 6),
        "used index": (4, 32),
    }
    assert [is_there(slot) for slot in (*ours, *theirs)] == [True] * 4 + [False] * 4
    with pytest.raises(ConfigError, match="snapshot 1"):
        Snapshot.read(store_url, "clips", 1)


def test_data_that_named_recipes_will_read_stay(pictures: Path, store_url: str, tmp_path: Path):
    prepare(pictures, store_url)
    planned = Run(plan_on(store_url, "planned"), store_url)
    make_prepared(planned)
    age(store_url)
    recipe = tmp_path / "sft.toml"
    recipe.write_text(
        "[policy]\n"
        'model_name_or_path = "package:tiny-sd3"\n'
        "lora = { r = 2 }\n"
        "diffusers = { inference_size = [32, 64], max_prompt_length = 12 }\n"
        "[train]\nnum_iterations = 1\ntrain_batch_per_replica = 4\noptm_lr = 1e-3\n"
        '[train.train_policy]\ntype = "sft"\nmini_batch = 2\nsteps_per_iteration = 2\n'
        'dataset = { name = "snapshot", dataset = "clips" }\n',
        encoding="utf-8",
    )
    assert collect(store_url, recipes=[str(recipe)])["used encode"] == (1, 3)
    assert collect(store_url)["unused encode"] == (1, 3)


def test_files_that_were_written_lately_stay(pictures: Path, store_url: str):
    prepare(pictures, store_url)
    (embed, encode) = make_prepared(Run(plan_on(store_url, "never-run"), store_url))
    age(store_url, GRACE_H + 1)
    store.write(f"{encode}/attempts/alive/latents/00000.tar", b"1")
    assert collect(store_url) == {"unused embed": (1, 3), "young encode": (1, 4), "used index": (1, 8)}
    assert [is_there(slot) for slot in (embed, encode)] == [False, True]
    assert collect(store_url, older_than_h=0)["unused encode"] == (1, 4)


def test_a_snapshot_that_was_the_newest_until_lately_stays(pictures: Path, store_url: str):
    """Somebody may be planning on it."""
    four_snapshots(pictures, store_url)
    age(store_url)
    os.utime(snapshots.url_of(store_url, "clips", 3))
    assert gc_datasets(store_url, keep=1).removed == {"clips": [1, 3]}
    assert read_items(store_url, 2) == ["0000", "0001", "0002", "0003"]


def test_an_artifact_that_is_erased_is_made_again_and_read(pictures: Path, store_url: str):
    prepare(pictures, store_url)
    (slot, _) = make_prepared(Run(plan_on(store_url, "never-run"), store_url))
    age(store_url)
    gc_datasets(store_url)
    assert current_of(slot) == (2, None)
    make_prepared(run_on(store_url, "run"))
    assert current_of(slot)[0] == 2
    assert Artifact(input_of(slot)).read("a") == b"12345"


def test_files_of_dead_attempts_at_kept_artifacts_go(pictures: Path, store_url: str):
    prepare(pictures, store_url)
    run = run_on(store_url, "run")
    (embed, encode) = run.prepared.steps().values()
    hand_made.make(embed)
    dead = begin(encode, layout={"shards": 2})
    dead.finish(0, {"0.tar": b"finished"})
    dead.put("1.tar", b"half of it")
    age(store_url)
    assert collect(store_url) == {
        "unused dead attempts at unfinished": (0, 1),
        "used embed": (1, 2),
        "used index": (1, 8),
        "used unfinished": (1, 3),
    }
    retry = begin(encode, layout={"shards": 2})
    assert retry.adopt(0)
    commit(retry)


@pytest.mark.parametrize(
    ("broken", "expected"),
    [
        (lambda url: store.write(f"{url}/runs/run/plan.json", b"{}"), "plan.json is damaged"),
        (lambda url: store.remove(f"{url}/runs/run/plan.json"), "plan.json is missing, but there is policy"),
        (lambda url: store.remove(snapshots.url_of(url, "clips", 1)), "snapshots/1.json is missing, but there is"),
        (lambda url: store.write(snapshots.url_of(url, "clips", 1), b"{}"), "snapshots/1.json is damaged"),
        (lambda url: store.write(snapshots.url_of(url, "clips", 4), b"{}"), "snapshots/4.json is damaged"),
    ],
)
def test_nothing_goes_while_a_plan_or_a_snapshot_cannot_be_read(pictures, store_url, broken, expected):
    four_snapshots(pictures, store_url)
    run = run_on(store_url, "run")
    hand_made.make(hand_made.report(run.slots.policy(0)))
    age(store_url)
    broken(store_url)
    before = files_of(store_url)
    for dry_run in (True, False):
        with pytest.raises(CosmosRLError, match=re.escape(expected)) as stopped:
            gc_datasets(store_url, keep=1, dry_run=dry_run)
        assert stopped.value.exit_code == 65
        assert "restore it" in str(stopped.value)
    assert files_of(store_url) == before


def test_a_plan_whose_plugin_is_missing_is_named(pictures: Path, store_url: str, tmp_path: Path):
    prepare(pictures, store_url)
    plugin = tmp_path / "mine.py"
    plugin.write_text(
        "from typing import Literal\n"
        "from cosmos_rl_core.config.train import DatasetOptions\n"
        "from cosmos_rl_core.datasets._base import Prompt\n\n\n"
        'class Options(DatasetOptions):\n    """Nothing."""\n\n    name: Literal["mine"]\n\n\n'
        'def prompts(options: Options) -> tuple[Prompt, ...]:\n    """Return none."""\n    return ()\n',
        encoding="utf-8",
    )
    outside_plugins.find([str(plugin)])
    run_on(store_url, "run")
    plugin.unlink()
    age(store_url)
    with pytest.raises(ConfigError, match="nothing is deleted while it is not known what the run 'run' reads"):
        gc_datasets(store_url)


def test_a_run_of_other_stage_versions_keeps_the_inputs_of_its_artifacts(pictures: Path, store_url: str):
    prepare(pictures, store_url)
    plan = plan_on(store_url, "run")
    run = Run(
        freeze(plan.model_copy(update={"stage_versions": plan.stage_versions | {"embed": 0}}), store_url), store_url
    )
    foreign = f"{store_url}/dataset/{'0' * 64}"
    hand_made.make(hand_made.report(foreign))
    hand_made.make(hand_made.report(run.slots.report, updates=(input_of(foreign),)))
    stray = f"{store_url}/dataset/{'1' * 64}"
    hand_made.make(hand_made.report(stray))
    age(store_url)
    assert collect(store_url) == {"unused report": (1, 2), "used report": (1, 2), "used index": (1, 8)}
    assert Artifact(input_of(foreign)).read("a") == b"1"


def test_a_second_deletion_at_the_same_time_is_refused(pictures: Path, store_url: str):
    prepare(pictures, store_url)
    with Lease(f"{store_url}/dataset/lease"), pytest.raises(LeaseError, match="another process works on"):
        gc_datasets(store_url)
    assert counts(gc_datasets(store_url)) == {"used index": (1, 8)}


def test_a_store_without_datasets_has_no_garbage(store_url: str):
    assert list(gc_datasets(store_url).lines()) == [f"nothing to delete in {store_url}/dataset"]
    assert not Path(store_url).exists()


@pytest.mark.processes
def test_unused_data_on_s3_is_deleted_like_in_a_folder(pictures: Path, seaweed: SeaweedFS):
    store_url = f"s3://{BUCKET}/{secrets.token_hex(8)}"
    four_snapshots(pictures, store_url)
    run = run_on(store_url, "run", number=2)
    kept = make_prepared(run)
    gone = make_prepared(Run(plan_on(store_url, "never-run"), store_url))
    store.write(f"{store_url}/dataset/{POOL}/key/unnamed{ENDING}", b"1")
    assert collect(store_url, keep=1)["young embed"] == (2, 6)
    said = counts(gc_datasets(store_url, keep=1, older_than_h=0.0))
    assert said == {
        "unused embed": (2, 6),
        "unused encode": (2, 6),
        "unused files of texts and references": (0, 1),
        "used embed": (2, 6),
        "used encode": (2, 6),
        "used index": (4, 32),
    }
    assert [is_there(slot) for slot in (*kept, *gone)] == [True] * 4 + [False] * 4
    assert read_items(store_url, 2) == ["0000", "0001", "0002", "0003"]


def test_the_command_lists_deletions_and_refuses_a_wrong_number(pictures: Path, store_url: str, main):
    four_snapshots(pictures, store_url)
    age(store_url)
    code, out, err = main("data", "gc", "--store", store_url, "--keep", "2", "--dry-run")
    assert (code, err) == (0, "")
    lines = [line.split() for line in out.splitlines()]
    assert lines[0] == ["artifacts", "files", "MB"]
    assert lines[1] == ["would", "delete", "index", "2", "16", "0.1"]
    assert lines[2] == ["kept", "index", "2", "16", "0.1"]
    assert out.splitlines()[3:] == ["would remove snapshots of clips: 1 to 2", "would free 0.1 MB"]
    code, out, _ = main("data", "gc", "--store", store_url, "--keep", "2", "--json")
    assert (code, json.loads(out)["removed"]) == (0, {"clips": [1, 2]})
    assert main("data", "gc", "--store", store_url, "--keep", "0")[0] == 64
    code, _, err = main("data", "show", "clips@1", "--store", store_url)
    assert (code, err.partition(";")[0]) == (
        64,
        "snapshot 1 of the dataset 'clips' was removed as nothing needed it",
    )
