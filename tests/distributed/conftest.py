"""Every test here forks ranks from a process that has megatron-core imported."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from mtrain.config.schema.run import RunConfig


@pytest.fixture(scope="session", autouse=True)
def _install_adapter() -> None:
    """Import everything once per test process."""
    from tests.support.forked import import_engine

    import_engine()


@pytest.fixture(scope="session")
def _one_rank_runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Path]]:
    """Return the folder of runs on one rank, and those trained so far, by their configuration."""
    return tmp_path_factory.mktemp("one-rank"), {}


@pytest.fixture(scope="module", autouse=True)
def _one_rank_once(_one_rank_runs: tuple[Path, dict[str, Path]]) -> Iterator[None]:
    """Train the run on one rank that `prove` compares with once for all of its layouts.

    Only for the tests in this folder: others that the same process runs fork commands, which would
    not share it.
    """
    from mtrain.launching import jobs, local

    real = local.observe
    unbroken = jobs.JOBS["observe"]
    home, known = _one_rank_runs

    def observe(run: RunConfig, folder: Path, **how: bool) -> None:
        key = f"{how} {run.model_dump_json()}"
        if (
            run.parallel.ranks != 1 or jobs.JOBS["observe"] is not unbroken
        ):  # by a test that seeds a fault
            real(run, folder, **how)
            return
        if key not in known:
            known[key] = home / str(len(known))
            known[key].mkdir()
            real(run, known[key], **how)
        shutil.copytree(known[key], folder, dirs_exist_ok=True)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(local, "observe", observe)
        yield


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        # a comparison of paths takes seconds for all the tests of the repository
        if item.nodeid.startswith("tests/distributed/"):
            item.add_marker(pytest.mark.dist)
