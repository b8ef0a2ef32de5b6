"""Work in a process beside the launcher, which itself imports little, starts no threads and calls
no driver.

The work has a name and arguments that JSON can hold. It can therefore be forked, which is quick, or
executed, which is safe once the launcher has threads. Its result or its error comes back through a
pipe.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO

from mtrain import strict_json
from mtrain.ckpt.folder import read_manifest
from mtrain.config.disk.manifest import unwatched
from mtrain.config.resolve.batches import asked
from mtrain.config.resolve.model_tokenizer import model_tokenizer
from mtrain.config.schema.run import RunConfig
from mtrain.errors import BadEnvironment, MtrainError, say_page
from mtrain.launching import matmul
from mtrain.launching.start import PARENT, execute, fork, has_threads, importable, python
from mtrain.launching.worker import describe, leave, revive
from mtrain.processes import die_with


class Beside:
    """Work that runs beside this process; `result` raises its errors here."""

    def __init__(self, name: str, run: RunConfig, **arguments: Any) -> None:
        """Start `WORK[name](run, **arguments)`.

        Raises:
            BadEnvironment: no process can be started.
        """
        self.name = name
        self.read_end, write_end = os.pipe()
        try:
            start = _execute if has_threads() else _fork
            self.pid = start(name, run, arguments, write_end)
        except OSError as error:
            os.close(self.read_end)
            text = f"no process can be started beside this one: {error.strerror or error}"
            raise BadEnvironment(text) from None
        finally:
            os.close(write_end)

    def end(self) -> None:
        """End the work, however far it has come."""
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        os.close(self.read_end)
        os.waitpid(self.pid, 0)

    def result(self) -> Any:
        """Wait for its end, and return what the work returned.

        Raises:
            MtrainError: what the work raised; anything else as BadEnvironment with the text.
        """
        try:
            with os.fdopen(self.read_end) as pipe:
                text = pipe.read()
        except BaseException:  # a stop was asked: it must not go on alone
            with suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
            raise
        _, status = os.waitpid(self.pid, 0)
        code = os.waitstatus_to_exitcode(status)
        if code or not text:  # a process that was killed may have written half of its report
            raise BadEnvironment(f"{DOING[self.name]} ended with {code}")
        body = json.loads(text)
        if "error" in body:
            raise revive(body["error"])
        return body["value"]


def _fork(name: str, run: RunConfig, arguments: dict[str, Any], write_end: int) -> int:
    def work() -> int:
        with os.fdopen(write_end, "w") as pipe:
            return report(name, lambda: WORK[name](run, **arguments), pipe)

    return fork(work)


def _execute(name: str, run: RunConfig, arguments: dict[str, Any], write_end: int) -> int:
    body = strict_json.dumps({"name": name, "run": run.model_dump_json(), "arguments": arguments})
    environment = {**importable(os.environ), PARENT: str(os.getpid())}
    given, giving = os.pipe()
    with (
        suppress(BrokenPipeError),
        os.fdopen(giving, "w") as pipe,
    ):  # a process that has ended reads nothing
        try:
            command = python("mtrain.launching.beside", str(given), str(write_end))
            pid = execute(command, environment, given, write_end)
        finally:
            os.close(given)
        pipe.write(body)
    return pid


def report(name: str, work: Callable[[], Any], pipe: TextIO) -> int:
    """Do the work, and write what it returns or raises as JSON; return the exit code."""
    try:
        pipe.write(strict_json.dumps({"value": work()}))
    except MtrainError as error:
        pipe.write(strict_json.dumps({"error": describe(error)}))
    except Exception as error:
        text = f"{DOING[name]} failed: {type(error).__name__}: {error}"
        pipe.write(strict_json.dumps({"error": describe(BadEnvironment(text))}))
    return 0


def prepare(run: RunConfig, checkpoint: str | None) -> None:
    """Tokenize where that is needed, and find what is wrong with the data before any rank exists.

    Raises:
        MtrainError: what is wrong with the data, or that it is not the data of `checkpoint`.
    """
    from mtrain.data import open_splits, prepare_for_model, same_data

    need = ("train", "validation") if run.trainer.eval_iters else ("train",)
    own = model_tokenizer(run, None if checkpoint is None else Path(checkpoint))
    corpus = prepare_for_model(run.data, own, accept_changes=run.checkpoint.accept_changes)
    splits = open_splits(run.data, run.model.vocab_size, run.trainer.seed, corpus, need, asked(run))
    if run.data.kind == "indexed":  # what mtrain tokenized itself has no other ids
        splits.check_ids()
        bare = unwatched(run.data)
        if bare and run.log.progress != "none":
            with suppress(OSError):
                say_page(bare)
    if checkpoint is not None and not run.checkpoint.accept_changes:
        saved = read_manifest(Path(checkpoint), verify=False)["state"].get("data")
        if saved is not None:
            same_data(saved, splits.describe())


def _import(run: RunConfig, source: str, home: str) -> None:
    from mtrain.convert.huggingface.model import import_model

    import_model(run, Path(source), Path(home))


def _validation(run: RunConfig, tokenizer: str | None) -> None:
    """Find what is wrong with the data of an evaluation."""
    from mtrain.data import validation_of

    file = None if tokenizer is None else Path(tokenizer)
    validation_of(run.data, run.model.vocab_size, run.trainer.seed, file, asked(run))


def _theirs(run: RunConfig, folder: str, ids: list[int], out: str) -> None:
    from mtrain.convert.huggingface import hf_reference

    hf_reference.save_logits(Path(folder), ids, Path(out), run.model)


WORK: dict[str, Callable[..., Any]] = {
    "prepare": prepare,
    "import": _import,
    "validation": _validation,
    "products": matmul.measure,
    "logits of transformers": _theirs,
}
"""Name -> the function that does the work, given the run and the arguments."""
DOING = {
    "prepare": "preparing the data",
    "import": "importing the weights",
    "validation": "reading the validation data",
    "products": "measuring the matrix products",
    "logits of transformers": "computing the logits of transformers",
}
"""Name -> the work in words, for messages."""


def main(words: list[str]) -> None:
    """Do the work that stands in the descriptor `words[0]`, and report to `words[1]`; ends the
    process.
    """
    die_with(int(os.environ.pop(PARENT)))
    with os.fdopen(int(words[0])) as given:
        body = json.loads(given.read())

    def work() -> Any:
        run = RunConfig.model_validate_json(body["run"])
        return WORK[body["name"]](run, **body["arguments"])

    with os.fdopen(int(words[1]), "w") as pipe:
        code = report(body["name"], work, pipe)
    leave(code)


if __name__ == "__main__":
    main(sys.argv[1:])
