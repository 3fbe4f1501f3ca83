"""The servers of tests/servers.py, for the tests here."""

from tests.servers import either_client, faulty, nginx, s3

__all__ = ["either_client", "faulty", "nginx", "s3"]
