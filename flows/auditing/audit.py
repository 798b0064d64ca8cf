"""Audit of a run: every file that its artifacts reach, and everything that follows from these files."""

import re
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from cosmos_rl_core.canonical import from_json
from cosmos_rl_core.errors import ArtifactError, ConfigError, UnreadableError, first_line
from cosmos_rl_core.storage import store
from flows.auditing import chain, contents, planned, records, references, rescored
from flows.auditing.chain import Chain
from flows.auditing.checks import numbers, page, samples, tars
from flows.auditing.checks.faults import Findings
from flows.auditing.planned import Asked
from flows.auditing.rescored import AskedAgain
from flows.auditing.slot import Slot
from flows.auditing.unknown import Listings
from flows.heads.heads import HEADS
from flows.library.opened_run import OpenedRun
from flows.planning.base import AnyRun
from flows.planning.plan import METRICS_FILE, PLAN_FILE, run_url
from flows.planning.steps import Step, read_run
from flows.rescoring.rescore import Rescore
from stages.artifacts.files import BLOCK_BYTES
from stages.artifacts.manifest import Manifest
from stages.artifacts.pool import INDEX, POOLED
from stages.artifacts.records import FileEntry, place_of
from stages.artifacts.request import Input, Request
from stages.artifacts.slots import one_look
from stages.registry import trains

Right = dict[tuple[str, FileEntry], tars.Members | None]
"""Files whose bytes are right, with their members if they are tars."""
LOOKS = 3
"""Most looks at a run. Fewer are enough if a look finds the same faults as the look before."""
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
    """Return the faults of a run, and how much was looked at. Changes nothing.

    A process may work on the run. So an artifact is looked at before its inputs, which exist by then; and a fault
    counts only if a second look finds it in the same place.

    ``iteration`` limits the audit to one iteration and its inputs; ``quick`` compares sizes and hashes no file.
    ``head`` is a digest that somebody kept: a head of the run must have it. ``signed_by`` is the key of somebody who
    must have signed a head.
    Raises :class:`ConfigError` if there is no such run or iteration, and for a head that is no digest.
    """
    if head is not None and not DIGEST.fullmatch(head):
        raise ConfigError(
            f"--head {head}: expected the 64 hexadecimal digits that `cosmos-flows audit` prints as the newest head's"
        )
    right: Right = {}
    found = _look(store_url, run_id, iteration, head, signed_by, quick, right)
    for _ in range(LOOKS - 1):
        places = {(fault.file, fault.field) for fault in found.faults}
        if not places:
            break
        found = _look(store_url, run_id, iteration, head, signed_by, quick, right)
        found.faults = [fault for fault in found.faults if (fault.file, fault.field) in places]
        if len({(fault.file, fault.field) for fault in found.faults}) == len(places):
            break
    return found


def _look(
    store_url: str,
    run_id: str,
    iteration: int | None,
    head: str | None,
    signed_by: Ed25519PublicKey | None,
    quick: bool,
    right: Right,
) -> Findings:
    """Look at a run once. ``right`` has the files whose bytes are known to be right, and gets the files found right."""
    findings = Findings(store.absolute(store_url).rstrip("/"))
    url = store.join(run_url(store_url, run_id), PLAN_FILE)
    try:
        opened = OpenedRun(read_run(store_url, run_id))
    except ArtifactError as error:
        findings.add(url, "plan", first_line(error))
        return findings
    with one_look():
        try:
            return Audit(opened, findings, head, signed_by, quick=quick, right=right).look(iteration)
        except UnreadableError as error:
            findings.add(opened.url, "file", f"{first_line(error)}; nothing was looked at after it")
            return findings


class Audit:
    """A walk from the steps of a run to everything that they were made from."""

    def __init__(
        self,
        opened: OpenedRun,
        findings: Findings,
        kept: str | None,
        signed_by: Ed25519PublicKey | None,
        *,
        quick: bool,
        right: Right,
    ) -> None:
        self._opened, self._run, self._quick = opened, opened.run, quick
        self._findings, self._kept, self._signed_by = findings, kept, signed_by
        self._right = right
        self._slots: dict[str, Slot] = {}

    def look(self, iteration: int | None) -> Findings:
        """Look at all steps, or at the steps of one iteration, and return the findings."""
        every = self._opened.steps
        chosen = [step for step in every if iteration in (None, step.k)]
        if not chosen:
            last = max(step.k for step in every if step.k is not None)
            run_id = self._run.plan.run_id
            raise ConfigError(
                f"{run_id} has no iteration {iteration}; its iterations and policy versions are 0 to {last}"
            )
        self._listings = Listings(self._run.url, whole=iteration is None)
        again = self._scored_again(iteration)
        for step in reversed([*chosen, *(step for _, steps in again for step in steps)]):
            self._look_at(step.slot)
        self._slots = dict(reversed(self._slots.items()))
        reached = [step for step in chosen if self._look_at(step.slot).current is not None]
        read = [self._slots[step.slot] for step in reached]
        if iteration is None:
            begun_with = references.begun_with(self._run, every, self._findings)
            self._slots |= {slot.url: slot for slot in begun_with}
            read += begun_with
        references.check(self._run, read, self._look_at, self._findings)
        for slot in read:
            self._follow(slot.current, whole=iteration is None)
        heads = chain.check(self._run.url, self._kept, self._signed_by, self._findings)
        records.check_ledger(self._run.url, self._findings)
        self._look_at_records(every)
        if iteration is None:
            if heads is not None:
                self._look_for_missing_heads(every, heads)
            self._look_for_missing(every)
            self._look_at_metrics(every)
            page.check(self._run, every, self._findings)
        pairs = planned.check(reached, Asked(self._run), self._slot_at, self._findings)
        folders = tuple(f"{one.url}/" for one, _ in again)
        own = [slot for url, slot in self._slots.items() if self._is_own(url) and not url.startswith(folders)]
        references.check_forks(self._run, self._findings)
        records.check_numerics(self._run.url, own, self._findings)
        pairs += [pair for one, steps in again for pair in self._look_at_rescore(one, steps)]
        self._hash(self._listed())
        rollouts: dict[str, list[dict[str, Any]]] = {}
        found = {url: members for (url, _), members in self._right.items() if members is not None}
        for made, request in pairs:
            rows = contents.check(made, request, self._at, found, self._findings)
            if made.stage == "rollout":
                rollouts[Manifest.url(made.slot, made.generation)] = rows
        samples.check_alike(rollouts, self._findings)
        self._listings.check(self._slots, self._findings)
        self._findings.artifacts = sum(len(slot.manifests) for slot in self._slots.values())
        return self._findings

    def _look_at(self, url: str) -> Slot:
        if url not in self._slots:
            self._listings.add(url)
            self._slots[url] = Slot(url, self._findings)
        return self._slots[url]

    def _follow(self, manifest: Manifest | None, *, whole: bool) -> None:
        """Look at the inputs of an artifact, and with ``whole`` at their inputs too."""
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
                self._findings.add(url, f"{field}.{name}", f"differs from {self._findings.place(found.slot)}'s")

    def _at(self, source: Input) -> Input:
        """Return an input with its present URL, and of the current generation if that has the same contents.

        `gc` deletes files of ended generations.
        """
        here = source.model_copy(update={"url": self._here(source.url)})
        current = self._look_at(here.url).current
        if current is None or current.part_content(*source.parts) != source.content:
            return here
        own = {"generation": current.generation, "manifest": current.digest, "fingerprint": current.fingerprint}
        return here.model_copy(update=own)

    def _here(self, url: str) -> str:
        """Return the present URL of a slot: the store may have been moved since the URL was recorded."""
        moved = store.join(self._findings.root, place_of(url))
        return moved if place_of(url) != url and store.size(Manifest.url(moved, 1)) is not None else url

    def _slot_at(self, url: str) -> Slot:
        return self._look_at(self._here(url))

    def _is_own(self, url: str) -> bool:
        return place_of(url).startswith(f"{place_of(self._run.url)}/")

    def _look_for_missing(self, every: list[Step]) -> None:
        """Add a fault for each step that has no artifact although a later step has one."""
        last = self._last_begun(every)
        for step in every[: every.index(last)]:
            slot = self._slots[step.slot]
            if slot.current is None and not slot.ended and step.wave != last.wave:
                self._findings.add(Manifest.url(step.slot, 1), "file", f"missing: {last.name} came after it")

    def _last_begun(self, every: Sequence[Step]) -> Step:
        """Return the last step with an artifact that no other run can have made; without one, the first step."""
        every_made = ((step, self._slots[step.slot].current) for step in reversed(every))
        made = ((step, found) for step, found in every_made if found is not None and self._is_own(found.slot))
        # The report of a shorter run says nothing of the iterations after it.
        return next((step for step, found in made if step.kind != "report" or _is_last(self._run, found)), every[0])

    def _look_at_records(self, every: Iterable[Step]) -> None:
        """Look at decisions on warnings, and at the scorers of services."""
        looked = [(step, self._slots[step.slot]) for step in every if step.slot in self._slots]
        updates = {step.k: slot.current for step, slot in looked if step.kind == "update"}
        for step, slot in looked:
            if step.kind == "warn":
                records.check_decisions(slot, updates.get(step.k), self._findings)
        scored = [slot.current for _, slot in looked]
        rewards = [one for one in scored if one is not None and one.stage in ("reward", "judge")]
        records.check_scorers(self._run.url, rewards, self._findings)

    def _scored_again(self, iteration: int | None) -> list[tuple[Rescore, list[Step]]]:
        """Return the re-scores of the run, each with its steps of one iteration or of all."""
        found = rescored.rescores_of(self._run, self._findings)
        return [(one, [step for step in one.begun() if iteration in (None, step.k)]) for one in found]

    def _look_at_rescore(self, rescore: Rescore, steps: Sequence[Step]) -> list[tuple[Manifest, Request]]:
        """Look at the inputs of the artifacts of a re-score, and at its records."""
        slots = [self._look_at(step.slot) for step in steps]
        for slot in slots:
            self._follow(slot.current, whole=True)
        records.check_ledger(rescore.url, self._findings)
        records.check_numerics(rescore.url, slots, self._findings)
        made = [slot.current for slot in slots if slot.current is not None]
        scored = [one for one in made if one.stage in ("reward", "judge")]
        records.check_scorers(rescore.url, scored, self._findings)
        return planned.check(steps, AskedAgain(rescore), self._slot_at, self._findings)

    def _look_at_metrics(self, every: Iterable[Step]) -> None:
        url = store.join(self._run.url, METRICS_FILE)
        with self._findings.catching(url, "lines"):
            numbers.check(self._run, every, url, self._findings)

    def _look_for_missing_heads(self, every: Sequence[Step], heads: Chain) -> None:
        """Add a fault for each missing head: after an iteration that has a later one, and after the report."""
        begun = self._last_begun(every)
        trained = {step.k: step for step in every if trains(step.kind)}
        made = {k: found for k, step in trained.items() if (found := self._slots[step.slot].current) is not None}
        unnamed: list[str] = []
        for k in sorted(k for k in made if k is not None):
            follows = trained[k] in every[: every.index(begun)] and trained[k].wave != begun.wave
            names = k + 1 not in made or not _reads(made[k + 1], made[k]) or heads.names(made[k])
            if follows and not (k in heads.ended and names):
                unnamed.append(f"iteration {k}")
        report = self._slots[self._run.slots.report].current
        if report is not None and _is_last(self._run, report) and not heads.names(report):
            # No record follows this head, so only the lease tells whether it will still be written.
            if (holder := self._opened.life().holder) is None:
                unnamed.append("the report")
            else:
                self._findings.pending.append(
                    "the head after the report; process {pid} on {host} works".format(**holder)
                )
        folder = store.join(self._run.url, HEADS)
        for what in unnamed:
            self._findings.add(folder, "file", f"no head was written after {what}; the command `run` writes one")

    def _listed(self) -> Iterator[tuple[Slot | None, str, FileEntry]]:
        """Yield every file that a record names, with slot and URL. Files of the pool come once and without a slot."""
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
            if manifest.stage not in POOLED or (entry := manifest.files.get(INDEX)) is None:
                continue
            url = store.join(slot.url, entry.path)
            with self._findings.catching(url, "index"):
                try:
                    rows = from_json(store.read(url)).values()
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
        """Return a sentence on what is wrong with a file; "" if it is right."""
        _, url, entry = listed
        if (url, entry) in self._right:
            return ""
        found = store.size(url)
        if found is None:
            return MISSING
        if found != entry.size:
            return f"{found} bytes, expected {entry.size}"
        if self._quick:
            return ""
        try:
            digest, members = _look_into(url, entry.size)
        except FileNotFoundError:
            # Retention has deleted it since; then the next look finds the tombstone.
            return MISSING
        if digest != entry.sha256:
            return f"sha256 {digest}, expected {entry.sha256}"
        if members is None and url.endswith(TAR):
            return "cannot be read as a tar"
        self._right[url, entry] = members
        return ""


MISSING = "missing"
TAR = ".tar"


def _is_last(run: AnyRun, report: Manifest) -> bool:
    """Return whether a report is on all iterations."""
    return len(report.inputs.get("updates", ())) >= run.recipe.train.num_iterations


def _reads(made: Manifest, source: Manifest) -> bool:
    """Return whether an artifact was made from another one."""
    return any(one.manifest == source.digest for some in made.inputs.values() for one in some)


def _look_into(url: str, size: int) -> tuple[str, tars.Members | None]:
    """Return the sha256 of a file, and its members if it is a tar."""
    if url.endswith(TAR):
        return tars.look(_blocks(url, size))
    digest = sha256()
    for block in _blocks(url, size):
        digest.update(block)
    return digest.hexdigest(), None


def _blocks(url: str, size: int) -> Iterator[bytes]:
    """Read a file's blocks in order; from a remote store several ahead, because each block is a request."""

    def read(start: int) -> bytes:
        return store.read(url, start, min(start + BLOCK_BYTES, size))

    starts = range(0, size, BLOCK_BYTES)
    if "://" in url and len(starts) > 1:
        return (data for _, data in store.ahead(starts, read))
    return map(read, starts)
