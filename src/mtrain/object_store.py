"""Object stores through fsspec: their addresses, their file systems, and their errors in words.

The store's library finds the credentials; an address that holds some is refused, and messages have
only the type of a store's error, since its text may contain signed addresses.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, TypeVar

from mtrain.errors import BadEnvironment, MtrainError

SCHEMES = ("s3", "gs", "gcs", "az", "abfs", "file", "memory")
"""Stores of checkpoints: `file` on a disk that machines share, `memory` in one process."""
SCHEME = re.compile(r"([a-z][a-z0-9+.-]*)://", re.IGNORECASE)
SECRET = re.compile(r"://[^/]*@|[?#]")
T = TypeVar("T")


def is_remote(name: str) -> bool:
    """Return whether a name is the address of an object store and not a local file."""
    return SCHEME.match(name) is not None


def has_secret(name: str) -> bool:
    """Return whether an address holds credentials or a query, and so may not be shown."""
    return SECRET.search(name) is not None


def without_secret(name: str) -> str:
    """Return an address as a message may show it."""
    scheme = SCHEME.match(name)
    return f"{scheme and scheme[1]}://..." if has_secret(name) else name


def unusable(url: str, *, lasting: bool = False) -> str:
    """Return why checkpoints cannot lie at an address, with `lasting` beyond one process; or ""."""
    scheme, _, rest = url.partition("://")
    if not is_remote(url):
        return "it has no scheme"
    if has_secret(url):
        return "it holds credentials or a query, and logs show addresses"
    if scheme not in SCHEMES:
        return f"the scheme {scheme} is none of {', '.join(SCHEMES)}"
    if lasting and scheme == "memory":
        return "its objects end with the process that wrote them"
    if scheme == "file":
        if not rest.startswith("/"):
            return "the path of a file address begins with /"
        rest = rest[1:]
    bucket, _, prefix = rest.partition("/")
    if not bucket:
        return "it names no bucket"
    if not prefix.strip("/"):
        return "it names no prefix in the bucket"
    if any(part in ("", ".", "..") for part in rest.rstrip("/").split("/")):
        return "a part of it is empty, . or .."
    return ""


def file_system(name: str, subject: str, **options: Any) -> Any:
    """Return fsspec's file system for an address; `subject` is what is there, for messages.

    Raises:
        BadEnvironment: fsspec or its library for the store is not installed, or there is no such
            store.
    """
    scheme = name.partition("://")[0]
    try:
        import fsspec

        return fsspec.filesystem(scheme, **options)
    except ImportError as error:
        more = " adlfs" if scheme in ("az", "abfs") else ""
        raise BadEnvironment(
            f"{subject} in {scheme}:// needs fsspec and its library for the store: {error}",
            f"  fix: pip install 'mtrain[fsspec]'{more}",
        ) from error
    except ValueError as error:
        raise BadEnvironment(f"{subject} in {scheme}://: fsspec knows no such store") from error


def request(call: Callable[[], T], path: str, done: str = "read") -> T:
    """Return the answer of a store; `done` is what was to be done with `path`, for messages.

    Raises:
        FileNotFoundError, FileExistsError: as the store's library does.
        BadEnvironment: any other error, by its type.
    """
    try:
        return call()
    except (FileNotFoundError, FileExistsError, MtrainError):
        raise
    except Exception as error:
        raise BadEnvironment(
            f"{path} cannot be {done}: {type(error).__name__}",
            "  fix: the network, and the credentials that the store's library finds in the"
            " environment",
        ) from None
