"""Signatures of a real run: made and checked by the command, and by openssl."""

import subprocess
from pathlib import Path

import pytest
from typer.testing import CliRunner

from flows.cli.app import app
from tests.e2e.flow_process import RUN_ID, Flows

# Of the worker that has the run of the tests of whole runs.
pytestmark = [pytest.mark.processes, pytest.mark.xdist_group("e2e-runs")]


def openssl(*words: object) -> str:
    return subprocess.run(["openssl", *map(str, words)], check=True, capture_output=True, text=True).stdout


@pytest.fixture
def keys(tmp_path: Path) -> tuple[Path, Path]:
    private, public = tmp_path / "key.pem", tmp_path / "public.pem"
    openssl("genpkey", "-algorithm", "ed25519", "-out", private)
    openssl("pkey", "-in", private, "-pubout", "-out", public)
    return private, public


def say(flows: Flows, *words: object) -> tuple[int, str]:
    ended = CliRunner().invoke(app, [str(word) for word in (words[0], RUN_ID, "--store", flows.store, *words[1:])])
    return ended.exit_code, ended.output


def test_a_signed_run_needs_one_public_key(flows: Flows, keys: tuple[Path, Path]):
    private, public = keys
    code, said = say(flows, "audit", "--quick", "--public-key", public)
    assert (code, "no head is signed by the key" in said) == (65, True)
    code, said = say(flows, "sign", "--key", private)
    assert (code, "signs head 3" in said) == (0, True)
    assert say(flows, "sign", "--key", private) == (code, said)
    code, said = say(flows, "audit", "--quick", "--public-key", public)
    assert (code, "signed up to head 3 by the key" in said) == (0, True)
    (signature,) = (flows.root / "heads").glob("*.sig")
    head = flows.root / "heads" / "00003.json"
    told = openssl("pkeyutl", "-verify", "-pubin", "-inkey", public, "-rawin", "-in", head, "-sigfile", signature)
    assert "Signature Verified Successfully" in told
    signature.write_bytes(bytes(64))
    code, said = say(flows, "audit", "--quick", "--public-key", public)
    assert (code, "is not a signature of its head" in said) == (65, True)
    openssl("genpkey", "-algorithm", "ed25519", "-out", private)
    openssl("pkey", "-in", private, "-pubout", "-out", public)
    code, said = say(flows, "audit", "--quick", "--json", "--public-key", public)
    assert (code, f"; signed by {signature.name.split('.')[1]}" in said) == (65, True)


def test_what_is_no_key_is_said(reference: Flows, keys: tuple[Path, Path], tmp_path: Path):
    private, public = keys
    openssl("genpkey", "-algorithm", "x25519", "-out", tmp_path / "other.pem")
    for words, reason in (
        (("sign", "--key", public), "no private key without a passphrase as PEM"),
        (("sign", "--key", tmp_path / "nowhere.pem"), "No such file"),
        (("sign", "--key", tmp_path / "other.pem"), "found X25519PrivateKey, expected an ed25519 key"),
        (("audit", "--public-key", private), "no public key as PEM"),
    ):
        code, said = say(reference, *words)
        assert (code, reason in said) == (64, True), said
