"""Text embeddings of prompts. The only stage that loads text encoders."""

from collections.abc import Iterator

from cosmos_rl_core.models._base import Conditioning
from cosmos_rl_core.models._loading import PREFIX
from stages import contracts
from stages.artifacts.request import Request
from stages.context import Context
from stages.formats.parts import Parts
from stages.formats.prepared import EMBEDDINGS, EMPTY, NEGATIVE, PROMPTS, write_shards
from stages.training.loading import load_model


def run(request: Request, context: Context) -> dict[str, int]:
    """Write ``embeddings/<n>.tar`` of ``<prompt id>.safetensors`` and ``index.json`` (prompt id to shard)."""
    config = request.settings(contracts.Embed)
    components = ("text", *config.model.guardrail, *((PREFIX,) if config.prefixed else ()))
    model = load_model(config.model, components, context.ranks.device)
    negative = model.negative_prompt if config.negative_prompt is None else config.negative_prompt
    unconditional = {NEGATIVE: negative} | ({EMPTY: ""} if negative else {})
    texts = {prompt.id: prompt.text for prompt in config.prompts} | _captions(request)
    all_ids = [*texts, *unconditional]

    def encode(ids: list[str]) -> Iterator[tuple[str, Conditioning]]:
        prompts, length = [i for i in ids if i in texts], config.max_prompt_length
        yield from zip(prompts, model.encode_prompts([texts[i] for i in prompts], length), strict=True)
        yield from ((i, model.encode_negative(unconditional[i], length)) for i in ids if i in unconditional)

    layout = write_shards(context, EMBEDDINGS, all_ids, config.prompts_per_shard, encode)
    if context.ranks.rank == 0:
        shard_of = {i: number for number, ids in enumerate(layout) for i in ids}
        context.attempt.put_json(PROMPTS, shard_of)
    return {"prompts": len(all_ids)}


def _captions(request: Request) -> dict[str, str]:
    """Return the captions that the last of the parts adds, by prompt id; none without parts."""
    if not request.inputs.get("parts"):
        return {}
    new = Parts.of(request).added("prompt_id")
    return dict(zip(new["prompt_id"], new["caption"], strict=True))
