"""The transfer of a part of a local checkpoint to another machine, over TCP. Needs no torch.

Both ends have a token, which the launcher of the first machine draws. The receiver sends a nonce,
and acts only on a request that is signed with the token and that nonce; its answers are signed with
a nonce of the request. A request is a line of JSON of limited length. What follows has the length
that the manifest of the part names, goes to a draft, and is compared with its hashes before the
draft is renamed. Nothing is encrypted.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import secrets
import shutil
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from mtrain import durable, strict_json
from mtrain.ckpt import folder, hashes
from mtrain.ckpt.local import OWNER, PART
from mtrain.ckpt.verification import verified
from mtrain.config.compose.paths import MANIFEST
from mtrain.errors import MtrainError, first_line
from mtrain.units import MIB

Address = tuple[str, int]
HELLO_S = 10.0
"""Seconds that the other end has for a line that needs no work."""
STALL_S = 60.0
"""Seconds without a byte after which a transfer is given up."""
VERIFY_S = 600.0
"""Seconds that the receiver has to compare all hashes."""
MOST_LINE_BYTES = 16 * MIB
MOST_MANIFEST_BYTES = 256 * MIB
NONCE_BYTES = 16
KEPT = 2
"""The newest copies of a part that a machine keeps: another machine may be lost before its own copy
of the newest is there.
"""


class Refused(Exception):
    """The other end, or a file, is not as it has to be."""


class Line:
    """One end of a connection that carries signed lines of JSON, and the bytes of files."""

    def __init__(self, end: socket.socket, token: str) -> None:
        end.settimeout(HELLO_S)
        self.end = end
        self.stream = end.makefile("rb")
        self._token = token.encode()
        self.theirs = ""
        """The nonce of the other end, with which this one signs."""
        self.own = secrets.token_hex(NONCE_BYTES)

    def __enter__(self) -> Line:
        return self

    def __exit__(self, *error: object) -> None:
        # The socket stays open as long as its stream.
        self.stream.close()
        self.end.close()

    def say(self, body: Mapping[str, Any]) -> None:
        """Send a line."""
        text = strict_json.dumps(body)
        self.end.sendall(f"{self._signature(self.theirs, text)} {text}\n".encode())

    def hear(self) -> dict[str, Any]:
        """Return the next line.

        Raises:
            Refused: it is not signed with the token, or not whole.
        """
        signature, _, text = self.raw(MOST_LINE_BYTES).partition(" ")
        if not hmac.compare_digest(signature.encode(), self._signature(self.own, text).encode()):
            raise Refused("a message is not signed with the token of this run")
        body = json.loads(text)
        if not isinstance(body, dict):
            raise Refused("a message is no object")
        return body

    def raw(self, most: int) -> str:
        """Return the next line without a check, of `most` bytes at most."""
        line = self.stream.readline(most)
        if not line.endswith(b"\n"):
            raise Refused("the connection was closed")
        return line[:-1].decode("utf-8", "replace")

    def read(self, nbytes: int) -> Iterator[bytes]:
        """Yield so many bytes."""
        while nbytes:
            data = self.stream.read1(min(nbytes, MIB))
            if not data:
                raise Refused("the connection was closed")
            nbytes -= len(data)
            yield data

    def _signature(self, nonce: str, text: str) -> str:
        return hmac.new(self._token, f"{nonce} {text}".encode(), hashlib.sha256).hexdigest()


@contextmanager
def requested(address: Address, token: str, request: Mapping[str, Any]) -> Iterator[Line]:
    """Yield a connection whose other end has got a request and shown that it has the token.

    Raises:
        Refused: nobody answers there who has it, or in the block.
    """
    try:
        host, port = address
        with Line(socket.create_connection((host, port), timeout=HELLO_S), token) as line:
            line.theirs = line.raw(2 * NONCE_BYTES + 1)
            line.say({**request, "nonce": line.own})
            line.hear()
            line.end.settimeout(STALL_S)
            yield line
    except OSError as error:
        raise Refused(error.strerror or str(error)) from None
    except MtrainError as error:
        raise Refused(_text(error)) from None
    except (ValueError, KeyError):
        raise Refused("a message cannot be read") from None


def request_of(line: Line) -> dict[str, Any]:
    """Return the request of who has connected, after both ends have shown that they have the token.

    Raises:
        Refused: it is not signed.
        OSError: nothing comes.
    """
    line.end.sendall(f"{line.own}\n".encode())
    request = line.hear()
    line.theirs = str(request.get("nonce"))
    line.say({})
    line.end.settimeout(STALL_S)
    return request


def send(address: Address, token: str, path: Path, machine: int) -> None:
    """Send the part of a machine to another one, which has it whole when this returns.

    Raises:
        Refused: nobody takes it, or it is not whole.
    """
    try:
        manifest = folder.parse_manifest(path)
        data = (path / MANIFEST).read_bytes()
    except (MtrainError, OSError) as error:
        raise Refused(_text(error)) from None
    request = {"do": "keep", "of": machine, "step": manifest["step"], "manifest": len(data)}
    with requested(address, token, request) as line:
        line.end.sendall(data)
        answer = line.hear()
        for name in answer.get("wanted", ()):
            folder.check_file(path, name, manifest["files"][name], verify=False)
            with (path / name).open("rb") as file:
                line.end.sendfile(file)
        if "why" not in answer:
            line.end.settimeout(VERIFY_S)
            answer = line.hear()
        if answer["why"]:
            raise Refused(answer["why"])


def keep(line: Line, request: Mapping[str, Any], root: Path, owner: str, machines: int) -> None:
    """Take the part that a request of `send` announces into the folder `root`.

    `owner` and `machines` are those of the run. A refusal is an answer to the other end, too.

    Raises:
        Refused: it is not a whole part of this run, or the disk refuses.
    """
    step = int(request["step"])
    draft = folder.draft_of(root, step)
    why = ""
    try:
        shutil.rmtree(draft, ignore_errors=True)
        draft.mkdir(parents=True)
        _take(line, request, draft, owner, machines)
        final = root / folder.folder_name(step)
        shutil.rmtree(final, ignore_errors=True)
        # Nothing waits for the disk: whoever uses a copy compares all of its hashes again.
        draft.rename(final)
        for older in folder.folders(root)[:-KEPT]:
            shutil.rmtree(older, ignore_errors=True)
    except (MtrainError, Refused, OSError) as error:
        why = _text(error)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
        hashes.forget_all()
    line.say({"why": why})
    if why:
        raise Refused(why)


def _take(line: Line, request: Mapping[str, Any], draft: Path, owner: str, machines: int) -> None:
    """Fill a draft with the manifest that comes and its files, and compare every byte."""
    nbytes = int(request["manifest"])
    if not 0 < nbytes <= MOST_MANIFEST_BYTES:
        raise Refused(f"a manifest of {nbytes} bytes")
    _write(line, draft / MANIFEST, nbytes)
    manifest = folder.parse_manifest(draft)
    state = manifest["state"]
    told = [manifest["step"], state.get(OWNER), state.get(PART)]
    if told != [request["step"], owner, [request["of"], machines]]:
        raise Refused(f"{draft / MANIFEST} is of {told}, which is not what was announced")
    files = manifest["files"]
    # Before any of them is written.
    for name in files:
        folder.check_name(draft, name)
    known = _known(draft.parent)
    wanted = []
    for name, facts in files.items():
        before = known.get(name)
        # A file that no step changes is here already, under a second name.
        if before is None or before[1] != facts or not durable.linked(before[0], draft / name):
            wanted.append(name)
    line.say({"wanted": wanted})
    for name in wanted:
        _write(line, draft / name, int(files[name]["bytes"]))
    damage = verified(draft, manifest).damage
    if damage:
        linked = [name for name in files if name not in wanted and str(draft / name) in damage[0]]
        for name in linked:  # or it would be linked again
            shutil.rmtree(known[name][0].parent, ignore_errors=True)
        raise Refused(damage[0])


def _known(root: Path) -> dict[str, tuple[Path, Any]]:
    """Return the files of the newest copy: name -> path, and facts of its manifest."""
    for path in folder.committed(root)[-1:]:
        with suppress(MtrainError):
            files = folder.read_manifest(path, verify=False)["files"]
            return {name: (path / name, facts) for name, facts in files.items()}
    return {}


def _write(line: Line, path: Path, nbytes: int) -> None:
    with path.open("wb") as file:
        for data in line.read(nbytes):
            file.write(data)


def _text(error: Exception) -> str:
    if isinstance(error, OSError):
        return f"{error.filename or 'the connection'}: {error.strerror or error}"
    return first_line(error)
