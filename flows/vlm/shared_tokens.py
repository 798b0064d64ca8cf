"""Tokens that runs of a store share: artifacts from which conversations that stayed equal are taken."""

from collections.abc import Iterable, Iterator

from cosmos_rl_core.canonical import digest
from cosmos_rl_core.errors import ArtifactError
from stages.artifacts.manifest import Manifest
from stages.artifacts.request import Input, Request
from stages.artifacts.slots import current_of, input_of, named_manifest

EARLIER = "earlier"
"""Role of inputs from which equal conversations are taken."""
MOST = 8
"""Largest number of artifacts in which equal conversations are looked for."""


def earlier_of(request: Request, tokens_of_runs: Iterable[str]) -> tuple[Input, ...]:
    """Return the artifacts from which the stage ``vlm_tokenize`` takes equal conversations.

    ``tokens_of_runs`` are the slots of the tokens of every run of the store. A current artifact keeps the artifacts
    from which it was built, so tokens that other runs add later do not make it stale.
    """
    _, made = current_of(request.slot)
    if made is not None:
        return made.inputs.get(EARLIER, ())
    settings = digest(request.config.identity())
    slots = dict.fromkeys(slot for slot in tokens_of_runs if slot != request.slot)
    found = (_tokens_in(slot) for slot in slots)
    same = [
        one for one in found if one is not None and digest(one.config) == settings and one.version == request.version
    ]
    return tuple(input_of(one.slot) for one in same[-MOST:])


def reached_from(slot: str) -> Iterator[str]:
    """Yield the slots of earlier tokens that were copied into a slot's tokens, directly or through others."""
    try:
        _, made = current_of(slot)
        left = [*made.inputs.get(EARLIER, ())] if made is not None else []
        while left:
            source = left.pop()
            yield source.url
            left += named_manifest(source).inputs.get(EARLIER, ())
    except ArtifactError:
        # `audit` of the run reports the damage. Nothing beyond it is known to be read.
        return


def _tokens_in(slot: str) -> Manifest | None:
    try:
        return current_of(slot)[1]
    except ArtifactError:
        return None
