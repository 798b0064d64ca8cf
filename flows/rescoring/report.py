"""The report of a re-score: its page and its numbers. Both are made from the artifacts, and nothing reads them."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pandas as pd

from cosmos_rl_core.config.train import RewardConfig
from cosmos_rl_core.storage import store
from flows.rescoring.agreement import BOTH, Agreement, Apart
from flows.rescoring.plan import Wanted
from flows.rescoring.record import NUMBERS
from flows.rescoring.rescore import Rescore
from flows.rescoring.scatter import scatter
from flows.rescoring.stock import Stock
from flows.terminal.numbers import ranges
from stages.artifacts.artifact import Artifact
from stages.artifacts.slots import current_of, input_of, one_look
from stages.contracts import INDEX, MEDIA, Reward
from stages.formats.samples import StoredSample, all_rows
from stages.formats.tables import read_table
from stages.reporting import contracts
from stages.reporting.page import render
from stages.reporting.pictures import References, Thumb
from stages.scoring.decoded import Decoded


@dataclass(frozen=True)
class Report:
    """Agreement of the rewards of a re-score with the rewards of its run."""

    rescore: Rescore = field(repr=False)
    parts: tuple[Agreement, ...]
    not_compared: tuple[str, ...]
    """Iterations and policies, in words, whose samples lack scores by the run or by the re-score."""

    @property
    def page(self) -> str:
        """Return the URL of its page."""
        return store.join(self.rescore.url, contracts.Report.PAGE)

    @property
    def result(self) -> str:
        """Return the agreement in a line."""
        words = [f"{part.of}: {part.words}" for part in self.parts]
        return "; ".join(words) or "nothing to compare: the run has no score of these samples"

    def lines(self) -> Iterator[str]:
        """Yield the lines to print."""
        for part in self.parts:
            yield f"{part.of:<12}{part.words}"
            if part.left_out:
                yield f"{'':<12}left out: {part.left_out}"
        for one in self.not_compared:
            yield f"{one}: not compared, scores are missing"
        yield f"{'page':<12}{self.page}"

    def as_json(self) -> dict[str, Any]:
        """Return the numbers as plain data."""
        record = self.rescore.record
        return {
            "run": record.run_id,
            "rescore": self.rescore.url,
            "page": self.page,
            "old_rewards": old_weights(self.rescore),
            "new_rewards": weights_of(record.rewards),
            "scorers": record.scorers,
            **{part.of: part.as_json() for part in self.parts},
            "not_compared": list(self.not_compared),
        }


def report_of(wanted: Wanted) -> Report:
    """Return the agreement on the samples that a command asked for, and on all others that the re-score has."""
    rescore, tables, missing = wanted.rescore, dict[bool, list[Any]]({False: [], True: []}), list[str]()
    with one_look():
        every = {(stock.held_out, stock.k): stock for stock in (*rescore.stocks(), *wanted.stocks)}
        for _, stock in sorted(every.items()):
            table = table_of(rescore, stock)
            if table is None:
                missing.append(stock.words)
            else:
                tables[stock.held_out].append(table.assign(k=stock.k))
        named = (("rollouts", tables[False]), ("evaluations", tables[True]))
        parts = [Agreement.between(of, pd.concat(some, ignore_index=True)) for of, some in named if some]
    return Report(rescore, tuple(parts), tuple(missing))


def write_report(wanted: Wanted) -> Report:
    """Write page and numbers, and return the report."""
    report = report_of(wanted)
    with one_look():
        text = json.dumps(report.as_json(), indent=2, ensure_ascii=False) + "\n"
        store.write(store.join(report.rescore.url, NUMBERS), text.encode())
        store.write(report.page, page_of(report))
    return report


def page_of(report: Report) -> bytes:
    """Return the page as HTML."""
    rescore = report.rescore
    record = rescore.record
    references = References(rescore.run.url)
    parts = [(part, _where(part), scatter(part.table), [*_shown(rescore, part, references)]) for part in report.parts]
    return render(
        "rescore.html",
        title=f"{record.name}: re-score of {record.run_id}",
        report=report,
        rows=[*_rewards(rescore)],
        parts=parts,
        references=any(given for *_, shown in parts for *_, given in shown),
    )


def weights_of(rewards: Sequence[RewardConfig]) -> dict[str, float]:
    """Return the weight of each reward in the sum that is compared: the rewards that train."""
    return {one.fn.label: one.weight for one in rewards if one.role == "train"}


def old_weights(rescore: Rescore) -> dict[str, float]:
    """Return the weights of the run's own rewards; 1 for the headline reward of a run that trains on none."""
    headline = rescore.run.headline_reward
    return weights_of(rescore.run.recipe.rewards) or ({headline: 1.0} if headline else {})


def table_of(rescore: Rescore, stock: Stock) -> Any:
    """Return a table with the old and the new reward of each sample; None if scores are missing."""
    old = {label: stock.scores(label) for label in old_weights(rescore)}
    new = {one.fn.label: rescore.found(stock, one) for one in rescore.record.rewards}
    new = {label: new[label] for label in weights_of(rescore.record.rewards)}
    slots = [*old.values(), *new.values()]
    if not old or any(slot is None or current_of(slot)[1] is None for slot in slots):
        return None
    table = pd.DataFrame(list(all_rows(Artifact(input_of(stock.slot, INDEX)))))[["sample_id", "prompt_id"]]
    sums = ((old_weights(rescore), old), (weights_of(rescore.record.rewards), new))
    return table.assign(**{name: _sum(table, *one) for name, one in zip(BOTH, sums, strict=True)})


def _sum(table: Any, weights: Mapping[str, float], slots: Mapping[str, str | None]) -> Any:
    """Return the weighted sum of scores of each sample, NaN unless all are valid."""
    total = pd.Series(0.0, index=table.index)
    for label, weight in weights.items():
        slot = slots[label]
        assert slot is not None
        scores = read_table(Artifact(input_of(slot)), Reward.SCORES).set_index("sample_id").reindex(table["sample_id"])
        total += weight * scores["score"].astype("float64").where(scores["valid"].eq(True)).to_numpy()
    return total


def _rewards(rescore: Rescore) -> Iterator[tuple[str, str]]:
    """Yield rows on the compared rewards and their scorers: a name, and words."""
    weighted = old_weights(rescore), weights_of(rescore.record.rewards)
    for name, weights in zip(("old reward", "new reward"), weighted, strict=True):
        yield name, " + ".join(f"{weight:g} x {label}" for label, weight in weights.items())
    for label, scorer in rescore.record.scorers.items():
        yield f"scorer of {label}", scorer


def _where(part: Agreement) -> str:
    return f"{'iterations' if part.of == 'rollouts' else 'policies'} {ranges(part.ks)}"


def _shown(
    rescore: Rescore, part: Agreement, references: References
) -> Iterator[tuple[Apart, str, Thumb, tuple[Thumb, ...]]]:
    """Yield the samples that are shown, each with its prompt, its picture, and the references of its prompt."""
    stored: dict[tuple[int, str], StoredSample] = {}
    for k in {one.k for one in part.apart}:
        ids = {one.sample for one in part.apart if one.k == k}
        for sample in _stored(rescore, Stock(rescore.run, k, part.of != "rollouts"), ids):
            stored[k, sample.sample_id] = sample
    for one in part.apart:
        sample = stored[one.k, one.sample]
        yield one, sample.row["prompt"], Thumb.of(sample), references.of(sample.row.get("references", ()))


def _stored(rescore: Rescore, stock: Stock, ids: set[str]) -> Iterator[StoredSample]:
    parts = (INDEX, MEDIA) if stock.there(MEDIA) else (INDEX,)
    artifact = Artifact(input_of(stock.slot, *parts))
    decoded = Decoded(artifact, parts, [Artifact(input_of(slot)) for slot in rescore.decoded(stock)])
    units = {row["unit"] for row in all_rows(artifact) if row["sample_id"] in ids}
    yield from (sample for unit in sorted(units) for sample in decoded.read_unit(unit) if sample.sample_id in ids)
