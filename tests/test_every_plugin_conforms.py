"""The shipped suite on every plugin: on models, what needs no weights of theirs."""

from typing import Any

import numpy as np
import pandas as pd
import pytest

from cosmos_rl_core.conformance.kinds.test_algorithms import *  # noqa: F403
from cosmos_rl_core.conformance.kinds.test_algorithms import Subject
from cosmos_rl_core.conformance.kinds.test_captioners import *  # noqa: F403
from cosmos_rl_core.conformance.kinds.test_chat_datasets import *  # noqa: F403
from cosmos_rl_core.conformance.kinds.test_datasets import *  # noqa: F403
from cosmos_rl_core.conformance.kinds.test_files import *  # noqa: F403
from cosmos_rl_core.conformance.kinds.test_models import *  # noqa: F403
from cosmos_rl_core.conformance.kinds.test_rewards import *  # noqa: F403
from cosmos_rl_core.conformance.kinds.test_solvers import *  # noqa: F403
from cosmos_rl_core.conformance.kinds.test_vlms import *  # noqa: F403


@pytest.fixture(scope="session")
def plugin_settings() -> dict[str, Any]:
    """None: of shipped plugins the suite has what it needs."""
    return {}


def test_shipped_algorithms_use_every_sample_with_a_reward_or_the_best(algorithm: Subject):
    made = algorithm.make(algorithm.options)
    if algorithm.options.rewarded and made.needs.unit != "pair":
        rewards = {"reward": [1.0, 2.0, 4.0, np.nan], "valid": [True, True, True, False]}
        table = made.advantages(pd.DataFrame({"sample_id": list("abcd"), "prompt_id": ["p"] * 4, **rewards}))
        # Of RFT a quarter of three, rounded up.
        best = [False, False, True, False] if algorithm.options.type == "rft" else rewards["valid"]
        assert table["used"].tolist() == best
