"""What commands print."""

import json

import pytest

from flows.cli.base.printing import print_json
from tests.flows.showing.test_hidden_characters import HIDDEN, raw


def test_json_for_scripts_has_escapes_that_read_as_the_same_value(capsys: pytest.CaptureFixture[str]):
    value = {f"name {HIDDEN}": [HIDDEN, "é 日 \U0001f600", 'quotes " and \\u202e']}
    print_json(value)
    said = capsys.readouterr().out
    assert raw(said) == []
    assert json.loads(said) == value
    assert "\\u202eb\\u009b2J\\u001b[2J\\u007f\\u2066c\\u2028" in said
    assert "é 日 \U0001f600" in said
