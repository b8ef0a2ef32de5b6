"""`convert import|export|inspect|verify`: weights of Hugging Face folders in and out."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mtrain import strict_json
from mtrain.api import load
from mtrain.ckpt.folder import reading
from mtrain.cli.atomic_output import drafted, given_paths, new_folder, read_dtype, source_and_new
from mtrain.cli.convert_megatron import export_megatron, import_megatron, of_megatron
from mtrain.cli.output import refusal
from mtrain.config.compose.dump import run_yaml
from mtrain.config.compose.lock_file import read_run_file
from mtrain.config.compose.paths import CHECKPOINTS, RUN_FILE, program, run_folder_of
from mtrain.config.resolve.resolution import Machine, resolve
from mtrain.config.rules import check
from mtrain.config.schema.checkpoint import CheckpointConfig
from mtrain.config.schema.data import UnresolvedData
from mtrain.config.schema.log import LogConfig
from mtrain.config.schema.peft import PeftConfig
from mtrain.config.schema.run import RunConfig
from mtrain.errors import ConfigError, CorruptData, MtrainError, say
from mtrain.launching.signals import scratch_folder
from mtrain.loading.checkpoints import newest, quoted, target_of
from mtrain.plan.count import parameters
from mtrain.recipes.huggingface.classifiers import as_classifier
from mtrain.recipes.huggingface.exporter import config_json, same_model
from mtrain.recipes.huggingface.importer import KINDS, as_text, import_config, kind_of, read_json
from mtrain.units import bytes_, count

if TYPE_CHECKING:
    import numpy as np

USAGE = f"{program()} convert import HF_DIR RUN | export RUN HF_DIR | inspect PATH | verify A B"
TOKENS = 64
# Largest difference of logits, as a share of the largest logit: rounding is a thousandth of it.
MOST_APART = 1e-3
ENDS = ("bos_token_id", "eos_token_id")
IDS = (*ENDS, "pad_token_id", "decoder_start_token_id")


def run(words: list[str], *, as_json: bool, megatron: bool = False) -> int:
    """Run a subverb; return the exit code.

    With `megatron`, the other side is a checkpoint of megatron-core.
    """
    subverbs: dict[str, Callable[[list[str]], int]] = {
        "import": import_megatron if megatron else import_,
        "export": export_megatron if megatron else export,
        "inspect": lambda rest: inspect(rest, as_json=as_json),
        "verify": lambda rest: verify(rest, as_json=as_json),
    }
    if not words or words[0] not in subverbs:
        said = f"{words[0]} is no subverb" if words else "a subverb is missing"
        rule = f"cannot convert because {said} (there are {', '.join(subverbs)})"
        raise refusal(rule, USAGE, "MT002")
    if megatron and words[0] not in ("import", "export"):
        rule = f"--megatron: {words[0]} takes no such flag, and sees what a folder is"
        raise refusal(rule, f"convert {words[0]}, without --megatron")
    return subverbs[words[0]](words[1:])


def import_(argv: list[str]) -> int:
    """Write a run folder whose checkpoint of step 0 has the weights of a Hugging Face folder."""
    source, out, extra = source_and_new(argv, "import HF_DIR RUN [overrides]")
    from mtrain.convert import certificate
    from mtrain.convert.huggingface.folder import CONFIG, is_folder, open_folder
    from mtrain.convert.huggingface.model import import_model
    from mtrain.convert.megatron.torch_dist import is_torch_dist
    from mtrain.models.gpt.hf import SCORE

    if is_torch_dist(source) and not is_folder(source):
        rule = (
            f"cannot import {source} without --megatron because it is a checkpoint of"
            " megatron-core, and no Hugging Face folder"
        )
        fix = f"{program()} convert import --megatron {source} {out} model=NAME"
        raise refusal(rule, fix, "MT002")
    # fail on a missing file before anything is written
    open_folder(source)
    run, said = _run_of(source / CONFIG, extra)
    with drafted(out, "importing") as draft:
        # the checkpoint has them
        begun = run.peft.model_copy(update={"init_from": None})
        (draft / RUN_FILE).write_text(run_yaml(run.model_copy(update={"peft": begun})))
        kind, checkpoint, record, folder = import_model(run, source, draft)
        # transformers' has no adapters
        if run.model.head and SCORE not in folder.tensors:
            found = {"left_out": f"the folder has no {SCORE}, and the value head is new"}
        else:
            found = _logits(run.model_copy(update={"peft": PeftConfig()}), checkpoint, source)
        certificate.write(draft, "import", kind, record, found)
    size = f"{len(record.source)} tensors, {bytes_(folder.nbytes)}"
    say(
        f"imported {source}: {kind}, {count(parameters(run.model))} parameters, {size}, into"
        f" {out}{_said(found)}"
    )
    for line in said:
        say(line)
    return 0


def export(argv: list[str]) -> int:
    """Write a folder that transformers loads, or with `peft=V` the adapters only."""
    target, rest = target_of(argv, "convert export", USAGE)
    paths = [word for word in rest if "=" not in word]
    options = dict(word.split("=", 1) for word in rest if "=" in word)
    unknown = sorted(options.keys() - {"dtype", "model_type", "peft", "logits"})
    if len(paths) != 1 or unknown:
        why = f"{unknown[0]} is no option" if unknown else "the folder to write is missing"
        usage = f"{program()} convert export RUN HF_DIR [dtype=bf16]"
        raise refusal(f"cannot export because {why}", usage, "MT002")
    dtype = read_dtype(options)
    version = _peft_version(options)
    compared = _compares(options)
    out = new_folder(Path(paths[0]).expanduser())
    path = newest(target, USAGE)
    from mtrain.convert import certificate
    from mtrain.convert.boxes import model_boxes
    from mtrain.convert.checkpoint_reader import CheckpointReader
    from mtrain.convert.exporter import Weights, export_weights
    from mtrain.convert.huggingface.model import tables
    from mtrain.convert.raw_arrays import IN_TORCH

    # Nobody deletes the checkpoint meanwhile.
    with reading(path):
        run = read_run_file(path / RUN_FILE)
        home = run_folder_of(path)
        kind, body = _config_of(run, home, options.get("model_type"))
        if run.model.head:
            body = as_classifier(kind, body)
            if version is not None:
                rule = "cannot be written because the value head would be left out"
                raise refusal(
                    rule, "leave peft out, for the merged model", "MT378", "peft", version
                )
        checkpoint = CheckpointReader.open(path)
        table = tables(kind, run.model)[0]
        weights = Weights(checkpoint, run, table, model_boxes(run), dtype)
        if version is not None:
            return _export_adapters(weights, kind, out, version, home)
        with drafted(out, "exporting") as draft:
            record = export_weights(weights, draft)
            stored = IN_TORCH[weights.dtype_of(weights.found.steps[0])]
            said = "dtype" if "dtype" in body else "torch_dtype"
            _write_companions(draft, home, {**body, said: stored})
            if not compared:
                found = {"left_out": "logits=false"}
            elif dtype not in (None, "F32"):
                found = {"left_out": "another format"}
            else:
                found = _logits(run, path, draft)
            certificate.write(draft, "export", kind, record, found)
    size = sum(file.stat().st_size for file in out.iterdir())
    say(
        f"exported {path}: {kind}, {len(record.target)} tensors, {bytes_(size)} in"
        f" {out}{_said(found)}"
    )
    return 0


def _compares(options: dict[str, str]) -> bool:
    """Return whether an export compares its logits with those of transformers."""
    word = options.get("logits", "true")
    if word not in ("true", "false"):
        rule = "cannot be written because it is neither true nor false"
        raise refusal(rule, "logits=false", "MT003", "logits", word)
    return word == "true"


def _peft_version(options: dict[str, str]) -> str | None:
    from mtrain.convert.huggingface.folder import PEFT_VERSIONS

    word = options.get("peft")
    if word is not None and word not in PEFT_VERSIONS:
        fix = " or ".join(f"peft={known}" for known in PEFT_VERSIONS)
        raise refusal("cannot be written as a form of peft", fix, "MT003", "peft", word)
    return PEFT_VERSIONS[word] if word is not None else None


def _export_adapters(weights: Any, kind: str, out: Path, version: str, home: Path) -> int:
    """Return a folder that `peft` loads."""
    from mtrain.convert import certificate
    from mtrain.convert.huggingface.model import layer_table
    from mtrain.convert.huggingface.tokenizer_files import keep_tokenizer
    from mtrain.convert.peft.folder import write_adapters

    with drafted(out, "exporting") as draft:
        record = write_adapters(
            weights, layer_table(kind), draft, version, weights.run.checkpoint.init_from
        )
        keep_tokenizer(home, draft)
        certificate.write(draft, "export", kind, record, {"left_out": "adapters alone"})
    size = sum(file.stat().st_size for file in out.iterdir())
    said = (
        f"{len(record.target)} tensors of adapters, {bytes_(size)} in {out}, as peft {version} has"
        " them"
    )
    say(f"exported {weights.checkpoint.path}: {kind}, {said}")
    return 0


def inspect(argv: list[str], *, as_json: bool) -> int:
    """Run `inspect PATH`: print names, shapes, formats and totals without reading a weight."""
    (path,) = given_paths(argv, 1, "inspect PATH")
    from mtrain.convert.inspect import held, totals

    tensors = held(newest(path, USAGE) if (path / CHECKPOINTS).is_dir() else path)
    if as_json:
        say(strict_json.dumps({"tensors": [t._asdict() for t in tensors], **totals(tensors)}))
        return 0
    width = max((len(t.name) for t in tensors), default=0)
    for t in tensors:
        say(f"{t.name:<{width}}  {t.dtype:<8} {'x'.join(map(str, t.shape)) or 'scalar'}")
    found = totals(tensors)
    formats = ", ".join(f"{n} in {dtype}" for dtype, n in found["formats"].items())
    say(
        f"{found['tensors_total']} tensors, {count(found['numbers'])} numbers ({formats}),"
        f" {bytes_(found['bytes'])}"
    )
    return 0


def verify(argv: list[str], *, as_json: bool) -> int:
    """Compare the weights of two folders or checkpoints; return exit code 4 if they differ."""
    paths = given_paths(argv, 2, "verify A B")
    from mtrain.convert.compare import compare

    copies: dict[str, str] = {}
    a, b = of_megatron(paths) or [_weights_at(path, copies) for path in paths]
    rows, only = compare(a, b, copies)
    apart = [row for row in rows if not row.equal]
    if as_json:
        body = {
            "tensors": len(rows),
            "apart": [row._asdict() for row in apart],
            "only_in_one": only,
        }
        say(strict_json.dumps({**body, "equal": not apart and not only}))
    else:
        for row in apart[:20]:
            say(f"{row.name}: {row.said}")
        for name in only[:20]:
            say(f"{name}: only one of both has it")
        verdict = (
            "the same, bit by bit" if not apart and not only else f"{len(apart) + len(only)} differ"
        )
        say(f"{len(rows)} tensors: {verdict}")
    return 4 if apart or only else 0


def _run_of(config: Path, extra: list[str]) -> tuple[RunConfig, list[str]]:
    """Return the resolved run that a `config.json` is with overrides; and lines on omissions and
    findings.

    Raises:
        ConfigError: see `configuration`; or a rule is broken.
    """
    from mtrain.convert.huggingface.folder import CONFIG
    from mtrain.convert.huggingface.model import configuration

    _, imported = configuration(config, extra)
    machine = Machine.here()
    resolved = resolve(imported.run, machine)
    errors = [p for p in check(resolved, raw=imported.run, to_run=False) if p.severity == "error"]
    if errors:
        raise ConfigError(errors)
    unread = [u for u in imported.unplaced if u.why == "no effect"]
    lines = [f"{CONFIG}: {u.flag} = {u.value} {u.text}" for u in unread]
    return resolved, lines + [f"{CONFIG}: {note}" for note in imported.notes]


def _config_of(run: RunConfig, home: Path, kind: str | None) -> tuple[str, dict[str, Any]]:
    """Return the `config.json` of an export: the imported one if the model did not change."""
    from mtrain.convert.huggingface.model import KEPT

    # The file that came with the weights may have keys that mtrain does not know.
    kept = home / KEPT / "config.json"
    if kept.is_file() and kind is None:
        body = read_json(kept, str(kept))
        if not same_model(resolve(import_config(kept).run, Machine.here()).model, run.model):
            return _as_it_came(body, run)
    body = config_json(run.model, "float32", kind)
    # the end of T5's sequences is the model's own
    unsaid = [key for key in ENDS if key not in body]
    from mtrain.convert.huggingface.tokenizer_files import special_ids

    said = special_ids(home)
    ends = {key: said.get(key, said.get("eos_token_id", _end_of_document(home))) for key in unsaid}
    if body.get("pad_token_id") is None and "pad_token_id" in said:
        ends["pad_token_id"] = said["pad_token_id"]
    return str(body["model_type"]), {**body, **ends}


def _as_it_came(body: dict[str, Any], run: RunConfig) -> tuple[str, dict[str, Any]]:
    """Return the kind of a kept configuration, and the keys to write: the text model, without names
    of code, which is not exported, and without the storage of weights.
    """
    kind = kind_of(body)
    out = {
        k: v
        for k, v in as_text(body).items()
        if k not in ("quantization_config", "dtype", "auto_map")
    }
    # transformers knows the family only by its own name
    if kind != body["model_type"]:
        out |= {"model_type": kind, "architectures": [KINDS[kind].architecture(run.model)]}
    return kind, out


def _end_of_document(home: Path) -> int | None:
    tokenizer = home / "tokenizer.json"
    if not tokenizer.is_file():
        return None
    from mtrain.data.text.tokenizer import Tokenizer

    return Tokenizer(tokenizer).eod


def _write_companions(draft: Path, home: Path, body: dict[str, Any]) -> None:
    from mtrain.convert.huggingface.folder import CONFIG, GENERATION
    from mtrain.convert.huggingface.model import KEPT, copy_if_present
    from mtrain.convert.huggingface.tokenizer_files import also_ending, keep_tokenizer

    (draft / CONFIG).write_text(strict_json.dumps(body, indent=2) + "\n")
    keep_tokenizer(home, draft)
    copy_if_present(home / KEPT / GENERATION, draft / GENERATION)
    if not (draft / GENERATION).exists():
        ids = {key: body[key] for key in IDS if body.get(key) is not None}
        (draft / GENERATION).write_text(strict_json.dumps(ids, indent=2) + "\n")
    also_ending(home, draft / GENERATION)


def _logits(run: RunConfig, checkpoint: Path, folder: Path) -> dict[str, Any]:
    """Return the distance of our logits from transformers', or why it was not computed."""
    import numpy as np

    from mtrain.convert.huggingface import hf_reference
    from mtrain.launching import local
    from mtrain.launching.child_process import ChildProcess

    # In fp32, with room for three copies of the weights; half of the memory stays free for others.
    need = 3 * 4 * parameters(run.model)
    room = Machine.here().memory_bytes // 2
    if not hf_reference.is_installed():
        return {"left_out": "transformers is not installed"}
    if need > room:
        half = f"half of this machine's memory is {bytes_(room)}"
        return {"left_out": f"it needs about {bytes_(need)}, and {half}"}
    tokens = min(TOKENS, run.model.max_position_embeddings)
    ids = [int(i) for i in np.random.default_rng(0).integers(0, run.model.vocab_size, tokens)]
    words = [
        "parallel=single",
        # The comparison is of weights, not of layouts or kernels: both sides compute in fp32.
        "precision=fp32",
        "cluster.device=cpu",
        "kernels=reference",
        "data.seq_length=null",
    ]
    plain = _plain(run, words)
    with scratch_folder() as scratch:
        (scratch / RUN_FILE).write_text(run_yaml(plain))
        ours = scratch / "ours"
        theirs = scratch / "theirs"
        local.logits(plain, checkpoint, ids, ours)
        name = "logits of transformers"
        try:
            ChildProcess(name, run, folder=str(folder), ids=ids, out=str(theirs)).result()
        except MtrainError as error:
            return {"left_out": f"transformers did not load the folder: {str(error)[:200]}"}
        features = 1 if run.model.head else run.model.vocab_size
        logits = (np.fromfile(path, np.float32).reshape(-1, features) for path in (ours, theirs))
        return _distance(*logits)


def _distance(ours: np.ndarray, theirs: np.ndarray) -> dict[str, Any]:
    """Return the distance of logits [tokens, features].

    Raises:
        CorruptData: it is more than rounding.
    """
    apart = float(abs(ours - theirs).max())
    largest = float(abs(theirs).max())
    # Written this way round, because a comparison with NaN is false.
    if not apart <= MOST_APART * largest:
        raise CorruptData(
            f"our logits are {apart:.3g} from those of transformers, whose largest is"
            f" {largest:.3g}: the weights do not mean the same on both sides, and nothing was"
            " written"
        )
    return {"tokens": len(theirs), "largest_error": apart, "largest_logit": largest}


def _plain(run: RunConfig, words: list[str]) -> RunConfig:
    """Return the run on one rank of this machine's CPU, without its data and where it wrote."""
    from mtrain.loading.checkpoints import WITHOUT_DATA

    data = run.data.model_copy(update={"cache_dir": UnresolvedData().cache_dir})
    checkpoint = CheckpointConfig(save_interval=0, async_save=False)
    run = run.model_copy(update={"log": LogConfig(), "checkpoint": checkpoint, "data": data})
    with scratch_folder() as scratch:
        file = scratch / RUN_FILE
        file.write_text(run_yaml(run))
        rows = 2 if run.objective.pairs else 1
        batch = [
            f"trainer.global_batch_size={rows}",
            f"trainer.micro_batch_size={rows}",
            "optim=adamw",
            "cluster=local",
        ]
        if run.model.t5 is not None:
            lengths = ["model.t5.encoder_length=null", "model.t5.decoder_length=null"]
        else:
            lengths = []
        return load([f"run={quoted(file)}", *WITHOUT_DATA, *batch, *lengths, *words]).run


def _said(found: dict[str, Any]) -> str:
    if "left_out" in found:
        return f"; logits not compared: {found['left_out']}"
    return (
        f"; logits within {found['largest_error']:.1e} of transformers' on {found['tokens']} tokens"
    )


def _weights_at(path: Path, copies: dict[str, str]) -> Any:
    """Return the weights of a folder or run; add its possible duplicates to `copies`."""
    from mtrain.convert.boxes import model_boxes
    from mtrain.convert.checkpoint_reader import CheckpointReader
    from mtrain.convert.compare import CheckpointWeights
    from mtrain.convert.exporter import Weights
    from mtrain.convert.huggingface.folder import is_folder, open_folder
    from mtrain.convert.huggingface.model import tables
    from mtrain.convert.huggingface.reader import Reader
    from mtrain.convert.match import held_twice

    if is_folder(path) and not (path / RUN_FILE).is_file():
        folder = open_folder(path)
        reader = Reader(folder)
        # Of a model that is not known here, names and numbers are compared as they are.
        with suppress(ConfigError):
            kind = kind_of(read_json(folder.config, str(path)))
            model = import_config(folder.config).run.model
            for table in tables(kind, model):
                # Another table has other names for the same tensors.
                twice = held_twice(table, model).items()
                copies |= {name: of for name, of in twice if of in reader.names}
        return reader
    checkpoint = newest(path, USAGE)
    run = read_run_file(path / RUN_FILE)
    home = run_folder_of(checkpoint)
    kind, _ = _config_of(run, home, None)
    table = tables(kind, run.model)[0]
    copies |= held_twice(table, run.model)
    return CheckpointWeights(
        Weights(CheckpointReader.open(checkpoint), run, table, model_boxes(run))
    )


def export_whole(words: list[str]) -> int:
    """Run `export RUN OUT`: write the weights of a checkpoint as whole tensors to a new folder.

    Raises:
        ConfigError: the run has no checkpoint, or the new folder is missing or exists.
    """
    usage = f"{program()} export runs/<name> OUT_FOLDER"
    target, rest = target_of(words, "export", usage)
    if len(rest) != 1 or "=" in rest[0]:
        raise refusal("cannot export because the folder to write is missing", usage, "MT002")
    out = Path(rest[0]).expanduser()
    checkpoint = newest(target, usage)
    if out.exists():
        rule = f"{out} exists; export writes a new folder"
        raise refusal(rule, f"{out}-2", "MT507")
    from mtrain.launching.local import install_reader

    # checkpoints hold tensors of megatron-core
    install_reader()
    from mtrain.ckpt.export import export as write
    from mtrain.ckpt.store import Checkpoint

    home = run_folder_of(target)
    tokenizer = home / "tokenizer.json"
    done = write(Checkpoint.open(checkpoint), out, tokenizer if tokenizer.is_file() else None)
    size = sum(file.stat().st_size for file in done.files)
    padding = f"; {done.padding}" if done.padding else ""
    held = f"{done.tensors} tensors, {count(done.elements)} numbers"
    say(f"exported {checkpoint}: {held}, {bytes_(size)} in {out}{padding}")
    return 0
