"""Pictures of a report."""

import numpy as np

from cosmos_rl_core.storage import media
from stages.formats.samples import StoredSample
from stages.reporting import pictures


def test_many_large_pictures_are_shrunk_until_they_fit():
    noise = np.random.default_rng(0).integers(0, 256, (1, 512, 256, 3), np.uint8)
    sample = StoredSample({"sample_id": "a", "finite": True}, *media.encode(noise))
    strips = {str(i): pictures.strip(sample) for i in range(4)}
    heights = [pictures.within(strips, most)["0"].height for most in (10**7, 4 * 4000, 1)]
    assert heights == [192, 128, 64]
    ending, full = pictures.full(sample)
    assert (ending, len(full) < pictures.FULL_BYTES) == ("png", True)
