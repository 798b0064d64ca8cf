"""Scores of pictures and videos that lie in files, by any reward."""

import shutil
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from cosmos_rl_core import plugins
from cosmos_rl_core.config.reading import validated, with_changes
from cosmos_rl_core.config.train import RewardOptions
from cosmos_rl_core.datasets._base import ItemError, Prompt, prompt_id
from cosmos_rl_core.datasets._files import kind_of
from cosmos_rl_core.datasets._prompt_files import read_rows
from cosmos_rl_core.datasets._reference_pixels import decoded
from cosmos_rl_core.errors import ConfigError, UnavailableError, mistakes_in
from cosmos_rl_core.rewards._base import NamedReward, Sample, ServedReward
from cosmos_rl_core.rewards._base.answers import entries, scored, words
from cosmos_rl_core.rewards._base.names import plugin_of
from cosmos_rl_core.rewards._batches.exact import exact, named
from cosmos_rl_core.rewards._files.agreement import Agreement, agreement, lines_of
from cosmos_rl_core.vlms import _media

TOGETHER = 16
"""Number of files that are read and scored at once, unless the reward compares samples of a prompt."""
HELD = 16
"""Number of decoded references that stay in memory: files of one prompt share its references."""
OBJECTS = (".jsonl", ".json")
"""Endings of files of prompts whose rows are objects."""
REFERENCES = (
    'name them in a file: --prompts FILE.jsonl, a line {"prompt": "...", "references": ["a.png"]} for each file'
)
"""Advice in errors for prompts without references."""
_AWAY = (UnavailableError, ConnectionError, TimeoutError)
"""Errors of a scorer that cannot be reached: every file would wait for it in vain."""


@dataclass(frozen=True)
class FileScores:
    """Scores of a file by name, or the error that says why it has none."""

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
        self.options = options_of(name, settings)
        self._refers = self.options.uses_references != "ignored"
        if self.options.facts.torch:
            import_module("cosmos_rl_core.parallel.precision").score_in_float32()
        make = plugins.load("rewards", self.options.name).Reward
        self._reward, alone = exact(make, self.options, lambda why: print(why, file=sys.stderr))
        if isinstance(self._reward, ServedReward):
            self._reward.check_service()
        if isinstance(self._reward, NamedReward):
            # It then sends what this scorer reads: the metadata of prompts, and references.
            self._reward.hold_to(self._reward.scorer())
        self.version = named(self._reward.version, alone=alone)
        self._picture = lru_cache(HELD)(_picture)

    def score(self, files: Sequence[str], prompts: Sequence[Prompt]) -> Iterator[FileScores]:
        """Yield the scores of each file with its prompt, in order."""
        size = max(1, len(files)) if self.options.facts.groupwise else TOGETHER
        pairs = [*zip(files, prompts, strict=True)]
        for start in range(0, len(pairs), size):
            yield from self._together(pairs[start : start + size])

    def agreement(self, found: Sequence[FileScores], labels: Sequence[float]) -> Agreement:
        """Return how far the scores agree with the labels, one for each file."""
        label = self.options.label
        return agreement(label, self.version, [one.scores.get(label) for one in found], labels)

    def _together(self, pairs: Sequence[tuple[str, Prompt]]) -> Iterator[FileScores]:
        read = [self._sample(file, prompt) for file, prompt in pairs]
        found = iter(self._scored([sample for sample in read if isinstance(sample, Sample)]))
        for (file, prompt), sample in zip(pairs, read, strict=True):
            outcome = next(found) if isinstance(sample, Sample) else sample
            if isinstance(outcome, Exception):
                yield FileScores(file, prompt.text, error=words(outcome))
            else:
                yield FileScores(file, prompt.text, outcome)

    def _scored(self, samples: list[Sample]) -> list[dict[str, Any] | Exception]:
        """Return scores or an error for each sample.

        If the reward raises for all samples, each is scored alone; if the reward is groupwise, all samples fail.
        Raises errors that are no file's fault: :class:`ConfigError`, and :class:`UnavailableError` for a scorer that
        cannot be reached.
        """
        try:
            found = entries(self._reward.score([*samples]), len(samples))
            if (away := next((one for one in found if isinstance(one, _AWAY)), None)) is not None:
                raise away
        except (ConfigError, UnavailableError):
            raise
        except (ConnectionError, TimeoutError) as error:
            raise UnavailableError(words(error)) from error
        except Exception as error:
            if len(samples) == 1 or self.options.facts.groupwise:
                return [error] * len(samples)
            return [one for sample in samples for one in self._scored([sample])]
        return [scored(one, self.options.label) for one in found]

    def _sample(self, file: str, prompt: Prompt) -> Sample | Exception:
        if not Path(file).is_file():
            return FileNotFoundError(f"there is no file {file}")
        if (reason := self._reward.check_prompt(prompt)) is not None:
            return ValueError(reason)
        try:
            clip = _media.video(file, None, lambda total, _: range(total)) if kind_of(file) == "video" else None
            found = clip or _media.image(file)
            shown = tuple(self._picture(one.source) for one in prompt.references if self._refers)
        except (ItemError, OSError, ValueError) as error:
            return error
        facts = {"fps": found.fps, "metadata": prompt.metadata, "references": shown}
        return Sample(file, prompt.id, prompt.text, found.pixels, **facts)


def options_of(name: str, settings: Sequence[str] = ()) -> RewardOptions:
    """Return the options of a reward with settings ``option=value``. ``name`` may be one that only services offer.

    Raises :class:`ConfigError` for unknown names and settings.
    """
    name = plugin_of(name)
    values = with_changes({"name": name}, Path(), settings, None)
    return validated(plugins.load("rewards", name).Options, values, f"reward {name}")


def prompts_of(file: Path | None, text: str, count: int, options: RewardOptions) -> list[Prompt]:
    """Return a prompt for each of ``count`` files: a row of ``file`` each, or ``text`` for all.

    A row is a line of text. In ``.jsonl`` and ``.json`` it is an object, as in prompt files, with references and
    metadata.

    Raises one :class:`ConfigError` with all mistakes: both are given, the file has another number of rows or cannot be
    read, or the reward needs references that a prompt lacks.
    """
    label, needs = options.label, options.uses_references == "needed"
    if file is None:
        if needs:
            raise ConfigError(f"{label} compares with references, which --prompt has none of; {REFERENCES}")
        return [_prompt(text)] * count
    if text:
        raise ConfigError("--prompt and --prompts are both given; give one of them")
    if file.suffix.lower() in OBJECTS:
        rows, mistakes = read_rows(file)
    else:
        rows = [(f"line {number}", _prompt(line)) for number, line in enumerate(lines_of(file), 1)]
        mistakes = []
    if needs:
        lacking = [place for place, prompt in rows if not prompt.references]
        mistakes += [f"{place}: no references, which {label} compares with; {REFERENCES}" for place in lacking]
    if not mistakes and len(rows) != count:
        kind = "entries" if file.suffix.lower() == ".json" else "lines"
        raise ConfigError(f"{file} has {len(rows)} {kind} for {count} files; give one, its prompt, for each file")
    if mistakes:
        raise mistakes_in(file, mistakes)
    return [prompt for _, prompt in rows]


def _prompt(text: str) -> Prompt:
    return Prompt(id=prompt_id(text), text=text)


def _picture(source: str) -> np.ndarray:
    return decoded(Path(source).read_bytes())


def prepare(name: str, source: Path, target: Path) -> None:
    """Convert published weights of a reward to the new folder ``target``, which is there once all of it is.

    Raises :class:`ConfigError` if the reward's weights need no conversion, and if ``target`` exists.
    """
    converter = getattr(plugins.load("rewards", plugin_of(name)), "prepare", None)
    if converter is None:
        able = [one for one in plugins.own("rewards") if hasattr(plugins.load("rewards", one), "prepare")]
        raise ConfigError(f"weights of {name} need no preparation; only {', '.join(able)} do")
    if target.exists():
        raise ConfigError(f"{target} exists already; name a folder that does not")
    partial = target.with_name(f".{target.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    converter(source, partial)
    partial.rename(target)
