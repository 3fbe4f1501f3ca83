"""The servers of tests/servers.py, for the tests of views."""

from tests.servers import faulty

__all__ = ["faulty"]
