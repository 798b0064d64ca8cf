"""What every scorer with torch promises, run on tiny weights of its architecture, tested the moment its file exists."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import TypeAdapter

from cosmos_rl_core import plugins
from cosmos_rl_core.config.reward_facts import Facts
from cosmos_rl_core.datasets._base import Prompt
from cosmos_rl_core.parallel.kept import KEPT
from cosmos_rl_core.rewards._base import Reward, Sample
from tests import tiny_scorers

WANTED = [{"class": "bicycle", "count": 4, "color": "red"}, {"class": "person", "count": 3}]
TAGS = {"tag": "colors", "include": WANTED}
"""What GenEval asks for; other scorers do not read it."""

TORCH = [name for name in plugins.own("rewards") if plugins.load("rewards", name).Options.facts.torch]
TINY = [name for name in TORCH if plugins.load("rewards", name).Options.facts.evidence == "tiny weights"]


def facts_of(name: str) -> Facts:
    return plugins.load("rewards", name).Options.facts


def frames(rng: np.random.Generator, height: int, width: int, count: int) -> np.ndarray:
    """Colours that change over the picture, so that what a model sees of it differs."""
    corners = rng.integers(0, 256, (count, 2, 2, 3)).astype(float)
    y, x = np.linspace(0, 1, height)[:, None, None], np.linspace(0, 1, width)[None, :, None]
    rows = [corners[:, i, None, None, 0] * (1 - x) + corners[:, i, None, None, 1] * x for i in (0, 1)]
    return (rows[0] * (1 - y) + rows[1] * y).round().astype(np.uint8)


def samples_of(kind: str, number: int) -> list[Sample]:
    """Samples of several sizes, with prompts of several lengths; two of each prompt, which has a reference."""
    rng, sizes = np.random.default_rng(0), [(40, 40), (32, 64), (48, 36)]
    counts = {"image": [1], "video": [4], "any": [1, 4]}[kind]
    pixels = [frames(rng, *sizes[i % len(sizes)], counts[i % len(counts)]) for i in range(number)]
    shown = [(frames(rng, *sizes[i % len(sizes)], 1),) for i in range(number // 2 + 1)]
    return [
        Sample(
            f"s{i}",
            f"p{i // 2}",
            f'a sign that says "k{i // 2}"' + " in red" * (i // 2),
            pixels[i],
            metadata=TAGS,
            references=shown[i // 2],
        )
        for i in range(number)
    ]


LOADS = "Loading weights:   0%"
"""What transformers writes when it begins to load a model."""
PLACES = ("model", "processor", "detector", "head", "tokenizer", "prompt_file", "rubric_file")
"""Settings of rewards that name files."""


@pytest.mark.parametrize("name", [*TORCH, "unified_reward"])
def test_a_path_in_the_settings_may_begin_with_the_home_directory(name: str):
    fields = plugins.load("rewards", name).Options.model_fields
    found = {place: fields[place] for place in PLACES if place in fields and fields[place].json_schema_extra}
    assert found
    for place, field in found.items():
        assert TypeAdapter(field.rebuild_annotation()).validate_python("~/x") == str(Path.home() / "x"), place


def test_every_torch_scorer_that_claims_to_have_run_has_tiny_weights():
    files = {path.stem for path in Path(tiny_scorers.__file__).parent.glob("[a-z]*.py")}
    assert set(TINY) <= files


@pytest.fixture(scope="module", params=TINY)
def scorer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Reward, Any]:
    name = request.param
    module = plugins.load("rewards", name)
    given = tiny_scorers.settings(name, tmp_path_factory.mktemp(name))
    options = module.Options.model_validate({"name": name, **given})
    return name, module.Reward(options), options


def test_a_samples_scores_have_the_same_bits_alone_first_last_and_among_others(scorer: tuple[str, Reward, Any]):
    name, reward, options = scorer
    size = getattr(options, "batch_size", 1)
    samples = samples_of(facts_of(name).input, size + 2)
    together = reward.score(samples)
    assert not [entry for entry in together if isinstance(entry, Exception)]
    assert reward.score(samples[::-1]) == together[::-1]
    assert reward.score(samples[1:] + samples[:1]) == together[1:] + together[:1]
    assert [entry for sample in samples for entry in reward.score([sample])] == together
    assert reward.score([]) == []
    # A scorer that answers the same for all would pass.
    assert len({entry[options.label] for entry in together if isinstance(entry, dict)}) > 1


def test_scores_are_those_that_its_facts_name(scorer: tuple[str, Reward, Any]):
    name, reward, options = scorer
    (entry,) = reward.score(samples_of(facts_of(name).input, 1))
    assert isinstance(entry, dict)
    assert options.label in entry
    assert {*facts_of(name).scores} <= {*entry}
    numbers = [value for value in entry.values() if not isinstance(value, str)]
    assert all(isinstance(value, float) and np.isfinite(value) for value in numbers)


def test_what_is_no_picture_fails_alone(scorer: tuple[str, Reward, Any]):
    name, reward, _ = scorer
    good = samples_of(facts_of(name).input, 1)[0]
    bad = replace(good, pixels=good.pixels[..., :1])
    scored, failed = reward.score([good, bad])
    assert [scored] == reward.score([good])
    assert isinstance(failed, ValueError)
    assert "expected uint8 pixels [frames, height, width, 3]" in str(failed)


def test_its_version_names_packages_and_bytes(scorer: tuple[str, Reward, Any]):
    name, reward, options = scorer
    assert reward.check_prompt(Prompt(id="p", text="a dog", metadata=TAGS)) is None
    assert reward.version == plugins.load("rewards", name).Reward(options).version
    assert "sha256:" in reward.version


def test_a_process_that_stays_loads_it_once(scorer: tuple[str, Reward, Any], capfd: pytest.CaptureFixture[str]):
    name, reward, options = scorer
    samples = samples_of(facts_of(name).input, 2)
    expected, numbers = reward.score(samples), list[int]()
    KEPT.limit_bytes = 2**30
    try:
        for _ in range(2):
            capfd.readouterr()
            assert plugins.load("rewards", name).Reward(options).score(samples) == expected
            numbers.append(capfd.readouterr().err.count(LOADS))
        assert not KEPT.changed()
    finally:
        KEPT.limit_bytes = 0
        KEPT.clear()
    # GenEval has two models.
    assert numbers[0] > 0
    assert numbers[1] == 0
