"""Weights as the stock diffusers pipelines read them: a LoRA file, or a complete pipeline directory.

Files come as chunks of their bytes, and tensors are asked for one at a time: no model is ever in memory as a whole.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from safetensors import safe_open
from torch import Tensor

from cosmos_rl_core.config.policy import LoraConfig
from cosmos_rl_core.errors import ArtifactError
from cosmos_rl_core.pipelines import directories
from cosmos_rl_core.storage.tensor_files import Spec, dtype_of, file_of, spec_of
from cosmos_rl_core.storage.tensor_headers import num_bytes, read_header
from cosmos_rl_core.weights import lora
from cosmos_rl_core.weights.policy_weights import cut

File = tuple[str, Iterable[bytes | memoryview]]
"""Relative path, and the bytes in chunks."""

MAX_FILE_BYTES = 5 * 10**9
"""A base with a larger file of transformer weights is cut anew, into files whose tensors sum to at most this."""

_COPIED_BYTES = 2**23


def lora_files(tensors: Mapping[str, Tensor], config: LoraConfig) -> Iterator[File]:
    """Adapter tensors (a policy part) as files, for the stock
    ``load_lora_weights(folder, weight_name="model.safetensors", adapter_name="default")``.

    Rank and alpha, of single modules too, travel in the file's one metadata entry: without it diffusers takes the rank
    for alpha, and the adapter has the wrong strength. ``adapter_config.json`` says the same for other readers. Each
    tensor is asked for twice: for the file's header, and for its bytes.
    """
    adapted = {name.rpartition(".lora_")[0] for name in tensors}
    settings = lora.peft_settings(config, lora.targets(config, adapted))
    prefix = f"{directories.TRANSFORMER}."
    metadata = json.dumps({prefix + name: value for name, value in settings.items()}, sort_keys=True)
    specs = {prefix + name: spec_of(tensors[name]) for name in tensors}
    adapter_config = {"peft_type": "LORA", "bias": "none", "inference_mode": True, **settings}
    yield (
        "lora/model.safetensors",
        file_of(specs, lambda name: tensors[name.removeprefix(prefix)], {"lora_adapter_metadata": metadata}),
    )
    yield "lora/adapter_config.json", [(json.dumps(adapter_config, indent=2, sort_keys=True) + "\n").encode()]


def full_pipeline(base: str, tensors: Mapping[str, Tensor], max_file_bytes: int = MAX_FILE_BYTES) -> Iterator[File]:
    """The pipeline directory ``base`` with transformer weights replaced by ``tensors`` (a full fine-tuning part).

    The transformer keeps base's number types and every tensor that is not trained, such as buffers; and its cut into
    files, unless one of them is larger than ``max_file_bytes``. Other spellings of its weights (pickles, half-precision
    variants) would still be the base model's and are left out.

    Raises :class:`ArtifactError` for tensors that base has no place for, or of other shapes.
    """
    stored = _Stored(base)
    unknown = sorted(tensors.keys() - stored.specs.keys())
    if unknown:
        raise ArtifactError(f"{len(unknown)} tensors have no place in the transformer of {base!r}, e.g. {unknown[0]}")
    for name in directories.pipeline_files(base):
        folder, _, file = name.partition("/")
        if folder != directories.TRANSFORMER or file == "config.json":
            yield name, _copied(Path(base, name))

    def merged(name: str) -> Tensor:
        if name not in tensors:
            return stored.read(name)
        tensor, (dtype, shape) = tensors[name], stored.specs[name]
        if tuple(tensor.shape) != shape:
            raise ArtifactError(f"{name} is {list(tensor.shape)}, expected {list(shape)}")
        return tensor.to("cpu", dtype_of(dtype))

    files = stored.files if max(stored.sizes.values()) <= max_file_bytes else _cut(stored.specs, max_file_bytes)
    for file, names in files.items():
        specs = {name: stored.specs[name] for name in names}
        yield f"{directories.TRANSFORMER}/{file}", file_of(specs, merged, {"format": "pt"})
    index = f"{directories.WEIGHTS}.index.json"
    if files is not stored.files:
        yield f"{directories.TRANSFORMER}/{index}", [_index(files, stored.specs)]
    elif list(files) != [directories.WEIGHTS]:
        yield f"{directories.TRANSFORMER}/{index}", _copied(Path(base, directories.TRANSFORMER, index))


class _Stored:
    """The transformer's tensors as ``base`` has them."""

    def __init__(self, base: str) -> None:
        self.files: dict[str, list[str]] = {}
        """Names of the tensors of each file."""
        self.sizes: dict[str, int] = {}
        """Bytes of each file."""
        self.specs: dict[str, Spec] = {}
        self._paths: dict[str, Path] = {}
        for file in directories.transformer_files(base):
            path = Path(base, directories.TRANSFORMER, file)
            with path.open("rb") as stream:
                entries = read_header(stream)
            self.sizes[file] = path.stat().st_size
            self.files[file] = [entry.name for entry in entries]
            self.specs |= {entry.name: (entry.dtype, entry.shape) for entry in entries}
            self._paths |= {entry.name: path for entry in entries}

    def read(self, name: str) -> Tensor:
        """One tensor."""
        with safe_open(self._paths[name], framework="pt") as file:
            return file.get_tensor(name)


def _cut(specs: Mapping[str, Spec], max_file_bytes: int) -> dict[str, list[str]]:
    """Names of the tensors of each file, and the files' names as diffusers gives them."""
    cuts = cut({name: num_bytes(*spec) for name, spec in specs.items()}, max_file_bytes)
    stem, _, extension = directories.WEIGHTS.rpartition(".")
    return {f"{stem}-{n:05d}-of-{len(cuts):05d}.{extension}": names for n, names in enumerate(cuts, start=1)}


def _index(files: Mapping[str, list[str]], specs: Mapping[str, Spec]) -> bytes:
    """Which file each tensor is in, as diffusers reads it."""
    places = {name: file for file, names in files.items() for name in names}
    total = sum(num_bytes(*spec) for spec in specs.values())
    return (
        json.dumps({"metadata": {"total_size": total}, "weight_map": places}, indent=2, sort_keys=True) + "\n"
    ).encode()


def _copied(file: Path) -> Iterator[bytes]:
    with file.open("rb") as stream:
        while block := stream.read(_COPIED_BYTES):
            yield block
