"""Credentials of buckets that no option names: those of the machine, found by the provider's own library.

The libraries are botocore, google-auth and azure-identity. They renew their keys and tokens before these expire.
"""

from __future__ import annotations

import importlib
import logging
import math
import os
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import trio

from zarrfs.config.redaction import redact_text
from zarrfs.errors import AccessDenied
from zarrfs.net.responses import Transient

log = logging.getLogger(__name__)

_RENEW = 60.0  # seconds after which the library is asked for the present key or token
_GOOGLE_SCOPE = "https://www.googleapis.com/auth/devstorage.read_only"
_AZURE_SCOPE = "https://storage.azure.com/.default"
_AZURE_SECRET = ("tenant_id", "client_id", "client_secret")


class Access(NamedTuple):
    """What grants access to a bucket: a key, a token, or neither for anonymous requests."""

    key: str = ""  # ID of a key of S3; name of an account of Azure
    secret: str = ""
    token: str = ""  # session token of a key of S3; else sent as "Authorization: Bearer"


Find = Callable[[], Access]


class Credentials:
    """The access of one set of options; `make` returns the function that finds it, which runs in a thread."""

    def __init__(self, make: Callable[[], Find], timeout: float) -> None:
        self._make, self._timeout = make, timeout
        self._find: Find | None = None
        self._access, self._until = Access(), 0.0
        self._error = ""
        self._refused = -math.inf  # when the last renewal because of a refusal began
        self._lock = trio.Lock()

    async def get(self, where: str, refused: Access | None = None) -> Access:
        """Return the access that holds now. Raise AccessDenied if there is none, or Transient if it takes too long.

        `refused`: access that a server has refused; look once a minute for another one, such as in a changed file.
        """
        if trio.current_time() >= self._until or refused is not None:
            async with self._lock:
                if refused == self._access and trio.current_time() >= self._refused + _RENEW:
                    self._refused, self._until, self._find = trio.current_time(), 0.0, None
                if trio.current_time() >= self._until:
                    await self._renew()
        if self._error:
            raise AccessDenied(where, self._error)
        return self._access

    async def _renew(self) -> None:
        self._error = ""
        try:
            with trio.fail_after(self._timeout):
                self._access = await trio.to_thread.run_sync(self._found, abandon_on_cancel=True)
        except trio.TooSlowError as exc:
            raise Transient(f"its credentials are not found within {self._timeout:g} s") from exc
        except Exception as exc:
            self._error = f"its credentials: {redact_text(str(exc))}"
        self._until = trio.current_time() + _RENEW

    def _found(self) -> Access:
        if self._find is None:
            self._find = self._make()
        return self._find()


def of_s3(profile: str | None) -> Find:
    """Find keys as AWS's tools do: environment, files, single sign-on, roles, instance metadata."""
    names = "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"
    key, secret, token = (os.environ.get(name, "") for name in names)
    if key and secret and not profile:
        return lambda: Access(key, secret, token)
    try:
        from botocore.session import Session
    except ImportError:
        rule = "no key is given (-o s3.key=,s3.secret=); zarrfs[s3] finds profiles and roles, s3.anon=true needs none"
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


def of_google(token: object) -> Find:
    """Find tokens as Google's tools do; `token`: a file or its content; None: the defaults, or anonymous access."""
    try:
        auth: Any = importlib.import_module("google.auth")
        request: Any = importlib.import_module("google.auth.transport.requests").Request()
    except ImportError:
        if token is not None:
            raise LookupError("zarrfs[gcs] is needed to log in") from None
        log.info("gs: read anonymously: zarrfs[gcs] finds credentials")
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
        return Access(token=found.token)

    return find


def of_azure(options: Mapping[str, Any]) -> Find:
    """Find tokens as Azure's tools do, of the application in `options` if there is one; else anonymous access."""
    given: Any = {name: options.get(name) or os.environ.get(f"AZURE_STORAGE_{name.upper()}") for name in _AZURE_SECRET}
    try:
        from azure.core.exceptions import ClientAuthenticationError
        from azure.identity import ClientSecretCredential, DefaultAzureCredential
    except ImportError:
        if all(given.values()):
            raise LookupError("zarrfs[azure] is needed to log in") from None
        log.info("az: read anonymously: zarrfs[azure] finds credentials")
        return Access
    login = ClientSecretCredential(**given) if all(given.values()) else DefaultAzureCredential()

    try:
        login.get_token(_AZURE_SCOPE)
    except ClientAuthenticationError:
        if all(given.values()):
            raise
        return Access
    return lambda: Access(token=login.get_token(_AZURE_SCOPE).token)
