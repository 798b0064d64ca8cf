import io
import json
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from cosmos_rl_core import store
from cosmos_rl_core.errors import ArtifactError, ConfigError
from flows import cli
from flows.plan import Settings, differences, freeze, plan_of, read_plan, run_url
from flows.requests import Run
from flows.rerun import rerun
from flows.status import table
from stages.artifacts import Attempt, standing, why_stale

RECIPE = """
[policy]
model_name_or_path = "package:tiny-sd3"
lora = { r = 2 }

[train]
num_iterations = 2
train_batch_per_replica = 8
optm_lr = 1e-3
optm_warmup_steps = 3
optm_decay_type = "linear"
max_num_steps = 8

[train.train_policy]
type = "nft"
batch_size_per_optimize = 4
timesteps_fraction = 1.0

[train.train_policy.dataset]
name = "ocr"
local_dir = "WORDS"

[rollout]
n_generation = 4

[[rewards]]
fn = { name = "ocr", line_width = 96 }
"""
"""Two prompts of four samples an iteration, in two optimizer steps."""


@pytest.fixture
def words(tmp_path: Path):
    """A prompt directory; called with lines, it is rewritten."""
    folder = tmp_path / "words"
    folder.mkdir()

    def write(*lines: str) -> str:
        (folder / "train.txt").write_text("\n".join(lines), encoding="utf-8")
        return str(folder)

    write(*(f'a sign that says "{word}"' for word in ("AC", "K7", "HP", "XY")))
    return write


@pytest.fixture
def recipe(tmp_path: Path, words):
    """Path of a recipe; called with replacements, it is rewritten."""
    path = tmp_path / "tiny.toml"

    def write(*replacements: tuple[str, str]) -> str:
        text = RECIPE.replace("WORDS", str(tmp_path / "words"))
        for old, new in replacements:
            assert text.count(old) == 1, old
            text = text.replace(old, new)
        path.write_text(text, encoding="utf-8")
        return str(path)

    write()
    return write


def mistakes_of(path: str, **settings) -> str:
    with pytest.raises(ConfigError) as caught:
        plan_of(Settings(path, **settings))
    return str(caught.value)


def planned(path: str, tmp_path: Path, **settings) -> Run:
    """A frozen run in an own store."""
    url = str(tmp_path / "store")
    return Run(freeze(plan_of(Settings(path, url, **settings)), url), url)


def make(request, files, seconds=1.0, **summary):
    """Make a Request's artifact from given bytes."""
    generation, attempt_id, already = Attempt.begin(request, print)
    assert already is None
    attempt = Attempt(request, {}, generation, attempt_id)
    for name, data in files.items():
        attempt.put(name, data)
    return attempt.commit(attempt.files, {"seconds": seconds, **summary}, print)


def make_iteration(run: Run, k: int, scores: bytes = b"scores") -> None:
    """Rollout, reward and update of one iteration."""
    make(run.rollout(k), {"samples": b"rollout %d" % k}, seconds=10.0)
    (reward,) = run.rewards(run.iteration(k, "rollout"), k)
    make(reward, {"scores": scores}, seconds=2.0, ocr=0.25 * (k + 1))
    make(run.update(k), {"current/w": b"%d" % k, "old/w": b"old %d" % k}, seconds=30.0)


def make_run(path: str, tmp_path: Path, iterations: int = 2) -> Run:
    """A run made by hand: policy, embeddings and iterations."""
    run = planned(path, tmp_path, run_id="hand")
    make(run.policy(), {"current/w": b"start"})
    make(run.embed(), {"embeddings": b"e"})
    for k in range(iterations):
        make_iteration(run, k)
    return run


def test_every_mistake_is_in_one_message(recipe, words):
    words('a sign that says "K7"', "a sign that says K7", "a cat")
    message = mistakes_of(
        recipe(
            ('"package:tiny-sd3"', '"/no/such/base"'),
            ("lora = { r = 2 }", "lora = { rr = 2 }"),
            ("num_iterations = 2", 'num_iterations = "two"'),
            ("optm_warmup_steps", "optm_warmup_step"),
            ("n_generation = 4", "n_generation = 1"),
            ('"nft"', '"nft"\nnft_betta = 1.0'),
            (
                "[[rewards]]",
                '[[rewards]]\nfn = { name = "pikscore" }\n[validation]\ndataset = { name = "oc" }\n[[rewards]]',
            ),
        )
    )
    lines = message.splitlines()
    assert lines[0].endswith("tiny.toml:")
    for expected in (
        "policy.lora.rr: unknown key; did you mean 'r'?",
        "train.num_iterations: Input should be a valid integer (found 'two')",
        "train.optm_warmup_step: unknown key; did you mean 'optm_warmup_steps'?",
        "train.train_policy.nft_betta: unknown key; did you mean 'nft_beta'?",
        "rollout.n_generation: Input should be greater than or equal to 2 (found 1)",
        "rewards.0.fn: unknown reward 'pikscore'; known: jpeg, ocr",
        "validation.dataset: unknown dataset 'oc'; known: ocr, rendered_text",
        "'/no/such/base' is not a directory here",
        "ocr cannot score 2 prompts: ",
    ):
        assert len([line for line in lines if line.startswith(f"  {expected}")]) == 1, (expected, message)
    assert len(lines) == 10


def test_combinations_that_cannot_work_are_reported_together(recipe, words):
    words("no quotes")
    message = mistakes_of(
        recipe(
            ('"package:tiny-sd3"', '"/no/such/base"'),
            ("train_batch_per_replica = 8", "train_batch_per_replica = 10"),
            ("lora = { r = 2 }", "from_scratch = true\nlora = { r = 2 }"),
            ("fn = {", 'role = "monitor"\nfn = {'),
        )
    )
    for expected in (
        "train.train_batch_per_replica = 10 is not a multiple of rollout.n_generation = 4",
        "train.train_batch_per_replica = 10 is not a multiple of train.train_policy.batch_size_per_optimize = 4",
        "nft needs at least one [[rewards]] with role = 'train'",
        "policy.from_scratch draws all weights anew; leave [policy.lora] out",
        "'/no/such/base' is not a directory here",
        "needs the text to render between double quotes",
    ):
        assert message.count(expected) == 1, (expected, message)


def test_a_valid_recipe_is_checked_against_the_world_at_once(recipe, words):
    words("no quotes")
    message = mistakes_of(recipe(('"package:tiny-sd3"', '"package:tiny"')))
    assert "no pipeline 'tiny' ships with this project; known: tiny-sd3" in message
    assert "ocr cannot score 1 prompts: prompt p-" in message
    assert "one iteration needs 2 prompts, the dataset has 1" in message


@pytest.mark.parametrize(
    ("replacement", "expected"),
    [
        (("[train]", "[training]\n[train]"), "training: unknown key; did you mean 'train'?"),
        (("[rollout]", "[rollout]\nn_generaton = 3"), "rollout.n_generaton: unknown key; did you mean 'n_generation'?"),
        (("line_width = 96", "line_widht = 96"), "rewards.0.fn.line_widht: unknown key; did you mean 'line_width'?"),
        (("line_width = 96", "line_width = 9"), "rewards.0.fn.line_width: Input should be greater than or equal to 48"),
        (('"nft"', '"nfft"'), "train.train_policy: unknown algorithm 'nfft'; known: "),
        (('name = "ocr"\n', 'name = "nothing"\n'), "train.train_policy.dataset: unknown dataset 'nothing'; known: ocr"),
        (('type = "nft"\n', ""), "train.train_policy: needs `type`; known: "),
        (("optm_lr = 1e-3", "optm_lr = nan"), "train.optm_lr: "),
        (("num_iterations = 2", "num_iterations = 2.5"), "train.num_iterations: Input should be a valid integer"),
        (("num_iterations = 2", "num_iterations = true"), "train.num_iterations: Input should be a valid integer"),
        (("num_iterations = 2\n", ""), "train.num_iterations: Field required"),
        (("max_num_steps = 8\n", ""), "train: optm_decay_type = 'linear' needs max_num_steps"),
        (("[rollout]", "[rollout"), "is not TOML: "),
    ],
)
def test_a_mistake_is_named_where_it_is(recipe, replacement, expected):
    assert expected in mistakes_of(recipe(replacement))


def test_a_recipe_that_is_not_there_is_said_to_be_missing(tmp_path):
    assert mistakes_of(str(tmp_path / "nope.toml")).startswith("no file at ")


def test_validation_prompts_that_are_trained_on_are_refused(recipe, words, tmp_path):
    (tmp_path / "words" / "test.txt").write_text('a sign that says "K7"\na sign that says "ZZ"', encoding="utf-8")
    held_out = f'[validation]\ndataset = {{ name = "ocr", split = "test", local_dir = "{tmp_path}/words" }}\n[rollout]'
    assert "1 validation prompts are also trained on" in mistakes_of(recipe(("[rollout]", held_out)))


def test_overrides_are_read_as_toml_and_checked_as_the_file_is(recipe):
    plan = plan_of(
        Settings(recipe(), overrides=("train.optm_lr=2e-4", "policy.lora.r=3", "train.train_policy.type=nft"))
    )
    assert plan.recipe.train.optm_lr == 2e-4
    assert plan.recipe.policy.lora is not None
    assert plan.recipe.policy.lora.r == 3
    assert "train.optm_lrr: unknown key; did you mean 'optm_lr'?" in mistakes_of(
        recipe(), overrides=("train.optm_lrr=1",)
    )
    assert mistakes_of(recipe(), overrides=("train.optm_lr",)).startswith("cannot read override 'train.optm_lr'")


@pytest.mark.parametrize("command", ["plan", "run"])
def test_the_command_line_exits_with_64_and_writes_nothing(recipe, tmp_path, command):
    place = tmp_path / "store"
    place.mkdir()
    path = recipe(("n_generation = 4", "n_generation = 1"), ('"package:tiny-sd3"', '"/no/such/base"'))
    ended = CliRunner().invoke(cli.app, [command, path, "--store", str(place)])
    assert ended.exit_code == 64
    assert "rollout.n_generation: Input should be greater than or equal to 2 (found 1)" in ended.stderr
    assert "'/no/such/base' is not a directory here" in ended.stderr
    assert ended.stdout == ""
    assert list(place.iterdir()) == []


def test_planning_says_what_would_run_and_writes_nothing(recipe, tmp_path):
    place = tmp_path / "store"
    place.mkdir()
    ended = CliRunner().invoke(cli.app, ["plan", recipe(), "--store", str(place), "--run-id", "mine"])
    assert ended.exit_code == 0, ended.stderr
    assert "iteration  2 prompts x 4 samples, 10 euler steps, guidance 1" in ended.stdout
    assert "prompts    4 to train on, 0 held out" in ended.stdout
    assert list(place.iterdir()) == []


def test_a_frozen_plan_refuses_a_changed_recipe_and_names_the_field(recipe, tmp_path):
    planned(recipe(), tmp_path, run_id="mine")
    data = store.read(store.join(run_url(str(tmp_path / "store"), "mine"), "plan.json"))
    with pytest.raises(ConfigError) as caught:
        planned(
            recipe(("optm_lr = 1e-3", "optm_lr = 2e-3"), ("n_generation = 4", "n_generation = 2")),
            tmp_path,
            run_id="mine",
        )
    assert str(caught.value).splitlines() == [
        "run mine was planned otherwise:",
        "  recipe.rollout.n_generation: 4 -> 2",
        "  recipe.train.optm_lr: 0.001 -> 0.002",
        "use the recipe it was planned with, or another --run-id",
    ]
    assert store.read(store.join(run_url(str(tmp_path / "store"), "mine"), "plan.json")) == data


def test_a_frozen_plan_refuses_other_prompts(recipe, words, tmp_path):
    planned(recipe(), tmp_path, run_id="mine")
    words('a sign that says "AC"', 'a sign that says "K7"')
    with pytest.raises(ConfigError, match=r"planned otherwise:\n  prompts: \["):
        planned(recipe(), tmp_path, run_id="mine")


def test_more_iterations_and_another_launch_go_on_with_the_same_run(recipe, tmp_path):
    planned(recipe(), tmp_path, run_id="mine")
    again = planned(recipe(), tmp_path, run_id="mine", iterations=9, overrides=("launch.threads=2",))
    assert again.recipe.train.num_iterations == 9
    assert again.recipe.launch.threads == 2
    assert read_plan(again.store_url, "mine").recipe.train.num_iterations == 2


def test_a_plan_survives_the_way_through_the_store(recipe, store_url):
    plan = plan_of(Settings(recipe(), run_id="mine"))
    frozen = freeze(plan, store_url)
    assert frozen == plan
    assert frozen.races_decided
    assert read_plan(store_url, "mine") == plan
    assert freeze(plan, store_url) == plan


def test_a_run_that_does_not_exist_is_a_config_error_and_a_broken_plan_a_data_error(tmp_path):
    with pytest.raises(ConfigError, match="there is no run 'mine'"):
        read_plan(str(tmp_path), "mine")
    store.write(store.join(run_url(str(tmp_path), "mine"), "plan.json"), b'{"format": 1}')
    with pytest.raises(ArtifactError, match="is not a plan of format 1"):
        read_plan(str(tmp_path), "mine")


def test_the_default_run_id_follows_the_recipe_not_how_far_or_where_it_runs(recipe):
    def name(*replacements, **settings):
        return plan_of(Settings(recipe(*replacements), **settings)).run_id

    first = name()
    assert first.startswith("tiny-")
    assert len(first) == len("tiny-") + 8
    assert name() == first
    assert name(iterations=7) == name(store="elsewhere") == name(overrides=("launch.processes=4",)) == first
    # A whole number where a float is meant is the same recipe.
    assert name(("optm_warmup_steps", "optm_weight_decay = 0\noptm_warmup_steps")) == name(
        ("optm_warmup_steps", "optm_weight_decay = 0.0\noptm_warmup_steps")
    )
    others = {first, name(overrides=("train.seed=1",)), name(("optm_lr = 1e-3", "optm_lr = 2e-3"))}
    assert len(others) == 3


def test_a_run_id_must_be_safe_as_a_folder_name(recipe):
    assert mistakes_of(recipe(), run_id="a/b") == "run id 'a/b' must be letters, digits, '-', '_' and '.'"


@pytest.mark.parametrize("num_words", [4, 6])
def test_each_epoch_uses_every_prompt_once(recipe, words, tmp_path, num_words):
    words(*(f'a sign that says "{letter}"' for letter in "ABCDEF"[:num_words]))
    run = planned(recipe(), tmp_path)
    every = sorted(prompt.id for prompt in run.plan.prompts)
    per_epoch = num_words // 2
    epochs = [
        [prompt.id for k in range(per_epoch) for prompt in run.prompts_of(epoch * per_epoch + k)] for epoch in range(4)
    ]
    assert [sorted(epoch) for epoch in epochs] == [every] * 4
    assert len({tuple(epoch) for epoch in epochs}) > 1


def test_an_epoch_of_whole_iterations_leaves_the_rest_to_later_ones(recipe, words, tmp_path):
    words(*(f'a sign that says "{letter}"' for letter in "ABCDE"))
    run = planned(recipe(), tmp_path)
    epochs = [[prompt.id for k in (0, 1) for prompt in run.prompts_of(2 * epoch + k)] for epoch in range(8)]
    assert all(len(set(epoch)) == 4 for epoch in epochs)
    assert len({prompt for epoch in epochs for prompt in epoch}) == 5


def test_the_prompts_of_an_iteration_depend_on_the_seed_alone(recipe, tmp_path):
    one = planned(recipe(), tmp_path, run_id="one")
    longer = planned(recipe(), tmp_path, run_id="longer", iterations=50)
    other = planned(recipe(), tmp_path, run_id="other", overrides=("train.seed=1",))
    assert [one.prompts_of(k) for k in range(20)] == [longer.prompts_of(k) for k in range(20)]
    assert [one.prompts_of(k) for k in range(20)] != [other.prompts_of(k) for k in range(20)]


def test_learning_rates_are_resolved_to_each_iterations_steps(recipe, tmp_path):
    run = make_run(recipe(), tmp_path, iterations=4)
    make(run.rollout(4), {"samples": b"rollout 4"})
    make(run.rewards(run.iteration(4, "rollout"), 4)[0], {"scores": b"s"})
    steps = [run.update(k).config.model_dump()["steps"] for k in range(5)]
    # Three steps of warm-up from 0, one at the peak, five down to 0; two an iteration.
    expected = [(0, 5e-4), (1e-3, 1e-3), (8e-4, 6e-4), (4e-4, 2e-4), (0, 0)]
    assert [step["lrs"] for step in steps] == [pytest.approx(lrs, abs=1e-12) for lrs in expected]
    assert [step["first_step"] for step in steps] == [0, 2, 4, 6, 8]
    assert [step["ema_decays"] for step in steps] == [(None, None)] * 5


def test_the_average_decays_by_steps_not_by_iterations(recipe, tmp_path):
    run = make_run(recipe(("optm_lr = 1e-3", "optm_lr = 1e-3\nema_enable = true\nema_decay = 0.25")), tmp_path)
    steps = [run.update(k).config.model_dump()["steps"]["ema_decays"] for k in (0, 1)]
    assert steps == [pytest.approx((1 / 10, 2 / 11)), pytest.approx((3 / 12, 1 / 4))]


def test_more_iterations_leave_every_artifact_standing(recipe, tmp_path):
    make_run(recipe(), tmp_path)
    longer = planned(recipe(), tmp_path, run_id="hand", iterations=9)
    for request in (longer.policy(), longer.embed(), longer.rollout(1), longer.update(0), longer.update(1)):
        _, manifest = standing(request.slot)
        assert manifest is not None
        assert why_stale(manifest, request) is None


def test_the_first_rollout_reads_the_one_copy_that_version_0_has(recipe, tmp_path):
    run = make_run(recipe(), tmp_path, iterations=1)
    assert run.rollout(0).one("policy").part == "current"
    assert run.rollout(1).one("policy").part == "old"
    assert run.rollout(1).one("policy").url == run.iteration(0, "update")


def test_embeddings_are_shared_by_runs_that_ask_for_the_same(recipe, tmp_path):
    one = planned(recipe(), tmp_path, run_id="one")
    other_seed = planned(recipe(), tmp_path, run_id="two", overrides=("train.seed=1", "train.optm_lr=1"))
    shorter = planned(recipe(), tmp_path, run_id="three", overrides=("policy.diffusers.max_prompt_length=5",))
    assert one.embed().slot == other_seed.embed().slot
    assert one.embed().slot.startswith(str(tmp_path / "store" / "dataset"))
    assert one.embed().slot != shorter.embed().slot


def test_rerun_says_what_it_costs_and_ends_one_generation(recipe, tmp_path):
    run = make_run(recipe(), tmp_path)
    slot = run.iteration(0, "reward-ocr")
    lines = rerun(run.store_url, "hand", 0, "reward-ocr")
    assert lines == [
        "stale if reward-ocr comes out differently: 4 artifacts, 72 s to make again",
        "  iteration-0000/update",
        "  iteration-0001/rollout",
        "  iteration-0001/reward-ocr",
        "  iteration-0001/update",
        f"invalidated generation 1 of {slot}; run the recipe again to make it",
    ]
    assert standing(slot) == (2, None)
    assert json.loads(store.read(store.join(slot, "invalidated.1.json")))["reason"].startswith("asked for by")
    assert store.size(store.join(slot, "manifest.1.json")) is not None
    with pytest.raises(ConfigError, match="reward-ocr of iteration 0 of hand has no artifact that stands; just run it"):
        rerun(run.store_url, "hand", 0, "reward-ocr")


def test_what_is_below_a_rerun_stands_or_falls_with_its_bytes(recipe, tmp_path):
    run = make_run(recipe(), tmp_path)
    rerun(run.store_url, "hand", 0, "reward-ocr")
    (reward,) = run.rewards(run.iteration(0, "rollout"), 0)
    _, update = standing(run.iteration(0, "update"))
    assert update is not None
    assert make(reward, {"scores": b"scores"}).generation == 2
    assert why_stale(update, run.update(0)) is None
    rerun(run.store_url, "hand", 0, "reward-ocr")
    make(reward, {"scores": b"other scores"})
    assert why_stale(update, run.update(0)) == "scores changed since update was made"


def test_rerun_of_an_unknown_stage_lists_the_known_ones(recipe, tmp_path):
    run = make_run(recipe(), tmp_path, iterations=1)
    with pytest.raises(ConfigError, match="unknown stage 'reward'; known: rollout, reward-ocr, update"):
        rerun(run.store_url, "hand", 0, "reward")
    ended = CliRunner().invoke(
        cli.app, ["rerun", "hand", "--iteration", "5", "--stage", "update", "--store", run.store_url]
    )
    assert ended.exit_code == 64
    assert "update of iteration 5 of hand has no artifact that stands" in ended.stderr


def test_status_shows_what_stands_what_was_made_again_and_the_reward(recipe, tmp_path):
    run = make_run(recipe(), tmp_path, iterations=1)
    rerun(run.store_url, "hand", 0, "update")
    assert cells_of(run) == [
        ["iteration", "rollout", "reward-ocr", "update"],
        ["0000", "10.0 s", "2.0 s 0.250", "to be made (generation 2)"],
        ["0001", "-", "-", "-"],
    ]
    make(run.update(0), {"current/w": b"again", "old/w": b"old again"}, seconds=31.0)
    assert cells_of(run)[1] == ["0000", "10.0 s", "2.0 s 0.250", "31.0 s (generation 2)"]


def test_status_shows_iterations_beyond_the_first_plan(recipe, tmp_path):
    run = make_run(recipe(), tmp_path, iterations=3)
    assert [row[0] for row in cells_of(run)] == ["iteration", "0000", "0001", "0002"]


def cells_of(run: Run) -> list[list[str]]:
    """The rows of the status table as it is printed."""
    printed = io.StringIO()
    Console(file=printed, width=200).print(table(run.store_url, run.plan.run_id))
    rows = [line.replace("┃", "│").split("│") for line in printed.getvalue().splitlines() if "│" in line or "┃" in line]
    return [[cell.strip() for cell in row[1:-1]] for row in rows]


def test_differences_are_named_by_their_whole_path():
    assert differences({"a": {"b": 1, "c": 2}}, {"a": {"b": 1, "c": 3}, "d": 4}) == ["a.c: 2 -> 3", "d: None -> 4"]
