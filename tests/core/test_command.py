"""The command before the command line is loaded."""

import pytest

from cosmos_rl_core import command
from cosmos_rl_core.errors import ConfigError
from tests.flows.showing.test_hidden_characters import HIDDEN, SHOWN


def test_errors_before_the_command_line_is_loaded_are_escaped(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    def refuse() -> None:
        raise ConfigError(f"found {HIDDEN}")

    monkeypatch.setattr(command, "check_packages", refuse)
    with pytest.raises(SystemExit):
        command.main()
    assert capsys.readouterr().err == f"found {SHOWN}\n"
