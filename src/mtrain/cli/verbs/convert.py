"""`convert`: weights from and to other systems."""

from __future__ import annotations

import click

from mtrain.cli.command import Verb
from mtrain.cli.offers import first_of

SUBVERBS = ("import", "export", "inspect", "verify")


@click.command(
    "convert",
    cls=Verb,
    short_help="weights of Hugging Face and Megatron: convert import|export|inspect|verify",
    usage=(
        "convert import HF_DIR RUN [KEY=VALUE ...] | export RUN HF_DIR | inspect PATH | verify A B"
    ),
    help=(
        "Import weights from a Hugging Face folder, or with --megatron from a checkpoint of"
        " megatron-core, and export\nthem, tensor by tensor; no pickle is unpickled. Each"
        " conversion writes a conversion.json: every tensor of both\nsides once, its operation,"
        " hashes, and how far the logits are from those of transformers, if it is installed."
    ),
    arguments=(
        ("import HF_DIR RUN", "a new run folder with the weights in a checkpoint of step 0"),
        ("KEY=VALUE", "import: settings of the run other than the model: parallel=tp2 data=text"),
        ("export RUN HF_DIR", "a new folder that transformers loads"),
        ("dtype=FORMAT", "export: fp32, bf16 or fp16; by default that of the checkpoint"),
        (
            "model_type=TYPE",
            "export: the type in its config.json; by default the first that computes the same",
        ),
        (
            "peft=VERSION",
            "export: only the adapters, as peft 0.19 or 0.18 writes them; otherwise merge them",
        ),
        (
            "import --megatron DIR RUN",
            "DIR: iter_0000100, or the folder that holds it; name the model: model=llama3_8b",
        ),
        ("export --megatron RUN DIR", "a new folder for --load of Megatron-LM"),
        (
            "layers=LAYOUT",
            "export --megatron: stacked in one tensor, or apart; stacked if all are alike",
        ),
        ("inspect PATH", "names, shapes, formats and totals of a folder, a checkpoint or a file"),
        ("verify A B", "whether both hold the same weights; exit code 4 if not"),
    ),
    examples=(
        (
            "convert import --megatron checkpoints runs/mine model=llama3_8b",
            "what Megatron-LM saved",
        ),
        ("convert import Qwen3-0.6B runs/qwen3", "then: generate runs/qwen3, resume runs/qwen3"),
        ("convert export runs/NAME exported", "its newest checkpoint"),
    ),
    path_at=1,
    offers=first_of(SUBVERBS),
)
@click.option("--json", "as_json", is_flag=True, help="inspect, verify: print JSON for a machine")
@click.option(
    "--megatron",
    is_flag=True,
    help="import, export: the other side is a checkpoint of megatron-core",
)
def convert(words: list[str], as_json: bool, megatron: bool) -> int:
    """Import, export, inspect or verify weights."""
    from mtrain.cli import convert as verb

    return verb.run(words, as_json=as_json, megatron=megatron)
