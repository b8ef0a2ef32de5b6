"""Help: every verb has a page of its own, which names its flags and whose examples are read as they
are written.
"""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from mtrain.cli import evaluate, generate
from mtrain.cli.choices import about
from mtrain.cli.complete import SHELLS, candidates
from mtrain.cli.data import SUBVERBS as DATA_SUBVERBS
from mtrain.cli.data.pages import DATA_PAGES
from mtrain.cli.main import OWN_WORDS, VERBS, main, parse
from mtrain.cli.options import read_options
from mtrain.cli.pages import PAGES, SUBPAGES, Page, flags_of
from mtrain.cli.recipe import SUBVERBS
from mtrain.config.compose import paths
from mtrain.config.compose.composer import compose
from mtrain.config.compose.overrides import read_overrides
from mtrain.config.compose.paths import choices_of_group, program
from mtrain.config.compose.sweep import jobs
from mtrain.config.messages.json_schema import KINDS
from mtrain.config.messages.keys import field_of
from mtrain.config.schema.run import GROUPS

SOURCE = Path(__file__).resolve().parents[2] / "src/mtrain"
ALL = {
    **{(verb,): page for verb, page in PAGES.items()},
    **{("recipe", sub): page for sub, page in SUBPAGES.items()},
    **{("data", sub): page for sub, page in DATA_PAGES.items()},
}
EXAMPLES = [(verb, words) for verb, page in ALL.items() for words, _ in page.examples]


def test_help_every_verb_and_subverb_has_a_page() -> None:
    assert PAGES.keys() == VERBS.keys()
    assert SUBPAGES.keys() == SUBVERBS.keys()
    assert DATA_PAGES.keys() == DATA_SUBVERBS.keys()


@pytest.mark.parametrize("flag", ["--help", "-h"])
@pytest.mark.parametrize("verb", ALL, ids=" ".join)
def test_help_prints_page_of_verb(
    verb: tuple[str, ...], flag: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*verb, flag]) == 0
    page = capsys.readouterr().out
    assert page.startswith(f"usage: {program()} ")
    assert all(word in page.splitlines()[0] for word in verb)
    assert ALL[verb].text in page
    for name in flags_of(verb[0], verb[1:]):
        assert re.search(rf"(^|\s){re.escape(name)}\b", page), name
    assert all(
        f"  {program()}{'' if words == 'train' else ' ' + words}\n" in page
        for words, _ in ALL[verb].examples
    )
    assert max(map(len, page.splitlines())) <= 120


def test_help_after_overrides_is_of_the_verb(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "parallel=tp2", "--help"]) == 0
    assert " check " in capsys.readouterr().out.splitlines()[0]
    assert main(["--help"]) == main(["-h"]) == 0
    overview = capsys.readouterr().out
    assert "[VERB]" in overview
    assert "choices GROUP" in overview
    assert "deepseek_v3" not in overview, "choices are behind `choices`"


@pytest.mark.parametrize(("verb", "words"), EXAMPLES, ids=[words for _, words in EXAMPLES])
def test_help_examples_are_read_as_written(verb: tuple[str, ...], words: str) -> None:
    call = parse(shlex.split(words))
    assert call.verb == verb[0]
    arguments = call.arguments
    if "--trace" in call.flags:
        call.arguments.remove("rank=0")  # its own word
    if "--calibrate" in call.flags:
        assert [word for word in call.arguments if "=" in word] == ["out=box.yaml"]
    elif call.verb in ("train", "check", "show", "plan", "prove", "rehearse"):
        for job in (
            [job.argv for job in jobs(arguments)] if "--multirun" in call.flags else [arguments]
        ):
            compose(job)
    elif call.verb in ("resume", "generate", "evaluate", "export"):
        assert arguments[0] == "runs/NAME"
        own = {"generate": generate.WORDS, "evaluate": evaluate.WORDS}.get(call.verb, {})
        rest = [word for word in arguments[1:] if word.partition("=")[0] not in own]
        assert call.verb == "export" or not read_overrides(rest).problems
    elif call.verb == "recipe":
        assert arguments[0] in (verb[1:] or SUBVERBS)
        options = read_options(
            arguments[1:], ("--megatron", "--resolved", "--capture"), {"-o": "--output"}
        )
        compose([word for word in options.words if "=" in word])
        assert options.flags | options.values.keys() <= {*flags_of("recipe", arguments), "--output"}
    elif call.verb == "tune":
        compose(read_options(arguments, valued={"--out": "--out", "--why-not": "--why-not"}).words)
    elif call.verb == "convert":
        assert arguments[0] in ("import", "export", "inspect", "verify")
    elif call.verb == "data":
        assert arguments[0] in (verb[1:] or DATA_SUBVERBS)
    elif call.verb == "explain":
        assert field_of(arguments[0]) is not None or arguments[0].startswith("MT")
    else:
        own = {"completion": SHELLS, "choices": GROUPS, "engines": ("--fixes",)}
        known = {"schema": (*KINDS, "fields", "-o", "."), **own}[call.verb]
        assert set(arguments) <= set(known)


@pytest.mark.parametrize("group", GROUPS)
def test_help_choices_lists_every_choice(group: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["choices", group]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == [group, *choices_of_group(group)]
    assert all(about(group, choice) for choice in choices_of_group(group)), "a file says what it is"
    assert main(["choices", f"{group}s"]) == 2
    assert f"fix: choices {group}" in capsys.readouterr().err


def test_help_own_word_verbs_refuse_non_flags() -> None:
    assert set(OWN_WORDS) - {"__complete"} <= set(VERBS)
    assert main(["choices", "--nope"]) == 2


@pytest.mark.parametrize(
    ("words", "said", "fix"),
    [
        (
            "--compare runs/one",
            "--compare: a flag of plan, not of train",
            "plan --compare runs/one",
        ),
        ("--calibrate", "--calibrate: a flag of plan, not of train", "plan --calibrate"),
        ("check --html x.html", "--html: a flag of plan, not of check", "plan --html x.html"),
        ("show --draw", "--draw: a flag of plan, not of show", "plan --draw"),
        ("rehearse --all", "--all: a flag of check, not of rehearse", "check --all"),
        ("--resolved choices", "--resolved: there is no such flag here", ""),
        ("plan --trace --html f.html", "--trace and --html: plan answers one", "plan --trace"),
        (
            "plan --compare runs/one --draw",
            "--compare and --draw: plan answers one",
            "plan --compare",
        ),
        ("plan --json --draw", "--draw and --json: plan answers one", "plan --draw"),
    ],
)
def test_help_ignored_flag_is_refused(
    words: str,
    said: str,
    fix: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def started(*_: object, **__: object) -> int:
        raise AssertionError(f"`{words}` starts something")

    for verb in ("check", "plan", "show", "train"):
        monkeypatch.setattr(f"mtrain.cli.{verb}.run", started)
    assert main(words.split()) == 2
    shown = "".join(capsys.readouterr())
    assert said in shown
    assert fix in shown


def test_help_flag_before_verb_belongs_to_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert parse(["--resolved", "recipe", "show", "r.yaml"]).arguments == [
        "show",
        "r.yaml",
        "--resolved",
    ]
    assert parse(["--json", "recipe", "list"]).arguments == ["list", "--json"]
    assert main(["check", "--draw", "--help"]) == 0
    assert " check " in capsys.readouterr().out


def test_help_hints_use_invoked_program_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert program() == "python launch.py"
    installed = tmp_path / "lib/python3.11/site-packages/mtrain"
    installed.mkdir(parents=True)
    monkeypatch.setattr(paths, "_PACKAGE", installed)
    program.cache_clear()
    try:
        assert program() == "mtrain"
        assert Page("check", "x", examples=(("check", ""),)).render().count("  mtrain check") == 1
    finally:
        program.cache_clear()


NAMED = re.compile(rf"\bmtrain (?:{'|'.join(VERBS)})\b|python launch\.py")
KEPT = {
    ("config/compose/paths.py", "python launch.py"),  # where it is decided
    ("config/messages/fields_page.py", "python launch.py"),  # a page of the checkout
    ("config/messages/json_schema.py", "mtrain schema"),  # marks a file; the same everywhere
    ("cli/recipe/new.py", "mtrain recipe"),  # in a recipe that is sent elsewhere
    ("cli/recipe/exchange.py", "mtrain recipe"),
    ("cli/completion.py", "python launch.py"),  # a comment of what it completes
    ("cli/completion.py", "mtrain completion"),  # a script for the installed command
}


def test_help_hints_never_name_program_themselves() -> None:
    found = set()
    for file in SOURCE.rglob("*.py"):
        text = re.sub(r'"""(?!# (?:bash|zsh|fish)).*?"""', "", file.read_text(), flags=re.DOTALL)
        found |= {(str(file.relative_to(SOURCE)), name) for name in NAMED.findall(text)}
    assert found <= KEPT, f"use config.paths.program(): {sorted(found - KEPT)}"


@pytest.mark.parametrize(
    ("line", "some", "never"),
    [
        ("mtrain parallel=tp", "parallel=tp4", "parallel=pp4"),
        ("mtrain parallel=tp4p", "parallel=tp4pp2", "parallel=tp4tp2"),
        ("mtrain check parallel=tp4pp4", "parallel=tp4pp4sp", "parallel=tp4pp4pp2"),
        ("mtrain check --", "--all", "--resolved"),
        ("mtrain show --", "--resolved", "--all"),
        ("mtrain engines --", "--fixes", "--all"),
        ("mtrain recipe import -", "-o", "--megatron"),
        ("mtrain choices mo", "model", "mod"),
        ("mtrain checkpoint.resume=", "checkpoint.resume=latest", "checkpoint.resume=1"),
    ],
)
def test_help_completes_layouts_and_flags(line: str, some: str, never: str) -> None:
    found = candidates(line)
    assert some in found
    assert never not in found


def test_help_offered_layouts_are_valid() -> None:
    from mtrain.config.compose.layout_string import parse_layout

    for begun in ("", "tp4", "tp2pp2", "pp2e", "tp2ep4etp1"):
        offered = [word.partition("=")[2] for word in candidates(f"mtrain parallel={begun}")]
        words = [word for word in offered if word not in choices_of_group("parallel")]
        assert words
        for word in words:
            parse_layout(word)


def test_help_completes_runs_checkpoints_and_locks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = tmp_path / "runs/a/checkpoints/step_00000004"
    step.mkdir(parents=True)
    for file in (tmp_path / "runs/a/run.yaml", step / "manifest.json", tmp_path / "x.lock.yaml"):
        file.write_text("")
    monkeypatch.chdir(tmp_path)
    checkpoint = "runs/a/checkpoints/step_00000004"
    assert candidates("mtrain resume ") == candidates("mtrain export ") == ["runs/a", checkpoint]
    assert candidates("mtrain run=") == ["run=runs/a/run.yaml", "run=x.lock.yaml"]
    assert f"checkpoint.resume={checkpoint}" in candidates("mtrain checkpoint.resume=")
    assert candidates("mtrain recipe verify ") == ["x.lock.yaml"]
