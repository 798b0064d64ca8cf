"""Check of a reward service: send a test message, as a run would, and report the scores."""

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from cosmos_rl_core.errors import ConfigError, CosmosRLError, UnavailableError
from cosmos_rl_core.rewards._base.answers import brief
from cosmos_rl_core.rewards._batches.trial import METADATA
from cosmos_rl_core.rewards._remote.client import ENQUEUE_URL, FETCH_URL, Client, RefusedError, Service, url_fault
from cosmos_rl_core.rewards._remote.frame import frame
from cosmos_rl_core.storage import media

ROOT = "/api/reward"
PROMPT = 'a sign that says "test"'
SIZE, NUM_FRAMES = 64, 9


@dataclass(frozen=True)
class Finding:
    """Result of the check of one reward."""

    reward: str
    works: bool
    found: str
    """Scores, or why there are none."""
    seconds: float = 0.0


def check(url: str, rewards: Sequence[str], timeout_s: float, environment: Mapping[str, str]) -> Iterator[Finding]:
    """Yield a finding for each reward in ``rewards``; if that is empty, for each reward that the service lists.

    Raises after the last finding, or at once if no reward can be checked: :class:`ConfigError` for a wrong URL, token
    or reward, :class:`UnavailableError` for a service or scorer that does not work now.
    """
    service = service_at(url, environment)
    with Client(service, timeout_s) as asking:
        known = asking.scorers_now() or {}
    asked = rewards or [*known]
    if not asked:
        raise ConfigError("the service does not tell what it serves, as cosmos-rl's does not: name one with --reward")
    failures = list[CosmosRLError]()
    with Client(service, timeout_s) as asking:
        for reward in asked:
            started_s = time.monotonic()
            try:
                told = _scored(asking, reward, known.get(reward, {}))
                yield Finding(reward, True, _scores(told), time.monotonic() - started_s)
            except (ConfigError, UnavailableError) as error:
                failures.append(error)
                yield Finding(reward, False, brief(error), time.monotonic() - started_s)
    for error in sorted(failures, key=lambda error: error.exit_code):
        raise error


def service_at(url: str, environment: Mapping[str, str]) -> Service:
    """Return the service at a URL, with or without the path of one of its endpoints, and the environment's token.

    Raises :class:`ConfigError` if ``url`` is no URL.
    """
    if (fault := url_fault(url)) is not None:
        raise ConfigError(f"{url!r} {fault}; expected the URL of a service, e.g. http://localhost:8080")
    root = url.rstrip("/")
    for ending in ("/enqueue", "/pull", ROOT):
        root = root.removesuffix(ending)
    return Service.from_environment(
        {**environment, ENQUEUE_URL: f"{root}{ROOT}/enqueue", FETCH_URL: f"{root}{ROOT}/pull"}
    )


def _scored(asking: Client, reward: str, scorer: Mapping[str, Any]) -> dict[str, Any]:
    """Send noise in a form that the scorer takes, by default an image, and return the service's result."""
    kind = "image" if "image" in scorer.get("media", ["image"]) else "video"
    shape = (SIZE, SIZE, 3) if kind == "image" else (3, NUM_FRAMES, SIZE, SIZE)
    pixels = np.random.default_rng(0).integers(0, 256, (1, *shape), np.uint8)
    picture = (pixels if kind == "image" else pixels[:, :, 0].transpose(0, 2, 3, 1)).copy()
    fps = None if kind == "image" else float(media.FPS)
    metadata = [METADATA] if scorer.get("metadata") is True else []
    references = [[picture]] if scorer.get("references") in ("taken", "needed") else []
    try:
        ticket = asking.enqueue(frame([PROMPT], reward, kind, pixels, fps, metadata=metadata, references=references))
    except RefusedError as error:
        raise ConfigError(f"{reward} was refused: {error}") from error
    try:
        return asking.result(ticket, reward)
    except RefusedError as error:
        raise UnavailableError(f"{reward} gave no scores: {error}") from error


def _scores(told: Mapping[str, Any]) -> str:
    scores = ", ".join(f"{name} {_first(values)}" for name, values in told["scores"].items())
    scorer = told.get("scorer")
    return f"{scores}; {scorer.get('version')}" if isinstance(scorer, dict) else scores


def _first(values: Any) -> str:
    value = values[0] if isinstance(values, list) and values else values
    return f"{value:.4g}" if isinstance(value, float) else brief(value)
