"""Text embeddings, once: the only stage that loads text encoders."""

from safetensors.torch import load as load_tensors

from cosmos_rl_core import shards
from cosmos_rl_core.errors import ArtifactError
from cosmos_rl_core.models._base import PREFIX, Conditioning
from cosmos_rl_core.policy_weights import to_bytes
from stages import contracts
from stages.artifacts import Artifact
from stages.context import Context
from stages.contracts import Input, Request
from stages.layouts import tar_of
from stages.loading import load_model
from stages.members import KEPT_BYTES, Members
from stages.samples import cut

NEGATIVE = "_negative"
"""The id under which the negative prompt is stored, for guidance; no prompt's own id begins so."""
EMPTY = "_empty"
"""The id of the empty prompt, for dropping texts; stored where it is not the negative one anyway."""


def run(request: Request, context: Context) -> dict[str, int]:
    """Write ``embeddings/<n>.tar`` of ``<prompt id>.safetensors`` and ``index.json`` (prompt id to shard)."""
    config = request.config
    assert isinstance(config, contracts.Embed)
    prefix = (PREFIX,) if config.prefixed else ()
    model = load_model(config.model, ("text", *config.model.guardrail, *prefix), context.ranks.device)
    negative = model.negative_prompt if config.negative_prompt is None else config.negative_prompt
    unconditional = {NEGATIVE: negative} | ({EMPTY: ""} if negative else {})
    texts = {prompt.id: prompt.text for prompt in config.prompts}
    all_ids = [*texts, *unconditional]
    layout = context.layout({"shards": cut(all_ids, config.prompts_per_shard)})["shards"]

    def encode(ids: list[str]) -> bytes:
        prompts, length = [i for i in ids if i in texts], config.max_prompt_length
        encoded = dict(zip(prompts, model.encode_prompts([texts[i] for i in prompts], length), strict=True))
        encoded |= {i: model.encode_negative(unconditional[i], length) for i in ids if i in unconditional}
        return shards.pack({f"{i}.safetensors": to_bytes(encoded[i]) for i in ids})

    for index in range(context.ranks.rank, len(layout), context.ranks.world_size):
        context.progress("embedding", index, len(layout))
        name, ids = _name(index), layout[index]
        context.attempt.shard(index, lambda name=name, ids=ids: {name: encode(ids)}, check=tar_of(name, ids))
    if context.ranks.rank == 0:
        shard_of = {prompt_id: index for index, ids in enumerate(layout) for prompt_id in ids}
        context.attempt.put_json("index.json", shard_of)
    return {"prompts": len(all_ids)}


def _name(index: int) -> str:
    return f"embeddings/{index:05d}.tar"


class Embeddings:
    """Conditioning by prompt id, unbatched, on the CPU, each read when it is asked for.

    At most ``kept_bytes`` stay in memory. Raises :class:`ArtifactError` at once if one of ``prompt_ids`` was not
    embedded.
    """

    def __init__(self, source: Input, prompt_ids: list[str], kept_bytes: int = KEPT_BYTES) -> None:
        artifact = Artifact(source)
        self._members, self._places = Members(artifact, kept_bytes), _places(artifact, prompt_ids)

    def __getitem__(self, prompt_id: str) -> Conditioning:
        return load_tensors(self._members.read(*self._places[prompt_id]))


def _places(artifact: Artifact, prompt_ids: list[str]) -> dict[str, tuple[str, str]]:
    """Shard and member of each of ``prompt_ids``. Raises :class:`ArtifactError` if one of them was not embedded."""
    shard_of: dict[str, int] = artifact.json("index.json")
    stored = {i: NEGATIVE if i == EMPTY and EMPTY not in shard_of else i for i in prompt_ids}
    if missing := sorted(set(stored.values()) - set(shard_of)):
        raise ArtifactError(
            f"{artifact.url} has no embedding of {', '.join(missing[:5])}; embed the prompts of this plan"
        )
    return {prompt_id: (_name(shard_of[name]), f"{name}.safetensors") for prompt_id, name in stored.items()}
