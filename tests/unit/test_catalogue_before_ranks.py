"""Rows of the catalogue that only data, a checkpoint or the machine can show: refused before any
process group.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from mtrain.ckpt.folder import MANIFEST
from mtrain.config.resolve.resolution import Machine, resolve
from mtrain.config.schema.run import RunConfig
from mtrain.data.store.indexed import IndexedWriter
from mtrain.errors import BadEnvironment, ConfigError, CorruptData, MtrainError
from mtrain.launching import child_process, folder, preflight
from mtrain.launching.environment import Place, environment
from mtrain.launching.resume import anchored
from tests.support.configs import LAPTOP, errors, tiny
from tests.support.saved import committed

EOD = 0
Row = Callable[[Path], None]
BEFORE_RANKS: dict[int, list[Row]] = {}


def row(number: int) -> Callable[[Row], Row]:
    """Register a function that raises for a number of the catalogue."""

    def keep(function: Row) -> Row:
        BEFORE_RANKS.setdefault(number, []).append(function)
        return function

    return keep


def indexed(home: Path, tokens: np.ndarray, **changes: object) -> RunConfig:
    """Return a run on tokens that another program has written."""
    with IndexedWriter(home / "tokens", np.dtype("<i4")) as writer:
        writer.add(tokens, np.full(10, len(tokens) // 10))
    return resolve(
        tiny(data__kind="indexed", data__path=str(home / "tokens"), data__seq_length=16, **changes),
        LAPTOP,
    )


def prepared(run: RunConfig) -> None:
    """Prepare a run as the launcher does before it starts ranks."""
    chosen = folder.plan(run)
    child_process.prepare(run, str(chosen.checkpoint) if chosen.checkpoint else None)


def begun(home: Path, **changes: object) -> RunConfig:
    """Return a run whose folder holds one committed checkpoint."""
    run = resolve(tiny(log__runs_dir=str(home), log__name="a", **changes), LAPTOP)
    with folder.opened(run, folder.plan(run), []):
        pass
    committed(anchored(run), home / "a/checkpoints")
    (home / "a/metrics.jsonl").write_text('{"step": 1}\n')
    return run


def resumed(home: Path, **changes: object) -> None:
    folder.plan(
        resolve(
            tiny(log__runs_dir=str(home), checkpoint__resume=str(home / "a"), **changes), LAPTOP
        )
    )


def refused(kind: type[MtrainError], *words: str) -> pytest.RaisesExc[MtrainError]:  # type: ignore[name-defined]
    return pytest.raises(kind, check=lambda error: all(word in str(error) for word in words))


@row(44)
def _an_id_that_the_model_has_no_row_for(home: Path) -> None:
    tokens = np.ones(1000, np.int64)
    tokens[555] = 4096
    with refused(CorruptData, "token id 4096", "document 5", "ids 0 to 4095", "offset 2220"):
        prepared(indexed(home, tokens))


@row(45)
def _a_negative_id(home: Path) -> None:
    tokens = np.ones(1000, np.int64)
    tokens[990] = -7
    with refused(CorruptData, "token id -7", "document 9"):
        prepared(indexed(home, tokens, data__split=[0.5, 0.5, 0.0]))


@row(74)
def _a_split_without_one_sample(home: Path) -> None:
    with refused(ConfigError, "MT605", "data.seq_length", "one sample needs 17"):
        prepared(indexed(home, np.ones(30, np.int64)))


@row(79)
def _masking_the_end_of_documents_that_nobody_knows(home: Path) -> None:
    with refused(ConfigError, "MT608", "data.eod_mask_loss", "Use data.eod_mask_loss=false"):
        prepared(indexed(home, np.ones(1000, np.int64), data__eod_mask_loss=True))


@row(80)
def _a_checkpoint_of_another_model(home: Path) -> None:
    begun(home)
    with refused(
        ConfigError,
        "MT503",
        "model.num_layers=2",
        "has 4",
        "Use model.num_layers=4",
        "model.hidden_size",
    ):
        resumed(home, model__num_layers=2, model__hidden_size=128)


@row(81)
def _a_folder_that_is_no_whole_checkpoint(home: Path) -> None:
    begun(home)
    (home / "a/checkpoints/step_00000001" / MANIFEST).unlink()
    run = resolve(tiny(checkpoint__resume=str(home / "a/checkpoints/step_00000001")), LAPTOP)
    with refused(CorruptData, "not a committed checkpoint", MANIFEST):
        folder.plan(run)


@row(82)
def _another_learning_rate_on_resume(home: Path) -> None:
    begun(home)
    with refused(ConfigError, "MT504", "optim.lr=0.5", "checkpoint.accept_changes=true"):
        resumed(home, optim__lr=0.5)


@row(82)
def _another_batch_on_resume(home: Path) -> None:
    begun(home)
    with refused(ConfigError, "MT504", "trainer.global_batch_size=32", "has 16"):
        resumed(home, trainer__global_batch_size=32)


@row(84)
def _a_folder_that_holds_a_run(home: Path) -> None:
    begun(home)
    run = resolve(tiny(log__runs_dir=str(home), log__name="a"), LAPTOP)
    assert [
        p.code for p in errors(run)
    ] == []  # `check` warns, see test_rules_catalogue; training refuses
    with refused(ConfigError, "MT501", "exists already", "log.name=a-2"):
        folder.plan(run)


@row(87)
def _kernels_in_the_order_of_their_launch(home: Path) -> None:
    """Set megatron-core's environment variable, so that nobody can forget it."""
    run = resolve(tiny(cluster__device="cuda", cluster__devices_per_node=2, parallel__tp=2), LAPTOP)
    assert environment(run, Place(2), {})["CUDA_DEVICE_MAX_CONNECTIONS"].value == "1"


@row(93)
def _more_ranks_than_a_machine_may_start(home: Path) -> None:
    run = resolve(tiny(parallel__ranks=65, trainer__global_batch_size=260), LAPTOP)
    with refused(BadEnvironment, "65 processes", "at most 64"):
        preflight.check(run, [], LAPTOP)


@row(93)
def _gpus_that_are_not_here(home: Path) -> None:
    run = resolve(
        tiny(cluster__device="cuda", cluster__devices_per_node=8, trainer__global_batch_size=32),
        LAPTOP,
    )
    with refused(BadEnvironment, "needs 8 GPUs", "here: 0"):
        preflight.check(run, [], LAPTOP)


@row(93)
def _a_model_larger_than_memory(home: Path) -> None:
    small = Machine(cpu_cores=2, memory_bytes=1 << 20)
    with refused(BadEnvironment, "of memory", "1.0 MiB"):
        preflight.check(resolve(tiny(), small), [], small)


@row(94)
def _more_machines_than_this_command_starts(home: Path) -> None:
    run = resolve(tiny(cluster__nodes=2, parallel__ranks=2), LAPTOP)
    with refused(BadEnvironment, "2 machines", "torchrun"):
        preflight.check(run, [], LAPTOP)


@pytest.mark.parametrize(
    "refuses",
    [f for number in sorted(BEFORE_RANKS) for f in BEFORE_RANKS[number]],
    ids=lambda f: f.__name__,
)
def test_catalogue_refuses_before_any_rank(
    refuses: Row, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        socket.socket, "listen", lambda *_: pytest.fail("a rank's socket was opened")
    )
    refuses(tmp_path)
