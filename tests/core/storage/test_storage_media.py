"""Media as they are stored."""

import os
import subprocess
import sys

ENCODER = """
import hashlib
import numpy as np
from cosmos_rl_core.storage import media

dice = np.random.default_rng(1)
squares = [dice.normal(0, 1, (4, 8, 3)).repeat(8, 0).repeat(8, 1) for _ in range(10)]
frames = [128 + 10 * (squares[0] * (1 - k / 8) + k / 8 * squares[k + 1]) for k in range(9)]
print(hashlib.sha256(media.playable(np.clip(np.stack(frames), 0, 255).astype(np.uint8))).hexdigest())
"""


def test_equal_pixels_are_equal_bytes_whatever_was_in_memory_before():
    found = [
        subprocess.run(
            [sys.executable, "-c", ENCODER],
            env=os.environ | {"MALLOC_PERTURB_": str(value)},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for value in (1, 85, 170)
    ]
    assert len(set(found)) == 1
