"""Checkpoints of megatron-core: what it saves is imported, and what is exported it loads, bit by
bit.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mtrain.cli.main import main
from mtrain.config.resolve.resolution import resolve
from mtrain.convert.megatron import reader as torch_dist_read
from mtrain.convert.raw_arrays import as_tensor
from mtrain.errors import ConfigError, CorruptData
from tests.support import megatron_models as theirs
from tests.support.configs import LAPTOP
from tests.support.covering import some
from tests.support.forked import run_alone, run_ranks

LAYOUTS: dict[str, dict[str, Any] | None] = {
    "stacked": None,
    "apart": {"non_homogeneous_layers": True},
    "in halves": {"singleton_local_shards": True},
}
"""Ways in which megatron-core stores layers, experts and gates."""
GOES: dict[str, tuple[str, str]] = {
    f"{case}, {layout}": (case, layout) for case in theirs.CASES for layout in LAYOUTS
}
QUICK = (
    "tied, another padding, stacked",
    "experts, in halves",
    "latent attention, fused norms, apart",
)


def command(*words: object) -> int:
    """Run `convert WORDS` in a process of its own."""
    return int(run_alone(lambda: main(["convert", *map(str, words)])))


def saved(
    case: theirs.Case, folder: Path, layout: dict[str, Any] | None = None, ranks: int = 1
) -> list[Any]:
    """Save a model; return the weights of each rank."""

    def save() -> dict[str, torch.Tensor]:
        model = theirs.build(case, 1)
        theirs.save(model, folder, layout)
        return dict(theirs.weights(model))

    return run_ranks(ranks, save)


def loaded(
    case: theirs.Case, folder: Path, layout: dict[str, Any] | None = None, ranks: int = 1
) -> list[Any]:
    """Return the weights of each rank of another model that loads a checkpoint, and the names that
    it does not know.
    """

    def load() -> tuple[dict[str, torch.Tensor], set[str]]:
        model = theirs.build(case, 2)
        unknown = theirs.load(model, folder, layout)
        return dict(theirs.weights(model)), unknown

    return run_ranks(ranks, load)


def same(
    found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], rows: int = theirs.IDS
) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        cut = slice(rows) if len(tensor) > rows else slice(None)  # a table of token ids has padding
        assert torch.equal(found[name][cut], tensor[cut]), name


@pytest.mark.sampled(9)
@pytest.mark.parametrize("name", some(GOES, QUICK))
def test_megatron_checkpoint_round_trip(name: str, tmp_path: Path) -> None:
    case = theirs.CASES[GOES[name][0]]
    layout = LAYOUTS[GOES[name][1]]
    source = tmp_path / "theirs/iter_0000100"
    run = tmp_path / "run"
    again = tmp_path / "again"
    (expected,) = saved(case, source, layout)
    (source.parent / "latest_checkpointed_iteration.txt").write_text("100\n")
    assert command("import", "--megatron", source.parent, run, *case.words.split()) == 0
    apart = ["layers=apart"] if layout else []
    assert command("export", "--megatron", run, again, *apart) == 0
    assert (again / "latest_checkpointed_iteration.txt").read_text() == "release"
    ((found, unknown),) = loaded(
        case, again / "release", {"non_homogeneous_layers": True} if layout else None
    )
    same(found, expected)
    assert all("norm" in key or key.endswith("_extra_state") for key in unknown), (
        f"norms have two names: {unknown}"
    )
    assert command("verify", source.parent, run) == 0
    assert command("verify", source, again) == 0 or case.rows != 384
    certificate = json.loads((run / "conversion.json").read_text())
    used = [part for step in certificate["steps"] for part in step["theirs"]]
    assert sorted(used) == sorted(certificate["source"]), "every part of theirs has one place"
    assert not any(re.search("optimizer|_extra_state|rng", part) for part in used)


@pytest.mark.full
def test_megatron_checkpoint_two_ranks_round_trip(tmp_path: Path) -> None:
    case = theirs.CASES["grouped queries, gated"]
    expected = saved(case, tmp_path / "theirs", ranks=2)
    assert (
        command("import", "--megatron", tmp_path / "theirs", tmp_path / "run", *case.words.split())
        == 0
    )
    assert command("export", "--megatron", tmp_path / "run", tmp_path / "again") == 0
    for (found, unknown), own in zip(
        loaded(case, tmp_path / "again/release", ranks=2), expected, strict=True
    ):
        same(found, own, rows=108)  # of 192 that the second rank has
        assert all(key.endswith("_extra_state") for key in unknown)


def test_megatron_checkpoint_grouped_experts_load_export(tmp_path: Path) -> None:
    case = theirs.CASES["experts"]
    saved(case, tmp_path / "theirs")
    assert (
        command("import", "--megatron", tmp_path / "theirs", tmp_path / "run", *case.words.split())
        == 0
    )
    assert (
        command("export", "--megatron", tmp_path / "run", tmp_path / "again", "layers=apart") == 0
    )

    def load() -> None:
        from megatron.core import dist_checkpointing

        from mtrain.assembly.model import build_model
        from mtrain.ckpt.state import load_model
        from mtrain.ckpt.store import Checkpoint
        from mtrain.config.compose.lock_file import read_run_file
        from mtrain.world.init import joined

        run = read_run_file(tmp_path / "run/run.yaml")
        with joined(run) as world:
            ours, other = (build_model(run, world, wrap=False)[0] for _ in range(2))
            load_model(Checkpoint.open(tmp_path / "run/checkpoints/step_00000000"), [ours])
            state = other.sharded_state_dict()
            for parameter in other.parameters():
                parameter.data.fill_(torch.nan)
            other.load_state_dict(
                dist_checkpointing.load(state, str(tmp_path / "again/release")), strict=False
            )
            same(dict(theirs.weights(other)), dict(theirs.weights(ours)))

    run_ranks(1, load)


WRONG = {
    "a layer more": (
        "model.num_layers=3",
        r"decoder\.layers\.2\.input_layernorm\.weight is missing",
    ),
    "a layer less": (
        "model.num_layers=1",
        r"nothing of ours is made of decoder\.layers\.1\.input_layernorm\.weight",
    ),
    "another width": (
        "model.ffn_hidden_size=64",
        r"linear_fc1\.weight\[0\] makes a tensor of shape \[96, 32\], and our",
    ),
    "tied": (
        "model.tie_word_embeddings=true",
        r"output_layer\.weight and .* are one tensor, and they are two",
    ),
    "more ids": (
        "model.vocab_size=1000",
        r"word_embeddings\.weight makes a tensor of shape \[384, 32\]",
    ),
    "biases": ("model.add_qkv_bias=true", r"self_attention\.linear_qkv\.bias is missing"),
}


@pytest.mark.full
def test_megatron_checkpoint_foreign_model_writes_nothing(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    case = theirs.CASES["grouped queries, gated"]
    saved(case, tmp_path / "theirs")
    capfd.readouterr()
    words = [*case.words.split(), "model.rotary_base=500000.0"]
    assert command("import", "--megatron", tmp_path / "theirs", tmp_path / "run", *words) == 2
    assert " says that the weights were trained with rotary_base 10000" in capfd.readouterr().err
    for word, said in WRONG.values():
        words = [
            *(known for known in case.words.split() if known.split("=")[0] != word.split("=")[0]),
            word,
        ]
        assert command("import", "--megatron", tmp_path / "theirs", tmp_path / "run", *words) == 4
        found = capfd.readouterr().err
        assert re.search(said, found), found
        assert [path.name for path in tmp_path.iterdir()] == ["theirs"]
    assert command("import", "--megatron", tmp_path / "theirs", tmp_path / "run") == 2
    assert "model: cannot be left out" in capfd.readouterr().err


def test_megatron_checkpoint_differing_duplicate_norm_is_refused(tmp_path: Path) -> None:
    import torch.distributed.checkpoint as dcp

    from mtrain.convert.megatron.checkpoint import open_weights

    state = {"decoder.layers.pre_mlp_layernorm.weight": torch.ones(2, 4)}
    state["decoder.layers.mlp.linear_fc1.layer_norm_weight"] = torch.tensor(
        [[1.0] * 4, [1.0] * 3 + [2.0]]
    )
    run_alone(
        lambda: (
            dcp.save(state, storage_writer=dcp.FileSystemWriter(tmp_path / "theirs"), no_dist=True)
            and None
        )
    )
    reader = torch_dist_read.TorchDistReader(open_weights(tmp_path / "theirs"))
    assert torch.equal(
        as_tensor(reader.tensor("decoder.layers.0.pre_mlp_layernorm.weight"), "F32"), torch.ones(4)
    )
    with pytest.raises(
        CorruptData, match=r"layer_norm_weight\[1\] and .* are the same weight and differ"
    ):
        reader.tensor("decoder.layers.1.pre_mlp_layernorm.weight")


def test_megatron_checkpoint_layer_is_read_by_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch.distributed.checkpoint as dcp

    from mtrain.convert.megatron.checkpoint import open_weights

    whole = torch.randn(16, 8, 4)
    state = {"model.decoder.layers.mlp.linear_fc2.weight": whole}
    run_alone(
        lambda: (
            dcp.save(state, storage_writer=dcp.FileSystemWriter(tmp_path / "theirs"), no_dist=True)
            and None
        )
    )
    read = list[int]()
    fill = torch_dist_read._fill
    monkeypatch.setattr(
        torch_dist_read, "_fill", lambda f, b, n: (read.append(len(b)), fill(f, b, n))[1]
    )
    reader = torch_dist_read.TorchDistReader(open_weights(tmp_path / "theirs"))
    assert torch.equal(
        as_tensor(reader.tensor("decoder.layers.11.mlp.linear_fc2.weight"), "F32"), whole[11]
    )
    assert read == [8 * 4 * 4]


def test_megatron_checkpoint_unlike_layers_are_not_stacked(tmp_path: Path) -> None:
    from mtrain.convert.megatron.checkpoint import export_checkpoint
    from mtrain.loading.configuration import load

    run = load(["model=deepseek_tiny", "parallel=single", "data=mock"]).run
    with pytest.raises(ConfigError, match=r"Use layers=apart"):
        export_checkpoint(None, run, tmp_path, None, "stacked")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "name",
    some(["grouped queries, gated", "layer norms, biases", "experts"], ["grouped queries, gated"]),
)
def test_megatron_checkpoint_import_computes_as_megatron(name: str, tmp_path: Path) -> None:
    import numpy as np

    case = theirs.CASES[name]
    ids = list(range(5, 37))

    def save() -> torch.Tensor:
        model = theirs.build(case, 1).eval()
        theirs.save(model, tmp_path / "theirs")
        later = torch.triu(torch.ones(1, 1, len(ids), len(ids), dtype=torch.bool), 1)
        with torch.no_grad():
            found: torch.Tensor = model(torch.tensor([ids]), torch.arange(len(ids))[None], later)
        return found[0, :, : theirs.IDS]

    (expected,) = run_ranks(1, save)
    assert (
        command("import", "--megatron", tmp_path / "theirs", tmp_path / "run", *case.words.split())
        == 0
    )

    def compute() -> None:
        from mtrain.config.compose.lock_file import read_run_file
        from mtrain.launching import local

        run = read_run_file(tmp_path / "run/run.yaml")
        local.logits(run, tmp_path / "run/checkpoints/step_00000000", ids, tmp_path / "logits")

    run_alone(compute)
    found = torch.from_numpy(np.fromfile(tmp_path / "logits", np.float32)).view(len(ids), -1)
    assert found.shape == expected.shape
    assert (found - expected).abs().max() < 1e-5 * expected.abs().max()


def test_megatron_checkpoint_empty_table_is_named(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    import torch.distributed.checkpoint as dcp

    state = {"embedding.word_embeddings.weight": torch.tensor(1.0)}
    run_alone(
        lambda: (
            dcp.save(state, storage_writer=dcp.FileSystemWriter(tmp_path / "theirs"), no_dist=True)
            and None
        )
    )
    words = theirs.CASES["grouped queries, gated"].words.split()
    capfd.readouterr()
    assert command("import", "--megatron", tmp_path / "theirs", tmp_path / "run", *words) == 4
    assert "word_embeddings.weight makes a tensor of shape [], and our" in capfd.readouterr().err


def test_megatron_checkpoint_export_ends_with_reader_error(tmp_path: Path) -> None:
    from mtrain.config.compose.composer import compose
    from mtrain.convert.megatron.writer import export_torch_dist

    name = "decoder.final_layernorm.weight"
    step = SimpleNamespace(theirs=(name,))

    def read(*_: object) -> Any:
        raise CorruptData("a hash differs")

    made = [SimpleNamespace(name=name, shape=(4,), dtype="F32")]
    weights: Any = SimpleNamespace(
        made=lambda: made, found=SimpleNamespace(steps=[step]), of_step=read
    )
    run = resolve(compose(["model=llama_tiny"]).run, LAPTOP)
    with pytest.raises(CorruptData, match="a hash differs"):
        export_torch_dist(weights, run, tmp_path, stacked=True)
