"""The server of Prefect that profiles name."""

from pathlib import Path

import pytest

from cosmos_rl_core.errors import ConfigError
from flows.running.server import named_server
from tests.nested import DEEP


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (f"x = {DEEP}", "nested deeper than 32 levels"),
        ("active = ", "Invalid value"),
        ("active = 3", "expected the name of a profile"),
        ("active = 'a'\nprofiles = 3", "expected a table of profiles"),
        ("active = 'a'\n[profiles]\na = 3", "expected a table of profiles"),
    ],
    ids=["deep", "not TOML", "number", "no table", "profile without a table"],
)
def test_profiles_of_prefect_that_cannot_be_read_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, why: str
):
    (file := tmp_path / "profiles.toml").write_text(text, encoding="utf-8")
    monkeypatch.delenv("PREFECT_API_URL", raising=False)
    monkeypatch.delenv("PREFECT_PROFILE", raising=False)
    monkeypatch.setenv("PREFECT_PROFILES_PATH", str(file))
    with pytest.raises(ConfigError, match=why) as refused:
        named_server()
    assert str(file) in str(refused.value)
    file.write_text('active = "a"\n[profiles.a]\nPREFECT_API_URL = "http://x/api"\n[profiles.b]\n', encoding="utf-8")
    assert named_server() == "http://x/api"
    monkeypatch.setenv("PREFECT_PROFILE", "b")
    assert named_server() is None
    monkeypatch.setenv("PREFECT_PROFILE", "c")
    assert named_server() is None
