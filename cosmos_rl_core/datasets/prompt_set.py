"""The prompt sets that cosmos-rl knows by name, downloaded once into its cache folder.

The file of a set is ``$COSMOS_CACHE_DIR/diffusion_nft/<set>/train.txt``, or ``train_metadata.jsonl`` with metadata for
rewards (``geneval``). It is downloaded when a run is planned and its file is not there: from one commit, or for
``dance_grpo_t2v`` from a branch, which may change. The plan holds the prompts, so a run keeps its prompts.
"""

from pathlib import Path
from typing import Literal, NamedTuple, Self

from pydantic import Field, model_validator

from cosmos_rl_core.config.base import NOT_IDENTITY, UserPath
from cosmos_rl_core.config.train import DatasetOptions
from cosmos_rl_core.datasets import _downloads
from cosmos_rl_core.datasets._base import Prompt
from cosmos_rl_core.datasets._prompt_files import prompts_in
from cosmos_rl_core.errors import ConfigError
from cosmos_rl_core.storage import cache

DIFFUSION_NFT = "https://raw.githubusercontent.com/NVlabs/DiffusionNFT/9a84a8a1c8522a7865363f09e1b5d1d11c71c89a/dataset"
# A branch, because no commit is known to have this file: `plan` says that the prompts may change.
DANCE_GRPO = "https://raw.githubusercontent.com/XueZeyue/DanceGRPO/main/assets"


class Origin(NamedTuple):
    """Files of a set, and their place on the web."""

    base_url: str
    file: str = "{split}.txt"
    """Name of the set's file in the cache."""
    remote: str = "{split}.txt"
    """Name of the set's file at the URL."""
    lines: tuple[int, int] = (0, 0)
    """Lines of ``train`` and of ``test``; 0 if not known."""
    branch: str = ""
    """The branch from which the file is taken, if no commit is named."""


METADATA = "{split}_metadata.jsonl"
SETS = {
    "pickscore": Origin(f"{DIFFUSION_NFT}/pickscore", lines=(25_433, 2_048)),
    "ocr": Origin(f"{DIFFUSION_NFT}/ocr", lines=(0, 1_018)),
    "geneval": Origin(f"{DIFFUSION_NFT}/geneval", METADATA, METADATA, lines=(0, 2_212)),
    # Both splits read the only file of this set.
    "dance_grpo_t2v": Origin(DANCE_GRPO, remote="video_prompts.txt", lines=(50_000, 50_000), branch="main"),
}


class Options(DatasetOptions):
    """The set, and where its file is."""

    name: Literal["prompt_set"] = "prompt_set"  # pyright: ignore[reportIncompatibleVariableOverride]

    set: Literal["pickscore", "ocr", "geneval", "dance_grpo_t2v"]
    """The set. ``pickscore`` has prompts of people, ``ocr`` texts to draw between double quotes, ``geneval`` objects
    to show with their counts, colours and places as metadata, ``dance_grpo_t2v`` prompts for videos."""
    split: Literal["train", "test"] = "train"
    """The file of the set. Both files of ``dance_grpo_t2v`` are equal."""
    local_dir: UserPath = Field(default="", json_schema_extra=NOT_IDENTITY)
    """Folder with the files of the set. Nothing is downloaded then. Default: ``diffusion_nft/<set>`` in the folder
    that the environment variable ``COSMOS_CACHE_DIR`` names, or in ``~/.cache/cosmos_rl``."""
    base_url: str = Field(default="", json_schema_extra=NOT_IDENTITY)
    """URL of a folder with the files of the set, such as a mirror. Default: the set's own repository on GitHub, at one
    commit, or for ``dance_grpo_t2v`` at its branch ``main``."""
    sha256: str = Field(default="", pattern="^([0-9a-f]{64})?$", json_schema_extra=NOT_IDENTITY)
    """Digest that the bytes of the file must have. Default: the first download's digest, which is written next to
    it."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.local_dir and self.base_url:
            raise ValueError("local_dir and base_url: nothing is downloaded to local_dir; expected one of the two")
        return self

    @property
    def follows(self) -> tuple[str, ...]:
        """Return a sentence if the file is from a branch; none if it is from a commit or a folder, or has a digest."""
        if self.local_dir or self.base_url or self.sha256 or not SETS[self.set].branch:
            return ()
        return (f"set {self.set} is a file of the branch {SETS[self.set].branch}, which may change; state its sha256",)


def prompts(options: Options) -> tuple[Prompt, ...]:
    """Return the prompts of the split.

    Raises :class:`ConfigError` if the file is not whole, and :class:`UnavailableError` if it cannot be downloaded.
    """
    file = _file(options)
    return prompts_in(file.path, _downloads.read(file))


def _file(options: Options) -> _downloads.File:
    source = SETS[options.set]
    folder, url = Path(options.local_dir), ""
    if not options.local_dir:
        if (downloads := cache.of_cosmos_rl()) is None:
            raise ConfigError("there is no place for prompt sets; set COSMOS_CACHE_DIR, or local_dir of the dataset")
        folder = downloads / "diffusion_nft" / options.set
        base = (options.base_url or source.base_url).rstrip("/")
        url = f"{base}/{source.remote.format(split=options.split)}"
    lines = source.lines[options.split == "test"]
    return _downloads.File(folder / source.file.format(split=options.split), url, lines, options.sha256)
