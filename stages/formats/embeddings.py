"""Text embeddings by prompt id: ``embeddings/<n>.tar`` of ``<prompt id>.safetensors``, and ``index.json``."""

from safetensors.torch import load as load_tensors

from cosmos_rl_core.errors import ArtifactError
from cosmos_rl_core.models._base import Conditioning
from stages.artifacts.artifact import Artifact
from stages.artifacts.request import Input
from stages.formats.members import KEPT_BYTES, Members

INDEX = "index.json"
"""The number of the shard of each prompt id."""
NEGATIVE = "_negative"
"""The id of the negative prompt, for guidance. No prompt id begins with an underscore."""
EMPTY = "_empty"
"""The id of the empty prompt, for text dropout. Stored only if the negative prompt is not empty."""


def shard_name(index: int) -> str:
    """Return the name of a shard of embeddings."""
    return f"embeddings/{index:05d}.tar"


class Embeddings:
    """Conditioning by prompt id, unbatched, on the CPU, each read on access.

    At most ``kept_bytes`` stay in memory. Raises :class:`ArtifactError` at once if one of ``prompt_ids`` was not
    embedded.
    """

    def __init__(self, source: Input, prompt_ids: list[str], kept_bytes: int = KEPT_BYTES) -> None:
        artifact = Artifact(source)
        self._members, self._places = Members(artifact, kept_bytes), _places(artifact, prompt_ids)

    def __getitem__(self, prompt_id: str) -> Conditioning:
        return load_tensors(self._members.read(*self._places[prompt_id]))


def _places(artifact: Artifact, prompt_ids: list[str]) -> dict[str, tuple[str, str]]:
    """Return the shard and member of each prompt id. Raises :class:`ArtifactError` if one was not embedded."""
    shard_of: dict[str, int] = artifact.json(INDEX)
    stored = {i: NEGATIVE if i == EMPTY and EMPTY not in shard_of else i for i in prompt_ids}
    if missing := sorted(set(stored.values()) - set(shard_of)):
        raise ArtifactError(
            f"{artifact.url} has no embedding of {', '.join(missing[:5])}; embed the prompts of this plan"
        )
    return {prompt_id: (shard_name(shard_of[name]), f"{name}.safetensors") for prompt_id, name in stored.items()}
