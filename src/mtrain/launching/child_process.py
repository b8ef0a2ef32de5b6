"""Work in a child process of the launcher, which itself imports little, starts no threads and calls
no driver.

The work has a name and arguments that JSON can hold. It can therefore be forked, which is fast, or
executed, which is safe once the launcher has threads. A pipe returns its result or its error.
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
from mtrain.ckpt.folder import parse_manifest
from mtrain.config.disk.token_files import unwatched
from mtrain.config.resolve.batches import asked
from mtrain.config.resolve.model_tokenizer import model_tokenizer
from mtrain.config.schema.run import RunConfig
from mtrain.errors import BadEnvironment, ConfigError, MtrainError, say_page
from mtrain.launching import matmul
from mtrain.launching.start import PARENT, execute, fork, has_threads, importable, python
from mtrain.launching.worker import describe, leave, revive
from mtrain.processes import die_with


class ChildProcess:
    """A child process that does one piece of work; `result` raises its errors here."""

    def __init__(
        self, name: str, run: RunConfig, *, executed: bool = False, **arguments: Any
    ) -> None:
        """Start `WORK[name](run, **arguments)`; `executed` forbids to fork.

        Raises:
            BadEnvironment: no process can be started.
        """
        self.name = name
        self.read_end, write_end = os.pipe()
        try:
            start = _execute if executed or has_threads() else _fork
            self.pid = start(name, run, arguments, write_end)
        except OSError as error:
            os.close(self.read_end)
            text = f"no child process can be started: {error.strerror or error}"
            raise BadEnvironment(text) from None
        finally:
            os.close(write_end)

    def end(self) -> None:
        """Kill the child, whatever the state of its work."""
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        os.close(self.read_end)
        os.waitpid(self.pid, 0)

    def abandon(self) -> None:
        """End the child if it still runs; the launcher may have collected it with its ranks."""
        os.close(self.read_end)
        with suppress(ChildProcessError):
            # 0 only for a child that runs, so the id is that of no other process.
            if os.waitpid(self.pid, os.WNOHANG)[0] == 0:
                os.kill(self.pid, signal.SIGKILL)
                os.waitpid(self.pid, 0)

    def result(self) -> Any:
        """Wait for the child to end, and return the result of its work.

        Raises:
            MtrainError: the error of the work; one of another type becomes BadEnvironment.
        """
        try:
            with os.fdopen(self.read_end) as pipe:
                text = pipe.read()
        except BaseException:  # a stop ends this process, and its child must not outlive it
            with suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
            raise
        _, status = os.waitpid(self.pid, 0)
        code = os.waitstatus_to_exitcode(status)
        if code or not text:  # a process that was killed may have written half of its report
            raise BadEnvironment(f"{DESCRIPTIONS[self.name]} ended with {code}")
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
    # A configuration may be longer than the system allows a command line to be.
    given, giving = os.pipe()
    # A child that ended early breaks the pipe; its exit code gives the reason.
    with suppress(BrokenPipeError), os.fdopen(giving, "w") as pipe:
        try:
            command = python("mtrain.launching.child_process", str(given), str(write_end))
            pid = execute(command, environment, given, write_end)
        finally:
            os.close(given)
        pipe.write(body)
    return pid


def report(name: str, work: Callable[[], Any], pipe: TextIO) -> int:
    """Do the work, and write its result or error as JSON; return the exit code."""
    try:
        pipe.write(strict_json.dumps({"value": work()}))
    except MtrainError as error:
        pipe.write(strict_json.dumps({"error": describe(error)}))
    except Exception as error:
        text = f"{DESCRIPTIONS[name]} failed: {type(error).__name__}: {error}"
        pipe.write(strict_json.dumps({"error": describe(BadEnvironment(text))}))
    return 0


def prepare(run: RunConfig, checkpoint: str | None) -> None:
    """Tokenize if necessary, and check the data before any rank exists.

    Raises:
        MtrainError: the data is invalid, or is not the data of `checkpoint`.
    """
    from mtrain.data import open_splits, prepare_for_model

    need = ("train", "validation") if run.trainer.eval_iters else ("train",)
    own = model_tokenizer(run, None if checkpoint is None else Path(checkpoint))
    corpus = prepare_for_model(run.data, own, accept_changes=run.checkpoint.accept_changes)
    splits = open_splits(run.data, run.model.vocab_size, run.trainer.seed, corpus, need, asked(run))
    # tokens that mtrain made have ids of the tokenizer, which the vocabulary was compared with
    if run.data.kind == "indexed":
        splits.check_ids()
        bare = unwatched(run.data)
        if bare and run.log.progress != "none":
            with suppress(OSError):
                say_page(bare)
    if checkpoint is not None:
        from mtrain.launching.verdict import data

        problems = data.problems(run, parse_manifest(Path(checkpoint)), splits)
        if problems:
            raise ConfigError(problems)


def _import(run: RunConfig, source: str, home: str) -> None:
    from mtrain.convert.huggingface.model import import_model

    import_model(run, Path(source), Path(home))


def _validation(run: RunConfig, tokenizer: str | None) -> None:
    """Check the validation data of an evaluation."""
    from mtrain.data import validation_of

    file = None if tokenizer is None else Path(tokenizer)
    validation_of(run.data, run.model.vocab_size, run.trainer.seed, file, asked(run))


def _kernels(run: RunConfig, stages: dict[str, int], count: int, report: str) -> None:
    from mtrain.launching.kernels import compile_kernels

    compile_kernels(run, stages, count, report)


def _reference_logits(run: RunConfig, folder: str, ids: list[int], out: str) -> None:
    from mtrain.convert.huggingface import hf_reference

    hf_reference.save_logits(Path(folder), ids, Path(out), run.model)


# Name -> the function that does the work, called with the run and the arguments
WORK: dict[str, Callable[..., Any]] = {
    "prepare": prepare,
    "import": _import,
    "validation": _validation,
    "products": matmul.measure,
    "kernels": _kernels,
    "logits of transformers": _reference_logits,
}
# Name -> the work in words, for messages
DESCRIPTIONS = {
    "prepare": "preparing the data",
    "import": "importing the weights",
    "validation": "reading the validation data",
    "products": "measuring the matrix products",
    "kernels": "compiling the kernels",
    "logits of transformers": "computing the logits of transformers",
}


def main(words: list[str]) -> None:
    """Do the work in the descriptor `words[0]`, report to `words[1]`, and end the process."""
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
