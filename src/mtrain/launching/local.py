"""Ranks of a run on this machine, in the environment that torchrun would give them.

Where the device allows it, ranks are forked from this process after it has imported torch and megatron-core once: an
import costs seconds of a core each. On other devices they are forked before, and import for themselves.
"""

from __future__ import annotations

import gc
import json
import os
import shutil
import signal
import socket
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TextIO

from mtrain.ckpt.folder import folder_name, is_checkpoint, read_manifest
from mtrain.config.batches import asked
from mtrain.config.manifest import unwatched
from mtrain.config.paths import CHECKPOINTS
from mtrain.config.run import RunConfig
from mtrain.errors import BadEnvironment, MtrainError, say_page
from mtrain.launching import folder, matmul, preflight
from mtrain.launching.supervise import Supervisor
from mtrain.launching.worker import describe, end, enter, leave, revive, run_rank
from mtrain.processes import die_with
from mtrain.train.request import Questions, Request
from mtrain.world.rank_env import LISTEN_FD, End
from mtrain.world.stacks import ERRORS

HOST = "127.0.0.1"
INTERRUPTED = 130
Job = Callable[[End], None]
"""What a rank does, given how it is ended where it hangs."""


@dataclass(frozen=True)
class Source:
    """What text is generated from."""

    checkpoint: Path
    tokenizer: Path


def launch(run: RunConfig, argv: list[str]) -> Path:
    """Train `run` in local processes; returns the run folder.

    `preflight.check` has found no shortage.

    Raises:
        ConfigError, BadEnvironment, CorruptData: before any rank is started.
        MtrainError: what the first failing rank ended with.
    """
    chosen = folder.plan(run)
    say(run, "starting: data, torch, megatron-core")
    prepared = Forked(lambda: _prepare(run, chosen))
    try:
        _warm(run)
    except BaseException:
        prepared.end()
        raise
    prepared.result()
    run = _with_products(run, chosen.checkpoint)
    with folder.opened(run, chosen, argv) as owned:
        for note in owned.notes:
            say(run, note)
        say(run, f"run folder: {owned.folder}")
        if owned.weights is not None and not is_checkpoint(owned.weights):
            say(run, f"importing the weights of {owned.weights}")
            Forked(partial(_import, run, owned.weights, owned.folder)).result()
            owned = replace(owned, weights=owned.folder / CHECKPOINTS / folder_name(0))
        anchored, advice = folder.anchored(run), "go on with checkpoint.resume=latest"
        _run_ranks(anchored, owned.folder, lambda ending: _train(anchored, owned, ending), advice)
    return owned.folder


def observe(
    run: RunConfig, home: Path, *, by_document: bool = False, resumed: bool = False, traced: bool = False
) -> None:
    """Train a small run in local processes and leave in `home` what `train.prove.compare` reads.

    `by_document`: packed samples one document at a time; `resumed`: over a checkpoint; `traced`: with what passes
    each module; see `train.prove.observe`.
    """
    _warm(run)
    run = _with_products(run)
    how = {"by_document": by_document, "resumed": resumed, "traced": traced}
    _run_ranks(run, home, lambda ending: _observe(run, home, how, ending))


def observe_masks(run: RunConfig, home: Path) -> None:
    """Train one step in local processes and leave in `home` what `train.dropped.wrong_masks` reads."""
    _warm(run)
    run = _with_products(run)
    _run_ranks(run, home, lambda ending: _observe_masks(run, home, ending))


def say(run: RunConfig, text: str) -> None:
    """Print a line, unless the run is to be silent or nobody reads any more."""
    if run.log.progress != "none":
        with suppress(OSError):
            say_page(text)


def generate(run: RunConfig, source: Source, request: Request) -> None:
    """Print text from a checkpoint, in local processes of `run`'s layout."""

    def job(ending: End) -> None:
        enter(run, ending)
        from mtrain.train.write import write

        write(run, source.checkpoint, source.tokenizer, request)

    _in_scratch(run, job)


def evaluate(run: RunConfig, checkpoint: Path, tokenizer: Path | None, limit: int | None, as_json: bool) -> None:
    """Print how well a checkpoint predicts the validation split of `run`'s data, in local processes of its layout."""
    Forked(lambda: _tokenized(run, tokenizer)).result()

    def job(ending: End) -> None:
        enter(run, ending)
        from mtrain.train import evaluation

        evaluation.evaluate(run, checkpoint, tokenizer, limit, as_json)

    _in_scratch(run, job)


def answer(run: RunConfig, source: Source, questions: Questions, as_json: bool) -> None:
    """Print the results of a checkpoint in tasks of lm-evaluation-harness, in local processes of `run`'s layout."""

    def job(ending: End) -> None:
        enter(run, ending)
        from mtrain.train import harness

        harness.answer(run, source.checkpoint, source.tokenizer, questions, as_json)

    _in_scratch(run, job)


def _tokenized(run: RunConfig, tokenizer: Path | None) -> None:
    """Find what is wrong with the data of an evaluation before any rank exists."""
    from mtrain.data import validation_of

    validation_of(run.data, run.model.vocab_size, run.trainer.seed, tokenizer, asked(run))


def _in_scratch(run: RunConfig, job: Job) -> None:
    """Run `job` on every rank, with no folder of a run."""
    _warm(run)
    run = _with_products(run)
    with tempfile.TemporaryDirectory(prefix="mtrain-") as scratch:
        _run_ranks(run, Path(scratch), job)


def logits(run: RunConfig, checkpoint: Path, ids: list[int], out: Path) -> None:
    """Leave in `out` what `train.assemble.logits` computes of `run`, which is of one rank."""
    _warm(run)
    with tempfile.TemporaryDirectory(prefix="mtrain-") as scratch:
        _run_ranks(run, Path(scratch), lambda ending: _logits(run, checkpoint, ids, out, ending))


def _prepare(run: RunConfig, chosen: folder.Plan) -> None:
    """Tokenize where that is needed, and find what is wrong with the data before any rank exists."""
    from mtrain.data import open_splits, prepare, same_data

    need = ("train", "validation") if run.trainer.eval_iters else ("train",)
    splits = open_splits(run.data, run.model.vocab_size, run.trainer.seed, prepare(run.data), need, asked(run))
    if run.data.kind == "indexed":  # what mtrain tokenized itself has no other ids
        splits.check_ids()
        if bare := unwatched(run.data):
            say(run, bare)
    if chosen.checkpoint is not None and not run.checkpoint.accept_changes:
        saved = read_manifest(chosen.checkpoint, verify=False)["state"].get("data")
        if saved is not None:
            same_data(saved, splits.describe())


def _train(run: RunConfig, chosen: folder.Plan, ending: End) -> None:
    enter(run, ending)
    from mtrain.train.assemble import Paths, train

    train(run, lambda world: Paths(chosen.folder, chosen.checkpoint, chosen.weights), ending)


def _import(run: RunConfig, source: Path, home: Path) -> None:
    from mtrain.convert.hugging_face import take

    take(run, source, home)


def _observe(run: RunConfig, home: Path, how: dict[str, bool], ending: End) -> None:
    enter(run, ending)
    from mtrain.train import prove

    prove.observe(run, home, **how)


def _observe_masks(run: RunConfig, home: Path, ending: End) -> None:
    enter(run, ending)
    from mtrain.train import chance

    chance.observe_masks(run, home)


def _logits(run: RunConfig, checkpoint: Path, ids: list[int], out: Path, ending: End) -> None:
    enter(run, ending)
    from mtrain.train import assemble

    assemble.logits(run, checkpoint, ids, out)


def import_for(run: RunConfig) -> None:
    """Import what every run on `run`'s device needs, before several of them are forked from this process.

    The environment stays as it was: how many threads a run takes is its own.
    """
    before = dict(os.environ)
    _warm(run)
    os.environ.clear()
    os.environ.update(before)


def _warm(run: RunConfig) -> None:
    """Import everything a rank needs, before the ranks are forked."""
    threads = str(preflight.threads_per_rank(run.parallel.ranks or 1))
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ.setdefault(name, threads)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    from mtrain import mcore as adapter
    from mtrain.devices import registry

    device = registry.get(run.cluster.device)
    if device.fork_safe:
        adapter.install(device)
        import mtrain.train.assemble  # noqa: F401


def _with_products(run: RunConfig, checkpoint: Path | None = None) -> RunConfig:
    """`run` with the library of its products. A child measures it, if need be: no tensor work before ranks fork."""
    if not matmul.is_known(run):
        Forked(lambda: matmul.measured(run)).result()
    return matmul.chosen(run, checkpoint)


def _run_ranks(run: RunConfig, home: Path, job: Job, advice: str = "") -> None:
    """Fork one process per rank, each running `job`, and watch them to the end; `advice` goes with a failure."""
    errors = home / ERRORS
    shutil.rmtree(errors, ignore_errors=True)
    ranks = run.parallel.ranks or 1
    sys.stdout.flush()
    sys.stderr.flush()
    supervisor = Supervisor(errors, advice)
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((HOST, 0))
        listener.listen(2048)
        frozen = gc.get_freeze_count()
        gc.freeze()  # no rank looks through it for garbage, which would copy it
        try:
            supervisor.start(lambda rank: _fork(rank, ranks, listener, job, errors), ranks)
        finally:
            if not frozen:  # by whoever keeps more than this run
                gc.unfreeze()
    supervisor.wait()


def _fork(rank: int, size: int, listener: socket.socket, job: Job, errors: Path) -> int:
    parent = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    die_with(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(size),
        LOCAL_WORLD_SIZE=str(size),
        MASTER_ADDR=HOST,
        MASTER_PORT=str(listener.getsockname()[1]),
    )
    if rank == 0:
        os.environ[LISTEN_FD] = str(os.dup(listener.fileno()))
    listener.close()
    leave(run_rank(lambda: job(lambda error, _: end(error, errors, rank)), errors, rank))
    raise AssertionError("unreachable")


class Forked:
    """A function that runs in a forked process beside this one; its errors are raised here."""

    def __init__(self, work: Callable[[], object]) -> None:
        self.read_end, write_end = os.pipe()
        parent = os.getpid()
        try:
            self.pid = os.fork()
        except OSError as error:
            os.close(self.read_end)
            os.close(write_end)
            raise BadEnvironment(f"no process can be started beside this one: {error.strerror or error}") from None
        if self.pid == 0:
            die_with(parent)
            os.close(self.read_end)
            with os.fdopen(write_end, "w") as pipe:
                code = _report(work, pipe)
            leave(code)
        os.close(write_end)

    def end(self) -> None:
        """End it, whatever it has come to."""
        os.kill(self.pid, signal.SIGKILL)
        os.close(self.read_end)
        os.waitpid(self.pid, 0)

    def result(self) -> None:
        """Wait for its end.

        Raises:
            MtrainError: what the function raised; anything else as BadEnvironment with the text.
        """
        with os.fdopen(self.read_end) as pipe:
            text = pipe.read()
        _, status = os.waitpid(self.pid, 0)
        if os.waitstatus_to_exitcode(status) == INTERRUPTED:
            raise KeyboardInterrupt
        if text:
            raise revive(json.loads(text))
        if status:
            raise BadEnvironment(f"preparing the data ended with {os.waitstatus_to_exitcode(status)}")


def _report(work: Callable[[], object], pipe: TextIO) -> int:
    try:
        work()
    except KeyboardInterrupt:
        return INTERRUPTED
    except MtrainError as error:
        pipe.write(json.dumps(describe(error)))
    except Exception as error:
        text = f"preparing the data failed: {type(error).__name__}: {error}"
        pipe.write(json.dumps(describe(BadEnvironment(text))))
    return 0
