"""`check`, `show` and the command line itself, as a user's shell sees them."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import launched
from tests.support.patience import patient

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.e2e


def mtrain(*argv: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return launched.mtrain(*argv, cwd=ROOT, **environment)


def test_check_prints_what_would_run() -> None:
    done = mtrain("check", "model=llama3_70b", "parallel=tp4pp4", "cluster=h100x64")
    assert done.returncode == 0, done.stderr
    for piece in ("ok", "llama3_70b, 70.55B", "tp 4, pp 4, dp 4", "64 on h100x64", "digest"):
        assert piece in done.stdout


@pytest.mark.full
def test_check_takes_under_a_second() -> None:
    """Measure CPU seconds, which a busy machine disturbs least."""
    spec = importlib.util.spec_from_file_location("check_time", ROOT / "benchmarks/check_time.py")
    assert spec is not None
    assert spec.loader is not None
    bench = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(bench)
    result = bench.measured(["deepseek/v3_h100x1024"], rounds=3)
    assert result["ratio"]["cpu"] >= 6, result
    assert max(result["check_cpu_s"].values()) < 0.9, result


def test_check_prints_all_errors_to_stderr() -> None:
    done = mtrain(
        "check",
        "parallel=tp3pp3",
        "trainer.global_batch_size=15",
        "trainer.micro_batch_size=4",
        "optim.min_lr=1.0",
    )
    assert (done.returncode, done.stdout) == (2, "")
    for piece in ("MT101", "MT107", "MT130", "MT421", "command line", "Use parallel.tp=2"):
        assert piece in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stderr.rstrip().splitlines()[-1].startswith("7 problems")


def test_check_debug_adds_traceback() -> None:
    assert "Traceback" in mtrain("check", "parallel=tp3", "--debug").stderr


def test_check_json_covers_both_verdicts() -> None:
    good = json.loads(mtrain("check", "--json").stdout)
    assert good["ok"] is True
    assert len(good["digest"]) == 64
    done = mtrain("check", "--json", "parallel=tp3", "model.hiden_size=2")
    bad = json.loads(done.stdout)
    assert (done.returncode, done.stderr, bad["ok"]) == (2, "", False)
    assert set(bad["problems"][0]) == {
        "code",
        "path",
        "value",
        "source",
        "rule",
        "fix",
        "severity",
        "related",
    }
    assert bad["problems"][0]["path"] == "model.hiden_size"


def test_check_unknown_verb_or_flag_names_nearest() -> None:
    done = mtrain("chekc")
    assert done.returncode == 2
    assert "Use check." in done.stderr
    done = mtrain("check", "--jsno")
    assert "Use --json." in done.stderr


def test_check_show_resolved_is_runnable(tmp_path: Path) -> None:
    argv = ["parallel=tp2pp2", "optim.lr=3e-4", "trainer.sample_prompt='a: #b'"]
    bare = mtrain("show", "--resolved", *argv)
    assert bare.returncode == 0, bare.stderr
    assert "#" not in bare.stdout.replace("a: #b", "")
    file = tmp_path / "my.yaml"
    file.write_text(bare.stdout)
    digests = [
        json.loads(mtrain("check", "--json", *a).stdout)["digest"] for a in (argv, [f"run={file}"])
    ]
    assert digests[0] == digests[1]


def test_check_show_names_setter_of_each_key() -> None:
    out = mtrain("show", "recipe=llama3/70b_h100x64", "optim.lr=1e-4").stdout
    rows = {row.split(":")[0].strip(): row for row in out.splitlines() if "#" in row}
    assert rows["lr"].endswith("# command line")
    assert "# recipes/llama3/70b_h100x64.yaml:" in rows["warmup_iters"]
    layers = next(row for row in out.splitlines() if "num_layers: 80" in row)
    assert "# conf/model/llama3_70b.yaml:" in layers
    assert rows["seed"].endswith("# default")
    assert rows["ranks"].endswith("# resolved from cluster h100x64: nodes 8 * devices_per_node 8")


def test_check_help_needs_no_configuration() -> None:
    page = mtrain("--help")
    assert page.returncode == 0
    for piece in ("usage:", "check", "llama3_70b", "recipe=", "tp4pp4", "exit codes"):
        assert piece in page.stdout
    assert mtrain("--version").stdout.startswith("mtrain 0.")


def test_check_only_first_rank_prints() -> None:
    loud = mtrain("check", "parallel=tp3", RANK="0", WORLD_SIZE="3")
    quiet = mtrain("check", "parallel=tp3", RANK="1", WORLD_SIZE="3")
    assert (loud.returncode, quiet.returncode) == (2, 2)
    assert "MT101" in loud.stderr
    assert quiet.stderr == ""


def test_check_wrong_process_count_is_refused() -> None:
    done = mtrain("check", "parallel=tp2dp2", RANK="0", WORLD_SIZE="2")
    assert done.returncode == 2
    assert "Use parallel.ranks=2" in done.stderr


def test_check_closed_streams_keep_exit_code() -> None:
    for words, code in (("show", 0), ("chek", 2)):
        command = f"exec {sys.executable} {ROOT / 'launch.py'} {words} <&- >&- 2>&-"
        assert subprocess.run(["bash", "-c", command], timeout=patient(60)).returncode == code


def test_check_closed_reader_leaves_no_traceback() -> None:
    command = f"{sys.executable} {ROOT / 'launch.py'} show | head -1"
    done = subprocess.run(
        ["bash", "-c", command], capture_output=True, text=True, timeout=patient(60)
    )
    assert "Traceback" not in done.stderr


def test_check_typos_hide_no_other_problem() -> None:
    words = ["trainer.tran_iters=3", "parallel=tp3", "optim.lr=fast", "model.hidden_size=2.5"]
    shown = mtrain("check", *words).stderr
    for key in ("trainer.tran_iters", "optim.lr", "model.hidden_size", "parallel.tp"):
        assert f"{key}=" in shown, shown
