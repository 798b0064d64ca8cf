"""Plans of runs that begin with trained weights: what is found, pinned and refused."""

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from cosmos_rl_core.errors import ConfigError
from flows.explaining.explain import as_json, explain_plan
from flows.library import open_run
from flows.planning import requests
from flows.planning.plan import Plan, Settings, freeze, plan_of, read_plan
from flows.planning.run import Run
from flows.sizes.basis import Basis
from flows.sizes.memory import stages
from flows.watching.status_table import rendered
from stages.contracts import Init
from tests.hand_made import make, make_iteration, planned, rewards, rollout_files

SOURCE = "policy.init_from=hand"


@pytest.fixture
def store(recipe, tmp_path: Path) -> str:
    """A store with the run ``hand``, whose policies 0 to 2 are finished."""
    run = planned(recipe(), tmp_path, run_id="hand")
    make(requests.policy(run), {"current/w": b"start"})
    make(run.prepared.embed, {"embeddings": b"e"})
    for k in range(2):
        make_iteration(run, k)
    return run.store_url


def plan_with(recipe, store: str, *overrides: str, run_id: str = "mine") -> Plan:
    return plan_of(Settings(recipe(), store, run_id=run_id, overrides=overrides))


def init_of(plan: Plan) -> Init:
    """What the plan's policy begins with."""
    assert plan.init is not None
    return plan.init


def refused(recipe, store: str, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        plan_with(recipe, store, *overrides)
    return str(caught.value)


def test_an_init_from_a_run_without_a_version_takes_the_newest_finished_one(recipe, store: str):
    assert init_of(plan_with(recipe, store, SOURCE)).source == "hand@2"
    found = plan_with(recipe, store, f"{SOURCE}@1")
    assert init_of(found).source == "hand@1"
    source = Run(read_plan(store, "hand"), store)
    (policy,) = found.init_inputs
    assert (policy.url, policy.manifest) == (source.slots.policy(1), init_of(found).digest)
    assert requests.policy(Run(found, store)).inputs["init"] == (policy,)


def test_an_init_takes_the_average_if_the_run_has_one(recipe, store: str):
    path = recipe(("[train]", "[train]\nema_enable = true"))
    run = Run(freeze(plan_of(Settings(path, store, run_id="averaged")), store), store)
    make(requests.policy(run), {"current/w": b"start"})
    make(requests.rollout(run, 0), rollout_files(0))
    make(rewards(run, run.slots.iteration(0, "rollout"), 0)[0], {"scores": b"s"})
    make(requests.update(run, 0), {"current/w": b"1", "ema/w": b"2"})
    plans = [plan_with(recipe, store, f"policy.init_from=averaged{version}") for version in ("@0", "")]
    assert [plan.init_inputs[0].parts for plan in plans] == [("current",), ("ema",)]


def test_a_recipe_without_an_init_is_unchanged(recipe, store: str):
    plain = plan_of(Settings(recipe(), store))
    assert not {"init", "init_inputs"} & plain.identity().keys()
    policy = plain.recipe.policy.identity()
    assert not {"init_from", "init_mode", "init_alpha", "reference"} & policy.keys()
    config = requests.policy(Run(plain, store)).config.identity()
    assert config.keys() == {"model", "from_scratch", "lora"}
    assert plain.lineage == ""


def test_another_init_is_another_run_and_cannot_go_on_as_this_one(recipe, store: str):
    plans = [plan_of(Settings(recipe(), store, overrides=overrides)) for overrides in ((), (SOURCE,))]
    assert plans[0].run_id != plans[1].run_id
    freeze(plan_with(recipe, store, SOURCE), store)
    assert init_of(freeze(plan_with(recipe, store, SOURCE), store)).source == "hand@2"
    with pytest.raises(ConfigError, match=r"(?s)run mine was planned otherwise.*init\.digest"):
        freeze(plan_with(recipe, store, f"{SOURCE}@1"), store)
    with pytest.raises(ConfigError, match=r"(?s)planned otherwise.*init_from"):
        freeze(plan_with(recipe, store), store)


def test_the_status_says_what_a_policy_begins_with(recipe, store: str):
    plan = freeze(plan_with(recipe, store, SOURCE, "policy.init_mode=stack", "policy.lora.r=3"), store)
    about = f"hand@2 (LoRA of rank 2, {init_of(plan).digest[:12]}), frozen below a new adapter"
    assert plan.lineage == f"{about}; the reference is the base model"
    overview = open_run("mine", store).now()
    assert f"begins with {plan.lineage}" in list(rendered(overview))
    assert overview.as_json()["init"] == plan.lineage
    assert requests.policy(Run(plan, store)).config.identity()["stacked"] is True
    assert "init" not in requests.policy(Run(read_plan(store, "hand"), store)).config.identity()


@pytest.mark.slow
def test_the_plan_says_what_a_policy_begins_with(recipe, store: str):
    """Its estimate of time loads the model."""
    plan = plan_with(recipe, store, SOURCE)
    assert plan.lineage.endswith("trained further; the reference is the base model")
    assert f"begins     with {plan.lineage}" in explain_plan(plan, store)
    assert as_json(plan, store)["init"] == plan.lineage


def test_the_frozen_adapter_is_counted(recipe, store: str):
    plan = plan_with(recipe, store, SOURCE, "policy.init_mode=stack")
    alone, stacked = (stages(plan.recipe, ["update"], Basis(below))[0].rows for below in (None, plan.below))
    # Rank 2 of 16 matrices of 128 x 128.
    assert stacked["transformer"].device - alone["transformer"].device == 16 * 2 * 2 * 128 * 4
    assert {name for name in alone if alone[name] != stacked[name]} == {"transformer"}


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (("policy.init_from=hnad",), "policy.init_from = 'hnad': there is no run 'hnad'"),
        ((f"{SOURCE}@3",), "run hand has no policy version 3; its newest finished one is 2"),
        ((f"{SOURCE}@best",), "expected run@k, with a policy version k from 0"),
        (("policy.init_from=./nothing",), "'./nothing' is not a directory here"),
        ((SOURCE, "policy.lora.r=4"), "its rank is 2, [policy.lora] says 4 (16 modules, e.g. "),
        ((SOURCE, "policy.lora.lora_alpha=4"), "its alpha is 8, [policy.lora] says 4 (16 modules, e.g. "),
        ((SOURCE, 'policy.lora.target_modules=["to_q"]'), "it alone adapts 12 modules, e.g. "),
        ((SOURCE, 'policy.lora.target_modules=["to_q", "net.2"]'), "[policy.lora] alone adapts "),
        ((SOURCE, "policy.lora.use_rslora=true"), "its use_rslora is false, [policy.lora] says the opposite"),
        ((SOURCE, "policy.lora.r=4"), "or train a new adapter on it (policy.init_mode = 'stack')"),
        ((SOURCE, "policy.init_alpha=4"), "policy.init_alpha is for the folder of an adapter"),
        (
            (SOURCE, "policy.reference=init", "train.train_policy.kl_beta=0"),
            "policy.reference without effect: nft compares with no reference here",
        ),
        (("policy.init_mode=stack",), "policy.init_mode without effect: there is no init_from"),
        ((SOURCE, "policy.from_scratch=true"), "policy.from_scratch draws all weights anew, policy.init_from names"),
    ],
)
def test_weights_that_a_run_cannot_begin_with_are_refused_with_the_reason(recipe, store: str, overrides, expected: str):
    assert expected in refused(recipe, store, *overrides)


def test_every_difference_is_named_at_once(recipe, store: str):
    message = refused(recipe, store, SOURCE, "policy.lora.r=4", "policy.lora.lora_alpha=2", "train.optm_lr=1e-2")
    assert "its rank is 2, [policy.lora] says 4" in message
    assert "its alpha is 8, [policy.lora] says 2" in message


def test_adapters_and_all_weights_do_not_replace_each_other(recipe, store: str):
    def without_lora(*replacements) -> str:
        return recipe(("lora = { r = 2 }", ""), *replacements)

    assert "it is an adapter, and this recipe trains all weights" in refused(without_lora, store, SOURCE)
    message = refused(without_lora, store, SOURCE, "policy.init_mode=stack")
    assert "policy.init_mode = 'stack' trains a new adapter: add [policy.lora]" in message
    run = Run(freeze(plan_of(Settings(without_lora(), store, run_id="full")), store), store)
    make(requests.policy(run), {"current/w": b"start"})
    message = refused(recipe, store, "policy.init_from=full")
    assert "it is all weights, and [policy.lora] trains an adapter: set policy.model_name_or_path" in message
    assert plan_with(without_lora, store, "policy.init_from=full").lineage.startswith("full@0 (all weights, ")


def test_a_run_of_another_base_model_is_refused(recipe, store: str, tmp_path: Path):
    plan = read_plan(store, "hand")
    other = plan.model_copy(update={"run_id": "other", "model": plan.model.model_copy(update={"digest": "0" * 64})})
    freeze(other, store)
    make(requests.policy(Run(other, store)), {"current/w": b"start"})
    message = refused(recipe, store, "policy.init_from=other")
    assert "it was trained on package:tiny-sd3 (000000000000), this recipe trains on package:tiny-sd3 (" in message


def test_a_folder_is_pinned_by_its_files(recipe, store: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    folder = tmp_path / "adapter"
    folder.mkdir()
    names = [f"transformer_blocks.{i}.attn.{end}" for i in range(4) for end in ("to_q", "to_k", "to_v", "to_out.0")]
    tensors = {f"{name}.lora_A.weight": np.ones((2, 128), np.float32) for name in names}
    tensors |= {f"{name}.lora_B.weight": np.ones((128, 2), np.float32) for name in names}
    save_file(tensors, folder / "pytorch_lora_weights.safetensors")
    source = f"policy.init_from={folder}"
    assert "does not state its alpha" in refused(recipe, store, source)
    assert "a folder is named with a slash: ./adapter" in with_cwd(
        monkeypatch, tmp_path, lambda: refused(recipe, store, "policy.init_from=adapter")
    )
    plan = freeze(plan_with(recipe, store, source, "policy.init_alpha=8"), store)
    assert init_of(plan).source == init_of(plan).path == str(folder)
    save_file({name: 2 * tensor for name, tensor in tensors.items()}, folder / "pytorch_lora_weights.safetensors")
    with pytest.raises(ConfigError, match=r"(?s)planned otherwise.*init\.digest"):
        freeze(plan_with(recipe, store, source, "policy.init_alpha=8"), store)
    assert "its alpha is 4" in refused(recipe, store, source, "policy.init_alpha=4")


def with_cwd(monkeypatch: pytest.MonkeyPatch, folder: Path, work):
    with monkeypatch.context() as patched:
        patched.chdir(folder)
        return work()


def test_a_renewed_reference_cannot_be_the_base_below_which_an_adapter_lies(recipe, store: str):
    def renewing(*replacements) -> str:
        return recipe(
            ('type = "nft"', 'type = "grpo"\nupdate_ref_every_iter = 1\nkl_beta = 0.1\ntrain_on = [0]'),
            ("timesteps_fraction = 1.0\n", ""),
            *replacements,
        )

    overrides = (SOURCE, "policy.init_mode=stack", "policy.diffusers.sample.solver=flow_sde")
    assert "set policy.reference = 'init'" in refused(renewing, store, *overrides)
    plan = plan_with(renewing, store, *overrides, "policy.reference=init")
    assert not requests.policy(Run(plan, store)).config.identity().get("keeps_base", False)
    onward = plan_with(renewing, store, SOURCE, overrides[-1])
    # The reference begins as the base, which `current` is not.
    assert requests.policy(Run(onward, store)).config.identity()["keeps_base"] is True
