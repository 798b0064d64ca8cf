"""Groups of commands whose modules are imported when a command is used.

A module has the name of its command and defines a function of that name. At its top it imports only light modules.
Modules that import Prefect, pandas or torch are imported when the command begins to work, so that help, completion and
usage errors do not wait for them.
"""

import ast
from collections import UserDict
from collections.abc import Mapping, Sequence
from importlib import import_module
from importlib.util import find_spec
from inspect import cleandoc
from pathlib import Path
from typing import Any, ClassVar

from typer.core import TyperCommand, TyperGroup

from flows.cli.base.command import EXAMPLES, command_of


class _Commands(UserDict[str, Any]):
    """Commands by name. A command is a stub until somebody asks for it, which imports it."""

    def __getitem__(self, name: str) -> Any:
        found = self.data[name]
        if isinstance(found, _Stub):
            found = self.data[name] = found.loaded()
        return found


class _Stub:
    """A command that is not imported yet."""

    def __init__(self, module: str, panel: str) -> None:
        self._module, self._panel = module, panel or None
        self._function = module.rpartition(".")[2]
        self.name = self._function.replace("_", "-")

    def loaded(self) -> Any:
        """Return the command."""
        return command_of(getattr(import_module(self._module), self._function), self.name, self._panel)

    def described(self) -> TyperCommand:
        """Return a command with a name and a help alone, read from the text of its module without an import."""
        found = find_spec(self._module)
        assert found is not None, self._module
        assert found.origin is not None, self._module
        parsed = ast.parse(Path(found.origin).read_text(encoding="utf-8"))
        functions = {node.name: node for node in parsed.body if isinstance(node, ast.FunctionDef)}
        words = ast.get_docstring(functions[self._function], clean=False) or ""
        return TyperCommand(self.name, help=cleandoc(words).partition(EXAMPLES)[0], rich_help_panel=self._panel)


class LazyGroup(TyperGroup):
    """A group whose help and completion import no command."""

    modules: ClassVar[Mapping[str, Sequence[str]]] = {}
    """Modules of commands by the title that the help lists them under, "" for the usual one."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        stubs = [_Stub(module, panel) for panel, modules in self.modules.items() for module in modules]
        self.commands = _Commands({stub.name: stub for stub in stubs} | dict(self.commands))

    def list_commands(self, ctx: Any) -> list[str]:
        """Return the names of all commands."""
        return [*self.commands]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Return a command for help and completion; None if no command has the name."""
        found = self.commands.data.get(cmd_name)
        return found.described() if isinstance(found, _Stub) else found

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[str | None, Any, list[str]]:
        """Return the name that the words begin with, its command, imported for use, and the other words."""
        name, command, others = super().resolve_command(ctx, args)
        return name, self.commands[name] if name is not None and command is not None else None, others
