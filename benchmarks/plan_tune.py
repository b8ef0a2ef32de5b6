"""The layouts of `tune` against published ones, both priced by the plan.

    python benchmarks/plan_tune.py [--table | --rows | --oom] [--only WORD]

`--table` compares the clusters and layouts of recipes and guides, `--rows` every published
throughput that is a configuration, and `--oom` layouts that are published as out of memory
(data/published_oom.csv); the default is all. For each it prints the published layout, whether it
fits by the plan, the time of both, and one of

    equal   the same degrees, or predicted within 1% of each other
    better  tune's is predicted to be faster; by which parts
    misfit  the published one needs more memory than the plan allows, though it ran
    wrong   tune's is predicted to be slower: the search missed a layout
    none    tune finds nothing, or the row is not a configuration

and for a layout that is published as out of memory one of

    refused  the plan says that it does not fit
    passed   it fits by the plan, and tune gives another layout first
    offered  tune gives it first
"""

from __future__ import annotations

import argparse
import time
from collections import Counter
from collections.abc import Iterator

import plan_time_rows as published

from mtrain.config.compose.composer import compose
from mtrain.config.resolve.resolution import Machine, resolve
from mtrain.config.rules import findings
from mtrain.errors import MtrainError
from mtrain.plan.rank import worst_stage
from mtrain.plan.time import step_time
from mtrain.plan.tune.choose import reason, search
from mtrain.plan.tune.search import SPARE, Layout
from mtrain.units import GIB

OOM = published.ROOT / "benchmarks" / "data" / "published_oom.csv"
BIG = Machine(cpu_cores=1 << 14, memory_bytes=1 << 60)
TABLE = (
    # model, cluster, nodes, layout, sequence, batch, other keys of the published layout
    ("gpt_1.7b", "h100", 6, "dp48", 4096, 192, ""),
    ("gpt_7.1b", "h100", 12, "tp2", 4096, 192, ""),
    ("gpt_16b", "h100", 24, "tp4", 4096, 192, ""),
    ("gpt_32b", "h100", 48, "tp8", 4096, 192, ""),
    ("gpt_70b", "h100", 96, "tp8pp2vpp21", 4096, 384, ""),
    ("gpt_177b", "h100", 288, "tp8pp6vpp8", 4096, 1152, ""),
    ("gpt_462b", "h100", 768, "tp8pp16vpp7", 4096, 3072, ""),
    ("llama3_8b", "h100", 1, "cp2", 8192, 128, ""),
    ("llama2_13b", "h100", 1, "tp2", 4096, 128, ""),
    ("llama3_70b", "h100", 8, "tp4pp4vpp5cp2", 8192, 256, ""),
    ("llama31_405b", "h100", 128, "tp8pp8vpp8cp2", 8192, 1536,
     "parallel.account_for_embedding_in_pipeline_split=true "
     "parallel.account_for_loss_in_pipeline_split=true"),
    ("mixtral_8x7b", "h100", 8, "pp4ep8", 4096, 256, ""),
    ("qwen3_235b_a22b", "h100", 32, "tp2pp8ep32", 4096, 8192,
     "parallel.etp=1 parallel.layers_per_stage=[12,12,12,12,12,12,12,10]"),
    ("deepseek_v3", "h100", 128, "tp2pp8ep64", 4096, 16384,
     "parallel.etp=1 parallel.layers_per_stage=[8,8,8,8,8,8,8,5] "
     "parallel.recompute.granularity=selective parallel.recompute.modules=[mla_up_proj,mlp]"),
)  # fmt: skip


def cases(options: argparse.Namespace) -> Iterator[tuple[str, list[str], list[str]]]:
    """Yield a name, the words of a model on a cluster, and those of its published layout."""
    if not options.rows and not options.oom:
        for model, cluster, nodes, layout, seq, batch, more in TABLE:
            task = [f"model={model}", f"cluster={cluster}", f"cluster.nodes={nodes}", "data=mock"]
            task += [
                f"data.seq_length={seq}",
                f"trainer.global_batch_size={batch}",
                "trainer.sample_tokens=0",
            ]
            own = [f"parallel={layout}", "trainer.micro_batch_size=1", *more.split()]
            yield f"{model} {nodes}x{cluster}", task, own
    if not options.table and not options.oom:
        for row in published.rows():
            if published.obstacle(row) is None:
                words = [
                    w for w in published.words(row) if not w.startswith("cluster.device_memory_gib")
                ]
                said = ("parallel", "trainer.micro", "optim.cpu")
                task = [word for word in words if not word.startswith(said)]
                yield (
                    f"{row['model']} {row['gpus']}x{row['gpu']} {row['precision']}",
                    task,
                    [word for word in words if word.startswith(said)],
                )


def planned(words: list[str]) -> Layout:
    """Return the layout of a command line."""
    run = resolve(compose(words).run, BIG)
    wrong = [found.rule for found in findings(run) if found.severity == "error"]
    if wrong:
        raise ValueError(wrong[0])
    return Layout(run, {}, step_time(run), worst_stage(run))


def of_memory(row: published.Row) -> str:
    """Print and return the verdict on a layout that is published as out of memory."""
    words = [*row["overrides"].split(), "data=mock", "trainer.sample_tokens=0"]
    own = planned(words)
    task = [word for word in words if not word.startswith(("parallel", "trainer.micro"))]
    found, asked = search(compose(task).run, {}, BIG, None, 1)
    holds = asked.holds or 0
    what = "refused" if own.memory.peak > holds * (1 - SPARE) else "passed"
    first = found.best[0] if found.best else None
    if first is not None and first.words == own.words:
        what = "offered"
    print(f"{what:7} {row['model']} {row['gpus']}x{row['gpu']}: {row['said']} ({row['source']})")
    print(f"        published {own.memory.peak / GIB:6.1f} of {holds / GIB:.0f} GiB  {own.words}")
    if first is None:
        print("        tune: none", flush=True)
    else:
        print(f"        tune      {first.memory.peak / GIB:6.1f} GiB  {first.words}", flush=True)
    return what


def verdict(own: Layout, other: Layout, fits: bool) -> str:
    """Return the verdict on the published layout and that of `tune`."""
    degrees = ("tp", "pp", "vpp", "cp", "ep")
    same = all(
        getattr(own.run.parallel, key) == getattr(other.run.parallel, key) for key in degrees
    )
    if not fits:
        return "misfit"
    if same or abs(own.seconds / other.seconds - 1) < 0.01:
        return "equal"
    return "better" if other.seconds < own.seconds else "wrong"


def main() -> int:
    """Compare and print; return 1 if the search missed a layout or offers one that did not fit."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--table", action="store_true")
    parser.add_argument("--rows", action="store_true")
    parser.add_argument("--oom", action="store_true")
    parser.add_argument("--only", default="", help="cases whose name has this word")
    options = parser.parse_args()
    counts: Counter[str] = Counter()
    for name, task, layout in cases(options):
        if options.only not in name:
            continue
        begun = time.process_time()
        try:
            own = planned([*task, *layout])
            found, asked = search(compose(task).run, {}, BIG, None, 1)
        except (MtrainError, ValueError) as error:
            counts["none"] += 1
            print(f"none    {name}: {str(error).splitlines()[0][:120]}")
            continue
        spent = time.process_time() - begun
        if not found.best:
            counts["none"] += 1
            print(
                f"none    {name}: nothing fits; published {own.words}:"
                f" {own.memory.peak / GIB:.1f} GiB"
            )
            continue
        best = found.best[0]
        holds = (asked.holds or 0) / GIB
        what = verdict(
            own, best, asked.holds is None or own.memory.peak <= asked.holds * (1 - SPARE)
        )
        counts[what] += 1
        print(f"{what:7} {name}   ({spent:.1f} s of a core)")
        print(
            f"        published {own.seconds:8.3f} s  {own.memory.peak / GIB:6.1f} of {holds:.0f}"
            f" GiB  {own.words}"
        )
        print(
            f"        tune      {best.seconds:8.3f} s  {best.memory.peak / GIB:6.1f} of {holds:.0f}"
            f" GiB  {best.words}"
        )
        print(f"        published against tune's: {reason(own, best)}", flush=True)
    if not options.table and not options.rows:
        for row in published.rows(OOM):
            if options.only in row["model"]:
                counts[of_memory(row)] += 1
    print(", ".join(f"{number} {what}" for what, number in counts.most_common()))
    return int(counts["wrong"] + counts["offered"] > 0)


if __name__ == "__main__":
    raise SystemExit(main())
