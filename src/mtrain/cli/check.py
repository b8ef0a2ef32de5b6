"""`check`: is this configuration runnable? Answers in well under a second, without torch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from mtrain.api import Loaded, load
from mtrain.cli.output import problem_report, say_json
from mtrain.config.compose.paths import MANIFEST, user_path
from mtrain.config.disk.token_files import unwatched
from mtrain.config.engine import kernels
from mtrain.config.resolve.batches import counted, stages
from mtrain.config.resolve.resolution import LOCAL
from mtrain.config.schema.run import RunConfig
from mtrain.errors import say_page, visible
from mtrain.processes import without_collecting
from mtrain.units import MIB, count, number_of

# `check` answers in under a second, so it compares data only with manifests and `.idx` files up
# to these sizes.
READ_MANIFEST = 16 * MIB
READ_INDEXES = 64 * MIB


def check(words: list[str], *, as_json: bool, multirun: bool, everything: bool) -> int:
    """Validate one configuration, with -m every combination, with --all every choice."""
    if multirun:
        from mtrain.cli import multirun as sweep

        return sweep.check(words, as_json=as_json)
    if everything:
        from mtrain.cli import check_all

        return check_all.run(words, as_json=as_json)
    return run(words, as_json=as_json)


@without_collecting()
def run(argv: Sequence[str], *, as_json: bool = False) -> int:
    """Validate the configuration that `argv` describes, and print the report; return the exit code.

    Raises:
        ConfigError: there are errors, or the checkpoint to continue is of another model or corpus.
        CorruptData: the checkpoint to continue is not committed.
    """
    loaded = load(argv, to_run=False)
    if loaded.run.checkpoint.resume is not None:
        from mtrain.launching.folder import plan

        chosen = plan(loaded.run)
        if chosen.checkpoint is not None:
            _fits(loaded.run, chosen.checkpoint)
    if as_json:
        say_json(problem_report(loaded.warnings, loaded.run.digest()))
    else:
        say_page(summary(loaded))
    return 0


def _fits(run: RunConfig, checkpoint: Path) -> None:
    """Read a manifest of a usual size, and compares the sizes of the files that it names, and the
    data of the run.

    Raises:
        CorruptData: the files have changed since they were written.
        ConfigError: the checkpoint was trained on other `.bin/.idx` files, or with another
            tokenizer.
    """
    from mtrain.ckpt.folder import read_manifest

    if (checkpoint / MANIFEST).stat().st_size > READ_MANIFEST:
        return
    manifest = read_manifest(checkpoint, verify=False)
    if run.data.kind != "indexed" or run.checkpoint.accept_changes:
        return
    read = run.data.without_excluded()
    prefixes = [user_path(prefix) for prefix in read.blend or (read.path,) if prefix is not None]
    indexes = [prefix.with_name(f"{prefix.name}.idx") for prefix in prefixes]
    if sum(index.stat().st_size for index in indexes if index.is_file()) > READ_INDEXES:
        return
    from mtrain.cli.recipe.files import digests
    from mtrain.data import same_data

    saved = manifest["state"]["data"]
    here = digests(run)
    # A digest is missing where the files are on another machine.
    if "data" in here and (run.data.tokenizer is None or "tokenizer" in here):
        same_data(saved, {"fingerprint": here["data"], "tokenizer_sha256": here.get("tokenizer")})


def _device(run: RunConfig) -> str:
    """Describe the device: driver names, architecture, memory and peak rate."""
    c = run.cluster
    form = run.precision.multiplies_in
    words = [*(c.driver_names if c.name == LOCAL else ()), f"sm_{c.sm}"]
    words += [f"{c.device_memory_gib:g} GiB"] if c.device_memory_gib is not None else []
    words += [f"MFU of {c.peak_tflops[form]:g} TFLOP/s in {form}"] if form in c.peak_tflops else []
    return ", ".join(words)


def summary(loaded: Loaded) -> str:
    """Return the configuration that passed, in a few lines."""
    run = loaded.run
    c = run.cluster
    t = run.trainer
    dp = run.parallel.dp
    micro = number_of(run.micro_batches, "micro-batch")
    batch = f"{number_of(t.batch, 'sample')} = {micro} of {t.micro} on {number_of(dp, 'rank')}"
    sizes = counted(stages(run), t.steps)
    tokens = count(t.batch * run.data.length)
    total = count(sum(number * size for number, size in sizes) * run.data.length)
    machines = number_of(c.nodes, "machine")
    lines = [
        ("model", f"{run.model.name}, {_parameters(run)}, {run.precision.words}{_padding(run)}"),
        ("layout", _layout(run)),
        ("ranks", f"{run.parallel.ranks} on {c.name} ({c.device}, {machines})"),
        ("batch", batch),
    ]
    if c.sm is not None:
        lines.insert(3, ("device", _device(run)))
    if len(stages(run)) > 1:
        lines.append(("ramp", _ramp(sizes)))
    steps = f"{t.steps} steps{length_in_words(loaded)}"
    lines += [
        ("tokens", f"{tokens} per step, {total} in {steps}"),
        ("kernels", kernels.summary(run)),
        ("data", f"{run.data.kind}, samples of {run.data.length} tokens{_spans(run)}"),
    ]
    bare = unwatched(run.data)
    if bare:
        lines.append(("", bare))
    lines.append(("digest", run.digest()))
    warnings = [problem.render() for problem in loaded.warnings]
    return "\n".join([*warnings, "ok", *(visible(f"  {name:<7} {text}") for name, text in lines)])


def _parameters(run: RunConfig) -> str:
    from mtrain.plan.count import adapter_parameters, parameters

    trained = sum(adapter_parameters(run))
    adapters = f" that are frozen, {run.peft.kind} adapters of {count(trained)}" if trained else ""
    return f"{count(parameters(run.model))} parameters{adapters}"


def _layout(run: RunConfig) -> str:
    p = run.parallel
    degrees = {"tp": p.tp, "pp": p.pp, "vpp": p.vpp, "cp": p.cp, "ep": p.ep, "dp": p.dp}
    shown = [f"{k} {v}" for k, v in degrees.items() if v > 1 or k in ("tp", "pp", "dp")]
    if run.model.moe is not None and p.etp not in (None, p.tp):
        shown.append(f"etp {p.etp}")
    flags = [name for name in ("sequence_parallel", "distributed_optimizer") if getattr(p, name)]
    return ", ".join([*shown, *flags])


def _ramp(sizes: Sequence[tuple[int, int]]) -> str:
    """Describe the growth of the batch, given as numbers of steps with their sizes."""
    grown = ", ".join(f"{number} steps of {size}" for number, size in sizes[:4])
    return grown + (f", ... {sizes[-1][0]} of {sizes[-1][1]}" if len(sizes) > 4 else "")


def length_in_words(loaded: Loaded) -> str:
    """Return the reason for a derived number of steps; empty if it was set."""
    origin = loaded.origins["trainer.train_iters"]
    return f" ({origin})" if origin.startswith("resolved") else ""


def _spans(run: RunConfig) -> str:
    """Describe the lengths of encoder and decoder, and how packed samples are filled."""
    t = run.model.t5
    d = run.data
    if d.packed and t is None:
        return " of whole documents" if d.whole_documents else ", packed"
    if t is not None:
        return f": {t.encoder_length} for the encoder, {t.decoder_length} for the decoder"
    return ""


def _padding(run: RunConfig) -> str:
    """Return rows that the embedding has beyond the vocabulary, where there are any."""
    return f", {run.model.padding_in_words}" if run.model.padding_in_words else ""
