"""`tune`: the fastest layouts by the plan."""

from __future__ import annotations

import click

from mtrain.cli.command import OVERRIDES, SETTINGS, Verb, as_json, valued


@click.command(
    "tune",
    cls=Verb,
    short_help="the fastest layouts of a model on a cluster by the plan; --out writes the best",
    usage=f"tune {OVERRIDES} [--out FILE] [--why-not LAYOUT] [FLAGS]",
    help=(
        "Print the fastest layouts by the plan that keep every rule and fit the devices of the"
        " cluster, the best of each\nfamily (tp, pp, cp, ep), with the error of the planned time."
        " tune also chooses vpp, etp, sequence parallelism,\nmicro-batch, recomputation, sharding"
        " and offload of the state. It keeps the layout keys on the command line and\nreports what"
        " they cost. parallel=auto takes the first layout in every verb."
    ),
    arguments=SETTINGS,
    examples=(
        ("tune model=llama3_70b cluster=h100x64", "how to lay it out"),
        (
            "tune recipe=llama3/70b_h100x64 parallel.tp=8 --out mine.yaml",
            "with a tp of 8, into a file",
        ),
        ("tune model=llama3_70b cluster=h100x64 --why-not tp8pp8", "why that is not the first"),
    ),
)
@valued(
    "-o", "--out", metavar="FILE", text="write the best as a choice, for parallel=FILE; a new file"
)
@valued(
    "--why-not",
    metavar="LAYOUT",
    example="tp8pp6, or --why-not 'tp8pp6 trainer.micro_batch_size=2'",
    text=(
        "which rule a layout breaks, what it lacks, or how slow it is: tp8pp6, or 'tp8pp6 KEY=V'"
    ),
)
@as_json
def tune(words: list[str], out: str | None, why_not: str | None, as_json: bool) -> int:
    """Print the best layouts, and write the first."""
    from mtrain.cli import tune as verb

    return verb.run(words, out=out, why_not=why_not, as_json=as_json)
