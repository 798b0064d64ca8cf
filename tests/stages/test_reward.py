import io
import json
from typing import Any

import numpy as np
import pandas as pd
import pytest

from cosmos_rl_core import plugins
from cosmos_rl_core.datasets import rendered_text as rendered
from cosmos_rl_core.datasets._base import Prompt
from cosmos_rl_core.errors import ArtifactError, ConfigError, RewardError
from cosmos_rl_core.numerics import numerics
from cosmos_rl_core.rewards import ocr
from cosmos_rl_core.rewards._base import Sample
from cosmos_rl_core.storage import media, shards, store
from stages import contracts
from stages.artifacts.artifact import Artifact
from stages.artifacts.attempt import Attempt
from stages.artifacts.layouts import cut
from stages.artifacts.manifest import content_of
from stages.artifacts.request import Request
from stages.artifacts.slots import current_of, input_of, why_stale
from stages.execution.execution import Execution
from stages.execution.outcome import Outcome, read_status
from stages.execution.runner import execute
from stages.formats import samples
from stages.generating.encoding import with_media
from stages.generating.plans import plan_samples
from stages.reporting.contracts import Report

OPTIONS = ocr.Options(line_width=96)
RIGHT, CLOSE, WRONG = ("K7", "K7"), ("K7", "K4"), ("K7", "AE")
"""(word asked for, word drawn): scores of 1, 0.5 and 0."""
UNSCORABLE = (None, "K7")
"""A prompt without a word in quotes."""


def drawn(word):
    """One clean sign that shows ``word``: uint8 ``[1, height, width, 3]``."""
    return rendered.draw(word, rendered.Options(dirty=0), np.random.default_rng(0))[None]


def plan_of(pairs):
    """One sample a pair, in order, each of a prompt of its own."""
    texts = ["a sign" if wanted is None else rendered.prompt_text(wanted) for wanted, _ in pairs]
    prompts = tuple(Prompt(id=f"p{number}", text=text) for number, text in enumerate(texts))
    return plan_samples(prompts, 1, run_seed=0, iteration=None)


def write_samples(slot, pairs, per_shard=2, damage=None, pictures=None):
    """A committed samples artifact; ``damage`` changes the files of a shard before it is packed."""
    planned = plan_of(pairs)
    pixels = pictures or [drawn(shown) for _, shown in pairs]
    stored = [with_media(s, picture, None, {"policy": "c"}) for s, picture in zip(planned, pixels, strict=True)]
    return write_units(slot, stored, per_shard, damage)


def write_units(slot, stored, per_shard, damage=None):
    """A committed artifact of stored samples."""
    config = Report(title=f"samples {per_shard}", reward="ocr")
    request = Request(stage="report", slot=slot, seed=0, config=config)
    generation, attempt_id, _ = Attempt.begin(request, print)
    attempt = Attempt(request, {}, generation, attempt_id)
    for number, unit in enumerate(cut(stored, per_shard)):
        files = samples.unit_files(number, unit)
        name = samples.unit_name(contracts.MEDIA, number)
        files[name] = shards.pack(damage(shards.unpack(files[name]))) if damage else files[name]
        for name, data in files.items():
            attempt.put(name, data)
    attempt.commit(attempt.files, {}, print)
    return input_of(slot)


def scoring(slot, source, max_attempts=1, max_failed_fraction=0.0, options: Any = OPTIONS, scorer=None):
    config = contracts.Reward(
        reward=options,
        scorer=scorer or plugins.load("rewards", options.name).Reward(options).version,
        max_attempts=max_attempts,
        max_failed_fraction=max_failed_fraction,
    )
    return Request(stage="reward", slot=slot, iteration=0, seed=0, config=config, inputs={"samples": (source,)})


def run(request, tmp_path, threads=1, numerics_record=None, allow_numerics_change=False):
    """The manifest, and what people were told."""
    outcome = tmp_path / "outcome"
    execution = Execution(threads=threads, numerics_record=numerics_record, allow_numerics_change=allow_numerics_change)
    manifest = execute(request, execution, Outcome(outcome, 0))
    status = read_status(outcome)
    assert status is not None
    return manifest, list(status.notes)


def table_of(slot, name):
    """A table of the current artifact: its columns by name, as lists."""
    return pd.read_parquet(io.BytesIO(Artifact(input_of(slot)).read(name))).to_dict("list")


@pytest.fixture
def slot(tmp_path):
    return str(tmp_path / "reward-ocr")


@pytest.fixture
def samples_slot(tmp_path):
    return str(tmp_path / "rollout")


def test_scores_equal_the_scores_of_the_reward(slot, samples_slot, tmp_path):
    pairs = [RIGHT, CLOSE, WRONG, ("HC", "HC"), ("AE", "K7")]
    manifest, notes = run(scoring(slot, write_samples(samples_slot, pairs)), tmp_path)
    table = table_of(slot, contracts.Reward.SCORES)
    asked = [
        Sample(planned.sample_id, planned.prompt.id, planned.prompt.text, drawn(shown))
        for planned, (_, shown) in zip(plan_of(pairs), pairs, strict=True)
    ]
    own = [entry["ocr"] for entry in ocr.Reward(OPTIONS).score(asked) if isinstance(entry, dict)]
    assert table["score"] == own == [1.0, 0.5, 0.0, 1.0, 0.0]
    assert table["sample_id"] == [f"p{number}-000" for number in range(5)]
    assert table["prompt_id"] == [f"p{number}" for number in range(5)]
    assert table["valid"] == [True] * 5
    assert [json.loads(details) for details in table_of(slot, contracts.Reward.ANSWERS)["details"]] == [
        {"ocr": score} for score in own
    ]
    assert (manifest.summary["ocr"], manifest.summary["scored"]) == (0.5, 5)
    assert "failed" not in manifest.summary
    assert notes == []


def test_a_videos_score_is_the_mean_over_the_frames_that_were_stored(slot, samples_slot, tmp_path):
    video = np.concatenate([drawn("K7"), drawn("K4"), drawn("K7"), drawn("K4")])
    source = write_samples(samples_slot, [RIGHT], pictures=[video])
    assert media.VIDEO in next(samples.read_samples(Artifact(source))).extension
    run(scoring(slot, source), tmp_path)
    assert table_of(slot, contracts.Reward.SCORES)["score"] == [0.75]


def test_a_sample_that_cannot_be_scored_is_tried_again_then_excluded_and_counted(slot, samples_slot, tmp_path):
    source = write_samples(samples_slot, [RIGHT, UNSCORABLE, CLOSE, RIGHT])
    request = scoring(slot, source, max_attempts=3, max_failed_fraction=0.25)
    manifest, _ = run(request, tmp_path)
    table = table_of(slot, contracts.Reward.SCORES)
    assert table["valid"] == [True, False, True, True]
    assert table["score"] == [1.0, pytest.approx(float("nan"), nan_ok=True), 0.5, 1.0]
    answers = table_of(slot, contracts.Reward.ANSWERS)
    assert [bool(error) for error in answers["error"]] == [False, True, False, False]
    assert answers["error"][1].startswith("ValueError: prompt 'a sign' needs the text to render")
    assert answers["details"][1] == "{}"
    calls = table_of(slot, contracts.Reward.CALLS)
    # The first shard is tried three times, the failing sample alone from the second time on; then the second shard.
    assert (calls["shard_samples"], calls["attempt"], calls["failed"]) == ([2, 1, 1, 2], [0, 1, 2, 0], [1, 1, 1, 0])
    results = {
        name: entry
        for name, entry in manifest.files.items()
        if name not in {contracts.Reward.ANSWERS, contracts.Reward.CALLS}
    }
    results = {name: entry for name, entry in results.items() if "answers/" not in name}
    assert manifest.content == content_of(results)
    assert manifest.summary["ocr"] == pytest.approx(2.5 / 3, abs=1e-15)
    assert (manifest.summary["scored"], manifest.summary["failed"]) == (3, 1)


def test_too_many_failures_fail_the_stage_and_name_the_samples(slot, samples_slot, tmp_path):
    source = write_samples(samples_slot, [RIGHT, UNSCORABLE, UNSCORABLE, CLOSE])
    request = scoring(slot, source, max_attempts=2, max_failed_fraction=0.25)
    with pytest.raises(RewardError) as caught:
        run(request, tmp_path)
    message = str(caught.value)
    assert "ocr could not score 2 of 4 samples, more than max_failed_fraction = 0.25: p1-000 (Value" in message
    assert "; p2-000 (ValueError: " in message
    assert "p0-000" not in message
    assert caught.value.retryable
    assert current_of(slot) == (1, None)


def test_a_retry_scores_only_unfinished_shards(slot, samples_slot, tmp_path):
    source = write_samples(samples_slot, [RIGHT, CLOSE, UNSCORABLE, RIGHT])
    request = scoring(slot, source, max_failed_fraction=0.1)
    with pytest.raises(RewardError):
        run(request, tmp_path)
    with pytest.raises(RewardError):
        run(request, tmp_path)
    marker, *others = [path.name for path in (tmp_path / "reward-ocr" / "shards").rglob("*.json")]
    assert (marker, others) == ("00000.json", [])
    # The same work, tolerated: another setting, so another generation and nothing adopted.
    manifest, notes = run(scoring(slot, source, max_failed_fraction=0.25), tmp_path)
    assert manifest.generation == 2
    assert notes == ["an unfinished attempt at generation 1 had other settings or inputs; nothing of it is kept"]


def test_scores_of_a_crashed_attempt_are_adopted(slot, samples_slot, tmp_path):
    source = write_samples(samples_slot, [RIGHT, CLOSE, WRONG])
    request = scoring(slot, source)
    crashed = begin_as_stage(request)
    crashed.finish(0, score_file(0, [("p0", 0.125), ("p1", 0.25)]))
    manifest, notes = run(request, tmp_path)
    assert notes == ["1 finished shard of an earlier attempt adopted"]
    # Numbers that only the earlier attempt can have left.
    assert table_of(slot, contracts.Reward.SCORES)["score"] == [0.125, 0.25, 0.0]
    assert manifest.generation == 1


def test_scores_of_another_scorer_version_are_stale_and_need_that_version(slot, samples_slot, tmp_path):
    source = write_samples(samples_slot, [RIGHT, CLOSE, WRONG])
    request = scoring(slot, source)
    manifest, _ = run(request, tmp_path)
    config = request.config.model_copy(update={"scorer": "a newer model"})
    newer = request.model_copy(update={"config": config})
    assert manifest.why_not(newer) == "the settings of reward changed (scorer)"
    with pytest.raises(ConfigError, match="the request asks for a newer model"):
        run(newer, tmp_path)


def begin_as_stage(request):
    """An attempt as the stage makes it, up to its layout."""
    found = numerics()
    generation, attempt_id, _ = Attempt.begin(request, print)
    attempt = Attempt(request, found, generation, attempt_id)
    numbers = range(samples.num_units(Artifact(request.one("samples"))))
    units = [samples.unit_name(contracts.MEDIA, number) for number in numbers]
    attempt.use_layout(attempt.layout({"units": units}, print), generation)
    return attempt


def score_file(index, scores):
    rows = [
        {
            "sample_id": f"{prompt_id}-000",
            "prompt_id": prompt_id,
            "score": score,
            "valid": True,
            "scorer": ocr.Reward(OPTIONS).version,
        }
        for prompt_id, score in scores
    ]
    answers = [{"sample_id": row["sample_id"], "error": "", "details": "{}"} for row in rows]
    return {
        f"scores/{index:05d}.json": json.dumps(rows).encode(),
        f"records/answers/{index:05d}.json": json.dumps(answers).encode(),
    }


def test_media_that_cannot_be_decoded_are_an_error_of_data_not_of_the_reward(slot, samples_slot, tmp_path):
    def truncate(files):
        return {name: data[: len(data) // 2] if name == "p1-000.png" else data for name, data in files.items()}

    source = write_samples(samples_slot, [RIGHT, CLOSE], damage=truncate)
    with pytest.raises(ArtifactError, match="sample p1-000: its png cannot be decoded") as caught:
        run(scoring(slot, source, max_failed_fraction=0.9), tmp_path)
    assert not caught.value.retryable
    assert current_of(slot) == (1, None)


def test_a_changed_byte_in_a_shard_is_found_before_it_is_scored(slot, samples_slot, tmp_path):
    source = write_samples(samples_slot, [RIGHT])
    url = store.join(source.url, Artifact(source).manifest.files[samples.unit_name(contracts.MEDIA, 0)].path)
    data = bytearray(store.read(url))
    data[-1] ^= 1
    store.write(url, bytes(data))
    with pytest.raises(ArtifactError, match="is not what was committed"):
        run(scoring(slot, source), tmp_path)
    assert current_of(slot) == (1, None)


def test_current_scores_are_not_made_again(slot, samples_slot, tmp_path):
    request = scoring(slot, write_samples(samples_slot, [RIGHT]))
    first, _ = run(request, tmp_path)
    second, notes = run(request, tmp_path)
    assert second == first
    assert notes == []


def test_another_reward_makes_a_new_generation_but_equal_scores_stay_current(slot, samples_slot, tmp_path):
    source = write_samples(samples_slot, [RIGHT, CLOSE, WRONG])
    first, _ = run(scoring(slot, source), tmp_path)
    consumer = consume(str(tmp_path / "consumer"), input_of(slot))
    generation, attempt_id, _ = Attempt.begin(consumer, print)
    made = Attempt(consumer, {}, generation, attempt_id).commit({}, {}, print)
    second, notes = run(scoring(slot, source, options=ocr.Options(line_width=128)), tmp_path)
    assert notes == ["generation 1 is made again: the settings of reward changed (reward)"]
    assert (second.generation, second.content) == (2, first.content)
    assert second.fingerprint != first.fingerprint
    assert why_stale(made, consume(consumer.slot, input_of(slot))) is None


def test_scores_do_not_depend_on_how_the_samples_were_cut(slot, samples_slot, tmp_path):
    run(scoring(slot, write_samples(samples_slot, [RIGHT, CLOSE, WRONG], per_shard=2)), tmp_path)
    before = table_of(slot, contracts.Reward.SCORES)
    run(scoring(slot, write_samples(samples_slot, [RIGHT, CLOSE, WRONG], per_shard=3)), tmp_path)
    assert current_of(slot)[0] == 2
    assert table_of(slot, contracts.Reward.SCORES) == before


def consume(slot, scores):
    config = Report(title="consumer", reward="ocr")
    return Request(stage="report", slot=slot, seed=0, config=config, inputs={"judged": (scores,)})


def test_a_reward_that_scores_no_sample_at_all_fails(slot, samples_slot, tmp_path):
    planned = plan_of([UNSCORABLE, RIGHT])
    failing = with_media(planned[0], drawn("K7"), None, {"policy": "c"})
    refused = with_media(planned[1], None, None, {"policy": "c"}, refused=True)
    source = write_units(samples_slot, [failing, refused], 2, None)
    # The only sample that could have a score is half of all.
    with pytest.raises(RewardError, match=r"1 of 2 samples, and none has a score: p0-000 \(ValueError"):
        run(scoring(slot, source, max_failed_fraction=0.5), tmp_path)
