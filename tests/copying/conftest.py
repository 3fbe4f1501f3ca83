"""The servers of tests/servers.py, for the tests here."""

from tests.servers import either_client, faulty, gcs, nginx, s3, sftp

__all__ = ["either_client", "faulty", "gcs", "nginx", "s3", "sftp"]
