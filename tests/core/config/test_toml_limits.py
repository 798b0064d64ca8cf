"""Values beyond the limits of TOML files: all of them in one message, each with its place and what to do."""

import pytest

from cosmos_rl_core.config import toml
from cosmos_rl_core.errors import MAX_MISTAKES

DEPTH, LONG = toml.MAX_DEPTH, "x" * (toml.MAX_TEXT + 1)


def refusal(text: str) -> str:
    with pytest.raises(ValueError, match=r"expected|flatten") as caught:
        toml.loads(text)
    return str(caught.value)


def test_all_values_beyond_the_limits_are_named_at_once():
    table = ".".join("abc" + "d" * (DEPTH - 3))
    text = f"[policy]\nname = '{LONG}'\nids = [1, {2**63}]\n[{table}]\ne = 1\nf = [2]\n[train]\nseed = -{2**63 + 1}\n"
    first, *mistakes = refusal(text).split("\n    ")
    assert first == "4 values are beyond what a file may hold:"
    assert mistakes == [
        f"policy.name has {len(LONG)} characters; expected at most {toml.MAX_TEXT}: shorten the text",
        "train.seed is a whole number of more than 64 bits; expected at most 2^63 - 1, and at least -2^63",
        "policy.ids.1 is a whole number of more than 64 bits; expected at most 2^63 - 1, and at least -2^63",
        f"{table} is nested deeper than {DEPTH} levels; flatten it, so that at most {DEPTH} are inside each other",
    ]


@pytest.mark.parametrize("digits", ["9" * 5000, "1_0" * 5000, "9" * 41])
def test_a_whole_number_is_named_however_many_digits_it_has(digits: str):
    why = "is a whole number of more than 64 bits; expected at most 2^63 - 1, and at least -2^63"
    assert refusal(f"a = 1\n[train]\nseed = {digits}\nname = '{digits}'") == f"train.seed {why}"
    text = f"seeds = [1,-{digits}, {{ x = {digits}}}] # many\n[train]\nname = '{LONG}'\nshare = 0.{digits}"
    assert refusal(text).split("\n    ")[1:] == [
        f"seeds.1 {why}",
        f"train.name has {len(LONG)} characters; expected at most {toml.MAX_TEXT}: shorten the text",
        f"seeds.2.x {why}",
    ]


def test_a_single_value_is_named_alone():
    assert refusal(f"a.b = {'[' * DEPTH}{']' * DEPTH}").startswith("a.b.0.0.")
    assert "\n" not in refusal(f"a = '{LONG}'")


def test_a_message_shows_many_values_and_long_keys_by_their_beginnings():
    many = "\n".join(f"'{number}{'k' * 1000}' = {2**63}" for number in range(2 * MAX_MISTAKES))
    lines = refusal(many).split("\n    ")
    assert (len(lines), lines[-1]) == (MAX_MISTAKES + 2, f"and {MAX_MISTAKES} more")
    assert max(map(len, lines)) < 2 * toml.SHOWN
