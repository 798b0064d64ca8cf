"""A store that cannot be used is found before anything starts."""

import os
import secrets
import subprocess
import sys
import time
from pathlib import Path

import pytest

from cosmos_rl_core.errors import ConfigError
from cosmos_rl_core.storage import s3
from flows.planning.plan import Settings, freeze, plan_of
from tests.seaweed import BUCKET, READER, SeaweedFS

ROOT = Path(__file__).parents[3]


@pytest.fixture
def url(seaweed: SeaweedFS) -> str:
    """A store of its own."""
    return f"s3://{BUCKET}/{secrets.token_hex(8)}"


def test_a_run_with_a_wrong_secret_ends_with_64_before_anything_starts(seaweed, url, tmp_path):
    began_s = time.monotonic()
    ended = subprocess.run(
        [sys.executable, "-m", "flows", "run", "tests/e2e/tiny.toml", "--store", url],
        cwd=ROOT,
        env=os.environ | {f"{s3.CHECKPOINT}SECRET_ACCESS_KEY": "planted", "PREFECT_HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 64
    assert "the secret key does not match the access key" in ended.stderr
    assert "planted" not in ended.stdout + ended.stderr
    assert time.monotonic() - began_s < 60
    assert not list(tmp_path.iterdir())


def test_a_missing_bucket_is_named_with_every_other_mistake(seaweed, recipe):
    with pytest.raises(ConfigError) as error:
        plan_of(Settings(recipe(("optm_lr = 1e-3", "optm_lr = -1.0")), "s3://none/runs"))
    assert "s3://none/runs" in str(error.value)
    assert "make the bucket first" in str(error.value)
    assert "train.optm_lr" in str(error.value)
    with pytest.raises(ConfigError, match="make the bucket first"):
        plan_of(Settings(recipe(), "s3://none/runs"))


def test_keys_that_may_only_read_can_plan_but_not_run(url, recipe, monkeypatch):
    written = freeze(plan_of(Settings(recipe(), url)), url)
    assert written.races_decided
    monkeypatch.setenv(f"{s3.CHECKPOINT}ACCESS_KEY_ID", READER)
    again = plan_of(Settings(recipe(), url))
    with pytest.raises(ConfigError, match=r"AccessDenied.*s3:PutObject"):
        freeze(again, url)
