"""The address to which a run's checkpoints are uploaded: it is claimed before any rank starts, a
separate process uploads, and the run waits for it at the end.

One process of the machine of rank 0 uploads everything: the launcher's child, or that of rank 0
where another launcher started the ranks.
"""

from __future__ import annotations

import json
import os
import platform
import secrets
import select
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mtrain import durable, strict_json
from mtrain.ckpt import folder as ckpt_folder
from mtrain.ckpt.remote.place import OWNER, Place
from mtrain.ckpt.retention import Policy
from mtrain.config.compose.paths import REMOTE_FILE, program
from mtrain.config.schema.run import RunConfig
from mtrain.errors import BadEnvironment, BadPlace, ConfigError, MtrainError, TrainingError, warn
from mtrain.launching.start import execute, importable, python
from mtrain.processes import kill

KEY = "checkpoint.remote"
MODULE = "mtrain.ckpt.remote.uploader"


@dataclass(frozen=True)
class Claim:
    """The right of a run to write to an address."""

    url: str
    identity: str


def noted(home: Path) -> Mapping[str, Any]:
    """Return the content of `remote.json`; empty if the folder was moved or copied."""
    try:
        body = json.loads((home / REMOTE_FILE).read_text())
        return body if body["home"] == os.path.realpath(home) else {}
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def note(home: Path, url: str | None, identity: str, **more: Any) -> None:
    """Write `remote.json`, which names the address of a run and the `id` of its owner's object."""
    body = {"home": os.path.realpath(home), "url": url, "id": identity, **more}
    draft = home / f".{REMOTE_FILE}"
    durable.write(draft, strict_json.dumps(body).encode())
    draft.replace(home / REMOTE_FILE)


@contextmanager
def reached(key: str, url: str) -> Iterator[None]:
    """Report a store that refuses as a problem of the key that names it.

    Raises:
        BadPlace: the library of the store is not installed, there are no credentials or no bucket,
            or the store does not answer.
    """
    try:
        yield
    except BadEnvironment as error:
        why, *more = str(error).split("\n")
        fix = next((line.removeprefix("  fix: ") for line in more), "")
        # Of a request: the cause may be the network, too.
        if not fix.startswith(("pip", "create")):
            fix = f"credentials that the store's library finds in the environment, or another {key}"
        raise BadPlace.of("MT489", key, url, why, fix) from None


@contextmanager
def claimed(run: RunConfig, home: Path, launch: str | None) -> Iterator[Claim | None]:
    """Claim the address of a run's checkpoints, in the run folder `home`, which may not exist yet;
    None: the run has none. A claim is given back if nothing was uploaded.

    Raises:
        ConfigError: another run writes there.
        BadPlace: the store refuses.
    """
    url = run.checkpoint.remote
    if url is None:
        yield None
        return
    with reached(KEY, url):
        place = Place(url)
        known = noted(home) if noted(home).get("url") == url else {}
        claim = Claim(url, known.get("id") or secrets.token_hex(8))
        holder = place.owner()
        if holder.get("id") != claim.identity and not known.get("brought"):
            taken = place.checkpoints() or (holder and not _is_over(holder, launch))
            if taken:
                raise _taken(url, holder)
        here = {"run": home.name, "host": platform.node(), "pid": str(os.getpid())}
        owner = {"id": claim.identity, **here, "launch": launch or ""}
        place.claim(owner, take_over=bool(holder))
    try:
        yield claim
    finally:
        if not known:
            with suppress(MtrainError):
                if not place.checkpoints():
                    place.remove([OWNER])


def _is_over(holder: Mapping[str, Any], launch: str | None) -> bool:
    """Return whether the process that claimed an address, and uploaded nothing, has ended: it ran
    on this machine, or an earlier start of the same launch.
    """
    if launch is not None and holder.get("launch") == launch:
        return True
    if holder.get("host") != platform.node():
        return False
    try:
        os.kill(int(holder["pid"]), 0)
    except ProcessLookupError:
        return True
    except (OSError, KeyError, ValueError):
        return False
    return False


def _taken(url: str, holder: Mapping[str, Any]) -> ConfigError:
    who = (
        f"{holder['run']} of {holder.get('host')} writes" if "run" in holder else "another run has"
    )
    rule = f"cannot be used because {who} its checkpoints there"
    fix = "checkpoint.resume=latest, which continues that run, or another address"
    return ConfigError.of("MT501", KEY, url, rule, fix)


@contextmanager
def uploading(
    run: RunConfig, home: Path, checkpoint: Path | None, claim: Claim | None, *, barred: bool
) -> Iterator[None]:
    """Upload the checkpoints of the run folder `home` meanwhile, and wait for the last one.

    the run continues from `checkpoint`; `barred`: a progress bar may stand in the
    last line of the terminal.

    Raises:
        TrainingError: the run ended well, and its last checkpoint could not be uploaded.
        BadEnvironment: no process can be started.
    """
    if claim is None:
        yield
        return
    note(home, claim.url, claim.identity)
    process = _Process(run, home, checkpoint, claim, barred=barred)
    try:
        yield
        problem = process.result(run.checkpoint.barrier_timeout_s)
    except MtrainError:
        # The run has its own error, or was stopped.
        if problem := process.result(run.checkpoint.barrier_timeout_s):
            warn(problem)
        raise
    finally:
        process.kill()
    if problem and run.checkpoint.on_failure == "stop":
        raise TrainingError(problem)
    if problem:
        warn(problem)


class _Process:
    """The process that uploads."""

    def __init__(
        self, run: RunConfig, home: Path, checkpoint: Path | None, claim: Claim, *, barred: bool
    ) -> None:
        self.home = home
        self.url = claim.url
        task = {
            "home": str(home.absolute()),
            "url": claim.url,
            "owner": claim.identity,
            "policy": asdict(Policy.of(run.checkpoint)),
            "retries": run.checkpoint.retries,
            "begun": 0 if checkpoint is None else ckpt_folder.step_of(checkpoint),
            "quiet": run.log.progress == "none",
            "lead": "\n" if barred else "",
        }
        given, self._orders = os.pipe()
        self._result, result = os.pipe()
        try:
            command = python(MODULE, str(os.getpid()), str(given), str(result))
            self._pid: int | None = execute(command, importable(os.environ), given, result)
        except OSError as error:
            self._close()
            text = f"no process can be started: {error.strerror or error}"
            raise BadEnvironment(text) from None
        finally:
            os.close(given)
            os.close(result)
        self._order(strict_json.dumps(task))

    def result(self, limit_s: float) -> str:
        """Wait for the uploads; return in words why the last checkpoint is not there, or an empty
        text. Gives up after `limit_s` seconds in which no file was uploaded.
        """
        self._order("end")
        said = b""
        while select.select([self._result], [], [], limit_s)[0]:
            more = os.read(self._result, 1 << 16)
            if not more:
                break
            said = said.strip(b".") + more
        else:
            return self._missing(f"it has sent no file for {limit_s:g} s", "the last checkpoint")
        try:
            found = json.loads(said.strip(b".\n"))
        except ValueError:
            return self._missing("the process that uploads was ended", "the last checkpoint")
        return self._missing(found["why"], found["missing"]) if found["missing"] else ""

    def kill(self) -> None:
        """End it, whatever it does."""
        if self._pid is not None:
            kill(self._pid)
            self._pid = None
            self._close()

    def _missing(self, why: str, which: str) -> str:
        return (
            f"{which} of {self.home} is not in {self.url}: {why}; send it with `{program()}"
            f" checkpoint copy {self.home} {self.url}`"
        )

    def _order(self, line: str) -> None:
        # One that was killed reads nothing.
        with suppress(BrokenPipeError):
            os.write(self._orders, f"{line}\n".encode())

    def _close(self) -> None:
        os.close(self._orders)
        os.close(self._result)
