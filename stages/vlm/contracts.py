"""The settings of the stages that train a vision-language model (VLM)."""

from collections.abc import Sequence
from typing import Any, ClassVar, Literal

from pydantic import Field

from cosmos_rl_core.config.base import NOT_IDENTITY, Section
from cosmos_rl_core.config.policy import LoraConfig
from cosmos_rl_core.config.shared import StageConfig, Trains
from cosmos_rl_core.config.vlm.chat_datasets import AnyChatDataset
from cosmos_rl_core.errors import DatasetError

PACKAGE = "stages.vlm"
SHOWN = 10
"""Most rows that an error names."""
_UNUSABLE = "unusable.parquet"


class VlmRef(Section):
    """The base model: its place, its identity, and its processing of media."""

    path: str = Field(json_schema_extra=NOT_IDENTITY)
    """Folder of the model in the format of transformers."""
    digest: str
    """Digest of the files that decide its answers, pinned by the plan."""
    changes: dict[Literal["image", "video"], dict[str, Any]] = {}
    """Settings of image and video processing that replace the folder's."""


class LeavesOut(StageConfig):
    """The settings of every stage that leaves out rows or conversations that it cannot use."""

    max_left_out: float = Field(default=0.05, json_schema_extra=NOT_IDENTITY)
    """Share of all rows or conversations that may be left out. Affects success, not the result."""

    def refuse_too_many(self, left_out: Sequence[dict[str, Any]], total: int, noun: str) -> None:
        """Raise :class:`DatasetError` if a greater share than ``max_left_out`` is left out, or everything."""
        if len(left_out) <= self.max_left_out * total and len(left_out) < max(total, 1):
            return
        shown = "".join(f"\n  {row['source']}, {row['name']}: {row['reason']}" for row in left_out[:SHOWN])
        more = f"\n  and {len(left_out) - SHOWN} more" if len(left_out) > SHOWN else ""
        raise DatasetError(
            f"{len(left_out)} of {total} {noun} cannot be used, and max_left_out = {self.max_left_out:g}; mend or "
            f"remove them, or raise the limit:{shown}{more}"
        )


class VlmIndex(LeavesOut):
    """The conversations of datasets, with the digests of their media, and the rows that cannot be used."""

    name = "vlm_index"
    package = PACKAGE
    version = 2
    torch = False
    CONVERSATIONS: ClassVar[str] = "conversations.parquet"
    """One row per conversation: its messages as JSON, and the digests of its media."""
    LEFT_OUT: ClassVar[str] = _UNUSABLE
    """One row per row of a dataset that cannot be used, with every reason."""
    sources: dict[str, AnyChatDataset]
    """The datasets, by the names that people give them."""
    files_digest: str
    """Digest of the files with the texts, when the Request was made."""
    places: dict[str, str] = Field(default={}, json_schema_extra={"neutral": {}})
    """Digest of the folder of a dataset's media, by dataset. Files in another folder may have equal names and texts,
    but show something else."""
    rows_per_shard: int = 256
    """Rows in one shard: the unit that a retry keeps."""


class VlmTokenize(LeavesOut):
    """Tokens and labels of the conversations of an index.

    Conversations that are in an ``earlier`` artifact with equal settings are copied from it.
    """

    name = "vlm_tokenize"
    package = PACKAGE
    version = 1
    distributed = True
    inputs = {"index": "one", "earlier": "many"}
    INDEX: ClassVar[str] = "tokens.parquet"
    """One row per conversation: id, source, numbers of tokens and labels, what was cut off, and its place in shards."""
    TOKENS: ClassVar[str] = "tokens/"
    """Folder of the shards: tokens, ranges of labels, and the media with the ranges of their tokens."""
    LEFT_OUT: ClassVar[str] = _UNUSABLE
    """One row per conversation that cannot be used, with the reason."""
    vlm: VlmRef
    sources: dict[str, AnyChatDataset] = Field(json_schema_extra=NOT_IDENTITY)
    """Datasets whose plugins open the media, by name. A medium that changed since it was indexed is refused."""
    turns: Literal["all", "last"] = "all"
    """Whether every answer has labels, or only the last one."""
    max_length: int
    """Most tokens of a conversation; the rest is cut off."""
    conversations_per_shard: int = 64
    """Conversations in one shard: the unit that a retry keeps."""


class OfVlm(StageConfig):
    """The settings of every stage that has a VLM with the weights of a policy."""

    vlm: VlmRef
    lora: LoraConfig | None
    trains: tuple[Literal["vision", "projector", "language"], ...]
    """The parts of the model that train, or that adapters lie on."""


class VlmPolicy(OfVlm):
    """Policy version 0 in the part ``current``: the trainable weights of the base, or fresh adapters."""

    name = "vlm_policy"
    package = PACKAGE
    version = 1


class VlmFinetune(OfVlm, Trains):
    """Training of policy k to policy k + 1, by supervised steps on conversations."""

    name = "vlm_finetune"
    package = PACKAGE
    version = 4
    distributed = True
    inputs = {"policy": "one", "tokens": "one"}
    param_dtype: Literal["float32", "bfloat16"] = "float32"
    """Type that the model computes in; weights, losses and sums of gradients are float32."""
    sources: dict[str, AnyChatDataset] = Field(json_schema_extra=NOT_IDENTITY)
    """Where the media are, by the names of their datasets."""
    weights: dict[str, float] = Field(default={}, json_schema_extra={"neutral": {}})
    """Shares of conversations that are drawn from each dataset; without any, all are drawn equally often."""
    batch_size: int
    """Conversations of one optimizer step, over all ranks."""
    row_length: int
    """Most tokens of a row of packed conversations. A longer conversation has a row of its own."""
    balance_dp_token: bool = True
    """Whether the loss is the mean over all labels of the step, as in cosmos-rl; otherwise the mean of rows."""


class VlmEvaluate(OfVlm):
    """Losses and answers of a policy on held-out conversations."""

    name = "vlm_evaluate"
    elastic = True
    package = PACKAGE
    version = 5
    distributed = True
    inputs = {"policy": "one", "tokens": "one"}
    reader = measures = "evaluated"
    ANSWERS: ClassVar[str] = "held_out.parquet"
    """One row per conversation: the sum of its losses, its last answer, and the one that the policy gives."""
    SHOWN: ClassVar[str] = "shown.json"
    """Questions that a report shows, with small pictures; written only if answers are generated."""
    param_dtype: Literal["float32", "bfloat16"] = "float32"
    """Type that the model computes in."""
    sources: dict[str, AnyChatDataset] = Field(json_schema_extra=NOT_IDENTITY)
    """Where the media are, by the names of their datasets."""
    max_new_tokens: int
    """Most tokens of a generated answer; 0 generates none. An answer that is cut off there is not correct."""
    parsers: dict[str, str] = {}
    """Regular expressions by dataset. A generated answer is correct if its first group equals the expected answer's.
    Without an expression, the answers must be equal, except for white space around them."""
    conversations_per_shard: int = 16
    """Conversations in one shard: the unit that a retry keeps."""


class VlmExport(OfVlm):
    """The policy as transformers loads it: a folder like the base's, or an adapter of peft."""

    name = "vlm_export"
    package = PACKAGE
    version = 1
    inputs = {"policy": "one"}


CONTRACTS: tuple[type[StageConfig], ...] = (VlmIndex, VlmTokenize, VlmPolicy, VlmFinetune, VlmEvaluate, VlmExport)
