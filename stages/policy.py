"""Policy version 0, and how every version lies on disk: ``<part>/<n>.safetensors``, cut by name and size alone."""

from torch import Tensor, nn

from cosmos_rl_core import pipelines
from cosmos_rl_core.config.policy import LoraConfig
from cosmos_rl_core.errors import ArtifactError
from cosmos_rl_core.models._loading import initialise
from cosmos_rl_core.policy_weights import CURRENT, PolicyWeights, cut, from_bytes, initial_lora, prepare, to_bytes
from cosmos_rl_core.seeds import derive
from stages import contracts
from stages.artifacts import Artifact, Attempt
from stages.contracts import Input, ModelRef, Request
from stages.loading import load_model
from stages.runner import Context


def run(request: Request, context: Context) -> dict[str, int]:
    """Write the part ``current``: the base's weights, fresh adapters on it, or fresh weights altogether."""
    config = request.config
    assert isinstance(config, contracts.Policy)
    _check_base(config.model)
    model = load_model(config.model, ("transformer",), context.ranks.device)
    if config.from_scratch:
        initialise(model.transformer, derive(request.seed, "transformer"))
    weights = prepare(model.transformer, config.lora, reference=False)
    if config.lora is not None:
        shapes = {name: tuple(parameter.shape) for name, parameter in weights.parameters.items()}
        weights.load(CURRENT, initial_lora(shapes, config.lora, derive(request.seed, "policy")))
    write_part(context.attempt, CURRENT, weights.get(CURRENT))
    return {"trainable": sum(parameter.numel() for parameter in weights.parameters.values())}


def _check_base(ref: ModelRef) -> None:
    found = pipelines.pipeline_digest(pipelines.resolve_path(ref.path))
    if found != ref.digest:
        raise ArtifactError(
            f"the pipeline at {ref.path} is not the one that was planned: digest {found}, planned {ref.digest}"
        )


def write_part(attempt: Attempt, part: str, tensors: dict[str, Tensor]) -> None:
    """Write one part's files."""
    for index, chunk in enumerate(cut(tensors)):
        attempt.put(f"{part}/{index:05d}.safetensors", to_bytes(chunk))


def read_part(source: Input, part: str) -> dict[str, Tensor]:
    """One part's tensors, on the CPU; empty if the policy has no such part."""
    artifact = Artifact(source)
    tensors: dict[str, Tensor] = {}
    for name in artifact.names(f"{part}/"):
        tensors |= from_bytes(artifact.read(name))
    return tensors


def load_policy(transformer: nn.Module, lora: LoraConfig | None, source: Input, *, reference: bool) -> PolicyWeights:
    """Make ``transformer`` trainable with ``source.part`` as the live weights."""
    weights = prepare(transformer, lora, reference=reference)
    weights.load(CURRENT, read_part(source, source.part))
    return weights
