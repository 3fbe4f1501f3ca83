"""The identity of remote values: the parts of a URL and its options that belong to it."""

from __future__ import annotations

import pytest

from zarrfs.config.options import parse
from zarrfs.net import identity
from zarrfs.store.remotefiles import RemoteFiles

AWS = "X-Amz-Algorithm=AWS4&X-Amz-Credential={0}&X-Amz-Date={0}&X-Amz-Expires=9&X-Amz-Signature={0}"
SAS = "sv=2024&se={0}&sp=r&sr=b&sig={0}"
CLOUDFRONT = "Expires={0}&Signature={0}&Key-Pair-Id=K"


@pytest.mark.parametrize("signature", [AWS, SAS, CLOUDFRONT])
def test_two_signatures_of_one_url_mean_the_same_bytes(signature: str) -> None:
    one, other = (identity.of_web(f"https://h/b/k?versionId=3&{signature.format(sign)}", {}) for sign in "ab")
    assert one == other == "https://h/b/k?versionId=3"


@pytest.mark.parametrize(
    "query", ["key={}", "token={}", "sig={}", "signature={}", "q={}&q=z", "expires={}", "{}", "q=a{}b"]
)
def test_parameters_that_resemble_secrets_distinguish_values(query: str) -> None:
    values = ("+", "%20") if query == "q=a{}b" else (9 * "x", 9 * "y")  # a plus is not a space
    one, other = (identity.of_web(f"https://h/get?{query.format(value)}", {}) for value in values)
    assert one != other
    if "=" in query and not query.startswith(("q", "expires")):
        assert "xxxxxxxxx" not in one


def test_an_identity_contains_parameters_and_headers_but_no_user() -> None:
    plain = identity.of_web("https://h/k", {})
    assert identity.of_web("https://user:secret@H/k", {"headers": {"Authorization": "x"}, "ssl": False}) == plain
    assert identity.of_web("https://h/k", {"params": {"v": "1"}}) != plain
    assert identity.of_web("https://h/k", {"headers": {"Accept": "text/plain"}}) != plain


async def names_of(options: list[str], url: str) -> tuple[str, str, str]:
    files = RemoteFiles(parse(options).options)
    try:
        system, path = await files.find(url)
        return system.host(path), system.identity(path), system.shown(path)
    finally:
        await files.aclose()


def test_endpoints_distinguish_buckets() -> None:
    import trio

    one = trio.run(names_of, ["s3.endpoint_url=http://a:1", "s3.key=k", "s3.secret=s"], "s3://b/k/l")
    other = trio.run(names_of, ["s3.endpoint_url=http://a:2", "s3.anon=true"], "s3a://b/k/l")
    assert one[:2] == ("s3://b at a:1", "s3://b/k/l at http://a:1")
    assert other[:2] == ("s3://b at a:2", "s3://b/k/l at http://a:2")


def test_an_http_host_has_no_user_and_a_zip_member_has_the_identity_of_its_archive() -> None:
    import trio

    host, name, _ = trio.run(names_of, [], "http://u:p@Host:81/k")
    assert (host, name) == ("host:81", "http://host:81/k")
    outer, name, _ = trio.run(names_of, [], "zip://m/n::http://u:p@Host:81/x.zip")
    assert name == "zip://m/n::http://host:81/x.zip"
    assert outer != host  # requests for members hold a slot while the archive is read
