"""A deployed run with every secret there is: a profile's key for its store, a token for its reward, wandb's key."""

import secrets
from collections.abc import Iterator
from pathlib import Path

import pytest

from cosmos_rl_core.storage import s3
from tests.e2e.deployed import Deployed
from tests.e2e.flow_process import RECIPE, ROOT, eventually, files_with
from tests.reward_server import TOKEN, RewardServer, reward_server
from tests.seaweed import BUCKET, SeaweedFS

OCR = '{ name = "ocr", line_width = 96 }'
REMOTE = '{ name = "remote", reward_fn = "dance_grpo", score_key = "overall_reward" }'
LOGGERS = '[logging]\nlogger = ["console", "wandb"]\n\n[launch]'


@pytest.fixture
def service() -> Iterator[RewardServer]:
    """Checks the token that each request has."""
    with reward_server() as service:
        yield service
        assert service.frames
        assert service.mistakes == []


@pytest.fixture
def secret_of() -> dict[str, str]:
    """In addition to the store's and the service's own."""
    return {name: secrets.token_hex(20) for name in ("AWS_SECRET_ACCESS_KEY", "WANDB_API_KEY", "HF_TOKEN")}


@pytest.fixture
def deployed(
    seaweed_server: SeaweedFS,
    service: RewardServer,
    secret_of: dict[str, str],
    prefect_environment: dict[str, str],
    tmp_path: Path,
) -> Iterator[Deployed]:
    """A worker that has all of them."""
    keys = tmp_path / "keys"
    keys.mkdir()
    (keys / "config").write_text(f"[profile theirs]\nendpoint_url = {seaweed_server.endpoint}\nregion = us-east-1\n")
    (keys / "credentials").write_text(
        f"[theirs]\naws_access_key_id = tests\naws_secret_access_key = {seaweed_server.secret}\n"
    )
    aws = {"AWS_CONFIG_FILE": str(keys / "config"), "AWS_SHARED_CREDENTIALS_FILE": str(keys / "credentials")}
    aws |= {s3.PROFILES: f"s3://{BUCKET}=theirs", "AWS_ACCESS_KEY_ID": "nobody"}
    wandb = {"WANDB_MODE": "offline", "WANDB_DIR": str(tmp_path / "deployed")}
    environment = prefect_environment | service.environment() | secret_of | aws | wandb
    deployed = Deployed(tmp_path / "deployed", environment)
    deployed.store = f"s3://{BUCKET}/{secrets.token_hex(8)}"
    deployed.set_up(gpus=2)
    yield deployed
    deployed.close()


@pytest.mark.slow
def test_a_run_uses_every_secret_and_leaves_none_of_them(
    deployed: Deployed,
    seaweed_server: SeaweedFS,
    secret_of: dict[str, str],
    prefect_environment: dict[str, str],
    tmp_path: Path,
) -> None:
    text = (ROOT / RECIPE).read_text(encoding="utf-8")
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(text.replace(OCR, REMOTE).replace("[launch]", LOGGERS), encoding="utf-8")
    parameters = deployed.parameters(recipe=str(recipe), iterations=1)
    deployed.wait(deployed.schedule("nft/tiny-nft", parameters), "COMPLETED")
    seaweed_server.fetch(deployed.store.rpartition("/")[2], tmp_path / "store")
    places = (tmp_path / "store", deployed.folder, Path(prefect_environment["PREFECT_HOME"]))
    assert {place for place in places if files_with(str(deployed.parameters()["run_id"]), place)} == {*places}
    assert list(deployed.folder.rglob("*.wandb"))
    assert eventually(lambda: not deployed.environments(), 60.0)
    found = secret_of | {"the store's": seaweed_server.secret, "the service's": TOKEN}
    assert {name: files_with(secret, *places) for name, secret in found.items()} == {name: [] for name in found}
