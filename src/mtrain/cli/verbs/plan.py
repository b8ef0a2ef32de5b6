"""`plan`: parameters, memory and time before anything runs; one answer for each of its flags."""

from __future__ import annotations

import click

from mtrain.cli.command import OVERRIDES, SETTINGS, Verb, as_json, refusal, valued
from mtrain.processes import without_collecting

LIST = "96,192,...,4608"


@click.command(
    "plan",
    cls=Verb,
    short_help="parameters, FLOPs, memory of a rank and time of a step, without starting anything",
    usage=f"plan {OVERRIDES} [FLAGS] [rank=R]",
    help=(
        "Print parameters by kind and stage, the FLOPs of a token, and the memory of a rank of each"
        " pipeline stage by\npart, its peak, and what is left of the device; the time of a step by"
        " part, tokens per second, both MFUs,\nand the duration and cost of the run; in about a"
        " second, without torch.\nWith --trace, run a step of one rank on shapes only: which tensor"
        " is live when, and every operation."
    ),
    arguments=(*SETTINGS, ("rank=R", "with --trace: the rank; the first by default")),
    examples=(
        ("plan --calibrate runs/one runs/two out=box.yaml", "then: plan cluster=./box.yaml"),
        ("plan recipe=llama3/70b_h100x64", "does it fit, and what takes the memory"),
        ("plan model=llama3_8b parallel=tp2 cluster=h100x8 --json", "the same as JSON"),
        ("plan recipe=llama3/70b_h100x64 --html plan.html", "a page to read, and to send"),
        (
            f"plan --scale {LIST} recipe=gpt/177b_h100x96",
            "strong scaling: the same batch on more devices",
        ),
        (
            "plan --weak --scale 8,64,512 model=llama3_8b cluster=h100 data=mock",
            "weak scaling; a key with as many values as counts has one at each",
        ),
        (
            "plan --trace recipe=llama3/70b_h100x64 rank=0",
            "what the program does, in half a minute",
        ),
    ),
)
@as_json
@click.option(
    "--draw",
    is_flag=True,
    help="pictures below: memory by part, the pipeline's schedule, time, ranks on machines",
)
@valued("--html", metavar="FILE", text="the pictures as one page that needs no network")
@valued("--compare", metavar="RUN_FOLDER", text="planned and measured values of a finished run")
@valued(
    "--scale",
    metavar=LIST,
    text="speed, MFU and efficiency over numbers of devices, as tune lays them out",
)
@click.option(
    "--weak", is_flag=True, help="with --scale: a fixed batch per device, not for all of them"
)
@click.option("--trace", is_flag=True, help="run a step of one rank on shapes, and compare")
@click.option(
    "--calibrate",
    is_flag=True,
    help="RUN_OR_FILE... out=FILE: fit a cluster file to measured runs and kernels",
)
def plan(
    words: list[str],
    as_json: bool,
    draw: bool,
    html: str | None,
    compare: str | None,
    scale: str | None,
    weak: bool,
    trace: bool,
    calibrate: bool,
) -> int:
    """Print the plan of a configuration, or the answer that a flag asks for.

    Raises:
        ConfigError: several flags ask for different answers.
    """
    answers = {
        "--compare": compare is not None,
        "--trace": trace,
        "--calibrate": calibrate,
        "--html": html is not None,
        "--draw": draw,
    }
    wanted = [flag for flag, is_wanted in answers.items() if is_wanted]
    if scale is not None or weak:
        from mtrain.cli import plan_scale

        others = [flag for flag in wanted if flag not in ("--html", "--draw")]
        return plan_scale.run(
            words, scale, weak=weak, others=others, as_json=as_json, draw=draw, html=html
        )
    if as_json and wanted == ["--draw"]:
        wanted.append("--json")
    if len(wanted) > 1:
        raise refusal(f"{' and '.join(wanted)}: plan answers one of them", f"plan {wanted[0]}")
    if compare is not None:
        from mtrain.cli import plan_compare

        return plan_compare.run(compare, words, as_json=as_json)
    if trace:
        from mtrain.cli import trace as traced

        return traced.run(words, as_json=as_json)
    if calibrate:
        from mtrain.cli import calibrate as fitted

        return fitted.run(words, as_json=as_json)
    with without_collecting():
        from mtrain.cli import plan as one

        return one.run(words, as_json=as_json, draw=draw, html=html)
