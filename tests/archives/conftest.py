"""The servers of tests/servers.py, as fixtures of these tests."""

from tests.servers import either_client, faulty, gcs, nginx, s3, sftp

__all__ = ["either_client", "faulty", "gcs", "nginx", "s3", "sftp"]
