"""Re-scores: stored samples under other rewards, without a change of their run."""

import json
from pathlib import Path
from typing import Any, cast

import pytest

from cosmos_rl_core.canonical import from_json
from cosmos_rl_core.errors import ConfigError
from cosmos_rl_core.storage import store
from flows.auditing.audit import audit
from flows.planning import requests
from flows.planning.run import Run
from flows.rescoring.plan import Wanted, cost_of
from flows.rescoring.rescore import Rescore
from stages.artifacts.slots import current_of, drop
from stages.contracts import MEDIA, TENSORS
from tests.flows.by_hand import SFT, SMALL_SFT, make_all, recipe_in
from tests.flows.cli.test_json import keys_on_page
from tests.flows.forking.forked import begun
from tests.flows.rescoring.stored import FAILING, rewards_file, run_on_latents, stored_run, wanted
from tests.hand_made import planned

OTHER = f'[[rewards]]\nfn = {{ name = "jpeg", quality = 30 }}\n{FAILING}\n'
WEIGHTED = f'[[rewards]]\nweight = -2.0\nfn = {{ name = "jpeg" }}\n{FAILING}\n'


def files(run: Run) -> dict[str, bytes]:
    """Every file of a run but its re-scores."""
    names = (name for name in store.listed(run.url) if not name.startswith("rescore/"))
    return {name: store.read(store.join(run.url, name)) for name in names}


def manifests(run: Run) -> set[str]:
    """Slots of the re-scores of a run that have an artifact."""
    names = (name for name in store.listed(run.url) if name.startswith("rescore/"))
    return {name.split("/", 2)[2].rpartition("/")[0] for name in names if name.endswith("/manifest.1.json")}


def test_stored_samples_are_scored_by_another_reward_and_the_run_stays_as_it_is(recipe: Any, tmp_path: Path) -> None:
    run, hand = stored_run(recipe, tmp_path)
    before, plan = files(run), wanted(run, rewards_file(tmp_path, OTHER), evaluations=True)
    cost = cost_of(plan)
    assert (cost.iterations, cost.policy_versions, cost.decoded) == ([0, 1], [0, 2], 0)
    assert cost.scored == {"jpeg": cost.samples} == {"jpeg": 2 * 8 + 2 * 16}
    assert store.listed(run.url).keys() == before.keys()

    report = hand.rescore(plan)
    assert files(run) == before
    slots = {"iterations/0000/reward-jpeg", "iterations/0001/reward-jpeg"}
    assert manifests(run) == slots | {"exports/0000/evaluate-jpeg", "exports/0002/evaluate-jpeg"}
    assert cost_of(plan).scored == {"jpeg": 0}
    numbers = from_json(store.read(store.join(plan.rescore.url, "agreement.json")))
    assert numbers == json.loads(json.dumps(report.as_json()))
    assert (numbers["old_rewards"], numbers["new_rewards"]) == ({"jpeg": 1.0}, {"jpeg": 1.0})
    rollouts = numbers["rollouts"]
    assert (rollouts["samples"], rollouts["failed_old"], rollouts["failed_new"]) == (16, 1, 1)
    assert rollouts["rank_correlation"] > 0.5
    page = store.read(report.page).decode()
    assert "<svg" in page
    assert "data:image/webp" in page or not rollouts["apart"]


def test_the_reward_of_the_run_is_not_scored_again_and_agrees_with_itself(recipe: Any, tmp_path: Path) -> None:
    run, hand = stored_run(recipe, tmp_path)
    plan = wanted(run, "jpeg", evaluations=True)
    assert cost_of(plan).scored == {"jpeg": 0}
    report = hand.rescore(plan)
    # Some CPUs round the mean of ones.
    assert [part.rank_correlation for part in report.parts] == pytest.approx([1.0, 1.0], rel=1e-15)
    assert [part.apart for part in report.parts] == [[], []]
    assert manifests(run) == set()


def test_negative_weights_cost_no_scoring_and_reverse_every_ranking(recipe: Any, tmp_path: Path) -> None:
    run, hand = stored_run(recipe, tmp_path)
    plan = wanted(run, rewards_file(tmp_path, WEIGHTED), "1")
    assert cost_of(plan).scored == {"jpeg": 0}
    (part,) = hand.rescore(plan).parts
    assert part.ks == [1]
    assert part.rank_correlation == pytest.approx(-1.0)
    assert {(one.old_rank, one.new_rank) for one in part.apart[:2]} <= {(1.0, 4.0), (4.0, 1.0)}


def test_a_later_command_scores_new_samples_in_the_same_folder(recipe: Any, tmp_path: Path) -> None:
    run, hand = stored_run(recipe, tmp_path)
    file = rewards_file(tmp_path, OTHER)
    first = wanted(run, file, "0")
    hand.rescore(first)
    every = wanted(run, file)
    assert every.rescore.url == first.rescore.url
    assert cost_of(every).scored == {"jpeg": 8}
    assert hand.rescore(every).parts[0].ks == [0, 1]
    # The report of a shorter command still says all.
    assert hand.rescore(first).parts[0].ks == [0, 1]


def test_pictures_that_a_rollout_did_not_decode_are_decoded_first(recipe: Any, tmp_path: Path) -> None:
    run, hand = run_on_latents(recipe, tmp_path, undecoded=3)
    plan = wanted(run, "jpeg", "0")
    cost = cost_of(plan)
    assert (cost.decoded, cost.scored) == (3, {"jpeg": 8})
    before = files(run)
    (part,) = hand.rescore(plan).parts
    assert manifests(run) == {"iterations/0000/decode", "iterations/0000/reward-jpeg"}
    assert files(run) == before
    assert (part.failed_old, part.failed_new, part.groups) == (1, 1, 2)
    assert cost_of(plan).decoded == cost_of(plan).scored["jpeg"] == 0


def test_pictures_that_somebody_decoded_are_not_decoded_again(recipe: Any, tmp_path: Path) -> None:
    run, hand = run_on_latents(recipe, tmp_path, undecoded=3)
    hand.launch("decode", requests.decode(run, 1))
    plan = wanted(run, "jpeg", "1")
    assert cost_of(plan).decoded == 0
    hand.rescore(plan)
    assert manifests(run) == {"iterations/0001/reward-jpeg"}


def test_a_reward_on_latents_needs_no_pictures(recipe: Any, tmp_path: Path) -> None:
    run, hand = run_on_latents(recipe, tmp_path, undecoded=3)
    for k in range(2):
        drop(run.slots.iteration(k, "rollout"), MEDIA)
    both = f'[[rewards]]\nfn = {{ name = "mean_latent" }}\n{FAILING}\nmax_attempts = 1\n'
    plan = wanted(run, rewards_file(tmp_path, both))
    assert (cost_of(plan).decoded, cost_of(plan).scored) == (0, {"mean_latent": 16})
    assert [part.rank_correlation for part in hand.rescore(plan).parts] == [1.0]
    drop(run.slots.iteration(1, "rollout"), TENSORS)
    with pytest.raises(ConfigError, match="8 samples of iterations 1 cannot be scored"):
        wanted(run, rewards_file(tmp_path, both.replace("attempts = 1", "attempts = 2")))


def test_scores_stay_when_their_pictures_are_deleted_later(recipe: Any, tmp_path: Path) -> None:
    run, hand = stored_run(recipe, tmp_path)
    file = rewards_file(tmp_path, OTHER)
    plan = wanted(run, file, "0")
    hand.rescore(plan)
    made = current_of(f"{plan.rescore.url}/iterations/0000/reward-jpeg")[1]
    drop(run.slots.iteration(0, "rollout"), MEDIA)
    cost = cost_of(wanted(run, file))
    assert (cost.decoded, cost.scored) == (0, {"jpeg": 8})
    hand.rescore(wanted(run, file))
    assert current_of(f"{plan.rescore.url}/iterations/0000/reward-jpeg")[1] == made


def test_deleted_pictures_are_decoded_again_from_their_latents(recipe: Any, tmp_path: Path) -> None:
    run, hand = stored_run(recipe, tmp_path)
    file = rewards_file(tmp_path, OTHER)
    other = rewards_file(tmp_path, OTHER.replace("30", "20"), "other")
    (expected,) = hand.rescore(wanted(run, file)).parts
    drop(run.slots.iteration(0, "rollout"), MEDIA)
    plan = wanted(run, other)
    assert cost_of(plan).decoded == 7
    hand.rescore(plan)
    assert "iterations/0000/decode-all" in manifests(run)
    store.remove(store.join(wanted(run, file).rescore.url, "iterations/0000/reward-jpeg/manifest.1.json"))
    (again,) = hand.rescore(wanted(run, file)).parts
    assert again.rank_correlation == expected.rank_correlation
    assert again.apart == expected.apart


def test_samples_with_nothing_left_to_score_are_refused_with_their_number(recipe: Any, tmp_path: Path) -> None:
    run, _ = stored_run(recipe, tmp_path)
    drop(run.slots.iteration(0, "rollout"), MEDIA, TENSORS)
    with pytest.raises(
        ConfigError, match=r"7 samples of iterations 0 cannot be scored.*--iterations 1 leaves them out"
    ):
        wanted(run, rewards_file(tmp_path, OTHER))
    assert cost_of(wanted(run, rewards_file(tmp_path, OTHER), "1")).scored == {"jpeg": 8}
    assert cost_of(wanted(run, "jpeg")).scored == {"jpeg": 0}


@pytest.mark.parametrize(
    ("reward", "iterations", "told"),
    [
        ("jpg", None, "jpeg"),
        ("jpeg", "3", "has no rollout of 3; it has 0 to 1"),
        ("jpeg", "1-0", "found '1-0', expected numbers"),
        ("none.toml", None, "no file at none.toml"),
        ("geneval", None, "re-score of hand"),
    ],
)
def test_mistakes_in_a_re_score_are_named(
    recipe: Any, tmp_path: Path, reward: str, iterations: str | None, told: str
) -> None:
    run, _ = stored_run(recipe, tmp_path)
    with pytest.raises(ConfigError) as error:
        wanted(run, reward, iterations)
    assert told in str(error.value)


def test_rewards_that_are_all_monitors_or_have_one_name_twice_are_refused(recipe: Any, tmp_path: Path) -> None:
    run, _ = stored_run(recipe, tmp_path)
    with pytest.raises(ConfigError, match="no reward with role = 'train'"):
        wanted(run, rewards_file(tmp_path, '[[rewards]]\nrole = "monitor"\nfn = { name = "jpeg" }\n'))
    with pytest.raises(ConfigError, match="jpeg more than once"):
        wanted(run, rewards_file(tmp_path, OTHER + WEIGHTED))


def test_a_run_without_rollouts_says_what_it_has(tmp_path: Path) -> None:
    run = planned(SFT, tmp_path, run_id="sft", overrides=SMALL_SFT)
    make_all(run)
    for iterations in (None, "0"):
        with pytest.raises(ConfigError, match="trains on data and has no rollouts; --evaluations"):
            wanted(run, "jpeg", iterations)


def test_a_run_that_has_made_nothing_yet_has_nothing_to_score(recipe: Any, tmp_path: Path) -> None:
    run = planned(recipe(), tmp_path, run_id="hand")
    with pytest.raises(ConfigError, match="has no rollout yet"):
        wanted(run, "jpeg")
    with pytest.raises(ConfigError, match="has no evaluations yet"):
        wanted(run, "jpeg", evaluations=True)


def test_the_command_says_the_cost_beforehand_in_words_and_as_json(recipe: Any, tmp_path: Path, main: Any) -> None:
    run, _ = stored_run(recipe, tmp_path)
    drop(run.slots.iteration(1, "rollout"), MEDIA)
    words = ("rescore", "hand", "--store", run.store_url, "--reward", rewards_file(tmp_path, OTHER), "--dry-run")
    before = files(run)
    code, said, _ = main(*words)
    lines = [line.split(maxsplit=1) for line in said.splitlines()]
    assert code == 0
    assert lines[1:] == [
        ["of", "iterations 0 to 1: 16 samples"],
        ["generates", "nothing"],
        ["decodes", "8 samples"],
        ["scores", "16 samples by jpeg"],
    ]
    code, said, _ = main(*words, "--json")
    assert (code, sorted(json.loads(said))) == (0, sorted(keys_on_page("rescore")))
    assert files(run) == before
    assert not any(name.startswith("rescore/") for name in store.listed(run.url))


def test_a_re_score_on_s3_equals_the_same_run_in_a_folder(recipe: Any, tmp_path: Path, s3_url: str) -> None:
    found: list[Any] = []
    for url in ("", f"{s3_url}/rescored"):
        folder = tmp_path / f"at-{len(found)}"
        folder.mkdir()
        run, hand = stored_run(recipe_in(folder), folder, url)
        drop(run.slots.iteration(0, "rollout"), MEDIA)
        plan = wanted(run, rewards_file(folder, OTHER))
        numbers = hand.rescore(plan).as_json()
        assert store.size(store.join(plan.rescore.url, "index.html"))
        assert not [one for one in audit(run.store_url, "hand").faults if "/rescore/" in one.file]
        found.append({name: value for name, value in numbers.items() if name not in ("rescore", "page")})
    assert found[0] == found[1]


def test_a_fork_is_scored_on_the_samples_that_it_refers_to(recipe: Any, tmp_path: Path) -> None:
    origin, hand = stored_run(recipe, tmp_path)
    fork = begun(origin, 1, run_id="fork")
    before = files(origin)
    plan = wanted(cast("Run", fork), rewards_file(tmp_path, OTHER))
    assert plan.rescore.run.plan.run_id == "fork"
    assert cost_of(plan).iterations == [0, 1]
    (part,) = hand.rescore(plan).parts
    assert (part.ks, part.samples) == ([0, 1], 16)
    assert manifests(plan.rescore.run) == {"iterations/0000/reward-jpeg", "iterations/0001/reward-jpeg"}
    assert files(origin) == before
    assert not [one for one in audit(fork.store_url, "fork").faults if "/rescore/" in one.file]


def test_scores_of_a_service_are_made_again_because_another_judge_may_answer(recipe: Any, tmp_path: Path) -> None:
    run, hand = stored_run(recipe, tmp_path)
    plan = wanted(run, "jpeg", "1")
    served = plan.rescore.record.model_copy(update={"served": ("jpeg",)})
    again = Wanted(Rescore(run, served), plan.stocks)
    assert (cost_of(plan).scored, cost_of(again).scored) == ({"jpeg": 0}, {"jpeg": 8})
    assert [part.rank_correlation for part in hand.rescore(again).parts] == [1.0]
    assert manifests(run) == {"iterations/0001/reward-jpeg"}
