"""Checks of a run's heads: their chain, the records that they name, and digests and keys that somebody kept."""

from collections.abc import Mapping, Set
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from hashlib import sha256

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from cosmos_rl_core.errors import UnreadableError
from cosmos_rl_core.storage import store
from flows.auditing.checks.faults import Findings
from flows.heads import signatures
from flows.heads.heads import HEADS, number_in, read_heads, url_of
from stages.artifacts.manifest import Manifest
from stages.artifacts.records import place_of

AT_ONCE = 8
"""Records that are read at once."""


@dataclass(frozen=True)
class Chain:
    """Iterations and records that the heads of a run name."""

    ended: Set[int | None]
    """The iterations after which heads were written; None for the end of the run."""
    records: Mapping[str, str]
    """Digests of records by their path in the store."""

    def names(self, made: Manifest) -> bool:
        """Return whether a head names the manifest of an artifact."""
        return place_of(Manifest.url(made.slot, made.generation)) in self.records


def check(run_url: str, kept: str | None, key: Ed25519PublicKey | None, findings: Findings) -> Chain | None:
    """Compare each record with the digest that heads name, and the heads with a digest and a public key.

    ``kept`` is the digest of a head that somebody kept; ``key`` belongs to somebody who must have signed a head.
    Returns the iterations and records that the heads name; None if some heads are missing.
    """
    named: dict[str, str] = {}
    ended: set[int | None] = set()
    chain: dict[int, str] = {}
    with findings.catching(store.join(run_url, HEADS), "heads"):
        for head, found in read_heads(run_url):
            findings.head = f"{head.number}: {found}"
            ended.add(head.iteration)
            chain[head.number] = found
            for path, expected in head.records.items():
                if named.setdefault(path, expected) != expected:
                    findings.add(url_of(run_url, head.number), path, "an earlier head names another digest")
    _check_kept(run_url, kept, chain, findings)
    if key is not None:
        _check_signatures(run_url, key, chain, findings)
    urls = {store.join(findings.root, path): expected for path, expected in named.items()}
    with ThreadPoolExecutor(AT_ONCE) as pool:
        for (url, expected), digest in zip(urls.items(), pool.map(_digest, urls), strict=True):
            if digest is None:
                findings.add(url, "file", "missing; a head names it")
            elif digest != expected:
                findings.add(url, "bytes", f"sha256 {digest}, a head names {expected}")
    return None if _has_gaps(run_url, findings) else Chain(ended, named)


def _check_kept(run_url: str, kept: str | None, chain: Mapping[int, str], findings: Findings) -> None:
    if kept is not None and kept not in chain.values():
        findings.add(store.join(run_url, HEADS), "digest", f"no head has the digest {kept}")


def _check_signatures(run_url: str, key: Ed25519PublicKey, chain: Mapping[int, str], findings: Findings) -> None:
    newest, wrong = signatures.signed_up_to(run_url, key, chain)
    for url, what in wrong:
        findings.add(url, "signature", what)
    name = signatures.key_id(key)
    if newest is None:
        others = ", ".join(signatures.signers(run_url)) or "nobody"
        told = f"no head is signed by the key {name}; signed by {others}"
        findings.add(store.join(run_url, HEADS), "signature", told)
    else:
        findings.signed = f"signed up to head {newest} by the key {name}"


def _has_gaps(run_url: str, findings: Findings) -> bool:
    """Add a fault for each missing head, and for each JSON file whose name no head can have.

    Returns whether a head is missing.
    """
    folder, found = store.join(run_url, HEADS), set[int]()
    for name in store.names(folder):
        if name.endswith(".json"):
            number = number_in(name, ".json")
            if number is None:
                findings.add(store.join(folder, name), "file", "no head has such a name: 00000.json, ...")
            else:
                found.add(number)
    missing = sorted({*range(max(found, default=-1) + 1)} - found)
    for number in missing:
        findings.add(url_of(run_url, number), "file", "missing, but later heads are there")
    return bool(missing)


def _digest(url: str) -> str | None:
    """Return the digest of a record; None if there is no such file."""
    try:
        data = store.read_if_exists(url)
    except UnreadableError:
        return None
    return None if data is None else sha256(data).hexdigest()
