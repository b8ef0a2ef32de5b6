"""Scripts are read and never run: expansions against bash itself, what cannot be known, bombs, and hostile text."""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mtrain.errors import ConfigError
from mtrain.recipes.arithmetic import pattern_of, whole_number
from mtrain.recipes.expansion import UNKNOWN, shown
from mtrain.recipes.megatron import import_scripts
from mtrain.recipes.shell import read_script
from tests.support.patience import patient

LIKE_BASH = [
    "A=1; B=$A$A; show $B ${B}x",
    "A='x y'; show $A \"$A\" '$A'",
    'A=( 1 \'b c\' "d" ); show ${A[@]} "${A[@]}" ${A[1]} $A',
    'A=(1); A+=(2 3); show "${A[@]}"',
    "A=x; A+=y; show $A",
    'A="a \\\n b"; show $A "$A"',
    'show a\\ b \'it\'"\'"\'s\' "q\\"q" "d\\$d"',
    "N=3; show $((N * 8 + 2)) $(( (N+1) / 2 )) $((-7 / 2)) $((7 % 4))",
    'show "${X:-def ault}" ${Y:-a b} ${Z-} "${W:-}" end',
    'A=; show ${A:-empty} "${A-set}" ${A:+no}yes',
    ": ${A:=given}; show $A",
    "show a#b # c\nshow d",
    "A=1 # comment\nshow $A",
    "show a ; show b && show c || show d\nshow e | cat",
    "show one \\\n  two \\\n  three",
    "A=(\n  --x 1   # first\n  # a line of its own\n  --y 2\n)\nshow ${A[@]}",
    "show a > /dev/null 2>&1",
    "show --n 2 2>&1",
    "cat <<EOF >/dev/null\nshow no 'quote\nEOF\nshow yes",
    'A=" --p 1 "; show $A--q 2 x$A',
    'A="it\'s"; show "$A" $A',
    "show \"\" '' x",
    'D="fp8"; A=(); if [[ "$D" == "fp8" ]]; then A+=(--fp8 x); fi; show "${A[@]}" end',
    "D=bf16; if [ $D = fp8 ]; then A=1; elif [ $D = bf16 ]; then A=2; else A=3; fi; show $A",
    'T=$3; if [[ "${3:-MOCK}" == MOCK ]] || [[ -z "$T" ]]; then A=mock; else A=real; fi; show $A',
    "N=8\nif (( N > 4 )); then A=big\nelse A=small\nfi\nshow $A",
    "N=8; if [ $N -gt 8 -o $N -eq 8 ]; then show yes; fi; [ $N -lt 3 ] && show no; [ $N -lt 3 ] || show or",
    "M=7b; case $M in\n  1b|7b) A=4 ;;\n  70b)\n    A=8\n    ;;\n  *) A=9;;\nesac; show $A",
    'M=x70b; case "$M" in (7b) A=1;; *70b) A=2; B=3;; *) A=4;; esac; show $A $B',
    'X=; if [ -n "$X" ]; then A=1; else A=2; fi; if ! [ -z "$X" ]; then A=$A.; fi; show $A',
    'A=a; if [[ ( $A == b || $A == [ac] ) && ! -z $A ]]; then if [[ $A != "[ac]" ]]; then B=in; fi; fi; show $B',
    "A=1; while [ $A = 2 ]; do B=no; done; until true; do B=no; done; show $A ${B:-none}",
    'A=; B=; [ "${X:-0}" = 1 ] && { A=1; B=2; }; [ "${X:-1}" = 1 ] && { C=3; }; show "$A$B$C"',
    "if false; then A=1; if true; then A=2; fi; else A=3; fi; show $A",
    "test a = a && A=1; test a = b || B=2; show $A $B",
]


@pytest.mark.skipif(shutil.which("bash") is None, reason="bash is not installed")
@pytest.mark.parametrize("script", LIKE_BASH)
def test_words_expand_as_bash_expands_them(script: str) -> None:
    show = 'show() { for word in "$@"; do printf "%s\\0" "$word"; done; printf "\\n"; }\n'
    done = subprocess.run(
        ["bash", "--norc", "-c", show + script],
        capture_output=True,
        text=True,
        timeout=patient(20),
        env={"PATH": "/bin:/usr/bin"},
    )
    wanted = [line.split("\0")[:-1] for line in done.stdout.split("\n")[:-1]]
    found = [c.words[1:] for c in read_script((script, "s.sh")).commands if c.words[0] == "show"]
    if "> /dev/null" in script:
        assert found == [["a"]]
    elif "show c || show d" in script:
        assert found == [["a"], ["b"], ["c"], ["d"], ["e"]], "both sides of || are read"
    else:
        assert found == wanted


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
def test_what_only_running_could_tell_is_marked_and_never_guessed(text: str, what: str) -> None:
    words = read_script((text, "s.sh")).commands[-1].words
    assert [found for word in words for found in UNKNOWN.findall(word)] == [what]
    assert shown(words[1]) == what


def test_conditions_and_loops_change_nothing_outside_them() -> None:
    script = read_script(
        (
            "A=1\nif [ -n $Q ]; then A=2; B=3; fi\n[ $Q ] && A=4\nfor i in 1 2; do A=5; done\n"
            "case $Q in\n  x) A=6 ;;\n  y) A=7 ;;\nesac\nwhile true; do A=8; done\nrun $A $B\n",
            "s.sh",
        )
    )
    run = script.commands[-1]
    assert (run.words[1], shown(run.words[2]), run.conditional) == ("1", "$B", False)
    assert script.conditional == {"A": "s.sh:2", "B": "s.sh:2"}


def test_a_command_in_a_condition_is_marked() -> None:
    commands = read_script(("if [ -f x ]; then run a; fi\ncd x && run b\n", "s.sh")).commands
    assert [(c.words[1], c.conditional) for c in commands if c.words[0] == "run"] == [("a", True), ("b", False)]


@pytest.mark.parametrize("text", ["run 'a", 'run "a', "run ${a", "run $((1", "A=(1 2", "run `x", "run $(x"])
def test_text_that_does_not_close_is_refused_with_its_line(text: str) -> None:
    with pytest.raises(ConfigError, match="does not close") as caught:
        read_script((f"x\n{text}", "s.sh"))
    assert caught.value.problems[0].source.startswith("s.sh:")


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
def test_a_bomb_is_refused_or_read_in_a_moment(text: str) -> None:
    start = time.process_time()
    codes: set[str] = set()
    try:
        read_script((text, "s.sh"))
    except ConfigError as error:
        codes = {p.code for p in error.problems}
    assert codes <= {"MT003", "MT005"}
    assert time.process_time() - start < 3


def test_a_hostile_script_starts_nothing_reads_nothing_and_writes_nothing(tmp_path: Path) -> None:
    canary, secret = tmp_path / "canary", tmp_path / "secret"
    secret.write_text("s3cr3t-canary")
    script = tmp_path / "h.sh"
    script.write_text(
        f"touch {canary}\nX=$(touch {canary}; cat {secret})\nY=`touch {canary}`\neval 'touch {canary}'\n"
        f"source {secret}\n. {secret}\n"
        f"torchrun --nproc-per-node 2 pretrain_gpt.py --num-layers 2 --hidden-size 64 --num-attention-heads 4 "
        f"--seq-length 8 --vocab-size 100 --data-args-path {secret} --yaml-cfg {secret} --data-path $X "
        f"--tokenizer-model '$(touch {canary})' --lr $(cat {secret}) > {canary} &\n"
    )
    code = (
        "import sys\nbad = []\n"
        "def hook(event, args):\n"
        "    if event in ('os.system', 'subprocess.Popen', 'socket.connect', 'os.exec', 'os.posix_spawn'):\n"
        "        bad.append(event)\n"
        f"    if event == 'open' and str(args[0]) in ({str(secret)!r}, {str(canary)!r}):\n"
        "        bad.append(args[0])\n"
        "sys.addaudithook(hook)\n"
        "from mtrain.cli.main import main\n"
        f"rc = main(['recipe', 'import', {str(script)!r}])\n"
        "print('END', rc, bad, [m for m in ('torch', 'numpy', 'megatron') if m in sys.modules])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=patient(60), cwd=tmp_path
    )
    assert done.stdout.splitlines()[-1] == "END 0 [] []", done.stderr
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
def test_what_is_no_script_is_refused(data: bytes, code: str, tmp_path: Path) -> None:
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
def test_a_list_expression_is_read_and_never_evaluated(text: str, value: list[int] | None) -> None:
    assert pattern_of(text) == value


def test_whole_numbers_stay_bounded() -> None:
    assert whole_number("2 * (3 + A)", {"A": "4"}.get) == 14
    for text in ("1/0", "9" * 30, "999999999*999999999*9", "A", "1 +", "2 ** 3", "1 if 1 else 2"):
        assert whole_number(text, lambda name: None) is None


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('train() {\n  run --n $1 "${@:2}"\n}\ntrain 3 --a "b c"\n', [["run", "--n", "3", "--a", "b c"]]),
        ("function train {\n  local n=$1; shift\n  run $n $# ${2:-x} $3\n}\ntrain 3 4 5\n", [["run", "3", "2", "5"]]),
        ("set_it()\n{\n  N=2\n}\nN=1\nset_it\nrun $N\n", [["run", "2"]]),
        ("N=1\nset_it() { N=2; }\nrun $N\n", [["run", "1"]]),
        (
            "one() { two $1 x; }\ntwo() { run $2 $1; }\none a\nrun $1\n",
            [["run", "x", "a"], ["run", "\ue000$1\ue001"]],
        ),
        ('main() { run $1 "$@"; }\nmain "$@"\n', [["run", "\ue000$1\ue001"]]),
        ("again() { run $1; again $1; }\nagain 1\n", [["run", "1"], ["again", "1"]]),
        ("F=1\nf() { if [ $1 = 1 ]; then run a; else run b; fi; }\nf $F && run c\n", [["run", "a"], ["run", "c"]]),
        ("set -- a b\nrun $2 $*\n", [["run", "b", "a", "b"]]),
    ],
)
def test_a_function_runs_where_it_is_called_and_with_what_it_is_given(text: str, words: list[list[str]]) -> None:
    assert [c.words for c in read_script((text, "s.sh")).commands if c.words[0] != "["] == words


def test_a_function_that_is_not_called_or_perhaps_not_is_marked() -> None:
    text = "f() {\n  run a\n  N=2\n}\ng() { run b; }\nN=1\n[ -f x ] && f\nrun $N\n"
    script = read_script((text, "s.sh"))
    assert [(c.words[1:], c.conditional, c.doubtful) for c in script.commands if c.words[0] == "run"] == [
        (["a"], True, {}),
        (["1"], False, {"N": "s.sh:3"}),
        (["b"], True, {}),
    ]
    assert [(u.test, u.branches[0].names) for u in script.undecided] == [("[ -f x ] && f", ["N"])]


def test_functions_that_call_each_other_twice_are_refused_or_read_in_a_moment() -> None:
    text = "".join(f"f{n}() {{ f{n + 1}; f{n + 1}; }}\n" for n in range(60)) + "f0\n"
    start = time.process_time()
    with pytest.raises(ConfigError):
        read_script((text, "s.sh"))
    assert time.process_time() - start < 3
