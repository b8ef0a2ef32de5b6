"""A static reader of shell scripts: it runs nothing, and after a statement that it cannot follow,
values are unknown.

It follows assignments, arrays, `+=`, the script's own variables, defaults, and neighbouring files
that are sourced. A variable that any other statement, a branch or a loop may set is a gap from
there on.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import takewhile

from mtrain.errors import ConfigError
from mtrain.recipes.shell.effects import DECLARING, NAMES, SETTING, Effects, either_function
from mtrain.recipes.shell.expansion import State
from mtrain.recipes.shell.gaps import Gap, Unread, Value, Word, pieces_of, shown, word_of
from mtrain.recipes.shell.statements import (
    Branches,
    Command,
    Function,
    Loop,
    Node,
    assignment,
    parse_script,
)

MAX_CALLS = 8
_WRITING = ("tee", "cp", "mv", "ln", "sed", "perl", "install", "rsync", "wget", "curl")
"""Commands that may write files named by their words."""
_HARMLESS = frozenset(
    re.findall(
        r"\S+",
        """
        echo [ [[ test : true false cd pushd popd pwd printf shopt type ulimit umask kill jobs
        """,
    )
)
_OWN_FOLDER = re.compile(r"\$0|\bBASH_SOURCE\b|\$\{0%")


@dataclass
class Call:
    """One command of a script, with its words expanded as far as they are known."""

    words: list[Word]
    where: str
    """`file:line`."""
    conditional: bool = False
    """True if it runs only under a condition, in a loop, or in a function that nothing calls."""


@dataclass
class Script:
    """The commands and variables of a script, read without running it."""

    commands: list[Call] = field(default_factory=list)
    variables: dict[str, list[Word]] = field(default_factory=dict)
    """Every variable's last value; a plain one has one item."""
    secrets: dict[str, list[Word]] = field(default_factory=dict)
    """Every value that variables with the name of a secret have had."""
    notes: list[str] = field(default_factory=list)
    """Assumptions, in sentences."""


Opener = Callable[[str, str], tuple[str, str] | None]
"""Reads a sourced file, by its path and the script's name; returns its text and name."""


def read_script(*texts: tuple[str, str], opener: Opener | None = None) -> Script:
    """Read scripts, each a text with its name, as if the later ones had sourced the earlier.

    Args:
        opener: reads neighbouring files that they source; without it, no file is read.

    Raises:
        ConfigError: a quote, bracket or statement does not close, or a text expands without bounds.
    """
    reader = _Reader(opener, {os.path.basename(source) for _, source in texts[:-1]})
    for text, source in texts:
        reader.read(text, source)
    reader.never_called()
    return reader.result()


def read_calls(calls: Sequence[tuple[Sequence[str], str]]) -> Script:
    """Return a script of command lines that are known word by word, each with its place."""
    reader = _Reader(None, set())
    for words, where in calls:
        first = len(reader.script.commands)
        reader.keep(list(words), Command([], 0, ""))
        for command in reader.script.commands[first:]:
            command.where = where
    return reader.result()


class _Reader(Effects):
    """A reader that follows a script statement by statement."""

    def __init__(self, opener: Opener | None, given: set[str]) -> None:
        super().__init__()
        self.script = Script()
        self.opener = opener
        self.given = given
        """Names of files that were read before the script."""
        self.calls: list[str] = []
        """Functions that were called, and files that were sourced, and have not ended."""
        self.called: set[str] = set()
        self.conditional = False
        self.sourced: dict[str, str] = {}
        self.lastpipe = False
        self.written: set[str] = set()
        """Names of files that the script may have written."""
        self.aliases: set[str] = set()
        """Commands that `alias` may have replaced."""

    def read(self, text: str, source: str) -> None:
        """Follow a whole text."""
        before = self.source
        self.source = source
        self.follow(parse_script(text, source))
        self.source = before
        self.state.ended = False
        # later files are read as if they had sourced this one
        self.kept = set(self.state.variables)

    def result(self) -> Script:
        """Return the script as it was read."""
        for name, held in self.state.variables.items():
            items = [(held,)] if isinstance(held, Gap) else held
            self.script.variables[name] = [word_of(item) for item in items]
        self.script.secrets = self.secrets
        notes = self.script.notes
        if self.defaults:
            names = ", ".join(f"${name} ({where})" for name, where in self.defaults.items())
            notes.append(
                f"the defaults are taken of variables that the environment may set: {names}"
            )
        if self.homes:
            notes.append(
                f"~ is the home folder of whoever runs it: {', '.join(sorted(self.homes))}"
            )
        notes += [f"{where}: {name}" for where, name in self.sourced.items()]
        return self.script

    def never_called(self) -> None:
        """Read the functions that nothing calls, because another script may call them."""
        for name, (source, function) in list(self.functions.items()):
            if name not in self.called:
                self.source = source
                # its commands may train, with arguments that only a caller knows
                unknown = self.gap("$@", "is what a function is called with that nothing calls")
                self.in_subshell(function.body, unknown, conditional=True)

    def follow(self, nodes: Sequence[Node]) -> None:
        """Follow statements in order, up to one that ends them."""
        for node in nodes:
            if self.state.ended:
                return
            self.line = node.line
            if isinstance(node, Command):
                self.command(node)
            elif isinstance(node, Branches):
                self.branches(node)
            elif isinstance(node, Loop):
                self.loop(node)
            elif isinstance(node, Function):
                self.functions[node.name] = self.source, node
            elif node.subshell:
                self.in_subshell(node.body)
                # with `shopt -s lastpipe`, the last part of a pipeline sets variables of the script
                if self.lastpipe:
                    self.forget_set((), node.body, f"is set in a pipeline (line {node.line})")
            else:
                self.follow(node.body)

    def in_subshell(
        self,
        nodes: Sequence[Node],
        arguments: list[Value] | Gap | None = None,
        *,
        conditional: bool = False,
    ) -> State:
        """Follow statements with a copy of the variables, and return that copy."""
        self.spend(len(self.state.variables))
        before = self.state
        self.state = self.state.copy()
        outer = self.conditional
        line = self.line
        self.conditional = outer or conditional
        if arguments is not None:
            self.state.arguments = arguments
            self.state.called = isinstance(arguments, list)
        self.follow(nodes)
        after = self.state
        self.state = before
        self.conditional = outer
        self.line = line
        return after

    def branches(self, node: Branches) -> None:
        """Follow each body from the same state; different ends make values unknown."""
        self.follow(node.first)
        self.line = node.line
        why = f"is set under a condition: {node.text[:60]}"
        ends = list[State]()
        defined = list[dict[str, tuple[str, Function]]]()
        functions = self.functions
        for body in node.bodies:
            self.spend(len(functions))
            self.functions = dict(functions)
            ends.append(self.in_subshell(body, conditional=not node.expected))
            defined.append(self.functions)
        if not node.whole:
            # without an else, the functions from before may remain
            defined.append(functions)
        self.functions = either_function(node, defined)
        # a branch that exits has no part in the values that follow
        ends = [end for end in ends if not end.ended]
        if not node.whole:
            ends.append(self.state.copy())
        if not ends:
            self.state.ended = True
            return
        merged = ends[0].copy()
        merged.splits = all(end.splits for end in ends)
        merged.moved = any(end.moved for end in ends)
        if any(end.arguments != merged.arguments for end in ends):
            merged.arguments = self.gap("$@", why)
        for name in dict.fromkeys(name for end in ends for name in end.variables):
            choices = [end.variables.get(name) for end in ends]
            if any(one != choices[0] for one in choices):
                merged.variables[name] = self.either(name, choices, why)
                # merging branches takes time that no expansion counts
                self.spend(100)
        self.state = merged
        lost = next((end.lost for end in ends if end.lost), None)
        if lost is not None:
            self.forget_all(lost.why)

    def loop(self, node: Loop) -> None:
        """Forget the variables that the loop sets, and read its commands once."""
        # forgotten first: a second round sees what the first has set
        self.forget_set(node.names, node.body, f"is set in a loop: {node.text[:60]}")
        self.lose(self.in_subshell(node.body, conditional=True))

    def lose(self, after: State) -> None:
        """Forget every variable that statements in a subshell may have set, and the folder."""
        self.state.moved = self.state.moved or after.moved
        if after.lost is not None and after.lost != self.state.lost:
            self.forget_all(after.lost.why)

    def command(self, node: Command) -> None:
        """Follow assignments, and the effects of a command on variables."""
        self.written |= {
            os.path.basename(shown(word_of(self.joined(raw.parts)))) for raw in node.writes
        }
        raws = list(node.words)
        count = len(list(takewhile(assignment, raws)))
        if count == len(raws):
            for raw in raws:
                self.assign(raw)
            return
        given = raws[:count]
        raws = raws[count:]
        functions = self.functions
        while (
            len(raws) > 1
            # `command NAME` passes over functions of that name
            and raws[0].plain in ("command", "builtin")
            and (raws[1].plain or "-")[0] != "-"
        ):
            raws = raws[1:]
            functions = {}
        if raws[0].plain in DECLARING:
            self.declare(raws[0].plain, raws[1:], node)
            return
        words = [word for raw in raws for word in self.expand(raw)]
        first = words[0] if words else ""
        # assignments before a function or a file may outlive the call
        if isinstance(first, str) and (first in functions or first in ("eval", "source", ".")):
            self.forget(
                (m[1] for m in map(assignment, given) if m),
                f"is set for {first} (line {node.line})",
            )
        if first in self.aliases and raws[0].plain:
            meant = Unread((self.gap(first, "is an alias"),))
            self.keep([meant, *words, meant], node)
        elif isinstance(first, Unread):
            self.keep(words, node)
            self.forget_all(f"may be set by {first.text[:60]} (line {node.line})")
        elif first in functions:
            self.call(first, words[1:])
        elif words and not self.builtin(first, words, node):
            if first in _WRITING:
                self.written |= {os.path.basename(shown(word)) for word in words[1:]}
            self.keep(words, node)

    def builtin(self, name: str, words: list[Word], node: Command) -> bool:
        """Follow a command of the shell itself; return False for any other."""
        why = f"is set by {node.text[:60]} (line {node.line})"
        arguments = list(map(shown, words[1:]))
        if name in ("source", "."):
            self.source_file(words[1:], node)
        elif name == "eval":
            self.evaluate(words[1:], node)
        elif name in ("cd", "pushd", "popd"):
            self.state.moved = self.state.moved or not (
                # `cd "$(dirname "$0")"` stays with the script and its neighbours
                words[1:] and _OWN_FOLDER.search(arguments[-1])
            )
        elif name in ("set", "shift"):
            self.set_arguments(name, arguments, why)
        elif name in ("exit", "return", "exec"):
            # exec with a command never returns; without one it only redirects
            if name == "exec" and arguments:
                self.keep(words[1:], node)
            self.state.ended = name != "exec" or bool(arguments)
        elif name in SETTING or name in DECLARING:
            # it prints, and sets nothing
            if name == "printf" and "-v" not in arguments:
                return True
            self.forget([*NAMES.findall(" ".join(arguments)), "REPLY", "MAPFILE"], why)
            unsure = any(isinstance(word, Unread) for word in words[1:])
            if unsure and name not in ("wait", "trap") and not node.text.startswith("(("):
                self.forget_all(why)
        elif name in ("alias", "enable") or (
            name == "shopt" and not {"lastpipe", "expand_aliases"}.isdisjoint(arguments)
        ):
            self.aliases |= {text.partition("=")[0] for text in arguments if name == "alias"}
            self.forget_all(why)
            # shopt may have turned it on
            self.lastpipe = True
        elif name in ("command", "builtin") and arguments[:1] not in (["-v"], ["-V"]):
            self.forget_all(why)
        else:
            return name in _HARMLESS
        return True

    def call(self, name: str, words: list[Word]) -> None:
        """Read the commands of a called function, and forget what it may set."""
        # functions that call each other twice take exponential time
        self.spend(1000)
        self.called.add(name)
        source, function = self.functions[name]
        kept = self.source
        line = self.line
        if name not in self.calls and len(self.calls) < MAX_CALLS:
            self.source = source
            self.calls.append(name)
            after = self.in_subshell(function.body, list(map(pieces_of, words)))
            self.calls.pop()
            self.source = kept
            self.line = line
            self.lose(after)
        self.forget_set((), function.body, f"is set by {name} (line {line})")

    def source_file(self, words: Sequence[Word], node: Command) -> None:
        """Read a neighbouring file in place; any other file may set any variable."""
        word = words[0] if words else ""
        path = shown(word)
        if os.path.basename(path) in self.given:
            return
        if isinstance(word, Unread):
            # `source "$(dirname "$0")/common.sh"` names a neighbour
            folder = (
                len(word.gaps) == 1 and not word.start and _OWN_FOLDER.search(word.gaps[0].text)
            )
            if folder:
                path = "".join(p for p in word.pieces[1:] if isinstance(p, str)).lstrip("/")
            else:
                path = ""
            elsewhere = False
        else:
            elsewhere = self.state.moved and not os.path.isabs(path)
        # the script overwrites the present file
        made = os.path.basename(path) in self.written
        if path and not elsewhere and not made and len(self.calls) < MAX_CALLS:
            reads = self.opener
        else:
            reads = None
        opened = reads(path, self.source) if reads else None
        if opened is None:
            why = ""
            if made:
                why = ", which the script writes,"
            elif elsewhere:
                why = ", which is in another folder by cd,"
            note = (
                f"{shown(word)}{why} is not read, and may set any variable: give it before this"
                " file"
            )
            self.sourced[self.where] = note
            self.forget_all(f"may be set by {shown(word)}, which is not read (line {node.line})")
            return
        text, name = opened
        self.sourced[self.where] = f"{name} is read in place"
        kept = self.source
        line = self.line
        self.calls.append(name)
        self.source = name
        arguments = self.state.arguments
        called = self.state.called
        if words[1:]:
            self.state.arguments = list(map(pieces_of, words[1:]))
            self.state.called = True
        self.follow(parse_script(text, name))
        if words[1:]:
            self.state.arguments = arguments
            self.state.called = called
        self.source = kept
        self.line = line
        # `return` in a sourced file ends only that file
        self.state.ended = False
        self.calls.pop()

    def evaluate(self, words: Sequence[Word], node: Command) -> None:
        """Follow the text of `eval`; a text with gaps may set any variable."""
        nodes = self.parsed(words)
        if nodes is not None:
            self.follow(nodes)
        if nodes is None or any(isinstance(word, Unread) for word in words):
            self.forget_all(f"may be set by eval (line {node.line})")

    def parsed(self, words: Sequence[Word]) -> list[Node] | None:
        """Return the statements of words, with a variable for each gap; None if unparsable."""
        text = " ".join(
            "".join(self.stand_in(p) if isinstance(p, Gap) else p for p in pieces_of(word))
            for word in words
        )
        self.spend(100 + len(text))
        try:
            return parse_script(text, self.source, self.line)
        except ConfigError:
            return None

    def keep(self, words: list[Word], node: Command) -> None:
        """Keep a command that is no part of the shell, or the shell commands that it starts."""
        words = with_input(
            words, self.gap("what xargs or parallel reads", "is known only to a run")
        )
        inner = inner_text(words)
        if inner is None and node.stdin is not None and shown(words[0]) in (*SHELLS, "sbatch"):
            # `bash <<EOF` and `sbatch <<EOF` run the text
            inner = words, [word_of(self.joined(node.stdin.parts))]
        first = len(self.script.commands)
        if inner is not None and len(self.calls) < MAX_CALLS:
            before = self.state
            own = self.gap("$@", "is what a shell is started with")
            # a new shell sees exported variables, which are not followed
            self.state = State(arguments=own, lost=own)
            self.calls.append("sh -c")
            self.follow(self.parsed(inner[1]) or [])
            self.calls.pop()
            self.state = before
        started = self.script.commands[first:]
        if not started:
            self.script.commands.append(Call(words, self.where, self.conditional))
        launcher = inner[0] if inner is not None else []
        for command in started:
            command.words = [*launcher, *command.words]


SHELLS = ("bash", "sh", "zsh", "dash", "ksh")


def inner_text(words: list[Word]) -> tuple[list[Word], list[Word]] | None:
    """Split `srun bash -c TEXT` or `sbatch --wrap=TEXT` into the first words and the text."""
    for index, word in enumerate(words):
        if os.path.basename(shown(word)) in SHELLS:
            # a -c further on belongs to the program that the shell starts
            for place in range(index + 1, min(index + 6, len(words) - 1)):
                option = shown(words[place])
                if re.fullmatch("-[a-z]*c", option):
                    return words[:index], words[place + 1 : place + 2]
                if not option.startswith("-"):
                    break
        text = shown(word)
        # the output of a command, as in $(python3 blend.py --part train), is a gap, and no
        # command line of this script
        known = " ".join(piece for piece in pieces_of(word) if isinstance(piece, str))
        if (
            # ssh and similar programs take a whole command line as one word
            re.search(r"\s", known)
            and ".py" in known
            and " --" in known
            and not known.startswith("--")
        ):
            return words[:index], [word]
        if text.startswith("--wrap"):
            if text == "--wrap":
                return words[:index], words[index + 1 : index + 2]
            return words[:index], [
                word[7:] if isinstance(word, str) else word_of((word.start[7:], *word.pieces[1:]))
            ]
    return None


def with_input(words: list[Word], gap: Gap) -> list[Word]:
    """Return the words of a command; for `xargs` and `parallel`, a gap replaces the words that they
    read.

    `parallel` also reads the words after `:::`.
    """
    names = [os.path.basename(shown(word)) for word in words]
    place = next(
        (
            i
            for i, name in enumerate(names)
            if name in ("xargs", "parallel") or name.endswith(".py")
        ),
        None,
    )
    if place is None or names[place].endswith(".py"):
        return words
    mark = "{}" if names[place] == "parallel" else _mark(names[place + 1 :])
    command = list(takewhile(lambda word: not shown(word).startswith(":::"), words[place + 1 :]))
    filled = [_without(word, mark, gap) for word in command]
    if filled == command:
        # without a mark, the words come last
        filled = [*filled, Unread((gap,))]
    return [*words[: place + 1], *filled]


def _mark(options: Sequence[str]) -> str:
    """Return the text that `xargs -I TEXT` replaces; empty if xargs appends its words."""
    for index, option in enumerate(options):
        if not option.startswith("-"):
            return ""
        if option in ("-I", "--replace") and index + 1 < len(options):
            return options[index + 1] if option == "-I" else "{}"
        if option.startswith(("-I", "-i", "--replace=")):
            return option.partition("=")[2] if "=" in option else option[2:] or "{}"
    return ""


def _without(word: Word, mark: str, gap: Gap) -> Word:
    """Return a word with a gap in place of each `mark`."""
    if not mark or mark not in shown(word):
        return word
    pieces = list[str | Gap]()
    for piece in pieces_of(word):
        if isinstance(piece, Gap):
            pieces.append(piece)
            continue
        first, *others = piece.split(mark)
        pieces += [first, *(one for text in others for one in (gap, text))]
    return word_of(piece for piece in pieces if piece != "")
