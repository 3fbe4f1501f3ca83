"""Identities of values: they contain no credentials, and differ for different values."""

from __future__ import annotations

import pytest

from zarrfs.net.identity import endpoint, of_other, of_web


@pytest.mark.parametrize("name", ["password", "passwd", "pwd", "jwt", "bearer", "api_key", "session_id", "sas"])
def test_credentials_are_no_part_of_an_identity(name: str) -> None:
    """Cached bytes on disk are found again with a new password, and by another user."""
    plain = of_other("smb", "/v", {"host": "h"})
    assert of_other("smb", "/v", {"host": "h", name: "geheim"}) == plain
    headers = of_web("https://h/v", {"headers": {f"X-{name}": "geheim"}})
    assert name == "sas" or headers == of_web("https://h/v", {})
    query = of_web(f"https://h/v?{name}=geheim", {})
    assert "geheim" not in query
    assert query != of_web(f"https://h/v?{name}=anders", {})


@pytest.mark.parametrize("name", ["connection_string", "policy", "x-amz-version-id", "design"])
def test_options_that_may_select_other_bytes_are_part_of_an_identity(name: str) -> None:
    assert of_other("box", "/v", {name: "one"}) != of_other("box", "/v", {name: "two"})


def test_a_profile_that_may_name_an_endpoint_is_part_of_an_identity(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its name is looked up in the order of botocore."""
    for name in ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_PROFILE", "AWS_DEFAULT_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    assert endpoint("s3", {}) == ""
    monkeypatch.setenv("AWS_PROFILE", "one")
    assert endpoint("s3", {}) == "profile one"
    monkeypatch.setenv("AWS_DEFAULT_PROFILE", "other")
    assert endpoint("s3", {}) == "profile other"
    assert endpoint("s3", {"profile": "own"}) == "profile own"
