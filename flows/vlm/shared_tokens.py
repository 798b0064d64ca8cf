"""Tokens that runs of a store share: artifacts from which conversations that stayed equal are taken."""

from collections.abc import Iterator

from cosmos_rl_core.canonical import digest
from cosmos_rl_core.errors import ArtifactError, ConfigError
from cosmos_rl_core.storage import store
from flows.planning.plan import read_plan
from stages.artifacts.manifest import Manifest
from stages.artifacts.request import Input, Request
from stages.artifacts.slots import input_of, named_manifest, standing

EARLIER = "earlier"
"""Role of such artifacts."""
MOST = 8
"""Artifacts that are looked through."""


def earlier_of(store_url: str, request: Request) -> tuple[Input, ...]:
    """Return the artifacts that the stage ``vlm_tokenize`` takes equal conversations from.

    Of tokens that stand these are the ones that they were made with, so that later ones of other runs end nothing.
    """
    _, made = standing(request.slot)
    if made is not None:
        return made.inputs.get(EARLIER, ())
    settings = digest(request.config.identity())
    slots = dict.fromkeys(slot for slot in _slots_of_runs(store_url) if slot != request.slot)
    found = (_tokens_in(slot) for slot in slots)
    same = [
        one for one in found if one is not None and digest(one.config) == settings and one.version == request.version
    ]
    return tuple(input_of(one.slot) for one in same[-MOST:])


def reached_from(slot: str) -> Iterator[str]:
    """Yield the slots of all earlier tokens that those of a slot were made with, and that these were made with."""
    try:
        _, made = standing(slot)
        left = [*made.inputs.get(EARLIER, ())] if made is not None else []
        while left:
            source = left.pop()
            yield source.url
            left += named_manifest(source).inputs.get(EARLIER, ())
    except ArtifactError:
        # `audit` of the run says what is wrong; until then nothing more is known to be read.
        return


def _slots_of_runs(store_url: str) -> Iterator[str]:
    """Yield the slots of the tokens of every run of the store, planned or made."""
    # Both import this file.
    from flows.vlm.plan import VlmPlan  # noqa: PLC0415
    from flows.vlm.run import VlmRun  # noqa: PLC0415

    for name in sorted(store.names(store.join(store.absolute(store_url), "runs"))):
        try:
            plan = read_plan(store_url, name)
        except (ConfigError, ArtifactError):
            continue
        if isinstance(plan, VlmPlan):
            yield from VlmRun(plan, store_url).token_slots


def _tokens_in(slot: str) -> Manifest | None:
    try:
        return standing(slot)[1]
    except ArtifactError:
        return None
