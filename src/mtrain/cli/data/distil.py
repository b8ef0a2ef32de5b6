"""`data distil`: a teacher's likeliest tokens, computed once for all samples of a run."""

from __future__ import annotations

from collections.abc import Sequence

from mtrain.api import load
from mtrain.cli.named_values import Word, as_words, read_words, required
from mtrain.cli.output import refusal
from mtrain.config.compose.paths import user_path
from mtrain.errors import say_page
from mtrain.launching import local, preflight
from mtrain.plan.teacher_file import bytes_of_rows
from mtrain.units import bytes_

USAGE = "distil out=FOLDER objective=distil objective.distil_top_k=K [KEY=VALUE ...]"
WORDS = {"out": Word(None, user_path, "a folder", "top64")}


def distil(words: Sequence[str]) -> int:
    """Write the rows of the teacher of what `words` describe."""
    values, overrides = read_words(as_words(words, WORDS, USAGE), WORDS)
    out = required(values, "out", USAGE)
    if out.exists():
        raise refusal("exists already", "the name of a new folder", "MT002", "out", str(out))
    run = load(overrides).run
    o = run.objective
    if not o.taught_live or o.distil_top_k is None:
        rule = "the rows are those of a teacher, with its distil_top_k likeliest tokens"
        fix = "objective=distil objective.teacher=HF_DIR objective.distil_top_k=64"
        raise refusal(rule, fix, "MT494", "objective.distil_top_k", o.distil_top_k)
    preflight.check(run, list(overrides))
    say_page(f"writing {bytes_(bytes_of_rows(run))} to {out}")
    local.distil(run, out)
    return 0
