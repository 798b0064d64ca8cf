"""Sealed JSON: every changed byte is found, and what was written for something else is refused."""

import json

import pytest

from cosmos_rl_core.canonical import canonical_json, digest
from cosmos_rl_core.errors import ArtifactError
from cosmos_rl_core.storage.sealed import seal, unseal

BODY = {"score": 0.625, "ids": ["a-000", "b-001"], "nested": {"none": None, "n": 2}, "é": "日"}


def test_a_body_comes_back_as_it_was():
    assert unseal(seal("manifest", BODY), "manifest", "/m.json") == BODY


def test_a_sealed_file_is_the_canonical_json_of_its_body_and_digest():
    body = BODY | {"format": 1, "kind": "manifest"}
    assert seal("manifest", BODY) == canonical_json({"body": body, "sha256": digest(body)})


def test_no_byte_can_be_changed_added_or_lost():
    data = seal("manifest", BODY)
    damaged = [data[:i] + bytes([data[i] ^ bit]) + data[i + 1 :] for i in range(len(data)) for bit in (1, 32, 128)]
    damaged += [data[:i] for i in range(len(data))] + [data + b" ", b" " + data, data + data, data.replace(b",", b", ")]
    for one in damaged:
        with pytest.raises(ArtifactError, match=r"^/m\.json (is damaged|holds|has format)"):
            unseal(one, "manifest", "/m.json")


def test_a_file_that_is_not_sealed_is_called_damaged():
    for data in (b"", b"null", b"[]", b"{}", b"7", b"[" * 100_000, b'{"body":1,"sha256":1}', b"NaN"):
        refused(data)


def refused(data: bytes):
    with pytest.raises(ArtifactError, match=r"^/m\.json is damaged.*; restore it from a copy$"):
        unseal(data, "manifest", "/m.json")


def test_one_kind_is_not_read_as_another():
    with pytest.raises(ArtifactError, match=r"/m\.json holds a 'layout', expected a 'manifest'"):
        unseal(seal("layout", BODY), "manifest", "/m.json")


@pytest.mark.parametrize("form", [2, 0, "1", None])
def test_a_format_that_is_not_known_names_the_newer_version(form: object):
    body = json.loads(seal("plan", BODY))["body"] | {"format": form}
    data = canonical_json({"body": body, "sha256": digest(body)})
    with pytest.raises(ArtifactError, match=r"has format .*reads formats up to 1: a newer version wrote it"):
        unseal(data, "plan", "/plan.json")
