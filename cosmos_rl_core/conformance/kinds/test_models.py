"""Every model plugin's facts: its members, and the statements of its spec about diffusers' stock pipeline."""

import inspect
import re
import typing
from pathlib import Path

import diffusers
import pytest

from cosmos_rl_core import plugins
from cosmos_rl_core.conformance.kinds.members import check_arguments, check_offers, file_of
from cosmos_rl_core.models._base import Model
from cosmos_rl_core.pipelines import directories, guidance


def model_of(name: str) -> type[Model]:
    """Return the model's class: ``load`` itself, or the class that its annotation returns."""
    load = plugins.load_model(name).load
    return load if isinstance(load, type) else load.__annotations__["return"]


@pytest.mark.parametrize("model", plugins.known("models"))
def test_a_spec_claims_pipeline_classes_of_its_own(model: str):
    spec, file = plugins.load("models", model).SPEC, file_of("models", model)
    assert spec.pipeline_classes, f"{file}: SPEC.pipeline_classes is empty"
    assert spec.vaes, f"{file}: SPEC.vaes is empty"
    for class_name in spec.pipeline_classes:
        claimant, _ = directories.claimant(class_name)
        assert claimant == model, f"{file}: {class_name} belongs to another plugin too: {claimant}"


@pytest.mark.parametrize("model", plugins.known("models"))
def test_a_model_has_the_members_of_its_protocol(model: str):
    file = str(Path(file_of("models", model)).with_name("model.py"))
    load = plugins.load_model(model).load
    states = isinstance(load, type) or "return" in load.__annotations__
    assert states, f"{file}: load is a function; annotate the class that it returns"
    check_arguments(f"{file}: load", load, Model)
    missing = sorted(getattr(model_of(model), "__abstractmethods__", ()))
    assert not missing, f"{file}: {model_of(model).__name__} needs {', '.join(missing)}"
    check_offers(model_of(model), Model)


@pytest.mark.parametrize("model", plugins.known("models"))
def test_a_models_facts_agree_with_the_stock_pipeline(model: str):
    spec = plugins.load("models", model).SPEC
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
            assert option not in called or getattr(model_of(model), option) == called[option].default
        if spec.embedded_guidance_scale is not None:
            assert spec.embedded_guidance_scale == called["guidance_scale"].default
        checks = inspect.getsource(getattr(pipeline, "check_inputs", pipeline.__call__))
        lengths = re.findall(r"max_sequence_length > (\d+)", checks)
        assert [spec.max_prompt_length] == ([int(length) for length in lengths] or [None])
        multiples = re.findall(r" % (\d+)", checks)
        assert {spec.stock_multiple} == ({int(number) for number in multiples} or {1})
    transformer = getattr(diffusers, spec.transformer_class)
    assert set(spec.float32_modules) == set(transformer._keep_in_fp32_modules or ())
    assert spec.context_parallel == (model_of(model).split_sequence is not Model.split_sequence)
    for class_name in (spec.transformer_class, *spec.vaes):
        parameters = inspect.signature(getattr(diffusers, class_name).__init__).parameters
        for setting, value in spec.defaults(class_name).items():
            default = parameters[setting].default
            assert (tuple(default) if isinstance(default, list) else default) == value, f"{class_name}: {setting}"
