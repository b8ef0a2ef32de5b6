"""Scripts of Megatron-LM's program for BERT become Megatron's BERT, and its command line comes
back.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from mtrain.cli.main import main
from mtrain.config.compose.composer import compose
from mtrain.config.resolve.resolution import resolve
from mtrain.recipes.imported import Imported
from mtrain.recipes.megatron.exporter import export_script
from mtrain.recipes.megatron.importer import import_texts
from mtrain.recipes.megatron.yaml_configs import import_yaml
from tests.support.configs import LAPTOP

SIZES = (
    "--num-layers 24 --hidden-size 1024 --num-attention-heads 16 --seq-length 512"
    " --max-position-embeddings 512 "
)
TRAINED = "--micro-batch-size 4 --global-batch-size 32 --lr 1e-4 --train-iters 100 --bf16 "
WORDS = "--tokenizer-type BertWordPieceCase --vocab-file bert-vocab.txt --mock-data "
PROGRAM = "/opt/Megatron-LM/pretrain_bert.py"


def script(more: str = "", program: str = PROGRAM) -> Imported:
    """Import a script of one node that trains a BERT of 345M parameters."""
    text = f"torchrun --nproc-per-node 8 {program} {SIZES}{TRAINED}{WORDS}{more}\n"
    return import_texts([(text, "bert.sh")], "bert")


def test_import_bert_script_gives_megatron_bert(tmp_path: Path) -> None:
    (tmp_path / "bert.sh").write_text(
        f"torchrun --nproc-per-node 8 {PROGRAM} {SIZES}{TRAINED}{WORDS}\n"
    )
    recipe = tmp_path / "bert.yaml"
    assert main(["recipe", "import", str(tmp_path / "bert.sh"), "-o", str(recipe)]) == 0
    m = compose([f"recipe={recipe}"]).run.model
    assert (m.family, m.norm_placement, m.normalization, m.tie_word_embeddings) == (
        "bert",
        "pre",
        "LayerNorm",
        True,
    )
    assert m.bert is not None
    assert (m.padded_vocab_size, m.bert.next_sentence, m.bert.masked_share) == (29056, True, 0.15)
    assert (m.activation, m.bert.head_activation) == (
        "gelu_tanh",
        "gelu",
    ), "only MLPs have the fused gelu"


@pytest.mark.parametrize(
    ("more", "key", "value"),
    [
        ("--bert-no-binary-head", "model.bert.next_sentence", False),
        ("--mask-prob 0.2", "model.bert.masked_share", 0.2),
        ("--no-bias-gelu-fusion", "model.bert.head_activation", None),
        ("--tensor-model-parallel-size 2", "parallel.tp", 2),
    ],
)
def test_import_bert_program_flag_is_a_key(more: str, key: str, value: object) -> None:
    found = script(more)
    assert found.run.flat().get(key) == value
    assert not [u for u in found.unplaced if u.flag == more.split()[0]]


def test_import_bert_short_samples_and_pairs_are_reported() -> None:
    found = script("--short-seq-prob 0.1")
    assert [u.flag for u in found.unplaced if "as long as data.seq_length" in u.text] == [
        "--short-seq-prob"
    ]
    assert any("pairs of sentences" in note for note in found.notes)


def test_import_bert_window_is_dropped_with_note() -> None:
    found = script("--window-size 63,63")
    assert found.run.model.window_size is None
    assert [
        u.flag for u in found.unplaced if u.text.startswith("changes the numbers: tokens of BERT")
    ] == ["--window-size"]


@pytest.mark.parametrize("program", ["my_train.py", "pretrain_bert_core.py"])
def test_import_bert_other_program_name_is_reported(program: str) -> None:
    found = script(program=program)
    assert found.run.model.family == "bert"
    assert f"{program} is taken for a program that trains a BERT" in found.notes


def test_import_bert_model_config_is_read() -> None:
    flags = (
        "--num-layers: 24, --hidden-size: 1024, --num-attention-heads: 16, --seq-length: 512, --lr:"
        " 1.0e-4"
    )
    more = (
        "--max-position-embeddings: 512, --micro-batch-size: 4, --global-batch-size: 32,"
        " --mock-data: true"
    )
    text = (
        f"MODEL_ARGS: {{{flags}, {more}, --tokenizer-type: BertWordPieceLowerCase, --train-iters:"
        " 100}\n"
    )
    m = import_yaml([(text, "test_cases/bert/bert_tp2/model_config.yaml")], "bert").run.model
    assert (m.family, m.norm_placement, m.vocab_size) == ("bert", "pre", 30522)


@pytest.mark.parametrize(
    "words", ["model=bert_345m", "model=megatron_bert_tiny model.bert.next_sentence=false"]
)
def test_import_bert_command_line_round_trips(words: str) -> None:
    run = compose([*words.split(), "data=mock", "parallel=single", "data.seq_length=128"]).run
    text = export_script(resolve(run, LAPTOP))
    assert "pretrain_bert.py" in text
    assert ("--bert-no-binary-head" in text) == ("false" in words)
    assert "decoder-only" not in text
    back = import_texts([(text, "back.sh")], "back").run.model
    assert (
        back.model_copy(update={"name": run.model.name, "published": run.model.published})
        == run.model
    )
