import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from cosmos_rl_core.canonical import differences
from cosmos_rl_core.errors import ArtifactError, ConfigError
from cosmos_rl_core.recipes.reading import check
from cosmos_rl_core.storage import store
from flows.cli import app as cli
from flows.planning.plan import Settings, freeze, plan_of, read_plan, run_url
from tests.hand_made import planned

SAMPLE = "policy.diffusers.sample"


def mistakes_of(path: str, **settings) -> str:
    with pytest.raises(ConfigError) as caught:
        plan_of(Settings(path, **settings))
    return str(caught.value)


def test_every_mistake_of_a_recipe_is_in_one_message(recipe):
    message = mistakes_of(
        recipe(
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
        "rewards.0.fn: unknown reward 'pikscore'; ",
        "validation.dataset: unknown dataset 'oc'; did you mean 'ocr'? known: hf, local, mixture, mock, ocr, ",
    ):
        assert len([line for line in lines if line.startswith(f"  {expected}")]) == 1, (expected, message)
    assert len(lines) == 8


def test_combinations_that_cannot_work_are_reported_together(recipe):
    message = mistakes_of(
        recipe(
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
    ):
        assert message.count(expected) == 1, (expected, message)


@pytest.mark.parametrize("place", ["policy", "train", "rollout", "rewards", "validation", "launch", "logging"])
@pytest.mark.parametrize("value", [None, 1, "x", [], {}, [{}], {"x": 1}])
def test_no_section_can_be_so_wrong_that_it_is_not_reported(place, value):
    values = {
        "policy": {"model_name_or_path": "package:tiny-sd3", "diffusers": {"inference_size": []}},
        "train": {"num_iterations": 1, "optm_betas": [], "train_policy": {"type": "nft", "dataset": {"name": "ocr"}}},
        "rollout": {"n_generation": 3},
        "rewards": [{"fn": {"name": "ocr"}}],
    }
    changed = {key: entry for key, entry in (values | {place: value}).items() if entry is not None}
    with pytest.raises(ConfigError):
        check(changed, "test")


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        (
            "train.train_policy.guidance=0",
            "guidance: unknown key; it is policy.diffusers.sample.guidance_scale here",
        ),
        ("train.train_policy.num_rollout=8", "num_rollout: unknown key; it is rollout.n_generation here"),
        ("train.train_policy.s_churn=1.0", "s_churn: unknown key; it is policy.diffusers.sample.s_churn here"),
        (
            "policy.diffusers.sample.solver_option=2heun_edm",
            "solver_option: Input should be '2ab' or '1euler' (found '2heun_edm')",
        ),
        ("train.optm_betas=[0.9, 1.5]", "train.optm_betas.1: Input should be less than 1"),
        ("train.staleness=1", "train.staleness = 1 runs rollout and update at once: give both GPUs of their own"),
        (
            "policy.diffusers.sample.num_steps=100000000",
            "Input should be less than or equal to 10000 (found 100000000)",
        ),
        ("launch.environment={RANK = '3'}", "RANK cannot be set here: torchrun sets it for each rank"),
        ("launch.environment={'A=B' = '3'}", "'A=B' is no name of an environment variable"),
        ('launch.environment={A = "x\\u0000"}', "has a zero byte, which no environment variable can hold"),
        (
            "launch.environment={CUDA_VISIBLE_DEVICES = '2'}",
            "CUDA_VISIBLE_DEVICES cannot be set here: use launch.stage_gpus",
        ),
        ("train.num_iterations=1000001", "Input should be less than or equal to 1000000 (found 1000001)"),
        ("train.ckpt.max_keep=0", "train.ckpt.max_keep: Input should be greater than or equal to 1"),
        ("train.staleness=2", "train.staleness = 2 samples every rollout of train.num_iterations = 2 from the base"),
        ("train.train_policy.min_group_size=5", "min_group_size = 5 drops every prompt: rollout.n_generation = 4"),
    ],
)
def test_settings_that_have_another_place_or_bound_say_so(recipe, override, expected):
    launch = "launch.stage_gpus.update=[0]"
    assert expected in mistakes_of(recipe(), overrides=(override, launch))


def test_a_stage_has_a_gpu_for_each_of_its_processes_and_warm_forks_have_none(recipe):
    few = ("launch.processes=2", "launch.stage_gpus.update=[0]")
    assert "stage_gpus.update = [0] must be different GPUs, one for each of its 2 processes" in mistakes_of(
        recipe(), overrides=few
    )
    warm = ("launch.mode=warm", "launch.device=cpu", "launch.stage_gpus.update=[0]")
    assert "rehearse those GPUs with mode = 'cold' or resident_gb = 1" in mistakes_of(recipe(), overrides=warm)


def test_a_bound_of_infinity_is_no_bound(recipe):
    plan = plan_of(Settings(recipe(), overrides=(f"{SAMPLE}.solver=edm", f"{SAMPLE}.s_t_max=inf")))
    assert plan.recipe.policy.diffusers.sample.s_t_max is None


@pytest.mark.parametrize(
    ("solver", "given", "unread"),
    [
        ("edm", ["noise_level=0.7"], "noise_level"),
        ("flow_sde", ["s_churn=1.0", "noise_level=0.5"], "s_churn"),
        ("euler", ["s_t_max=inf", "s_noise=1.0", "s_t_min=0.0"], "s_noise s_t_min s_t_max"),
        ("cps", ["sigma_max=80", "sigma_min=0.1"], "sigma_max sigma_min"),
        ("dpm2", ["solver_option=2ab"], "solver_option"),
        ("euler", ["noise_level=0.7"], "noise_level"),
        ("unipc", ["noise_level=0.7", "s_churn=1.0"], "noise_level s_churn"),
    ],
)
def test_settings_that_the_solver_does_not_read_are_refused_even_at_their_defaults(recipe, solver, given, unread):
    overrides = tuple(f"{SAMPLE}.{entry}" for entry in [f"solver={solver}", *given])
    message = mistakes_of(recipe(), overrides=overrides)
    for name in unread.split():
        assert re.search(rf"{SAMPLE}\.{name}\b.* without effect: solver = '{solver}' does not read it", message)


@pytest.mark.parametrize(
    ("solver", "given"),
    [
        ("edm", ["s_churn=0.5", "s_noise=1.0", "s_t_min=0.0", "s_t_max=80.0", "sigma_max=80", "solver_option=1euler"]),
        ("flow_sde", ["noise_level=0.7"]),
        ("cps", ["noise_level=0.7"]),
    ],
)
def test_settings_that_the_solver_reads_are_planned_and_read_back(recipe, tmp_path, solver, given):
    overrides = tuple(f"{SAMPLE}.{entry}" for entry in [f"solver={solver}", *given])
    first = planned(recipe(), tmp_path, run_id="mine", overrides=overrides)
    assert planned(recipe(), tmp_path, run_id="mine", overrides=overrides).plan == first.plan
    assert read_plan(first.store_url, "mine") == first.plan


def test_all_mistakes_outside_of_a_valid_recipe_are_named_at_once(recipe, words):
    words("no quotes")
    without_effect = ("optm_lr = 1e-3", "optm_lr = 1e-3\nema_decay = 0.9")
    message = mistakes_of(recipe(('"package:tiny-sd3"', '"package:tiny"'), without_effect))
    assert "train.ema_decay without effect: ema_enable is not true" in message
    assert "no pipeline 'tiny' ships with this project; did you mean package:tiny-sd3? known: tiny-sd3" in message
    assert "ocr cannot score 1 prompt: prompt p-" in message
    assert "one iteration needs 2 prompts, the dataset 'ocr' has 1" in message


@pytest.mark.parametrize(
    ("replacement", "expected"),
    [
        (("[train]", "[training]\n[train]"), "training: unknown key; did you mean 'train'?"),
        (("[rollout]", "[rollout]\nn_generaton = 3"), "rollout.n_generaton: unknown key; did you mean 'n_generation'?"),
        (("line_width = 96", "line_widht = 96"), "rewards.0.fn.line_widht: unknown key; did you mean 'line_width'?"),
        (("line_width = 96", "line_width = 9"), "rewards.0.fn.line_width: Input should be greater than or equal to 48"),
        (('"nft"', '"nfft"'), "train.train_policy: unknown algorithm 'nfft'; did you mean 'nft'? known: "),
        (
            ('name = "ocr"\n', 'name = "nothing"\n'),
            "train.train_policy.dataset: unknown dataset 'nothing'; known: hf, local, mixture, mock, ocr, ",
        ),
        (('type = "nft"\n', ""), "train.train_policy: needs `type`; known: "),
        (("optm_lr = 1e-3", "optm_lr = nan"), "train.optm_lr: "),
        (("num_iterations = 2", "num_iterations = 2.5"), "train.num_iterations: Input should be a valid integer"),
        (("num_iterations = 2", "num_iterations = true"), "train.num_iterations: Input should be a valid integer"),
        (("num_iterations = 2\n", ""), "train.num_iterations: Field required"),
        (("max_num_steps = 8\n", ""), "train: optm_decay_type = 'linear' needs max_num_steps"),
        (("[rollout]", "[rollout"), "is not TOML: "),
        (
            ("[rollout]", "[launch.stage_processes]\nrolout = 2\n[rollout]"),
            "launch.stage_processes.rolout: unknown stage of several processes; known: decode, describe, ",
        ),
    ],
)
def test_a_mistake_is_named_where_it_is(recipe, replacement, expected):
    assert expected in mistakes_of(recipe(replacement))


def test_a_missing_recipe_is_said_to_be_missing(tmp_path):
    assert mistakes_of(str(tmp_path / "nope.toml")).startswith("no file at ")


def test_a_prompt_that_a_file_has_twice_is_one_prompt(recipe, words):
    words('say "K7"', 'say "AB"', '  say "K7"  ')
    assert [prompt.text for prompt in plan_of(Settings(recipe())).prompts] == ['say "K7"', 'say "AB"']


@pytest.mark.parametrize(
    ("replacement", "expected"),
    [
        (("lora = { r = 2 }", 'lora = { target_modules = ["to_q", "to_x"] }'), "ends in to_x; it has "),
        (("[32, 64]", "[32, 60]"), "must be multiples of 8 pixels"),
        (("[32, 64]", "[32, 128]"), "the transformer has positions for at most [1, "),
        (("[32, 64]", "[32, -64]"), "policy.diffusers.inference_size.1: Input should be greater than or equal to 1"),
        (("[32, 64] }", "[32, 64], train_frames = 5 }"), "train_frames = 5: this model makes images"),
        (
            ("[rollout]", "[rollout]\nstore_budget_gb = 1e-6"),
            "the rollouts would take 0.00013 GB (16 of 0.01 MB), more than rollout.store_budget_gb = 1e-06",
        ),
    ],
)
def test_facts_of_the_models_files_are_checked_before_anything_starts(recipe, words, replacement, expected):
    words('say "K7"', 'say "AB"')
    assert expected in mistakes_of(recipe(replacement))


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
    assert "cannot read override 'train.optm_lr'; expected" in mistakes_of(recipe(), overrides=("train.optm_lr",))


@pytest.mark.parametrize("command", ["plan", "run"])
def test_a_refused_recipe_exits_with_64_and_writes_nothing(recipe, tmp_path, command):
    place = tmp_path / "store"
    place.mkdir()
    path = recipe(("n_generation = 4", "n_generation = 1"))
    ended = CliRunner().invoke(cli.app, [command, path, "--store", str(place)])
    assert ended.exit_code == 64
    assert "rollout.n_generation: Input should be greater than or equal to 2 (found 1)" in ended.stderr
    assert ended.stdout == ""
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


def test_plan_refuses_a_changed_recipe_of_a_planned_run_as_run_would(recipe, tmp_path, main):
    planned(recipe(), tmp_path, run_id="mine")
    words = ("--store", str(tmp_path / "store"), "--run-id", "mine")
    code, _, error = main("plan", recipe(), *words, "--set", "rollout.n_generation=2")
    assert (code, "run mine was planned otherwise:\n  recipe.rollout.n_generation: 4 -> 2" in error) == (64, True)
    assert main("plan", recipe(), *words, "--iterations", "9")[0] == 0


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


def test_a_plan_is_equal_after_it_was_stored_and_read(recipe, store_url):
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
    with pytest.raises(ArtifactError, match=r"plan\.json is damaged: not a sealed plan"):
        read_plan(str(tmp_path), "mine")


def test_the_default_run_id_follows_the_recipe_not_how_far_or_where_it_runs(recipe):
    def name(*replacements, **settings):
        return plan_of(Settings(recipe(*replacements), **settings)).run_id

    first = name()
    assert first.startswith("tiny-")
    assert len(first) == len("tiny-") + 8
    assert name() == name(run_id="") == first
    assert name(iterations=7) == name(store="elsewhere") == name(overrides=("launch.processes=4",)) == first
    # A whole number where a float is meant is the same recipe.
    assert name(("optm_warmup_steps", "optm_weight_decay = 0\noptm_warmup_steps")) == name(
        ("optm_warmup_steps", "optm_weight_decay = 0.0\noptm_warmup_steps")
    )
    others = {first, name(overrides=("train.seed=1",)), name(("optm_lr = 1e-3", "optm_lr = 2e-3"))}
    assert len(others) == 3


def test_a_run_id_must_be_safe_as_a_folder_name(recipe):
    assert mistakes_of(recipe(), run_id="a/b").endswith("run id 'a/b' must be letters, digits, '-', '_' and '.'")


@pytest.mark.parametrize("run_id", ["läuf", "a" * 101, "runs", "dataset"])
def test_a_run_id_of_other_letters_or_too_long_or_of_a_folder_of_stores_is_a_mistake(recipe, run_id):
    assert f"run id {run_id!r} " in mistakes_of(recipe(), run_id=run_id)


@pytest.mark.parametrize("stem", ["läuf", "a" * 92])
def test_a_file_whose_name_gives_no_run_id_asks_for_one(recipe, stem):
    path = Path(recipe())
    named = path.rename(path.with_stem(stem))
    assert mistakes_of(str(named)).endswith("and no letters but a to z and A to Z; name another with --run-id")
    assert plan_of(Settings(str(named), run_id="a" * 100)).run_id == "a" * 100


def test_differences_are_named_by_their_whole_path():
    assert differences({"a": {"b": 1, "c": 2}}, {"a": {"b": 1, "c": 3}, "d": 4}) == ["a.c: 2 -> 3", "d: None -> 4"]


@pytest.mark.parametrize(
    ("arguments", "code"),
    [(["plan"], 64), (["nope"], 64), (["run", "--bad"], 64), (["status", "nobody"], 64), (["--help"], 0)],
)
def test_a_command_line_that_cannot_be_read_is_a_wrong_setting(arguments, code, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["cosmos-flows", *arguments])
    with pytest.raises(SystemExit) as end:
        cli.main()
    assert end.value.code == code


def test_an_unexpected_error_ends_with_70_and_its_traceback(monkeypatch, capsys):
    def fail(*_, **__):
        raise LookupError("nobody thought of it")

    monkeypatch.setattr("sys.argv", ["cosmos-flows", "plan", "configs/tiny/nft.toml"])
    monkeypatch.setattr("flows.cli.base.planned.plan_of", fail)
    with pytest.raises(SystemExit) as end:
        cli.main()
    assert end.value.code == 70
    assert "nobody thought of it" in capsys.readouterr().err


def test_weights_of_rewards_without_effect_are_refused(recipe):
    reward = 'fn = { name = "ocr", line_width = 96 }\n'
    another = (reward, f'{reward}weight = 0.9\n\n[[rewards]]\nfn = {{ name = "jpeg" }}\nweight = -0.1\n')
    steps = (('type = "nft"', 'type = "grpo"\ntrain_on = [0]'), ("timesteps_fraction = 1.0\n", ""))
    sampler = ("size = [32, 64] }", "size = [32, 64], sample = { solver = 'flow_sde' } }")
    path = recipe(another, *steps, sampler)
    with pytest.raises(ConfigError, match=r"rewards weigh 0.1, 0.9, but train.train_policy.reward_average uses"):
        plan_of(Settings(path))
    assert plan_of(Settings(path, overrides=("train.train_policy.reward_average=false",))).recipe.rewards
    with pytest.raises(ConfigError, match="rewards of weight 0 train nothing: ocr; give them role = 'monitor'"):
        plan_of(Settings(recipe((reward, f"{reward}weight = 0.0\n"))))
