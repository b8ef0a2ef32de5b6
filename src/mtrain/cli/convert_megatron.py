"""`convert import|export --megatron`: weights of megatron-core's checkpoints in and out."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from mtrain.api import load
from mtrain.cli.atomic_output import drafted, new_folder, read_dtype, source_and_new
from mtrain.cli.output import refusal
from mtrain.config.compose.dump import override, run_yaml
from mtrain.config.compose.lock_file import read_run_file
from mtrain.config.compose.paths import RUN_FILE, program
from mtrain.config.schema.run import RunConfig
from mtrain.errors import ConfigError, Problem, say
from mtrain.loading.checkpoints import beneath, newest, target_of
from mtrain.models.registry import family_of
from mtrain.plan.count import parameters
from mtrain.units import bytes_, count

if TYPE_CHECKING:
    from mtrain.convert.megatron.arguments import Difference

IMPORT = "import --megatron DIR RUN model=NAME [overrides]"
EXPORT = "export --megatron RUN DIR"
_SAY_A_MODEL = ("model", "recipe", "run")


def import_megatron(argv: list[str]) -> int:
    """Run `import --megatron DIR RUN [overrides]`: make a run folder with the weights at step 0."""
    source, out, extra = source_and_new(argv, IMPORT)
    from mtrain.convert import certificate
    from mtrain.convert.megatron.arguments import COMMON, kept_in, read_arguments
    from mtrain.convert.megatron.arguments_compared import differing
    from mtrain.convert.megatron.checkpoint import KIND, import_checkpoint, open_weights

    if not any(
        word.partition("=")[0].partition(".")[0].lstrip("+") in _SAY_A_MODEL for word in extra
    ):
        rule = f"cannot be left out because {source} has no configuration of its model as data"
        raise refusal(rule, f"{program()} convert {IMPORT}", "MT002", "model")
    whole = any(word.partition("=")[0] in ("recipe", "run") for word in extra)
    # Weights do not depend on a layout: a bare model is taken on one rank.
    run = load(extra if whole else beneath(["parallel=single"], extra), to_run=False).run
    _require_names(run)
    if run.peft.init_from is not None:
        rule = "adapters of `peft` are read together with the Hugging Face folder that they are for"
        fix = f"{program()} convert import HF_DIR RUN, without --megatron"
        raise refusal(rule, fix, "MT521", "peft.init_from", run.peft.init_from)
    opened = open_weights(source)
    # Shapes do not show a wrong rotary base or norm: those are compared with the saved arguments.
    wrong = differing(read_arguments(opened.path, opened.common), run)
    if wrong:
        file = kept_in(opened.path, opened.common)
        without = f", or take {COMMON} away where it is wrong" if file.name == COMMON else ""
        raise ConfigError([_apart(one, file, without) for one in wrong])
    with drafted(out, "importing") as draft:
        (draft / RUN_FILE).write_text(run_yaml(run))
        _, record = import_checkpoint(run, opened, draft)
        certificate.write(
            draft, "import", KIND, record, {"left_out": "there is nothing to compare with"}
        )
    held = len(opened.tensors) - len({name.partition("[")[0] for name in record.source})
    more = held + opened.objects
    left = f"; {more} entries are no weights and were left out" if more else ""
    size = bytes_(sum(tensor.nbytes for tensor in opened.tensors.values() if tensor.chunks))
    of = f"{count(parameters(run.model))} parameters, {size}"
    say(f"imported {opened.path}: {of}, into {out}{left}")
    return 0


def _apart(one: Difference, file: Path, without: str) -> Problem:
    """Return the problem of an argument that contradicts the model."""
    rule = f"{file} says that the weights were trained with {one.name} {one.there}"
    if not one.key:
        return Problem(
            "MT503",
            "",
            None,
            f"{rule}, which {one.why}",
            without.removeprefix(", or "),
            "command line",
        )
    if one.why:
        rule = f"{file} was written by Megatron-LM, which {one.why}"
    fix = override(one.key, int(one.becomes) if _is_whole(one.becomes) else one.becomes)
    return Problem("MT503", one.key, one.here, rule, f"{fix}{without}", "command line")


def _is_whole(value: Any) -> bool:
    return isinstance(value, float) and value.is_integer()


def export_megatron(argv: list[str]) -> int:
    """Run `export --megatron RUN DIR [dtype=D] [layers=stacked|apart]` for Megatron-LM to load."""
    usage = f"{program()} convert {EXPORT} [dtype=bf16] [layers=apart]"
    target, rest = target_of(argv, "convert export", usage)
    paths = [word for word in rest if "=" not in word]
    options = dict(word.split("=", 1) for word in rest if "=" in word)
    unknown = sorted(options.keys() - {"dtype", "layers"})
    if len(paths) != 1 or unknown:
        why = f"{unknown[0]} is no option" if unknown else "the folder to write is missing"
        raise refusal(f"cannot export because {why}", usage, "MT002")
    from mtrain.convert.megatron.checkpoint import KIND, LAYOUTS, export_checkpoint

    if options.get("layers", LAYOUTS[0]) not in LAYOUTS:
        fix = " or ".join(f"layers={word}" for word in LAYOUTS)
        raise refusal("is no layout of layers", fix, "MT003", "layers", options["layers"])
    dtype = read_dtype(options)
    out = new_folder(Path(paths[0]).expanduser())
    path = newest(target, f"{program()} convert export RUN DIR")
    run = read_run_file(path / RUN_FILE)
    _require_names(run)
    from mtrain.convert import certificate
    from mtrain.convert.checkpoint_reader import CheckpointReader

    with drafted(out, "exporting") as draft:
        record = export_checkpoint(
            CheckpointReader.open(path), run, draft, dtype, options.get("layers")
        )
        certificate.write(
            draft, "export", KIND, record, {"left_out": "there is nothing to compare with"}
        )
    size = sum(file.stat().st_size for file in out.rglob("*") if file.is_file())
    say(
        f"exported {path}: {len(record.source)} weights, {bytes_(size)} in {out}; Megatron-LM:"
        f" --load {out}"
    )
    return 0


def _require_names(run: RunConfig) -> None:
    """Raise ConfigError if megatron-core's checkpoints name the family's weights differently."""
    if run.model.head:
        rule = "cannot be converted because Megatron-LM's models have no value head"
        fix = f"{program()} convert export RUN HF_DIR"
        raise refusal(rule, fix, "MT378", "model.head", run.model.head)
    family = run.model.family
    fix = "convert import or export, without --megatron"
    if not family_of(run.model).megatron_names:
        rule = "cannot convert this family because Megatron-LM has no model with these weights"
        raise refusal(rule, fix, "MT503", "model.family", family)
    if run.model.dsa is not None:
        rule = (
            "cannot convert an indexer because releases of Megatron-LM order its channels"
            " differently, and no checkpoint says how"
        )
        raise refusal(rule, fix, "MT503", "model.dsa")
    if run.model.linear_attention is not None:
        rule = (
            "cannot convert linear attention because Megatron-LM stores its norms less 1 and its"
            " projections in sections"
        )
        raise refusal(rule, fix, "MT503", "model.linear_attention")


def of_megatron(paths: list[Path]) -> list[Any]:
    """Return the weights of two places of which at least one is a checkpoint of megatron-core;
    empty where none is.

    Raises:
        ConfigError: the other one is neither such a checkpoint nor a run.
        CorruptData: one cannot be read.
    """
    from mtrain.convert.huggingface.folder import is_folder
    from mtrain.convert.megatron.torch_dist import is_torch_dist

    theirs = [path for path in paths if is_torch_dist(path) and not is_folder(path)]
    if not theirs:
        return []
    from mtrain.convert.megatron.checkpoint import open_weights
    from mtrain.convert.megatron.reader import TorchDistReader

    readers = [TorchDistReader(open_weights(path)) for path in theirs]
    if len(readers) > 1:
        return readers
    others = [str(path) for path in paths if path not in theirs]
    target, _ = target_of(others, "convert verify", f"{program()} convert verify DIR RUN")
    from mtrain.convert.checkpoint_reader import CheckpointReader
    from mtrain.convert.megatron.table import comparable_weights

    path = newest(target, f"{program()} convert export RUN DIR")
    return comparable_weights(
        readers[0], CheckpointReader.open(path), read_run_file(path / RUN_FILE)
    )
