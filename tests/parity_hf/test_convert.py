"""Weights of Hugging Face folders: in, through any layout, and out again, byte by byte; a wrong
table is found.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from mtrain.cli.main import main
from mtrain.errors import CorruptData
from mtrain.models.gpt import hf
from mtrain.models.table import GATE_UP, TRANSPOSED, Entry, Operation, Table
from tests.parity_hf import hf_reference
from tests.parity_hf.drawn import FAMILIES, draw
from tests.parity_hf.families import CASES
from tests.support.covering import some
from tests.support.forked import RankFailed, run_alone, run_ranks
from tests.support.launched import mtrain

DRAWN = int(os.environ.get("PARITY_CASES", "1"))
"""Random configurations of each family."""
ALWAYS = (
    "gpt oss beyond its window",
    "deepseek v3",
    "gpt2",
    "nemotron 4, with heads narrower than the model",
)
LAYOUTS = {
    "llama 3.2, tied": ("parallel=tp2pp2", 4),
    "qwen3": ("parallel=pp2dp2 parallel.distributed_optimizer=true", 4),
    "mixtral": ("parallel=ep2", 2),
    "deepseek v3": ("parallel=tp2sp", 2),
    "qwen2 moe": ("parallel=tp2ep2etp1sp", 2),
}


def saved(name: str, folder: Path, **more: Any) -> Path:
    """Return a folder as transformers saves a model of the case `name`."""
    case = CASES[name]

    def save() -> None:
        config = hf_reference.configuration(case.kind, {**case.values, **more})
        hf_reference.model(config, 1).save_pretrained(folder)

    run_alone(save)
    return folder


def command(*words: object) -> int:
    """Run `convert WORDS` in a process of its own."""
    return int(run_alone(lambda: main(["convert", *map(str, words)])))


def data_of(folder: Path) -> dict[str, bytes]:
    """Return the bytes of every tensor of a folder."""
    from mtrain.convert.huggingface.folder import open_folder

    out = {}
    for name, tensor in open_folder(folder).tensors.items():
        buffer = bytearray(tensor.nbytes)
        tensor.read_into(memoryview(buffer))
        out[name] = bytes(buffer)
    return out


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", some(CASES, ALWAYS))
def test_convert_round_trip_is_bytewise_and_computes_same(name: str, tmp_path: Path) -> None:
    theirs_ = saved(name, tmp_path / "theirs")
    run = tmp_path / "run"
    again = tmp_path / "again"
    assert command("import", theirs_, run) == 0
    assert command("export", run, again) == 0
    assert data_of(again) == data_of(theirs_)
    # A linear attention carries the rounding of its products through the sequence, and processors
    # round them differently.
    within = 5e-5 if name.startswith("qwen3 next") else 1e-5
    for folder in (run, again):
        certificate = json.loads((folder / "conversion.json").read_text())
        found = certificate["logits"]
        assert found["largest_error"] <= within * max(1.0, found["largest_logit"]), found
        held = certificate["source" if folder == run else "target"]
        used = [name for step in certificate["steps"] for name in step["theirs"]] + list(
            certificate["copies"]
        )
        assert sorted(used) == sorted(held), "every tensor of theirs has one place"
    assert command("verify", theirs_, run) == 0


@pytest.mark.full
def test_convert_certificate_hashes_imported_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mtrain.ckpt import hashes
    from mtrain.ckpt.folder import read_manifest

    monkeypatch.setattr(hashes, "BLOCK_BYTES", 1000, raising=False)
    theirs_ = saved("gpt2", tmp_path / "theirs")
    run = tmp_path / "run"
    again = tmp_path / "again"
    assert command("import", theirs_, run) == 0
    checkpoint = run / "checkpoints/step_00000000"
    manifest = read_manifest(checkpoint, verify=True)
    files = hashes.Files(checkpoint, manifest["files"])
    pieces = [piece for tensor in manifest["tensors"].values() for piece in tensor["pieces"]]
    sizes = {piece["entry"]: files[piece["file"]].entry(piece["entry"]) for piece in pieces}
    largest = max(sizes.values(), key=lambda entry: entry.nbytes)
    assert largest.nbytes > 2000
    digits = hashes.XXH3.digits
    assert all(len(e.hashes) == digits * -(-e.nbytes // 1000) for e in sizes.values())
    held = json.loads((run / "conversion.json").read_text())["target"]
    assert {name: entry.sha256 for name, entry in sizes.items()} == {
        n: tensor["sha256"] for n, tensor in held.items()
    }
    for piece in pieces:
        entry = sizes[piece["entry"]]
        data = files[piece["file"]].read(piece["entry"], 0, entry.nbytes)
        assert hashlib.sha256(data).hexdigest() == entry.sha256
    assert command("export", run, again) == 0
    assert data_of(again) == data_of(theirs_)


@pytest.mark.full
@pytest.mark.parametrize("seed", range(DRAWN))
@pytest.mark.parametrize("kind", FAMILIES)
def test_convert_random_model_round_trips_or_is_refused(
    kind: str, seed: int, tmp_path: Path
) -> None:
    case = draw(kind, seed)

    def save() -> None:
        hf_reference.model(
            hf_reference.configuration(case.kind, case.values), seed
        ).save_pretrained(tmp_path / "theirs")

    run_alone(save)
    code = command("import", tmp_path / "theirs", tmp_path / "run")
    if code == 0:
        assert command("export", tmp_path / "run", tmp_path / "again") == 0
        assert data_of(tmp_path / "again") == data_of(tmp_path / "theirs")
    assert code in (0, 2)
    assert (tmp_path / "run").exists() == (code == 0)


def _saved_in(layout: str, run: Path, into: Path) -> None:
    """Load the weights of a run in a layout, and save them from there."""
    from mtrain.api import load
    from mtrain.ckpt import state
    from mtrain.ckpt.store import Checkpoint
    from mtrain.train.assemble import assemble, splits_of
    from mtrain.world.init import joined

    words = (
        "data=mock data.seq_length=16 trainer.global_batch_size=8 trainer.micro_batch_size=1"
        " optim.warmup_iters=0"
    )
    found = load([f"run={run / 'run.yaml'}", *words.split(), *layout.split()]).run
    with joined(found) as world:
        parts = assemble(found, world, splits_of(found))
        state.load_weights(Checkpoint.open(run / "checkpoints/step_00000000"), parts.state)
        state.save(into, found, world, parts.state, {})


@pytest.mark.parametrize("name", some(LAYOUTS, ["qwen2 moe"]))
def test_convert_layout_round_trip_keeps_weights(name: str, tmp_path: Path) -> None:
    layout, ranks = LAYOUTS[name]
    theirs_ = saved(name, tmp_path / "theirs")
    run = tmp_path / "run"
    assert command("import", theirs_, run) == 0
    run_ranks(ranks, _saved_in, layout, run, tmp_path / "saved")
    assert command("export", tmp_path / "saved/step_00000000", tmp_path / "again") == 0
    assert data_of(tmp_path / "again") == data_of(theirs_)


def _changed(change: Callable[[Entry], Entry | None]) -> Callable[[Table], Table]:
    def apply(table: Table) -> Table:
        layer = [change(entry) for entry in table.layer]
        dense = [change(entry) for entry in table.dense]
        return replace(
            table, layer=tuple(e for e in layer if e), dense=tuple(e for e in dense if e)
        )

    return apply


_SWAPPED = Operation(
    "up over gate",
    lambda t, m: GATE_UP.to_ours(t[::-1], m),
    lambda t, m: GATE_UP.to_theirs(t, m)[::-1],
)
MUTATIONS: dict[str, Callable[[Entry], Entry | None]] = {
    "a transposed weight": lambda e: (
        replace(e, operation=TRANSPOSED) if "linear_proj.weight" in e.ours else e
    ),
    "gate and up swapped": lambda e: (
        replace(e, operation=_SWAPPED) if e.operation is GATE_UP else e
    ),
    "two norms swapped": lambda e: replace(
        e,
        ours=e.ours.translate(str.maketrans({}))
        .replace("input_layernorm", "other")
        .replace("pre_mlp_layernorm", "input_layernorm")
        .replace("other", "pre_mlp_layernorm"),
    ),
    "a weight that nobody takes": lambda e: None if "linear_proj.weight" in e.ours else e,
    "a bias that is not there": lambda e: (
        replace(e, theirs=(f"{e.theirs[0]}.more",)) if "fc2" in e.ours else e
    ),
}


@pytest.mark.sampled(9)
@pytest.mark.parametrize("name", MUTATIONS)
def test_convert_mutated_table_is_found(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs_ = saved("llama 2", tmp_path / "theirs")
    tables = hf.files
    monkeypatch.setattr(
        hf,
        "files",
        lambda kind, model: tuple(map(_changed(MUTATIONS[name]), tables(kind, model))),
    )
    with pytest.raises(RankFailed, match="exit code 4"):
        run_alone(lambda: _must(main(["convert", "import", str(theirs_), str(tmp_path / "run")])))
    assert not (tmp_path / "run").exists()


def _must(code: int) -> None:
    assert code == 0, f"exit code {code}"


def test_convert_extra_or_missing_layer_is_named(tmp_path: Path) -> None:
    from mtrain.convert.huggingface.folder import open_folder
    from mtrain.convert.match import match

    theirs_ = saved("llama 2", tmp_path / "theirs")
    names = set(open_folder(theirs_).tensors)
    with pytest.raises(CorruptData, match=r"nothing of ours is made of model\.layers\.2\.x"):
        match(
            hf.files("llama", _model(theirs_)),
            _model(theirs_),
            _ours(theirs_),
            names | {"model.layers.2.x"},
        )
    lacking = names - {"model.layers.1.mlp.down_proj.weight"}
    with pytest.raises(CorruptData, match=r"model\.layers\.1\.mlp\.down_proj\.weight is missing"):
        match(hf.files("llama", _model(theirs_)), _model(theirs_), _ours(theirs_), lacking)


def _model(folder: Path) -> Any:
    from mtrain.recipes.huggingface.importer import import_config

    return import_config(folder / "config.json").run.model


def _ours(folder: Path) -> list[str]:
    from mtrain.cli.convert import _run_of

    run, _ = _run_of(folder / "config.json", [])

    def names() -> list[str]:
        from mtrain.convert.boxes import model_boxes

        return list(model_boxes(run))

    found: list[str] = run_alone(names)
    return found


def test_convert_fp8_weights_use_block_factors(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    from mtrain.convert.huggingface.folder import open_folder
    from mtrain.convert.huggingface.reader import Reader
    from mtrain.convert.raw_arrays import as_tensor

    weight = torch.randn(200, 130).to(torch.float8_e4m3fn)
    factors = torch.rand(2, 2) + 0.5
    save_file({"w": weight, "w_scale_inv": factors}, tmp_path / "model.safetensors")
    reader = Reader(open_folder(tmp_path))
    assert reader.names == {"w"}
    got = as_tensor(reader.tensor("w"), reader.dtype("w"))
    for i, j in ((0, 0), (199, 129), (130, 3), (5, 128)):
        expected = (weight[i, j].float() * factors[i // 128, j // 128]).bfloat16()
        assert got[i, j] == expected
    save_file({"w": weight, "w_scale_inv": factors[:1]}, tmp_path / "model.safetensors")
    with pytest.raises(CorruptData, match="w_scale_inv has shape"):
        Reader(open_folder(tmp_path)).tensor("w")


def test_convert_mxfp4_weights_equal_transformers(tmp_path: Path) -> None:
    from safetensors.torch import save_file
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    from mtrain.convert.huggingface.folder import open_folder
    from mtrain.convert.huggingface.reader import Reader
    from mtrain.convert.raw_arrays import as_tensor

    blocks = torch.randint(0, 256, (2, 6, 3, 16), dtype=torch.uint8)
    scales = torch.randint(110, 140, (2, 6, 3), dtype=torch.uint8)
    save_file({"w_blocks": blocks, "w_scales": scales}, tmp_path / "model.safetensors")
    reader = Reader(open_folder(tmp_path))
    got = as_tensor(reader.tensor("w"), reader.dtype("w"))
    expected = convert_moe_packed_tensors(blocks, scales)
    assert got.dtype == expected.dtype
    assert torch.equal(got, expected)


@dataclass
class _Held:
    value: torch.Tensor
    names = frozenset(["it"])

    def dtype(self, name: str) -> str:
        from mtrain.convert.raw_arrays import of_tensor

        return of_tensor(self.value)[1]

    def tensor(self, name: str) -> Any:
        from mtrain.convert.raw_arrays import of_tensor

        return of_tensor(self.value)[0]


def test_convert_equality_means_every_bit() -> None:
    from mtrain.convert.compare import compare

    def said(a: torch.Tensor, b: torch.Tensor) -> str:
        (row,), only = compare(_Held(a), _Held(b))
        assert only == []
        return "the same" if row.equal else row.said

    one = torch.tensor(1.0)
    assert said(one, one.clone()) == "the same"
    assert said(torch.tensor([torch.nan]), torch.tensor([torch.nan])) == "the same"
    assert said(torch.empty(0, 3), torch.empty(0, 3)) == "the same"
    assert said(torch.zeros(2), -torch.zeros(2)) == "largest difference 0"
    assert said(one, one + 1) == "largest difference 1"
    assert said(one, one.bfloat16()) == "largest difference 0, float32 and bfloat16"
    assert said(torch.zeros(2), torch.zeros(1, 2)) == "shapes [2] and [1, 2]"


def _add_mtp(folder: Path, *, other_embedding: bool) -> None:
    """Add one MTP layer after the others, as in DeepSeek-V3's files: transformers neither writes
    nor reads it.
    """
    from safetensors.torch import load_file, save_file

    config = json.loads((folder / "config.json").read_text())
    layers = config["num_hidden_layers"]
    width = config["hidden_size"]
    held = load_file(folder / "model.safetensors")
    last = f"model.layers.{layers - 1}."
    new = f"model.layers.{layers}."
    held |= {
        name.replace(last, new): torch.randn_like(t)
        for name, t in held.items()
        if name.startswith(last)
    }
    held |= {
        f"{new}{name}.weight": torch.randn(width) for name in ("enorm", "hnorm", "shared_head.norm")
    }
    held[f"{new}eh_proj.weight"] = torch.randn(width, 2 * width)
    held[f"{new}embed_tokens.weight"] = held["model.embed_tokens.weight"].clone() + other_embedding
    held[f"{new}shared_head.head.weight"] = held["lm_head.weight"].clone()
    save_file(held, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps({**config, "num_nextn_predict_layers": 1}))


@pytest.mark.full
@pytest.mark.parametrize(
    "name", ["deepseek v3", pytest.param("glm 4.5 air", marks=pytest.mark.full)]
)
def test_convert_mtp_layers_round_trip(name: str, tmp_path: Path) -> None:
    theirs_ = saved(name, tmp_path / "theirs")
    run = tmp_path / "run"
    _add_mtp(theirs_, other_embedding=False)
    assert command("import", theirs_, run) == 0
    assert command("export", run, tmp_path / "again") == 0
    assert data_of(tmp_path / "again") == data_of(theirs_)
    steps = json.loads((run / "conversion.json").read_text())["steps"]
    assert ["mtp.layers.0.eh_proj.weight"] in [step["ours"] for step in steps]
    other = saved(name, tmp_path / "other")
    _add_mtp(other, other_embedding=True)
    assert command("import", other, tmp_path / "refused") == 4
    assert not (tmp_path / "refused").exists()


@pytest.mark.full
def test_convert_import_resumes_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    theirs_ = saved("qwen3, tied", tmp_path / "theirs")
    run = tmp_path / "run"
    words = (
        "data=mock data.seq_length=16 trainer.train_iters=2 trainer.global_batch_size=4"
        " log.progress=none"
    )
    assert command("import", theirs_, run, *words.split()) == 0
    monkeypatch.chdir(tmp_path)

    def loss(folder: Path, *argv: str) -> float:
        """Return the loss of the first step."""
        assert run_alone(lambda: main(list(argv))) == 0
        return float(json.loads((folder / "metrics.jsonl").read_text().splitlines()[0])["loss"])

    again = f"run={run / 'run.yaml'}"
    resumed = loss(run, "resume", str(run))
    assert (
        loss(tmp_path / "runs/more", again, "log.name=more", f"checkpoint.init_from={theirs_}")
        == resumed
    )
    assert (
        loss(tmp_path / "runs/third", again, "log.name=third", f"checkpoint.init_from={run}")
        < resumed
    )
    assert loss(tmp_path / "runs/drawn", again, "log.name=drawn") != resumed


@pytest.mark.full
def test_convert_killed_conversion_leaves_nothing_or_whole(tmp_path: Path) -> None:
    theirs_ = saved("qwen3, tied", tmp_path / "theirs")
    begin = time.monotonic()
    assert command("import", theirs_, tmp_path / "whole") == 0
    seconds = time.monotonic() - begin
    for number in range(20):
        out = tmp_path / f"run{number}"
        pid = os.fork()
        if pid == 0:
            try:
                main(["convert", "import", str(theirs_), str(out)])
            finally:
                os._exit(0)
        time.sleep(seconds * (number + 0.5) / 20)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        if out.exists():
            assert command("verify", theirs_, out) == 0
            assert (out / "conversion.json").is_file()
        assert command("import", theirs_, tmp_path / f"again{number}") == 0, (
            "what was left is in nobody's way"
        )


@pytest.mark.full
def test_convert_repeated_tied_head_is_counted_else_refused(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    from safetensors.torch import load_file, save_file

    source = saved("llama 3.2, tied", tmp_path / "theirs")
    run = tmp_path / "run"
    held = load_file(source / "model.safetensors")
    held["lm_head.weight"] = held["model.embed_tokens.weight"].clone()
    save_file(held, source / "model.safetensors", {"format": "pt"})
    done = mtrain("convert", "import", str(source), str(run), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    certificate = json.loads((run / "conversion.json").read_text())
    assert certificate["copies"] == {"lm_head.weight": "model.embed_tokens.weight"}
    assert "lm_head.weight" in certificate["source"]
    assert command("verify", source, run) == 0
    held["lm_head.weight"][3, 3] += 1
    save_file(held, source / "model.safetensors", {"format": "pt"})
    capfd.readouterr()
    assert command("import", source, tmp_path / "another") == 4
    said = capfd.readouterr().err
    assert "lm_head.weight" in said, "what differs is named, as the folder names it"
    assert "model.embed_tokens.weight" in said
    assert command("verify", source, run) == 4


def test_convert_repeated_gpt2_head_makes_no_difference(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    source = saved("gpt2", tmp_path / "theirs")
    more = shutil.copytree(source, tmp_path / "more")
    held = load_file(more / "model.safetensors")
    held["lm_head.weight"] = held["transformer.wte.weight"].clone()
    save_file(held, more / "model.safetensors", {"format": "pt"})
    assert command("verify", source, more) == 0
    held["lm_head.weight"][3, 3] += 1
    save_file(held, more / "model.safetensors", {"format": "pt"})
    assert command("verify", more, source) == 4
