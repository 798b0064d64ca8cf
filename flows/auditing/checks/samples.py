"""Check that generated samples follow from plan and settings: their rows in the index, and the members of tars."""

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from cosmos_rl_core.canonical import canonical_json
from cosmos_rl_core.sampling.schedule import Schedule
from cosmos_rl_core.sampling.solvers import kernel_of, own_levels, planned_kernel
from cosmos_rl_core.storage import media, store
from flows.auditing.checks.faults import Findings
from flows.auditing.checks.tars import Members
from stages import contracts
from stages.artifacts.artifact import Artifact
from stages.artifacts.manifest import Manifest
from stages.artifacts.request import Request
from stages.contracts import MEDIA, TENSORS
from stages.formats.samples import all_rows, has_media, unit_name
from stages.generating.plans import grid_facts, plan_samples, recorded_steps, row_of

Row = dict[str, Any]


def check(samples: Artifact, request: Request, tars: Mapping[str, Members], findings: Findings) -> list[Row]:
    """Check that a rollout or an evaluation has each planned sample once, in order, with all that its row says.

    ``tars`` are the members of the tars whose bytes are right, by URL. Returns the rows.
    """
    made, url = samples.manifest, Manifest.url(samples.manifest.slot, samples.manifest.generation)
    rows, expected = list(all_rows(samples)), _expected(made, request)
    if len(rows) != len(expected):
        findings.add(url, "samples", f"{len(rows)}, expected {len(expected)}")
    for number, (row, right) in enumerate(zip(rows, expected, strict=False)):
        if wrong := next(_differences(row, right), None):
            name, told = wrong
            findings.add(url, f"samples[{number}].{name}", told)
            break
    for seed, count in Counter(row["seed"] for row in rows).items():
        if count > 1:
            findings.add(url, "samples", f"{count} have the seed {seed}")
    _check_grids(rows, request, url, findings)
    units: dict[int, list[Row]] = {}
    for row in rows:
        units.setdefault(row.pop("unit"), []).append(row)
    for number, some in units.items():
        _check_tars(samples, number, some, tars, findings)
    return rows


def _expected(made: Manifest, request: Request) -> list[Row]:
    """Return the row that plan and settings give for each sample, as it is read from JSON."""
    config = request.settings(contracts.Samples)
    same_noise, facts = False, dict[str, Any]()
    steps: dict[str, list[int]] = {}
    if isinstance(config, contracts.Rollout):
        same_noise, facts = config.use_same_seed, {"policy": request.one("policy").content}
        # Which steps have noise does not depend on the levels.
        kernel = planned_kernel(config.sample)
        steps = {prompt.id: list(recorded_steps(request, kernel, prompt.id)) for prompt in config.prompts}
    elif isinstance(config, contracts.Evaluate):
        facts = {"export": request.one("export").content}
    plans = plan_samples(config.prompts, config.n_generation, made.seed, made.iteration, same_noise=same_noise)
    rows: list[Row] = []
    for plan in plans:
        row = row_of(plan) | facts
        rows.append(row | ({"trained_steps": steps[plan.prompt.id]} if steps else {}))
    return json.loads(canonical_json(rows))


def _differences(row: Row, expected: Row) -> Iterator[tuple[str, str]]:
    for name, value in expected.items():
        if name not in row:
            yield name, "missing"
        elif row[name] != value:
            yield name, f"{row[name]}, expected {value}"


def _check_grids(rows: list[Row], request: Request, url: str, findings: Findings) -> None:
    """Check that all samples have the same grid of noise levels, of as many steps as planned.

    The grid of a flow comes from the base model's scheduler, which an audit does not read. So levels that were changed
    alike in all samples of all rollouts are not found.
    """
    config = request.config
    if not isinstance(config, contracts.Rollout) or not rows:
        return
    grid = rows[0]["sigmas"]
    if (found := len(grid)) != (expected := config.sample.num_steps + 1):
        findings.add(url, "samples[0].sigmas", f"{found} noise levels, expected {expected}")
        return
    right = grid_facts(kernel_of(config.sample, lambda: Schedule(tuple(grid))))
    for number, row in enumerate(rows):
        for name, value in right.items():
            if row[name] != value:
                source = (
                    "its settings give" if own_levels(config.sample.solver) else "the noise levels of sample 0 give"
                )
                findings.add(url, f"samples[{number}].{name}", f"{row[name]}, {source} {value}")
                return


def _check_tars(
    samples: Artifact, number: int, rows: list[Row], tars: Mapping[str, Members], findings: Findings
) -> None:
    """Check that a unit's tars hold its own samples, with their rows."""
    made, ids = samples.manifest, [row["sample_id"] for row in rows]
    pictures = {
        f"{row['sample_id']}.{media.IMAGE}": f"{row['sample_id']}.{media.VIDEO}" for row in rows if has_media(row)
    }
    for part in (MEDIA, TENSORS):
        name = unit_name(part, number)
        if name not in made.files:
            continue
        url = store.join(samples.url, made.files[name].path)
        if (found := tars.get(url)) is None:
            continue  # not hashed, gone, or damaged, which is said elsewhere
        if part == TENSORS:
            expected = {f"{one}.safetensors" for one in ids}
        else:
            shown = {image if image in found else video for image, video in pictures.items()}
            expected = {f"{one}.json" for one in ids} | shown
        if wrong := sorted(expected ^ found.keys()):
            findings.add(url, wrong[0], "missing" if wrong[0] in expected else "of no sample of this unit")
            continue
        for row in rows if part == MEDIA else ():
            if found[f"{row['sample_id']}.json"] != canonical_json(row):
                findings.add(url, f"{row['sample_id']}.json", "not the row of the index")


def check_alike(rows_of: Mapping[str, list[Row]], findings: Findings) -> None:
    """Check that all rollouts of a run, by the URLs of their manifests, have the noise levels that most of them have.

    A run has one number of steps, one size and one base model, so it has one grid of levels.
    """
    grids = {url: canonical_json(rows[0].get("sigmas")) for url, rows in rows_of.items() if rows}
    if not grids:
        return
    usual, _ = Counter(grids.values()).most_common(1)[0]
    for url, grid in grids.items():
        if grid != usual:
            findings.add(url, "samples[0].sigmas", f"{grid.decode()}, other rollouts of the run have {usual.decode()}")
