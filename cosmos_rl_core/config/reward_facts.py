"""Facts of a reward that planning and pages read before it runs. Imports nothing heavy."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal

NOTHING: Mapping[str, str] = MappingProxyType({})


@dataclass(frozen=True)
class Facts:
    """Facts of a reward plugin: its input, its scores, its source, and how far it was checked."""

    input: Literal["image", "video", "any"] = "any"
    """Media that the reward scores: images (each frame of a video), videos only, or both."""
    scores: Mapping[str, str] = field(default_factory=lambda: NOTHING)
    """Its scores by name, each with its scale in words, such as ``cosine in [-1, 1]``."""
    source: str = ""
    """Paper or repository that defines the scores."""
    torch: bool = False
    """Whether it needs torch: it then runs in a stage with a GPU or in a service, never in a light stage."""
    weights: tuple[str, ...] = ("model",)
    """Options that name folders whose weights a reward with torch holds in memory."""
    references: Literal["ignored", "taken", "needed"] = "ignored"
    """Whether it reads the references of a prompt, and whether it can score without."""
    groupwise: bool = False
    """Whether a score depends on the other samples of the same prompt, which are then scored together."""
    batches: tuple[str, ...] = ()
    """Options that set the number of items of a forward pass. On machines where the number changes scores, it is 1."""
    also: tuple[str, ...] = ()
    """Other names under which reward services offer it."""
    wire: Mapping[str, str] = field(default_factory=lambda: NOTHING)
    """Names of scores that differ in a service's answers, by the name here."""
    served: Mapping[str, Any] = field(default_factory=lambda: NOTHING)
    """Defaults of options that differ in a reward service, whose scores have the names and the arithmetic of cosmos-rl.
    """
    evidence: Literal["real weights", "tiny weights", "protocol"] | None = None
    """Weights with which it was run: ``real weights`` (or it needs none); ``tiny weights``, random ones of the true
    architecture; ``protocol``: no weights, only its protocol and its loading code are tested. None: not stated."""
    names_checked: bool = False
    """Whether the mapping of the names of its weights was checked against the original implementation."""
