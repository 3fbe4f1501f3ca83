"""Credentials of buckets that no option names: those of the machine, found by the provider's own library.

The libraries are botocore, google-auth and azure-identity. They renew their keys and tokens before these expire.
"""

from __future__ import annotations

import importlib
import logging
import math
import os
import ssl
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import trio

from zarrfs.config.redaction import redact_text
from zarrfs.errors import AccessDenied, causes
from zarrfs.net.responses import Transient

log = logging.getLogger(__name__)

_ASK = 60.0  # seconds after which the library is asked for the present key or token
_LOG_IN = 60.0  # seconds between two logins because a server has refused the access
_AGAIN = 5.0  # seconds after which credentials that were not reached are looked for again
_THREADS = 8  # each call that hangs holds one
_GOOGLE_SCOPE = "https://www.googleapis.com/auth/devstorage.read_only"
_AZURE_SCOPE = "https://storage.azure.com/.default"
_AZURE_SECRET = ("tenant_id", "client_id", "client_secret")


class Access(NamedTuple):
    """A key or a token that grants access to a bucket; neither for anonymous requests."""

    key: str = ""  # ID of a key of S3; name of an account of Azure
    secret: str = ""
    session: str = ""  # session token of a key of S3
    bearer: str = ""  # sent as "Authorization: Bearer"


Find = Callable[[], Access]


class Credentials:
    """The access of one set of options; `make` returns the function that finds it, and both run in a thread.

    Access that has been found holds until other access is found, also if the library fails.
    """

    def __init__(self, make: Callable[[], Find], timeout: float) -> None:
        self._make, self._timeout = make, timeout
        self._find: Find | None = None
        self._access: Access | None = None
        self._until = 0.0  # when the library is asked again
        self._logged_in = -math.inf  # when the last login because of a refusal began
        self._error, self._passing = "", False  # why the library has failed last, and whether a retry may help
        self._lock, self._threads = trio.Lock(), trio.CapacityLimiter(_THREADS)

    async def get(self, where: str, refused: Access | None = None) -> Access:
        """Return the access that holds now. Raise AccessDenied if there is none, or Transient if a retry may help.

        `refused`: access that a server has refused; log in again, once a minute, such as with a changed file.
        """
        due = trio.current_time() >= self._until and not self._lock.locked()
        if due or self._access in (None, refused):
            async with self._lock:
                now = trio.current_time()
                if refused is not None and refused == self._access and now >= self._logged_in + _LOG_IN:
                    self._logged_in = now
                    await self._renew(None)
                elif now >= self._until:
                    await self._renew(self._find)
        if self._access is None or (self._error and self._access == refused):
            raise Transient(self._error) if self._passing else AccessDenied(where, self._error)
        return self._access

    async def _renew(self, find: Find | None) -> None:
        """Ask `find`, or log in if it is None."""

        def found() -> tuple[Find, Access]:
            asked = find or self._make()
            return asked, asked()

        try:
            with trio.fail_after(self._timeout):
                asked, access = await trio.to_thread.run_sync(found, abandon_on_cancel=True, limiter=self._threads)
            if any(access) or not any(self._access or ()):  # a login that fails now must not make access anonymous
                self._find, self._access = asked, access
            self._error = ""
        except trio.TooSlowError:
            self._find = None  # its library may wait under a lock
            self._error, self._passing = f"its credentials are not found within {self._timeout:g} s", True
        except Exception as exc:
            self._error, self._passing = f"its credentials: {redact_text(str(exc))}", _is_of_network(exc)
        self._until = trio.current_time() + (_AGAIN if self._passing and self._access is None else _ASK)


def _is_of_network(exc: BaseException) -> bool:
    """Return whether a library has failed because of the network: an error of the system that names no file."""
    chain = list(causes(exc))
    refused = any(isinstance(one, ssl.SSLCertVerificationError) for one in chain)
    return not refused and any(isinstance(one, OSError) and not one.filename for one in chain)


def of_s3(profile: str | None) -> Find:
    """Find keys as AWS's tools do: environment, files, single sign-on, roles, instance metadata."""
    names = "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"
    key, secret, token = (os.environ.get(name, "") for name in names)
    if key and secret and not profile:
        return lambda: Access(key, secret, token)
    try:
        from botocore.session import Session
    except ImportError:
        rule = "no key is given (-o s3.key=,s3.secret=); the extra s3 finds profiles; s3.anon=true needs none"
        raise LookupError(rule) from None
    session = Session(profile=profile)
    settings = session.get_scoped_config()
    if "endpoint_url" in settings or "services" in settings:
        raise LookupError("the profile names an endpoint: give it as -o s3.endpoint_url=")

    def find() -> Access:
        found = session.get_credentials()
        if found is None:
            raise LookupError("AWS's library finds none (-o s3.key=,s3.secret=, or s3.anon=true for a public bucket)")
        keys = found.get_frozen_credentials()
        return Access(keys.access_key, keys.secret_key, keys.token or "")

    return find


def region_of_s3(profile: str | None) -> str:
    """Return the region that AWS's file of profiles sets; "" if it sets none."""
    name = profile or os.environ.get("AWS_PROFILE") or os.environ.get("AWS_DEFAULT_PROFILE") or "default"
    path = os.path.expanduser(os.environ.get("AWS_CONFIG_FILE") or "~/.aws/config")
    if not os.path.isfile(path):
        return ""
    import configparser

    parser = configparser.RawConfigParser()
    try:
        parser.read(path, encoding="utf-8")
    except (configparser.Error, OSError, UnicodeDecodeError):
        return ""  # botocore says what is wrong if it is needed
    section = name if name == "default" else f"profile {name}"
    return parser.get(section, "region", fallback="").strip()


def of_google(token: object) -> Find:
    """Find tokens as Google's tools do; `token`: a file or its content; None: the defaults, or anonymous access."""
    try:
        auth: Any = importlib.import_module("google.auth")
        request: Any = importlib.import_module("google.auth.transport.requests").Request()
    except ImportError:
        if token is not None:
            raise LookupError("the extra gcs of zarrfs is needed to log in") from None
        log.info("gs: read anonymously: the extra gcs finds credentials")
        return Access
    given: Any = {"scopes": [_GOOGLE_SCOPE]}
    try:
        if isinstance(token, Mapping):
            found, _ = auth.load_credentials_from_dict(dict(token), **given)
        elif token is not None:
            found, _ = auth.load_credentials_from_file(str(token), **given)
        else:
            found, _ = auth.default(**given)
    except auth.exceptions.DefaultCredentialsError:
        if token is not None:
            raise
        return Access

    def find() -> Access:
        if not found.valid:
            found.refresh(request)
        return Access(bearer=found.token)

    return find


def of_azure(options: Mapping[str, Any]) -> Find:
    """Find tokens as Azure's tools do, of the application in `options` if there is one; else anonymous access."""
    given: Any = {name: options.get(name) or os.environ.get(f"AZURE_STORAGE_{name.upper()}") for name in _AZURE_SECRET}
    try:
        from azure.core.exceptions import ClientAuthenticationError
        from azure.identity import ClientSecretCredential, DefaultAzureCredential
    except ImportError:
        if all(given.values()):
            raise LookupError("the extra azure of zarrfs is needed to log in") from None
        log.info("az: read anonymously: the extra azure finds credentials")
        return Access
    login = ClientSecretCredential(**given) if all(given.values()) else DefaultAzureCredential()

    try:
        login.get_token(_AZURE_SCOPE)
    except ClientAuthenticationError:
        if all(given.values()):
            raise
        return Access
    return lambda: Access(bearer=login.get_token(_AZURE_SCOPE).token)
