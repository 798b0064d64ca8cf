"""What a plan knows of Cosmos-Predict2.5 before torch is there: packages, sizes, targets, bytes, guidance."""

import json
import os
import shutil
from pathlib import Path

import pytest
from safetensors.numpy import load_file, save_file

from cosmos_rl_core.config.policy import LoraConfig
from cosmos_rl_core.conformance.models import tiny_pipelines
from cosmos_rl_core.errors import ConfigError
from cosmos_rl_core.pipelines import directories, guidance
from cosmos_rl_core.storage.tensor_headers import header_bytes
from cosmos_rl_core.weights.shapes import embedding_elements, trainable_elements, weight_shapes
from flows.planning.plan import Plan, Settings, freeze, plan_of
from flows.planning.run import Run
from flows.post_train import steps
from flows.sizes import costs
from tests.flows.by_hand import make_all


@pytest.fixture(scope="session")
def base(tmp_path_factory):
    return tiny_pipelines.save("cosmos_predict2_5", tmp_path_factory.mktemp("plans") / "cosmos")


@pytest.fixture
def cosmos(recipe, base):
    def plan(settings: str, *replacements: tuple[str, str]) -> Plan:
        name = ('"package:tiny-sd3"', f'"{base}"')
        size = ("diffusers = { inference_size = [32, 64] }", f"diffusers = {{ {settings} }}")
        return plan_of(Settings(recipe(name, size, *replacements)))

    return plan


VIDEO = 'inference_size = [32, 64], train_frames = 9, guardrail = "off"'


def test_guardrail_off_is_planned_and_pinned_only_if_it_changes_something(cosmos):
    plan = cosmos(VIDEO)
    assert (plan.model.adapter, plan.model.guardrail) == ("cosmos_predict2_5", ())
    assert plan.model.identity()["guardrail"] == []
    assert plan.recipe.identity()["policy"]["diffusers"]["guardrail"] == "off"


def test_every_mistake_about_the_model_is_in_one_message(cosmos):
    with pytest.raises(ConfigError) as caught:
        cosmos(
            "inference_size = [32, 144], train_frames = 9, sample = { guidance_scale = 1.5 }",
            ("lora = { r = 2 }", 'lora = { r = 2, target_modules = ["to_q", "to_v_proj"] }'),
            ("[rollout]", '[validation]\ndataset = { name = "rendered_text" }\n[rollout]'),
        )
    for expected in (
        'policy.diffusers.guardrail, "required" unless it is set, needs the package cosmos_guardrail: pip install',
        "no weight matrix of this transformer ends in to_v_proj; it has",
        "are [3, 2, 9] tokens (frames, height, width); the transformer has positions for at most [8, 8, 8]",
        "guidance_scale = 1.5: evaluations run Cosmos2_5_PredictBasePipeline, which has no guidance between 1 and 2",
    ):
        assert str(caught.value).count(expected) == 1, (expected, str(caught.value))


@pytest.mark.parametrize(
    ("file", "values", "said"),
    [
        ("transformer", {"patch_size": [2, 2, 2]}, "patches have 2 latent frames, expected 1"),
        ("transformer", {"in_channels": 4}, "takes 4 channels and the VAE makes 4, plus 1 of a mask"),
        (
            "vae",
            {"_class_name": "AutoencoderKLCosmos"},
            "has the VAE AutoencoderKLCosmos; supported here: AutoencoderKLWan",
        ),
    ],
)
def test_other_kinds_of_checkpoints_are_refused(cosmos, base, tmp_path, file, values, said):
    folder = shutil.copytree(base, tmp_path / "other", copy_function=os.symlink)
    config = folder / file / "config.json"
    written = json.dumps(json.loads(config.read_text(encoding="utf-8")) | values)
    config.unlink()
    config.write_text(written, encoding="utf-8")
    with pytest.raises(ConfigError, match=said):
        cosmos(VIDEO, (f'"{base}"', f'"{folder}"'))


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ("inference_size = [32, 72], train_frames = 9", "multiples of 16 pixels"),
        ("inference_size = [32, 64], train_frames = 8", "1 plus a multiple of 4"),
        ("inference_size = [32, 64], train_frames = 33", r"are \[9, 2, 4\] tokens"),
    ],
)
def test_sizes_that_the_model_cannot_do_are_refused(cosmos, settings, said):
    with pytest.raises(ConfigError, match=said):
        cosmos(f'{settings}, guardrail = "off"')


def test_bytes_count_latents_embeddings_and_adapters(cosmos, base):
    recipe = cosmos(f"{VIDEO}, max_prompt_length = 100").recipe
    assert costs.sample_bytes(recipe) == 4 * 4 * 3 * 4 * 8
    assert embedding_elements(str(base), 100) == 100 * 2 * 16
    assert embedding_elements(str(base), 100, recipe.policy.lora) == 100 * 16
    assert costs.embedding_bytes(recipe) == 4 * 100 * 16
    # to_q and to_out.0 of two attentions in each of two blocks are 32 x 32, and the text has 16 channels.
    square, cross = 2 * (32 + 32), 2 * (32 + 16)
    assert trainable_elements(weight_shapes(str(base)), LoraConfig(r=2)) == 2 * (6 * square + 2 * cross)
    with pytest.raises(ConfigError, match="ends in pos_emb_t"):
        trainable_elements({"learnable.pos_emb_t": (8, 32)}, LoraConfig(target_modules=("pos_emb_t",)))


def test_the_real_text_embedding_is_the_known_one(tmp_path):
    """28 layers of 3584 channels: 100352 numbers a token."""
    (tmp_path / "transformer").mkdir()
    config = {"_class_name": "CosmosTransformer3DModel", "crossattn_proj_in_channels": 28 * 3584, "text_embed_dim": 7}
    (tmp_path / "model_index.json").write_text('{"_class_name": "Cosmos2_5_PredictBasePipeline"}')
    # Without a projection its blocks take the texts as they are.
    (tmp_path / "transformer/config.json").write_text(json.dumps(config))
    assert embedding_elements(str(tmp_path), 512) == 512 * 7
    (tmp_path / "transformer/config.json").write_text(json.dumps(config | {"use_crossattn_projection": True}))
    assert embedding_elements(str(tmp_path), 512) == 512 * 100352
    # 206 MB a prompt; where adapters leave the first projection alone, its 1024 channels are stored: 2 MB.
    shapes = {"crossattn_proj.0": [1024, 100352], "blocks.0.attn2.to_k": [2048, 1024]}
    header = header_bytes(((f"{name}.weight", "F32", tuple(shape)) for name, shape in shapes.items()), {})
    (tmp_path / "transformer" / directories.WEIGHTS).write_bytes(header)
    for targets, channels in ((("to_k",), 1024), (("to_k", "crossattn_proj.0"), 100352), (("all-linear",), 100352)):
        lora = LoraConfig(target_modules=targets)
        assert embedding_elements(str(tmp_path), 512, lora) == 512 * channels


@pytest.mark.parametrize(
    ("lora", "prefixed"),
    [
        ("lora = { r = 2 }", True),
        ('lora = { r = 2, target_modules = ["to_q", "crossattn_proj.0"] }', False),
        ('lora = { r = 2, target_modules = "all-linear" }', False),
        ("", False),
    ],
)
def test_embeddings_are_stored_behind_the_projection_where_training_leaves_it_alone(cosmos, lora, prefixed):
    run = Run(cosmos(VIDEO, ("lora = { r = 2 }", lora)), "store")
    assert run.plan.prefixed == prefixed
    assert run.prepared.embed.config.identity().get("prefixed", False) == prefixed
    other = Run(run.plan.model_copy(update={"prefixed": not prefixed}), "store")
    assert run.prepared.embed.slot != other.prepared.embed.slot
    assert run.plan.identity() == other.plan.identity()


def test_another_projection_is_another_embedding(cosmos, base, tmp_path):
    """The projection is part of the base, whose digest the Request names."""
    other = tmp_path / "other"
    shutil.copytree(base, other)
    weights = other / "transformer" / directories.WEIGHTS
    tensors = load_file(weights)
    tensors["crossattn_proj.0.weight"][0, 0] += 1
    save_file(tensors, weights)
    runs = [Run(cosmos(VIDEO, (str(base), str(path))), "store") for path in (base, other)]
    assert runs[0].prepared.embed.slot != runs[1].prepared.embed.slot


@pytest.mark.parametrize(("lora", "megabytes"), [("lora = { r = 2 }", "0.64"), ("", "1.28")])
def test_embeddings_of_more_than_the_budget_are_refused(cosmos, lora, megabytes):
    """10000 tokens of 16 numbers behind the projection, and of 32 before it."""
    settings, adapters = f"{VIDEO}, max_prompt_length = 10000", ("lora = { r = 2 }", lora)
    plan = cosmos(settings, adapters)
    count, budget = len(plan.prompts), float(megabytes) / 1000 * len(plan.prompts)
    assert costs.embedding_bytes(plan.recipe) == float(megabytes) * 10**6
    cosmos(settings, adapters, ("[rollout]", f"[rollout]\nstore_budget_gb = {1.01 * budget}"))
    with pytest.raises(ConfigError, match=rf"text embeddings would take .*\({count} of {megabytes} MB\), more"):
        cosmos(settings, adapters, ("[rollout]", f"[rollout]\nstore_budget_gb = {0.99 * budget}"))


def test_precision_changes_no_stored_embedding_and_other_models_have_no_projection(cosmos, recipe):
    exact, coarse = (
        Run(cosmos(VIDEO, ("[train]", f'[train]\nparam_dtype = "{dtype}"')), "store")
        for dtype in ("float32", "bfloat16")
    )
    assert exact.prepared.embed == coarse.prepared.embed
    assert exact.plan.prefixed
    assert not plan_of(Settings(recipe())).prefixed


def test_a_run_that_began_with_unprojected_embeddings_goes_on_with_them(cosmos, tmp_path):
    plan = cosmos(VIDEO)
    before = freeze(plan.model_copy(update={"prefixed": False}), str(tmp_path))
    assert (plan.prefixed, before.prefixed, freeze(plan, str(tmp_path)).prefixed) == (True, False, False)


def test_a_transformer_that_scales_its_padding_mask_needs_torchvision(tmp_path, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    (tmp_path / "transformer").mkdir()
    (tmp_path / "model_index.json").write_text('{"_class_name": "Cosmos2_5_PredictBasePipeline"}')
    (tmp_path / "transformer/config.json").write_text('{"concat_padding_mask": true}')
    with pytest.raises(ConfigError, match="pip install torchvision"):
        directories.check_runs(tmp_path)
    (tmp_path / "transformer/config.json").write_text('{"concat_padding_mask": false}')
    directories.check_runs(tmp_path)


@pytest.mark.parametrize(("ours", "stock"), [(1.0, 1.0), (8.0, 7.0), (2.5, 1.5)])
def test_guidance_is_translated_for_the_stock_pipeline(base, ours, stock):
    assert guidance.stock_scale(directories.spec(str(base)), ours) == stock
    assert guidance.stock_scale(directories.spec(directories.resolve_path("package:tiny-sd3")), ours) == ours
    with pytest.raises(ConfigError, match="set 1, or more than 2"):
        guidance.stock_scale(directories.spec(str(base)), 2.0)


GRPO = '[train.train_policy]\ntype = "grpo"\ntrain_on = [0]\n'
NFT = '[train.train_policy]\ntype = "nft"\n'


def given(fewest: int, most: int, data: str = "", algorithm: str = GRPO) -> tuple[tuple[str, str], tuple[str, str]]:
    """Replacements that make the recipe one with given frames."""
    head = f"{algorithm}min_num_conditional_frames = {fewest}\nmax_num_conditional_frames = {most}\n{data}"
    return (NFT, head), ("timesteps_fraction = 1.0", "")


SAMPLED = 'sample = { num_steps = 2, solver = "flow_sde" }'
PICTURE = 'inference_size = [32, 64], guardrail = "off"'
DATA = 'data = { name = "rendered_text", num_items = 2 }\n'


@pytest.mark.parametrize(
    ("size", "replacements", "said"),
    [
        (
            VIDEO,
            given(0, 3),
            "max_num_conditional_frames = 3: Cosmos2_5_PredictBasePipeline takes at most 2 given latent frames",
        ),
        (VIDEO.replace("9", "5"), given(1, 2), r"= 2 leaves none of 2 latent frames \(train_frames = 5\) to generate"),
        (PICTURE, given(0, 1), r"= 1 leaves none of 1 latent frames \(train_frames = 1\) to generate"),
        (VIDEO, given(1, 1), r"= 1 takes the first frames of media: name them in \[train.train_policy.data\]"),
        (VIDEO, given(2, 1), "min_num_conditional_frames = 2 is more than max_num_conditional_frames = 1"),
    ],
)
def test_impossible_numbers_of_given_frames_are_mistakes_of_the_recipe(cosmos, size, replacements, said):
    with pytest.raises(ConfigError, match=said):
        cosmos(f"{size}, {SAMPLED}", *replacements)


SFT = """
policy = { model_name_or_path = "MODEL", lora = { r = 2 }, diffusers = { SIZE } }
[train]
num_iterations = 1
train_policy = { type = "sft", dataset = { name = "mock", size = [32, 64], frames = 9 } }
"""


def supervised(folder: Path, model: Path | str, most: int) -> Plan:
    (folder / "sft.toml").write_text(SFT.replace("MODEL", str(model)).replace("SIZE", VIDEO), encoding="utf-8")
    overrides = (f"train.train_policy.max_num_conditional_frames={most}",)
    return plan_of(Settings(str(folder / "sft.toml"), overrides=overrides))


@pytest.mark.parametrize("algorithm", [GRPO, NFT, SFT], ids=["grpo", "nft", "sft"])
def test_given_frames_are_refused_for_other_models(recipe, tmp_path, algorithm):
    rewarded = algorithm != SFT and recipe(*given(1, 1, DATA, algorithm))
    with pytest.raises(ConfigError, match="= 1: StableDiffusion3Pipeline takes no given latent frames"):
        _ = plan_of(Settings(rewarded)) if rewarded else supervised(tmp_path, "package:tiny-sd3", 1)


def test_media_that_nothing_reads_are_refused(recipe):
    with pytest.raises(ConfigError, match=r"nothing reads the media in \[train.train_policy.data\]"):
        plan_of(Settings(recipe(*given(0, 0, DATA))))


@pytest.mark.parametrize("algorithm", [GRPO, NFT], ids=["grpo", "nft"])
def test_media_are_encoded_before_the_rollouts_that_begin_with_them(cosmos, tmp_path, algorithm):
    data = 'data = { name = "mock", num_items = 2, num_prompts = 2, size = [32, 64], frames = 9 }\n'
    runs = [
        Run(cosmos(f"{VIDEO}, {SAMPLED}", *replacements), str(tmp_path / "store"))
        for replacements in (given(1, 2, data, algorithm), given(0, 0, "", algorithm))
    ]
    (asked, without) = (make_all(run) for run in runs)
    assert [(step.slot, step.request()) for step in steps(runs[0])] == list(asked.items())
    slots = [runs[0].prepared.encode.slot, *(runs[0].slots.iteration(0, stage) for stage in ("rollout", "update"))]
    assert list(asked).index(slots[0]) < list(asked).index(slots[1])
    encode, rollout, update = (asked[slot] for slot in slots)
    assert (rollout.one("data").url, rollout.config.identity()["given_frames"]) == (encode.slot, [1, 2])
    # What was given is in the samples; only a diffusion loss would read the media again.
    assert "data" not in update.inputs
    assert "encode" not in {request.stage for request in without.values()}
    assert without[runs[1].slots.iteration(0, "rollout")].config.identity()["given_frames"] == [0, 0]


def test_supervised_training_takes_given_frames_of_the_media_that_it_trains_on(base, tmp_path):
    runs = [Run(supervised(tmp_path, base, most), str(tmp_path / "store")) for most in (1, 0)]
    asked, without = (make_all(run)[run.slots.iteration(0, "finetune")].config.identity()["algorithm"] for run in runs)
    assert asked == without | {"max_num_conditional_frames": 1}
    assert "encode" in runs[0].prepared.steps()
