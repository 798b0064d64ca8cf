"""A scorer that does what prompts say: score, be slow, lie, raise, die. A plugin from outside the package."""

import os
import signal
import time
from pathlib import Path
from typing import Any, Literal

from cosmos_rl_core.config.reward_facts import Facts
from cosmos_rl_core.config.train import RewardOptions
from cosmos_rl_core.datasets._base import Prompt
from cosmos_rl_core.errors import UnavailableError
from cosmos_rl_core.rewards._base import Sample


class Options(RewardOptions):
    """Where it counts, and what it says of itself."""

    facts = Facts(scores={"probe": "mean of all pixels, 0 to 255"}, also=("probe_too",), wire={"probe": "probe_reward"})
    name: Literal["probe"] = "probe"  # pyright: ignore[reportIncompatibleVariableOverride]
    release: str = "1"
    log: str = ""
    """File to which each call adds a line with the number of its samples."""
    only: str = ""
    """File that the first process makes, which then takes seconds to load. Others do not load."""
    seconds: float = 0.0
    """How long a sample takes, waiting."""


class Reward:
    """Score ``probe``."""

    def __init__(self, options: Options) -> None:
        self.options, self.version = options, f"probe {options.release}"
        if options.release == "broken":
            raise FileNotFoundError("no weights here")
        if options.only:
            Path(options.only).touch(exist_ok=False)
            time.sleep(2.5)

    def check_prompt(self, prompt: Prompt) -> str | None:
        return None

    def score(self, samples: list[Sample]) -> Any:
        print("a scorer may print", [sample.prompt for sample in samples], flush=True)
        if self.options.log:
            with Path(self.options.log).open("a") as file:
                file.write(f"{len(samples)}\n")
        time.sleep(self.options.seconds * len(samples))
        if any(sample.prompt == "one too many" for sample in samples):
            return [*map(self._score, samples), {"probe": 0.0}]
        return [self._score(sample) for sample in samples]

    def _score(self, sample: Sample) -> Any:
        what, _, much = sample.prompt.partition(" ")
        match what:
            case "die":
                os.kill(os.getpid(), signal.SIGKILL)
            case "die-once" if not Path(much).exists():
                Path(much).touch()
                os.kill(os.getpid(), signal.SIGKILL)
            case "exit":
                os._exit(3)
            case "raise":
                raise ValueError(f"not this one: {sample.sample_id[-2:]}")
            case "error":
                return ValueError("an error in place of scores")
            case "away":
                raise UnavailableError("the judge is away")
            case "sleep":
                time.sleep(float(much))
            case "nan":
                return {"probe": float("nan")}
            case "text":
                return {"probe": "0.5"}
            case "other":
                return {"else": 1.0}
            case "metadata":
                return {"probe": float(sample.metadata["count"])}
            case "extra":
                return {"probe": float(sample.pixels.mean()), "length": float("inf"), "else": 1.0}
            case "memory":
                raise MemoryError("no room for this one")
            case "list":
                return [1.0]
            case _:
                pass
        seen = {"length": len(sample.prompt), "shape": str(sample.pixels.shape), "fps": sample.fps}
        return {"probe": float(sample.pixels.mean()), **seen}
