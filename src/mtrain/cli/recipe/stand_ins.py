"""Stand-ins for launchers, interpreters and shells while `recipe import --capture` runs
a script.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import sys
from pathlib import Path

from mtrain import strict_json
from mtrain.recipes.megatron.programs import GPT, OTHER_WORDS, TRAINS
from mtrain.recipes.megatron.table import known_flags

RECORDED = (
    "torchrun",
    "python",
    "python3",
    "srun",
    "mpirun",
    "mpiexec",
    "deepspeed",
    "ray",
    "accelerate",
    "sbatch",
    "ssh",
    "pdsh",
    "docker",
    "singularity",
    "apptainer",
    "horovodrun",
)
"""Commands that train nothing under capture, besides interpreters by the name of their version."""
_VERSIONS = [f"python3.{minor}" for minor in range(8, 15)]
_PATHS = re.compile(
    rf"(?<![\w.])/[\w./+-]*/(?:{'|'.join(RECORDED)}|env|python3\.[0-9]+)(?![\w./-])"
)
_SITE = """import sys
sys.path.insert(0, FOLDER)
try:
    import recorder
    recorder.as_python_starts()
finally:
    sys.path[:] = [p for p in sys.path if not p.startswith(FOLDER)]
    own = sys.modules.pop("sitecustomize", None)
    try:
        import sitecustomize
    except ImportError:
        # Python looks for it there, and complains on standard error if it is missing
        sys.modules["sitecustomize"] = own
"""
# Before each command, the folders of the recorders come back to PATH and PYTHONPATH. A command that
# is given one of the two for itself, `PYTHONPATH=x nohup y`, gets a function of its name, once,
# which brings them back in there. The script sees no change: `$_` is passed through, no
# regular expression sets BASH_REMATCH, and nothing fails that `set -e` or `set -u` would end the
# script for.
# A script with a trap of its own for RETURN would meet it in every function under `set -T`, which
# is then left.
_BASH = r"""
mtrain_capture_keep() {
  case "${PATH-}" in
    BIN:*) ;;
    *) export PATH=BIN${PATH:+:$PATH} ;;
  esac
  case "${PYTHONPATH-}" in
    SITE | SITE:*) ;;
    *) export PYTHONPATH=SITE${PYTHONPATH:+:$PYTHONPATH} ;;
  esac
}
mtrain_capture_once() {
  case "$1" in
    exec | command) ;;
    *) if ! type -P "$1" > /dev/null || declare -F "$1" > /dev/null; then return 0; fi ;;
  esac
  mtrain_capture_defined+=("$1")
  local how=$1
  if [ "$1" = exec ]; then how="builtin exec"; fi
  eval "function $1 { unset -f $1; mtrain_capture_keep; $how \"\$@\"; }"
}
mtrain_capture_before() {
  local said=$BASH_COMMAND word options=$-
  mtrain_capture_keep
  for word in ${mtrain_capture_defined[@]+"${mtrain_capture_defined[@]}"}; do unset -f "$word"; done
  mtrain_capture_defined=()
  case "$said" in
    "trap "*RETURN*) set +T ;;
    "trap "*DEBUG*) eval "$mtrain_capture_trap" ;;
    PATH=*\ * | PYTHONPATH=*\ * | [A-Za-z_]*=*" PATH="*\ * | [A-Za-z_]*=*" PYTHONPATH="*\ *)
      set +u
      while [ -n "$said" ]; do
        word=${said%%[[:space:]]*}
        said=${said#"$word"}
        said=${said#[[:space:]]}
        case "$word" in
          "" | -* | *=* | *[!A-Za-z0-9_/.+\${}\"-]*) continue ;;
        esac
        case "$word" in
          *[\$\"]*) { eval "word=$word"; } 2> /dev/null || continue ;;
        esac
        word=${word%%[[:space:]]*}
        case "$word" in
          "" | *[!A-Za-z0-9_/.+-]*) ;;
          *) mtrain_capture_once "$word" ;;
        esac
      done
      case "$options" in *u*) set -u ;; esac
      ;;
  esac
  return 0
}
mtrain_capture_defined=()
mtrain_capture_trap='trap() {
  unset -f trap
  if [ "${1-}" = -- ]; then shift; fi
  builtin trap "$@" || return
  case "${1-}" in
    -p | -l) ;;
    DEBUG | - | "") builtin trap "mtrain_capture_before \"\$_\"" DEBUG ;;
    *) builtin trap "mtrain_capture_before \"\$_\"; $1" DEBUG ;;
  esac
}'
set -T
trap 'mtrain_capture_before "$_"' DEBUG
"""


def prepare(folder: Path, text: str) -> None:
    """Write what stands in: commands for PATH, functions for bash, and what Python loads as it
    starts.

    Args:
        folder: an empty one; the records come into it.
        text: that of the script, whose absolute paths of launchers are stood in for too.
    """
    recorder = folder / "recorder.py"
    shutil.copyfile(Path(__file__).with_name("recorder.py"), recorder)
    facts = {
        "flags": sorted(known_flags()),
        "gpt": GPT,
        "trains": sorted(TRAINS),
        "other": sorted(OTHER_WORDS),
        "python": sys.executable,
    }
    (folder / "facts.json").write_text(strict_json.dumps(facts))
    site = folder / "site"
    own = folder / "bin"
    site.mkdir()
    own.mkdir()
    (site / "sitecustomize.py").write_text(_SITE.replace("FOLDER", repr(str(folder))))
    run = f"{shlex.quote(sys.executable)} -IS {shlex.quote(str(recorder))}"
    lines = ['if [ -n "${MTRAIN_CAPTURE_BASH_ENV-}" ]; then . "$MTRAIN_CAPTURE_BASH_ENV"; fi']
    for name in dict.fromkeys((*RECORDED, *_VERSIONS, *_interpreters(), "env")):
        file = own / name
        file.write_text(f'#!/bin/sh\nexec {run} {name} "$@"\n')
        file.chmod(0o700)
        if "." not in name:
            lines.append(f'{name}() {{ {shlex.quote(str(file))} "$@"; }}')
    for path in sorted(set(_PATHS.findall(text))):
        lines.append(f'function {path} {{ {run} {path} "$@"; }}')
    bash = shutil.which("bash")
    for name in (
        ("sh", "dash") if bash is not None else ()
    ):  # they would read nothing of ours as they start
        (own / name).write_text(f'#!{bash}\nexec {bash} "$@"\n')
        (own / name).chmod(0o700)
        lines += [f'function {place}/{name} {{ {bash} "$@"; }}' for place in ("/bin", "/usr/bin")]
    lines.append(
        _BASH.replace("BIN", shlex.quote(str(own))).replace("SITE", shlex.quote(str(site)))
    )
    (folder / "bash_env").write_text("\n".join(lines) + "\n")


def environment(folder: Path) -> dict[str, str]:
    """Return the environment in which what `prepare` wrote stands in."""

    def before(name: str, value: object) -> str:
        return os.pathsep.join(filter(None, (str(value), os.environ.get(name))))

    return {
        **os.environ,
        "MTRAIN_CAPTURE": str(folder),
        "MTRAIN_CAPTURE_BASH_ENV": os.environ.get("BASH_ENV", ""),
        "BASH_ENV": str(folder / "bash_env"),
        "PATH": before("PATH", folder / "bin"),
        "PYTHONPATH": before("PYTHONPATH", folder / "site"),
    }


def for_bash(command: list[str], text: str) -> list[str]:
    """Return the command; where it is itself a script of a plain `sh`, which reads nothing of ours,
    with bash before it.
    """
    plain = re.match(r"#!\s*(/usr/bin/env\s+)?(\S*/)?(sh|dash)\s*\n", text)
    if plain and Path(command[0]).is_file() and shutil.which("bash"):
        return ["bash", *command]
    return command


def _interpreters() -> list[str]:
    """Return the names that have a version of the interpreters on PATH."""
    found = set[str]()
    for folder in os.get_exec_path():
        if os.path.isdir(folder):
            found |= {
                name
                for name in os.listdir(folder)
                if re.fullmatch(r"python[0-9]+(\.[0-9]+)?", name)
            }
    return sorted(found)
