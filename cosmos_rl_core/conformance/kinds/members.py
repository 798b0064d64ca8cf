"""Members and settings of a plugin, compared with the requirements of its kind."""

import ast
import inspect
import itertools
import textwrap
from collections.abc import Callable, Mapping
from typing import Any

from cosmos_rl_core import plugins
from cosmos_rl_core.config.base import Section
from cosmos_rl_core.config.train import AlgorithmOptions, CaptionerOptions, DatasetOptions, RewardOptions
from cosmos_rl_core.config.vlm.chat_datasets import ChatDatasetOptions

BASES: dict[str, tuple[type[Section], str]] = {
    "algorithms": (AlgorithmOptions, "type"),
    "rewards": (RewardOptions, "name"),
    "datasets": (DatasetOptions, "name"),
    "captioners": (CaptionerOptions, "by"),
    "chat_datasets": (ChatDatasetOptions, "name"),
}
"""Base of ``Options`` and the field with the plugin's name, for each kind that has options."""
GIVEN: dict[str, tuple[str, ...]] = {"algorithms": ("dataset",), "datasets": ("local_dir", "path", "urls")}
"""Settings without a default for which the suite has values, by kind."""


def file_of(kind: str, name: str) -> str:
    """Return the file of a plugin, for messages."""
    return str(plugins.load(kind, name).__file__)


def required(kind: str, name: str) -> set[str]:
    """Return the settings of a plugin that have no default."""
    fields = plugins.load(kind, name).Options.model_fields
    return {field for field, info in fields.items() if info.is_required()} - {BASES[kind][1]}


def runnable(kind: str) -> list[str]:
    """Return the plugins of a kind whose required settings are all in :data:`GIVEN`, and all plugins from outside."""
    known = GIVEN.get(kind, ())
    return [name for name in plugins.known(kind) if name not in plugins.own(kind) or required(kind, name) <= {*known}]


def options_of(kind: str, name: str, settings: Mapping[str, Any], **given: Any) -> Any:
    """Return a plugin's options from ``settings`` and, where these lack one, ``given``; None if one is missing."""
    options, key = plugins.load(kind, name).Options, BASES[kind][1]
    chosen = {key: name} | given | {field: value for field, value in settings.items() if field in options.model_fields}
    return None if required(kind, name) - chosen.keys() else options.model_validate(chosen)


def described_fields(options: type[Section]) -> set[str]:
    """Return the fields with a docstring below them, also inherited ones."""
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


def check_offers(plugin: type, protocol: type) -> None:
    """Check that a class, with everything that it inherits, has the members and arguments of a protocol."""
    where = f"{inspect.getfile(plugin)}:{inspect.getsourcelines(plugin)[1]}"
    # A protocol states members, and a class that inherits from it does not have them yet.
    own = [cls for cls in plugin.__mro__ if cls is not object and not getattr(cls, "_is_protocol", False)]
    offered = {name for cls in own for name in (*vars(cls), *_assigned(cls))}
    wanted = {name for name in (*vars(protocol), *protocol.__annotations__) if not name.startswith("_")}
    assert wanted <= offered, f"{where}: {plugin.__name__} needs {', '.join(sorted(wanted - offered))}"
    for name in sorted(wanted):
        if inspect.isfunction(method := vars(protocol).get(name)):
            check_arguments(f"{where}: {name}", getattr(plugin, name), method)


def check_arguments(where: str, function: Callable[..., Any], expected: Callable[..., Any] | list[str]) -> None:
    """Check that a function takes the ``expected`` names or another function's arguments; others must have defaults."""
    found = inspect.signature(function).parameters
    asked = expected if isinstance(expected, list) else list(inspect.signature(expected).parameters)
    more = list(found.values())[len(asked) :]
    optional = all(one.default is not one.empty or one.kind in (one.VAR_POSITIONAL, one.VAR_KEYWORD) for one in more)
    assert [*found][: len(asked)] == asked, f"{where} takes {[*found]}, expected {asked}"
    assert optional, f"{where} takes {[*found]}, expected {asked}; give the others defaults"


def _assigned(cls: type) -> set[str]:
    """Return names and attributes of ``self`` that the source of a class assigns; empty for a class without source."""
    try:
        nodes = list(ast.walk(ast.parse(textwrap.dedent(inspect.getsource(cls)))))
    except (OSError, TypeError):
        return set()
    targets: list[ast.expr] = [target for node in nodes if isinstance(node, ast.Assign) for target in node.targets]
    targets += [node.target for node in nodes if isinstance(node, ast.AnnAssign)]
    each = [one for target in targets for one in (target.elts if isinstance(target, ast.Tuple) else [target])]
    return {ast.unparse(target).removeprefix("self.") for target in each}
