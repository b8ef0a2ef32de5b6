"""BERT and Megatron's BERT compared with transformers: logits, losses, gradients and steps in
layouts; import and export of files.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from mtrain.models.bert import hf
from mtrain.models.gpt.torch_dist import one_name
from mtrain.models.table import to_theirs
from tests.parity_hf import two_steps
from tests.parity_hf.compare import largest_difference, tensor_bytes
from tests.parity_hf.two_steps import STEPS, Sides, convert
from tests.support.forked import run_alone, run_ranks

PAD = 7
SHAPE = {
    "vocab_size": 331,
    "hidden_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "intermediate_size": 100,
    "max_position_embeddings": 37,
    "type_vocab_size": 2,
    "pad_token_id": PAD,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}
LENGTH = 34
WORDS = f"{two_steps.WORDS} data.seq_length={LENGTH} optim.eps=1e-4"
LAYOUTS = {
    "single": (1, "parallel=single trainer.micro_batch_size=4"),
    "tp2sp": (2, "parallel=tp2sp trainer.micro_batch_size=2"),
    "pp2": (2, "parallel=pp2 trainer.micro_batch_size=2"),
    "tp2": (2, "parallel=tp2 trainer.micro_batch_size=4"),
    "tp2pp2": (4, "parallel=tp2pp2 trainer.micro_batch_size=1"),
    "dp2, distributed optimizer": (
        2,
        "parallel=dp2 parallel.distributed_optimizer=true trainer.micro_batch_size=1",
    ),
}
KINDS = (
    "BertForPreTraining",
    "BertForMaskedLM",
    "MegatronBertForPreTraining",
    "MegatronBertForMaskedLM",
)
ALWAYS = {("BertForPreTraining", "tp2sp"), ("MegatronBertForPreTraining", "tp2sp")}
CASES = [
    pytest.param(kind, layout, marks=() if (kind, layout) in ALWAYS else pytest.mark.full)
    for kind in KINDS
    for layout in LAYOUTS
]


def _family(kind: str) -> str:
    return kind.partition("For")[0]


def _model(kind: str) -> Any:
    """Return a model of transformers whose every weight has an effect; Megatron's has the tanh form
    of gelu.
    """
    import transformers

    shape = {**SHAPE, "hidden_act": "gelu_new"} if _family(kind) == "MegatronBert" else SHAPE
    config = getattr(transformers, f"{_family(kind)}Config")(**shape)
    made = getattr(transformers, kind)(config).float().train()
    draw = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            noise = torch.randn(parameter.shape, generator=draw)
            scale = 1.0 if name.endswith(("LayerNorm.weight", ".ln.weight")) else 0.0
            parameter.copy_(
                noise / parameter.shape[-1] ** 0.5 if parameter.ndim > 1 else 0.2 * noise + scale
            )
    return made


def _saved(kind: str, folder: Path) -> Path:
    run_alone(lambda: _model(kind).save_pretrained(folder))
    return folder


def _loaded(run: Path, layout: str = "single") -> Any:
    from mtrain.api import load

    return load([f"run={run / 'run.yaml'}", *WORDS.split(), *LAYOUTS[layout][1].split()]).run


def _logits(chunk: Any, batch: dict[str, Tensor]) -> Tensor:
    given: Any = (batch["tokens"], batch["position_ids"], None)
    found: Tensor = chunk(*given, token_types=batch.get("token_types"))
    return found


def _batches(run: Path) -> list[dict[str, Tensor]]:
    from mtrain.models.bert.data import collator

    return two_steps.batches(_loaded(run), collator)


def _theirs(kind: str, run: Path) -> dict[str, Any]:
    made = _model(kind)

    def forward(batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        given = {
            "input_ids": batch["tokens"],
            "token_type_ids": batch["token_types"],
            "labels": torch.where(batch["loss_mask"] > 0, batch["labels"], -100),
        }
        if "next_sentence" in batch:
            given["next_sentence_label"] = batch["next_sentence"]
        found = made(**given)
        return found.loss, found[1]

    tensors = lambda model: dict(model.named_parameters())  # noqa: E731
    return two_steps.theirs(made, _loaded(run), _batches(run), forward, tensors)


@pytest.fixture(scope="module")
def sides(tmp_path_factory: pytest.TempPathFactory) -> Sides:
    """Return our run folder with transformers' weights, and the results of transformers."""
    return two_steps.sides_of(tmp_path_factory, _saved, _theirs)


def _as_theirs(checkpoint: Path, run: Path) -> dict[str, Tensor]:
    """Return the weights, or gradients, in a checkpoint by the names of transformers."""
    from mtrain.train.verify.prove import whole_tensors

    model = _loaded(run).model
    out = {}
    for key, tensor in whole_tensors(checkpoint).items():
        name = key.removeprefix("model/")
        if name != key and ".layers." in name:  # all layers are one tensor in a checkpoint
            out |= {one_name(name, (i,)): layer for i, layer in enumerate(tensor)}
        elif name != key:
            out[name] = tensor
    kind = "bert" if model.norm_placement == "post_residual" else "megatron-bert"
    return to_theirs(hf.files(kind, model)[0], model, out)


@pytest.mark.sampled(9)
@pytest.mark.parametrize(("kind", "layout"), CASES)
def test_bert_two_steps_equal_transformers(
    kind: str, layout: str, sides: Sides, tmp_path: Path
) -> None:
    run, theirs = sides(kind)
    ranks, _ = LAYOUTS[layout]
    found = run_ranks(ranks, two_steps.ours, _loaded(run, layout), run, tmp_path, _logits)[0]
    for (loss, norm), their_loss, their_norm in zip(
        found, theirs["losses"], theirs["norms"], strict=True
    ):
        assert loss == pytest.approx(their_loss, rel=1e-5)
        assert norm == pytest.approx(their_norm, rel=1e-5)
    if ranks == 1:
        logits = torch.load(tmp_path / "logits.pt")
        assert float((logits - theirs["logits"]).abs().max()) <= 1e-5 * float(
            theirs["logits"].abs().max()
        )
    gradients = _as_theirs(tmp_path / "gradients/step_00000000", run)
    error, where = largest_difference(gradients, theirs["gradients"], theirs["gradients"], 1e-2)
    assert error <= 1e-5, where
    moved = {name: after - theirs["before"][name] for name, after in theirs["weights"].items()}
    error, where = largest_difference(
        _as_theirs(tmp_path / f"step_{STEPS:08d}", run), theirs["weights"], moved, 1.0
    )
    assert error <= 1e-4, where
    assert convert("export", tmp_path / "step_00000000", tmp_path / "again") == 0
    assert tensor_bytes(tmp_path / "again") == tensor_bytes(run.parent / "theirs")


def test_bert_pad_token_ignores_position(sides: Sides) -> None:
    """Show that the samples of the comparisons above contain transformers' padding_idx."""
    run, _ = sides("BertForPreTraining")
    assert _loaded(run).model.bert.pad_token_id == PAD
    assert (_batches(run)[0]["tokens"] == PAD).any()


def _renamed(folder: Path, change: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> Path:
    from safetensors.torch import load_file, save_file

    file = folder / "model.safetensors"
    save_file(change(load_file(file)), file, {"format": "pt"})
    return folder


COPIED = {"weight": "bert.embeddings.word_embeddings.weight", "bias": "cls.predictions.bias"}


def _as_published(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors as in older files: norms under other names, both heads, tied tensors
    twice, and a table of positions.
    """
    words = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}
    out = {}
    for name, tensor in tensors.items():
        for new, old in words.items():
            name = name.replace(new, old)
        out[name] = tensor
    width = SHAPE["hidden_size"]
    out |= {f"cls.predictions.decoder.{of}": tensors[name].clone() for of, name in COPIED.items()}
    more = {"bert.pooler.dense": (width, width), "cls.seq_relationship": (2, width)}
    for name, shape in more.items():
        out |= {f"{name}.weight": torch.zeros(shape), f"{name}.bias": torch.zeros(shape[0])}
    return out | {"bert.embeddings.position_ids": torch.arange(37).unsqueeze(0)}


@pytest.mark.full
def test_bert_old_names_are_read_and_unwanted_heads_dropped(
    tmp_path: Path,
) -> None:
    plain = _saved("BertForMaskedLM", tmp_path / "plain")
    old = _renamed(_saved("BertForMaskedLM", tmp_path / "old"), _as_published)
    assert convert("import", old, tmp_path / "run", "model.bert.next_sentence=false") == 0
    assert convert("export", tmp_path / "run", tmp_path / "again") == 0
    assert tensor_bytes(tmp_path / "again") == tensor_bytes(plain)


@pytest.mark.full
def test_bert_both_heads_are_imported_despite_config(
    tmp_path: Path,
) -> None:
    from mtrain.api import load

    whole = _saved("BertForPreTraining", tmp_path / "whole")
    both = json.loads((whole / "config.json").read_text())
    masked = json.dumps({**both, "architectures": ["BertForMaskedLM"]})  # as bert-base-uncased says
    (whole / "config.json").write_text(masked)
    assert convert("import", whole, tmp_path / "run") == 0
    assert load([f"run={tmp_path / 'run/run.yaml'}"]).run.model.bert.next_sentence
    assert convert("export", tmp_path / "run", tmp_path / "again") == 0
    assert tensor_bytes(tmp_path / "again") == tensor_bytes(whole)
    assert json.loads((tmp_path / "again/config.json").read_text())["architectures"] == [
        "BertForPreTraining"
    ]


def test_bert_no_head_is_imported_despite_config(tmp_path: Path) -> None:
    from mtrain.config.resolve.resolution import Machine, resolve
    from mtrain.convert.huggingface.model import configuration, import_model
    from mtrain.errors import ConfigError

    def without_head(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        return {name: tensor for name, tensor in tensors.items() if "seq_relationship" not in name}

    whole = _renamed(_saved("BertForPreTraining", tmp_path / "whole"), without_head)
    _, found = configuration(whole / "config.json")
    assert not found.run.model.bert.next_sentence
    _, other = configuration(whole / "config.json", ["model.bert.next_sentence=true"])
    with pytest.raises(ConfigError) as raised:
        import_model(resolve(other.run, Machine.here()), whole, tmp_path)
    assert raised.value.problems[0].fix == "model.bert.next_sentence=false"


@pytest.mark.parametrize("wanted", ["true", pytest.param("false", marks=pytest.mark.full)])
def test_bert_run_takes_available_heads(wanted: str, tmp_path: Path) -> None:
    from mtrain.ckpt.folder import read_manifest
    from mtrain.config.resolve.resolution import Machine, resolve
    from mtrain.convert.huggingface.model import configuration, import_model

    source = _renamed(_saved("BertForMaskedLM", tmp_path / "old"), _as_published)
    _, found = configuration(source / "config.json", [f"model.bert.next_sentence={wanted}"])
    run = resolve(found.run, Machine.here())
    (tmp_path / "home").mkdir()
    checkpoint = run_alone(lambda: import_model(run, source, tmp_path / "home")[1])
    tensors = read_manifest(checkpoint, verify=True)["tensors"]
    assert ("model/next_sentence.weight" in tensors) == (wanted == "true")


REFUSED = {
    "hidden_act": "relu",
    "position_embedding_type": "relative_key",
    "is_decoder": True,
    "add_cross_attention": True,
    "tie_word_embeddings": False,
    "architectures": ["BertForSequenceClassification"],
}


@pytest.mark.parametrize("key", REFUSED)
def test_bert_unsupported_is_refused_by_name(
    key: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "theirs"
    folder.mkdir()
    shape = {**SHAPE, "model_type": "bert", "architectures": ["BertForMaskedLM"], key: REFUSED[key]}
    (folder / "config.json").write_text(json.dumps(shape))
    (folder / "model.safetensors").write_bytes(_empty())
    assert convert("import", folder, tmp_path / "run") == 2
    assert f"{key} = " in capfd.readouterr().err
    assert not (tmp_path / "run").exists()


def _empty() -> bytes:
    from safetensors.torch import save

    return bytes(save({"bert.x": torch.zeros(1)}))


@pytest.mark.parametrize("seed", [pytest.param(seed, marks=pytest.mark.full) for seed in range(8)])
def test_bert_random_shape_round_trips_or_is_refused(seed: int, tmp_path: Path) -> None:
    import transformers

    dice = random.Random(seed)
    heads = dice.choice([1, 2, 3, 5])
    vocab = dice.choice([7, 97, 128, 331, 1000])
    shape = {
        "vocab_size": vocab,
        "hidden_size": heads * dice.choice([2, 6, 16]),
        "num_hidden_layers": dice.randint(1, 5),
        "num_attention_heads": heads,
        "intermediate_size": dice.randint(3, 90),
        "max_position_embeddings": dice.randint(9, 80),
        "type_vocab_size": dice.choice([2, 3]),
        "pad_token_id": dice.choice([None, 0, vocab - 1]),
        "layer_norm_eps": dice.choice([1e-12, 1e-5]),
    }
    name = dice.choice(KINDS)
    shape["hidden_act"] = dice.choice(["gelu", "gelu_new", "gelu_fast"])
    config = getattr(transformers, f"{_family(name)}Config")(**shape)
    run_alone(lambda: getattr(transformers, name)(config).save_pretrained(tmp_path / "theirs"))
    assert convert("import", tmp_path / "theirs", tmp_path / "run") == 0
    assert convert("export", tmp_path / "run", tmp_path / "again") == 0
    assert tensor_bytes(tmp_path / "again") == tensor_bytes(tmp_path / "theirs")
