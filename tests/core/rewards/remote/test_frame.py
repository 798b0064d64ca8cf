"""Frames of requests, byte for byte."""

import hashlib

import numpy as np

from cosmos_rl_core.rewards._remote.frame import frame


def test_frames_are_the_golden_ones_byte_for_byte():
    """Digests of frames that cosmos-rl's own client would send; é and the newline are escaped."""
    pixels = np.arange(24, dtype=np.uint8).reshape(2, 2, 2, 3)
    image = frame(["a cat", "café\nlight"], "pickscore", "image", pixels)
    assert len(image) == 251
    assert hashlib.sha256(image).hexdigest() == "ca2a55768cbc1c3f79478896f3c88bf8371a61d7611483a5ae3c3a622edbb96b"
    latent = frame(["a cat"], "dance_grpo", "latent", np.zeros((1, 16, 2, 2, 2), np.float16), fps=16.0)
    assert len(latent) == 503
    assert hashlib.sha256(latent).hexdigest() == "001c95d9eab461b26e450a2f02e07bbc1b1870acd9b1d9c632f192e852ee3e49"
