"""The servers of tests/servers.py as fixtures of the tests here."""

from tests.servers import nginx

__all__ = ["nginx"]
