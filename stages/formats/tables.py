"""Tables of artifacts, as parquet files."""

import io

import pandas as pd

from stages.artifacts.artifact import Artifact


def to_parquet(frame: pd.DataFrame) -> bytes:
    """Return a table as the bytes of a parquet file; equal tables give equal bytes."""
    buffer = io.BytesIO()
    frame.to_parquet(buffer, index=False, engine="pyarrow")
    return buffer.getvalue()


def read_table(artifact: Artifact, name: str) -> pd.DataFrame:
    """Read a parquet file of an artifact."""
    return pd.read_parquet(io.BytesIO(artifact.read(name)), engine="pyarrow")
