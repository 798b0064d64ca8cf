"""Every reward: a score for each sample, the same twice and among any other samples."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import pytest

from cosmos_rl_core import plugins
from cosmos_rl_core.conformance.kinds.members import file_of, options_of, runnable
from cosmos_rl_core.datasets._base import Prompt
from cosmos_rl_core.rewards._base import LatentSample, Sample

PROMPT = 'a sign that says "K7"'
VIDEO_FRAMES = 4
Scores = list[dict[str, float] | Exception]


@dataclass
class Subject:
    """A reward with its options, and its scores of four samples of two prompts."""

    file: str
    make: Any
    options: Any

    @cached_property
    def reward(self) -> Any:
        """Return the reward that makes most of the scores."""
        return self.make(self.options)

    def samples(self) -> list[Any]:
        """Return samples of noise: media, or latents if the reward reads latents."""
        frames = VIDEO_FRAMES if self.options.facts.input == "video" else 1
        generator, ids = np.random.default_rng(0), [(f"s{i}", f"p{i // 2}", PROMPT) for i in range(4)]
        if self.options.reads(frames) == "latents":
            latents = generator.normal(size=(4, 4, *([frames] if frames > 1 else []), 4, 8)).astype(np.float32)
            return [LatentSample(*one, latents=values) for one, values in zip(ids, latents, strict=True)]
        pixels = generator.integers(0, 256, (4, frames, 32, 64, 3), dtype=np.uint8)
        shown = () if self.options.uses_references == "ignored" else (pixels[0, :1],)
        return [Sample(*one, pixels=values, references=shown) for one, values in zip(ids, pixels, strict=True)]

    @cached_property
    def scores(self) -> Scores:
        """Return the first scores; skip the test if the reward refuses the suite's prompt."""
        if reason := self.reward.check_prompt(Prompt(id="p", text=PROMPT)):
            pytest.skip(f"it refuses the prompt of the suite: {reason}")
        return self.reward.score(self.samples())

    def require_equal(self, found: Scores, expected: Scores, what: str) -> None:
        """Require equal names and equal numbers; up to rounding if the reward needs torch."""
        close = 1e-4 if self.options.facts.torch else 0.0
        for one, other in zip(found, expected, strict=True):
            if isinstance(one, Exception) or isinstance(other, Exception):
                assert type(one) is type(other), f"{self.file}: {what}"
                continue
            numbers = {name for name, value in other.items() if isinstance(value, float | int)}
            same = one.keys() == other.keys() and all(
                math.isclose(one[name], other[name], rel_tol=close, abs_tol=close) for name in numbers
            )
            assert same, f"{self.file}: {what}: {one}, and {other} before"


def scored() -> list[str]:
    """Return the rewards that the suite scores with: all but shipped ones with torch, which need weights."""
    own = plugins.own("rewards")
    names = runnable("rewards")
    return [name for name in names if name not in own or not plugins.load("rewards", name).Options.facts.torch]


@pytest.fixture(scope="module", params=scored())
def reward(request: pytest.FixtureRequest, plugin_settings: Mapping[str, Any]) -> Subject:
    """Return each reward."""
    name = request.param
    options = options_of("rewards", name, plugin_settings)
    if options is None:
        pytest.skip("its settings have no defaults")
    return Subject(file_of("rewards", name), plugins.load("rewards", name).Reward, options)


def test_a_reward_has_a_version(reward: Subject):
    """The version is part of the identity of scores."""
    found = reward.reward.version
    assert isinstance(found, str), f"{reward.file}: Reward.version is {found!r}, expected a text"
    assert found == reward.make(reward.options).version, f"{reward.file}: Reward.version changes from one to the next"


def test_every_sample_has_a_score_under_the_name_of_the_reward(reward: Subject):
    """A sample may have an exception instead, but not all samples."""
    scores, label = reward.scores, reward.options.label
    assert len(scores) == 4, f"{reward.file}: score returned {len(scores)} entries for 4 samples"
    scored = [entry for entry in scores if not isinstance(entry, Exception)]
    assert scored, f"{reward.file}: score failed for every sample of the suite: {scores[0]!r}"
    for entry in scored:
        found = entry.get(label)
        is_number = isinstance(found, float | int) and math.isfinite(found)
        assert is_number, f"{reward.file}: score returned {entry}; expected a finite number {label!r}"


def test_the_same_samples_have_the_same_scores_the_next_time(reward: Subject):
    expected = reward.scores
    again = reward.reward.score(reward.samples())
    reward.require_equal(again, expected, "score returned other numbers the second time")
    fresh = reward.make(reward.options).score(reward.samples())
    reward.require_equal(fresh, expected, "a new Reward returned other numbers than a used one")


def test_a_score_depends_on_its_own_sample_alone(reward: Subject):
    """Scores of a groupwise reward depend on the samples of their prompt."""
    expected, samples = reward.scores, reward.samples()
    if not reward.options.facts.groupwise:
        backwards = reward.reward.score(samples[::-1])
        reward.require_equal(backwards, expected[::-1], "score returned other numbers in another order")
    whole = 2 if reward.options.facts.groupwise else 1
    groups = [samples[i : i + whole] for i in range(0, len(samples), whole)]
    alone = [entry for group in groups for entry in reward.reward.score(group)]
    advice = "a score may depend on its sample alone, unless Options.facts says groupwise"
    reward.require_equal(alone, expected, f"score returned other numbers without the other samples; {advice}")


def test_scoring_leaves_samples_as_they_are(reward: Subject):
    expected, samples = reward.scores, reward.samples()
    reward.reward.score([replace(sample) for sample in samples])
    assert expected
    for sample, kept in zip(samples, reward.samples(), strict=True):
        name = "latents" if isinstance(kept, LatentSample) else "pixels"
        same = np.array_equal(getattr(sample, name), getattr(kept, name))
        assert same, f"{reward.file}: score changes the {name} of a sample in place; copy them first"
        left = all(map(np.array_equal, sample.references, kept.references))
        assert left, f"{reward.file}: score changes the references of a sample in place; copy them first"


def test_no_samples_have_no_scores(reward: Subject):
    found = reward.reward.score([])
    assert found == [], f"{reward.file}: score([]) returned {found!r}"
