"""Requests: what a stage is to make, and the artifacts that it reads.

A Request names a stage, its closed settings and its inputs. Its **recipe** is the digest of everything but the inputs;
its **fingerprint** adds the inputs' fingerprints, so it is known before anything runs.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeVar

from pydantic import Field, SerializeAsAny, model_validator

from cosmos_rl_core.canonical import digest
from cosmos_rl_core.config.base import NOT_IDENTITY, Section
from cosmos_rl_core.outside_plugins import Pin, named_by
from cosmos_rl_core.weights.parts import CURRENT
from stages.contracts import StageConfig
from stages.registry import STAGES

Settings = TypeVar("Settings", bound=StageConfig)

FORMAT = 1
REQUEST = "request.json"
"""Name of the file that a stage process is given."""
ROLLOUT = "rollout.json"
"""Name of a file next to a reward's Request: the Request of the rollout, for a reward that scores while it runs."""


class Input(Section):
    """One artifact that a stage reads: its place, its exact bytes, and which parts of it."""

    url: str = Field(json_schema_extra=NOT_IDENTITY)
    """URL of the artifact's slot."""
    generation: int = Field(json_schema_extra=NOT_IDENTITY)
    manifest: str = Field(json_schema_extra=NOT_IDENTITY)
    """Digest of the artifact's manifest."""
    fingerprint: str
    content: str = Field(json_schema_extra=NOT_IDENTITY)
    """Digest of the bytes of the parts."""
    parts: tuple[str, ...] = ()
    """The parts that are read: files ``<part>/...``, or single files. Empty means all but records. A result depends
    only on the parts that are read."""

    @property
    def part(self) -> str:
        """Return the policy part that is read, or the first of several."""
        return self.parts[0] if self.parts else CURRENT


InputContents = dict[str, list[list[str | list[str]]]]
"""Lists of [content, parts] of the inputs, by role, as plain JSON data."""


def contents_of(inputs: dict[str, tuple[Input, ...]]) -> InputContents:
    """Return the contents of inputs by role, without the roles that have none."""
    return {role: [[i.content, list(i.parts)] for i in some] for role, some in inputs.items() if some}


def recipe_of(
    stage: str,
    version: int,
    iteration: int | None,
    seed: int,
    config: dict[str, Any],
    plugins: Sequence[Section] = (),
) -> str:
    """Return the digest of everything in a Request but its inputs.

    ``config`` is the identity of the settings. ``plugins`` are the outside plugins that the settings name. They count
    because runs share slots of datasets, and the plan of another run may have pinned other files under the same name.
    """
    what = {"stage": stage, "version": version, "iteration": iteration, "seed": seed, "config": config}
    return digest(what | ({"plugins": [plugin.identity() for plugin in plugins]} if plugins else {}))


def fingerprint_of(recipe: str, inputs: Mapping[str, Sequence[Section]]) -> str:
    """Return the digest of a recipe and of the fingerprints of its inputs."""
    roles = {role: [i.identity() for i in some] for role, some in inputs.items() if some}
    return digest({"recipe": recipe, "inputs": roles})


class Request(Section):
    """Everything a stage process is given. ``python -m stages.execution.runner request.json`` runs one by hand."""

    format: Literal[1] = FORMAT
    stage: str
    version: int = 0
    """The stage's version; by default this code's."""
    slot: str = Field(json_schema_extra=NOT_IDENTITY)
    """URL under which the artifact's generations go."""
    iteration: int | None = None
    seed: int
    """The run's seed; every draw derives from it."""
    config: SerializeAsAny[StageConfig]
    inputs: dict[str, tuple[Input, ...]] = {}
    plugins: tuple[Pin, ...] = Field(default=(), json_schema_extra=NOT_IDENTITY)
    """The run's plugins from outside the package: the plugins that the settings name or that made the inputs."""

    @model_validator(mode="before")
    @classmethod
    def _config_of_stage(cls, value: Any) -> Any:
        if not isinstance(value, dict) or not isinstance(stage := value.get("stage"), str):
            return value
        if stage not in STAGES:
            raise ValueError(f"unknown stage {stage!r}; known: {', '.join(sorted(STAGES))}")
        fields: dict[str, Any] = {"version": STAGES[stage].version, **value}
        if isinstance(fields.get("config"), dict):
            fields["config"] = STAGES[stage].model_validate(fields["config"])
        return fields

    @model_validator(mode="after")
    def _inputs_have_roles(self) -> "Request":
        roles = STAGES[self.stage].inputs
        if unknown := set(self.inputs) - set(roles):
            raise ValueError(f"{self.stage} has no input {sorted(unknown)}; known: {sorted(roles)}")
        for role, count in roles.items():
            if count == "one" and len(self.inputs.get(role, ())) != 1:
                found = len(self.inputs.get(role, ()))
                raise ValueError(f"{self.stage} needs exactly one input {role!r}, got {found}")
        return self

    @property
    def recipe(self) -> str:
        """Return the digest of everything but the inputs."""
        return recipe_of(
            self.stage, self.version, self.iteration, self.seed, self.config.identity(), self.named_plugins
        )

    @property
    def named_plugins(self) -> tuple[Pin, ...]:
        """Return the outside plugins that the settings name, which therefore decide the result."""
        return named_by(self.config, self.plugins)

    @property
    def fingerprint(self) -> str:
        """Return the digest of the recipe and of the fingerprints of the inputs, known before anything runs."""
        return fingerprint_of(self.recipe, self.inputs)

    @property
    def home(self) -> str:
        """Return the URL of a slot in the store that has the inputs, and the files that prompts refer to.

        It is the slot of the first input, because a replay has its own slot in a place of its own.
        """
        return next((source.url for sources in self.inputs.values() for source in sources), self.slot)

    def expected(self, *parts: str) -> Input:
        """Return parts of this Request's artifact as an input of Requests that are made before the artifact exists.

        Such Requests have the recipe and the fingerprint that they will have later. The artifact's generation and bytes
        are not known yet.
        """
        unknown = {"generation": 0, "manifest": "", "content": ""}
        return Input(url=self.slot, fingerprint=self.fingerprint, parts=parts, **unknown)

    @property
    def input_contents(self) -> InputContents:
        """Return the contents that decide, with the recipe, whether an artifact is current."""
        return contents_of(self.inputs)

    def settings(self, kind: type[Settings]) -> Settings:
        """Return the settings as the type ``kind``, which must be the contract of the Request's stage."""
        assert isinstance(self.config, kind)
        return self.config

    def one(self, role: str) -> Input:
        """Return the only input of a role."""
        (single,) = self.inputs[role]
        return single
