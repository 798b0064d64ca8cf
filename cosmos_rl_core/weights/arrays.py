"""Tensors of safetensors files as numpy arrays. Imports no torch."""

import numpy as np

from cosmos_rl_core.storage.tensor_headers import TYPES


def array(data: bytes, dtype: str, shape: tuple[int, ...]) -> np.ndarray:
    """Return a tensor's bytes as an array ``shape`` of a type that numpy has; 8-bit floats stay bytes.

    ``dtype`` is the name in the safetensors format, such as ``BF16``, whose numbers become float32.
    """
    if dtype == "BF16":
        # The upper half of a float32.
        return (np.frombuffer(data, "<u2").astype("<u4") << 16).view("<f4").reshape(shape)
    name = TYPES[dtype][0] if not dtype.startswith("F8") else "uint8"
    return np.frombuffer(data, name).reshape(shape)
