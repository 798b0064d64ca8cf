"""Settings of datasets of conversations."""

from typing import Annotated

from pydantic import Field, SerializeAsAny

from cosmos_rl_core.config.base import NOT_IDENTITY, Section, UserPath, plugin_options


class ChatDatasetOptions(Section):
    """Base of the ``Options`` of every dataset of conversations."""

    plugin = ("chat_datasets", "name")
    name: str
    """The format: the name of a file in ``cosmos_rl_core/chat_datasets``, or of a plugin from outside."""
    media_path: UserPath = Field(default="", json_schema_extra=NOT_IDENTITY)
    """Folder or URL to which the names of media are relative. Default: names are absolute."""
    system_prompt: str = ""
    """System text of conversations that have none. Default: none."""


AnyChatDataset = Annotated[SerializeAsAny[ChatDatasetOptions], plugin_options(ChatDatasetOptions)]
