"""The stages by name. Each ``contracts.py`` below this folder lists its stages in ``CONTRACTS``. Imports no torch."""

from collections.abc import Iterable
from importlib import import_module
from pathlib import Path
from types import ModuleType

from cosmos_rl_core.config.shared import StageConfig, Trains

STAGES: dict[str, type[StageConfig]] = {}
"""The settings of each stage."""


def register(contracts: Iterable[type[StageConfig]]) -> None:
    """Add stages. Raises ``ValueError`` if two stages have one name."""
    for contract in contracts:
        if STAGES.setdefault(contract.name, contract) is not contract:
            raise ValueError(f"two stages have the name {contract.name!r}")


def module_of(stage: str) -> str:
    """Return the name of the module that runs a stage."""
    package = STAGES[stage].package
    return f"{package}.{stage.removeprefix(package.rpartition('.')[2] + '_')}"


def reader_of(stage: str) -> ModuleType | None:
    """Return the module that makes a stage's excerpts for reports; None if the stage ``fragment`` makes them."""
    return _imported_next_to(STAGES[stage], STAGES[stage].reader)


def held_out_reader_of(stage: str) -> ModuleType | None:
    """Return the module that reads what a stage measured on held-out data; None if it measures nothing there."""
    return _imported_next_to(STAGES[stage], STAGES[stage].measures)


def trains(stage: str) -> bool:
    """Return whether a stage trains a policy version, which ends an iteration."""
    return issubclass(STAGES[stage], Trains)


def _imported_next_to(contract: type[StageConfig], module: str | None) -> ModuleType | None:
    return None if module is None else import_module(f"{contract.package}.{module}")


def _find() -> None:
    root = Path(__file__).parent
    for path in sorted(root.rglob("contracts.py")):
        parts = path.relative_to(root.parent).with_suffix("").parts
        register(import_module(".".join(parts)).CONTRACTS)


_find()
