"""Names that a plugin for datasets of conversations imports: its options, and the rows that it yields."""

from cosmos_rl_core.chat_datasets._base import (
    ChatDatasetPlugin,
    Message,
    Row,
    part_of,
    refused,
    row,
    text_part,
)
from cosmos_rl_core.config.vlm.chat_datasets import ChatDatasetOptions

__all__ = ["ChatDatasetOptions", "ChatDatasetPlugin", "Message", "Row", "part_of", "refused", "row", "text_part"]
