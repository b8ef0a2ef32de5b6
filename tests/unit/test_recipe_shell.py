"""Scripts are read and never run: what cannot be known, bombs, and hostile text."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from mtrain.errors import ConfigError
from mtrain.recipes.megatron.importer import import_scripts
from mtrain.recipes.shell.arithmetic import pattern_of, whole_number
from mtrain.recipes.shell.gaps import Unread, shown
from mtrain.recipes.shell.reader import read_script
from tests.support.patience import patient


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("run $NOT_SET", "$NOT_SET"),
        ("run $(whoami)", "$(whoami)"),
        ("run `whoami`", "$(whoami)"),
        ("run $1", "$1"),
        ("run ${A%.*}", "${A%.*}"),
        ("A=$(date); B=$A; run $B", "$(date)"),
        ("run $((NOT_SET + 1))", "$((NOT_SET + 1))"),
        ("run ${!A}", "${!A}"),
    ],
)
def test_shell_unknowable_is_marked_never_guessed(text: str, what: str) -> None:
    words = read_script((text, "s.sh")).commands[-1].words
    assert [gap.text for word in words if isinstance(word, Unread) for gap in word.gaps] == [what]
    assert shown(words[1]) == what


def test_shell_conditional_value_is_unknown_after() -> None:
    text = "A=1\nif [ -n $Q ]; then A=2; B=3; fi\nC=1\nfor i in 1 2; do C=5; done\nrun $A $B $C\n"
    words = read_script((text, "s.sh")).commands[-1].words[1:]
    assert [
        (shown(word), gap.where) for word in words if isinstance(word, Unread) for gap in word.gaps
    ] == [
        ("$A", "s.sh:2"),
        ("$B", "s.sh:2"),
        ("$C", "s.sh:4"),
    ]


def test_shell_branch_additions_are_optional_items() -> None:
    text = "A=(--x 1)\nif [ -f x ]; then A+=(--y 2); else A+=(--z); fi\nrun ${A[@]} --w\n"
    words = read_script((text, "s.sh")).commands[-1].words
    assert words[:3] == ["run", "--x", "1"]
    assert isinstance(words[3], Unread)
    assert words[3].gaps[0].words == ("--y", "2", "--z")
    assert words[4:] == ["--w"]


def test_shell_command_in_condition_is_marked() -> None:
    commands = read_script(("if [ -f x ]; then run a; fi\ncd x && run b\n", "s.sh")).commands
    assert [(c.words[1], c.conditional) for c in commands if c.words[0] == "run"] == [
        ("a", True),
        ("b", False),
    ]


@pytest.mark.parametrize(
    "text", ["run 'a", 'run "a', "run ${a", "run $((1", "A=(1 2", "run `x", "run $(x"]
)
def test_shell_unclosed_text_has_its_line(text: str) -> None:
    with pytest.raises(ConfigError, match="does not close") as caught:
        read_script((f"x\n{text}", "s.sh"))
    assert caught.value.problems[0].source.startswith("s.sh:")


@pytest.mark.sampled(9)
@pytest.mark.parametrize(
    "text",
    [
        "A=" + "a" * 1000 + "\n" + "A=$A$A$A$A\n" * 40,
        "A=(" + "a " * 1000 + ")\n" + "A=(${A[@]} ${A[@]})\n" * 40,
        "A=x\n" + "B=" + "${A:-" * 40 + "x" + "}" * 40,
        "run $((" + "(" * 400 + "1" + ")" * 400 + "))",
        "A=9\n" + "A=$((A*A))\n" * 200,
        "run " + "\\\n" * 5000,
        "run " + "${A[@]}" * 20000,
    ],
    ids=["text", "array", "nested", "brackets", "numbers", "continuations", "expansions"],
)
def test_shell_bomb_is_refused_or_fast(text: str) -> None:
    start = time.process_time()
    codes: set[str] = set()
    try:
        read_script((text, "s.sh"))
    except ConfigError as error:
        codes = {p.code for p in error.problems}
    assert codes <= {"MT003", "MT005"}
    assert time.process_time() - start < 3


def test_shell_hostile_script_has_no_effect(tmp_path: Path) -> None:
    canary = tmp_path / "canary"
    secret = tmp_path / "secret"
    secret.write_text("s3cr3t-canary")
    script = tmp_path / "h.sh"
    script.write_text(
        f"touch {canary}\nX=$(touch {canary}; cat {secret})\nY=`touch {canary}`\neval 'touch"
        f" {canary}'\nsource {secret}\n. {secret}\ntorchrun --nproc-per-node 2 pretrain_gpt.py"
        " --num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 8 --vocab-size 100"
        f" --data-args-path {secret} --yaml-cfg {secret} --data-path $X --tokenizer-model '$(touch"
        f" {canary})' --lr $(cat {secret}) > {canary} &\n"
    )
    code = (
        "import sys\nbad = []\ndef hook(event, args):\n    if event in ('os.system',"
        " 'subprocess.Popen', 'socket.connect', 'os.exec', 'os.posix_spawn'):\n       "
        f" bad.append(event)\n    if event == 'open' and str(args[0]) in ({str(secret)!r},"
        f" {str(canary)!r}):\n        bad.append(args[0])\nsys.addaudithook(hook)\nfrom"
        " mtrain.cli.main import main\nrc = main(['recipe', 'import',"
        f" {str(script)!r}])\nprint('END', rc, bad, [m for m in ('torch', 'numpy', 'megatron') if m"
        " in sys.modules])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=patient(60),
        cwd=tmp_path,
    )
    assert done.stdout.splitlines()[-1] == "END 2 [] []", done.stderr
    assert "s3cr3t-canary" not in done.stdout + done.stderr
    assert not canary.exists()


@pytest.mark.parametrize(
    ("data", "code"),
    [
        (b"\xff\xfe", "MT003"),
        ("torchrun x.py --bf16 \u202e".encode(), "MT003"),
        (b"a" * (2 << 20), "MT005"),
        ("torchrun x.py --bf16 \ue000A\ue001".encode(), "MT003"),
        (b"torchrun x.py --bf16 --nope '\x1b]0;owned\x07'", "MT003"),
        ("torchrun x.py --bf16 \x9b31m".encode(), "MT003"),
        (b"echo hello\n", "MT701"),
        (b"", "MT701"),
    ],
)
def test_shell_non_script_is_refused(data: bytes, code: str, tmp_path: Path) -> None:
    (tmp_path / "x.sh").write_bytes(data)
    with pytest.raises(ConfigError) as caught:
        import_scripts([tmp_path / "x.sh"])
    assert caught.value.problems[0].code == code


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("([0]*3+[1]*2)", [0, 0, 0, 1, 1]),
        ("[1,1,0]*2", [1, 1, 0, 1, 1, 0]),
        ("[1]*10000000000", None),
        ("[1]*5000+[1]*5001", None),
        ("__import__('os')", None),
        ("[1", None),
        ("7", None),
        ("[[1]]", None),
    ],
)
def test_shell_list_expression_is_never_evaluated(text: str, value: list[int] | None) -> None:
    assert pattern_of(text) == value


def test_shell_integers_stay_bounded() -> None:
    assert whole_number("2 * (3 + A)", {"A": "4"}.get) == 14
    for text in ("1/0", "9" * 30, "999999999*999999999*9", "A", "1 +", "2 ** 3", "1 if 1 else 2"):
        assert whole_number(text, lambda name: None) is None


def test_shell_function_is_read_at_its_call() -> None:
    text = 'N=1\ntrain() {\n  run --n $1 "${@}"\n  N=2\n}\ntrain 3 "b c"\nrun $N\n'
    first, second = [c.words[1:] for c in read_script((text, "s.sh")).commands]
    assert first == ["--n", "3", "3", "b c"]
    assert [word.why for word in second if isinstance(word, Unread)] == [
        "needs $N (s.sh:6), which is set by train (line 6)"
    ]


def test_shell_uncalled_function_is_marked() -> None:
    commands = read_script(("f() {\n  run a\n}\nrun b\n", "s.sh")).commands
    assert [(c.words[1], c.conditional) for c in commands] == [("b", False), ("a", True)]


@pytest.mark.full
def test_shell_doubling_functions_are_refused_or_fast() -> None:
    text = "".join(f"f{n}() {{ f{n + 1}; f{n + 1}; }}\n" for n in range(60)) + "f0\n"
    start = time.process_time()
    with pytest.raises(ConfigError):
        read_script((text, "s.sh"))
    assert time.process_time() - start < 3
