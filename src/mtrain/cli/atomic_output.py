"""Paths given to a conversion, and the folder that it writes, complete or not at all."""

from __future__ import annotations

import os
import shlex
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from mtrain import locks
from mtrain.cli.output import refusal
from mtrain.config.compose.paths import program
from mtrain.config.disk.files import download_of
from mtrain.durable import sync
from mtrain.errors import BadEnvironment
from mtrain.units import bytes_, number_of

DTYPES = {"fp32": "F32", "bf16": "BF16", "fp16": "F16"}


def given_paths(argv: list[str], many: int, usage: str) -> list[Path]:
    """Return the paths that a subverb of `convert` was given, which are there.

    Raises:
        ConfigError: there are more or fewer than `many`, or one does not exist.
    """
    if len(argv) != many or any("=" in word for word in argv):
        rule = f"cannot {usage.split()[0]} because it takes {number_of(many, 'path')}"
        raise refusal(rule, f"{program()} convert {usage}", "MT002")
    paths = [Path(word).expanduser() for word in argv]
    for path in paths:
        if not path.exists():
            rule = f"{path} does not exist"
            fix = f"{program()} convert {usage}"
            if not usage.startswith("export") and (download := download_of(str(path))) is not None:
                rule += "; if it is the name of a model on Hugging Face, nothing is downloaded here"
                words = [download[1] if word == str(path) else word for word in argv]
                then = shlex.join([usage.split()[0], *words])
                if usage.startswith("import"):
                    then = usage.replace("HF_DIR", download[1])
                fix = f"{download[0]}, then {program()} convert {then}"
            raise refusal(rule, fix, "MT002")
    return paths


def source_and_new(argv: list[str], usage: str) -> tuple[Path, Path, list[str]]:
    """Return the source, the new folder, and the other words.

    Raises:
        ConfigError: the first is not there, or the second is, or is missing.
    """
    (source,) = given_paths(argv[:1], 1, usage)
    if len(argv) < 2 or "=" in argv[1]:
        rule = "cannot import because the folder to write is missing"
        raise refusal(rule, f"{program()} convert {usage}", "MT002")
    return source, new_folder(Path(argv[1]).expanduser()), argv[2:]


def new_folder(out: Path) -> Path:
    """Return a folder that is not there yet.

    Raises:
        ConfigError: it is.
    """
    if out.exists():
        raise refusal(f"{out} is there; a new folder is written", f"{out}-2", "MT507")
    return out


def read_dtype(options: Mapping[str, str]) -> str | None:
    """Return the name in safetensors of the format that `dtype=` names; None: it is unset.

    Raises:
        ConfigError: the format is unknown.
    """
    word = options.get("dtype")
    if word is not None and word not in DTYPES:
        fix = " or ".join(f"dtype={known}" for known in DTYPES)
        rule = "cannot be written because there is no such format"
        raise refusal(rule, fix, "MT003", "dtype", word)
    return DTYPES[word] if word is not None else None


@contextmanager
def drafted(out: Path, doing: str) -> Iterator[Path]:
    """Yield a draft next to `out` that gets its name once complete, without the rest of an
    interrupted conversion.

    Raises:
        BadEnvironment: it cannot be written, or another process writes it.
    """
    draft = out.with_name(f".{doing}-{out.name}")
    try:
        descriptor, held = _claim(draft)
        try:
            yield draft
            for file in draft.rglob("*"):
                # A rename can reach the disk before the data does.
                sync(file)
            sync(draft)
            draft.rename(out)
            sync(out.parent)
        except BaseException:
            shutil.rmtree(draft, ignore_errors=True)
            raise
        finally:
            held.release()
            os.close(descriptor)
    except OSError as error:
        # `disk_usage` needs a folder that exists, and this one may be what could not be made.
        there = next(path for path in draft.parents if path.exists())
        free = bytes_(shutil.disk_usage(there).free)
        raise BadEnvironment(f"{out} cannot be written ({free} free): {error}") from None


def _claim(draft: Path) -> tuple[int, locks.Lock]:
    """Return a descriptor of an empty folder, and its lock, which own the folder while held."""
    while True:
        draft.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(draft, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        held = locks.Lock()
        try:
            held = locks.lock(descriptor, draft)
            # The path may have been renamed or removed between `open` and the lock.
            if os.path.exists(draft) and os.path.samestat(os.fstat(descriptor), os.stat(draft)):
                _empty(draft)
                return descriptor, held
            # The process that held the lock has renamed or removed the folder.
            held.release()
            os.close(descriptor)
        except BaseException as error:
            held.release()
            os.close(descriptor)
            if isinstance(error, locks.Taken):
                raise BadEnvironment(_in_use(draft, error.owner)) from None
            raise


def _empty(folder: Path) -> None:
    for left in folder.iterdir():
        if left.is_dir() and not left.is_symlink():
            shutil.rmtree(left)
        else:
            left.unlink()


def _in_use(draft: Path, owner: str) -> str:
    return f"another process writes {draft}" + (f": {owner}" if owner else "")
