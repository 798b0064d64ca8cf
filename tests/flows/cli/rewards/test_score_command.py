"""Scores of people's own files, by the command."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
import torch
from PIL import Image
from typer.testing import CliRunner, Result

from cosmos_rl_core import outside_plugins
from cosmos_rl_core.datasets import rendered_text
from cosmos_rl_core.rewards import pixel_similarity
from cosmos_rl_core.rewards._base import Sample
from cosmos_rl_core.rewards.aesthetic import HEAD
from cosmos_rl_core.storage import media
from flows.cli.app import app
from tests.outside import REWARD
from tests.running_service import PROBE, in_thread, name_to_clients, settings, write
from tests.tiny_scorers.aesthetic import perceptron


def run(*arguments: Any) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


@pytest.fixture
def pictures(tmp_path: Path) -> list[Path]:
    """A sign that says K7, one that says AE, and a file that is no picture."""
    files = [tmp_path / name for name in ("k7.png", "ae.png", "broken.png")]
    for file, word in zip(files, ("K7", "AE"), strict=False):
        drawn = rendered_text.draw(word, rendered_text.Options(dirty=0), np.random.default_rng(0))
        Image.fromarray(drawn).save(file)
    files[2].write_bytes(b"no picture")
    return files


def test_each_file_has_its_score_and_a_failure_is_no_number(pictures: list[Path]):
    prompt = rendered_text.prompt_text("K7")
    ended = run("score", *pictures, "--reward", "ocr", "--set", "line_width=96", "--prompt", prompt, "--json")
    assert ended.exit_code == 65
    told = json.loads(ended.stdout)
    assert told["reward"] == "ocr"
    assert "sha256:" in told["scorer"]
    assert [one["scores"] for one in told["files"]] == [{"ocr": 1.0}, {"ocr": 0.0}, {}]
    assert [bool(one["error"]) for one in told["files"]] == [False, False, True]
    assert "cannot identify image file" in told["files"][2]["error"]


def test_the_table_names_files_scores_and_failures(pictures: list[Path], tmp_path: Path):
    (tmp_path / "prompts.txt").write_text(f"{rendered_text.prompt_text('K7')}\nno word\n", encoding="utf-8")
    ended = run("score", *pictures[:2], "--reward", "ocr", "--prompts", tmp_path / "prompts.txt")
    assert ended.exit_code == 65
    lines = [line.split() for line in ended.stdout.splitlines()]
    assert lines[0] == ["file", "ocr"]
    assert [line[-1] for line in lines[1:3]] == ["1", "FAILED"]
    assert "needs the text to render between double quotes" in ended.stdout
    assert run("score", pictures[0], "--reward", "ocr", "--prompts", tmp_path / "prompts.txt").exit_code == 64


def test_names_of_scores_are_never_cut(pictures: list[Path]):
    columns = " ".join(run("score", pictures[0], "--reward", "pixel_statistics").stdout.split())
    assert "…" not in columns


def test_videos_and_groups_are_scored_whole(tmp_path: Path):
    video = np.zeros((4, 16, 16, 3), np.uint8)
    video[1::2] = 255
    (tmp_path / "a.mkv").write_bytes(media.encode(video)[1])
    for name, level in (("a", 0), ("b", 51)):
        Image.new("RGB", (16, 16), (level,) * 3).save(tmp_path / f"{name}.png")
    files = [tmp_path / name for name in ("a.mkv", "a.png", "b.png")]
    ended = run("score", *files, "--reward", "pixel_statistics", "--json")
    assert ended.exit_code == 0
    found = [one["scores"] for one in json.loads(ended.stdout)["files"]]
    assert found[0]["flicker"] == 1.0
    assert [one.get("group_diversity") for one in found] == [None, 0.2, 0.2]


def test_a_reward_learns_the_frames_per_second_of_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(media, "FPS", 24)
    (tmp_path / "a.mkv").write_bytes(media.encode(np.zeros((4, 16, 16, 3), np.uint8))[1])
    ended = run("score", tmp_path / "a.mkv", "--reward", "probe", "--plugin", PROBE, "--json")
    outside_plugins.find([])
    assert json.loads(ended.stdout)["files"][0]["scores"]["fps"] == 24.0


def test_unknown_names_list_the_known_ones(pictures: list[Path], tmp_path: Path):
    for arguments, reason in (
        (["--reward", "pickscroe"], "did you mean 'pickscore'? known: aesthetic, clip_image_similarity"),
        (["--reward", "jpeg", "--set", "qualty=3"], "qualty: unknown key"),
        (["--reward", "clip_score", "--set", "model=nowhere"], "'nowhere' is not a directory here"),
        # Another name of it, by which services offer it.
        (["--reward", "clipscore", "--set", "model=nowhere"], "'nowhere' is not a directory here"),
        (["--reward", "jpeg", "--prompt", "a", "--prompts", "b"], "--prompt and --prompts are both given"),
    ):
        ended = run("score", pictures[0], *arguments)
        assert (ended.exit_code, reason in ended.stderr) == (64, True), ended.stderr


def test_a_users_own_reward_scores_files(tmp_path: Path):
    (tmp_path / "bright.py").write_text(REWARD, encoding="utf-8")
    Image.new("RGB", (4, 4), (51,) * 3).save(tmp_path / "grey.png")
    own = ("--reward", "bright", "--plugin", tmp_path / "bright.py", "--set", "factor=2")
    ended = run("score", tmp_path / "grey.png", *own, "--json")
    outside_plugins.find([])
    assert json.loads(ended.stdout)["files"][0]["scores"] == {"bright": 0.4}


def test_published_weights_are_prepared_once(tmp_path: Path):
    tensors = perceptron()
    torch.save({name: torch.tensor(values, device="cpu") for name, values in tensors.items()}, tmp_path / "head.pth")
    ended = run("reward-service", "prepare", "aesthetic", tmp_path / "head.pth", tmp_path / "made")
    assert ended.exit_code == 0, ended.stderr
    made = safetensors.numpy.load_file(tmp_path / "made" / HEAD)
    assert {name: values.tolist() for name, values in made.items()} == {n: v.tolist() for n, v in tensors.items()}
    published = ("aesthetic", tmp_path / "head.pth", tmp_path / "told")
    told = {"reward": "aesthetic", "source": f"{tmp_path}/head.pth", "directory": f"{tmp_path}/told"}
    assert json.loads(run("reward-service", "prepare", *published, "--json").stdout) == told
    again = run("reward-service", "prepare", "aesthetic", tmp_path / "head.pth", tmp_path / "made")
    assert (again.exit_code, "exists already" in again.stderr) == (64, True)
    other = run("reward-service", "prepare", "jpeg", tmp_path / "head.pth", tmp_path / "other")
    assert "weights of jpeg need no preparation; only aesthetic, hpsv2" in other.stderr


def test_if_one_file_of_a_group_fails_the_whole_group_fails(pictures: list[Path], tmp_path: Path):
    (tmp_path / "prompts.txt").write_text("a\nraise\n")
    given = [*pictures[:2], "--reward", "probe_group", "--prompts", tmp_path / "prompts.txt"]
    ended = run("score", *given, "--plugin", PROBE.replace("probe.py", "probe_group.py"))
    assert ended.exit_code == 65
    assert ended.stdout.count("FAILED") == ended.stdout.count("not this one") == 2


def test_a_service_that_is_away_ends_the_command_at_once(pictures: list[Path]):
    asked = ["model=x", "rubric={prompt}", "key=score", "lowest=0", "highest=1", "tries=1", "url=http://127.0.0.1:9/v1"]
    ended = run("score", *pictures, "--reward", "vlm_judge", *(word for one in asked for word in ("--set", one)))
    assert (ended.exit_code, ended.stdout) == (75, ""), "no file is to blame"
    assert ended.stderr.count("gave no answer") == 1


def test_scores_are_printed_also_if_the_agreement_cannot_be_written(pictures: list[Path], tmp_path: Path):
    (tmp_path / "labels.txt").write_text("1\n2\n")
    asked = ["score", *pictures[:2], "--reward", "jpeg", "--labels", tmp_path / "labels.txt", "--agreement"]
    ended = run(*asked, tmp_path)
    assert ended.exit_code == 64, ended.exception
    assert "2 labelled files" in ended.stdout
    assert f"cannot write {tmp_path}: Is a directory" in ended.stderr
    assert run(*asked, tmp_path / "new" / "agreement.json").exit_code == 0
    assert json.loads((tmp_path / "new" / "agreement.json").read_bytes())["files"] == 2


@pytest.fixture
def edits(tmp_path: Path) -> list[Path]:
    """Two results, and two pictures that they were made of."""
    files = [tmp_path / name for name in ("result-a.png", "result-b.png", "a.png", "b.png")]
    for seed, file in enumerate(files):
        pixels = np.random.default_rng(seed).integers(0, 256, (12 + seed, 16, 3), np.uint8)
        Image.fromarray(pixels).save(file)
    return files


def rows(folder: Path, *values: Any) -> Path:
    file = folder / "edits.jsonl"
    file.write_text("".join(f"{json.dumps(value)}\n" for value in values), encoding="utf-8")
    return file


def test_files_are_compared_with_the_references_of_their_rows(edits: list[Path], tmp_path: Path):
    given = rows(tmp_path, {"prompt": "x", "references": ["a.png", "b.png"]}, {"prompt": "x", "references": ["b.png"]})
    ended = run("score", *edits[:2], "--reward", "pixel_similarity", "--prompts", given, "--json")
    assert ended.exit_code == 0, ended.stderr
    pixels = [np.asarray(Image.open(file))[None] for file in edits]
    shown = [(pixels[2], pixels[3]), (pixels[3],)]
    samples = [Sample(f"{i}", "p", "x", pixels[i], references=shown[i]) for i in range(2)]
    expected = pixel_similarity.Reward(pixel_similarity.Options()).score(samples)
    assert [one["scores"] for one in json.loads(ended.stdout)["files"]] == expected


def test_all_rows_that_cannot_be_compared_are_named_at_once(edits: list[Path], tmp_path: Path):
    given = rows(tmp_path, {"prompt": "x", "references": ["gone.png"]}, {"prompt": "y"}, {"references": ["a.png"]})
    ended = run("score", *edits[:3], "--reward", "pixel_similarity", "--prompts", given)
    assert ended.exit_code == 64
    for sentence in (
        f"line 1: no file at {tmp_path / 'gone.png'}",
        "line 2: no references, which pixel_similarity compares with; name them in a file: --prompts FILE.jsonl",
        'line 3: expected an object with the text "prompt"',
    ):
        assert sentence in " ".join(ended.stderr.split())
    (tmp_path / "lines.txt").write_text("a\nb\n")
    for arguments in (["--prompt", "x"], ["--prompts", tmp_path / "lines.txt"], []):
        ended = run("score", *edits[:2], "--reward", "pixel_similarity", *arguments)
        assert (ended.exit_code, "name them in a file: --prompts" in ended.stderr) == (64, True), ended.stderr
    ended = run("score", edits[0], "--reward", "jpeg", "--prompts", rows(tmp_path, {"prompt": "x"}, {"prompt": "y"}))
    assert "has 2 lines for 1 files" in ended.stderr


def test_lines_of_text_that_cannot_be_compared_are_numbered_from_1(edits: list[Path], tmp_path: Path):
    (tmp_path / "lines.txt").write_text("a\nb\n")
    ended = run("score", *edits[:2], "--reward", "pixel_similarity", "--prompts", tmp_path / "lines.txt")
    assert ended.exit_code == 64
    assert re.findall(r"line (\d+): no references", ended.stderr) == ["1", "2"]


def test_rewards_that_ignore_references_score_the_same_with_and_without(edits: list[Path], tmp_path: Path):
    found: list[Any] = []
    for more in ({}, {"references": ["a.png"]}):
        given = rows(tmp_path, {"prompt": "x"} | more, {"prompt": "x"} | more)
        ended = run("score", *edits[:2], "--reward", "jpeg", "--prompts", given, "--json")
        found.append([one["scores"] for one in json.loads(ended.stdout)["files"]])
    assert found[0] == found[1]


def test_a_reward_of_a_service_compares_files_too(edits: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    given = rows(tmp_path, {"prompt": "x", "references": ["a.png", "b.png"]}, {"prompt": "x", "references": ["b.png"]})
    own = run("score", *edits[:2], "--reward", "pixel_similarity", "--prompts", given, "--json")
    values = settings(tmp_path, {"reward_type": "pixel_similarity"}, {"reward_type": "jpeg", "name": "jpeg"})
    with in_thread(write(tmp_path, values)) as client:
        name_to_clients(client, monkeypatch)
        remote = ("--reward", "remote", "--set", "reward_fn=pixel_similarity", "--prompts", given, "--json")
        ended = run("score", *edits[:2], *remote, "--set", "references=needed")
        refused = run("score", *edits[:2], *remote, "--set", "references=needed", "--set", "reward_fn=jpeg")
    assert ended.exit_code == 0, ended.stderr
    scores = [[one["scores"]["pixel_similarity"] for one in json.loads(each.stdout)["files"]] for each in (ended, own)]
    assert scores[0] == scores[1]
    assert (refused.exit_code, 'set references = "ignored"' in refused.stderr) == (64, True)


def test_a_service_gets_the_metadata_of_prompts(pictures: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    given = rows(tmp_path, {"prompt": "metadata", "count": 7}, {"prompt": "metadata", "count": 8})
    with in_thread(write(tmp_path, settings(tmp_path))) as client:
        name_to_clients(client, monkeypatch)
        remote = ("--reward", "remote", "--set", "reward_fn=probe", "--set", "score_key=probe_reward")
        ended = run("score", *pictures[:2], *remote, "--prompts", given, "--json")
    assert ended.exit_code == 0, ended.stdout + ended.stderr
    assert [one["scores"]["probe_reward"] for one in json.loads(ended.stdout)["files"]] == [7, 8]
