"""Heads and signatures against forgers, and files next to heads and runs."""

import shutil
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from flows.auditing.audit import audit
from flows.auditing.flow import audit as audit_flow
from flows.heads.heads import Heads, read_heads
from flows.heads.signatures import key_id, sign, signers
from flows.library.states import states
from flows.planning.steps import read_run
from tests.flows.proved import RUN_ID, Forger, Proved, told

REWARD = "iterations/0001/reward-ocr"


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    proved = Proved(tmp_path_factory.mktemp("proved"))
    proved.run()
    return proved.store


@pytest.fixture
def forger(finished: Path, tmp_path: Path) -> Forger:
    """Somebody at work on a copy."""
    return Forger(shutil.copytree(finished, tmp_path / "store"))


@pytest.mark.parametrize("iteration", [None, 1])
def test_a_signature_outside_the_chain_says_nothing_of_the_run(forger: Forger, tmp_path: Path, iteration: int | None):
    """The signed head and its signature are kept under another number, or behind a gap; all else is forged."""
    private, file = Ed25519PrivateKey.generate(), tmp_path / "key.pem"
    file.write_bytes(private.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    assert sign(str(forger.store), RUN_ID, file).head == 3
    assert audit(str(forger.store), RUN_ID, signed_by=private.public_key()).faults == []
    heads, key = forger.root / "heads", key_id(private.public_key())
    signed = [heads / f"00003.{ending}" for ending in ("json", f"{key}.sig")]
    kept = [path.read_bytes() for path in signed]
    signed[1].unlink()
    if iteration is not None:
        for number in (2, 3):
            (heads / f"{number:05d}.json").unlink()
    forger.manifest(REWARD, lambda body: body["summary"].update(seconds=1.0))
    forger.seal()
    for path, data in zip(signed, kept, strict=True):
        (heads / path.name.replace("00003", "003" if iteration is None else "00003")).write_bytes(data)
    found = audit(str(forger.store), RUN_ID, iteration, signed_by=private.public_key())
    pairs = {(fault.field, fault.what) for fault in found.faults}
    assert ("signature", "signs no head of this run's chain") in pairs
    assert (
        "signature",
        f"no head is signed by the key {key}; signed by {key if iteration else 'nobody'}",
    ) in pairs
    assert found.signed == ""


def test_strange_files_next_to_heads_end_no_audit(forger: Forger):
    heads = forger.root / "heads"
    (heads / "x.json").write_bytes(b"{}")
    (heads / "00004.json").mkdir()
    (heads / "y.sig").write_bytes(b"")
    assert told(forger) == [
        f"heads heads: cannot read {heads / '00004.json'}: Is a directory; let this user read it, or repair or remove "
        "the file or folder there",
        "heads/x.json file: no head has such a name: 00000.json, ...",
    ]
    assert signers(str(forger.root)) == []


def test_the_flow_leaves_out_folders_that_are_no_runs(forger: Forger):
    (forger.root.parent / ".cache").mkdir()
    (forger.root.parent / "notes.txt").write_text("mine", encoding="utf-8")
    assert str(audit_flow.fn(store=str(forger.store)).message).startswith("nothing is wrong with 1 run")


def test_iterations_without_new_records_write_no_head_and_the_end_names_the_rest(forger: Forger):
    run = read_run(str(forger.store), RUN_ID)
    heads, before = Heads(run), list(read_heads(run.url))
    (forger.root / "numerics" / "later.json").write_bytes(b"{}")
    for k in range(run.recipe.train.num_iterations):
        heads.add(manifest for state in states(run) if state.step.k == k and (manifest := state.manifest))
        heads.write(k)
    assert list(read_heads(run.url)) == before
    heads.write(None)
    *same, (last, _) = read_heads(run.url)
    assert same == before
    assert [path.rpartition("/")[2] for path in last.records] == ["later.json"]
