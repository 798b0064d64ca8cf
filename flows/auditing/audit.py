"""Audit of a run: every file that its artifacts reach, and everything that follows from these files."""

import json
import re
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from cosmos_rl_core.errors import ArtifactError, ConfigError, first_line
from cosmos_rl_core.storage import store
from flows.auditing import beside, chain, contents, planned
from flows.auditing.faults import Findings
from flows.auditing.heads import HEADS
from flows.auditing.slot import Slot
from flows.ledger.pages import LEDGER, Totals, numbers, pages
from flows.ledger.pages import url_of as url_of_page
from flows.planning.checks import misnamed
from flows.planning.plan import PLAN_FILE, run_url
from flows.planning.run import Run
from flows.planning.steps import Step, open_run
from flows.post_train import TRAINERS, steps
from flows.running.wave import NUMERICS
from flows.watching.metrics import FILE
from stages.artifacts.files import BLOCK_BYTES
from stages.artifacts.manifest import Manifest
from stages.artifacts.pool import INDEX
from stages.artifacts.records import FileEntry, Pinned, place_of
from stages.artifacts.request import Input
from stages.artifacts.slots import one_look

AT_ONCE = 8
"""Files that are hashed at once."""
DIGEST = re.compile("[0-9a-f]{64}")
MANIFEST_AWAY = "the manifest that it names is not there"


def audit(
    store_url: str,
    run_id: str,
    iteration: int | None = None,
    *,
    head: str | None = None,
    signed_by: Ed25519PublicKey | None = None,
    quick: bool = False,
) -> Findings:
    """Return what is wrong with a run, and how much was looked at. Changes nothing.

    ``iteration`` looks at one iteration and at what it reads; ``quick`` compares sizes and hashes no file.
    ``head`` is the digest of a head that somebody kept: one of the run must have it. ``signed_by`` is the key of
    somebody who must have signed one.
    Raises :class:`ConfigError` if there is no such run or iteration, and for a head that is no digest.
    """
    if head is not None and not DIGEST.fullmatch(head):
        raise ConfigError(
            f"--head {head}: expected the 64 hexadecimal digits that `cosmos-flows audit` prints as the newest head's"
        )
    findings = Findings(store.absolute(store_url).rstrip("/"))
    url = store.join(run_url(store_url, run_id), PLAN_FILE)
    try:
        run = open_run(store_url, run_id)
    except ArtifactError as error:
        findings.add(url, "plan", first_line(error))
        return findings
    except ConfigError:
        if misnamed(run_id) or not store.names(run_url(store_url, run_id)):
            raise
        findings.add(url, "file", "missing, but there are other files of the run")
        return findings
    with one_look():
        return Audit(run, findings, head, signed_by, quick=quick).look(iteration)


class Audit:
    """A walk from the steps of a run to everything that they were made from."""

    def __init__(
        self, run: Run, findings: Findings, kept: str | None, signed_by: Ed25519PublicKey | None, *, quick: bool
    ) -> None:
        self._run, self._findings, self._kept, self._signed_by, self._quick = run, findings, kept, signed_by, quick
        self._slots: dict[str, Slot] = {}

    def look(self, iteration: int | None) -> Findings:
        """Look at all steps, or at those of one iteration, and return what was found."""
        every = steps(self._run)
        chosen = [step for step in every if iteration in (None, step.k)]
        if not chosen:
            last = max(step.k for step in every if step.k is not None)
            run_id = self._run.plan.run_id
            raise ConfigError(
                f"{run_id} has no iteration {iteration}; its iterations and policy versions are 0 to {last}"
            )
        reached = [step for step in chosen if self._look_at(step.slot).standing is not None]
        for step in reached:
            self._follow_reference(step.slot)
            self._follow(self._slots[step.slot].standing, whole=iteration is None)
        ended = chain.check(self._run.url, self._kept, self._signed_by, self._findings)
        self._look_at_ledger()
        self._look_beside(every)
        if iteration is None:
            if ended is not None:
                self._look_for_missing_heads(every, ended)
            self._look_for_missing(every)
            self._look_at_metrics(every)
        pairs = planned.check(reached, lambda url: self._look_at(self._here(url)), self._findings)
        self._look_at_numerics()
        self._hash(self._listed())
        for made, request in pairs:
            contents.check(made, request, self._at, self._findings)
        self._findings.artifacts = sum(len(slot.manifests) for slot in self._slots.values())
        return self._findings

    def _look_at(self, url: str) -> Slot:
        if url not in self._slots:
            self._slots[url] = Slot(url, self._findings)
        return self._slots[url]

    def _follow_reference(self, url: str) -> None:
        """Look at the slot that the artifact of another slot is in."""
        found = self._slots[url].standing
        if found is not None and found.referred:
            self._look_at(self._here(found.slot))

    def _follow(self, manifest: Manifest | None, *, whole: bool) -> None:
        """Look at what an artifact was made from, and with ``whole`` at what that was made from."""
        if manifest is None:
            return
        url = Manifest.url(manifest.slot, manifest.generation)
        for role, sources in manifest.inputs.items():
            for number, source in enumerate(sources):
                slot_url, field = self._here(source.url), f"inputs.{role}[{number}]"
                known = slot_url in self._slots
                found = self._look_at(slot_url).named(source.manifest)
                if found is None:
                    self._findings.add(url, field, f"{self._findings.place(slot_url)}: {MANIFEST_AWAY}")
                    continue
                self._compare(url, field, source, found)
                if whole and not known:
                    self._follow(found, whole=True)

    def _compare(self, url: str, field: str, source: Input, found: Manifest) -> None:
        for name, expected in (("fingerprint", found.fingerprint), ("content", found.part_content(*source.parts))):
            if getattr(source, name) != expected:
                self._findings.add(url, f"{field}.{name}", f"not that of {self._findings.place(found.slot)}")

    def _at(self, source: Input) -> Input:
        """Return an input where it is now."""
        return source.model_copy(update={"url": self._here(source.url)})

    def _here(self, url: str) -> str:
        """Return where a slot is now: the store may have been moved since it was written down."""
        moved = store.join(self._findings.root, place_of(url))
        return moved if place_of(url) != url and store.size(Manifest.url(moved, 1)) is not None else url

    def _look_for_missing(self, every: list[Step]) -> None:
        """Add the steps without an artifact that others come after."""
        made = [step.slot for step in every if self._slots[step.slot].standing is not None]
        last = max((i for i, step in enumerate(every) if step.slot in made), default=-1)
        for step in every[:last]:
            slot = self._slots[step.slot]
            if slot.standing is None and not slot.ended and step.wave != every[last].wave:
                self._findings.add(Manifest.url(step.slot, 1), "file", f"missing: {every[last].name} came after it")

    def _look_at_numerics(self) -> None:
        # What runs share was made under the numerics of the run that made it.
        own = (slot for slot in self._slots.values() if place_of(slot.url).startswith(place_of(self._run.url)))
        stages = {found.stage for slot in own for found in slot.manifests.values()}
        folder = store.join(self._run.url, NUMERICS)
        stages |= {name.removesuffix(".json") for name in store.names(folder) if name.endswith(".json")}
        for stage in sorted(stages):
            url = store.join(folder, f"{stage}.json")
            with self._findings.catching(url, "numerics"):
                if Pinned.read(url, stage) is None:
                    raise ArtifactError(f"missing, but there are artifacts of {stage}")

    def _look_beside(self, every: Iterable[Step]) -> None:
        """Look at decisions on warnings, and at the scorers of services."""
        looked = [(step, self._slots[step.slot]) for step in every if step.slot in self._slots]
        updates = {step.k: slot.standing for step, slot in looked if step.kind == "update"}
        for step, slot in looked:
            if step.kind == "warn":
                beside.check_decisions(slot, updates.get(step.k), self._findings)
        scored = [slot.standing for _, slot in looked]
        rewards = [one for one in scored if one is not None and one.stage in ("reward", "judge") and not one.referred]
        beside.check_scorers(self._run, rewards, self._findings)

    def _look_at_metrics(self, every: Iterable[Step]) -> None:
        url = store.join(self._run.url, FILE)
        with self._findings.catching(url, "lines"):
            contents.check_metrics(self._run, every, store.read_if_exists(url), url, self._findings)

    def _look_for_missing_heads(self, every: Iterable[Step], ended: set[int | None]) -> None:
        """Add heads that are missing after an iteration that others follow, and after the report."""
        folder = store.join(self._run.url, HEADS)
        made = {step.k for step in every if step.kind in TRAINERS and self._slots[step.slot].standing is not None}
        unnamed = [
            f"iteration {k}" for k in sorted(k for k in made if k is not None) if k + 1 in made and k not in ended
        ]
        if None not in ended and self._slots[self._run.slots.report].standing is not None:
            unnamed.append("the report")
        for what in unnamed:
            self._findings.add(folder, "file", f"no head was written after {what}; the command `run` writes one")

    def _look_at_ledger(self) -> None:
        """Compare the sums of each page with the pages before it."""
        url = store.join(self._run.url, LEDGER)
        with self._findings.catching(url, "pages"):
            totals, every = Totals(), numbers(self._run.url)
            if every != list(range(len(every))):
                missing = sorted({*range(every[-1])} - {*every})
                self._findings.add(url_of_page(self._run.url, missing[0]), "file", "missing, but there are later pages")
                return
            for page in pages(self._run.url, every):
                if page.before != totals:
                    self._findings.add(url_of_page(self._run.url, page.number), "before", "not the sums of all before")
                totals = page.totals

    def _listed(self) -> Iterator[tuple[Slot | None, str, FileEntry]]:
        """Yield every file that a record names, with slot and URL; of the pool, each once and without a slot."""
        pooled: dict[str, FileEntry] = {}
        for slot in self._slots.values():
            for generation, part in sorted(slot.dropped):
                self._findings.gone.append(f"{self._findings.place(slot.url)}, generation {generation}: {part}")
            yield from ((slot, store.join(slot.url, path), entry) for path, entry in slot.entries.items())
            pooled |= self._pooled(slot)
        for url, entry in pooled.items():
            yield None, url, entry

    def _pooled(self, slot: Slot) -> dict[str, FileEntry]:
        """Return the files of the pool that an artifact's index names, by URL."""
        found: dict[str, FileEntry] = {}
        for manifest in slot.manifests.values():
            if manifest.stage != "embed" or (entry := manifest.files.get(INDEX)) is None:
                continue
            url = store.join(slot.url, entry.path)
            with self._findings.catching(url, "index"):
                try:
                    rows = json.loads(store.read(url)).values()
                    named = [FileEntry(path=path, size=size, sha256=digest) for path, size, digest in rows]
                except (OSError, ValueError, AttributeError, TypeError):
                    continue  # its bytes are wrong, which is found when they are hashed
                found |= {store.join(slot.url.rpartition("/")[0], one.path): one for one in named}
        return found

    def _hash(self, files: Iterable[tuple[Slot | None, str, FileEntry]]) -> None:
        """Compare sizes and digests of files, several at once."""
        listed = list(files)
        with ThreadPoolExecutor(AT_ONCE) as pool:
            for (slot, url, entry), wrong in zip(listed, pool.map(self._wrong, listed), strict=True):
                if wrong == MISSING and slot is not None and slot.may_lack(entry):
                    continue
                self._findings.files += 1
                self._findings.size += 0 if self._quick else entry.size
                if wrong:
                    self._findings.add(url, "bytes", wrong)

    def _wrong(self, listed: tuple[Slot | None, str, FileEntry]) -> str:
        """Return what is wrong with a file; "" if nothing is."""
        _, url, entry = listed
        found = store.size(url)
        if found is None:
            return MISSING
        if found != entry.size:
            return f"{found} bytes, expected {entry.size}"
        if self._quick:
            return ""
        digest = sha256()
        for block in _blocks(url, entry.size):
            digest.update(block)
        return "" if digest.hexdigest() == entry.sha256 else f"sha256 {digest.hexdigest()}, expected {entry.sha256}"


MISSING = "missing"


def _blocks(url: str, size: int) -> Iterator[bytes]:
    """Read a file's blocks in order; those of a distant file ahead, since each is a request."""

    def read(start: int) -> bytes:
        return store.read(url, start, min(start + BLOCK_BYTES, size))

    starts = range(0, size, BLOCK_BYTES)
    if "://" in url and len(starts) > 1:
        return (data for _, data in store.ahead(starts, read))
    return map(read, starts)
