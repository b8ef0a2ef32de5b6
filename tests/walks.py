"""`python -m tests.walks [--keep] [NAME...]`: runs the tutorials as printed, in a clean clone, on
tiny models.

The pages are the only source of the commands. The clone gets the files that the commands name: a
folder of texts, a tiny Hugging Face folder, chats, a script. `MTRAIN_CONF` shrinks the model and
the run of those that train. Every command runs, even after one that failed; the end of the output
of a failed command is printed.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.support.chats import chats_file, folder_of, turns
from tests.support.commands import ROOT, environment

TUTORIALS = ("pretrain", "fine_tune", "plan_a_cluster", "port_a_script")
"""Pages of docs/tutorials whose commands are run."""
TRAINED = ("Pretrain on your own text", "Fine-tune a Hugging Face folder on chats")
"""Walks with the small choices."""
LIMIT_S = 120.0
LINES = 25
"""Number of lines shown of a failed command's output."""
MODEL = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 640,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}
SMALL = {
    "model/llama_tiny.yaml": (
        """name: llama_tiny
num_layers: 2
hidden_size: 64
ffn_hidden_size: 128
num_attention_heads: 4
num_query_groups: 2
vocab_size: 4096
max_position_embeddings: 128
published: {peak_lr: 6.0e-3, batch_tokens: 1024, source: the walks}
"""
    ),
    "trainer/default.yaml": "train_iters: 8\neval_iters: 1\n",
}
"""Choices that stand in for those that ship."""
SCRIPT = """#!/bin/bash
GPUS=2
HIDDEN=64
MODEL=(
    --num-layers 2 --hidden-size $HIDDEN --ffn-hidden-size 128 --num-attention-heads 4
    --seq-length 64 --max-position-embeddings 64 --position-embedding-type rope
    --swiglu --normalization RMSNorm --disable-bias-linear --untie-embeddings-and-output-weights
    --attention-dropout 0.0 --hidden-dropout 0.0
)
torchrun --nproc-per-node $GPUS pretrain_gpt.py "${MODEL[@]}" \\
    --tensor-model-parallel-size 2 --micro-batch-size 2 --global-batch-size 8 --train-iters 4 \\
    --lr 1e-3 --min-lr 1e-4 --lr-decay-style cosine --lr-warmup-iters 1 --clip-grad 1.0 \\
    --mock-data --tokenizer-type NullTokenizer --vocab-size 511 \\
    --eval-interval 4 --eval-iters 1 --save checkpoints --save-interval 4 --distributed-backend gloo
"""


@dataclass(frozen=True)
class Walk:
    """The commands of a tutorial in their order."""

    title: str
    commands: tuple[str, ...]


def walks() -> list[Walk]:
    """Return the walk of each tutorial.

    A command begins with a line `python ...` of a block, and may continue over more lines.
    """
    found = []
    for name in TUTORIALS:
        page = (ROOT / "docs" / "tutorials" / f"{name}.md").read_text()
        title = page.splitlines()[0].removeprefix("# ")
        blocks = re.findall(r"^```\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
        commands = re.split(r"^(?=python )", "".join(blocks), flags=re.MULTILINE)[1:]
        found.append(Walk(title, tuple(command.strip() for command in commands)))
    return found


def prepared(home: Path) -> dict[str, str]:
    """Clone this repository to `home`, with what the commands name; return the environment of a
    shell in it.
    """
    subprocess.run(["git", "clone", "-q", "--depth", "1", f"file://{ROOT}", str(home)], check=True)
    (home / "texts").mkdir()
    for file in (home / "README.md", *(home / "docs").rglob("*.md")):
        shutil.copy(file, home / "texts")
    _hugging_face(home / "HF_DIR")
    chats_file(home / "chats.jsonl", _chats())
    (home / "pretrain.sh").write_text(SCRIPT)
    for name, text in SMALL.items():
        file = home / "small" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    (home / "home").mkdir()
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    own = {
        "PATH": path,
        "PYTHONPATH": f"{home / 'src'}:{home / 'kernels'}",
        "HOME": str(home / "home"),
    }
    return environment() | own | {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}


def _chats() -> list[object]:
    pairs = [
        ("What is it?", "It is {} cats."),
        ("a b", "def f(x): return {}"),
        ("12 + 30 =", "42, not {}"),
    ]
    return [turns(asked, answer.format(n)) for n in range(16) for asked, answer in pairs]


def _hugging_face(folder: Path) -> None:
    from tests.parity_hf import hf_reference

    hf_reference.model(hf_reference.configuration("llama", MODEL), 1).save_pretrained(folder)
    folder_of(folder, "chatml")


def walk(one: Walk, home: Path, shell: dict[str, str]) -> list[str]:
    """Run the commands of a walk; return those that failed, and what is wrong with what
    they left.
    """
    failed = []
    for command in one.commands:
        begun = time.monotonic()
        try:
            done = subprocess.run(
                ["bash", "-euo", "pipefail", "-c", command],
                cwd=home,
                env=shell,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                timeout=LIMIT_S,
            )
            code = done.returncode
            output = done.stdout
        except subprocess.TimeoutExpired as error:
            code = 124
            output = (error.stdout or b"").decode(errors="replace")
        print(
            f"{'ok  ' if code == 0 else 'FAIL'} {time.monotonic() - begun:5.1f} s "
            f" {command.splitlines()[0]}",
            flush=True,
        )
        if code:
            failed.append(f"exit code {code}: {command.splitlines()[0]}")
            print("\n".join(f"     | {line}" for line in output.splitlines()[-LINES:]), flush=True)
    for what, holds in LEFT.get(one.title, ()):
        try:
            right = holds(home)
        except (OSError, ValueError, KeyError):
            right = False
        if not right:
            failed.append(what)
            print(f"FAIL          {what}", flush=True)
    return failed


def _same_file(name: str, other: str) -> Callable[[Path], bool]:
    return lambda home: (home / name).read_bytes() == (home / other).read_bytes()


def _losses(home: Path, name: str) -> list[float]:
    lines = (home / "runs" / name / "metrics.jsonl").read_text().splitlines()
    return [record["loss"] for record in map(json.loads, lines) if "loss" in record]


def _has_template(home: Path, name: str) -> bool:
    from transformers import AutoTokenizer

    return bool(AutoTokenizer.from_pretrained(home / name).chat_template)


LEFT: dict[str, tuple[tuple[str, Callable[[Path], bool]], ...]] = {
    TRAINED[0]: (
        (
            "the loss of own text falls",
            lambda home: _losses(home, "mine")[-1] < _losses(home, "mine")[0],
        ),
        (
            "an imported model keeps its tokenizer",
            _same_file("theirs-hf/tokenizer.json", "HF_DIR/tokenizer.json"),
        ),
    ),
    TRAINED[1]: (
        ("the exported model has a chat template", lambda home: _has_template(home, "full-hf")),
        (
            "adapters are a folder of peft",
            lambda home: (home / "adapters/adapter_config.json").is_file(),
        ),
    ),
    "Plan a cluster": (
        (
            "no value of a laptop is in the recipe",
            lambda home: "train_iters" not in (home / "cluster.yaml").read_text(),
        ),
    ),
    "Port a script": (
        (
            "the recipe has the layers of the script",
            lambda home: "num_layers: 2" in (home / "ported.yaml").read_text(),
        ),
    ),
}
"""Walk -> what must hold after it, in words, and the test of it."""


@contextmanager
def _folder(*, keep: bool) -> Iterator[str]:
    folder = tempfile.mkdtemp(prefix="mtrain-walks-")
    try:
        yield folder
    finally:
        if not keep:
            shutil.rmtree(folder, ignore_errors=True)


def main() -> int:
    """Run the walks whose titles contain one of the names; return how many commands failed, at most
    100.
    """
    parser = argparse.ArgumentParser(prog="python -m tests.walks")
    parser.add_argument("names", nargs="*", help="walks whose titles contain one of these; all")
    parser.add_argument(
        "--keep", action="store_true", help="leave the clone where it is, and say where"
    )
    asked = parser.parse_args()
    chosen = [one for one in walks() if not asked.names or any(n in one.title for n in asked.names)]
    begun = time.monotonic()
    failed = list[str]()
    with _folder(keep=asked.keep) as folder:
        home = Path(folder) / "mtrain"
        shell = prepared(home)
        for one in chosen:
            print(f"-- {one.title}", flush=True)
            small = {"MTRAIN_CONF": str(home / "small")} if one.title in TRAINED else {}
            failed += [f"{one.title}: {text}" for text in walk(one, home, shell | small)]
        if asked.keep:
            print(home)
    print(f"{time.monotonic() - begun:.0f} s in all; {len(failed)} failed")
    for text in failed:
        print(f"  {text}")
    return min(len(failed), 100)


if __name__ == "__main__":
    sys.exit(main())
