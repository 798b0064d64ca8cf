"""A run on a real S3 server: audited, and read by programs, as in a directory."""

import secrets
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest

from cosmos_rl_core.storage import store
from flows.auditing.audit import audit
from flows.library import open_run
from tests.flows.proved import RUN_ID, Proved
from tests.seaweed import BUCKET, SeaweedFS


@pytest.fixture
def finished(tmp_path: Path) -> Proved:
    proved = Proved(tmp_path)
    proved.run(keep=("train.num_iterations=2",))
    return proved


def put(folder: Path, url: str) -> None:
    paths = [path for path in folder.rglob("*") if path.is_file()]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda path: store.write(f"{url}/{path.relative_to(folder)}", path.read_bytes()), paths))


def test_a_run_on_s3_is_audited_and_read_like_the_same_run_in_a_directory(seaweed: SeaweedFS, finished: Proved):
    url, here = f"s3://{BUCKET}/{secrets.token_hex(8)}", str(finished.store)
    put(finished.store, url)
    local, distant = audit(here, RUN_ID), audit(url, RUN_ID)
    assert (distant.faults, distant.gone) == ([], [])
    assert distant == replace(local, root=url)

    ours, theirs = open_run(RUN_ID, here), open_run(f"{url}/runs/{RUN_ID}")
    pd.testing.assert_frame_equal(theirs.metrics(), ours.metrics())
    pd.testing.assert_frame_equal(theirs.stages().drop(columns="slot"), ours.stages().drop(columns="slot"))
    table, expected_table = theirs.samples(1), ours.samples(1)
    pictures = [[one.file() if one else None for one in some.pop("picture")] for some in (table, expected_table)]
    assert pictures[0] == pictures[1]
    pd.testing.assert_frame_equal(table, expected_table)
    policy, expected = theirs.policy(2), ours.policy(2)
    assert (policy.digest, policy.parts) == (expected.digest, expected.parts)
    assert policy.tensors("old")["w"].tolist() == expected.tensors("old")["w"].tolist() == [1, 1]

    (media,) = (finished.root / "iterations/0001/rollout").rglob("media/00001.tar")
    data, name = bytearray(media.read_bytes()), str(media.relative_to(finished.store))
    data[700] ^= 1
    store.write(f"{url}/{name}", bytes(data))
    (fault,) = audit(url, RUN_ID, 1).faults
    assert (fault.file, fault.field, fault.what[:7]) == (name, "bytes", "sha256 ")
    store.remove(f"{url}/{name}")
    (fault,) = audit(url, RUN_ID, 1, quick=True).faults
    assert (fault.file, fault.what) == (name, "missing")
