"""Checks that samples follow from settings, scores from samples, rewards from scores, and metrics from all."""

import math
from collections.abc import Callable, Mapping, Sequence
from numbers import Number
from typing import Any, cast

import pandas as pd

from cosmos_rl_core.algorithms._base import algorithm_of
from cosmos_rl_core.estimates.estimate import mean_of
from cosmos_rl_core.storage import store
from flows.auditing.checks import drift, samples
from flows.auditing.checks.faults import Findings
from flows.auditing.checks.tars import Members
from stages import contracts, registry, warn
from stages.artifacts.artifact import Artifact
from stages.artifacts.manifest import Manifest
from stages.artifacts.request import Input, Request
from stages.formats.samples import KB_PER_SAMPLE, REFUSED, read_index
from stages.formats.tables import read_table
from stages.fragment import without_pictures
from stages.reporting.contracts import Fragment
from stages.reporting.excerpt import Excerpt
from stages.scoring import held_out
from stages.scoring.advantages import advantages, counts_of
from stages.scoring.scorer import is_of
from stages.scoring.summaries import OVER_SAMPLES

Rows = list[dict[str, Any]]


Place = Callable[[Input], Input]
"""Function that gives an input its present URL: the store may have been moved since the input was recorded."""
Check = Callable[[Artifact, Request, Findings], None]


def check(
    made: Manifest, planned: Request, at: Place, tars: Mapping[str, Members], findings: Findings
) -> list[dict[str, Any]]:
    """Check that the contents of an artifact follow from its inputs. ``planned`` is the plan's Request of its recipe.

    ``tars`` are the members of tars by URL. Returns the index rows of samples.

    Files with wrong bytes are found where they are hashed; here they only stop the check of their artifact.
    """
    check_contents = _check_of(made.stage)
    if made.stage not in ("rollout", "evaluate") and check_contents is None:
        return []
    if made.stage == "fragment" and _is_of_another_version(made, Fragment, findings):
        return []
    inputs = {role: tuple(map(at, sources)) for role, sources in made.inputs.items()}
    with findings.checking(_url_of(made), "contents"):
        artifact, request = Artifact(input_of(made)), planned.model_copy(update={"inputs": inputs})
        if check_contents is None:
            rows = samples.check(artifact, request, tars, findings)
            counts = {"samples": len(rows)} if "samples" in made.summary else {}
            counts |= {"nonfinite": sum(not row["finite"] for row in rows)}
            counts |= {REFUSED: sum(REFUSED in row for row in rows)}
            if KB_PER_SAMPLE in made.summary:
                counts |= {KB_PER_SAMPLE: sum(entry.size for entry in made.files.values()) / len(rows) / 1000}
            _check_summary(made, counts, "index", findings)
            return rows
        check_contents(artifact, request, findings)
    return []


def _check_of(stage: str) -> Check | None:
    checks = {"update": _check_advantages, "warn": _check_warning, "fragment": _check_fragment}
    checks |= dict.fromkeys(("reward", "judge"), _check_scores)
    if stage in checks:
        return checks[stage]
    if registry.trains(stage):
        return _check_steps
    return None if held_out.reader_of(stage) is None else _check_held_out


def input_of(manifest: Manifest) -> Input:
    """Return an artifact as an input."""
    return Input(
        url=manifest.slot,
        generation=manifest.generation,
        manifest=manifest.digest,
        fingerprint=manifest.fingerprint,
        content=manifest.part_content(),
    )


def _is_of_another_version(made: Manifest, stage: type[contracts.StageConfig], findings: Findings) -> bool:
    """Return whether another version of its stage made an artifact; the findings then say that it is unchecked."""
    if made.version == stage.version:
        return False
    told = f"version {made.version} of {made.stage} made it, this is version {stage.version}"
    findings.unchecked.append(f"{findings.place(made.slot)}: {told}")
    return True


def _check_summary(made: Manifest, numbers: Mapping[str, Any], source: str, findings: Findings) -> None:
    """Check numbers of a summary, which metrics and reports show. A number that is left out is 0."""
    for name, expected in numbers.items():
        if not near(found := made.summary.get(name, 0), expected):
            findings.add(
                _url_of(made),
                f"summary.{name}",
                f"{found}, its {source} {'give' if source == 'scores' else 'gives'} {expected}",
            )


def _compare(found: Sequence[Any], expected: Sequence[Any], url: str, what: str, findings: Findings) -> None:
    if len(found) != len(expected):
        findings.add(url, what, f"{len(found)}, expected {len(expected)}")
        return
    number = next(i for i, (one, other) in enumerate(zip(found, expected, strict=True)) if one != other)
    findings.add(url, f"{what}[{number}]", f"{found[number]}, expected {expected[number]}")


def _check_scores(scores: Artifact, request: Request, findings: Findings) -> None:
    """Check that each sample has one row, in order, with a score by the named scorer or the reason for its lack."""
    made = scores.manifest
    samples = read_index(Artifact(request.one("samples")))
    ids = list(zip(samples["sample_id"], samples["prompt_id"], strict=True))
    finite = dict(zip(samples["sample_id"], samples["finite"], strict=True))
    table = read_table(scores, contracts.Reward.SCORES)
    answers = read_table(scores, contracts.Reward.ANSWERS).set_index("sample_id")
    url = _url(scores, contracts.Reward.SCORES)
    found = list(zip(table["sample_id"], table["prompt_id"], strict=True))
    if found != ids:
        _compare(found, ids, url, "rows", findings)
        return
    for number, row in enumerate(table.to_dict("records")):
        error = answers["error"].get(row["sample_id"])
        scored = row["score"] is not None and pd.notna(row["score"]) and abs(row["score"]) != float("inf")
        if row["valid"] != scored or row["valid"] != (error == ""):
            told = f"valid {row['valid']}, score {row['score']}, error {error!r}"
            findings.add(url, f"row {number}, {row['sample_id']}", f"{told}: a score or a reason, not both")
        if row["valid"] and not finite[row["sample_id"]]:
            findings.add(url, f"row {number}, {row['sample_id']}", "is not finite, so it cannot have a score")
        if not is_of(row["scorer"], made.config["scorer"]):
            findings.add(url, f"row {number}, {row['sample_id']}", f"scored by {row['scorer']}")
    refused = samples[REFUSED].dropna().size if REFUSED in samples else 0
    _check_failures(scores, table, refused, request.settings(contracts.Reward), findings)


def _check_failures(
    scores: Artifact, table: pd.DataFrame, refused: int, config: contracts.Reward, findings: Findings
) -> None:
    """Check that the summary counts every failure, and that no more samples failed than the settings allow.

    Samples that a guardrail ``refused`` have no score, and count as no failure.
    """
    known = table.loc[table["valid"], "score"].astype("float64")
    failed = len(table) - len(known)
    numbers = {config.reward.label: known.mean(), "scored": len(known), "failed": failed}
    if scores.manifest.version > OVER_SAMPLES:
        numbers["standard_error"] = mean_of(known, table.loc[table["valid"], "prompt_id"]).error
    _check_summary(scores.manifest, numbers, "scores", findings)
    if failed - refused > config.max_failed_fraction * len(table):
        allowed = f"max_failed_fraction = {config.max_failed_fraction}"
        told = f"{failed - refused} of {len(table)} samples have no score, more than {allowed}"
        findings.add(_url(scores, contracts.Reward.SCORES), "valid", told)


def _check_advantages(update: Artifact, request: Request, findings: Findings) -> None:
    """Check that rewards, gates and advantages follow from the scores of the update's rollouts, in order."""
    made = update.manifest
    table = read_table(update, contracts.Update.ADVANTAGES)
    url = _url(update, contracts.Update.ADVANTAGES)
    config = request.settings(contracts.Update)
    if made.version == 1 and any(gate.on_fail == "worst" for gate in config.gates.values()):
        findings.unchecked.append(f"{findings.place(made.slot)}: version 1 of update took the worst by raw rewards")
        return
    # The limit on samples that gates hold back decides only whether an update is made; it may be raised until it is.
    gates = {label: gate.model_copy(update={"max_gated_fraction": 1.0}) for label, gate in config.gates.items()}
    request = request.model_copy(update={"config": config.model_copy(update={"gates": gates})})
    algorithm = algorithm_of(config.algorithm)
    expected = advantages(request, [*map(Artifact, request.inputs["rollouts"])], algorithm)
    names = ["rollout", "sample_id", "prompt_id"]
    found, right = ([*frame[names].itertuples(index=False, name=None)] for frame in (table, expected))
    if found != right:
        _compare(found, right, url, "samples", findings)
        return
    for column in expected.columns.drop([*names, "key"]):
        if column not in table:
            findings.add(url, column, "missing")
            continue
        for sample_id, one, other in zip(table["sample_id"], table[column], expected[column], strict=True):
            if not near(one, other):
                findings.add(url, f"{column}, {sample_id}", f"{one}, its scores give {other}")
    counts = counts_of(table, algorithm)
    if made.version == 1:
        del counts[contracts.Update.HELD_BACK]  # not counted then
    _check_summary(made, counts, "table", findings)
    _check_steps(update, request, findings)
    _check_drift(update, config, table, findings)


def _check_drift(update: Artifact, config: contracts.Update, table: pd.DataFrame, findings: Findings) -> None:
    """Check that transitions belong to samples that were trained on, and that their means equal the metrics."""
    if contracts.Update.TRANSITIONS not in update.names() or contracts.METRICS not in update.names():
        return
    transitions, metrics = (read_table(update, name) for name in (contracts.Update.TRANSITIONS, contracts.METRICS))
    for name, told in drift.differences(transitions, metrics, table, config.steps.first_step):
        findings.add(_url(update, contracts.Update.TRANSITIONS), name, told)


def _check_steps(policy: Artifact, request: Request, findings: Findings) -> None:
    """Check that the summary of a training has the numbers of its last optimizer step."""
    if contracts.METRICS not in policy.names():
        return
    last: dict[str, Any] = read_table(policy, contracts.METRICS).iloc[-1].to_dict()
    shown = {name: value for name, value in last.items() if name in policy.manifest.summary}
    finite = {name: value if math.isfinite(value) else None for name, value in shown.items()}
    _check_summary(policy.manifest, finite, "last optimizer step", findings)


def _check_held_out(measured: Artifact, request: Request, findings: Findings) -> None:
    """Check that the summary of a measurement on held-out data follows from its table of items."""
    reader = held_out.reader_of(request.stage)
    assert reader is not None
    _check_summary(measured.manifest, reader.summary_from(measured), "table", findings)


def _check_fragment(fragment: Artifact, request: Request, findings: Findings) -> None:
    """Check that a fragment, except for its pictures, follows from the samples and scores of its iteration."""
    url = _url(fragment, Fragment.FRAGMENT)
    found = Excerpt.read(fragment.read(Fragment.FRAGMENT), url).model_dump(mode="json")
    right = without_pictures(request).model_dump(mode="json")
    for values in (found, right):
        for field in ("pictures", "first"):
            values[field] = {
                sample: {name: picture[name] for name in picture.keys() - _DRAWN}
                for sample, picture in values[field].items()
            }
    for name, value in right.items():
        if not near(found[name], value):
            findings.add(url, name, "does not follow from samples, scores and warnings")


_DRAWN = {"thumb", "full", "missing", "width", "height"}
"""Fields of a picture that are known only once its file is read."""


def _check_warning(warning: Artifact, request: Request, findings: Findings) -> None:
    """Check that the levels of scores, the limits that tripped, and the summary of both follow from the scores."""
    made = warning.manifest
    if _is_of_another_version(made, contracts.Warn, findings):
        return
    found, right = warning.json(contracts.Warn.EVIDENCE), warn.evidence_of(request)
    url = _url(warning, contracts.Warn.EVIDENCE)
    for name in sorted({*found, *right}):
        if not near(found.get(name), right.get(name)):
            findings.add(url, name, "not what the scores give")
    numbers = warn.summary_of(right)
    judged = (name for name in made.summary if name in ("tripped", "undecided") or name.endswith("_z"))
    for name in sorted({*judged, *numbers}):
        if not near(told := made.summary.get(name), expected := numbers.get(name)):
            findings.add(_url_of(made), f"summary.{name}", f"{told}, its evidence gives {expected}")


def near(found: Any, expected: Any) -> bool:
    """Return whether two values are equal; numbers may differ by the rounding of another processor."""
    if isinstance(found, Mapping) and isinstance(expected, Mapping):
        return found.keys() == expected.keys() and all(near(found[name], expected[name]) for name in found)
    if isinstance(found, list | tuple) and isinstance(expected, list | tuple):
        return len(found) == len(expected) and all(map(near, found, expected))
    if _is_missing(found) or _is_missing(expected):
        return _is_missing(found) and _is_missing(expected)
    if isinstance(found, Number) and isinstance(expected, Number):
        return math.isclose(cast("float", found), cast("float", expected), rel_tol=1e-9, abs_tol=1e-12)
    return bool(found == expected)


def _is_missing(value: Any) -> bool:
    return value is None or value is pd.NA or (isinstance(value, float) and math.isnan(value))


def _url(artifact: Artifact, name: str) -> str:
    return store.join(artifact.url, artifact.entry(name).path)


def _url_of(made: Manifest) -> str:
    return Manifest.url(made.slot, made.generation)
