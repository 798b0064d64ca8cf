"""A scorer whose forwards may treat the items of a batch unlike each other. A plugin from outside the package."""

from typing import Literal

from pydantic import Field

from cosmos_rl_core.config.reward_facts import Facts
from cosmos_rl_core.config.train import RewardOptions
from cosmos_rl_core.datasets._base import Prompt
from cosmos_rl_core.rewards._base import Sample
from cosmos_rl_core.rewards._batches import in_batches

ULP = 2.0**-44
"""A last bit of means of pixels."""


class Options(RewardOptions):
    """What its kernels do."""

    facts = Facts(scores={"uneven": "mean of all pixels, 0 to 255"}, torch=True, batches=("batch_size",))
    name: Literal["uneven"] = "uneven"  # pyright: ignore[reportIncompatibleVariableOverride]
    batch_size: int = Field(default=4, ge=1)
    kernel: Literal["even", "place", "neighbours", "chance", "blind"] = "even"


class Reward:
    """Score ``uneven``."""

    def __init__(self, options: Options) -> None:
        self.options, self.version, self.forwards = options, "uneven 1", 0

    def check_prompt(self, prompt: Prompt) -> str | None:
        return None

    def score(self, samples: list[Sample]) -> list[dict[str, float] | Exception]:
        if self.options.kernel == "blind":
            raise ValueError("nothing to see")
        found = in_batches([float(sample.pixels.mean()) for sample in samples], self.options.batch_size, self.forward)
        return [one if isinstance(one, Exception) else {"uneven": one} for one in found]

    def forward(self, means: list[float]) -> list[float]:
        self.forwards += 1
        match self.options.kernel:
            case "place":
                return [mean + i * ULP for i, mean in enumerate(means)]
            case "neighbours":
                return [mean + ULP * (len({*means}) > 1) for mean in means]
            case "chance":
                return [mean + self.forwards * ULP for mean in means]
            case _:
                return means
