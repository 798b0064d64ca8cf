"""Ed25519 signatures of heads: ``heads/<n>.<key>.sig``, the 64 bytes that openssl writes and checks too.

With the public key, a person can check that a run is still as it was when the holder of the private key signed it. A
signature covers the bytes of one head and, by the chain of digests, everything up to it.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from cosmos_rl_core.canonical import sha256
from cosmos_rl_core.errors import ArtifactError, ConfigError, first_line
from cosmos_rl_core.storage import store
from flows.heads.heads import HEADS, number_in, read_heads, url_of
from flows.planning.plan import run_url
from flows.planning.steps import read_run

SIGNATURE = re.compile(r"\d{5,}\.([0-9a-f]{16})\.sig")
MAKE = "openssl genpkey -algorithm ed25519 -out key.pem && openssl pkey -in key.pem -pubout -out public.pem"


@dataclass(frozen=True)
class Signature:
    """A signature in a store."""

    url: str
    head: int
    """Number of the head that is signed."""
    sha256: str
    """Digest of the head, which the signer can keep."""

    def __str__(self) -> str:
        return f"{self.url}: signs head {self.head}, {self.sha256}"


def sign(store_url: str, run_id: str, key_file: Path) -> Signature:
    """Sign the newest head of a run. An equal signature is left as it is.

    Raises :class:`ConfigError` if there is no such run, no head yet, or no private key in the file, and
    :class:`ArtifactError` if heads are damaged, or something else is in the signature's place.
    """
    read_run(store_url, run_id)
    root, key = run_url(store_url, run_id), _private_key(key_file)
    newest = max((head.number for head, _ in read_heads(root)), default=None)
    if newest is None:
        raise ConfigError(f"{run_id} has no head yet: one is written after each iteration")
    data = store.read(url_of(root, newest))
    url = signature_url(root, newest, key.public_key())
    if not store.put_if_absent(url, key.sign(data)):
        raise ArtifactError(f"{url} is there and is no signature of its head by this key; remove it, and sign again")
    return Signature(url, newest, sha256(data))


def signed_up_to(
    root: str, key: Ed25519PublicKey, heads: Mapping[int, str]
) -> tuple[int | None, list[tuple[str, str]]]:
    """Return the number of the newest head that a key has signed, and pairs of a faulty signature's URL and its fault.

    ``heads`` are the digests of the heads that :func:`read_heads` yields. A signature of another file proves nothing
    about this run: a forger may keep a signed head outside the chain.
    """
    newest, wrong = None, list[tuple[str, str]]()
    ending = f".{key_id(key)}.sig"
    for name in sorted(name for name in store.names(store.join(root, HEADS)) if name.endswith(ending)):
        url, number = store.join(root, HEADS, name), number_in(name, ending)
        if number is None or number not in heads:
            wrong.append((url, "signs no head of this run's chain"))
            continue
        data = store.read_if_exists(url_of(root, number)) or b""
        try:
            key.verify(store.read(url), data)
        except InvalidSignature:
            wrong.append((url, "is not a signature of its head by this key"))
            continue
        if sha256(data) != heads[number]:
            wrong.append((url, "its head was replaced during the audit"))
            continue
        newest = number
    return newest, wrong


def signers(root: str) -> list[str]:
    """Return the ids of the keys that signed a head, as the names of signatures say."""
    found = map(SIGNATURE.fullmatch, store.names(store.join(root, HEADS)))
    return sorted({match[1] for match in found if match})


def signature_url(root: str, number: int, key: Ed25519PublicKey) -> str:
    """Return the URL of the signature of a head by a key."""
    return url_of(root, number).removesuffix(".json") + f".{key_id(key)}.sig"


def key_id(key: Ed25519PublicKey) -> str:
    """Return the first 16 digits of the sha256 of a public key's 32 bytes."""
    return sha256(key.public_bytes_raw())[:16]


def public_key(file: Path) -> Ed25519PublicKey:
    """Return the public key in a PEM file. Raises :class:`ConfigError` if it holds none."""
    try:
        key = serialization.load_pem_public_key(file.read_bytes())
    except (OSError, ValueError, UnsupportedAlgorithm) as error:
        raise ConfigError(f"{file}: no public key as PEM ({first_line(error)}); make one: {MAKE}") from error
    if not isinstance(key, Ed25519PublicKey):
        raise ConfigError(f"{file}: found {type(key).__name__.strip('_')}, expected an ed25519 key; make one: {MAKE}")
    return key


def _private_key(file: Path) -> Ed25519PrivateKey:
    try:
        key = serialization.load_pem_private_key(file.read_bytes(), password=None)
    except (OSError, ValueError, TypeError, UnsupportedAlgorithm) as error:
        why = first_line(error)
        raise ConfigError(f"{file}: no private key without a passphrase as PEM ({why}); make one: {MAKE}") from error
    if not isinstance(key, Ed25519PrivateKey):
        raise ConfigError(f"{file}: found {type(key).__name__.strip('_')}, expected an ed25519 key; make one: {MAKE}")
    return key
