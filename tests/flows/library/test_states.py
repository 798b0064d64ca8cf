import io
import shutil

import pytest
from rich.console import Console
from typer.testing import CliRunner

from cosmos_rl_core.storage import store
from cosmos_rl_core.storage.sealed import seal, unseal
from flows.cli import app as cli
from flows.library import open_run
from flows.library.states import states
from flows.planning import requests
from flows.planning.run import Run
from flows.planning.steps import read_run
from flows.watching.screen import screen
from flows.watching.status_table import rendered
from stages.artifacts.generations import invalidate
from stages.artifacts.slots import current_of
from tests.flows.by_hand import make_all, make_one, whole_run
from tests.hand_made import begin, make_run, planned, remove, rewards

HEADER = ["", "rollout", "reward-jpeg", "reward-ocr", "update", "fragment"]


def rows_and_lines(run: Run) -> tuple[list[list[str]], list[str]]:
    """The cells of the table, and the lines around it."""
    rows, lines = [], []
    for part in rendered(open_run(run.plan.run_id, run.store_url).now()):
        if isinstance(part, str):
            lines.append(part)
            continue
        printed = io.StringIO()
        Console(file=printed, width=250).print(part)
        table = [line.replace("┃", "│").split("│") for line in printed.getvalue().splitlines()]
        rows += [[cell.strip() for cell in row[1:-1]] for row in table if len(row) > 1]
    return rows, lines


def words(run: Run) -> dict[str, str]:
    """Every stage's state."""
    return {state.step.name: state.word for state in states(read_run(run.store_url, run.plan.run_id))}


def of_word(run: Run, word: str) -> list[str]:
    return [name for name, found in words(run).items() if found == word]


def test_a_run_that_has_not_begun_has_no_artifact(recipe, tmp_path):
    run = planned(recipe(), tmp_path, run_id="hand")
    assert rows_and_lines(run) == (
        [
            ["", "rollout", "reward-ocr", "update", "fragment"],
            ["start", "policy -", "embed -", "", ""],
            ["policy-0000", "export -", "", "", ""],
            ["iteration-0000", "-", "-", "-", "-"],
            ["iteration-0001", "-", "-", "-", "-"],
            ["policy-0002", "export -", "", "", ""],
            ["end", "report -", "", "", ""],
        ],
        [
            f"hand ({run.url}): no process works on it",
            "0 of 13 stages are finished",
            "to go on, give its command again or retry its flow run",
        ],
    )


def test_an_iteration_is_shown_once_where_the_next_prompts_are_embedded_before_its_end(recipe, words, tmp_path):
    words(*(f'a sign that says "{number}"' for number in range(300)))
    run = planned(recipe(("[train]", "[train]\nstaleness = 1")), tmp_path, run_id="hand", iterations=140)
    rows, _ = rows_and_lines(run)
    assert rows[0] == ["", "embed", "rollout", "reward-ocr", "update", "fragment"]
    assert ["iteration-0128", "-", "-", "-", "-", "-"] in rows
    iterations = [row[0] for row in rows if row[0].startswith("iteration")]
    assert iterations == [f"iteration-{k:04d}" for k in range(140)]
    lines = screen(open_run("hand", run.store_url).now(), 80, 24)
    assert "now      start (0 of 140 iterations are finished): 0 of 566 stages are finished" in lines


def test_lost_embeddings_of_the_next_prompts_hide_no_finished_stage(recipe, words, tmp_path):
    words(*(f'a sign that says "{number}"' for number in range(300)))
    run = planned(recipe(("[train]", "[train]\nstaleness = 1")), tmp_path, run_id="hand", iterations=129)
    make_all(run)
    shutil.rmtree(run.prepared.embed_at(128).slot)
    assert of_word(run, "missing") == ["iteration-0128/embed"]
    assert of_word(run, "waits")[0] == "iteration-0128/rollout"


def test_a_finished_run_shows_times_and_rewards(recipe, tmp_path):
    run = whole_run(recipe, tmp_path)
    judged = [
        "export 4.0 s",
        "evaluate 20.0 s",
        "evaluate-jpeg 3.0 s 0.250",
        "evaluate-ocr 3.0 s 0.250",
        "0.0 s",
    ]
    assert rows_and_lines(run) == (
        [
            HEADER,
            ["start", "policy 1.0 s", "embed 2.0 s", "", "", ""],
            ["policy-0000", *judged],
            *([f"iteration-{k:04d}", "10.0 s", "3.0 s 0.250", "3.0 s 0.250", "30.0 s", "0.0 s"] for k in (0, 1)),
            ["policy-0002", *judged],
            ["end", "report 5.0 s", "", "", "", ""],
        ],
        [
            f"hand ({run.url}): no process works on it",
            "best: policy 0, held-out ocr 0.25 (jpeg 0.25, ocr 0.25)",
            "held-out ocr: 0.250 (policy 0) -> 0.250 (policy 2)",
            "held-out jpeg: 0.250 (policy 0) -> 0.250 (policy 2)",
            "reward hacking: no sign of it: no limit of early warning tripped.",
            "23 of 23 stages are finished",
        ],
    )


def test_a_stage_that_reads_changed_bytes_is_stale_and_the_stages_after_it_wait(recipe, tmp_path):
    run = whole_run(recipe, tmp_path)
    reward = rewards(run, run.slots.iteration(0, "rollout"), 0)[1]
    invalidate(reward.slot, 1, "test")
    make_one(reward, salt="other scores")
    rows, lines = rows_and_lines(run)
    assert rows[3:5] == [
        [
            "iteration-0000",
            "10.0 s",
            "3.0 s 0.250",
            "3.0 s 0.250 (generation 2, 2 attempts)",
            "stale 30.0 s",
            "stale 0.0 s",
        ],
        ["iteration-0001", "waits 10.0 s", "waits 3.0 s 0.250", "waits 3.0 s 0.250", "waits 30.0 s", "waits 0.0 s"],
    ]
    assert "iteration-0000/update is stale: scores changed since update was made" in lines
    assert lines[-2] == "10 of 23 stages are finished"
    assert set(of_word(run, "stands")) == {
        "policy",
        "embed",
        *(f"policy-0000/{stage}" for stage in ("export", "evaluate", "evaluate-jpeg", "evaluate-ocr", "fragment")),
        *(f"iteration-0000/{stage}" for stage in ("rollout", "reward-jpeg", "reward-ocr")),
    }


def test_stages_after_an_ended_generation_wait_until_equal_bytes_are_made(recipe, tmp_path):
    run = whole_run(recipe, tmp_path)
    request = requests.rollout(run, 1)
    invalidate(request.slot, 1, "test")
    rows, lines = rows_and_lines(run)
    assert rows[4][1:] == ["invalidated (generation 2)", *["waits 3.0 s 0.250"] * 2, "waits 30.0 s", "waits 0.0 s"]
    assert rows[-1][1] == "report waits 5.0 s"
    assert lines[-2] == "12 of 23 stages are finished"
    make_one(request)
    rows, lines = rows_and_lines(run)
    assert rows[4] == [
        "iteration-0001",
        "10.0 s (generation 2, 2 attempts)",
        "3.0 s 0.250",
        "3.0 s 0.250",
        "30.0 s",
        "0.0 s",
    ]
    assert lines[-1] == "23 of 23 stages are finished"


def test_a_monitored_reward_that_is_to_be_made_keeps_only_the_report_waiting(recipe, tmp_path):
    run = whole_run(recipe, tmp_path)
    invalidate(run.slots.iteration(0, "reward-jpeg"), 1, "test")
    assert of_word(run, "invalidated") == ["iteration-0000/reward-jpeg"]
    assert of_word(run, "waits") == ["iteration-0000/fragment", "report"]
    assert len(of_word(run, "stands")) == 20


def test_a_lost_file_makes_its_stage_stale(recipe, tmp_path):
    run = whole_run(recipe, tmp_path)
    _, manifest = current_of(run.slots.version(2, "export"))
    assert manifest is not None
    lost = store.join(manifest.slot, manifest.files["current/w"].path)
    remove(lost)
    assert f"policy-0002/export is stale: current/w is missing ({lost})" in rows_and_lines(run)[1]
    waiting = [
        *(f"policy-0002/{stage}" for stage in ("evaluate", "evaluate-jpeg", "evaluate-ocr", "fragment")),
        "report",
    ]
    assert of_word(run, "waits") == waiting


def test_another_seed_makes_stages_stale(recipe, tmp_path):
    run = whole_run(recipe, tmp_path)
    url = store.join(run.url, "plan.json")
    body = unseal(store.read(url), "plan", url)
    body["recipe"]["validation"]["seed"] += 1
    store.write(url, seal("plan", body))
    lines = rows_and_lines(run)[1]
    reason = "the settings of evaluate changed (iteration or seed)"
    assert f"policy-0000/evaluate is stale: {reason}" in lines
    assert of_word(run, "stale") == ["policy-0000/evaluate", "policy-0002/evaluate"]
    # They read scores of samples that will be made again.
    assert "policy-0002/evaluate-ocr" in of_word(run, "waits")


def test_a_damaged_manifest_is_shown_in_its_cell(recipe, tmp_path):
    run = whole_run(recipe, tmp_path)
    url = store.join(run.slots.iteration(0, "reward-ocr"), "manifest.1.json")
    store.write(url, b'{"format": 1')
    rows, lines = rows_and_lines(run)
    assert rows[3] == ["iteration-0000", "10.0 s", "3.0 s 0.250", "damaged", "waits 30.0 s", "waits 0.0 s"]
    (why,) = [line for line in lines if " is damaged: " in line]
    assert why.startswith(f"iteration-0000/reward-ocr is damaged: {url} is damaged: not a sealed manifest (")
    ended = CliRunner().invoke(cli.app, ["status", "hand", "--store", run.store_url])
    assert ended.exit_code == 65
    assert why in ended.stdout.splitlines()


def test_a_file_of_another_size_is_damage(recipe, tmp_path):
    run = whole_run(recipe, tmp_path)
    _, manifest = current_of(run.slots.policy(0))
    assert manifest is not None
    store.write(store.join(manifest.slot, manifest.files["current/w"].path), b"other")
    assert of_word(run, "damaged") == ["policy"]
    assert of_word(run, "stands") == ["embed"]
    rows, lines = rows_and_lines(run)
    assert rows[1][1] == "policy damaged 1.0 s"
    assert any(line.startswith("policy is damaged: ") and "has 5 bytes" in line for line in lines)


def test_a_run_shows_the_iterations_beyond_its_first_plan(recipe, tmp_path):
    run = make_run(recipe(), tmp_path, iterations=3)
    begin(requests.rollout(run, 3), layout={})
    shown = [row[0] for row in rows_and_lines(run)[0] if row[0].startswith("iteration-")]
    assert shown == [f"iteration-{k:04d}" for k in range(4)]
    assert words(run)["iteration-0003/rollout"] == "missing"


@pytest.mark.parametrize("width", [60, 200])
def test_the_lines_are_whole_on_terminals_of_any_width(recipe, tmp_path, width, monkeypatch):
    run = whole_run(recipe, tmp_path)
    monkeypatch.setenv("COLUMNS", str(width))
    ended = CliRunner().invoke(cli.app, ["status", "hand", "--store", run.store_url])
    assert ended.exit_code == 0, ended.stderr
    printed = ended.stdout.splitlines()
    assert [line for line in rows_and_lines(run)[1] if line not in printed] == []
