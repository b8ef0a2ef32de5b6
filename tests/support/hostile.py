"""Hostile recipes: texts that try to do more than configure."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

from mtrain.config.schema.run import GROUPS

TARGETS = (
    "os.system",
    "subprocess.run",
    "subprocess.Popen",
    "builtins.eval",
    "builtins.exec",
    "builtins.open",
    "runpy.run_path",
    "importlib.import_module",
    "pickle.load",
    "torch.load",
    "numpy.load",
    "shutil.copy",
    "shutil.rmtree",
    "timeit.timeit",
    "cProfile.run",
    "logging.config.dictConfig",
    "ctypes.CDLL",
    "torch.utils.cpp_extension.load_inline",
    "pty.spawn",
    "transformers.AutoModel.from_pretrained",
    "webbrowser.open",
    "urllib.request.urlopen",
    "socket.create_connection",
    "code.interact",
    "pdb.run",
    "os.execv",
    "os.remove",
    "sys.exit",
    "tests.support.fuzz.main",
    "mtrain.cli.main.main",
)
RESERVED = (
    "_target_",
    "_partial_",
    "_args_",
    "_recursive_",
    "_convert_",
    "_name_",
    "_call_",
    "__class__",
    "_self_",
)
TAGS = (
    "!!python/object/apply:os.system ['id']",
    "!!python/object/new:os.system ['id']",
    "!!python/name:os.system ''",
    "!!python/module:os ''",
    "!!python/object:os.system {}",
    "!!python/tuple [1]",
    "!!binary aWQ=",
    "!!set {a, b}",
    "!!omap [a: 1]",
    "!!timestamp 2001-01-01",
    "!!python/str x",
    "!include /etc/passwd",
    "!env CANARY",
    "!<tag:x> y",
)
RESOLVERS = (
    "oc.env:CANARY",
    "oc.env:CANARY,x",
    "oc.decode:'${oc.env:CANARY}'",
    "oc.create:{a: 1}",
    "oc.select:optim.lr",
    "oc.dict.keys:optim",
    "oc.dict.values:optim",
    "oc.deprecated:optim.lr",
    "hydra:runtime.cwd",
    "hydra:job.name",
    "env:X",
    "now:%Y",
    "python_version:",
    "eval:'1+1'",
    "oc.env:${x}",
    "file:/etc/passwd",
    "shell:id",
    ":x",
    "..optim.lr",
    "a[0]",
)
PATHS = (
    "/etc/passwd",
    "../../../etc/passwd",
    "~root/.ssh/id_rsa",
    "file:///etc/passwd",
    "http://example.invalid/x.yaml",
    "/proc/self/environ",
    "/dev/stdin",
    "/dev/zero",
    "\\\\host\\share",
    "recipes/../../x",
    "pkg://hydra.conf",
    "/dev/tcp/h/1",
)
WORDS = (
    "$(touch x)",
    "`touch x`",
    "; touch x",
    "| tee x",
    "&& touch x",
    "> x",
    "$IFS",
    "${HOME}",
    "'; touch x; '",
    '"; touch x',
    "a\nb",
    "--flag",
    "-rf /",
    "%s%s%n",
    "{0.__class__}",
    "{{7*7}}",
    "<script>x</script>",
    "\x1b[2J",
    "a\x00b",
    "%00",
    "\r\nx",
)
HYDRA = (
    "hydra: {run: {dir: /tmp/x}}",
    "hydra: {searchpath: ['file:///tmp']}",
    "hydra: {sweep: {dir: x}}",
    "hydra: {launcher: {_target_: os.system}}",
    "hydra: {callbacks: {x: {_target_: os.system}}}",
    "hydra: null",
    "hydra: {job_logging: {version: 1}}",
    "hydra: {job: {chdir: true}}",
    "defaults: [{'override /hydra/launcher': joblib}]",
    "defaults: [{'/hydra': x}]",
    "defaults: [/etc/passwd]",
    "defaults: [{'model@_global_': x}]",
    "defaults: [{'../x': y}]",
    "defaults: [{'override /model': '../../etc/passwd'}]",
    "defaults: [{'optional model': x}]",
    "defaults: [_self_, x]",
)


@dataclass(frozen=True)
class Attack:
    """A command line and the recipe that it names."""

    words: tuple[str, ...]
    data: bytes = b""
    must_fail: bool = True
    """True if the input is an attack; False if it is only odd data, which may be a valid value."""


def hostile(count: int, seed: int) -> Iterator[Attack]:
    """Return `count` attacks of every kind, in an order that follows `seed`."""
    rng = random.Random(seed)
    found = [*_in_files(), *_on_command_lines()]
    rng.shuffle(found)
    for index in range(count):
        yield found[index % len(found)]


def kinds() -> int:
    """Return the number of attacks."""
    return len([*_in_files(), *_on_command_lines()])


def _file(text: str, *, must_fail: bool = True, base: str = "recipe") -> Attack:
    return Attack((f"{base}={{file}}",), text.encode("utf-8", "surrogatepass"), must_fail)


def _in_files() -> Iterator[Attack]:
    sections = ("", "optim", "model", "model.moe", "trainer", "parallel.recompute")
    for (index, target), reserved in product(enumerate(TARGETS), RESERVED[:2]):
        yield _file(
            _nested(sections[index % len(sections)], f"{reserved}: {target}"),
            base=("recipe", "run")[index % 2],
        )
    for section, reserved in product(sections, RESERVED[2:]):
        yield _file(_nested(section, f"{reserved}: [1]"))
    for section, tag in product(("optim.lr", "model.name", "data.path", "recipe.title"), TAGS):
        yield _file(_nested(section.rpartition(".")[0], f"{section.rpartition('.')[2]}: {tag}"))
    for key, resolver in product(
        ("optim.lr", "data.path", "log.name", "trainer.sample_prompt"), RESOLVERS
    ):
        yield _file(_nested(key.rpartition(".")[0], f'{key.rpartition(".")[2]}: "${{{resolver}}}"'))
    for line, base in product(HYDRA, ("recipe", "run")):
        yield _file(f"optim: {{lr: 1e-3}}\n{line}\n", base=base)
    for word in WORDS:
        quoted = "".join(f"\\x{ord(c):02x}" for c in word)
        yield _file(
            f'trainer:\n  sample_prompt: "{quoted}"\nrecipe:\n  title: "{quoted}"\n',
            must_fail=False,
        )
        yield _file(f'log:\n  name: "{quoted}"\n')
    for path in PATHS:
        yield _file(f"data:\n  path: '{path}'\n", must_fail=False)
        yield _file(f"checkpoint:\n  resume: '{path}'\n", must_fail=False)
        yield _file(f"defaults:\n  - override /model: '{path}'\n")


def _on_command_lines() -> Iterator[Attack]:
    for path, base in product(PATHS, ("recipe", "run")):
        yield Attack((f"{base}={path}",))
    for path in PATHS:
        yield Attack((f"model={path}",))
    for index, (resolver, key) in enumerate(product(RESOLVERS, ("optim.lr", "data.path"))):
        yield Attack((f"{key}=${{{resolver}}}", f"trainer.seed={index}"))
    for reserved, key in product(RESERVED, ("optim", "model.moe", "")):
        yield Attack((f"{key}.{reserved}=os.system" if key else f"{reserved}=os.system",))
    for word in WORDS:
        yield Attack((f"log.name={word}",))
        yield Attack((f"{word}=1",))
        yield Attack((word,))
    yield from (Attack((f"{group}={{_target_: os.system}}",)) for group in GROUPS)
    yield from (
        Attack((f"hydra.{key}=x",))
        for key in ("run.dir", "searchpath", "launcher", "callbacks.x._target_")
    )
    yield from (
        Attack((f"{sign}{group}=1",)) for sign in ("+", "++", "+++", "+~") for group in GROUPS
    )
    yield from (
        Attack((f"{sign}hydra.{key}=1",))
        for sign in ("+", "++", "~")
        for key in ("run.dir", "searchpath")
    )


def _nested(section: str, line: str) -> str:
    """Return YAML with a line inside a section, next to a valid key."""
    out = ""
    depth = 0
    for name in section.split(".") if section else ():
        out += f"{'  ' * depth}{name}:\n"
        depth += 1
    return out + f"{'  ' * depth}{line}\n"
