"""Settings of the service: cosmos-rl's file as it is, ours next to it, and every mistake at once."""

import os
import re
import resource
from pathlib import Path
from typing import Any

import pytest

from cosmos_rl_core.errors import ConfigError
from cosmos_rl_core.reward_service import config, server
from cosmos_rl_core.reward_service.scorers import Devices, scorer_of
from cosmos_rl_core.rewards import unified_reward
from tests import running_service as running
from tests.pages import ROOT

UPSTREAM = """
host = "localhost"
port = 8080
redis_host = "localhost"
redis_port = 6379
no_latent_decoder = false

[[reward_args]]
reward_type = "ocr"
venv_python = "python"
model_path = "models"
download_path = "/workspace"
setup_script = "setup/ocr.sh"
dtype = "float16"
device = "cpu"
work_dir = "evaluation_results"
tmp_dir = "/tmp"
endpoint_url = ""
endpoint_api_key = ""
enable = true

[[reward_args]]
reward_type = "a_reward_of_somebody"
enable = false

[decode_args]
model_path = "https://huggingface.co/Wan-AI/Wan2.1-T2V-1.3B/resolve/main/Wan2.1_VAE.pth"
dtype = "float16"
device = "cuda"
chunk_duration = 81
temporal_window = 16
load_mean_std = false
wan2pt2_model_path = ""
wan2pt2_credential_path = ""
"""


def read(tmp_path: Path, text: str | dict[str, Any], environment: dict[str, str] | None = None) -> config.Config:
    if isinstance(text, dict):
        path = running.write(tmp_path, text)
    else:
        path = tmp_path / "rewards.toml"
        path.write_text(text)
    return config.read(path, environment or {})


def test_upstreams_file_is_read_unchanged_and_settings_without_effect_are_named(tmp_path: Path):
    found = read(tmp_path, UPSTREAM)
    assert [served.names for served in found.served] == [("ocr",)]
    assert (found.settings.host, found.settings.port, found.token) == ("localhost", 8080, "")
    named = {" ".join(note.split(" has no effect")[0].split()) for note in found.notes}
    assert named == {
        *("redis_host", "redis_port", "ocr: setup_script", "ocr: download_path", "ocr: work_dir", "ocr: tmp_dir"),
        *("ocr: model_path", "ocr: dtype", "ocr: endpoint_url", "ocr: endpoint_api_key"),
        *(f"decode_args.{name}" for name in ("chunk_duration", "temporal_window", "load_mean_std")),
        "decode_args.wan2pt2_credential_path",
    }


def test_the_file_may_begin_with_a_mark_of_the_byte_order(tmp_path: Path):
    (tmp_path / "rewards.toml").write_bytes(UPSTREAM.encode("utf-8-sig"))
    assert config.read(tmp_path / "rewards.toml", {}).settings.host == "localhost"


def test_a_service_compares_texts_as_cosmos_rl_does_unless_told_otherwise(tmp_path: Path):
    text = '[[reward_args]]\nreward_type = "ocr"\ndevice = "cpu"\n'
    plain, told = (read(tmp_path, text + more).served[0] for more in ("", 'options = { match = "distance" }\n'))
    assert (plain.options.identity()["match"], "match" in told.options.identity()) == ("contained", False)


def test_upstreams_place_of_weights_is_the_plugins_model(tmp_path: Path):
    text = '[[reward_args]]\nreward_type = "clipscore"\nmodel_path = "weights"\ndtype = "float32"\n'
    (served,) = read(tmp_path, text).served
    assert (served.plugin, served.names, served.unused) == ("clip_score", ("clip_score", "clipscore"), ("dtype",))
    assert served.options.model_dump()["model"] == "weights"


def test_upstreams_judge_is_asked_at_its_endpoint_and_its_key_is_in_no_setting(tmp_path: Path):
    (tmp_path / "rubric.txt").write_text("Rate {prompt}")
    judge = {"endpoint_url": "http://judge:8000/v1", "endpoint_api_key": "sk-1"}
    rubric = {"rubric_file": str(tmp_path / "rubric.txt")}
    found = read(tmp_path, running.settings(tmp_path, {"reward_type": "unified_reward", **judge, "options": rubric}))
    (served,) = found.served
    assert (served.options.model_dump()["url"], served.unused) == ("http://judge:8000/v1", ())
    assert "sk-1" not in repr(found) + served.options.model_dump_json()
    scorer = scorer_of(served, found, Devices(found), tmp_path, "")
    (start,) = vars(scorer.pool)["_starts"]
    options = unified_reward.Options.model_validate(start.setup["options"])
    unified_reward.Reward(options, start.environment).check_service()
    assert start.environment["OPENAI_API_KEY"] == "sk-1"


def test_every_mistake_of_the_settings_is_reported_with_the_nearest_name(tmp_path: Path):
    with pytest.raises(ConfigError) as refused:
        read(tmp_path, UPSTREAM.replace("redis_port", "redis_prot").replace("temporal_window", "temporal_windows"))
    assert "redis_prot: unknown key; did you mean 'redis_port'?" in str(refused.value)
    assert "decode_args.temporal_windows: unknown key; did you mean 'temporal_window'?" in str(refused.value)


def test_scorers_that_cannot_be_served_are_all_named(tmp_path: Path):
    scorers = (
        {"reward_type": "probe_too"},
        {"reward_type": "probe"},
        {"reward_type": "pickscroe"},
        {"reward_type": "jpeg", "options": {"qualty": 3}},
    )
    with pytest.raises(ConfigError) as refused:
        read(tmp_path, running.settings(tmp_path, *scorers))
    assert "reward_args.1: reward_args.0 serves 'probe' too; give one of them another `name`" in str(refused.value)
    assert "reward_args.2: unknown reward 'pickscroe'" in str(refused.value)
    assert "reward_args.3: options of jpeg:\n      qualty: unknown key; did you mean 'quality'?" in str(refused.value)


def test_a_plugin_is_found_by_its_other_names_and_served_twice_under_names_of_ones_own(tmp_path: Path):
    scorers = ({"reward_type": "probe_too", "name": "one"}, {"reward_type": "probe", "name": "two"})
    found = read(tmp_path, running.settings(tmp_path, *scorers))
    assert [(served.plugin, served.names) for served in found.served] == [("probe", ("one",)), ("probe", ("two",))]


def test_the_page_shows_settings_that_work_and_names_every_field(tmp_path: Path):
    page = (ROOT / "docs" / "reward-service.md").read_text(encoding="utf-8")
    (shown,) = re.findall(r"```toml\n# rewards.toml\n(.*?)```", page, re.DOTALL)
    assert [served.plugin for served in read(tmp_path, shown).served] == ["ocr", "jpeg"]
    fields = {**config.ServiceSettings.model_fields, **config.RewardArgs.model_fields, **config.Settings.model_fields}
    named = set(re.findall(r"[\w]+", " ".join(re.findall(r"`([^`]*)`", page))))
    assert {name for name in fields if name not in named} - {"reward_args", "service"} == set()


def test_a_file_without_scorers_is_refused(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"no scorer: expected a \[\[reward_args\]\] table that is enabled"):
        read(tmp_path, "port = 1\n")


def test_other_machines_are_let_in_only_with_a_token(tmp_path: Path):
    values = running.settings(tmp_path) | {"host": "0.0.0.0"}
    with pytest.raises(ConfigError, match="lets other machines in and there is no token"):
        read(tmp_path, values)
    assert read(tmp_path, values, {config.TOKEN: " secret\n"}).token == "secret"


def test_a_token_comes_from_a_file_and_never_shows(tmp_path: Path):
    (tmp_path / "token").write_text("from-a-file\n")
    found = read(tmp_path, running.settings(tmp_path, token_file=str(tmp_path / "token")))
    assert found.token == "from-a-file"
    assert "from-a-file" not in repr(found)
    (tmp_path / "token").write_text("\n")
    with pytest.raises(ConfigError, match="holds no token"):
        read(tmp_path, running.settings(tmp_path, token_file=str(tmp_path / "token")))
    with pytest.raises(ConfigError, match="characters that no HTTP header takes"):
        read(tmp_path, running.settings(tmp_path), {config.TOKEN: "two words"})


def test_processes_have_a_device_each_in_turn(tmp_path: Path):
    devices = Devices(read(tmp_path, running.settings(tmp_path), {"CUDA_VISIBLE_DEVICES": "3,5"}))
    name = "CUDA_VISIBLE_DEVICES"
    assert devices.environments("cuda", (), 3) == [{name: "3"}, {name: "5"}, {name: "3"}]
    assert devices.environments("cuda", (), 1) == [{name: "5"}]
    assert devices.environments("cuda", ("7",), 2) == [{name: "7"}, {name: "7"}]
    assert devices.environments("cuda:1", (), 1) == [{name: "5"}]
    assert devices.environments("cpu", (), 1) == [{name: ""}]
    with pytest.raises(ConfigError, match="this service has the GPUs 3, 5, from 0 on"):
        devices.environments("cuda:2", (), 1)
    with pytest.raises(ConfigError, match=r"device = 'cuda:1' and gpus = \['7'\] both say where it computes"):
        devices.environments("cuda:1", ("7",), 1)


@pytest.mark.parametrize("device", ["gpu", "cuda:", "cuda:x"])
def test_an_unknown_device_is_refused_when_the_file_is_read(tmp_path: Path, device: str):
    with pytest.raises(ConfigError, match=rf"reward_args.0.device: .*\(found '{device}'\)"):
        read(tmp_path, running.settings(tmp_path, {"reward_type": "probe", "device": device}))


def test_a_service_may_open_as_many_files_as_the_system_lets_it():
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit[0] - 1, limit[1]))
    try:
        server.allow_files()
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (limit[1], limit[1])
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limit)


def test_without_gpus_scorers_choose_the_device(tmp_path: Path):
    devices = Devices(read(tmp_path, running.settings(tmp_path), {"CUDA_VISIBLE_DEVICES": ""}))
    assert devices.environments("cuda", (), 1) == [{}]


def test_the_service_reads_no_environment_but_the_one_it_is_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(os.environ, config.TOKEN, "of the machine")
    assert read(tmp_path, running.settings(tmp_path)).token == ""
