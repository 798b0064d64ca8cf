"""Checks of the prompts that a dataset plugin returns."""

from collections import Counter
from typing import Any

from cosmos_rl_core.canonical import canonical_json
from cosmos_rl_core.datasets._base import Prompt


def checked_prompts(found: Any) -> tuple[Prompt, ...]:
    """Return the result ``found`` of a plugin's ``prompts`` as a tuple.

    Raises ``TypeError`` unless it holds prompts whose metadata is JSON, and ``ValueError`` if two prompts have the same
    id, by which samples are grouped.
    """
    if not isinstance(found, list | tuple):
        raise TypeError(f"prompts() must return a tuple of Prompt, found {type(found).__name__}")
    if wrong := next((one for one in found if not isinstance(one, Prompt)), None):
        raise TypeError(f"prompts() must return a tuple of Prompt, found one of {type(wrong).__name__}: {wrong!r:.80}")
    ids = [prompt.id for prompt in found]
    if len({*ids}) != len(ids):
        twice = Counter(ids).most_common(1)[0][0]
        texts = [prompt.text for prompt in found if prompt.id == twice]
        raise ValueError(
            f"prompts() gives {len(texts)} prompts the id {twice!r}, such as {texts[0]!r:.60} and {texts[1]!r:.60}; "
            "expected one id a text, such as prompt_id(text)"
        )
    for prompt in found:
        if prompt.metadata:
            _check_metadata(prompt)
    return tuple(found)


def _check_metadata(prompt: Prompt) -> None:
    try:
        canonical_json(prompt.metadata)
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"the metadata of prompt {prompt.id} cannot be written as JSON: {error}; expected plain strings, finite "
            "numbers, lists and dictionaries"
        ) from error
