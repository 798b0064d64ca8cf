"""One policy version: its parts and their tensors."""

import importlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from cosmos_rl_core.errors import ConfigError
from cosmos_rl_core.weights.parts import CURRENT
from flows.library.exports import export, optimizer_steps
from flows.planning.base import AnyRun
from flows.terminal.commands import about
from stages.artifacts.artifact import Artifact
from stages.artifacts.request import Input
from stages.artifacts.slots import current_of, input_of


def made(run: AnyRun, slot: str, what: str) -> Input:
    """Return the artifact in a slot of a run. Raises :class:`ConfigError`, which names ``what``, if there is none."""
    if current_of(slot)[1] is None:
        shown_by = about(run.store_url, "status", run.plan.run_id)
        raise ConfigError(f"{run.plan.run_id} has no {what}; `{shown_by}` shows what it has")
    return input_of(slot)


@dataclass(frozen=True)
class Policy:
    """A policy version of a run."""

    version: int
    _run: AnyRun = field(repr=False)
    _source: Input = field(repr=False)

    @classmethod
    def of(cls, run: AnyRun, version: int) -> Self:
        """Return a policy version of a run. Raises :class:`ConfigError` if there is none yet."""
        return cls(version, run, made(run, run.slots.policy(version), f"policy {version}"))

    @property
    def url(self) -> str:
        """Return the URL of its slot."""
        return self._source.url

    @property
    def digest(self) -> str:
        """Return the digest of its files: equal policies have equal digests."""
        return self._source.content

    @property
    def parts(self) -> tuple[str, ...]:
        """Return the names of its parts, such as ``current``, ``old``, ``ema`` and ``optimizer``."""
        return tuple(dict.fromkeys(self._folders()))

    def tensors(self, part: str = CURRENT) -> dict[str, Any]:
        """Return the tensors of one part by name, as torch tensors on the CPU.

        Raises :class:`ConfigError` for an unknown part, :class:`ArtifactError` if its bytes are not the committed ones.
        """
        if part not in self.parts:
            raise ConfigError(f"policy {self.version} has no part {part!r}; it has {', '.join(self.parts)}")
        # Imported here because it needs torch, and tables do not.
        return importlib.import_module("stages.formats.policies").read_part(self._source, part)

    def export(self, folder: str | Path) -> Path:
        """Copy the weights to a folder like ``cosmos-flows export``, and return the folder that diffusers loads.

        Raises :class:`ConfigError` if this version was not exported.
        """
        export(self._run.store_url, self._run.plan.run_id, str(folder), self.version)
        return Path(folder, "safetensors", f"step_{optimizer_steps(self._run, self.version)}")

    def _folders(self) -> Iterator[str]:
        artifact = Artifact(self._source)
        folders = (name.partition("/")[0] for name in artifact.names() if name.endswith(".safetensors"))
        return (folder for folder in folders if not artifact.lacks(folder))
