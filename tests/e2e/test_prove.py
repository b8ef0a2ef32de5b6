"""`prove` and `rehearse`: a right layout is proven, a wrong one is not."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.commands import environment, mtrain

pytestmark = pytest.mark.e2e


@pytest.mark.parametrize(
    "words",
    [
        ["parallel=tp2pp2"],
        ["model=mixtral_8x7b", "parallel=tp2ep2sp"],
        ["parallel=tp2dp2", "parallel.distributed_optimizer=true", "parallel.overlap_grad_reduce=true"],
        ["model=qwen3_8b", "parallel=tp2cp2sp"],
        ["parallel=dp2", "precision=bf16", "model.hidden_dropout=0.1", "model.attention_dropout=0.2"],
    ],
    ids=" ".join,
)
def test_a_layout_is_proven(words: list[str], tmp_path: Path) -> None:
    done = mtrain("prove", *words, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "proven" in done.stdout
    assert "shrunk to" in done.stdout
    dropped = [word.replace("=", ": ") + " -> 0.0" for word in words if "dropout" in word]
    assert all(change in done.stdout for change in dropped), "what is compared without dropout says so"
    assert list(tmp_path.iterdir()) == []


FAULTS = {
    "a gradient with the wrong sign on one rank": (
        ["parallel=dp2"],
        "def fault(chunks, *a, **k):\n"
        "    if parts.world.rank == 1: next(iter(chunks[0].parameters())).main_grad.neg_()\n"
        "    return real(chunks, *a, **k)\n",
        "gradient",
    ),
    "norms of sequence-parallel ranks that are not summed": (
        ["parallel=tp2sp"],
        "def fault(chunks, *a, **k):\n"
        "    for p in chunks[0].parameters(): p.sequence_parallel = False\n"
        "    return real(chunks, *a, **k)\n",
        "gradient",
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_wrong_layout_is_not_proven_and_the_difference_is_named(name: str, tmp_path: Path) -> None:
    words, fault, kind = FAULTS[name]
    script = tmp_path / "faulty.py"
    script.write_text(
        "import sys\n"
        "from mtrain import mcore\n"
        "from mtrain.devices import registry\n"
        "mcore.install(registry.get('cpu'))\n"
        "from mtrain.train import prove\n"
        "record = prove.record_gradients\n"
        "def seeded(parts, folder):\n"
        "    record(parts, folder)\n"
        "    config = parts.state.chunks[0].config\n"
        "    real = config.finalize_model_grads_func\n"
        + "".join(f"    {line}\n" for line in fault.splitlines())
        + "    config.finalize_model_grads_func = fault\n"
        "prove.record_gradients = seeded\n"
        "from mtrain.cli.main import main\n"
        "raise SystemExit(main(sys.argv[1:]))\n"
    )
    done = subprocess.run(
        [sys.executable, str(script), "prove", *words],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=tmp_path,
        env=environment(),
    )
    assert done.returncode == 5, done.stdout + done.stderr
    assert any(line.startswith(kind) and "<- differs" in line for line in done.stdout.splitlines()), done.stdout
    assert "NOT equal" in done.stdout


@pytest.mark.parametrize(
    "words", [["parallel=tp2pp2"], ["model=mixtral_8x7b", "parallel=ep2", "precision=bf16"]], ids=" ".join
)
def test_a_layout_is_rehearsed_over_a_checkpoint(words: list[str], tmp_path: Path) -> None:
    done = mtrain("rehearse", *words, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "resumed from" in done.stdout
    assert "ends bitwise where the whole one ends" in done.stdout
    assert list(tmp_path.iterdir()) == []


def test_a_layout_of_more_ranks_than_a_machine_may_start_is_refused(tmp_path: Path) -> None:
    words = ["parallel=pp17", "model.num_layers=17", "trainer.global_batch_size=17"]
    done = mtrain("prove", *words, cwd=tmp_path)
    assert done.returncode == 3
    assert "needs 17 processes" in done.stderr
