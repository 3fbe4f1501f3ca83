"""A check of the environment variables that name certificate authorities: a missing file is an error.

OpenSSL ignores a missing file. Servers of a site would then be refused without a hint, or authorities would be trusted
that the user did not choose. Source: SSL_CTX_set_default_verify_paths(3) of OpenSSL.
"""

from __future__ import annotations

import os

from zarrfs.errors import ReadError


def check_variables(where: str) -> None:
    """Raise ReadError if a variable names nothing that can be read."""
    for name in ("SSL_CERT_FILE", "SSL_CERT_DIR"):
        paths = os.environ.get(name, "").split(":" if name == "SSL_CERT_DIR" else "\0")
        if paths != [""] and not any(os.access(path, os.R_OK) for path in paths):
            reason = "cannot be read" if any(map(os.path.lexists, paths)) else "no such file or directory"
            raise ReadError(where, f"${name}: {':'.join(paths)}: {reason}; correct the variable, or unset it")
