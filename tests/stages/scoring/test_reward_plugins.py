"""What the reward stage makes of answers that a plugin must not give: invalid samples, counted and named."""

import io
import json
import math

import numpy as np
import pandas as pd
import pytest

from cosmos_rl_core import outside_plugins, plugins
from cosmos_rl_core.datasets._base import Prompt
from cosmos_rl_core.errors import RewardError
from stages import contracts
from stages.artifacts.artifact import Artifact
from stages.artifacts.attempt import Attempt
from stages.artifacts.request import Request
from stages.artifacts.slots import input_of
from stages.execution.execution import Execution
from stages.execution.outcome import Outcome
from stages.execution.runner import execute
from stages.formats.samples import unit_files
from stages.generating.encoding import with_media
from stages.generating.plans import plan_samples
from stages.reporting.contracts import Report

PLUGIN = '''
from decimal import Decimal
from typing import Literal

import numpy as np

from cosmos_rl_core.config.train import RewardOptions
from stages.reporting.contracts import Report


class Options(RewardOptions):
    name: Literal["judge"] = "judge"
    answer: str
    """Python that makes the answer of ``samples``."""


def fails(error):
    raise error


class Reward:
    def __init__(self, options):
        self.version, self._answer = "1", options.answer

    def check_prompt(self, prompt):
        return None

    def score(self, samples):
        first = [s for s in samples if s.sample_id.startswith("p0")]
        return eval(self._answer, globals() | {"samples": samples, "first": first})
'''


@pytest.fixture(autouse=True)
def judge(tmp_path):
    (tmp_path / "judge.py").write_text(PLUGIN, encoding="utf-8")
    outside_plugins.find([str(tmp_path / "judge.py")])
    yield
    outside_plugins.find([])


def scored(tmp_path, answer, max_failed_fraction=0.9, count=3):
    """The stage's artifact for samples ``p0-000``, ``p1-000``, ... in one shard."""
    prompts = tuple(Prompt(id=f"p{n}", text="x", metadata={"objects": [n, 1]}) for n in range(count))
    planned = plan_samples(prompts, 1, run_seed=0, iteration=None)
    picture = np.zeros((1, 4, 4, 3), np.uint8)
    config = Report(title="samples", reward="judge")
    made = Request(stage="report", slot=str(tmp_path / "rollout"), seed=0, config=config)
    generation, attempt_id, _ = Attempt.begin(made, print)
    attempt = Attempt(made, {}, generation, attempt_id)
    for name, data in unit_files(0, [with_media(s, picture, None, {}) for s in planned]).items():
        attempt.put(name, data)
    attempt.commit(attempt.files, {}, print)
    options = plugins.load("rewards", "judge").Options(answer=answer)
    config = contracts.Reward(reward=options, scorer="1", max_attempts=2, max_failed_fraction=max_failed_fraction)
    inputs = {"samples": (input_of(made.slot),)}
    slot = str(tmp_path / "reward")
    request = Request(stage="reward", slot=slot, iteration=0, seed=0, config=config, inputs=inputs)
    execute(request, Execution(), Outcome(tmp_path / "outcome", 0))
    return Artifact(input_of(slot))


def table_of(artifact, name):
    return pd.read_parquet(io.BytesIO(artifact.read(name))).to_dict("list")


NO_LIST = {
    "None": "TypeError: the reward returned None, expected a list with an entry a sample",
    "0.5": "TypeError: the reward returned 0.5 (float), expected a list",
    "'abc'": "TypeError: the reward returned abc (str), expected a list",
    "np.array([0.5, 0.5, 0.5])": "TypeError: the reward returned [0.5 0.5 0.5] (ndarray), expected a list",
    "{'judge': 0.5}": "TypeError: the reward returned {'judge': 0.5} (dict), expected a list",
    "(e for e in [])": "TypeError: the reward returned <generator",
    "[]": "TypeError: the reward returned 0 entries for 1 samples",
    "[{'judge': 0.5}] * (len(samples) + 1)": "TypeError: the reward returned 2 entries for 1 samples",
    "samples.clear()": "TypeError: the reward returned None",
    "fails(RuntimeError('broken'))": "RuntimeError: broken",
    "fails(RuntimeError('\\udcff'))": "RuntimeError: \\udcff",
}


@pytest.mark.parametrize("answer", NO_LIST)
def test_an_answer_that_is_no_list_of_entries_scores_nothing(tmp_path, answer):
    with pytest.raises(RewardError) as caught:
        scored(tmp_path, answer)
    says, message = NO_LIST[answer], str(caught.value)
    assert "judge could not score 3 of 3 samples" in message
    assert all(f"p{number}-000 ({says}" in message for number in range(3)), message


BAD_ENTRIES = {
    "None": "TypeError: the reward returned None for a sample, expected its scores by name or an exception",
    "0.5": "TypeError: the reward returned 0.5 (float) for a sample",
    "'abc'": "TypeError: the reward returned abc (str) for a sample",
    "[0.5]": "TypeError: the reward returned [0.5] (list) for a sample",
    "np.float32(0.5)": "TypeError: the reward returned 0.5 (float32) for a sample",
    "True": "TypeError: the reward returned True (bool) for a sample",
    "ValueError": "TypeError: the reward returned <class 'ValueError'> (type) for a sample",
    "ValueError('blurred')": "ValueError: blurred",
    "{}": "KeyError: \"no score named 'judge' among []\"",
    "{'other': 1.0, 1: 2.0}": "KeyError: \"no score named 'judge' among ['1', 'other']\"",
    "{'judge': True}": "ValueError: the score 'judge' is True (bool), expected a finite number",
    "{'judge': np.True_}": "ValueError: the score 'judge' is True (bool), expected a finite number",
    "{'judge': None}": "ValueError: the score 'judge' is None, expected a finite number",
    "{'judge': '0.5'}": "ValueError: the score 'judge' is 0.5 (str), expected a finite number",
    "{'judge': [0.5]}": "ValueError: the score 'judge' is [0.5] (list), expected a finite number",
    "{'judge': np.array([0.5])}": "ValueError: the score 'judge' is [0.5] (ndarray), expected a finite number",
    "{'judge': Decimal('0.5')}": "ValueError: the score 'judge' is 0.5 (Decimal), expected a finite number",
    "{'judge': 1j}": "ValueError: the score 'judge' is 1j (complex), expected a finite number",
    "{'judge': float('nan')}": "ValueError: the score 'judge' is nan",
    "{'judge': -np.inf}": "ValueError: the score 'judge' is -inf",
    "{'judge': np.float32('nan')}": "ValueError: the score 'judge' is nan (float32)",
    "{'judge': 10**400}": "ValueError: the score 'judge' is 1000000",
}


@pytest.mark.parametrize("entry", BAD_ENTRIES)
def test_a_bad_entry_makes_its_sample_invalid_alone(tmp_path, entry):
    artifact = scored(tmp_path, f"[{entry} if s.sample_id == 'p1-000' else {{'judge': 0.25}} for s in samples]")
    table, answers = table_of(artifact, contracts.Reward.SCORES), table_of(artifact, contracts.Reward.ANSWERS)
    assert table["valid"] == [True, False, True]
    assert (table["score"][0], table["score"][2]) == (0.25, 0.25)
    assert math.isnan(table["score"][1])
    assert (answers["error"][0], answers["error"][2]) == ("", "")
    assert answers["error"][1].startswith(BAD_ENTRIES[entry])
    assert (artifact.manifest.summary["scored"], artifact.manifest.summary["failed"]) == (2, 1)
    assert artifact.manifest.summary["judge"] == 0.25


@pytest.mark.parametrize(
    "answer",
    [
        "fails(RuntimeError('broken')) if first else [{'judge': 0.25}] * len(samples)",
        "None if first else [{'judge': 0.25}] * len(samples)",
        "[{'judge': 0.25}] * (len(samples) - len(first))",
    ],
)
def test_a_sample_that_spoils_the_whole_answer_is_lost_alone(tmp_path, answer):
    artifact = scored(tmp_path, answer)
    assert table_of(artifact, contracts.Reward.SCORES)["valid"] == [False, True, True]


@pytest.mark.parametrize(
    ("number", "score"),
    [("np.float32(0.1)", float(np.float32(0.1))), ("np.float64(0.1)", 0.1), ("np.int64(3)", 3.0), ("2", 2.0)],
)
def test_numbers_of_numpy_are_numbers(tmp_path, number, score):
    """Next to the score there may be anything; what JSON cannot hold is written as text."""
    around = "'n': np.float32(2), 'inf': np.inf, 'text': 'ok', 'none': None, 'yes': True, 'list': [1], 3: 4"
    artifact = scored(tmp_path, f"tuple({{'judge': {number}, {around}}} for s in samples)")
    assert table_of(artifact, contracts.Reward.SCORES)["score"] == [score] * 3
    details = json.loads(table_of(artifact, contracts.Reward.ANSWERS)["details"][0])
    expected = {"3": 4.0, "inf": None, "list": "[1]", "n": 2.0, "none": None, "text": "ok", "yes": True}
    assert details == {"judge": score, **expected}


def test_a_reward_reads_the_metadata_of_prompts(tmp_path):
    found = scored(tmp_path, "[{'judge': float(sum(s.metadata['objects']))} for s in samples]")
    table = table_of(found, contracts.Reward.SCORES)
    assert table["score"] == [1.0, 2.0, 3.0]
    assert set(table["scorer"]) == {"1"}


def test_a_lack_of_memory_is_no_samples_fault_and_is_not_tried_sample_by_sample(tmp_path):
    with pytest.raises(MemoryError, match="3 samples do not fit"):
        scored(tmp_path, "fails(MemoryError(f'{len(samples)} samples do not fit'))")
