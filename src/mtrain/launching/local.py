"""Runs on this machine: each verb that needs ranks starts them here, in the environment that
torchrun would set.

If the device allows it, this process imports torch and megatron-core once, which takes seconds, and
the ranks are forked from it. On other devices this process imports neither, and each rank is
executed.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from mtrain import startup
from mtrain.ckpt.folder import folder_name, is_checkpoint
from mtrain.config.compose.paths import CHECKPOINTS
from mtrain.config.machine.devices import CPU
from mtrain.config.schema.run import RunConfig
from mtrain.errors import TrainingError, say_page
from mtrain.launching import environment, folder, from_store, matmul, uploads
from mtrain.launching.child_process import ChildProcess
from mtrain.launching.environment import Place
from mtrain.launching.jobs import MASKS, TRAIN, Job, path_text
from mtrain.launching.machines import DirectingSupervisor, Director
from mtrain.launching.restart import ADVICE, Attempts, step_in
from mtrain.launching.signals import scratch_folder
from mtrain.launching.start import Share, may_fork, run_ranks, without_launcher
from mtrain.launching.supervise import Failure, Supervisor
from mtrain.launching.uploads import Claim
from mtrain.launching.warming import Warming
from mtrain.train.generate.request import Questions, Request, Texts, Written
from mtrain.world import launchers
from mtrain.world.faults import Fault
from mtrain.world.stacks import ERRORS


@dataclass(frozen=True)
class Source:
    """The checkpoint and the tokenizer that generate text."""

    checkpoint: Path
    tokenizer: Path


def launch(
    run: RunConfig,
    argv: list[str],
    injected: Sequence[Fault] = (),
    director: Director | None = None,
) -> Path:
    """Train `run` in local processes; return the run folder.

    `preflight.check` has found no shortage. `injected` are faults for tests. `director` has other
    machines start their ranks of the run; None: all ranks are here.

    Raises:
        ConfigError, BadEnvironment, CorruptData: before any rank is started.
        MtrainError: the error of the first failing rank.
    """
    startup.mark(startup.COMPOSITION)
    launch = launchers.identity(os.environ)
    restarted = launchers.restarted(os.environ)
    run = from_store.brought(run, launch=launch, restarted=restarted, say=partial(say, run))
    chosen = folder.plan(run, launch=restarted)
    say(run, "starting: data, torch, megatron-core")
    share = None if director is None else director.share
    with (
        uploads.claimed(run, chosen.folder, launch) as claim,
        prepared(run, chosen.checkpoint, share),
    ):
        if director is not None:
            director.wait_ready()
        return _launched(run, chosen, argv, launch, claim, injected, director)


@contextmanager
def prepared(run: RunConfig, checkpoint: Path | None, share: Share | None) -> Iterator[None]:
    """Prepare this machine for its ranks: the data, the libraries, and, inside the block, the
    kernels.

    Raises:
        MtrainError: the data is invalid, or is not the data of `checkpoint`.
    """
    first, here = (0, run.parallel.ranks) if share is None else (share.first, share.here)
    with closing(Warming(run, first, here)) as kernels:
        kernels.begin(prepared=False)
        # the data is prepared while this process imports torch
        child = ChildProcess("prepare", run, checkpoint=path_text(checkpoint))
        try:
            warm(run, share)
        except BaseException:
            child.end()
            raise
        startup.mark(startup.LIBRARIES)
        child.result()
        startup.mark(startup.DATA)
        kernels.begin(prepared=True)
        yield


def _launched(
    run: RunConfig,
    chosen: folder.Plan,
    argv: list[str],
    launch: str | None,
    claim: Claim | None,
    injected: Sequence[Fault],
    director: Director | None,
) -> Path:
    """Train in the planned folder, whose data is prepared."""
    run = _with_products(run, chosen.checkpoint)
    with folder.opened(run, chosen, argv, launch=launch) as owned:
        for note in owned.notes:
            say(run, note)
        say(run, f"run folder: {owned.folder}")
        # ranks read shards of a checkpoint: a Hugging Face folder becomes one, at step 0
        if owned.weights is not None and not is_checkpoint(owned.weights):
            say(run, f"importing the weights of {owned.weights}")
            ChildProcess("import", run, source=str(owned.weights), home=str(owned.folder)).result()
            owned = replace(owned, weights=owned.folder / CHECKPOINTS / folder_name(0))
        startup.mark(startup.FOLDER)
        attempts = Attempts(
            folder.anchored(run),
            owned.folder,
            owned.checkpoint,
            owned.weights,
            partial(_say_after_ranks, run),
            injected,
        )
        share = None if director is None else director.share
        given = environment_of(run, owned.folder, share)
        starts = _Here(given) if director is None else _OnMachines(given, director)
        barred = _is_barred(run)
        with uploads.uploading(run, owned.folder, owned.checkpoint, claim, barred=barred):
            attempts.train(starts)
    return owned.folder


@dataclass
class _Here:
    """Starts all ranks of a run on this machine."""

    environment: Mapping[str, str]

    def supervisor(self, errors: Path) -> Supervisor:
        return Supervisor(errors, ADVICE)

    def start(self, attempts: Attempts, supervisor: Supervisor, known: int) -> None:
        job = _job(attempts, known)
        run_ranks(attempts.run, attempts.home, job, self.environment, supervisor)

    def replace_lost(self, failure: Failure) -> None:
        """Wait for nothing: this machine is there."""


@dataclass
class _OnMachines:
    """Starts the ranks of a run on several machines, through their launchers."""

    environment: Mapping[str, str]
    director: Director

    def supervisor(self, errors: Path) -> Supervisor:
        return DirectingSupervisor(errors, ADVICE, self.director)

    def start(self, attempts: Attempts, supervisor: Supervisor, known: int) -> None:
        job = _job(attempts, known)
        step = step_in(attempts.checkpoint)
        share = self.director.share_of(attempts.run, attempts.home, job, step)
        with self._replicating(attempts):
            run_ranks(attempts.run, attempts.home, job, self.environment, supervisor, share)

    def _replicating(self, attempts: Attempts) -> AbstractContextManager[None]:
        one = self.director.replication
        if one is None:
            return nullcontext()
        run = attempts.run
        return one.running(run, attempts.home, self.director.addresses, barred=_is_barred(run))

    def replace_lost(self, failure: Failure) -> None:
        if not self.director.lost:
            return
        run = self.director.run
        assert run is not None
        patience_s = run.trainer.join_timeout_s
        _say_after_ranks(
            run, f"waiting up to {patience_s:g} s for another launcher of the lost machine"
        )
        if self.director.replace():
            why = f"no other launcher came within {patience_s:g} s (trainer.join_timeout_s)"
            raise TrainingError(str(failure.error), f"  not restarted: {why}")


def _job(attempts: Attempts, known: int) -> Job:
    """Return the job that trains; `known`: see `in_process.train_with_restarts`."""
    return Job.of(
        TRAIN,
        checkpoint=attempts.checkpoint,
        weights=attempts.weights,
        accept_changes=attempts.run.checkpoint.accept_changes,
        injected=list(map(str, attempts.injected)),
        known=known,
    )


def observe(
    run: RunConfig,
    home: Path,
    *,
    by_document: bool = False,
    resumed: bool = False,
    traced: bool = False,
) -> None:
    """Train a small run in local processes and write the files for `verify.prove` to `home`.

    `by_document`: packed samples one document at a time; `resumed`: from a checkpoint in the
    middle; `traced`: with the inputs and outputs of each module; see `train.verify.prove.observe`.
    """
    _run(run, home, Job.of("observe", by_document=by_document, resumed=resumed, traced=traced))


def observe_masks(run: RunConfig, home: Path) -> None:
    """Train one step and write the masks for `dropout_compare.wrong_masks` to `home`."""
    _run(run, home, MASKS)


def generate(run: RunConfig, source: Source, request: Request) -> Texts:
    """Return texts from a checkpoint, written in local processes of `run`'s layout."""
    with scratch_folder() as scratch:
        output = scratch / "texts.json"
        places = {"checkpoint": source.checkpoint, "tokenizer": source.tokenizer, "output": output}
        _run(run, scratch, Job.of("generate", **places, request=request))
        facts = json.loads(output.read_text(encoding="utf-8"))
    texts = tuple(Written(**one) for one in facts.pop("texts"))
    return Texts(texts, **facts)


def evaluate(
    run: RunConfig, checkpoint: Path, tokenizer: Path | None, limit: int | None, as_json: bool
) -> None:
    """Print the losses of a checkpoint on a validation split, in local processes."""
    ChildProcess("validation", run, tokenizer=path_text(tokenizer)).result()
    places = {"checkpoint": checkpoint, "tokenizer": tokenizer}
    _in_scratch(run, Job.of("evaluate", **places, limit=limit, as_json=as_json))


def distil(run: RunConfig, out: Path) -> None:
    """Write the likeliest tokens of a run's teacher to the folder `out`, in local processes of the
    run's layout.
    """
    ChildProcess("prepare", run, checkpoint=None).result()
    _in_scratch(run, Job.of("distil", out=out.absolute()))


def answer(run: RunConfig, source: Source, questions: Questions, as_json: bool) -> None:
    """Print the results of a checkpoint on tasks of lm-evaluation-harness, in local processes."""
    places = {"checkpoint": source.checkpoint, "tokenizer": source.tokenizer}
    _in_scratch(run, Job.of("answer", **places, questions=questions, as_json=as_json))


def bisect(
    run: RunConfig, checkpoint: Path | None, step: int, usual: Sequence[float], out: Path
) -> None:
    """Write the cause of an anomalous step to `out`, in processes of the run's layout."""
    ChildProcess("prepare", run, checkpoint=path_text(checkpoint)).result()
    places = {"checkpoint": checkpoint, "out": out.absolute()}
    _in_scratch(run, Job.of("bisect", **places, step=step, usual=list(usual)))


def logits(run: RunConfig, checkpoint: Path, ids: list[int], out: Path) -> None:
    """Write the result of `train.run.logits` to `out`; `run` has one rank."""
    warm(run)
    with scratch_folder() as scratch:
        job = Job.of("logits", checkpoint=checkpoint, ids=ids, out=out)
        run_ranks(run, scratch, job, environment_of(run))


def say(run: RunConfig, text: str) -> None:
    """Print a line, unless the run is silent or standard output is closed."""
    if run.log.progress != "none":
        with suppress(OSError):
            say_page(text)


def _say_after_ranks(run: RunConfig, text: str) -> None:
    """Print a line below the progress bar that a killed rank leaves on a terminal."""
    say(run, f"\n{text}" if _is_barred(run) else text)


def _is_barred(run: RunConfig) -> bool:
    """Return whether ranks print a progress bar."""
    return run.log.progress in ("auto", "live") and sys.stdout.isatty()


def import_for(run: RunConfig) -> None:
    """Import everything that the device of `run` needs, before several runs are forked from this
    process.

    The environment stays unchanged, because each run sets its own number of threads.
    """
    before = dict(os.environ)
    warm(run)
    os.environ.clear()
    os.environ.update(before)


def environment_of(
    run: RunConfig, home: Path | None = None, share: Share | None = None
) -> dict[str, str]:
    """Return the environment of all ranks on this machine, which has `share`; None: all."""
    values = without_launcher(os.environ)
    errors = None if home is None else home.absolute() / ERRORS
    here = run.parallel.ranks if share is None else share.here
    place = Place.here(here, on_one_machine=share is None, errors=errors)
    environment.apply(environment.environment(run, place, values), values)
    return values


def warm(run: RunConfig, share: Share | None = None) -> None:
    """Import everything that a rank needs, if ranks are forked from this process."""
    if not may_fork(run):
        return
    # Libraries read it when they are imported.
    os.environ.update(environment_of(run, share=share))
    from mtrain import mcore as adapter
    from mtrain.devices import registry

    adapter.install(registry.get(run.cluster.device))
    import mtrain.train.assemble  # noqa: F401


def install_reader() -> None:
    """Import the CPU modules that read the files of ranks, whatever device the ranks used."""
    from mtrain import mcore as adapter
    from mtrain.devices import registry

    adapter.install(registry.get(CPU.name))


def _run(run: RunConfig, home: Path, job: Job) -> None:
    warm(run)
    run = _with_products(run)
    run_ranks(run, home, job, environment_of(run, home))


def _in_scratch(run: RunConfig, job: Job) -> None:
    """Run `job` on every rank, in a temporary folder."""
    with scratch_folder() as scratch:
        _run(run, scratch, job)


def _with_products(run: RunConfig, checkpoint: Path | None = None) -> RunConfig:
    """Return `run` with the library of its products.

    A child process measures it, because tensor work starts threads.
    """
    measured = None if matmul.is_known(run) else ChildProcess("products", run).result()
    return matmul.chosen(run, checkpoint, measured)
