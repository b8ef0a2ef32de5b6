"""Runs on text from the first command to generated words, as a user's shell sees them."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
from collections import Counter
from pathlib import Path

import pytest

from mtrain.events.read import events
from tests.support.commands import SMALL, command, environment, metrics, wait_for
from tests.support.launched import Launched, mtrain
from tests.support.patience import patient

pytestmark = pytest.mark.e2e
WORDS = [w for w in SMALL if not w.startswith(("data=", "model.vocab"))]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a corpus of a user's own."""
    home = tmp_path_factory.mktemp("home with a space")
    dice = random.Random(0)
    names = ["alpha", "beta", "gamma", "delta", "return", "import", "self", "print"]
    (home / "corpus").mkdir()
    for i in range(40):
        lines = [
            " ".join(dice.choices(names, k=8)) + f" = {dice.randrange(100)}" for _ in range(60)
        ]
        (home / f"corpus/file{i}.txt").write_text("\n".join(lines))
    return home


def text_words(home: Path) -> list[str]:
    return [
        *WORDS,
        "data=text",
        "data.path=corpus",
        "data.seq_length=32",
        "data.tokenizer_vocab_size=512",
        "model.vocab_size=512",
        f"data.cache_dir='{home}/cache'",
        "trainer.eval_iters=2",
        "trainer.train_iters=12",
        "trainer.sample_tokens=8",
        "checkpoint.save_interval=6",
        "log.memory_interval=5",
    ]


@pytest.fixture(scope="module")
def trained(home: Path) -> Path:
    """Return a finished run."""
    done = mtrain(*text_words(home), "log.name=run", cwd=home)
    assert done.returncode == 0, done.stderr
    for said in ("unigram entropy", "final validation loss", "saved", "sample from step_00000012"):
        assert said in done.stdout
    return home / "runs/run"


def test_whole_run_leaves_documented_files(trained: Path) -> None:
    steps = [line for line in metrics(trained) if "loss" in line]
    assert [line["step"] for line in steps] == list(range(1, 13))
    assert steps[-1]["loss"] < steps[0]["loss"]
    for key in (
        "grad_norm",
        "lr",
        "tokens",
        "tokens_per_s",
        "data_s",
        "forward_backward_s",
        "optimizer_s",
        "samples",
    ):
        assert steps[0][key] >= 0
    assert steps[-1]["samples"] == 12 * 8
    assert {
        "run.yaml",
        "plan.json",
        "env.json",
        "startup.json",
        "memory.json",
        "life.jsonl",
        "goodput.json",
        "tokenizer.json",
    } <= {p.name for p in trained.iterdir()}
    stream = list(events(trained))
    values = [{"step": e["step"], **e["values"]} for e in stream if "values" in e]
    assert values == [{k: v for k, v in line.items() if k != "time"} for line in metrics(trained)]
    kinds = Counter(event["kind"] for event in stream)
    assert kinds["step"] == 12
    assert kinds["checkpoint"] == len(list((trained / "checkpoints").iterdir()))
    assert [event["how"] for event in stream if event["kind"] == "end"] == ["finished"]
    samples = [event for event in stream if event["kind"] == "memory"]
    assert [event["step"] for event in samples] == [5, 10]
    ranks = json.loads((trained / "plan.json").read_text())["ranks"]
    resident = [event["by_rank"]["host_rss_bytes"] for event in samples]
    assert all(len(sizes) == ranks and min(sizes) > 0 for sizes in resident)
    assert "alert" not in kinds
    life = json.loads((trained / "goodput.json").read_text())["seconds"]
    assert all(life[cause] > 0 for cause in ("stepping", "evaluating", "saving", "loading"))


def test_whole_run_generates_in_another_layout_without_corpus(
    trained: Path,
) -> None:
    hidden = (trained.parent.parent / "corpus").rename(trained.parent.parent / "moved")
    try:
        words = ["generate", str(trained), "prompt=alpha", "tokens=6", "temperature=0"]
        same = mtrain(*words, cwd=Path("/"))
        other = mtrain(*words, "parallel=tp2pp2", cwd=Path("/"))
    finally:
        hidden.rename(trained.parent.parent / "corpus")
    assert same.returncode == other.returncode == 0, same.stderr + other.stderr
    assert same.stdout == other.stdout
    assert same.stdout.startswith("alpha")


@pytest.mark.full
def test_whole_run_answers_prompt_file_and_chat_as_json(trained: Path, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    lines = [
        '"alpha beta"',
        '{"prompt": "alpha"}',
        '{"messages": [{"role": "user", "content": "alpha"}]}',
    ]
    prompts.write_text("\n".join(lines))
    settings = trained / "tokenizer_config.json"
    settings.write_text(
        json.dumps({"chat_template": "{% for m in messages %}{{ m.content }}{% endfor %}"})
    )
    words = ["generate", str(trained), "tokens=6", "temperature=0", "--json"]
    try:
        done = mtrain(*words, f"prompts={prompts}", cwd=Path("/"))
    finally:
        settings.unlink()
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    texts = said["texts"]
    assert [text["prompt"] for text in texts] == ["alpha beta", "alpha", "alpha"]
    assert texts[1] == texts[2] != texts[0]
    assert said["tokens"] == sum(text["tokens"] for text in texts) > 0
    assert said["tokens_per_s"] > 0
    assert said["no_cache"] is None
    alone = mtrain(
        *words, "prompt=alpha", f"stop={texts[1]['text'][2:4]}", "cache=false", cwd=Path("/")
    )
    (text,) = json.loads(alone.stdout)["texts"]
    assert texts[1]["text"].startswith(text["text"])
    assert text["ended"] == "stop"


@pytest.mark.full
def test_whole_run_evaluation_equals_own_evaluation(trained: Path) -> None:
    own = [line["valid_loss"] for line in metrics(trained) if "valid_loss" in line][-1]
    for words in ([], ["parallel=tp2"]):
        done = mtrain(
            "evaluate", str(trained), "limit=16", "--json", *words, cwd=trained.parent.parent
        )
        assert done.returncode == 0, done.stderr
        found = json.loads(done.stdout)
        assert found["loss"] == pytest.approx(own, rel=1e-6)
        assert found["tokens"] == 16 * 32
        assert 0 < found["bits_per_byte"] < found["bits_per_token"]


def test_whole_run_wrong_words_report_every_problem(trained: Path) -> None:
    done = mtrain(
        "generate", str(trained), "top_p=2", "prompts=nowhere.txt", "temperatur=1", cwd=trained
    )
    assert (done.returncode, done.stdout) == (2, "")
    for said in (
        "top_p=2: cannot use this input because it must be a number above 0, and at most 1",
        "Use temperature=1",
        "2 problems",
    ):
        assert said in done.stderr
    both = mtrain("generate", str(trained), "prompt=a", "prompts=b", cwd=trained)
    assert both.returncode == 2
    assert "prompt and prompts are both set" in both.stderr
    missing = mtrain("generate", str(trained), "chat=true", "prompt=hello", cwd=trained)
    assert missing.returncode == 2
    assert (
        "has no chat_template.jinja and no chat_template in tokenizer_config.json" in missing.stderr
    )


def test_whole_run_resumes_elsewhere_in_another_layout(trained: Path) -> None:
    done = mtrain(
        "resume",
        str(trained / "checkpoints/step_00000006"),
        "parallel=pp2",
        "log.name=branch",
        f"log.runs_dir='{trained.parent}'",
        cwd=Path("/"),
    )
    assert done.returncode == 0, done.stderr
    branch = [line["loss"] for line in metrics(trained.parent / "branch") if "loss" in line]
    whole = [line["loss"] for line in metrics(trained) if "loss" in line]
    assert branch == pytest.approx(whole[6:], rel=1e-5)


def test_whole_run_other_corpus_is_not_taken(trained: Path) -> None:
    home = trained.parent.parent
    file = home / "corpus/file0.txt"
    before = file.read_text()
    file.write_text(before + "\nsomething else entirely")
    os.utime(file, (1, 1))
    try:
        refused = mtrain(*text_words(home), "log.name=run", "checkpoint.resume=latest", cwd=home)
    finally:
        file.write_text(before)
    assert refused.returncode == 2, refused.stdout
    assert "corpus is not the one that the checkpoint was trained on" in refused.stderr
    assert "Traceback" not in refused.stderr


def test_whole_run_small_corpus_is_refused_before_folder(tmp_path: Path) -> None:
    (tmp_path / "corpus").mkdir()
    (tmp_path / "corpus/a.txt").write_text("too short\n" * 3)
    done = mtrain(*text_words(tmp_path), cwd=tmp_path)
    assert done.returncode == 2, done.stderr
    assert "tokens" in done.stderr
    assert not (tmp_path / "runs").exists()


def test_whole_run_damaged_checkpoint_exits_4_with_file(trained: Path, tmp_path: Path) -> None:
    import shutil

    copy = Path(shutil.copytree(trained, tmp_path / "runs/run"))
    shard = copy / "checkpoints/step_00000012/rank_00001.safetensors"
    content = bytearray(shard.read_bytes())
    content[-100] ^= 4
    shard.write_bytes(bytes(content))
    done = mtrain(
        "resume",
        str(copy),
        "trainer.train_iters=14",
        "checkpoint.accept_changes=true",
        cwd=tmp_path,
    )
    assert done.returncode == 4, done.stderr
    assert "rank_00001.safetensors" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.full
def test_whole_run_closed_reader_stops_no_training(tmp_path: Path) -> None:
    words = [*command(*SMALL, "trainer.train_iters=6", "log.name=run")]
    first = subprocess.Popen(
        words, stdout=subprocess.PIPE, cwd=tmp_path, env=environment(), text=True
    )
    assert first.stdout is not None
    first.stdout.readline()
    first.stdout.close()
    assert first.wait(timeout=patient(60)) == 0
    assert (tmp_path / "runs/run/checkpoints/step_00000006/manifest.json").exists()


def test_whole_run_stop_on_one_rank_stops_run(tmp_path: Path) -> None:
    process = Launched(*SMALL, "trainer.train_iters=100000", "log.name=run", cwd=tmp_path)
    wait_for(lambda: len(metrics(tmp_path / "runs/run")) > 3 or process.poll() is not None)
    process.ranks()[1].send_signal(signal.SIGTERM)
    assert process.wait(30) == 75, process.said
    assert list((tmp_path / "runs/run/checkpoints").glob("step_*/manifest.json"))


# three processes import; tests/distributed starts ranks by torchrun's environment without it
@pytest.mark.full
def test_whole_run_torchrun_starts_same_run(tmp_path: Path) -> None:
    import sys

    torchrun = Path(sys.executable).with_name("torchrun")
    words = [*SMALL, "trainer.train_iters=4", "log.name=run"]
    done = subprocess.run(
        [str(torchrun), "--nproc-per-node", "2", command()[1], *words],
        capture_output=True,
        text=True,
        timeout=patient(120),
        cwd=tmp_path,
        env=environment(),
    )
    assert done.returncode == 0, done.stderr
    here = mtrain(*words, "log.name=local", cwd=tmp_path)
    assert here.returncode == 0, here.stderr
    losses = [
        [line["loss"] for line in metrics(tmp_path / "runs" / name)] for name in ("run", "local")
    ]
    assert losses[0] == losses[1]
