"""What is said of two files that differ, with the numbers of hand-made differences."""

import numpy as np
import pandas as pd
import pytest
from safetensors.numpy import save

from cosmos_rl_core.canonical import canonical_json
from cosmos_rl_core.storage import media, shards
from flows.auditing.differing import of_files
from stages.formats.tables import to_parquet


def told(name: str, old: bytes, new: bytes) -> list[tuple[str, str, bool]]:
    return [(one.sample, one.what, one.tolerated) for one in of_files(name, old, new)]


def test_differences_of_tensors_have_a_size_and_a_count():
    old = {"a": np.array([1, 2, 4], np.float32), "b": np.zeros(2, np.float32), "c": np.ones(1, np.float32)}
    new = {**old, "a": np.array([1, 2.25, 4.5], np.float32), "c": np.array([1.0005], np.float32)}
    assert told("current/00000.safetensors", save(old), save(new)) == [
        ("", "a: 2 of 3 differ, by up to 0.5", False),
        ("", "c: 1 of 1 differ, by up to 0.0005", True),
    ]
    del new["b"]
    new["a"] = np.array([np.nan, 2, 4], np.float32)
    assert [what for _, what, _ in told("x.safetensors", save(old), save(new))][:2] == [
        "a: other values are not finite",
        "b: of another shape, or only in one of the two",
    ]


def test_numbers_in_bfloat16_are_read_without_torch():
    header = b'{"a":{"dtype":"BF16","shape":[2],"data_offsets":[0,4]}}'
    start = len(header).to_bytes(8, "little") + header
    one, two = (np.array([0x3F80, high], "<u2").tobytes() for high in (0x4000, 0x4040))  # 1 and 2, 1 and 3
    assert told("x.safetensors", start + one, start + two) == [("", "a: 1 of 2 differ, by up to 1", False)]


@pytest.mark.parametrize(("frames", "name"), [(1, "s1.png"), (3, "s1.mkv")])
def test_samples_of_a_shard_are_named_with_their_pixels(frames: int, name: str):
    old = np.zeros((frames, 4, 4, 3), np.uint8)
    new = old.copy()
    new[0, 0, 0] = (0, 3, 9)
    before, after = (shards.pack({name: media.encode(one)[1], "s0.json": b"{}"}) for one in (old, new))
    kind = name.partition(".")[2]
    assert told("media/00000.tar", before, after) == [
        ("s1", f"{kind} pixels: 2 of {old.size} differ, by up to 9 levels", True)
    ]


def test_rows_and_fields_that_differ_are_named():
    old = pd.DataFrame({"sample_id": ["a", "b"], "score": [0.5, None], "error": ["", "late"]})
    new = old.assign(score=[0.75, None], error=["", "lost"])
    assert told("scores.parquet", to_parquet(old), to_parquet(new)) == [
        ("a", "score: 1 of 2 differ, by up to 0.25", False),
        ("b", "error: 1 of 2 rows differ, first 'late' -> 'lost'", False),
    ]
    rows = [canonical_json([{"seed": seed}]) for seed in (1, 2)]
    assert told("index/00000.json", *rows) == [("", "0.seed: 1 -> 2", False)]
    assert told("index.html", b"abc", b"abd") == [("", "bytes: 3 -> 3 bytes, from byte 2 on", False)]
    assert told("empty.parquet", to_parquet(old), to_parquet(old.head(1)))[0][1].startswith("table: (2, 3) -> (1, 3)")
