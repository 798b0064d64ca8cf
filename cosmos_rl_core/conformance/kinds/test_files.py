"""Every plugin's file: its settings are described, and it has the members of its kind."""

from typing import Any, Literal

import pytest

from cosmos_rl_core import plugins
from cosmos_rl_core.algorithms._base import Algorithm
from cosmos_rl_core.captioners._base import Captioner
from cosmos_rl_core.config.train import SnapshotOptions
from cosmos_rl_core.conformance.kinds.members import BASES, check_arguments, check_offers, described_fields
from cosmos_rl_core.datasets._base import Media, Source
from cosmos_rl_core.rewards._base import Reward
from cosmos_rl_core.vlms._base import Processor

CLASSES: dict[str, dict[str, Any]] = {
    "algorithms": {"Algorithm": Algorithm},
    "rewards": {"Reward": Reward},
    "captioners": {"Captioner": Captioner},
    "datasets": {"Media": Media, "Source": Source},
}
"""Protocols of the classes of a plugin, by kind and name; a dataset need not have these classes."""
FUNCTIONS = {"datasets": ("prompts", "digest"), "chat_datasets": ("files", "rows")}
"""Functions of a plugin that take its options, by kind."""


def files(*kinds: str) -> list[tuple[str, str]]:
    """Return the kind and the name of every plugin of some kinds."""
    return [(kind, name) for kind in kinds for name in plugins.known(kind)]


@pytest.mark.parametrize(("kind", "name"), files(*BASES))
def test_settings_are_a_section_of_the_kind_under_the_name_of_the_file(kind: str, name: str):
    module, (base, key) = plugins.load(kind, name), BASES[kind]
    assert issubclass(module.Options, base), f"{module.__file__}: Options must be a {base.__name__}"
    found = module.Options.model_fields[key].annotation
    assert found == Literal[name], f"{module.__file__}: Options.{key} must be Literal[{name!r}], found {found}"


@pytest.mark.parametrize(("kind", "name"), files(*BASES))
def test_every_setting_is_described_below_it(kind: str, name: str):
    module, (_, key) = plugins.load(kind, name), BASES[kind]
    described = described_fields(module.Options)
    missing = [field for field in module.Options.model_fields if field != key and field not in described]
    assert not missing, f"{module.__file__}: settings without a docstring below them: {', '.join(missing)}"


@pytest.mark.parametrize(("kind", "name"), files(*CLASSES))
def test_a_class_has_the_members_of_its_protocol(kind: str, name: str):
    module = plugins.load(kind, name)
    for found, protocol in CLASSES[kind].items():
        if hasattr(module, found):
            check_offers(getattr(module, found), protocol)


@pytest.mark.parametrize(("kind", "name"), files(*FUNCTIONS))
def test_a_function_takes_the_options(kind: str, name: str):
    module = plugins.load(kind, name)
    if kind == "datasets" and issubclass(module.Options, SnapshotOptions):
        return  # its prompts and media are in a store
    for function in FUNCTIONS[kind]:
        if kind == "chat_datasets" or function == "prompts" or hasattr(module, "Media"):
            where = f"{module.__file__}: {function}"
            assert hasattr(module, function), f"{where} is missing"
            check_arguments(where, getattr(module, function), ["options"])


@pytest.mark.parametrize("vlm", plugins.known("vlms"))
def test_a_processor_takes_a_path_and_changes(vlm: str):
    module = plugins.load("vlms", vlm)
    for processor in module.PROCESSORS.values():
        check_offers(processor, Processor)
        check_arguments(f"{module.__file__}: {processor.__name__}", processor, ["path", "changes"])
