"""The command that signs a run."""

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from cosmos_rl_core.canonical import sha256
from cosmos_rl_core.errors import ArtifactError
from cosmos_rl_core.storage import store
from flows.heads.heads import url_of
from flows.heads.signatures import sign
from tests.flows.by_hand import whole_run
from tests.flows.cli.test_json import asked, require_keys


def test_a_signature_is_named_with_the_digest_to_keep(recipe, tmp_path):
    run = whole_run(recipe, tmp_path)
    key = tmp_path / "key.pem"
    private = Ed25519PrivateKey.generate()
    key.write_bytes(private.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    words = ("sign", "hand", "--key", key, "--store", run.store_url)
    found = asked(*words)
    require_keys(found, "sign")
    assert found["sha256"] == sha256(store.read(url_of(run.url, found["head"])))
    assert store.size(found["url"]) == 64
    assert asked(*words) == found
    store.write(found["url"], bytes(64))
    with pytest.raises(ArtifactError, match="is no signature of its head by this key; remove it, and sign again"):
        sign(run.store_url, "hand", key)
