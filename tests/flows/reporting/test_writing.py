"""The page of a run while it works, after it failed, and on demand. Samples are imagined, fragments are real."""

import re
import time
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest

from cosmos_rl_core.errors import ApprovalError, StageError
from cosmos_rl_core.storage import store
from flows.auditing.audit import audit
from flows.ledger.costs import duration
from flows.ledger.ledger import Ledger
from flows.ledger.shape import shape_of
from flows.library import open_run
from flows.library.collected import Collected
from flows.planning.plan import Settings
from flows.planning.run import Run
from flows.reporting import writing
from flows.reporting.report import write_report
from flows.session import loop
from flows.terminal import commands
from stages.artifacts.artifact import Artifact
from stages.artifacts.generations import invalidate
from stages.artifacts.records import place_of
from stages.artifacts.slots import current_of, input_of
from stages.contracts import MEDIA
from stages.execution.spending import Crew
from stages.reporting.contracts import Report
from tests.flows.by_hand import SECONDS, validated
from tests.flows.imagined import Imagined, full_size
from tests.flows.ledger.test_ledger import entry, written
from tests.hand_made import planned

BAR = "files:  50%|██▌  | 1/2 [00:01<00:01,  1.0file/s]"
LOG = f"epoch 1\nout_of_memory: 80 GB\n\rfiles:   0%|     | 0/2\r{BAR}\n\n".encode()
KEEP = ("[rollout]", "[rollout]\nkeep = { media = 1 }")


def go(run: Run, folder: Path, stop_at: str = "", error: BaseException | None = None, frames: int = 1) -> list[str]:
    """Take a run to its end, or to the wave where it gets an error; what was noted."""
    notes: list[str] = []
    imagined = Imagined(run, folder, frames=frames)
    if error is not None:
        imagined.stop_at[stop_at] = error
    with writing.Pages(run, notes.append) as pages:
        imagined.done = pages.done
        loop.make(run, imagined.launch)
    return notes


def page_of(run: Run) -> str:
    return store.read(writing.address(run)).decode()


@pytest.fixture
def run(recipe, tmp_path: Path) -> Run:
    """Two iterations that keep the pictures of one rollout, judged at their ends."""
    return planned(validated(recipe, tmp_path, KEEP), tmp_path, run_id="hand", iterations=2)


def test_the_page_is_there_after_each_iteration_at_one_address(run: Run, tmp_path: Path, monkeypatch):
    monkeypatch.setattr(writing, "SHARE", 0)
    seen: dict[str, None] = {}
    imagined = Imagined(run, tmp_path)
    with writing.Pages(run, print) as pages:

        def done(requests: Any, manifests: Any) -> None:
            pages.done(requests, manifests)
            if store.size(writing.address(run)) is not None:
                seen[page_of(run)] = None

        imagined.done = done
        loop.make(run, imagined.launch)
    seen[page_of(run)] = None
    told = [re.findall(r"<p>(\w+: \d) of 2 iterations are trained", page) for page in seen]
    assert told == [["Running: 0"], ["Running: 1"], ["Running: 2"], ["Running: 2"], ["Finished: 2"]]


def test_full_pictures_lie_next_to_the_page_though_rollouts_lost_theirs(run: Run, tmp_path: Path):
    go(run, tmp_path)
    assert Artifact(input_of(run.slots.iteration(0, "rollout"))).lacks(MEDIA)
    links = {unquote(link) for link in re.findall(r'<a class="shot" href="([^"]+)"', page_of(run))}
    assert any("/0000/" in link for link in links)
    found = {link: store.read(store.join(run.slots.report, link)) for link in links}
    assert {full_size(data) for data in found.values()} == {(16, 16)}


def test_a_video_plays(recipe, tmp_path: Path):
    run = planned(recipe(), tmp_path, run_id="hand", iterations=1)
    go(run, tmp_path, frames=3)
    (link, *_) = re.findall(r'<a class="shot film" href="([^"]+)"', page_of(run))
    assert link.endswith(".mp4")
    assert store.read(store.join(run.slots.report, link))[4:8] == b"ftyp"


@pytest.mark.parametrize(
    ("error", "state"),
    [
        (StageError.of("crash", "iteration-0001/update ended (crash): <b>why</b>"), "failed"),
        (ApprovalError.on("evidence", "iteration 1 exceeds its limits"), "suspended"),
        (KeyboardInterrupt(), "stopped"),
    ],
)
def test_a_run_that_ended_says_how_and_shows_the_iteration_in_which_it_did(
    run: Run, tmp_path: Path, error: BaseException, state: str
):
    with pytest.raises(type(error)):
        go(run, tmp_path, "iteration-0001/update+fragment", error)
    page = page_of(run)
    assert f'<span class="state {state}">{state}</span>' in page
    assert ": 1 of 2 iterations are trained" in page
    # Its fragment was not made, and is not made here: its small pictures come from the rollout.
    assert current_of(run.slots.iteration(1, "fragment"))[1] is None
    assert '<details id="iteration-1" open>' in page
    assert "<b>why" not in page


def test_the_time_left_agrees_with_status_and_counts_the_last_evaluation(run: Run, tmp_path: Path):
    written(run, SECONDS, until="policy-0002/export")
    with pytest.raises(KeyboardInterrupt):
        go(run, tmp_path, "policy-0002/export", KeyboardInterrupt())
    left_s = open_run("hand", run.store_url).now().outlook.left_s
    assert left_s == pytest.approx(4 + 20 + 3, abs=1.0)
    assert f"<p>About {duration(left_s or 0)} of work left. " in page_of(run)


def test_the_page_tells_of_workers(run: Run):
    ledger = Ledger(run.url, shape_of(run.plan), [].append)
    for k, (outcome, lost) in enumerate((("killed", 3), ("made", 1), ("made", 0))):
        crew = Crew(workers=0, largest=2 + lost, units=8 - lost, of=8, lost=lost, worker_s=50.0)
        slot = place_of(run.slots.iteration(k // 2, "rollout"))
        of_workers = entry("rollout", slot, 40.0, outcome).model_copy(update={"crew": crew})
        page = ledger.page(f"iteration-000{k // 2}/rollout", time.monotonic() - 40.0)
        page.turn(lambda of_workers=of_workers: [of_workers])
        page.close([of_workers])
    told = "rollout: at most 5 workers, 16 units in 2.5 min of workers, 4 lost"
    page = Path(write_report(open_run("hand", run.store_url))).read_text(encoding="utf-8")
    assert f"<dt>workers</dt><dd>{told}</dd>" in page


def test_a_page_on_demand_tells_of_a_killed_run_and_of_failed_attempts(run: Run, tmp_path: Path, main):
    with pytest.raises(KeyboardInterrupt):
        go(run, tmp_path, "iteration-0001/update+fragment", KeyboardInterrupt())
    update = run.slots.iteration(1, "update")
    store.write(store.join(update, "logs", "20250131T120000-aaaa.log"), LOG)
    store.remove(writing.address(run))
    commands.keep(run, Settings("tiny.toml", run.store_url, overrides=["train.seed=1"]))
    code, out, _ = main("report", "hand", "--store", run.store_url)
    assert (code, out.strip()) == (0, writing.address(run))
    page = page_of(run)
    row = ["iteration-0001/update", "1", "out_of_memory: 80 GB"]
    assert "".join(f"<td>{cell}</td>" for cell in row) in page
    here = Path.cwd()
    command = f"cosmos-flows run {here}/tiny.toml --store {run.store_url} --run-id hand --set train.seed=1"
    assert f"<p>To continue:</p><pre>cd {here} &amp;&amp; {command}</pre>" in page
    assert main("report", "other", "--store", run.store_url)[0] == 64
    assert main("report", "hand", "--store", "s3://bucket/runs", "--open")[0] == 64


def test_the_page_on_demand_is_the_one_that_the_run_wrote(run: Run, tmp_path: Path):
    go(run, tmp_path)
    before = re.sub(r"Written [^<]*", "", page_of(run))
    written = re.sub(
        r"Written [^<]*", "", Path(write_report(open_run("hand", run.store_url))).read_text(encoding="utf-8")
    )
    state = r'(<span class="state \w+">\w+</span>)|(<p>[^:<]+: 2 of 2)'
    assert re.sub(state, "", written) == re.sub(state, "", before)


def test_remade_artifacts_are_named_and_fragments_are_made_from_them(run: Run, tmp_path: Path):
    go(run, tmp_path)
    invalidate(run.slots.iteration(1, "reward-ocr"), 1, "scored by mistake")
    go(run, tmp_path)
    assert "made again, generation 2: scored by mistake" in page_of(run)


def test_a_page_that_cannot_be_written_ends_no_run(run: Run, tmp_path: Path, monkeypatch):
    def fails(collected: Collected, *_: str) -> bytes:
        raise ZeroDivisionError("in the page")

    monkeypatch.setattr(writing, "page", fails)
    notes = go(run, tmp_path)
    assert notes[-1].startswith("warning: the page of the report was not written (ZeroDivisionError: in the page)")
    assert Artifact(input_of(run.slots.report)).names() == [Report.PAGE]


def test_audit_covers_fragments_and_the_page(run: Run, tmp_path: Path):
    go(run, tmp_path)
    before = {fault.file for fault in audit(run.store_url, "hand").faults}
    slot = run.slots.iteration(1, "fragment")
    _, made = current_of(slot)
    assert made is not None
    for name in ("fragment.json", next(name for name in made.files if name.startswith("full/"))):
        path = Path(slot) / made.files[name].path
        path.write_bytes(path.read_bytes()[:-1] + b"?")
    store.write(writing.address(run), b"anything")
    faults = {fault.file for fault in audit(run.store_url, "hand").faults} - before
    # The manifest, because the numbers of the fragment cannot be compared with the scores.
    assert {Path(file).name for file in faults} == {"fragment.json", Path(name).name, "manifest.1.json"}
