"""Help: every verb has a page of its own, which names its flags and whose examples are read as they
are written.
"""

from __future__ import annotations

import inspect
import re
import shlex
from pathlib import Path
from pkgutil import resolve_name

import pytest

from mtrain.cli import evaluate, generate
from mtrain.cli.command import Page, Subverbs, Verb
from mtrain.cli.completion import SHELLS, candidates
from mtrain.cli.explain import about
from mtrain.cli.main import main, parse
from mtrain.cli.verbs import NAMES, commands
from mtrain.config.compose import paths
from mtrain.config.compose.composer import compose
from mtrain.config.compose.overrides import jobs, read_overrides
from mtrain.config.compose.paths import choices_of_group, program
from mtrain.config.messages.json_schema import KINDS
from mtrain.config.messages.keys import field_of
from mtrain.config.schema.run import GROUPS

SOURCE = Path(__file__).resolve().parents[2] / "src/mtrain"
ALL = dict(commands())
EXAMPLES = [(name, words) for name, command in ALL.items() for words in command.declared.examples]


def test_help_every_verb_and_subverb_has_a_page() -> None:
    for name, command in ALL.items():
        assert command.help, name
        assert command.declared.examples, name
        assert command.declared.usage.startswith((name, f"[{name}]")), name
        assert command.short_help or " " in name, name


def test_help_page_declares_arguments_of_function() -> None:
    for name, command in ALL.items():
        if isinstance(command, Subverbs):
            continue
        function = inspect.signature(resolve_name(f"mtrain.cli.{command.declared.runs}"))
        taken = {param.name for param in command.params if param.expose_value}
        accepted = set(function.parameters)
        assert taken <= accepted, name
        needed = {key for key, one in function.parameters.items() if one.default is one.empty}
        assert needed <= taken, name


@pytest.mark.parametrize("flag", ["--help", "-h"])
@pytest.mark.parametrize("name", ALL)
def test_help_prints_page_of_verb(name: str, flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    command = ALL[name]
    assert main([*name.split(), flag]) == 0
    page = capsys.readouterr().out
    assert page.startswith(f"usage: {program()} ")
    assert all(word in page.splitlines()[0] for word in name.split())
    assert command.help in page
    for spelled in command.flags():
        assert re.search(rf"(^|\s){re.escape(spelled)}\b", page), spelled
    assert all(
        f"  {program()}{'' if words == 'train' else ' ' + words}\n" in f"{page}\n"
        for words in command.declared.examples
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


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("name", "line"), EXAMPLES, ids=[words for _, words in EXAMPLES])
def test_help_examples_are_read_as_written(name: str, line: str) -> None:
    call = parse(shlex.split(line))
    verb = name.split()[0]
    assert call.verb.startswith(name)
    words = call.words
    settings = [word for word in words if "=" in word]
    if call.arguments.get("trace"):
        settings.remove("rank=0")  # its own word
    if call.arguments.get("calibrate"):
        assert settings == ["out=box.yaml"]
    elif call.arguments.get("multirun"):
        for job in jobs(words):
            compose(job.argv)
    elif verb in (
        "train",
        "check",
        "show",
        "plan",
        "prove",
        "rehearse",
        "tune",
        "recipe",
        "render",
        "submit",
        "doctor",
    ):
        compose(settings)
    elif verb in ("compare", "report"):
        assert set(words) <= {"runs/NAME", "runs/ONE", "runs/OTHER"}
    elif verb == "bisect":
        assert words[0] == "runs/NAME"
        assert not read_overrides(words[2:]).problems
    elif verb in ("watch", "profile"):
        assert "runs/NAME" in words
    elif verb in ("resume", "generate", "evaluate", "export", "goodput"):
        assert words[0] == "runs/NAME"
        own = {"generate": generate.WORDS, "evaluate": evaluate.WORDS}.get(verb, {})
        rest = [word for word in words[1:] if word.partition("=")[0] not in own]
        assert verb == "export" or not read_overrides(rest).problems
    elif verb == "convert":
        assert words[0] in ("import", "export", "inspect", "verify")
    elif verb == "checkpoint":
        assert words[0].startswith(("runs/NAME", "s3://"))
        compose([word for word in settings if not word.startswith("keep=")])
    elif verb == "explain":
        assert field_of(words[0]) is not None or words[0].startswith("MT")
    elif verb != "data":
        known = {"completion": SHELLS, "choices": GROUPS, "schema": (*KINDS, "fields", "codes")}
        assert set(words) <= set(known.get(verb, ()))


@pytest.mark.parametrize("group", GROUPS)
def test_help_choices_lists_every_choice(group: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["choices", group]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == [group, *choices_of_group(group)]
    assert all(about(group, choice) for choice in choices_of_group(group)), "a file says what it is"
    assert main(["choices", f"{group}s"]) == 2
    assert f"Use choices {group}" in capsys.readouterr().err


def test_help_own_word_verbs_refuse_non_flags() -> None:
    for name in ("choices", "recipe list", "tune", "explain"):
        assert main([*name.split(), "--nope"]) == 2


@pytest.mark.parametrize(
    ("words", "said", "fix"),
    [
        (
            "--compare runs/one",
            "--compare because it is a flag of plan, not of train",
            "plan --compare runs/one",
        ),
        (
            "--calibrate",
            "--calibrate because it is a flag of plan, not of train",
            "plan --calibrate",
        ),
        (
            "check --html x.html",
            "--html because it is a flag of plan, not of check",
            "plan --html x.html",
        ),
        ("show --draw", "--draw because it is a flag of plan, not of show", "plan --draw"),
        ("rehearse --all", "--all because it is a flag of check, not of rehearse", "check --all"),
        (
            "--resolved choices",
            "--resolved because it is a flag of show and recipe show",
            "show --resolved",
        ),
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
    call = parse(["--resolved", "recipe", "show", "r.yaml"])
    assert call.arguments == {"words": ["r.yaml"], "resolved": True, "as_json": False}
    assert parse(["--json", "recipe", "list"]).arguments["as_json"]
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
        page = Verb("check", Page("check", "", {"check": ""})).page()
        assert page.count("  mtrain check") == 1
    finally:
        program.cache_clear()


NAMED = re.compile(rf"\bmtrain (?:{'|'.join(NAMES)})\b|python launch\.py")
KEPT = {
    ("config/compose/paths.py", "python launch.py"),  # where it is decided
    ("config/messages/fields_page.py", "python launch.py"),  # a page of the checkout
    ("config/messages/json_schema.py", "mtrain schema"),  # marks a file; the same everywhere
    ("cli/recipe/files.py", "mtrain recipe"),  # in a recipe that is sent elsewhere
    ("cli/recipe/exchange.py", "mtrain recipe"),
}


def test_help_hints_never_name_program_themselves() -> None:
    found = set()
    for file in SOURCE.rglob("*.py"):
        text = re.sub(r'""".*?"""', "", file.read_text(), flags=re.DOTALL)
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
