"""A process of a scorer or a decoder. It answers each line of JSON, a call, with another, and ends with the service.

Media are read from the spool by path; they never go through pipes.
"""

import json
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from cosmos_rl_core import outside_plugins, plugins
from cosmos_rl_core.canonical import sha256
from cosmos_rl_core.errors import ConfigError, UnavailableError
from cosmos_rl_core.foreign_errors import is_out_of_memory
from cosmos_rl_core.processes import die_with_parent
from cosmos_rl_core.reward_service import frames
from cosmos_rl_core.rewards._base import Reward, Sample
from cosmos_rl_core.rewards._base.answers import brief, entries, words
from cosmos_rl_core.rewards._batches.exact import ONE_BY_ONE, batch_sizes, exact, named
from cosmos_rl_core.rewards._batches.trial import trial_samples

UNAVAILABLE = (ConnectionError, TimeoutError, UnavailableError)
"""Errors of a scorer that cannot work now."""
Entry = dict[str, Any]


class Work(Protocol):
    """Work that a process does for the service."""

    version: str
    batching: str
    """How samples are batched, in words; "" for work without a choice."""

    def answers(self, requests: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Return an answer to each request."""
        ...


class Scoring:
    """Scores requests with a reward plugin."""

    def __init__(self, setup: Mapping[str, Any]) -> None:
        outside_plugins.use(setup["plugins"], verify=True)
        module = plugins.load("rewards", setup["plugin"])
        options = module.Options.model_validate(setup["options"])
        self._groupwise, alone = options.facts.groupwise, False
        self._references = options.uses_references != "ignored"
        if options.facts.torch:
            settle(setup)
        if setup["batching"] == "exact" and batch_sizes(options):
            self._reward, alone = exact(module.Reward, options, print)
        else:
            self._reward = module.Reward(options)
            if options.facts.torch:
                _warm_up(self._reward, options.facts.input)
        self.version, self.batching = named(self._reward.version, alone=alone), setup["batching"]
        if alone:
            self.batching = f"{self.batching}, {ONE_BY_ONE}"

    def answers(self, requests: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Score all requests in one call; return for each its entries, facts about its array, and seconds."""
        started_s = time.perf_counter()
        read = [_read(request, references=self._references) for request in requests]
        try:
            found = self._entries([sample for samples, _ in read for sample in samples])
        except UNAVAILABLE as error:
            return [{"unavailable": words(error)} for _ in requests]
        seconds, rest = time.perf_counter() - started_s, iter(found)
        return [
            {"entries": [next(rest) for _ in samples], "input": about, "seconds": seconds} for samples, about in read
        ]

    def _entries(self, samples: Sequence[Sample]) -> list[Entry]:
        """Return scores or an error for each sample.

        If the scorer raises for all samples, each is scored alone; if the reward is groupwise, all samples fail.
        Raises errors that a new process may not have: it is out of memory, or has lost its device.
        """
        try:
            return [_entry(scored) for scored in entries(self._reward.score(list(samples)), len(samples))]
        except UNAVAILABLE:
            raise
        except Exception as error:
            if is_out_of_memory(error) or _device_is_lost():
                raise
            if len(samples) == 1 or self._groupwise:
                return [{"error": words(error)} for _ in samples]
            return [entry for sample in samples for entry in self._entries([sample])]


def settle(setup: Mapping[str, Any]) -> Any:
    """Return the device of torch on which this process computes, without TF32, as the stage ``judge`` does.

    Raises :class:`ConfigError` if it cannot.
    """
    import_module("cosmos_rl_core.parallel.precision").score_in_float32()
    return import_module("cosmos_rl_core.parallel.devices").settled(setup.get("device"), setting="device")


def _device_is_lost() -> bool:
    """Return whether the GPU refuses all further work, as after an assertion on it that failed."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return False
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return True
    return False


def _entry(scored: Any) -> Entry:
    if isinstance(scored, Exception):
        return {"error": words(scored)}
    if not isinstance(scored, dict):
        return {"error": f"the scorer returned {brief(scored)} for a sample, expected its scores by name"}
    return {"scores": {str(name): _plain(value) for name, value in scored.items()}}


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, bool | int | float):
        return value
    return float(value) if isinstance(value, np.number) else brief(value)


def _read(request: Mapping[str, Any], *, references: bool) -> tuple[list[Sample], dict[str, Any]]:
    """Return the samples of a request, and the facts about its array that its result shows.

    Without ``references``, samples have none, even if the request has some.
    """
    path, decoded = Path(request["frame"]), request.get("decoded")
    frame = frames.read(path)
    array = np.load(decoded["pixels"], mmap_mode="r") if decoded else frame.array(path)
    about = decoded["input"] if decoded else described(array.shape, "uint8", array.min(), array.max())
    if frame.video_infos is not None:
        about = {**about, "video_infos": [dict(info) for info in frame.video_infos]}
    # Samples of a prompt have the same references, which are in memory once.
    known = {one for row in frame.references for one in row if references}
    pictures = {one: np.array(one.mapped(path), order="C") for one in known}
    samples = [
        Sample(
            f"{path.name}-{i}",
            sha256(prompt.encode()),
            prompt,
            _pixels(each, frame.media),
            metadata=frame.metadata[i],
            fps=frame.fps[i],
            references=tuple(pictures[one] for one in frame.references[i] if references),
        )
        for i, (prompt, each) in enumerate(zip(frame.prompts, array, strict=True))
    ]
    return samples, about


def described(shape: Sequence[int], dtype: str, low: float, high: float) -> dict[str, Any]:
    """Return the facts about a sent array that a result shows, in the form of cosmos-rl's service."""
    return {"shape": list(shape), "dtype": f"torch.{dtype}", "min": f"{low:.3f}", "max": f"{high:.3f}"}


def _pixels(sent: np.ndarray, media: frames.Media) -> np.ndarray:
    """Return ``[frames, height, width, 3]`` of an image or of a video ``[3, frames, height, width]``."""
    frames_last = sent[None] if media == "image" else sent.transpose(1, 2, 3, 0)
    return np.array(frames_last, order="C")


def _warm_up(reward: Reward, kind: str) -> None:
    """Score a test sample, so that missing weights are noticed before there is work.

    Raises errors of files, packages and settings. It is no fault if the scorer cannot score this sample.
    """
    try:
        reward.score(trial_samples(kind, 1))
    except ConfigError:
        raise
    except (*UNAVAILABLE, ValueError) as error:
        print(f"the first sample was not scored: {words(error)}")


def serve(make: Callable[[Mapping[str, Any]], Work]) -> int:
    """Answer the calls of the service until it closes the pipe; return the exit status.

    ``make`` makes the :class:`Work` from the setup, which is the first line.
    """
    die_with_parent()
    # Scorers may print and read; the pipes are for the service alone.
    calls, channel = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)

    def send(answer: Any) -> None:
        channel.write(json.dumps(answer).encode() + b"\n")
        channel.flush()

    setup = json.loads(calls.readline())
    try:
        work = make(setup)
        send({"ready": {"version": work.version, "batching": work.batching}})
    except Exception as error:
        send({"failed": words(error)})
        return 1
    for line in calls:
        requests = json.loads(line)["requests"]
        try:
            send(work.answers(requests))
        except (OSError, ValueError) as error:
            # The body on the disk has changed or is gone, or there is no space for decoded pixels.
            send([{"error": words(error)} for _ in requests])
    return 0


if __name__ == "__main__":
    sys.exit(serve(Scoring))
