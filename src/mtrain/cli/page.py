"""What a page of --help is, and the lines that several of them have."""

from __future__ import annotations

from dataclasses import dataclass

from mtrain.config.compose.paths import program

OVERRIDES = "[GROUP=CHOICE ...] [KEY=VALUE ...]"
JSON = ("--json", "print JSON for a machine")
MANY = ("-m, --multirun", "one for each of KEY=A,B or KEY=range(1,4)")
DEBUG = ("--debug", "print the traceback of an error")
HELP = ("-h, --help", "print this page")
SETTINGS = (
    ("GROUP=CHOICE", "a file under conf/, as in model=llama3_8b; `choices GROUP` lists them"),
    ("parallel=LAYOUT", "a layout in one word: tp4pp4, tp8pp12cp2vpp4ep8, tp2pp2dp2, tp4sp"),
    ("KEY=VALUE", "one key, as in optim.lr=3e-4; `explain KEY` says what it means"),
    ("recipe=NAME", "a recipe under recipes/, or the path of one"),
    ("run=FILE", "a resolved file, such as the run.yaml of a run folder"),
)
RUN = (("RUN", "the folder of a run, or one of its checkpoints"),)
RECIPE = (("NAME", "a recipe under recipes/, the path of one, a lock, or the folder of a run"),)
OUT = ("-o FILE", "write there, and never over a file")
Rows = tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Page:
    """What a verb's page says; commands are without the program's name."""

    usage: str
    text: str
    arguments: Rows = ()
    flags: Rows = ()
    examples: Rows = ()

    def render(self) -> str:
        """Return the page as it is printed."""
        flags = (*self.flags, DEBUG, HELP)
        out = [f"usage: {program()} {self.usage}".rstrip(), "", self.text]
        for title, rows in (("arguments", self.arguments), ("flags", flags)):
            width = max((len(name) for name, _ in rows), default=0)
            out += (
                ["", title, *(f"  {name:<{width}}  {text}" for name, text in rows)] if rows else []
            )
        if self.examples:
            out += ["", "examples"]
            out += [
                line
                for words, text in self.examples
                for line in (f"  {command(words)}", f"      {text}")
            ]
        return "\n".join(out)


def command(words: str) -> str:
    """Return a command as a user types it here."""
    return program() if words == "train" else f"{program()} {words}"
