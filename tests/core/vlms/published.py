"""The parts of published ``config.json`` files that shapes of weights follow from. Imports no torch."""

from typing import Any

from tests.core.vlms.cases import QWEN3

SHARED = {"num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151_936}


def published(text: dict[str, int], vision: dict[str, int], **more: Any) -> dict[str, Any]:
    """A ``config.json`` of Qwen3-VL, which Cosmos-Reason2 shares, as far as shapes depend on it."""
    names = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
    assert text.keys() == {*names}
    of_vision = {"out_hidden_size": text["hidden_size"], "num_position_embeddings": 2304, "patch_size": 16, **vision}
    return {"architectures": [QWEN3], "text_config": {**SHARED, **text}, "vision_config": of_vision, **more}


PUBLISHED = {
    "2B": (
        published(
            {"hidden_size": 2048, "num_hidden_layers": 28, "num_attention_heads": 16, "intermediate_size": 6144},
            {"depth": 24, "hidden_size": 1024, "intermediate_size": 4096},
            tie_word_embeddings=True,
        ),
        2_127_532_032,
    ),
    "8B": (
        published(
            {"hidden_size": 4096, "num_hidden_layers": 36, "num_attention_heads": 32, "intermediate_size": 12_288},
            {"depth": 27, "hidden_size": 1152, "intermediate_size": 4304},
            tie_word_embeddings=False,
        ),
        8_767_123_696,
    ),
}
"""Config and number of parameters of Qwen3-VL."""
