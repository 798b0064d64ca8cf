"""Tables of artifacts as files."""

import io

import pandas as pd
import pytest

from cosmos_rl_core.canonical import sha256
from stages.formats.tables import from_parquet, to_parquet

ROWS = 40_000


def table(first: int, last: int) -> pd.DataFrame:
    texts = [sha256(str(number).encode()) for number in range(first, last)]
    return pd.DataFrame({"text": texts, "number": range(first, last)}).astype({"text": "string"})


def test_a_table_has_the_bytes_that_pandas_writes():
    written = io.BytesIO()
    table(0, ROWS).to_parquet(written, index=False, engine="pyarrow")
    assert to_parquet(table(0, ROWS)) == written.getvalue()


@pytest.mark.parametrize("size", [ROWS // 2, 777])
def test_bytes_of_a_table_do_not_depend_on_the_chunks_that_it_was_made_of(size: int):
    pieces = [from_parquet(to_parquet(table(at, min(ROWS, at + size)))) for at in range(0, ROWS, size)]
    assert to_parquet(pd.concat(pieces, ignore_index=True)) == to_parquet(table(0, ROWS))
