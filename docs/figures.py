"""Write the measured figures of the pages: ``python -m docs.figures``.

Scores and printed blocks come from ``docs/measured``, speeds from ``tests/benchmarks/results``. With a store and ids of
finished runs, ``python -m docs.figures STORE RUN...``, their held-out scores and the drift of their pictures are stored
first. A test compares the pages with what this command would write.
"""

import json
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cosmos_rl_core.estimates.estimate import Estimate, mean_of
from docs import drift, speed
from flows.library.opened_run import open_run
from stages.artifacts.slots import current_of

ROOT = Path(__file__).parents[1]
MEASURED = ROOT / "docs" / "measured"
CPU = "AMD EPYC"
"""The kind of CPU that computed the tables' scores; another kind gives other last bits."""
OTHER_CPUS = MEASURED / "other-cpus"
BENCHMARKS = ROOT / "tests" / "benchmarks" / "results"
IN_NOTEBOOK = r'(?:</td>\\n",\s+"\s+<td>|\s+)'
"""Pattern of the text between two columns of a notebook's table, as HTML or as text."""


@dataclass(frozen=True)
class HeldOut:
    """The held-out scores of a finished run."""

    algorithm: str
    seed: int
    iterations: int
    cpu: str
    first: dict[str, list[float]]
    """Scores of the base by prompt."""
    last: dict[str, list[float]]
    """Scores of the final policy by prompt."""

    @classmethod
    def read(cls, file: Path) -> "HeldOut":
        """Return the scores that :func:`store_scores` wrote to a file."""
        found = json.loads(file.read_text(encoding="utf-8"))
        scores = {end: {p: [*map(float, some.split())] for p, some in found[end].items()} for end in ("first", "last")}
        return cls(found["algorithm"], found["seed"], found["iterations"], found["cpu"], **scores)

    @property
    def ends(self) -> tuple[str, str]:
        """Return the scores of the base and of the final policy, with errors over prompts."""
        before, after = (estimate(one) for one in (self.first, self.last))
        return before, after


def estimate(scores: dict[str, list[float]], most: int | None = None) -> str:
    """Return the mean with its error over prompts, of at most ``most`` samples each, with three decimals."""
    pairs = [(score, prompt) for prompt, some in scores.items() for score in some[:most]]
    found: Estimate = mean_of(*zip(*pairs, strict=True))
    return f"{found.mean:.3f} ± {found.error:.3f}"


def store_scores(store: str, run_id: str) -> Path:
    """Write the held-out OCR scores of the base and the final policy of a run, by prompt, and return the file."""
    opened = open_run(run_id, store)
    run = opened.run
    last = run.recipe.train.num_iterations
    _, made = current_of(run.slots.version(last, "evaluate"))
    assert made is not None, f"{run_id} is not finished"
    tables = {end: opened.held_out(k) for end, k in (("first", 0), ("last", last))}
    groups = {end: table.groupby("prompt_id")["ocr"] for end, table in tables.items()}
    shown = {end: {str(p): " ".join(f"{one:g}" for one in some) for p, some in each} for end, each in groups.items()}
    algorithm, seed = run.recipe.train.train_policy.type, run.recipe.train.seed
    about = {"algorithm": algorithm, "seed": seed, "iterations": last, "cpu": made.numerics["cpu"]}
    about["packages"] = made.numerics["packages"]
    path = (MEASURED if about["cpu"] == CPU else OTHER_CPUS) / f"held-out-{algorithm}-{seed}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(about | shown, indent=1) + "\n", encoding="utf-8")
    return path


def pages() -> dict[Path, str]:
    """Return the text of each page that has figures, as the results give them.

    Raises :class:`ValueError` if a page does not have the place of a figure exactly as often as it should.
    """
    texts: dict[Path, str] = {}
    for name, pattern, figure, count in _figures():
        path = ROOT / name
        text = texts.get(path) or path.read_text(encoding="utf-8")
        texts[path], found = re.subn(pattern, figure, text)
        if found != count:
            raise ValueError(f"{name} has {found} places for {figure!r}, expected {count}: {pattern}")
    return texts


Figure = tuple[str, str, str, int]
"""Page, pattern of the place, new text as a template of ``re.sub``, expected number of places."""
RESULTS, OTHER_RESULTS = "docs/results.md", "docs/results-of-data.md"


def _figures() -> Iterator[Figure]:
    runs = [HeldOut.read(file) for file in sorted(MEASURED.glob("held-out-*.json"))]
    yield from _of_the_demo([run for run in runs if run.algorithm == "nft"])
    rows = {"grpo": r"FlowGRPO, KL 0\.01", "ddrl": r"DDRL, diffusion loss 0\.01 on rendered text"}
    for run in runs:
        if run.algorithm in rows:
            title = rows[run.algorithm].replace("\\", "")
            yield RESULTS, rf"\| {rows[run.algorithm]} \|.*\|", _row(title, *run.ends), 1
    yield from _of_speed()
    yield from _of_data()
    yield from _of_the_service()
    yield from _of_vlms()
    yield from _of_early_warning()
    yield "docs/from-demo-to-sd3.5.md", r"```\ntrains  [^`]*```", _printed("plan-sd3_5"), 1
    yield from _of_the_plan()
    yield "docs/commands.md", r"```\nrun      ddrl-tiny-[^`]*```", _printed("status"), 1


def _of_the_plan() -> Iterator[Figure]:
    """Yield the figures of the page on SD3.5, taken from a printed plan."""
    page, lines = "docs/from-demo-to-sd3.5.md", (MEASURED / "plan-sd3_5.txt").read_text(encoding="utf-8").splitlines()

    def row(title: str, header: str) -> dict[str, str]:
        """Return the cells of a row of the table whose first column is ``header``, by column."""
        start = next(i for i, line in enumerate(lines) if line.startswith(header))
        line = next(line for line in lines[start:] if line.startswith(title))
        ends = [found.end() for found in re.finditer(r"\S+", lines[start][len(header) :])]
        names = lines[start][len(header) :].split()
        starts = [0, *ends[:-1]]
        rest = line[len(header) :]
        cells = zip(names, starts, ends, strict=True)
        return {name: cell for name, first, last in cells if (cell := rest[first:last].strip())}

    needed, saved = (row(name, "a rank's memory, GiB") for name in ("on the device", "activations"))
    said = f"{needed['update']} GiB for an update, {saved['update']} of it activations; {needed['embed']} GiB while"
    yield page, r"[\d.]+ GiB for an update, [\d.]+ of it activations; [\d.]+ GiB while", said, 1
    host = row("CPU of all ranks", "a rank's memory, GiB")["embed"]
    yield page, r"[\d.]+ GiB of the machine's memory", f"{host} GiB of the machine's memory", 1
    seconds = row("together", "predicted seconds")
    told = f"{float(seconds['rollout']):.0f} s for a rollout and {float(seconds['update']):.0f} s for an update"
    yield page, r"\d+ s for a rollout and \d+ s for an update", told, 1


def _of_the_demo(runs: Sequence[HeldOut]) -> Iterator[Figure]:
    header = r"\| seed \| base \| after 16 iterations \|\n\|---\|---\|---\|\n(?:\|.*\n)+"
    lines = [_row("seed", "base", "after 16 iterations"), "|---|---|---|", *(_row(str(r.seed), *r.ends) for r in runs)]
    demo = next(run for run in runs if run.seed == 0)
    yield RESULTS, header, "\n".join(lines) + "\n", 1
    yield "README.md", header, "\n".join(lines[:3]) + "\n", 1
    means = " -> ".join(end.partition(" ")[0] for end in demo.ends)
    yield "docs/install.md", r"held-out ocr: [\d.]+ -> [\d.]+", f"held-out ocr: {means}", 1
    yield "docs/prefect.md", r"`ocr [\d.]+ -> [\d.]+`", f"`ocr {means}`", 1
    other = HeldOut.read(OTHER_CPUS / "held-out-nft-0.json")
    yield RESULTS, r"an Intel Xeon ended at \d\.\d+", f"an Intel Xeon ended at {other.ends[1].partition(' ')[0]}", 1
    yield RESULTS, r"[\d.]+ ± [\d.]+ after \(320 images", f"{estimate(demo.first, 8)} after (320 images", 1
    for scores in (demo.first, demo.last):
        found = mean_of(*zip(*((one, prompt) for prompt, some in scores.items() for one in some), strict=True))
        mean, error = f"{found.mean:.6f}", f"{found.error:.6f}"
        yield "docs/library.ipynb", rf"({re.escape(mean)}{IN_NOTEBOOK})0\.\d+", rf"\g<1>{error}", 2


def _of_speed() -> Iterator[Figure]:
    names = ("iteration", "ranks", "empty-stages", "long-runs")
    iteration, ranks, empty, long = (_newest(f"cpu-{what}") for what in names)
    for rows in (
        speed.iterations(iteration),
        speed.memory(iteration),
        speed.ranks(ranks),
        speed.empty_stages(empty),
        speed.long_runs(long),
    ):
        yield _whole_table(rows)
    around = speed.around_waves(empty)
    said = (
        f"{around['between waves']:.2f} s between two waves, {around['before the first wave']:.1f} s before the first"
    )
    yield RESULTS, r"[\d.]+ s between two waves, [\d.]+ s before the first", said, 1
    for what, title in (("warn", "without torch"), ("export", "with torch"), ("flow", "the command")):
        packages = speed.packages(empty, what)
        yield RESULTS, rf"({title}): [\w. ,]+ s([;.])", rf"\g<1>: {packages} s\g<2>", 1


def _of_data() -> Iterator[Figure]:
    for row in _newest("cpu-data-speed")["measured"]:
        height, width = row["size"]
        core = row["core"]
        rates = f"{core['items_per_s']:.0f}", f"{core['plain_items_per_s']:.0f}", f"{core['ratio']:.2f}"
        yield _table_row(f"`{row['stage']}`", f"{row['source']}, {height} x {width}", *rates, named=2)
    for row in _newest("cpu-data-memory")["measured"]:
        yield _table_row(f"`{row['stage']}`", *(f"{peak / 1e6:.0f} MB" for peak in row["peak_bytes"]), named=1)
    (same,), (slow,) = (_newest(f"cpu-data-{part}")["measured"] for part in ("unchanged", "ahead"))
    seconds = f"{same['seconds']:.1f} s, {same['core_seconds']:.1f} s of a core"
    yield OTHER_RESULTS, r"(pictures and no change: )[\d.]+ s, [\d.]+ s of a core", rf"\g<1>{seconds}", 1
    ahead, needed = (slow["times_local"][how] for how in ("slow", "slow, read when needed"))
    yield OTHER_RESULTS, r"[\d.]+( times as long as from the disk)", rf"{ahead:.2f}\g<1>", 1
    yield OTHER_RESULTS, r"[\d.]+( times if each micro-batch is read)", rf"{needed:.2f}\g<1>", 1


def _of_the_service() -> Iterator[Figure]:
    for row in _newest("cpu-rewards")["measured"]:
        rates = f"{row['scores_per_s']:.1f}", f"{row['plain_scores_per_s']:.1f}", f"{row['ratio']:.2f}"
        yield _table_row(row["scorer"], str(row["processes"]), *rates, named=2)
    (row,) = _newest("cpu-overlap")["measured"]
    said = f"takes {row['beside_s']:.1f} s in place of {row['after_s']:.1f} s, {row['ratio']:.2f} times"
    yield OTHER_RESULTS, r"takes [\d.]+ s in place of [\d.]+ s, [\d.]+ times", said, 1


def _of_vlms() -> Iterator[Figure]:
    found = _newest("cpu-vlm")
    titles = {"full": "projector and language model", "lora": "LoRA of rank 8"}
    for row in found["throughput"]:
        rates = [f"{row[name]:,.0f}" for name in ("tokens_per_core_s", "plain_tokens_per_core_s")]
        cells = titles[row["trains"]], *rates, f"{row['ratio']:.2f}", ", ".join(f"{one:.2f}" for one in row["ratios"])
        yield OTHER_RESULTS, rf"\| {cells[0]} \|.*\|", _row(*cells), 1
    for count, peak in found["peak_mib_by_conversations"].items():
        yield OTHER_RESULTS, rf"\d+( MiB on (?:a dataset|one) of {int(count):,})", rf"{peak:.0f}\g<1>", 1


def _of_early_warning() -> Iterator[Figure]:
    header = ["statistic", "most drift of an honest run", "false alarms at 5", "at 8, the default"]
    header += ["hacked run: first alarm", "drift in its last iteration"]
    runs = [drift.Drift.read(file) for file in sorted(MEASURED.glob("drift-*.json"))]
    yield _whole_table([header, *(list(cells) for cells in drift.rows(runs))])
    rates = {tuple(row["shape"]): f"{row['samples_per_core_s']:.0f}" for row in _newest("cpu-pictures")["measured"]}
    said = (
        f"take {rates[1, 512, 512]} samples a second of a core at 512 x 512, {rates[1, 1024, 1024]} at 1024 x 1024, "
        f"and {rates[16, 256, 256]} videos"
    )
    yield RESULTS, r"take \d+ samples a second of a core .* and \d+ videos", said, 1
    yield "docs/rewards.md", r"It scores about \d+ pictures", f"It scores about {rates[1, 512, 512]} pictures", 1


def _table_row(*cells: str, named: int) -> Figure:
    """Return a row of the results, found by its first ``named`` cells and the number of the others."""
    unit = r" MB" if cells[-1].endswith("MB") else ""
    others = rf" [\d.]+{unit} \|" * (len(cells) - named)
    return OTHER_RESULTS, re.escape("| " + " | ".join(cells[:named]) + " |") + others, _row(*cells), 1


def _whole_table(rows: Sequence[Sequence[str]]) -> Figure:
    """Return a table of the results, found by its header, with any number of rows."""
    header, *others = (_row(*cells) for cells in rows)
    lines = [header, f"|{'---|' * len(rows[0])}", *others]
    return RESULTS, rf"{re.escape(header)}\n\|[-|]+\n(?:\|.*\n)*", "\n".join(lines).replace("\\", r"\\") + "\n", 1


def _row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def _printed(what: str) -> str:
    """Return a Markdown block of a text that ``tests.flows.printed`` stored, as a template of ``re.sub``."""
    text = (MEASURED / f"{what}.txt").read_text(encoding="utf-8")
    return f"```\n{text}```".replace("\\", r"\\")


def _newest(what: str) -> dict[str, Any]:
    return json.loads(max(BENCHMARKS.glob(f"*-{what}.json")).read_text(encoding="utf-8"))


def main(store: str = "", *runs: str) -> None:
    """Store the drift and the scores of ``runs``, and write the pages."""
    for run in runs:
        planned = open_run(run, store).run
        print(drift.store(MEASURED, planned))
        if any(reward.fn.label == "ocr" for reward in planned.recipe.rewards):
            print(store_scores(store, run))
    for path, text in pages().items():
        if text != path.read_text(encoding="utf-8"):
            path.write_text(text, encoding="utf-8")
            print(path)


if __name__ == "__main__":
    main(*sys.argv[1:])
