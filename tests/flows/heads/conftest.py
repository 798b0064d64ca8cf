"""The run of the tests of whole runs, to be signed."""

from tests.e2e.conftest import copy_of, flows, reference

__all__ = ["copy_of", "flows", "reference"]
