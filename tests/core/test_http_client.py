"""Clients over HTTP: what they send, and what is never shown."""

import pytest

from cosmos_rl_core.errors import ConfigError
from cosmos_rl_core.http_client import client, without_secrets


def test_a_token_is_sent_if_there_is_one_and_answers_are_asked_for_as_they_are():
    with client("secret", timeout=3) as named, client("") as nameless:
        assert named.headers["Authorization"] == "Bearer secret"
        assert "Authorization" not in nameless.headers
        assert {one.headers["Accept-Encoding"] for one in (named, nameless)} == {"identity"}
        assert named.timeout.read == 3


def test_user_password_and_query_of_a_url_are_not_shown():
    assert without_secrets("https://user:word@host:8080/a/b?key=1#part") == "https://host:8080/a/b"


@pytest.mark.parametrize("proxy", ["ftp://localhost:1", "socks9://localhost:1"])
def test_a_proxy_that_cannot_be_used_is_a_mistake_at_once(monkeypatch: pytest.MonkeyPatch, proxy: str):
    monkeypatch.setenv("ALL_PROXY", proxy)
    with pytest.raises(ConfigError, match="environment's proxies or certificates"):
        client("")
