"""Constructs of shell scripts: what bash passes to the program, against the static reader and
against --capture.

The reader agrees with bash in every key, or names the key among those that are left to fill in.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from mtrain.cli.recipe.capture import recorded
from mtrain.recipes.imported import WHOLE
from mtrain.recipes.megatron.command import training_command
from mtrain.recipes.megatron.importer import open_neighbour
from mtrain.recipes.megatron.reading import leave_open, read_flags
from mtrain.recipes.shell.reader import read_script
from tests.support.patience import patient

pytestmark = pytest.mark.skipif(shutil.which("bash") is None, reason="bash is not installed")

MODEL = "--num-layers 4 --hidden-size 128 --num-attention-heads 8 --vocab-size 512"
RUN = f"torchrun --nproc-per-node 8 pretrain_gpt.py {MODEL}"
TP = "--tensor-model-parallel-size"
WD = "--weight-decay"
# In the texts, RUN is the command above, TP and WD are the two flags; what is written last is what
# is not plain.
CONSTRUCTS = r"""
A=2; RUN TP $A
A=2; B=$A; RUN TP "${B}"
A=1; A=4; RUN TP $A
A=(TP 2 WD 0.3); RUN "${A[@]}"
A=(TP 2); A+=(WD 0.3); RUN ${A[@]}
A="TP 2"; A+=" WD 0.3"; RUN $A
A="TP 2"; A="$A WD 0.3"; RUN $A
A=0.; A+=3; RUN WD $A
RUN TP ${N:-2}
RUN TP ${N-2} WD ${M:=0.3}
: ${N:=2}; RUN TP $N
N=4; RUN TP ${N:-2}
N=; RUN TP ${N:-2}
N=4; RUN ${N:+TP 2}
RUN ${N:+TP 2} WD 0.3
RUN \<NL>  TP 2 \<NL>  WD 0.3
A=( # flags<NL>  TP 2 # two<NL>  # none<NL>  WD 0.3<NL>)<NL>RUN "${A[@]}"
RUN TP '2' WD "0.3"
RUN TP=2 WD=0.3
RUN TP="2"
N=2; RUN TP=$N
RUN TP 1 TP 2
N=2; RUN TP '$N' 2>/dev/null || true
RUN TP $((1 + 1))
N=2; RUN TP $((N * 2))
N=9; RUN TP $((N / 4)) WD 0.3
N=010; RUN TP $((N))
A=1; ((A++)); RUN TP $A
A=1; ((A*=2)); RUN TP $A
A=1; ((A=A+1)) || true; RUN TP $A
A=1; let A=A*2; RUN TP $A
A=1; let "A += 1"; RUN TP $A
A=1; : $((A*=2)); RUN TP $A
A=1; B=$((A++)); RUN TP $A
A=1; read A <<< 2; RUN TP $A
A=1; read -r A B <<< "2 0.3"; RUN TP $A WD $B
A=1; IFS=, read -r A B <<< "2,0.3"; RUN TP $A WD $B
A=1; read A <<EOF<NL>2<NL>EOF<NL>RUN TP $A
mapfile -t A <<< "TP<NL>2"; RUN "${A[@]}"
readarray -t A < <(printf '%s\n' TP 2); RUN "${A[@]}"
A=1; printf -v A '%d' 2; RUN TP $A
A=1; V=A; printf -v "$V" '%d' 2; RUN TP $A
A="TP 2"; unset A; RUN $A
A=(TP 2 WD 0.3); unset 'A[3]' 'A[2]'; RUN "${A[@]}"
A=(TP 2); A[1]=4; RUN "${A[@]}"
A=(TP 2 WD 0.3); A=x; RUN WD 0.1 ${A[@]:1}
A=(x TP 2); RUN "${A[@]:1}"
A=(WD 0.3 TP 2); RUN "${A[@]:0:2}"
A=(TP 2); RUN "${A[@]/2/4}"
A=2x; RUN TP ${A%x}
A=x2; RUN TP ${A#x}
A=tp2; RUN TP ${A/tp/}
A=42; RUN TP ${A:1:1}
A=2; B=A; RUN TP ${!B}
A=(1 2 3 4); RUN TP ${#A[@]}
A=(1 2 4); RUN TP ${A[1]}
A=(1 2 4); I=2; RUN TP ${A[$I]}
A=(1 2 4); RUN TP ${A[-1]}
declare -A M=([a]=2 [b]=4); RUN TP ${M[b]}
declare -i A; A=1+1; RUN TP $A
declare -n R=A; A=1; R=2; RUN TP $A
declare -u A; A=x; A=2; RUN TP $A
export A=2; RUN TP $A
readonly A=2; RUN TP $A
declare A=2 B=0.3; RUN TP $A WD $B
typeset -r A=2; RUN TP $A
A=1; A=2 true; RUN TP $A
A=1; A=2 :; RUN TP $A
A=1; (A=2); RUN TP $A
A=1; (A=2; RUN TP $A)
A=1; { A=2; }; RUN TP $A
A=1; echo 2 | read A; RUN TP $A
A=1; echo | A=2; RUN TP $A
A=1; A=2 & wait; RUN TP $A
A=1; true && A=2; RUN TP $A
A=1; false && A=2; RUN TP $A
A=1; false || A=2; RUN TP $A
A=1; [ -z "$N" ] && A=2; RUN TP $A
A=1; [[ $A == 1 ]] && { A=2; B=0.3; }; RUN TP $A WD ${B:-0.1}
A=1; if true; then A=2; fi; RUN TP $A
A=1; if false; then A=2; fi; RUN TP $A
A=1; if [ $A = 2 ]; then A=4; elif [ $A = 1 ]; then A=2; else A=8; fi; RUN TP $A
if [ x = y ]; then A=2; else A=2; fi; RUN TP $A
A=(TP 2); if [ x = x ]; then A+=(WD 0.3); fi; RUN "${A[@]}"
A="TP 2"; if [ x = x ]; then A="$A WD 0.3"; fi; RUN $A
if [ -n "$N" ]; then A="--swiglu"; fi; RUN TP 2 $A
A=1; case x in x) A=2;; *) A=4;; esac; RUN TP $A
A=1; case b in a) A=2;; b|c) A=4;; esac; RUN TP $A
A=1; case x in x) A=2;& y) A=4;; esac; RUN TP $A
A=1; case x in (x) A=2;; esac; RUN TP $A
A=1; for I in 1 2; do A=$I; done; RUN TP $A
A=1; for ((I=0; I<2; I++)); do A=$((A*2)); done; RUN TP $A
A=1; while [ $A -lt 4 ]; do A=$((A*2)); done; RUN TP $A
A=1; until [ $A -ge 4 ]; do ((A*=2)); done; RUN TP $A
A=(); for F in "TP 2" "WD 0.3"; do A+=($F); done; RUN "${A[@]}"
A=1; while read L; do A=$L; done <<< 2; RUN TP $A
A=1; echo 2 | while read L; do A=$L; done; RUN TP $A
A=1; while getopts "t:" O; do case $O in t) A=$OPTARG;; esac; done; RUN TP $A
A=1; f() { A=2; }; f; RUN TP $A
A=1; f() { local A=2; }; f; RUN TP $A
A=1; f() { A=2; return; A=4; }; f; RUN TP $A
A=1; function f { A=$1; }; f 2; RUN TP $A
f() { RUN "$@"; }; f TP 2
f() { RUN TP $1 WD ${2:-0.3}; }; f 2
f() { shift; RUN "$@"; }; f x TP 2
f() { echo 2; }; RUN TP $(f)
A=1; g() { A=2; }; f() { g; }; f; RUN TP $A
A=1; f() { eval "$1=2"; }; f A; RUN TP $A
A=1; f() { declare -g A=2; }; f; RUN TP $A
A=1; f() { local name=$1; export "$1=$2"; }; f A 2; RUN TP $A
A=1; f() { local -n ref=$1; ref=$2; }; f A 2; RUN TP $A
A=1; f() { printf -v "$1" '%s' "$2"; }; f A 2; RUN TP $A
A=1; f() { unset "$1"; }; f A; RUN TP ${A:-2}
A=1; f() { while IFS='=' read -r k v; do printf -v "$k" %s "$v"; done < env.sh; }; f; RUN TP $A
A=1; f() { export $(cat env.sh | xargs); }; f; RUN TP $A
A=1; f() { while [ $# -gt 0 ]; do declare -g "$1"; shift; done; }; f A=2; RUN TP $A
A=1; f() { (($1 = 2)); }; f A; RUN TP $A
A=1; f() { : $((${1} += 1)); }; f A; RUN TP $A
A=1; f() { let "$1=2"; }; f A; RUN TP $A
A=1; f() { mapfile -t "$1" <<< 2; }; f A; RUN TP $A
A=1; f() { getopts t: "$1" -t 2; }; f A; RUN WD 0.$A || RUN WD $A
A=1; f() { g "$@"; }; g() { read -r "$1" <<< 2; }; f A; RUN TP $A
A=1; for I in 1; do g A; done; g() { :; }; RUN TP $A
A=1; g() { read -r "$1" <<< 2; }; for I in A; do g $I; done; RUN TP $A
A=1; while read -r line; do export "$line"; done < env.sh; RUN TP $A
A=1; while IFS='=' read -r k v; do printf -v "$k" %s "$v"; done < env.sh; RUN TP $A
A=1; export $(cat env.sh | xargs); RUN TP $A
A=1; for v in A; do read -r "$v" <<< 2; done; RUN TP $A
A=1; for v in A; do unset $v; done; RUN TP ${A:-2}
A=1; declare -n R=A; read -r R <<< 2; RUN TP $A
A=1; declare -n R=A; for R in A; do R=2; done; RUN TP $A
A=2; f() { local B="$1"; export C="$B"; read -r -p "$B" D <<< 4; printf '%s' "$D"; }; f x; RUN TP $A
A=1; eval A=2; RUN TP $A
A=1; eval "A=2; B=0.3"; RUN TP $A WD $B
N=A; A=1; eval "$N=2"; RUN TP $A
C="RUN TP 2"; eval $C
C="RUN TP 2"; $C
C="RUN TP 2"; bash -c "$C"
A=2; export A; bash -c 'RUN TP $A'
A=2; bash -c 'RUN TP ${A:-4}'
set -- TP 2; RUN "$@"
set -- 2 4; shift; RUN TP $1
RUN TP 2 "$@"
RUN TP ${1:-2}
RUN TP 2 $EXTRA
RUN TP 2 $(echo WD 0.3)
RUN TP `echo 2`
RUN $(cat flags.txt)
RUN TP 2 $(< flags.txt)
A=$(cat flags.txt); RUN $A
A=($(cat flags.txt)); RUN "${A[@]}"
source env.sh; RUN TP $A
. ./env.sh; RUN TP $A WD ${B}
A=1; source <(echo A=2); RUN TP $A
A=1; [ -f env.sh ] && . env.sh; RUN TP $A
. ./args.sh 4; RUN TP $A
f() { . ./args.sh; }; f 4; RUN TP $A
f() { . ./args.sh 4; RUN TP $A WD 0.$1; }; f 3
cd deep; . ./env.sh; RUN TP $A
f() { cd deep; }; f; . ./env.sh; RUN TP $A
[ -d deep ] && cd deep; . ./env.sh; RUN TP $A
(cd deep); . ./env.sh; RUN TP $A
cat > made.sh <<EOF<NL>A=4<NL>EOF<NL>. ./made.sh; RUN TP $A
{ echo A=4; } > made.sh; . ./made.sh; RUN TP $A
echo A=4 | tee made.sh; . ./made.sh; RUN TP $A
if [ -z "$NONE" ]; then f() { RUN TP 2; }; else f() { RUN TP 4; }; fi; f
A=1; f() { A=2; }; if [ -n "$NONE" ]; then f() { A=4; }; fi; f; RUN TP $A
if [ $RANDOM = x ]; then f() { A=4; }; else f() { A=2; }; fi; f; RUN TP $A
A=1; B=$((A<<=1)); RUN TP $A
A=1; f() { : $((A<<=1)); }; f; RUN TP $A
A=1; B[A=2]=1; RUN TP $A
A=1; f() { B[A=2]=1; }; f; RUN TP $A
A=1; declare B[A=2]=1; RUN TP $A
A=1; B=2; RUN --data-path {$A,$B}
A=1; RUN WD 0.{"1",$A}
export A={1,2}; RUN TP $A
A=1; source "$(dirname "$0")/env.sh"; RUN TP $A
A='TP,2'; IFS=,; RUN $A
A=(TP 2); IFS=,; B="${A[*]}"; IFS=' '; RUN ${B/,/ }
IFS=,; A="TP,2"; set -- $A; unset IFS; RUN "$@"
A="TP	2"; RUN $A
A=$'TP\t2'; RUN $A
RUN TP $'\x32'
RUN TP {2,} WD 0.3
RUN TP 2 --moe-layer-freq ([0]*1+[1]*3) || true
A="--num-experts 4 --moe-layer-freq ([0]*1+[1]*3)"; RUN $A
RUN --data-path data_*
RUN --data-path "data_*"
RUN TP 2 # WD 0.3
RUN TP 2 > log.txt 2>&1
RUN TP 2 2>&1 | tee log.txt
RUN TP 2 < /dev/null &<NL>wait
cat > job.txt <<EOF<NL>RUN TP 4<NL>EOF<NL>RUN TP 2
A=1; cat <<EOF > /dev/null<NL>${A:=4} $((A=2))<NL>EOF<NL>RUN TP $A
A=2; exit_early() { exit 0; }; RUN TP $A; exit_early; RUN TP 4
RUN TP 2; exit; RUN TP 4
if [ -n "$N" ]; then exit 1; fi; A=2; RUN TP $A
set -euo pipefail; A=2; RUN TP $A
trap 'A=4' EXIT; A=2; RUN TP $A
A=1; alias x=y; RUN TP $A
shopt -s lastpipe; A=1; echo 2 | read A; RUN TP $A
A=1; command eval A=2; RUN TP $A
A=1; builtin printf -v A 2; RUN TP $A
A=1; D=export; $D A=2; RUN TP $A
A=1; \read A <<< 2; RUN TP $A
A=1; "let" A=2; RUN TP $A
A=1; B=${A:=2}${C:=4}; RUN TP $C
A=1; [[ ab =~ a(b) ]] && A=2; RUN TP $A
A=1; time A=2; RUN TP $A
A=1; ! A=2; RUN TP $A
A=2;B=0.3;RUN TP $A WD $B
exec RUN TP 2
env X=1 RUN TP 2
X=1 RUN TP 2
nohup RUN TP 2
echo TP 2 WD 0.3 | xargs RUN
xargs -a flags.txt RUN
echo /d/a | xargs -I {} RUN TP 2 --data-path {}
echo 2 | xargs -n1 -I% bash -c 'RUN TP %'
shopt -s expand_aliases<NL>alias go='RUN TP 2'<NL>go WD 0.3
shopt -s expand_aliases<NL>alias torchrun='torchrun pretrain_gpt.py WD 0.3'<NL>RUN TP 2
RUN ${A:-"TP 2"}
A=${A:-"TP 2"}; RUN $A
A=`echo \`echo 2\``; RUN TP $A
A=2; B=`dirname \`dirname $0\``; RUN TP $A
torchrun() { command torchrun "$@" TP 2; }; RUN
"""


def spelled(text: str) -> str:
    """Return a construct as a script."""
    words = {"<NL>": "\n", "RUN": RUN, "TP": TP, "WD": WD}
    for name, meant in words.items():
        text = text.replace(name, meant)
    return text + "\n"


SCRIPTS = [line for line in CONSTRUCTS.splitlines() if line]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write the scripts, the files that they read, and a driver that runs all of them."""
    out = tmp_path_factory.mktemp("scripts")
    (out / "env.sh").write_text("A=2\nB=0.3\n")
    (out / "args.sh").write_text("A=${1:-2}\n")
    (out / "made.sh").write_text("A=2\n")
    (out / "deep").mkdir()
    (out / "deep/env.sh").write_text("A=4\n")
    (out / "flags.txt").write_text(f"{TP} 2 --clip-grad 0.5\n")
    (out / "data_one").write_text("")
    for number, text in enumerate(SCRIPTS):
        (out / f"{number:03}.sh").write_text(spelled(text))
    (out / "all.sh").write_text(
        'for one in [0-9]*.sh; do echo "== $one"; NUMBER=$one bash ./$one < /dev/null; done\n'
    )
    return out


@pytest.fixture(scope="module")
def truth(folder: Path) -> dict[str, list[list[str]]]:
    """Return the words that bash passes to the program, by script: one list for each time that it
    is started.
    """
    own = folder / "own"
    own.mkdir()
    (own / "torchrun").write_text(
        '#!/bin/sh\nprintf "%s\\0" "$NUMBER" torchrun "$@" "" "" >> "$CALLS"\n'
    )
    (own / "torchrun").chmod(0o700)
    env = {"PATH": f"{own}:/usr/bin:/bin", "CALLS": str(folder / "calls"), "HOME": "/nowhere"}
    subprocess.run(
        ["bash", "all.sh"],
        cwd=folder,
        env=env,
        timeout=patient(30),
        stdin=subprocess.DEVNULL,
        capture_output=True,
    )
    (folder / "made.sh").write_text("A=2\n")
    out: dict[str, list[list[str]]] = {}
    for call in (folder / "calls").read_text().split("\0\0\0")[:-1]:
        number, *words = call.split("\0")
        out.setdefault(number, []).append(words)
    return out


def test_shell_table_has_enough_constructs(truth: dict[str, list[list[str]]]) -> None:
    assert len(SCRIPTS) >= 120
    assert len(truth) > len(SCRIPTS) - 6, "all but a few that bash refuses start the program"


def test_shell_table_reads_as_bash_or_reports(
    folder: Path, truth: dict[str, list[list[str]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    wrong = []
    known = 0
    for number, text in enumerate(SCRIPTS):
        name = f"{number:03}.sh"
        meant = truth.get(name, [])
        try:
            script = read_script((spelled(text), name), opener=open_neighbour)
            found = training_command(script, name)
        except Exception as error:
            if meant:
                wrong.append(f"{text}: {error}")
            continue
        if not meant:
            continue
        a, keys, left = read_flags(found.words, None)
        leave_open(a, keys, left)
        if found.doubt or WHOLE in left:
            continue
        true = [read_flags(words[words.index("pretrain_gpt.py") + 1 :], None)[1] for words in meant]
        keep = [
            {k for k in {**keys, **one} if keys.get(k) != one.get(k)} - left.keys() for one in true
        ]
        if all(keep):
            wrong.append(
                f"{text}: {min(keep, key=len)} are not as bash has them, and no gap is reported"
            )
        known += not left
    assert not wrong, "\n".join(wrong)
    assert known > 50, "plain scripts are read whole"


@pytest.mark.full
def test_shell_table_capture_equals_bash(
    folder: Path, truth: dict[str, list[list[str]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    calls, code, late, _ = recorded(["bash", "all.sh"], "", patient(120))
    assert (code, late) == (0, False)
    found: dict[str, list[list[str]]] = {}
    for call in calls:
        found.setdefault(call["env"]["NUMBER"], []).append(call["words"])
    assert found == truth
