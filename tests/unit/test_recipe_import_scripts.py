"""Training scripts as people write them: what their flags mean, by hand, against what the import
makes of them.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from mtrain.cli.recipe.capture import capture
from mtrain.config.engine.core_fields import transformer_values
from mtrain.config.resolve.batches import linear, samples_of, steps_within
from mtrain.config.resolve.resolution import Machine, resolve
from mtrain.recipes.delta import delta, recipe_text
from mtrain.recipes.imported import Imported
from mtrain.recipes.megatron.importer import import_scripts, import_texts
from mtrain.recipes.megatron.table import known_flags
from tests.support.configs import LAPTOP
from tests.support.tables import tables

TABLES = tables("recipe_import_scripts")

RUN = ("llama3_70b",)
SCRIPTS = Path(__file__).resolve().parents[1] / "support/megatron_scripts"
CLUSTER = Machine(cpu_cores=64, memory_bytes=1 << 40, gpus=8, transformer_engine=True)

# What Megatron-LM's TransformerConfig would hold, by the script's flags and the defaults of its
# parser.
LLAMA = {
    "normalization": "RMSNorm",
    "gated_linear_unit": True,
    "activation_func": "swiglu",
    "add_bias_linear": False,
    "attention_dropout": 0.0,
    "hidden_dropout": 0.0,
}
TRANSFORMER: dict[str, dict[str, Any]] = TABLES["transformer"]
# What stands outside the TransformerConfig.
OTHER: dict[str, dict[str, Any]] = TABLES["other"]


@cache
def imported(name: str) -> Imported:
    """Import the script as text, or run it if it sets flags in a function."""
    path = SCRIPTS / f"{name}.sh"
    return capture(["bash", str(path)], ()) if name in RUN else import_scripts([path])


@pytest.mark.parametrize("name", TRANSFORMER)
def test_import_script_means_its_flags(name: str) -> None:
    run = resolve(imported(name).run, CLUSTER if name == "llama3_70b" else LAPTOP)
    values = json.loads(json.dumps(transformer_values(run), default=str))  # YAML has no tuples
    assert {field: values.get(field, "not there") for field in TRANSFORMER[name]} == TRANSFORMER[
        name
    ]
    flat = run.flat()
    assert {key: flat.get(key, "not there") for key in OTHER[name]} == OTHER[name]


def test_import_script_all_have_expectations() -> None:
    assert {file.stem for file in SCRIPTS.glob("*.sh")} == set(TRANSFORMER) == set(OTHER)
    assert len(TRANSFORMER) >= 10


@pytest.mark.parametrize("name", TRANSFORMER)
def test_import_script_every_flag_is_read_or_listed(name: str) -> None:
    text = (SCRIPTS / f"{name}.sh").read_text()
    found = imported(name)
    listed = {u.flag for u in found.unplaced}
    noted = " ".join(found.notes)
    for word in text.replace("=", " ").split():
        flag = word.strip("\"'()\\")
        if (
            flag.startswith("--")
            and flag not in known_flags()
            and "SBATCH" not in text.split(flag)[0][-8:]
        ):
            launcher = flag in LAUNCHER
            assert launcher or flag in listed or flag in noted, f"{flag} was lost"


LAUNCHER = {
    "--nproc_per_node",
    "--nproc-per-node",
    "--nnodes",
    "--master_addr",
    "--node_rank",
    "--rdzv_id",
    "--label",
    "--job-name",
    "--nodes",
    "--ntasks-per-node",
    "--output",
}


@pytest.mark.sampled
@pytest.mark.parametrize("name", TRANSFORMER)
def test_import_script_written_recipe_is_same_run(name: str, tmp_path: Path) -> None:
    from mtrain.config.compose.composer import compose

    run = imported(name).run
    file = tmp_path / "r.yaml"
    file.write_text(recipe_text(delta(run), {"title": name}))
    assert compose([f"recipe={file}"]).run.digest() == run.digest()


@pytest.mark.parametrize(
    ("name", "flag", "why"),
    [
        ("gpt3_175b", "--load", "not supported"),
        ("gpt3_175b", "--save", "derived here"),
        ("llama3_8b_cp2", "--decoupled-lr", "not supported"),
        ("llama3_8b_cp2", "--use-mcore-models", "no effect"),
        ("mixtral_8x7b", "--data-path", "unreadable"),
        ("mixtral_8x7b", "--sequence-parallel", "no effect"),
        ("deepseek_v3", "--kv-channels", "no effect"),
        ("qwen3_30b_a3b", "--moe-router-load-balancing-type", "not supported"),
        ("qwen3_30b_a3b", "--use-distributed-optimizer", "derived here"),
        ("qwen3_30b_a3b", "--no-such-flag", "unknown"),
        ("window_sinks", "--moe-router-topk", "no effect"),
        ("window_sinks", "--apply-query-key-layer-scaling", "not supported"),
        ("gpt_1.7b_slurm", "--wandb-api-key", "secret"),
    ],
)
def test_import_script_unplaced_flag_has_reason(name: str, flag: str, why: str) -> None:
    assert {u.flag: u.why for u in imported(name).unplaced}[flag] == why


def test_import_script_vocabulary_comes_from_same_shape() -> None:
    shape = "--num-layers 96 --hidden-size 12288 --num-attention-heads 96 --seq-length 2048"
    found = import_texts([(f"torchrun pretrain_gpt.py {shape}", "x.sh")], "x")
    assert "the vocabulary of 50257 is that of model=gpt3_175b" in "".join(found.notes)
    text = (
        "torchrun pretrain_gpt.py --num-layers 3 --hidden-size 66 --num-attention-heads 2"
        " --seq-length 8"
    )
    assert import_texts([(text, "x.sh")], "x").open.keys() == {"model.vocab_size"}
    assert import_texts([(text, "x.sh")], "x", ["model.vocab_size=512"]).run.model.vocab_size == 512


RATE = (
    "optim.lr is not set; it is 0.0006, resolved from GPT-3 table 2.1 (arXiv 2005.14165): its 125M"
    " model"
)


@pytest.mark.parametrize(
    ("launcher", "flags", "notes"),
    [
        (
            "torchrun --nproc-per-node 8",
            "--vocab-size 512",
            [RATE, "it is 64, resolved from x: max_position_emb"],
        ),
        (
            "python",
            "--vocab-size 512",
            [RATE, "data.seq_length is not set; it is chosen where it runs"],
        ),
        ("python", "--seq-length 8", ["optim.lr is not set; it is chosen where it runs"]),
        ("python", "--seq-length 8 --lr 0.1", []),
    ],
)
def test_import_script_unset_becomes_resolved(launcher: str, flags: str, notes: list[str]) -> None:
    model = "--num-layers 3 --hidden-size 66 --num-attention-heads 2 --max-position-embeddings 64"
    flags = f"{model} --train-iters 9 --global-batch-size 8 {flags}"
    found = import_texts([(f"{launcher} pretrain_gpt.py {flags}", "x.sh")], "x")
    said = [note for note in found.notes if " is not set; it is " in note]
    assert len(said) == len(notes)
    assert all(note in text for note, text in zip(notes, said, strict=True))


@pytest.mark.parametrize(
    ("words", "vocab", "masked"),
    [
        ("--tokenizer-type GPT2BPETokenizer", 50257, False),
        ("--vocab-size 50257 --make-vocab-size-divisible-by 64", 50257, False),
        ("--vocab-size 500 --tensor-model-parallel-size 2", 500, False),
        ("--vocab-size 512", 512, True),
        ("--vocab-size 500 --padded-vocab-size 640", 640, True),
    ],
)
def test_import_script_padding_stays_in_softmax_as_megatron(
    words: str, vocab: int, masked: bool
) -> None:
    model = "--num-layers 2 --hidden-size 64 --num-attention-heads 2 --seq-length 8"
    found = import_texts(
        [(f"torchrun --nproc-per-node 2 pretrain_gpt.py {model} {words}", "x.sh")], "x"
    )
    assert (found.run.model.vocab_size, found.run.model.mask_padded_vocab) == (vocab, masked)
    assert any("padding in the softmax" in note for note in found.notes) is not masked


def test_import_script_overrides_beat_script() -> None:
    found = import_scripts(
        [SCRIPTS / "mixtral_8x7b.sh"], ["cluster=h100x64", "optim.lr=5e-5", "parallel.ep=4"]
    )
    assert (found.run.cluster.name, found.run.optim.lr, found.run.parallel.ep) == (
        "h100x64",
        5e-5,
        4,
    )


def test_import_script_sourced_script_comes_first(tmp_path: Path) -> None:
    (tmp_path / "model.sh").write_text(
        "MODEL=(--num-layers 4 --hidden-size 64 --num-attention-heads 4)\n"
    )
    (tmp_path / "train.sh").write_text(
        'source model.sh\ntorchrun --nproc-per-node 2 pretrain_gpt.py "${MODEL[@]}" --vocab-size'
        " 500 --seq-length 8\n"
    )
    found = import_scripts([tmp_path / "model.sh", tmp_path / "train.sh"])
    assert (found.run.model.num_layers, found.run.cluster.devices_per_node) == (4, 2)
    found = import_scripts([tmp_path / "train.sh"])
    assert (found.run.model.num_layers, found.open) == (4, {})
    assert any("model.sh is read in place" in note for note in found.notes)
    (tmp_path / "alone").mkdir()
    (tmp_path / "train.sh").rename(tmp_path / "alone/train.sh")
    found = import_scripts([tmp_path / "alone/train.sh"])
    assert "model.num_layers" in found.open
    assert any("model.sh is not read" in note for note in found.notes)


def test_import_script_samples_count_along_ramp() -> None:
    """Count 100 samples in steps of 4, as many in steps of 8 and of 12, and 16 each after that."""
    model = (
        "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --lr 1e-3"
        " --vocab-size 300"
    )
    words = (
        "--global-batch-size 16 --rampup-batch-size 4 4 300 --train-samples 1000"
        " --lr-warmup-samples 40"
    )
    flags = f"{model} {words}"
    values = import_texts(
        [(f"torchrun pretrain_gpt.py {flags} --micro-batch-size 1\n", "x.sh")], "x"
    ).run.flat()
    plan = linear((4, 4, 300), 16)
    assert values["trainer.rampup_batch_size"] == [4, 4, 300]
    assert values["optim.warmup_iters"] == 10
    assert values["trainer.train_iters"] == steps_within(plan, 1000)
    assert 1000 - 16 < samples_of(plan, values["trainer.train_iters"]) <= 1000
