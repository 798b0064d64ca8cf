"""Rows of vision-language models for settings that need more than a new name."""

from typing import Any

from cosmos_rl_core.errors import ConfigError
from cosmos_rl_core.importers.cosmos_rl import chats, lengths
from cosmos_rl_core.importers.cosmos_rl.kinds import POLICY
from cosmos_rl_core.importers.cosmos_rl.rows import Answer, Upstream

DATASETS = f"{POLICY}.datasets"
OURS = f"{DATASETS}.{chats.NAME}"
OPTIONS = {"media_path": ("llava",), "system_prompt": ("llava", "hf_chat"), "conversation_column_name": ("hf_chat",)}
"""Options of a dataset, each with the formats that have it."""


def type_row(_: str, __: Any, upstream: Upstream) -> Answer:
    """Return the algorithm."""
    if upstream[f"{POLICY}.trainer_type"] not in (None, "sft"):
        raise ConfigError('needs trainer_type = "sft", the trainer of conversations')
    return {f"{POLICY}.type": "vlm_sft"}, "supervised fine-tuning of a vision-language model"


def lr_row(key: str, value: Any, _: Upstream) -> Answer:
    """Return the one learning rate; cosmos-rl can have one for each part of the model."""
    if not isinstance(value, list):
        return {key: value}
    if len(set(map(repr, value))) != 1:
        raise ConfigError("there is one learning rate for all parameters")
    return {key: value[0]}, "equal for all parts of the model"


def place_row(key: str, value: Any, upstream: Upstream) -> Answer:
    """Return where the texts of the dataset are, and their format."""
    name = chats.format_of(upstream)
    if name is None or key.rpartition(".")[2] != chats.PLACES[name]:
        return "the script does not read it"
    return {f"{OURS}.name": name, f"{OURS}.{chats.PLACES[name]}": value}


def option_row(key: str, value: Any, upstream: Upstream) -> Answer:
    """Return an option of the dataset, if its format has this option."""
    name, option = chats.format_of(upstream), key.rpartition(".")[2]
    if name not in OPTIONS[option]:
        return "the format of the dataset has none"
    return {f"{OURS}.{option}": value} if value else "there is none"


def named_row(_: str, value: Any, upstream: Upstream) -> Answer:
    """Return the dataset that the file names: a folder that ``save_to_disk`` wrote, or a dataset on a hub."""
    if chats.format_of(upstream) == "hf_chat":
        return {f"{OURS}.name": "hf_chat", f"{OURS}.path": value}
    example = f'[{OURS}] to {{ name = "hf_chat", path = "the folder" }}'
    return {DATASETS: None}, f"save the dataset with save_to_disk of Hugging Face's datasets, and set {example}"


def split_row(_: str, value: Any, upstream: Upstream) -> Answer:
    """Return the split of a dataset that the file names."""
    if chats.format_of(upstream) is None:
        return "the dataset is on a hub: save the split"
    splits = [split for split in (value if isinstance(value, list) else [value]) if split]
    if len(splits) > 1:
        raise ConfigError(f"a dataset has one split: give each a table [{DATASETS}.NAME]")
    return {f"{OURS}.split": splits[0]} if splits else "there is one split"


def unread_row(key: str, value: Any, _: Upstream) -> Answer:
    """Return why a key below ``[custom]`` has no effect, or refuse it: no script of Cosmos-Reason2 reads it."""
    if value == {}:
        return "an empty table"
    if not key.startswith(("custom.dataset", "custom.vision")):
        return "for scripts of the user, which are not run here"
    raise ConfigError("the scripts of Cosmos-Reason2's examples do not read it")


def validates_row(_: str, __: Any, upstream: Upstream) -> Answer:
    """Return the frequency of held-out losses; the user has to set the held-out conversations."""
    if not lengths.validates(upstream):
        return "there is no [validation]"
    why = "cosmos-rl takes the first test_size rows of training; here held-out data are files of their own: set it"
    return {"validation.freq": lengths.validation_iterations(upstream), "validation.datasets": None}, why


def epochs_between_saves_row(_: str, value: Any, __: Upstream) -> Answer:
    """Refuse a distance of saves that is counted in epochs."""
    if value:
        raise ConfigError("write the distance of saves in steps: save_freq")
    return "train.ckpt.save_freq sets it"


def unless_on(why: str) -> Any:
    """Return a row that refuses true, and otherwise has no effect."""

    def row(_: str, value: Any, __: Upstream) -> Answer:
        if value is True:
            raise ConfigError(f"set it to false: {why}")
        return "it is off"

    return row


def freezes_row(_: str, value: Any, __: Upstream) -> Answer:
    """Refuse patterns of the parameters to train or to freeze."""
    if value in (None, [], {}):
        return "nothing is frozen"
    raise ConfigError(f"set policy.trains to the parts that train, of {', '.join(PARTS)}, after leaving this key out")


def in_even_numbers(round_up: bool) -> Any:
    """Return a row for a number of frames, which ``qwen_vl_utils`` makes even."""

    def row(key: str, value: Any, _: Upstream) -> Answer:
        if isinstance(value, bool) or not isinstance(value, int) or value < 2:
            raise ConfigError("must be a whole number of at least 2")
        name = key.rpartition(".")[2]
        return {f"policy.media.video.{name}": value + value % 2 * (1 if round_up else -1)}

    return row


PARTS = ("vision", "projector", "language")
