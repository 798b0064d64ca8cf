"""Checks of the records next to artifacts: decisions on warnings, scorers of services, and numerics of a run."""

from collections.abc import Iterable, Mapping

from cosmos_rl_core.canonical import differences
from cosmos_rl_core.errors import ArtifactError
from cosmos_rl_core.rewards._batches.exact import ONE_BY_ONE
from cosmos_rl_core.storage import store
from flows.auditing.checks.faults import Findings
from flows.auditing.contents import input_of
from flows.auditing.slot import Slot
from flows.ledger.pages import BOUND, LEDGER, Totals, bound, copies, numbers, pages, url_of, url_of_copy
from flows.running.wave import NUMERICS, SCORERS
from flows.warning.decisions import DECISIONS, Decision, decisions_on
from flows.warning.warnings import Warned
from stages import contracts
from stages.artifacts.artifact import Artifact
from stages.artifacts.manifest import Manifest
from stages.artifacts.records import Pinned, records_in
from stages.formats.tables import read_table
from stages.scoring.pinned import pinned_scorers
from stages.scoring.rewards import label_of


def check_decisions(slot: Slot, update: Manifest | None, findings: Findings) -> None:
    """Check the decisions on a warning: each names evidence of this slot, and the limits that tripped by it.

    ``update`` is the current update of the same iteration: if limits tripped, the last decision must let it pass.
    """
    known: dict[str, Manifest] = {made.content: made for made in slot.manifests.values() if made.stage == "warn"}
    folder = store.join(slot.url, DECISIONS)
    found: dict[str, list[str]] = {}
    for evidence, name in records_in(folder):
        found.setdefault(evidence, []).append(name)
    for evidence, names in found.items():
        url = store.join(folder, evidence)
        if evidence not in known:
            findings.add(url, "evidence", "no warning of this slot has this content")
            continue
        with findings.checking(url, "decisions"):
            _compare(known[evidence], decisions_on(known[evidence]), names, url, findings)
    if slot.current is not None and update is not None and _judged(slot.current, update):
        url = Manifest.url(slot.url, slot.generation)
        with findings.checking(url, "decisions"):
            warned = Warned.of(slot.current)
            if warned is not None and (warned.decision is None or not warned.decision.lets_pass):
                said = "nothing was decided" if warned.decision is None else f"the last decision: {warned.decision}"
                findings.add(url, "decisions", f"limits tripped and {said}, but there is an update after it")


def _compare(made: Manifest, decisions: list[Decision], names: list[str], url: str, findings: Findings) -> None:
    expected = [f"{decision.number:04d}.json" for decision in decisions]
    if names != expected:
        findings.add(url, "file", f"found {', '.join(names) or 'nothing'}, expected {', '.join(expected) or 'nothing'}")
    if store.size(store.join(made.slot, made.files[contracts.Warn.EVIDENCE].path)) is None:
        return  # of an ended generation, whose files `gc` may delete
    if (warned := Warned.of(made)) is None:
        findings.add(url, "tripped", "there are decisions, but no limit tripped")
        return
    for decision in decisions:
        if decision.tripped != warned.tripped:
            told = f"{list(decision.tripped)}, the evidence says {list(warned.tripped)}"
            findings.add(store.join(url, f"{decision.number:04d}.json"), "tripped", told)


def _judged(warning: Manifest, update: Manifest) -> bool:
    """Return whether a warning judged all scores that an update trained on; scores may be made again after it."""
    judged = {source.manifest for source in warning.inputs.get("scores", ())}
    return {source.manifest for source in update.inputs.get("scores", ())} <= judged


def check_scorers(url: str, scored: Iterable[Manifest], findings: Findings) -> None:
    """Check the records of scorers in the folder ``url``, and that pinned scorers gave all scores of services."""
    folder = store.join(url, SCORERS)
    pinned: dict[str, set[str]] = {}
    for label in sorted({name.rsplit(".", 2)[0] for name in store.names(folder) if name.endswith(".json")}):
        with findings.catching(folder, label):
            every = pinned_scorers(folder, label)
            pinned[label] = {"" if one.scorer is None else one.scorer.digest for one in every}
            if not every:
                raise ArtifactError("record 1 is missing, but there are later ones")
    for made in scored:
        url = Manifest.url(made.slot, made.generation)
        with findings.checking(url, "scorer"):
            _check_scorer(made, pinned, url, findings)


def _check_scorer(made: Manifest, pinned: Mapping[str, set[str]], url: str, findings: Findings) -> None:
    known = pinned.get(label_of(made))
    for name in sorted(set(read_table(Artifact(input_of(made)), contracts.Reward.SCORES)["scorer"])):
        digest = name.removeprefix(made.config["scorer"]).removeprefix(", ")
        if digest not in ({"", ONE_BY_ONE} if known is None else known):
            told = ", ".join(sorted(known or ())) or "none"
            findings.add(url, "scorer", f"scored by {name}; scorers that the run pinned: {told}")


def check_numerics(url: str, slots: Iterable[Slot], findings: Findings) -> None:
    """Compare the numerics of artifacts with the pinned ones; a difference must be the one that the summary names.

    ``url`` is the folder of a run or a re-score, which pins numerics. ``slots`` have its own artifacts: one that
    runs share has the numerics of the run that made it.
    """
    made = [one for slot in slots for one in slot.own]
    folder = store.join(url, NUMERICS)
    stages = {name.removesuffix(".json") for name in store.names(folder) if name.endswith(".json")}
    for stage in sorted(stages | {one.stage for one in made}):
        url = store.join(folder, f"{stage}.json")
        with findings.catching(url, "numerics"):
            if (pinned := Pinned.read(url, stage)) is None:
                raise ArtifactError(f"missing, but there are artifacts of {stage}")
            for one in made:
                if one.stage == stage:
                    _compare_numerics(one, pinned, findings)


def _compare_numerics(made: Manifest, pinned: Pinned, findings: Findings) -> None:
    """Compare numerics with the pinned ones; an artifact says how they differ, where somebody allowed that."""
    told, right = made.summary.get("numerics_changed", ""), ", ".join(differences(pinned.numerics, made.numerics))
    if told != right:
        said = f"{right or 'none'} since the pinned ones, its summary says {told or 'none'}"
        findings.add(Manifest.url(made.slot, made.generation), "numerics", said)


def check_ledger(url: str, findings: Findings) -> None:
    """Compare the sums of each page of the ledger in the folder ``url`` with the pages before it."""
    folder = store.join(url, LEDGER)
    with findings.catching(folder, "pages"):
        totals, every = Totals(), numbers(url)
        if every != list(range(len(every))):
            missing = sorted({*range(every[-1])} - {*every})
            findings.add(url_of(url, missing[0]), "file", "missing, but there are later pages")
            return
        for page in pages(url, every):
            if page.before != totals:
                findings.add(url_of(url, page.number), "before", "not the sums of all before")
            totals = page.totals
        for number in copies(url):
            which = every[number * BOUND : (number + 1) * BOUND]
            copy = url_of_copy(url, number)
            if store.read_if_exists(copy) != bound(pages(url, which)):
                findings.add(copy, "bytes", "not a copy of these pages; remove it")
