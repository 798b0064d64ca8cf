"""Text embeddings of prompts. The only stage that loads text encoders."""

from cosmos_rl_core.models._loading import PREFIX
from cosmos_rl_core.storage import shards
from cosmos_rl_core.weights.policy_weights import to_bytes
from stages import contracts
from stages.artifacts.layouts import cut, tar_of
from stages.artifacts.request import Request
from stages.context import Context
from stages.formats.embeddings import EMPTY, INDEX, NEGATIVE, shard_name
from stages.training.loading import load_model


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
        name, ids = shard_name(index), layout[index]
        context.attempt.shard(index, lambda name=name, ids=ids: {name: encode(ids)}, check=tar_of(name, ids))
    if context.ranks.rank == 0:
        shard_of = {prompt_id: index for index, ids in enumerate(layout) for prompt_id in ids}
        context.attempt.put_json(INDEX, shard_of)
    return {"prompts": len(all_ids)}
