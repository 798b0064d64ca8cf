"""The promises of every plugin file, tested the moment it exists: its settings, its members, its behaviour."""

import ast
import inspect
import itertools
import json
import re
import tarfile
import textwrap
import typing
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import diffusers
import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import torch
import transformers
from PIL import Image

from cosmos_rl_core import plugins
from cosmos_rl_core.algorithms import _base as algorithms_base
from cosmos_rl_core.algorithms._needs import DRIFT_METRICS
from cosmos_rl_core.captioners import _base as captioners_base
from cosmos_rl_core.config.base import Section
from cosmos_rl_core.config.policy import SolverConfig
from cosmos_rl_core.config.train import (
    AlgorithmOptions,
    CaptionerOptions,
    DatasetOptions,
    RewardOptions,
    SnapshotOptions,
)
from cosmos_rl_core.conformance import hf_folder
from cosmos_rl_core.datasets import _base as datasets_base
from cosmos_rl_core.models import _base as models_base
from cosmos_rl_core.pipelines import directories, guidance
from cosmos_rl_core.rewards import _base as rewards_base
from cosmos_rl_core.sampling import solvers
from cosmos_rl_core.sampling.rollout import sample
from cosmos_rl_core.sampling.schedule import Schedule
from cosmos_rl_core.sampling.transition import Coefficients
from cosmos_rl_core.vlms import _base as vlms_base
from cosmos_rl_core.weights.parts import BEHAVIOUR, CURRENT, OLD, REFERENCE


def check_offers(plugin: type, protocol: type) -> None:
    """Check that a class, with what it inherits, has the members of a protocol, with arguments of the same names."""
    where = f"{inspect.getfile(plugin)}:{inspect.getsourcelines(plugin)[1]}"
    own = [cls for cls in plugin.__mro__ if cls.__module__.partition(".")[0] == plugin.__module__.partition(".")[0]]
    nodes = [node for cls in own for node in ast.walk(ast.parse(inspect.getsource(cls)))]
    assigned: list[ast.expr] = [target for n in nodes if isinstance(n, ast.Assign) for target in n.targets]
    assigned += [n.target for n in nodes if isinstance(n, ast.AnnAssign)]
    offered = {ast.unparse(target).removeprefix("self.") for target in assigned} | {
        name for cls in own for name in vars(cls)
    }
    wanted = {name for name in (*vars(protocol), *protocol.__annotations__) if not name.startswith("_")}
    assert wanted <= offered, f"{where}: {plugin.__name__} needs {', '.join(sorted(wanted - offered))}"
    for name in wanted:
        if inspect.isfunction(method := vars(protocol).get(name)):
            found, expected = (list(inspect.signature(m).parameters) for m in (getattr(plugin, name), method))
            assert found == expected, f"{where}: {name} takes {found}, expected {expected}"


def folder_of_pictures(folder: Path) -> str:
    """Write what a dataset that reads files is given: two captioned images."""
    for index, caption in enumerate(("a dog", "a cat")):
        Image.new("RGB", (8, 8), (index, 0, 0)).save(folder / f"{index}.png")
        (folder / f"{index}.json").write_text(json.dumps({"prompt": caption}), encoding="utf-8")
    return str(folder)


def folder_of_rows(folder: Path) -> str:
    """Write what `datasets` writes of two prompts."""
    return str(hf_folder.save(folder, {"text": pa.array(["a dog", "a cat"])}, {}))


FOLDERS = {"hf": folder_of_rows}
"""What plugins are given that read folders of another layout."""


def shard_of_pictures(folder: Path) -> str:
    """Write what a dataset that reads tar shards is given: the same two images."""
    folder_of_pictures(folder)
    with tarfile.open(folder / "000.tar", "w") as tar:
        for file in sorted({*folder.iterdir()} - {folder / "000.tar"}):
            tar.add(file, file.name)
    return str(folder / "000.tar")


def described_fields(options: type[Section]) -> set[str]:
    """Fields with a docstring below them, also inherited ones."""
    bodies = [
        ast.parse(textwrap.dedent(inspect.getsource(cls))).body[0].body  # pyright: ignore[reportAttributeAccessIssue]
        for cls in options.__mro__
        if issubclass(cls, Section)
    ]
    return {
        ast.unparse(line.target)
        for body in bodies
        for line, following in itertools.pairwise(body)
        if isinstance(line, ast.AnnAssign)
        and isinstance(following, ast.Expr)
        and isinstance(following.value, ast.Constant)
    }


def options_of(kind: str, name: str, base: type[Section], key: str, **given: Any) -> Any:
    """Check the plugin's ``Options``; their values by default, or None where something has to be chosen."""
    module = plugins.load(kind, name)
    file = f"{module.__file__}:1"
    assert issubclass(module.Options, base), f"{file}: Options must be a {base.__name__}"
    fields = module.Options.model_fields
    assert fields[key].annotation == Literal[name], f"{file}: Options.{key} must be Literal[{name!r}]"
    undescribed = [field for field in fields if field != key and field not in described_fields(module.Options)]
    assert not undescribed, f"{file}: settings without a docstring: {', '.join(undescribed)}"
    needed = {field for field, info in fields.items() if info.is_required()} - given.keys() - {key}
    return None if needed else module.Options.model_validate({key: name, **given})


def model_of(name: str) -> type[models_base.Model]:
    """Return the model's class: ``load`` itself, or what its annotation states."""
    load = plugins.load_model(name).load
    return load if isinstance(load, type) else load.__annotations__["return"]


@pytest.mark.parametrize("name", plugins.known("models"))
def test_a_model_plugin_conforms(name: str):
    spec, file = plugins.load("models", name).SPEC, f"cosmos_rl_core/models/{name}/model.py:1"
    assert spec.pipeline_classes
    assert spec.vaes
    for class_name in spec.pipeline_classes:
        assert directories.claimant(class_name) == (name, spec), f"{file}: {class_name} belongs to another plugin too"
    expected = list(inspect.signature(models_base.Model).parameters)
    found = list(inspect.signature(plugins.load_model(name).load).parameters)
    assert found == expected, f"{file}: load takes {found}, expected {expected}"
    assert not inspect.isabstract(model_of(name)), f"{file}: needs {', '.join(model_of(name).__abstractmethods__)}"
    check_offers(model_of(name), models_base.Model)


@pytest.mark.parametrize("name", plugins.known("models"))
def test_a_models_facts_are_those_of_the_stock_pipeline(name: str):
    spec = plugins.load("models", name).SPEC
    for pipeline in (getattr(diffusers, class_name) for class_name in spec.pipeline_classes):
        made, called = (inspect.signature(getattr(pipeline, m)).parameters for m in ("__init__", "__call__"))
        types = {part: typing.get_args(made[part].annotation) or (made[part].annotation,) for part in made}
        assert set(spec.vaes) <= {vae.__name__ for vae in types["vae"]}
        assert spec.transformer_class in {transformer.__name__ for transformer in types["transformer"]}
        settings = [made, *(inspect.signature(cls.__init__).parameters for cls in types["transformer"])]
        assert all(any(refused in known for known in settings) for refused in spec.refused_settings)
        assert spec.takes_instruction == ("complex_human_instruction" in called)
        assert (spec.max_given_frames > 0) == ("num_latent_conditional_frames" in called)
        assert (spec.guardrail_package is not None) == ("safety_checker" in made)
        assert spec.guidance_argument == ("true_cfg_scale" if "true_cfg_scale" in called else "guidance_scale")
        assert spec.takes_negative == ("negative_prompt" in called)
        assert all(setting in made for setting in spec.unguided_settings)
        for option in guidance.OPTIONS:
            assert (option in spec.guidance_options) == (option in called)
            assert option not in called or getattr(model_of(name), option) == called[option].default
        if spec.embedded_guidance_scale is not None:
            assert spec.embedded_guidance_scale == called["guidance_scale"].default
        checks = inspect.getsource(getattr(pipeline, "check_inputs", pipeline.__call__))
        lengths = re.findall(r"max_sequence_length > (\d+)", checks)
        assert [spec.max_prompt_length] == ([int(length) for length in lengths] or [None])
        multiples = re.findall(r" % (\d+)", checks)
        assert {spec.stock_multiple} == ({int(number) for number in multiples} or {1})
    transformer = getattr(diffusers, spec.transformer_class)
    assert set(spec.float32_modules) == set(transformer._keep_in_fp32_modules or ())
    assert spec.context_parallel == (model_of(name).split_sequence is not models_base.Model.split_sequence)
    for class_name in (spec.transformer_class, *spec.vaes):
        parameters = inspect.signature(getattr(diffusers, class_name).__init__).parameters
        for setting, value in spec.defaults(class_name).items():
            default = parameters[setting].default
            assert (tuple(default) if isinstance(default, list) else default) == value, f"{class_name}: {setting}"


def batches_of(algorithm: Any, *, rewarded: bool) -> list[algorithms_base.Batch | algorithms_base.Transitions]:
    """Samples of every kind that the algorithm's loss takes: three, or two pairs."""
    drawn = [1.0, -1.0, 1.0, -1.0] if algorithm.needs.unit == "pair" else [-1.0, 0.0, 1.0]
    advantages, half = torch.tensor(drawn, device="cpu"), torch.full((len(drawn),), 0.5, device="cpu")
    ones = torch.ones(2, len(drawn), 2, 4, 4, device="cpu")
    x_0, noise = ones * torch.tensor([1.0, -1.0], device="cpu").view(2, 1, 1, 1, 1)
    number = half.double()
    at = Coefficients(number, number, number, -number, number, number, number)
    transitions = algorithms_base.Transitions(
        x=x_0, x_next=noise, history=x_0, at=at, log_prob=-number, advantages=advantages
    )
    plain = algorithms_base.Batch(
        x_0, noise, half, advantages if rewarded and not algorithm.needs.transitions else None
    )
    takes_plain = algorithm.needs.data_term is not None or not algorithm.needs.transitions
    return [*([transitions] if algorithm.needs.transitions else []), *([plain] if takes_plain else [])]


def check_loss(algorithm: Any, batch: algorithms_base.Batch | algorithms_base.Transitions) -> None:
    asked: list[str] = []
    prediction = torch.full(batch.x_t.shape, 0.5, device="cpu", requires_grad=True)

    def velocity(part: str) -> torch.Tensor:
        asked.append(part)
        return prediction if part == CURRENT else torch.zeros_like(prediction)

    loss = algorithm.loss(velocity, batch)
    assert asked[-1] == CURRENT
    assert set(asked) <= set(algorithm.needs.roles)
    assert loss.per_sample.shape == batch.t.shape
    assert loss.per_sample.requires_grad
    assert loss.per_sample.dtype == torch.float32
    if isinstance(batch, algorithms_base.Transitions):
        assert set(DRIFT_METRICS) <= loss.metrics.keys()
    assert all(value.shape == batch.t.shape and not value.requires_grad for value in loss.metrics.values())


def check_mask(algorithm: Any, batch: algorithms_base.Batch | algorithms_base.Transitions) -> None:
    """Check that what was given, here the first row, has no part in the gradient."""
    prediction = torch.full(batch.x_t.shape, 0.5, device="cpu", requires_grad=True)
    mask = torch.tensor([0.0, 1.0, 1.0, 1.0], device="cpu").view(1, 1, 4, 1)

    def velocity(part: str) -> torch.Tensor:
        return prediction if part == CURRENT else torch.zeros_like(prediction)

    loss = algorithm.loss(velocity, replace(batch, mask=mask))
    (gradient,) = torch.autograd.grad(loss.per_sample.sum(), prediction)
    assert gradient[:, :, 0].count_nonzero() == 0, f"{type(algorithm).__module__}: its loss does not heed batch.mask"
    assert gradient[:, :, 1:].count_nonzero() > 0


@pytest.mark.parametrize("name", plugins.known("algorithms"))
def test_an_algorithm_plugin_conforms(name: str):
    options = options_of("algorithms", name, AlgorithmOptions, "type", dataset={"name": "rendered_text"})
    plugin = plugins.load("algorithms", name).Algorithm
    check_offers(plugin, algorithms_base.Algorithm)
    if options is None:
        pytest.skip("its settings have no defaults")
    algorithm = plugin(options)
    needs = algorithm.needs
    assert needs.behaviour in {CURRENT, OLD, REFERENCE}
    assert set(needs.roles) <= {CURRENT, OLD, BEHAVIOUR, REFERENCE}
    assert (needs.old_decay is not None) == (OLD in {needs.behaviour, *needs.roles})
    assert 1 <= needs.num_times(20) <= 20
    assert needs.transitions == (needs.max_logp_drift is not None)
    assert needs.transitions or needs.data_term is None
    for batch in batches_of(algorithm, rewarded=options.rewarded):
        check_loss(algorithm, batch)
        check_mask(algorithm, batch)

    if options.rewarded:
        scored = {
            "sample_id": list("abcd"),
            "prompt_id": ["p"] * 4,
            "reward": [1.0, 2.0, 4.0, np.nan],
            "valid": [1, 1, 1, 0],
        }
        table = algorithm.advantages(pd.DataFrame(scored).astype({"valid": bool}))
        assert table["sample_id"].tolist() == list("abcd")
        assert table["advantage"].isna().tolist() == [not used for used in table["used"]]
        if needs.unit == "pair":
            check_pairs(table, needs)
        elif name == "rft":
            # A quarter of three, rounded up: the best.
            assert table["used"].tolist() == [False, False, True, False]
        else:
            assert table["used"].tolist() == [True, True, True, False]


def check_pairs(table: Any, needs: Any) -> None:
    """Pairs are of samples with a reward, which alone are used, and no more than planned; others are counted."""
    pairs = [
        (winner, loser)
        for winner, losers in zip(table["sample_id"], table["beats"], strict=True)
        for loser in losers.split()
    ]
    reward = dict(zip(table["sample_id"], table["reward"], strict=True))
    assert all(reward[winner] > reward[loser] for winner, loser in pairs)
    assert {*itertools.chain.from_iterable(pairs)} == {*table.loc[table["used"], "sample_id"]}
    assert 0 < len(pairs) <= needs.most_units(4)
    assert table["dropped"].tolist() == [0] * 4
    assert not needs.transitions


@pytest.mark.parametrize("name", plugins.known("rewards"))
def test_a_reward_plugin_conforms(name: str):
    options = options_of("rewards", name, RewardOptions, "name")
    plugin = plugins.load("rewards", name).Reward
    check_offers(plugin, rewards_base.Reward)
    if options is None:
        pytest.skip("its settings have no defaults")
    if options.facts.torch:
        return  # tests/test_torch_scorers.py scores with tiny weights
    reward, prompt = plugin(options), 'a sign that says "K7"'
    assert isinstance(reward.version, str)
    assert reward.check_prompt(datasets_base.Prompt(id="p", text=prompt)) is None
    pixels = np.random.default_rng(0).integers(0, 256, (4, 1, 32, 64, 3), dtype=np.uint8)
    shown = () if options.facts.references == "ignored" else (pixels[0],)
    samples = [
        rewards_base.Sample(f"s{i}", f"p{i // 2}", prompt, one, references=shown) for i, one in enumerate(pixels)
    ]
    scores = reward.score(samples)
    assert all(np.isfinite(entry[options.label]) for entry in scores)
    # A score depends on its own sample alone; of a groupwise reward, on the samples of its prompt.
    assert plugin(options).score(samples[::-1]) == scores[::-1]
    whole = 2 if options.facts.groupwise else 1
    groups = [samples[i : i + whole] for i in range(0, len(samples), whole)]
    assert [entry for group in groups for entry in reward.score(group)] == scores
    assert reward.score([]) == []


@pytest.mark.parametrize("name", plugins.known("solvers"))
@pytest.mark.parametrize("num_steps", [2, 9])
def test_a_solver_plugin_conforms(name: str, num_steps: int):
    unknown = {*solvers.facts(name).settings} - SolverConfig.model_fields.keys()
    assert not unknown, f"{plugins.load('solvers', name).__file__}: SOLVER.settings names {', '.join(sorted(unknown))}"
    levels = Schedule((*(1 - i / num_steps for i in range(num_steps)), 0.0))
    config = SolverConfig(solver=name, num_steps=num_steps)
    made, again = (solvers.kernel_of(config, lambda: levels) for _ in range(2))
    assert made == again
    assert all(high > low for high, low in itertools.pairwise(made.levels))
    assert all(step.std == 0 or not step.recall_older for step in made.steps)
    if not made.trainable:
        # Every velocity points away from x_0 = 2.
        ended = sample(lambda x, t: (x - 2.0) / t[:, None], torch.randn(3, 5, device="cpu"), made)
        assert torch.allclose(ended.latents, torch.full((3, 5), 2.0, device="cpu"), atol=1e-5)


@pytest.mark.parametrize("name", plugins.known("captioners"))
def test_a_captioner_plugin_conforms(name: str):
    settings = {"text": {"text": "a sign"}, "endpoint": {"url": "http://host/v1", "model": "m", "instruction": "?"}}
    options = options_of("captioners", name, CaptionerOptions, "by", **settings.get(name, {}))
    plugin = plugins.load("captioners", name).Captioner
    check_offers(plugin, captioners_base.Captioner)
    if options is not None:
        assert list(plugin(options).captions([])) == []


@pytest.mark.parametrize("name", plugins.known("vlms"))
def test_a_vlm_plugin_conforms(name: str):
    module = plugins.load("vlms", name)
    assert module.PROCESSORS, f"{module.__file__}: PROCESSORS is empty"
    for architecture, processor in module.PROCESSORS.items():
        file = f"{module.__file__}:1"
        writes = hasattr(getattr(transformers, architecture, None), "generate")
        assert writes == getattr(processor, "writes_texts", True), f"{file}: {architecture} is no such class"
        check_offers(processor, vlms_base.Processor)
        found = list(inspect.signature(processor).parameters)
        assert found == ["path", "changes"], f"{file}: a processor takes {found}, expected ['path', 'changes']"


@pytest.mark.parametrize("name", plugins.known("datasets"))
def test_a_dataset_plugin_conforms(name: str, tmp_path: Path):
    module = plugins.load("datasets", name)
    if issubclass(module.Options, SnapshotOptions):
        return  # its prompts and media are in a store
    reads_folder = "local_dir" in module.Options.model_fields and module.Options.model_fields["local_dir"].is_required()
    given = {"local_dir": FOLDERS.get(name, folder_of_pictures)(tmp_path)} if reads_folder else {}
    if "path" in module.Options.model_fields:
        given = {"path": str(tmp_path / "prompts.txt")}
        (tmp_path / "prompts.txt").write_text("a dog\na cat\n", encoding="utf-8")
    if "urls" in module.Options.model_fields:
        given = {"urls": shard_of_pictures(tmp_path)}
    options = options_of("datasets", name, DatasetOptions, "name", **given)
    offered = ["prompts", *(["digest"] if hasattr(module, "Media") else [])]
    for function in offered:
        assert hasattr(module, function), f"{module.__file__}:1: needs {function}"
        found = list(inspect.signature(getattr(module, function)).parameters)
        assert found == ["options"], f"{module.__file__}:1: {function} takes {found}, expected ['options']"
    if hasattr(module, "Media"):
        check_offers(module.Media, datasets_base.Media)
    if hasattr(module, "Source"):
        check_offers(module.Source, datasets_base.Source)
    if options is None:
        pytest.skip("its settings have no defaults")
    prompts = module.prompts(options)
    assert prompts == module.prompts(options)
    assert len({prompt.id for prompt in prompts}) == len(prompts) > 0
    assert all(re.fullmatch(r"[\w.-]+", prompt.id) for prompt in prompts)
    if hasattr(module, "Media"):
        forwards, backwards = module.Media(options), module.Media(options)
        assert forwards.prompts == prompts
        assert len(set(forwards.item_ids)) == len(forwards.item_ids) == len(forwards)
        assert all(re.fullmatch(r"[\w.-]{1,80}", item_id) for item_id in forwards.item_ids)
        assert re.fullmatch("|[0-9a-f]{64}", module.digest(options))
        assert module.digest(options) == module.digest(options)
        indices = sorted({0, 1, len(forwards) // 2, len(forwards) - 1})
        first = {i: forwards.item(i) for i in indices}
        for i in reversed(indices):
            pixels, prompt = backwards.item(i)
            assert pixels.dtype == np.uint8
            assert pixels.shape == (*forwards.shape, 3)
            assert forwards.fault(i) is None
            np.testing.assert_array_equal(pixels, first[i][0])
            assert prompt == first[i][1] == forwards.prompt_of(i)
            assert prompt in forwards.prompts
        for read in (forwards.item, forwards.prompt_of):
            with pytest.raises(IndexError):
                read(len(forwards))
