"""Every scorer with torch, as a process of the service: the scores are its own, to the bit, for any request."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from cosmos_rl_core import plugins
from cosmos_rl_core.rewards._base import Sample
from cosmos_rl_core.rewards._batches.trial import METADATA
from cosmos_rl_core.rewards._remote.frame import frame as with_references
from tests import running_service as running
from tests import tiny_scorers
from tests.upstream_client import frame

pytestmark = [pytest.mark.processes, pytest.mark.slow]
TORCH = [name for name in plugins.own("rewards") if plugins.load("rewards", name).Options.facts.torch]
THREADS = torch.get_num_threads()
"""Threads of a process in which nothing was set: modules are imported before any test runs."""
PROMPTS = ["a red car", 'a sign that says "a longer text"', "a"]


@pytest.fixture(autouse=True)
def default_threads() -> Iterator[None]:
    """As many as the service has, whatever earlier tests have set: the last bits depend on it."""
    before = torch.get_num_threads()
    torch.set_num_threads(THREADS)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("name", TORCH)
def test_scores_do_not_depend_on_where_and_with_what_a_sample_is_scored(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    module, settings = plugins.load("rewards", name), tiny_scorers.settings(name, tmp_path)
    facts, label = module.Options.facts, module.Options.model_validate({"name": name, **settings}).label
    shape = (3, 3, 9, 64, 48) if facts.input == "video" else (3, 64, 48, 3)
    array = np.random.default_rng(0).integers(0, 256, shape, np.uint8)
    frames = array.transpose(0, 2, 3, 4, 1) if facts.input == "video" else array[:, None]
    uses, shown = facts.references, [(frames[i - 1, :1],) if facts.references != "ignored" else () for i in range(3)]
    samples = [
        Sample(f"{i}", f"{i}", prompt, frames[i], metadata=METADATA, references=shown[i])
        for i, prompt in enumerate(PROMPTS)
    ]
    options = module.Options.model_validate({"name": name, **settings})
    own = [scores[label] for scores in module.Reward(options).score(samples)]

    media, key = ("video" if facts.input == "video" else "image"), facts.wire.get(label, label)
    scorer = {"reward_type": name, "options": settings}
    with running.in_thread(running.write(tmp_path, running.settings(tmp_path, scorer))) as client:
        parts = [slice(0, len(PROMPTS)), *(slice(i, i + 1) for i in range(len(PROMPTS)))]
        bodies = [
            frame(PROMPTS[part], {name: 1.0}, array[part], media_type=media, metadata=[METADATA] * len(PROMPTS[part]))
            if uses == "ignored"
            else with_references(PROMPTS[part], name, media, array[part], references=shown[part])
            for part in parts
        ]
        uuids = [client.enqueue(body) for body in bodies]
        found = [client.result(uuid, name, 120) for uuid in uuids]
        running.name_to_clients(client, monkeypatch)
        remote = plugins.load("rewards", "remote")
        given = {"reward_fn": name, "score_key": key, "media": "pixels", "batch_size": 2, "references": uses}
        ours = remote.Reward(remote.Options.model_validate(given))
        ours.hold_to(ours.scorer())
        by_client = [entry[key] for entry in ours.score(samples)]
    assert [told.get("error") for told in found] == [None] * 4
    assert found[0]["scores"][key] == own
    assert [told["scores"][key][0] for told in found[1:]] == own == by_client
    assert found[0]["scorer"]["version"] == module.Reward(options).version
