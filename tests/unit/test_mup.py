"""Keys of muP and repeated predictions: keys that they exclude, and their spelling in other
formats.
"""

from __future__ import annotations

from typing import Any

import pytest

from mtrain.config.compose.composer import compose
from mtrain.config.resolve.resolution import resolve
from mtrain.config.rules import check
from mtrain.config.schema.mup import MupConfig
from mtrain.errors import ConfigError
from mtrain.recipes.huggingface.exporter import config_json
from mtrain.recipes.megatron.exporter import export_words
from mtrain.recipes.megatron.importer import import_texts
from tests.support.configs import LAPTOP

WIDER = "model.mup.base_hidden_size=128"


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (WIDER, ""),
        (f"{WIDER} optim=lion", ""),
        (f"{WIDER} optim=muon", "MT468"),
        (f"model=deepseek_tiny {WIDER}", "MT278"),
        (f"model=qwen3_next_tiny {WIDER}", "MT278"),
        (f"{WIDER} peft=lora", "MT278"),
        (f"{WIDER} model.softmax_scale=0.1", "MT150"),
        ("model.mtp_num_layers=2 model.mtp_use_repeated_layer=true", ""),
        ("model.mtp_num_layers=1 model.mtp_use_repeated_layer=true", "MT150"),
    ],
)
def test_mup_unknown_by_width_is_refused(words: str, code: str) -> None:
    problems = [
        p for p in check(resolve(compose(words.split()).run, LAPTOP)) if p.severity == "error"
    ]
    assert {p.code for p in problems} == ({code} if code else set())
    assert all(p.fix for p in problems)


@pytest.mark.parametrize(
    "words", [WIDER, "model.mtp_num_layers=2 model.mtp_use_repeated_layer=true"]
)
def test_mup_config_json_of_other_model_is_not_written(words: str) -> None:
    model = resolve(compose(words.split()).run, LAPTOP).model
    with pytest.raises(ConfigError) as refused:
        config_json(model, "float32")
    assert refused.value.problems[0].code == "MT703"


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("--use-mup", MupConfig()),
        (
            "--use-mup --mup-base-hidden-size 36 --mup-embedding-mult 2.5",
            MupConfig(base_hidden_size=36, embedding_mult=2.5),
        ),
        (
            "--use-mup --mup-output-mult 1.0 --mup-attn-scale-power 0.5",
            MupConfig(attn_scale_power=0.5),
        ),
        ("--mup-base-hidden-size 36", None),
    ],
)
def test_mup_flags_round_trip(flags: str, expected: MupConfig | None) -> None:
    def read(words: str) -> Any:
        return import_texts(
            [(f"torchrun --nproc-per-node 1 pretrain_gpt.py {words}\n", "run.sh")], "mup"
        ).run

    run = read(
        "--num-layers 4 --hidden-size 72 --num-attention-heads 4 --seq-length 128"
        " --micro-batch-size 1 --lr 1e-3 --vocab-size 1023 --tokenizer-type NullTokenizer"
        " --mock-data --train-iters 10 --global-batch-size 8 --mtp-num-layers 2"
        f" --mtp-use-repeated-layer {flags}"
    )
    assert run.model.mup == expected
    assert run.model.mtp_use_repeated_layer
    words = export_words(resolve(run, LAPTOP))[1]
    again = read(" ".join(word for group in words for word in group))
    assert again.model.mup == expected
    assert again.model.mtp_use_repeated_layer
