"""Commands of users, each in a forked process: its exit code and its words."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest

from mtrain.data.store.indexed import IndexedWriter
from tests.support.launched import mtrain

FLAGS = (
    "--num-layers 4 --hidden-size 128 --num-attention-heads 8 --seq-length 128"
    " --max-position-embeddings 128 --micro-batch-size 1 --global-batch-size 8 --train-iters 10"
    " --lr 1e-3 --vocab-size 512 --eval-iters 0"
)
MOCK = "--tokenizer-type NullTokenizer --mock-data"
START = f"torchrun --nproc-per-node 2 pretrain_gpt.py {FLAGS}"
MIXTRAL = {
    **{"model_type": "mixtral", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2},
    **{
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
    },
    **{
        "vocab_size": 320,
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
    },
    **{"sliding_window": 16, "layer_types": ["full_attention", "sliding_attention"]},
}
TOKENIZER = json.dumps(
    {
        "version": "1.0",
        "added_tokens": [],
        "model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"},
    }
)
TEMPLATE = json.dumps({"chat_template": "{% for m in messages %}{{ m.content }}{% endfor %}"})


@dataclass(frozen=True)
class Met:
    """A command, and what it must end with."""

    words: str
    says: tuple[str, ...]
    """Patterns that what it prints has, on either stream."""
    code: int = 2
    silent: tuple[str, ...] = ()
    files: dict[str, str] = field(default_factory=dict)


def script(*lines: str) -> dict[str, str]:
    return {"t.sh": "#!/bin/bash\n" + "\n".join(lines) + "\n"}


MEETS: dict[str, Met] = {
    "8: a path to data decides what is learned": Met(
        "explain data.path", ("contents",), 0, ("runtime",)
    ),
    "10: a class that does not read kinds of layers has windows in all": Met(
        "recipe import config.json",
        (r"window_size: 16",),
        0,
        (r"global_attention_every|window_layers",),
    ),
    "19: a model that learns from chats has a rate of fine-tuning": Met(
        "show trainer=sft data=sft data.path=chats.jsonl data.tokenizer=t.json model=llama3_8b"
        " parallel=tp4",
        (r"^  lr: \de-0[56] ", r"fine_tuning: true"),
        0,
        files={"chats.jsonl": "{}\n", "t.json": TOKENIZER, "tokenizer_config.json": TEMPLATE},
    ),
    "22: a name like a number stays a name": Met(
        "check recipe=a.yaml",
        (r'log\.name="1\.10"',),
        2,
        ("=1.1$",),
        {"a.yaml": "log: {name: 1.10}\n"},
    ),
    "22: a path with = is put into quotes": Met(
        "check checkpoint.init_from=/c/epoch=3",
        (r'checkpoint\.init_from="/c/epoch=3"',),
        2,
        ("null",),
    ),
    "22: a template that is not there is no reason for other data": Met(
        "check data=sft data.path=chats.jsonl data.tokenizer=t.json data.chat_template=no.jinja",
        ("no.jinja",),
        2,
        ("kind=mock", "path=null", "chat_template=null"),
        {"chats.jsonl": "{}\n", "t.json": TOKENIZER},
    ),
    "23: the version": Met("version", (r"^mtrain \d",), 0),
    "23: the page": Met("help", ("^usage: ",), 0),
    "23: the page of a verb": Met("generate -h", ("^usage: .* generate RUN",), 0),
    "24: a range that is not closed": Met(
        "-m optim.lr=range(1", (r"MT010.*optim\.lr", r"range\(START,STOP"), 2
    ),
    "24: a range that counts the wrong way": Met(
        "-m trainer.seed=range(10,1)", (r"range\(10,1,-1\)",), 2
    ),
    "24: a comma with nothing behind it": Met("-m optim.lr=1e-3,", (r"Use optim\.lr=1e-3\.\n",), 2),
    "24: a stage of fewer layers than none": Met(
        "check model=llama_tiny parallel=pp2 parallel.layers_per_stage=[5,-1]",
        (r"MT142", "-1 layers", r"Use parallel\.layers_per_stage=\[3,1\]"),
    ),
    "27: the smallest model of a name is first": Met(
        "check model=llama3", ("Use model=llama3_8b",), 2
    ),
    "27: what was changed": Met(
        "show --changed optim.lr=0.5", (r"^optim\.lr=0\.5  # command line$",), 0
    ),
    "27: a folder of a model": Met(
        "recipe import theirs",
        (r"num_layers: 2",),
        0,
        files={"theirs/config.json": json.dumps(MIXTRAL)},
    ),
    "27: a name on the hub": Met(
        "convert import Org/Model runs/x", ("Use hf download Org/Model",), 2
    ),
    "30: Nemotron-4 has the parameters of its report": Met(
        "plan model=nemotron4_340b --json", (r"34\d{10}\b",), 0
    ),
    "31: weak scaling": Met(
        "plan --scale 8,16 --weak model=llama3_8b cluster=h100x8", ("MFU|mfu", r"\b16\b"), 0
    ),
    "import_arithmetic_commands": Met(
        "recipe import t.sh",
        (r"parallel\.tp=\?\?\?", r"\(\(TP\*=2\)\)"),
        2,
        (r"verified: composes",),
        script("TP=1", "((TP*=2))", f"{START} {MOCK} --tensor-model-parallel-size $TP"),
    ),
    "import_command_in_a_word": Met(
        "recipe import t.sh",
        (r"data\.path=\?\?\?", r"split: \[90\.0, 5\.0, 5\.0\]"),
        2,
        ("[\ue000-\uf8ff]", "blend:", r"\$\(python3$"),
        script(f"{START} --data-path $(python3 blend.py --split train) --split 90,5,5"),
    ),
    "import_command_in_a_word, inside of bash -c": Met(
        "recipe import t.sh",
        (r"data\.path=\?\?\?", r"split: \[90\.0, 5\.0, 5\.0\]"),
        2,
        ("[\ue000-\uf8ff]", "blend:"),
        script(f'bash -c "{START} --data-path \\$(python3 blend.py --split train) --split 90,5,5"'),
    ),
    "import_unreadable_architecture": Met(
        "recipe import t.sh",
        (r"model\.moe\.first_dense_layers=\?\?\?", "--moe-layer-freq"),
        2,
        ("verified: composes",),
        script(
            "arr=(0); for ((i=1; i<4; i++)); do arr+=(1); done",
            'printf -v FREQ \'[%s]\' "$(IFS=,; echo "${arr[*]}")"',
            f"{START} {MOCK} --num-experts 4 --moe-router-topk 2 --moe-layer-freq $FREQ",
        ),
    ),
    "import_words_that_vanish": Met(
        "recipe import t.sh",
        (r"optim\.weight_decay=\?\?\?", r"precision\.dtype=\?\?\?", r"\$\{ALL\[@\]:0:4\}"),
        2,
        ("verified: composes", "MT011"),
        script(
            "ALL=(--weight-decay 0.3 --clip-grad 0.5 --swiglu --bf16)",
            f'{START} {MOCK} "${{ALL[@]:0:4}}"',
        ),
    ),
}


@pytest.mark.sampled(6)
@pytest.mark.parametrize("name", MEETS)
def test_command_prints_what_is_right(name: str, tmp_path: Path) -> None:
    met = MEETS[name]
    for path, text in {"config.json": json.dumps(MIXTRAL), **met.files}.items():
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).write_text(text)
    done = mtrain(*met.words.split(), cwd=tmp_path)
    said = done.stdout + done.stderr
    assert done.returncode == met.code, said
    assert "Traceback" not in said
    for pattern in met.says:
        assert re.search(pattern, said, re.MULTILINE), (pattern, said)
    for pattern in met.silent:
        assert not re.search(pattern, said, re.MULTILINE), (pattern, said)


@pytest.fixture
def corpora(tmp_path: Path) -> Path:
    """Write the corpora `a`, most of whose documents are long, and `b`, of short ones."""
    for name, lengths in (("a", [30_000] * 9 + [3000] * 3 + [20_000] * 4), ("b", range(20, 30))):
        with IndexedWriter(tmp_path / name, np.dtype(np.uint16)) as writer:
            for length in lengths:
                writer.add(np.arange(length) % 300)
    return tmp_path


@pytest.mark.full
@pytest.mark.parametrize("order", ["keyed", "megatron"])
def test_command_small_blend_share_is_accepted(order: str, corpora: Path) -> None:
    words = [
        "data=indexed",
        "data.blend=[a,b]",
        f"data.order={order}",
        "data.seq_length=16",
        "data.split=[1,0,0]",
    ]
    words += ["trainer.eval_iters=0", "trainer.sample_tokens=0"]
    assert mtrain("check", *words, "data.blend_weights=[5600000,1]", cwd=corpora).returncode == 0
    done = mtrain("check", *words, "data.blend_weights=[1,0]", cwd=corpora)
    assert done.returncode == 0
    assert "MT319" in done.stdout
    assert "because its weight is 0 (b)" in done.stdout


def test_command_sample_has_requested_tokens(corpora: Path) -> None:
    done = mtrain("data", "sample", "a", "out=few", "tokens=10000", cwd=corpora)
    assert done.returncode == 0, done.stderr
    assert (corpora / "few.bin").stat().st_size // 2 == 9000, "the three that fit"
    assert "1000 tokens fewer than the 10000 that were asked for" in done.stdout + done.stderr
