"""Loading of a VLM with the weights of a policy."""

from typing import Any

import transformers
from torch import nn

from cosmos_rl_core.config.policy import LoraConfig
from cosmos_rl_core.conversations import segments
from cosmos_rl_core.errors import ArtifactError, ConfigError
from cosmos_rl_core.parallel import sharding
from cosmos_rl_core.parallel.distributed import Group
from cosmos_rl_core.parallel.precision import ParamDtype, half
from cosmos_rl_core.parallel.sharding import WHOLE, Shards
from cosmos_rl_core.vlms import _folders
from cosmos_rl_core.vlms._base import Processor, adapted, architecture, module_of
from cosmos_rl_core.vlms._prompts import Prompts
from cosmos_rl_core.vlms._weights import MappedWeights
from cosmos_rl_core.weights.policy_weights import PolicyWeights, prepare
from stages.execution.context import Context
from stages.vlm.contracts import OfVlm, VlmRef


def prompts_of(vlm: VlmRef) -> Prompts:
    """Return the maker of a VLM's inputs. Reads no weights."""
    changes: Any = vlm.changes
    return Prompts(vlm.path, changes)


def check_base(vlm: VlmRef) -> None:
    """Raise :class:`ArtifactError` if the files of the base are not the planned ones."""
    if (found := _folders.digest(vlm.path)) != vlm.digest:
        raise ArtifactError(
            f"the VLM at {vlm.path} differs from the planned one: digest {found}, planned {vlm.digest}; restore its "
            "files, or plan another run"
        )


def load(
    config: OfVlm, prompts: Prompts, context: Context[Group], param_dtype: ParamDtype, *, sharded: bool = True
) -> tuple[Any, PolicyWeights]:
    """Return the base model in float32, and its trainable weights: the base's, or adapters of zeros.

    Every rank maps the files, and copies the weights that it keeps straight to its device: all, or only its own rows if
    weights are sharded and ``sharded`` is true. Raises :class:`ArtifactError` if the files are not the planned ones,
    and :class:`ConfigError` if transformers lacks the architecture.
    """
    path, group = config.vlm.path, context.ranks
    check_base(config.vlm)
    name = architecture(path)
    if (cls := getattr(transformers, name, None)) is None:
        raise ConfigError(f"transformers {transformers.__version__} has no {name}, which {path!r} needs; upgrade it")
    base = MappedWeights(cls, path)
    model = base.empty_model()
    segments.use(model)

    def shard(module: nn.Module) -> Shards:
        shards, offload = WHOLE, sharded and group.parallelism.fsdp_offload
        tied = _tied(module)
        if group.mesh is not None and sharded:
            shards = sharding.shard(module, group.mesh, half(param_dtype), offload=offload)
        sharding.materialise(module, group.device, offload=offload)
        _tie(module, tied)
        base.move_into(module, shards)
        return shards

    processor = prompts.processor
    lora = None if config.lora is None else _adapters(config.lora, model, processor, config.trains)
    weights = prepare(
        model, lora, reference=False, shard=shard, trains=lambda name: module_of(processor, name) in config.trains
    )
    return model, weights


def _tied(model: nn.Module) -> list[list[str]]:
    """Return the lists of names of parameters that have several names."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return [some for some in names.values() if len(some) > 1]


def _tie(model: nn.Module, tied: list[list[str]]) -> None:
    """Tie parameters again: each list of names gets the parameter of its first name."""
    for first, *others in tied:
        for name in others:
            module, _, own = name.rpartition(".")
            setattr(model.get_submodule(module), own, model.get_parameter(first))


def _adapters(config: LoraConfig, model: nn.Module, processor: Processor, trains: tuple[str, ...]) -> LoraConfig:
    """Return the settings with the full names of adapted modules as ``target_modules``. Raises like :func:`adapted`."""
    linear = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    head = model.get_output_embeddings()  # pyright: ignore[reportCallIssue]
    output = next((name for name in linear if model.get_submodule(name) is head), "")
    return config.model_copy(update={"target_modules": tuple(adapted(config, linear, processor, output, trains))})
