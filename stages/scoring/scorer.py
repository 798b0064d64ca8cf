"""Scores of one portion of samples. Failures of a sample, of the scorer and of the stored data are told apart."""

import json
import time
from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

from cosmos_rl_core import plugins
from cosmos_rl_core.errors import ArtifactError, ConfigError, DivergenceError, UnavailableError
from cosmos_rl_core.foreign_errors import is_out_of_memory
from cosmos_rl_core.rewards._base import LatentSample, NamedReward, PreparingReward, Reward, Sample
from cosmos_rl_core.rewards._base.answers import entries, scored, words
from cosmos_rl_core.rewards._base.served import ServedScorer
from cosmos_rl_core.rewards._batches.exact import ONE_BY_ONE, named, one_by_one, why_not_exact
from stages import contracts
from stages.artifacts.artifact import Artifact
from stages.artifacts.request import Request
from stages.contracts import MEDIA, TENSORS
from stages.formats.references import Pictures
from stages.formats.samples import BY_GUARDRAIL, Files, StoredSample, read_unit
from stages.scoring.decoded import Decoded
from stages.scoring.portions import Portion

Rows = list[dict[str, Any]]
Outcome = dict[str, Any] | Exception
"""A sample's scores by name, or the error because of which it has none."""
Asked = Callable[[list[Any]], list[Any]]
"""A function that scores samples, like ``Reward.score``."""
_AWAY = (UnavailableError, ConnectionError, TimeoutError)
"""Errors of a scorer that cannot be reached, which are no sample's fault."""
_PASSING = (ConfigError, *_AWAY)
CALL = ["shard_samples", "attempt", "failed", "seconds"]
LOST = "so there is no picture to score"
"""End of the error of a sample without a picture."""
REFUSED = f"was {BY_GUARDRAIL}, {LOST}"
"""End of the error of a sample that a guardrail refused: neither the policy nor the reward failed."""
_UNITS_HELD = 2
"""Most units in memory, as encoded bytes. A prompt with few samples lies in two units at most."""
DECODED_AHEAD_BYTES = 2**30
"""Most bytes of pixels and latents of the next portion that are decoded while another one is scored."""


class Read(NamedTuple):
    """The samples of a portion, in order."""

    stored: list[StoredSample]
    decoded: dict[str, Sample | LatentSample]
    """The first samples that have a picture, decoded for the reward, by id."""


class Made(NamedTuple):
    """Tables of one portion, each with one row per sample or per call."""

    scores: Rows
    answers: Rows
    calls: Rows

    @property
    def all_scored(self) -> bool:
        """Return whether another attempt may adopt the portion: no failed sample could be scored then.

        Samples without a picture can never be scored, so they do not count.
        """
        return all(not answer["error"] or answer["error"].endswith(LOST) for answer in self.answers)


class Scorer:
    """The reward of a Request, which scores portions of its samples, or of ``samples``.

    Raises :class:`ConfigError` if this process has another version of the reward than the Request asks for.
    """

    def __init__(self, request: Request, samples: Files | None = None) -> None:
        self.config = request.settings(contracts.Reward)
        self.samples: Files = Artifact(request.one("samples")) if samples is None else samples
        self.part = TENSORS if self.config.reads == "latents" else MEDIA
        self.groupwise = self.config.reward.facts.groupwise
        self.reward: Reward = plugins.load("rewards", self.config.reward.name).Reward(self.config.reward)
        if self.reward.version != self.config.scorer:
            found = f"this process scores with {self.reward.version}"
            expected = f"the request asks for {self.config.scorer}"
            raise ConfigError(f"{found}, {expected}; use the packages and files of that version")
        self.name = self.config.scorer
        """Version of the scorer, as written with each score."""
        self.alone = False
        """Whether each item has a forward pass of its own, although the settings let several share one."""
        decoded = [Artifact(one) for one in request.inputs.get("decoded", ())]
        self._decoded = Decoded(self.samples, request.one("samples").parts, decoded) if decoded else None
        self._pictures = Pictures(request.home)
        self._unit = lru_cache(_UNITS_HELD)(self._read_unit)

    def make_exact(self, gather: Callable[[bool], list[bool]], say: Callable[[str], None]) -> bool:
        """Make sure that a score depends on no other sample, and return whether that takes forward passes of one item.

        Collective: ``gather`` returns the findings of all ranks, and if one rank needs single items, all ranks take
        them. ``say`` gets the reason.
        """
        options = self.config.reward
        why = why_not_exact(self.reward, options)
        if why is not None:
            say(f"{options.label} scores in {ONE_BY_ONE}: {why}")
        if any(gather(why is not None)):
            del self.reward  # before its model is loaded a second time
            self.reward = one_by_one(plugins.load("rewards", options.name).Reward, options)
            self.name, self.alone = named(self.config.scorer, alone=True), True
        return self.alone

    def hold_to(self, served: ServedScorer | None) -> None:
        """Accept scores only from this scorer of a service; from any scorer if it is None."""
        if isinstance(self.reward, NamedReward) and served is not None:
            self.reward.hold_to(served)
            self.name = f"{self.config.scorer}, {served.digest}"

    def read(self, portion: Portion, most_bytes: int = 0) -> Read:
        """Read the samples of a portion, and decode the first of them, until they have ``most_bytes``."""
        stored = [self._unit(unit)[one] for unit, ids in portion.units.items() for one in ids]
        decoded: dict[str, Sample | LatentSample] = {}
        for one in stored:
            if most_bytes <= 0:
                break
            if one.finite:
                found = decoded[one.sample_id] = self._sample(one)
                most_bytes -= (found.latents if isinstance(found, LatentSample) else found.pixels).nbytes
        return Read(stored, decoded)

    def ahead(self, portion: Portion) -> Read:
        """Read and decode the portion that is scored next, and let the reward prepare its samples."""
        read = self.read(portion, DECODED_AHEAD_BYTES)
        if isinstance(self.reward, PreparingReward):
            self.reward.expect([one for one in read.decoded.values() if isinstance(one, Sample)])
        return read

    def score(self, portion: Portion, ask: Asked | None = None, read: Read | None = None) -> Made:
        """Return the score rows of one portion, the answers that they come from, and the calls.

        ``ask`` scores samples in place of the reward's ``score``. ``read`` is the result of an earlier :meth:`ahead`.
        Failed samples are tried again together, up to ``max_attempts`` times in all; with a groupwise reward, all
        samples of their prompts are tried again. The reward never gets a sample without a picture.
        """
        label, calls = self.config.reward.label, Rows()
        stored, decoded = self.read(portion) if read is None else read
        results: dict[str, Outcome] = {
            s.sample_id: DivergenceError(f"the sample {s.why_lost}, {LOST}") for s in stored if s.why_lost
        }
        waiting = finite = [decoded.get(one.sample_id) or self._sample(one) for one in stored if one.finite]
        for attempt in range(self.config.max_attempts if waiting else 0):
            started_s = time.monotonic()
            outcomes = self._outcomes(waiting, label, ask or self.reward.score)
            results |= zip((sample.sample_id for sample in waiting), outcomes, strict=True)
            failed = [s for s in waiting if isinstance(results[s.sample_id], Exception)]
            call = len(waiting), attempt, len(failed), time.monotonic() - started_s
            calls.append(dict(zip(CALL, call, strict=True)))
            if not failed:
                break
            waiting = finite if self.groupwise else failed
        return Made(*self._rows(stored, results), calls)

    def forget_units(self) -> None:
        """Forget all units that were read, because their files may have changed."""
        self._unit.cache_clear()

    def _read_unit(self, number: int) -> dict[str, StoredSample]:
        read = read_unit(self.samples, number, self.part) if self._decoded is None else self._decoded.read_unit(number)
        return {one.sample_id: one for one in read}

    def _outcomes(self, samples: list[Any], label: str, ask: Asked) -> list[Outcome]:
        """Return scores or a failure for each sample.

        If scoring them together fails, each sample is scored alone; if the reward is groupwise, all samples fail.
        Raises errors that are no sample's fault: :class:`UnavailableError`, a lost connection or a timeout, because the
        scorer cannot be reached, :class:`ConfigError`, because it would fail all samples, and a lack of memory.
        """
        try:
            found = [scored(entry, label) for entry in entries(ask([*samples]), len(samples))]
        except _PASSING:
            raise
        except Exception as error:
            # No sample is at fault, and scoring each alone does not need less memory.
            if is_out_of_memory(error):
                raise
            if len(samples) == 1 or self.groupwise:
                return [error] * len(samples)
            return [outcome for sample in samples for outcome in self._outcomes([sample], label, ask)]
        for outcome in found:
            if isinstance(outcome, _AWAY):
                raise outcome
        return found

    def _sample(self, stored: StoredSample) -> Sample | LatentSample:
        """Return the sample for the reward.

        Raises :class:`ArtifactError` if its bytes cannot be decoded, because then they are damaged.
        """
        row = stored.row
        try:
            latents = stored.final_latents
            kind, data = (Sample, stored.pixels) if latents is None else (LatentSample, latents)
        except Exception as error:  # decoders raise whatever they like
            what = f"sample {stored.sample_id}: its {stored.extension or 'latents'}"
            raise ArtifactError(f"{what} cannot be decoded: {error}") from error
        taken = self.config.reward.uses_references != "ignored"
        facts = {
            "metadata": row["metadata"],
            "references": self._pictures.of(row.get("references", ())) if taken else (),
        }
        return kind(row["sample_id"], row["prompt_id"], row["prompt"], data, **facts)

    def _rows(self, stored: list[StoredSample], results: dict[str, Outcome]) -> tuple[Rows, Rows]:
        rows, answers = Rows(), Rows()
        for one in stored:
            outcome = results[one.sample_id]
            score, error, details = None, "", "{}"
            if isinstance(outcome, Exception):
                error = words(outcome)
            else:
                score, details = float(outcome[self.config.reward.label]), json.dumps(outcome, sort_keys=True)
            sample = {"sample_id": one.sample_id, "prompt_id": one.row["prompt_id"]}
            rows.append(sample | {"score": score, "valid": score is not None, "scorer": self.name})
            answers.append({"sample_id": one.sample_id, "error": error, "details": details})
        return rows, answers


def is_of(named: str, version: str) -> bool:
    """Return whether the scorer ``named`` with a score has a reward's version; a digest or its batches may follow."""
    return named == version or named.startswith(f"{version}, ")
