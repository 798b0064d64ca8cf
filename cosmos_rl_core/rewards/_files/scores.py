"""Scores of pictures and videos that lie in files, by any reward."""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

from cosmos_rl_core import plugins
from cosmos_rl_core.config.reading import validated, with_changes
from cosmos_rl_core.config.train import RewardOptions
from cosmos_rl_core.datasets._base import ItemError, Prompt, prompt_id
from cosmos_rl_core.datasets._files import kind_of
from cosmos_rl_core.errors import ConfigError
from cosmos_rl_core.rewards._base import Sample, ServedReward
from cosmos_rl_core.rewards._base.answers import entries, scored, words
from cosmos_rl_core.rewards._base.names import plugin_of
from cosmos_rl_core.rewards._batches.exact import exact, named
from cosmos_rl_core.rewards._files.agreement import Agreement, agreement
from cosmos_rl_core.vlms import _media

TOGETHER = 16
"""Files that are read and scored at once, unless the reward compares samples of a prompt."""


@dataclass(frozen=True)
class FileScores:
    """Scores of a file, or why it has none."""

    file: str
    prompt: str
    scores: dict[str, Any] = field(default_factory=dict)
    error: str = ""


class FileScorer:
    """A reward with its settings, for files."""

    def __init__(self, name: str, settings: Sequence[str] = ()) -> None:
        """Take a reward's name, or another one under which services offer it, and settings ``option=value``.

        Raises :class:`ConfigError` for unknown names and settings, missing weights, and a service that is not named.
        """
        name = plugin_of(name)
        module = plugins.load("rewards", name)
        values = with_changes({"name": name}, Path(), settings, None)
        self.options: RewardOptions = validated(module.Options, values, f"reward {name}")
        if self.options.facts.torch:
            import_module("cosmos_rl_core.parallel.precision").score_in_float32()
        self._reward, alone = exact(module.Reward, self.options, lambda why: print(why, file=sys.stderr))
        if isinstance(self._reward, ServedReward):
            self._reward.check_service()
        self.version = named(self._reward.version, alone=alone)

    def score(self, files: Sequence[str], prompts: Sequence[str]) -> Iterator[FileScores]:
        """Yield the scores of each file with its prompt, in order."""
        size = max(1, len(files)) if self.options.facts.groupwise else TOGETHER
        pairs = [*zip(files, prompts, strict=True)]
        for start in range(0, len(pairs), size):
            yield from self._together(pairs[start : start + size])

    def agreement(self, found: Sequence[FileScores], labels: Sequence[float]) -> Agreement:
        """Return how far the scores of files agree with their labels."""
        label = self.options.label
        return agreement(label, self.version, [one.scores.get(label) for one in found], labels)

    def _together(self, pairs: Sequence[tuple[str, str]]) -> Iterator[FileScores]:
        read = [self._sample(file, prompt) for file, prompt in pairs]
        found = iter(self._scored([sample for sample in read if isinstance(sample, Sample)]))
        for (file, prompt), sample in zip(pairs, read, strict=True):
            outcome = next(found) if isinstance(sample, Sample) else sample
            if isinstance(outcome, Exception):
                yield FileScores(file, prompt, error=words(outcome))
            else:
                yield FileScores(file, prompt, outcome)

    def _scored(self, samples: list[Sample]) -> list[dict[str, Any] | Exception]:
        """Return scores or an error for each sample. If the reward raises for all, each is scored alone; of a groupwise
        one, all fail.
        """
        try:
            found = entries(self._reward.score([*samples]), len(samples))
        except ConfigError:
            raise
        except Exception as error:
            if len(samples) == 1 or self.options.facts.groupwise:
                return [error] * len(samples)
            return [one for sample in samples for one in self._scored([sample])]
        return [scored(one, self.options.label) for one in found]

    def _sample(self, file: str, prompt: str) -> Sample | Exception:
        asked = Prompt(id=prompt_id(prompt), text=prompt)
        if not Path(file).is_file():
            return FileNotFoundError(f"there is no file {file}")
        if (reason := self._reward.check_prompt(asked)) is not None:
            return ValueError(reason)
        try:
            clip = _media.video(file, None, lambda total, _: range(total)) if kind_of(file) == "video" else None
            found = clip or _media.image(file)
        except (ItemError, OSError) as error:
            return error
        return Sample(file, asked.id, prompt, found.pixels, fps=found.fps)


def prompts_of(file: Path | None, text: str, count: int) -> list[str]:
    """Return a prompt for each of ``count`` files: a line of ``file`` each, or ``text`` for all.

    Raises :class:`ConfigError` if the file has another number of lines, or both are given.
    """
    if file is None:
        return [text] * count
    if text:
        raise ConfigError("--prompt and --prompts are both given; give one of them")
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file} cannot be read: {error}") from error
    if len(lines) != count:
        raise ConfigError(f"{file} has {len(lines)} lines for {count} files; give a line, its prompt, for each file")
    return lines


def prepare(name: str, source: Path, target: Path) -> None:
    """Convert published weights of a reward to the new folder ``target``.

    Raises :class:`ConfigError` if the reward needs none, and if ``target`` exists.
    """
    converter = getattr(plugins.load("rewards", plugin_of(name)), "prepare", None)
    if converter is None:
        able = [one for one in plugins.own("rewards") if hasattr(plugins.load("rewards", one), "prepare")]
        raise ConfigError(f"weights of {name} need no preparation; those of {', '.join(able)} do")
    if target.exists():
        raise ConfigError(f"{target} exists already; name a folder that does not")
    converter(source, target)
