"""Stands in for launchers and interpreters while `recipe import --capture` runs a script: records,
starts nothing.

It runs in any Python 3 by itself, as a command of the name that it stands in for, or as a Python
starts (`sitecustomize`). Its folder names the training programs, and takes the records.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile

ENCODE = json.JSONEncoder(allow_nan=False).encode
FOLDER = os.path.dirname(os.path.abspath(__file__))
# A stand-in of srun or mpirun goes on to the command that it would start, and passes its own
# words on in this variable: the record of that command begins with them.
AROUND = "MTRAIN_CAPTURE_AROUND"
SHELLS = ("bash", "sh", "zsh", "dash", "ksh")
ALWAYS = ("torchrun", "deepspeed", "accelerate")
AROUND_OTHERS = ("srun", "mpirun", "mpiexec", "horovodrun")
LAUNCHING = re.compile(r"torch\.distributed\.|deepspeed\b|accelerate\b")


def facts() -> dict:  # type: ignore[type-arg]
    """Read the facts of the capture: known flags, words of names, an interpreter that exists."""
    with open(os.path.join(FOLDER, "facts.json"), encoding="utf-8") as file:
        found: dict = json.load(file)  # type: ignore[type-arg]
    return found


def record(words: list[str]) -> None:
    """Add a line: the words after those of the launchers, the folder, the environment."""
    around = json.loads(os.environ.get(AROUND, "[]"))
    line = ENCODE({"words": [*around, *words], "cwd": os.getcwd(), "env": dict(os.environ)})
    # Several processes add lines at once: with O_APPEND none overwrites another.
    handle = os.open(os.path.join(FOLDER, "calls"), os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    os.write(handle, (line + "\n").encode("utf-8", "surrogateescape"))
    os.close(handle)


def keep() -> None:
    """Restore the stand-ins after a script has set its own environment."""
    os.environ["MTRAIN_CAPTURE"] = FOLDER
    os.environ["BASH_ENV"] = os.path.join(FOLDER, "bash_env")
    for name, folder in (("PATH", "bin"), ("PYTHONPATH", "site")):
        own = os.path.join(FOLDER, folder)
        folders = os.environ.get(name, "").split(os.pathsep)
        if folders[0] != own:
            os.environ[name] = os.pathsep.join([own, *(folders if folders != [""] else [])])


def is_python(word: str) -> bool:
    """Return whether a word is the name or the path of an interpreter."""
    return re.fullmatch(r"python[0-9.]*", os.path.basename(word)) is not None


def trains(arguments: list[str]) -> bool:
    """Return whether an interpreter would train, by the program's name and flags."""
    index = 0
    while (
        index < len(arguments)
        and arguments[index].startswith("-")
        and arguments[index] not in ("-m", "-")
    ):
        if re.match(r"-[A-Za-z]*c", arguments[index]):
            return False
        # -W and -X take the next word as their value.
        index += 2 if arguments[index] in ("-W", "-X") else 1
    if index >= len(arguments) or arguments[index] == "-":
        return False
    if arguments[index] == "-m":
        index += 1
        if index < len(arguments) and LAUNCHING.match(arguments[index]):
            return True
    program = arguments[index] if index < len(arguments) else ""
    rest = arguments[index + 1 :]
    if os.path.basename(program) in ALWAYS:
        return True
    known = facts()
    name = re.sub(r"\.py\Z", "", os.path.basename(program)).rpartition(".")[2].lower()
    words = set(re.split(r"[^a-z]+", name))
    if name in known["gpt"]:
        return True
    # Names such as preprocess_data.py or convert.py train nothing, whatever their flags.
    if words & set(known["other"]):
        return False
    flags = {word.partition("=")[0] for word in rest} & set(known["flags"])
    # A program of any name trains if it takes several flags of Megatron-LM.
    return bool(words & set(known["trains"])) or len(flags) >= 3


def run_real(name: str, arguments: list[str]) -> None:
    """Replace this process by the interpreter that would have run."""
    found = (real_one(one) for one in (name, "python3", "python"))
    if "/" in name and os.path.exists(name):
        real = name
    else:
        real = next(filter(None, found), None) or facts()["python"]
    os.execv(real, [real, *arguments])


def real_one(name: str) -> str | None:
    """Return the path of a command other than the recorders', or None."""
    own = os.path.realpath(os.path.join(FOLDER, "bin"))
    folders = [folder for folder in os.get_exec_path() if os.path.realpath(folder) != own]
    return shutil.which(name, path=os.pathsep.join(folders))


def stand_in(name: str, arguments: list[str]) -> None:
    """Act as a command of this name under capture."""
    base = os.path.basename(name)
    if is_python(name):
        if not trains(arguments):
            run_real(name, arguments)
        record([base, *arguments])
    elif base == "sbatch":
        submit(arguments)
    elif base == "env":
        with_environment(arguments)
    elif base in AROUND_OTHERS:
        place = inner_command(arguments)
        if place is None:
            record([base, *arguments])
            return
        around = [*json.loads(os.environ.get(AROUND, "[]")), base, *arguments[:place]]
        os.environ[AROUND] = ENCODE(around)
        go_on(arguments[place:])
    else:
        record([base, *arguments])


def go_on(words: list[str]) -> None:
    """Record a command, or becomes it."""
    if is_python(words[0]) or os.path.basename(words[0]) in (
        *ALWAYS,
        *AROUND_OTHERS,
        "env",
        "sbatch",
    ):
        stand_in(words[0], words[1:])
    else:
        os.execvp(words[0], words)


def with_environment(words: list[str]) -> None:
    """Continue with the command of `env`, in its environment with the stand-ins restored."""
    around = {
        name: value for name, value in os.environ.items() if name.startswith("MTRAIN_CAPTURE")
    }
    asked = list(words)
    folder = ""
    while words and (words[0].startswith("-") or "=" in words[0]):
        word, *words = words
        option, equals, value = word.partition("=")
        if word in ("-i", "-", "--ignore-environment"):
            os.environ.clear()
        elif option in ("-u", "--unset", "-C", "--chdir", "-S", "--split-string"):
            if not equals and words:
                value, *words = words
            if option in ("-u", "--unset"):
                os.environ.pop(value, None)
            elif option in ("-C", "--chdir"):
                folder = value
            else:
                words = [*shlex.split(value), *words]
        elif not word.startswith("-"):
            os.environ[option] = value
    # `env -i` would clear what the recorders need, and the script would start for real.
    os.environ.update(around)
    keep()
    if not words:
        real = real_one("env") or "/usr/bin/env"
        os.execv(real, [real, *asked])
    if folder:
        os.chdir(folder)
    go_on(words)


def inner_command(arguments: list[str]) -> int | None:
    """Return the index of the interpreter, shell, script or launcher that a launcher starts."""
    for index, word in enumerate(arguments):
        base = os.path.basename(word)
        if is_python(word) or base in (*SHELLS, *ALWAYS, *AROUND_OTHERS):
            return index
        if base in ("env", "numactl", "nohup", "nsys", "timeout", "time"):
            return index
        if word.endswith(".sh") and os.access(word, os.X_OK):
            return index
    return None


def submit(arguments: list[str]) -> None:
    """Run a batch script, its directives as words of the launcher, and answer like `sbatch`."""
    wrapped = next((i for i, word in enumerate(arguments) if word.startswith("--wrap")), None)
    script = next(
        (
            i
            for i, word in enumerate(arguments)
            if not word.startswith("-") and os.path.isfile(word)
        ),
        None,
    )
    rest: list[str] = []
    if wrapped is not None:
        _, equals, text = arguments[wrapped].partition("=")
        text = text if equals else arguments[wrapped + 1]
    elif script is not None:
        with open(arguments[script], encoding="utf-8", errors="replace") as file:
            text = file.read()
        rest = arguments[script + 1 :]
    else:
        text = sys.stdin.read()
    options = arguments[: wrapped if wrapped is not None else script]
    asked = [
        word for line in re.findall(r"^#SBATCH\s+(.*)", text, re.MULTILINE) for word in line.split()
    ]
    around = [*json.loads(os.environ.get(AROUND, "[]")), "sbatch", *asked, *options]
    env = {**os.environ, AROUND: ENCODE(around), **of_job(around)}
    if script is not None and wrapped is None:
        subprocess.call(["bash", arguments[script], *rest], env=env, stdout=sys.stderr)
    else:
        with tempfile.NamedTemporaryFile("w", dir=FOLDER, suffix=".sh", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            subprocess.call(
                ["bash", file.name], env=env, stdout=sys.stderr, stdin=subprocess.DEVNULL
            )
    # Scripts read the number of the job from this line.
    os.write(1, b"1\n" if "--parsable" in arguments else b"Submitted batch job 1\n")


def of_job(words: list[str]) -> dict[str, str]:
    """Return the SLURM variables that these words set for a job."""
    text = " ".join(words)
    out = {"SLURM_JOB_ID": "1", "SLURM_PROCID": "0", "SLURM_NODEID": "0", "SLURM_LOCALID": "0"}
    for pattern, names in (
        (r"(?:--nodes[= ]|-N ?)([0-9]+)", ("SLURM_NNODES", "SLURM_JOB_NUM_NODES")),
        (r"--ntasks-per-node[= ]([0-9]+)", ("SLURM_NTASKS_PER_NODE",)),
        (
            r"--(?:gpus-per-node|gres)[= ](?:gpu:)?(?:[\w-]+:)?([0-9]+)",
            ("SLURM_GPUS_PER_NODE", "SLURM_GPUS_ON_NODE"),
        ),
    ):
        found = re.findall(pattern, text)
        out.update(dict.fromkeys(names, found[-1]) if found else {})
    return out


def as_python_starts() -> None:
    """End an interpreter that would train, whatever path it was started by; any other goes on."""
    words = list(getattr(sys, "orig_argv", None) or [])
    if not words and os.path.exists("/proc/self/cmdline"):
        with open("/proc/self/cmdline", "rb") as file:
            words = [os.fsdecode(word) for word in file.read().split(b"\0")[:-1]]
    if words and trains(words[1:]):
        program = os.path.basename(words[1])
        record([program, *words[2:]] if program in ALWAYS else ["python", *words[1:]])
        # Nothing of the program may run, not even its exit handlers.
        os._exit(0)


if __name__ == "__main__":
    keep()
    stand_in(sys.argv[1], sys.argv[2:])
