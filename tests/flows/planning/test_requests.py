import pytest

from cosmos_rl_core.errors import ArtifactError
from cosmos_rl_core.rewards import remote
from flows.planning import requests
from flows.running.display import Display
from flows.running.wave import Waves
from stages.artifacts.artifact import Artifact
from stages.artifacts.slots import current_manifest, current_of, input_of, why_stale
from tests.hand_made import make, make_iteration, make_run, planned, rewards, rollout_files


@pytest.mark.parametrize("num_words", [4, 6])
def test_each_epoch_uses_every_prompt_once(recipe, words, tmp_path, num_words):
    words(*(f'a sign that says "{letter}"' for letter in "ABCDEF"[:num_words]))
    run = planned(recipe(), tmp_path)
    every = sorted(prompt.id for prompt in run.plan.prompts)
    per_epoch = num_words // 2
    epochs = [
        [prompt.id for k in range(per_epoch) for prompt in run.plan.prompts_of(epoch * per_epoch + k)]
        for epoch in range(4)
    ]
    assert [sorted(epoch) for epoch in epochs] == [every] * 4
    assert len({tuple(epoch) for epoch in epochs}) > 1


def test_an_epoch_of_whole_iterations_leaves_the_rest_to_later_ones(recipe, words, tmp_path):
    words(*(f'a sign that says "{letter}"' for letter in "ABCDE"))
    run = planned(recipe(), tmp_path)
    epochs = [[prompt.id for k in (0, 1) for prompt in run.plan.prompts_of(2 * epoch + k)] for epoch in range(8)]
    assert all(len(set(epoch)) == 4 for epoch in epochs)
    assert len({prompt for epoch in epochs for prompt in epoch}) == 5


def test_the_prompts_of_an_iteration_depend_on_the_seed_alone(recipe, tmp_path):
    one = planned(recipe(), tmp_path, run_id="one")
    longer = planned(recipe(), tmp_path, run_id="longer", iterations=50)
    other = planned(recipe(), tmp_path, run_id="other", overrides=("train.seed=1",))
    assert [one.plan.prompts_of(k) for k in range(20)] == [longer.plan.prompts_of(k) for k in range(20)]
    assert [one.plan.prompts_of(k) for k in range(20)] != [other.plan.prompts_of(k) for k in range(20)]


def test_learning_rates_are_resolved_to_each_iterations_steps(recipe, tmp_path):
    run = make_run(recipe(), tmp_path, iterations=4)
    make(requests.rollout(run, 4), rollout_files(4))
    make(rewards(run, run.slots.iteration(4, "rollout"), 4)[0], {"scores": b"s"})
    steps = [requests.update(run, k).config.model_dump()["steps"] for k in range(5)]
    # Three steps of warm-up from 0, one at the peak, five down to 0; two an iteration.
    expected = [(0, 5e-4), (1e-3, 1e-3), (8e-4, 6e-4), (4e-4, 2e-4), (0, 0)]
    assert [step["lrs"] for step in steps] == [pytest.approx(lrs, abs=1e-12) for lrs in expected]
    assert [step["first_step"] for step in steps] == [0, 2, 4, 6, 8]
    assert [step["ema_decays"] for step in steps] == [(None, None)] * 5


def test_the_average_decays_by_steps_not_by_iterations(recipe, tmp_path):
    run = make_run(recipe(("optm_lr = 1e-3", "optm_lr = 1e-3\nema_enable = true\nema_decay = 0.25")), tmp_path)
    steps = [requests.update(run, k).config.model_dump()["steps"]["ema_decays"] for k in (0, 1)]
    assert steps == [pytest.approx((1 / 10, 2 / 11)), pytest.approx((3 / 12, 1 / 4))]


def test_more_iterations_leave_every_artifact_current(recipe, tmp_path):
    make_run(recipe(), tmp_path)
    longer = planned(recipe(), tmp_path, run_id="hand", iterations=9)
    for request in (
        requests.policy(longer),
        longer.prepared.embed,
        requests.rollout(longer, 1),
        requests.update(longer, 0),
        requests.update(longer, 1),
    ):
        _, manifest = current_of(request.slot)
        assert manifest is not None
        assert why_stale(manifest, request) is None


def test_the_first_rollout_reads_the_one_copy_that_version_0_has(recipe, tmp_path):
    run = make_run(recipe(), tmp_path, iterations=1)
    assert requests.rollout(run, 0).one("policy").part == "current"
    assert requests.rollout(run, 1).one("policy").part == "old"
    assert requests.rollout(run, 1).one("policy").url == run.slots.iteration(0, "update")


def test_embeddings_are_shared_by_runs_that_ask_for_the_same(recipe, tmp_path):
    one = planned(recipe(), tmp_path, run_id="one")
    other_seed = planned(recipe(), tmp_path, run_id="two", overrides=("train.seed=1", "train.optm_lr=1"))
    shorter = planned(recipe(), tmp_path, run_id="three", overrides=("policy.diffusers.max_prompt_length=5",))
    assert one.prepared.embed.slot == other_seed.prepared.embed.slot
    assert one.prepared.embed.slot.startswith(str(tmp_path / "store" / "dataset"))
    assert one.prepared.embed.slot != shorter.prepared.embed.slot


def test_only_the_newest_policies_keep_the_state_that_training_goes_on_from(recipe, tmp_path):
    path = recipe(("[rollout]", "[train.ckpt]\nmax_keep = 2\n[rollout]"))
    run = make_run(path, tmp_path, iterations=3)
    for k in range(1, 4):
        run.drop_old_state(k)
    parts = ("current", "ema", "old", "optimizer", "reference")
    policies = {k: Artifact(input_of(run.slots.policy(k))) for k in range(4)}
    gone = {k: [part for part in parts if policy.lacks(part)] for k, policy in policies.items()}
    assert gone == {0: [], 1: ["old"], 2: [], 3: []}
    assert Artifact(input_of(run.slots.policy(1))).read("current/w") == b"0"
    assert all(current_manifest(requests.update(run, k)) for k in range(3))


def test_only_the_newest_rollouts_keep_their_tensors_and_their_media(recipe, tmp_path):
    run = make_run(recipe(("[rollout]", "[rollout]\nkeep = { tensors = 1, media = 2 }")), tmp_path, iterations=4)
    for k in range(1, 5):
        run.drop_old_state(k)
    rollouts = [Artifact(input_of(run.slots.iteration(k, "rollout"))) for k in range(4)]
    kept = [[part for part in ("media", "tensors", "index") if not rollout.lacks(part)] for rollout in rollouts]
    assert kept == [["index"], ["index"], ["media", "index"], ["media", "tensors", "index"]]
    assert rollouts[0].read("index/00000.json") == rollout_files(0)["index/00000.json"]
    with pytest.raises(ArtifactError, match=r"tensors/00000\.tar .* was deleted, .* \(rollout\.keep\.tensors\)"):
        rollouts[2].read("tensors/00000.tar")
    assert all(
        current_manifest(request) for k in range(4) for request in (requests.rollout(run, k), requests.update(run, k))
    )


def test_an_update_reads_no_media_and_a_reward_reads_the_part_that_it_declares(recipe, tmp_path):
    run = make_run(recipe(), tmp_path, iterations=1)
    (reward,) = rewards(run, run.slots.iteration(0, "rollout"), 0)
    assert reward.one("samples").parts == ("index", "media")
    (rollout,) = requests.update(run, 0).inputs["rollouts"]
    assert rollout.parts == ("index", "tensors")
    video, service = run.going_to(1), remote.Options(reward_fn="dance_grpo")
    assert (service.reads(1), service.reads(93)) == ("media", "latents")
    assert remote.Options(reward_fn="dance_grpo", media="pixels").reads(93) == "media"
    assert video.plan.recipe.rewards[0].fn.reads(93) == "media"


def test_metadata_of_prompts_is_in_rollouts_and_changes_no_embedding(recipe, tmp_path):
    (tmp_path / "prompts.jsonl").write_text(
        '{"prompt": "\\"K7\\"", "tag": "counting", "count": 2}\n{"prompt": "\\"AB\\""}\n'
    )
    dataset = f'name = "prompts"\npath = "{tmp_path}/prompts.jsonl"'
    run = planned(recipe((f'name = "ocr"\nlocal_dir = "{tmp_path}/words"', dataset)), tmp_path)
    assert {p.text: p.metadata for p in run.plan.prompts} == {'"K7"': {"tag": "counting", "count": 2}, '"AB"': {}}
    assert [prompt["metadata"] for prompt in run.prepared.embed.config.model_dump()["prompts"]] == [{}, {}]


def test_every_stage_runs_on_the_gpus_that_it_was_given(recipe, words, tmp_path):
    words('say "K7"', 'say "AB"')
    gpus = {"embed": [0], "rollout": [1], "update": [2, 3], "evaluate": [4]}
    overrides = tuple(f"launch.stage_gpus.{stage}={some}" for stage, some in gpus.items())
    held_out = '[validation]\ndataset = { name = "rendered_text", split = "test" }\n[rollout]'
    run = planned(recipe(("[rollout]", held_out)), tmp_path, run_id="gpus", overrides=overrides)
    make(requests.policy(run), {"current/w": b"start"})
    make(run.prepared.embed, {"embeddings": b"e"})
    make_iteration(run, 0)
    make(requests.export(run, 0), {"lora": b"l"})
    launcher = Waves(run.url, run.recipe.launch, Display())
    asked = (run.prepared.embed, requests.rollout(run, 0), requests.update(run, 0), requests.evaluate(run, 0))
    found = {request.stage: list(launcher.execution_of(request).gpus) for request in asked}
    assert found == gpus
