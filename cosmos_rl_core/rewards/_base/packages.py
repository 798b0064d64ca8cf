"""Versions of the packages that scorers compute with."""

from functools import cache
from importlib import metadata


@cache
def version(package: str) -> str:
    """Return the installed version of a package. Its metadata is parsed once: a status asks for every rollout."""
    return metadata.version(package)
