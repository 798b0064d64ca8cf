"""Rollouts that decode a share of their samples: what plans refuse, and when the stage that decodes the rest counts."""

from pathlib import Path

import pytest

from cosmos_rl_core.errors import ConfigError
from flows.planning import requests
from flows.planning.plan import Settings, plan_of
from flows.post_train import steps
from stages.contracts import Rollout
from tests.hand_made import make, planned

LATENT_REWARD = '''
from typing import Literal

from cosmos_rl_core.config.train import RewardOptions


class Options(RewardOptions):
    """The mean of the latents."""

    name: Literal["mean_latent"]

    def reads(self, num_frames):
        return "latents"


class Reward:
    """Scores latents by their mean."""

    version = "1"

    def __init__(self, options):
        pass

    def check_prompt(self, prompt):
        return None

    def score(self, samples):
        return [{"mean_latent": float(sample.latents.mean())} for sample in samples]
'''
SHARE = "rollout.decode_share=0.1"


@pytest.fixture
def on_latents(recipe, tmp_path: Path) -> str:
    """A recipe whose one reward reads latents."""
    (tmp_path / "mean_latent.py").write_text(LATENT_REWARD, encoding="utf-8")
    path = Path(recipe())
    text = path.read_text(encoding="utf-8")
    before, _, after = text.partition("[[rewards]]")
    after = after[after.index("\n[") :] if "\n[" in after else ""
    reward = '[[rewards]]\nfn = { name = "mean_latent" }\n'
    path.write_text(f'plugins = ["{tmp_path}/mean_latent.py"]\n{before}{reward}{after}', encoding="utf-8")
    return str(path)


def test_a_share_is_refused_where_a_reward_reads_pixels(recipe):
    with pytest.raises(ConfigError, match=r"rollout\.decode_share = 0\.1: ocr.* read the pixels of every sample"):
        plan_of(Settings(recipe(), overrides=(SHARE,)))


def test_decoding_the_rest_is_a_stage_only_once_somebody_wants_it(on_latents: str, tmp_path: Path):
    run = planned(on_latents, tmp_path, overrides=(SHARE,))
    assert [step.name for step in steps(run) if step.kind == "decode"] == []
    every = [step for step in steps(run, undecoded=True) if step.kind == "decode"]
    assert [step.name for step in every] == ["iteration-0000/decode", "iteration-0001/decode"]
    for name in ("policy", "embed"):
        make(next(step.request() for step in steps(run) if step.name == name), {"current/w": b"w", "index.json": b"{}"})
    rollout = requests.rollout(run, 0)
    assert rollout.settings(Rollout).decoding.share == 0.1
    make(rollout, {"index/00000.json": b"[]", "media/00000.tar": b"", "tensors/00000.tar": b""})
    make(every[0].request(), {"index/00000.json": b"[]"})
    assert [step.name for step in steps(run) if step.kind == "decode"] == ["iteration-0000/decode"]


def test_a_run_that_decodes_all_has_no_such_stage(recipe, tmp_path: Path):
    assert [step for step in steps(planned(recipe(), tmp_path), undecoded=True) if step.kind == "decode"] == []
