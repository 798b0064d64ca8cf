"""Similarity to the prompt's references by DINOv2: the cosine of the embeddings of two pictures.

It distinguishes things of one kind better than CLIP, whose embeddings are trained on texts.

Source: the metric DINO of DreamBooth, arXiv:2208.12242, section 4.2, with DINOv2, arXiv:2304.07193, in place of DINO.
"""

from collections.abc import Sequence
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from cosmos_rl_core.config.base import NOT_IDENTITY, UserPath
from cosmos_rl_core.config.reward_facts import Facts
from cosmos_rl_core.config.train import RewardOptions
from cosmos_rl_core.datasets._base import Prompt
from cosmos_rl_core.errors import ConfigError
from cosmos_rl_core.rewards._base import Sample
from cosmos_rl_core.rewards._embeddings import Embeddings, embedded, packages, resolve, similarities
from cosmos_rl_core.storage.file_digests import files_digest
from cosmos_rl_core.vlms import _folders

FILES = ("config.json", "preprocessor_config.json")


class Options(RewardOptions):
    """The DINOv2 model."""

    facts = Facts(
        scores={"dino_similarity": "cosine in [-1, 1]"},
        source="DINO of DreamBooth, arXiv:2208.12242, section 4.2, with DINOv2, arXiv:2304.07193, in place of DINO",
        torch=True,
        references="needed",
        batches=("batch_size",),
        evidence="tiny weights",
        names_checked=True,
    )
    name: Literal["dino_similarity"] = "dino_similarity"  # pyright: ignore[reportIncompatibleVariableOverride]
    model: UserPath = Field(default="facebook/dinov2-base", min_length=1, json_schema_extra=NOT_IDENTITY)
    """Folder of the DINOv2 model in the layout of transformers, or its name on the Hugging Face hub, ``owner/name`` or
    ``owner/name@revision``, which is in the local cache. Scores depend on its files, not on their path."""
    batch_size: int = Field(default=8, ge=1)
    """Number of images in every forward pass; fewer are padded. Part of the identity, because it changes the last
    bits."""
    param_dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of the weights and of the computations of the model. The cosines are float64."""


class Reward:
    """Score ``dino_similarity``: the mean cosine of a sample's frames with its prompt's references."""

    def __init__(self, options: Options) -> None:
        self._options = options

    @cached_property
    def version(self) -> str:
        """Return the versions of the packages and the digest of all files that decide embeddings.

        Raises :class:`ConfigError` if a file is missing.
        """
        files = {name: Path(self._folder, name) for name in (*FILES, *_folders.weight_files(self._folder))}
        if missing := [str(path) for path in files.values() if not path.is_file()]:
            raise ConfigError(
                f"a DINOv2 model needs {', '.join(missing)}; fetch {'it' if len(missing) == 1 else 'them'}"
            )
        return f"{packages()}, sha256:{files_digest(files)[:16]}"

    def check_prompt(self, prompt: Prompt) -> str | None:
        """Return None: every prompt with a reference can be scored."""
        return None

    def score(self, samples: list[Sample]) -> list[dict[str, float] | Exception]:
        """Return each sample's scores by name, or the error that says why it has none, in order."""
        found = similarities(self, samples)
        return [one if isinstance(one, Exception) else {"dino_similarity": one} for one in found]

    def images(self, samples: Sequence[Sample]) -> list[Embeddings]:
        """Return the embeddings of each sample's frames, float64 ``[frames, dimensions]``, or the sample's error."""
        return embedded(samples, self._options.batch_size, lambda frames: [*self._model.images(frames)])

    @cached_property
    def _folder(self) -> str:
        return resolve(self._options.model, "a DINOv2 model of transformers")

    @cached_property
    def _model(self) -> Any:
        # Imported here, so that planning never loads torch.
        return import_module("cosmos_rl_core.rewards._dino.model").load(self._folder, self._options.param_dtype)
