"""The servers of tests/servers.py, for the tests here."""

from tests.servers import faulty, nginx, s3

__all__ = ["faulty", "nginx", "s3"]
