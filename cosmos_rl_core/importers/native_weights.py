"""Conversion of weights of cosmos's own code, a ``.pt`` file, to a diffusers pipeline.

Also a command: ``python -m cosmos_rl_core.importers.native_weights FILE BASE TARGET``. Diffusers renames the tensors,
which must be exactly the tensors of the base's transformer.
"""

import hashlib
import json
import shutil
import sys
from pathlib import Path

import torch
from diffusers import CosmosTransformer3DModel
from diffusers.loaders.single_file_utils import convert_cosmos_transformer_checkpoint_to_diffusers

from cosmos_rl_core.errors import ConfigError, CosmosRLError, visible
from cosmos_rl_core.importers import pickled_tensors
from cosmos_rl_core.pipelines import directories

PIPELINE_CLASS = "Cosmos2_5_PredictBasePipeline"
_SHOWN = 1000
"""Maximum characters of PyTorch's list of names and shapes that differ."""


def import_weights(weights: Path, base: str, target: Path) -> str:
    """Write to ``target`` the pipeline ``base`` with the transformer's weights from a file; return the file's sha256.

    ``imported_from.json`` in ``target`` records the file. Raises :class:`ConfigError` if names or shapes of the file's
    tensors differ from the base's transformer.
    """
    source = Path(directories.resolve_path(base))
    if (found := directories.pipeline_class(source)) != PIPELINE_CLASS:
        raise ConfigError(f"{base} is a {found}; weights can be imported into a {PIPELINE_CLASS}")
    if target.exists():
        raise ConfigError(f"{target} exists already; name a directory that does not")
    with torch.device("meta"):
        config = directories.read_json(source, "transformer", "config.json")
        transformer = CosmosTransformer3DModel.from_config(config)
    assert isinstance(transformer, CosmosTransformer3DModel)
    tensors = convert_cosmos_transformer_checkpoint_to_diffusers(
        pickled_tensors.read(weights, "a .pt file of cosmos's own code")
    )
    try:
        transformer.load_state_dict(tensors, assign=True)
    except RuntimeError as error:
        found = str(error)[:_SHOWN]
        raise ConfigError(f"{weights} is not of the base's architecture: {found}") from error
    with weights.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    partial = target.with_name(f".{target.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    replaced = source / "transformer"
    shutil.copytree(source, partial, ignore=lambda at, names: names if Path(at) == replaced else [])
    transformer.save_pretrained(partial / "transformer")
    origin = json.dumps({"file": weights.name, "sha256": digest})
    (partial / directories.ORIGIN).write_text(origin, encoding="utf-8")
    partial.rename(target)
    return digest


def main(arguments: list[str]) -> int:
    """Run the command with arguments ``FILE BASE TARGET``; return the exit code."""
    weights, base, target = arguments
    try:
        digest = import_weights(Path(weights), base, Path(target))
    except CosmosRLError as error:
        print(visible(str(error)), file=sys.stderr)
        return error.exit_code
    print(visible(f"{target}: {base} with the weights of {weights}, sha256 {digest}"))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
