"""Fine-tuning a Hugging Face folder on chats: the loss of transformers, and of TRL."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from mtrain.cli.main import main
from tests.parity_hf import hf_reference
from tests.support.chats import chats_file, folder_of, turns
from tests.support.covering import some
from tests.support.forked import run_alone

CHATS = [
    turns("What is it?", "It is a cat.", "and 12?", "naïve 30", system="Be kind"),
    turns("a b", "c"),
    turns("Is it 日本?", "☃ ok"),
    turns("def f", "return x\n", "12 + 30", "42", "a", "b"),
]
HF = {
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
OURS = (
    "model=llama_tiny model.num_layers=2 model.hidden_size=32 model.ffn_hidden_size=48"
    " model.num_attention_heads=4 model.num_query_groups=2 model.kv_channels=null"
    " model.vocab_size=640 model.max_position_embeddings=128 model.rotary_base=10000"
    " model.layernorm_epsilon=1e-5 model.tie_word_embeddings=false"
)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder of a tiny Llama with the tokenizer that it reads, and chats."""
    home = tmp_path_factory.mktemp("chats")

    def save() -> None:
        hf_reference.model(hf_reference.configuration("llama", HF), 1).save_pretrained(home / "hf")

    run_alone(save)
    folder_of(home / "hf", "chatml", marked=True)
    chats_file(home / "chats.jsonl", CHATS)
    return home


def loaded(home: Path) -> tuple[Any, Any]:
    """Return their model and tokenizer."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(home / "hf", attn_implementation="eager").float()
    return model, AutoTokenizer.from_pretrained(home / "hf")


def theirs_of_transformers(home: Path, learn_all: bool) -> float:
    """Return the loss of transformers, whose labels are -100 for tokens outside the mask of its
    chat template.
    """
    model, tokenizer = loaded(home)
    rows = [
        tokenizer.apply_chat_template(c, return_dict=True, return_assistant_tokens_mask=True)
        for c in CHATS
    ]
    longest = max(len(row["input_ids"]) for row in rows)
    ids = torch.zeros(len(rows), longest, dtype=torch.int64)
    labels = torch.full((len(rows), longest), -100)
    for i, row in enumerate(rows):
        known = torch.tensor(row["input_ids"])
        ids[i, : len(known)] = known
        mask = torch.tensor(row["assistant_masks"]) > 0
        labels[i, : len(known)] = known if learn_all else torch.where(mask, known, -100)
    with torch.no_grad():
        return float(model(ids, attention_mask=(ids > 0).long(), labels=labels).loss)


def theirs_of_trl(home: Path, learn_all: bool) -> float:
    """Return the loss of TRL's SFTTrainer on one batch of all chats."""
    import pyarrow
    from datasets import Dataset
    from datasets.table import InMemoryTable
    from trl import SFTConfig, SFTTrainer

    model, tokenizer = loaded(home)
    tokenizer.pad_token = "<|endoftext|>"
    asked = SFTConfig(
        output_dir=str(home / "trl"),
        max_length=128,
        per_device_train_batch_size=len(CHATS),
        report_to="none",
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        dataset_kwargs={"skip_prepare_dataset": True},
    )
    made = [
        tokenizer.apply_chat_template(c, return_dict=True, return_assistant_tokens_mask=True)
        for c in CHATS
    ]
    columns = []
    for row in made:
        known = [
            i if learn_all or m else -100
            for i, m in zip(row["input_ids"], row["assistant_masks"], strict=True)
        ]
        columns.append({"input_ids": row["input_ids"], "labels": known})
    table = InMemoryTable(pyarrow.Table.from_pylist(columns))
    # the function that makes one knows not every release of pyarrow
    rows = Dataset(table, fingerprint="chats")
    trainer = SFTTrainer(model=model, args=asked, train_dataset=rows, processing_class=tokenizer)
    (batch,) = trainer.get_train_dataloader()
    with torch.no_grad():
        return float(trainer.compute_loss(trainer.model.eval(), batch))


THEIRS = {"transformers": theirs_of_transformers, "trl": theirs_of_trl}


@pytest.mark.parametrize("learn_all", [False, pytest.param(True, marks=pytest.mark.full)])
@pytest.mark.parametrize("whose", some(THEIRS, ["transformers"]))
def test_chats_first_fine_tuning_step_has_their_loss(
    whose: str, learn_all: bool, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    words = (
        f"trainer=sft data=sft data.path={home}/chats.jsonl checkpoint.init_from={home}/hf"
        f" data.cache_dir={home}/c"
    )
    more = (
        f"data.loss_on={'all' if learn_all else 'assistant'} data.split=[1,0,0] data.seq_length=128"
        " parallel=single"
    )
    steps = (
        "trainer.train_iters=1 trainer.global_batch_size=4 trainer.eval_iters=0"
        " trainer.eval_interval=0"
    )
    argv = [
        *OURS.split(),
        *words.split(),
        *more.split(),
        *steps.split(),
        "log.name=run",
        "log.progress=none",
    ]
    assert run_alone(lambda: main(argv)) == 0
    ours = json.loads((tmp_path / "runs/run/metrics.jsonl").read_text().splitlines()[0])["loss"]
    their = run_alone(lambda: THEIRS[whose](home, learn_all))
    assert ours == pytest.approx(their, rel=1e-6)
    assert (tmp_path / "runs/run/tokenizer_config.json").is_file()
