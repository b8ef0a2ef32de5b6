"""A reader of shell scripts that executes nothing.

It follows the assignments of a script, its arrays and the expansions of its own variables, and returns the commands
with their words. What only running the script could tell (the environment, the output of a command, a condition) is
marked as unknown and never guessed.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field

from mtrain.recipes.conditions import Operand, Truth, arithmetic_holds, both, either, matches, negated, test_holds
from mtrain.recipes.expansion import PIECE, UNKNOWN, Expander, shown
from mtrain.recipes.functions import apart
from mtrain.recipes.words import Part, Raw, Statement, statements

_ASSIGNMENT = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)(\+?)=(.*)\Z", re.DOTALL)
_OPENING = {
    "if": "if",
    "while": "loop",
    "until": "loop",
    "for": "loop",
    "select": "loop",
    "case": "case",
    "{": "group",
}
_CLOSING = {"fi": "if", "done": "loop", "esac": "case", "}": "group"}
_BRANCHES = ("then", "elif", "else", "do")
_TESTS = {"[": "]", "[[": "]]", "test": ""}
_NAMES = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_POSITIONAL = re.compile("\ue000\\$\\{?[1-9][0-9]*\\}?\ue001\\Z")
_DECLARING = ("export", "declare", "local", "readonly", "typeset")


@dataclass
class Command:
    """One command of a script, its words expanded as far as they can be known."""

    words: list[str]
    where: str
    """`file:line`."""
    conditional: bool
    """Whether it runs only under a condition that is not known, in a loop, or in a function that nobody calls."""
    doubtful: dict[str, str]
    """Variables behind its words that are also set under a condition that is not known, with `file:line`."""


@dataclass
class Branch:
    """What a script does under a condition that is not known."""

    label: str
    """`then`, `elif ...`, `else`, or the pattern of a `case`."""
    where: str
    flags: list[str] = field(default_factory=list)
    """Flags that it adds to a variable."""
    names: list[str] = field(default_factory=list)
    """Variables that it sets."""


@dataclass
class Undecided:
    """A condition that only running the script could tell; nothing of its branches is taken."""

    test: str
    where: str
    branches: list[Branch] = field(default_factory=list)


@dataclass
class Script:
    """What a script says without being run."""

    commands: list[Command] = field(default_factory=list)
    variables: dict[str, list[str]] = field(default_factory=dict)
    """Every variable's last value; a plain one has one item."""
    conditional: dict[str, str] = field(default_factory=dict)
    """Variables that are also set under a condition, with `file:line`; their value here is the one before."""
    undecided: list[Undecided] = field(default_factory=list)
    """Conditions that are not known, of those under which something is set."""


def read_script(*texts: tuple[str, str]) -> Script:
    """Reads scripts, each a text with its name, as if the later ones had sourced the earlier.

    Raises:
        ConfigError: quotes or brackets that do not close, or text that expands without bounds.
    """
    reader = _Reader()
    for text, source in texts:
        reader.source = source
        rest, bodies = apart(statements(text, source))
        reader.functions |= {name: (source, body) for name, body in bodies.items()}
        for statement in rest:
            reader.take(statement)
        reader.blocks.clear()
        reader.given = set(reader.script.variables)
    reader.never_called()
    return reader.script


@dataclass
class _Block:
    """An `if`, a `case`, a loop or a group that is open."""

    kind: str
    where: str
    runs: Truth
    """Whether what is read now runs."""
    testing: bool
    """Whether that is the condition itself."""
    taken: Truth = False
    """Whether a branch before was."""
    until: bool = False
    subject: Operand | None = None
    patterns: list[Operand] = field(default_factory=list)
    said: Undecided | None = None


class _Reader(Expander):
    """Follows a script statement by statement."""

    def __init__(self) -> None:
        self.script = Script()
        super().__init__(self.script.variables)
        self.blocks: list[_Block] = []
        self.status: Truth = True
        """Whether the last command succeeded."""
        self.chain = ""
        """The commands so far of a list with `&&` and `||`, as they are written."""
        self.given: set[str] = set()
        """Variables of the scripts before this one."""
        self.doubted: dict[str, dict[str, str]] = {}
        """Variable -> those that its value was made of, and that are also set under a condition, with `file:line`."""
        self.functions: dict[str, tuple[str, list[Statement]]] = {}
        """Name -> the file of a function, and its statements."""
        self.calls: list[str] = []
        """Functions that were called and have not ended."""
        self.called: set[str] = set()

    def take(self, statement: Statement) -> None:
        """Follows one statement: opens and closes blocks, sets variables, keeps the command."""
        self.line = statement.line
        words = list(statement.words)
        block = self.blocks[-1] if self.blocks else None
        if block is not None and block.kind == "case" and block.testing and words and words[0].keyword != "esac":
            self.pattern(block, statement)
            return
        runs: Truth = True
        self.chain = (
            statement.text
            if statement.behind not in ("&&", "||")
            else f"{self.chain} {statement.behind} {statement.text}"
        )
        if statement.behind in ("&&", "||"):
            runs = self.status if statement.behind == "&&" else negated(self.status)
        turned = False
        while words and (keyword := words[0].keyword) is not None:
            if keyword == "!":
                turned = not turned
            elif keyword in _OPENING:
                self.open(keyword, words, runs)
                words = [] if keyword in ("for", "case", "select") else words
            elif keyword in _CLOSING:
                self.close(keyword)
            elif keyword in _BRANCHES:
                self.branch(keyword, statement)
            elif keyword in _DECLARING:
                words = [words[0], *(w for w in words[1:] if not (w.keyword or "").startswith("-"))]
            elif keyword != "time":
                break
            words = words[1:]
        self.run(statement, words, runs, turned)
        block = self.blocks[-1] if self.blocks else None
        if block is not None and block.kind == "case" and block.testing and statement.ended == ")":
            self.matched(block)
        if statement.ended == ";;" and self.blocks and self.blocks[-1].kind == "case":
            self.blocks[-1].testing = True

    def run(self, statement: Statement, words: list[Raw], runs: Truth, turned: bool) -> None:
        """A statement without the keywords before it; what it leaves is the status of the commands so far."""
        around: Truth = True
        for block in self.blocks:
            around = both(around, block.runs)
        if not words or both(around, runs) is False:
            return
        while words and self._assigned(words[0], both(around, runs)):
            words.pop(0)
        own: Truth = True
        if words:
            self._note_test(statement)
            own = self.tested(words)
            self.read = set()
            out = [word for raw in words for word in self.expand(raw)]
            if out and out[0] in self.functions and out[0] not in self.calls:
                passed_on = any(p.kind == "variable" and p.text[:1] in "@*" for raw in words for p in raw.parts)
                self.call(out[0], out[1:], runs, self.all_given or not passed_on)
            elif out and (out[:2] == ["set", "--"] or out[0] == "shift") and both(around, runs):
                self.give(out[2:] if out[0] == "set" else self.variables.get("@", [])[1:])
            elif out:
                self.script.commands.append(Command(out, self.where, around is None, self.doubts(self.read)))
        own = None if statement.ended == "|" or statement.behind == "|" else negated(own) if turned else own
        if statement.behind == "&&":
            own = both(self.status, own)
        elif statement.behind == "||":
            own = either(self.status, own)
        self.status = own

    def call(self, name: str, words: list[str], runs: Truth, all_given: bool) -> None:
        """Follows the statements of a function, as far as they run; its variables are those of the script."""
        kept = self.source, self.line, self.chain, self.status
        block = _Block("call", self.where, runs, False)
        if runs is None:
            block.said = Undecided(self.chain, self.where, [Branch("then", self.where)])
        self.source, body = self.functions[name]
        doubts = self.doubts(self.read)
        self.calls.append(name)
        self.called.add(name)
        self.blocks.append(block)
        depth = len(self.blocks)
        with self.arguments(words, all_given):
            self.doubted |= dict.fromkeys(self.given_names(), doubts)
            for statement in body:
                self.spend(100 + len(statement.text))
                self.take(statement)
        del self.blocks[depth:]
        self.end(self.blocks.pop())
        self.calls.pop()
        self.source, self.line, self.chain, self.status = kept

    def never_called(self) -> None:
        """Reads the functions that nothing calls: another script may."""
        for name in [name for name in self.functions if name not in self.called]:
            first = len(self.script.commands)
            self.call(name, [], True, False)
            for command in self.script.commands[first:]:
                command.conditional = True

    def open(self, keyword: str, words: list[Raw], runs: Truth) -> None:
        """A block begins; it is read as far as `runs`."""
        kind = _OPENING[keyword]
        block = _Block(kind, self.where, runs, kind != "group", until=keyword == "until")
        if kind == "case" and len(words) > 1:
            block.subject = self.operand(words[1])
            block.said = Undecided(f"case {self.joined(words[1].parts)}", self.where)
            for raw in words[3:]:
                block.patterns.append(self.operand(raw))
        if keyword in ("for", "select"):
            block.runs, block.said = None, Undecided(self.chain, self.where, [Branch("do", self.where)])
        self.blocks.append(block)

    def close(self, keyword: str) -> None:
        """The block ends, if it is one of the kind."""
        if self.blocks and self.blocks[-1].kind == _CLOSING[keyword]:
            self.end(self.blocks.pop())
            self.status = True if keyword == "}" else None

    def end(self, block: _Block) -> None:
        """Keeps the condition of a block for the report, where something is set under it."""
        said = block.said
        if said is not None and any(branch.flags or branch.names for branch in said.branches):
            self.script.undecided.append(said)

    def branch(self, keyword: str, statement: Statement) -> None:
        """`then`, `elif`, `else` or `do`: what follows runs where the condition holds and none before it did."""
        block = self.blocks[-1] if self.blocks else None
        if block is None or block.kind != ("loop" if keyword == "do" else "if"):
            return
        holds = self.status
        if block.kind == "loop":
            holds = False if block.testing and (negated(holds) if block.until else holds) is False else None
            block.runs = None if block.runs is None else both(block.runs, holds)
        elif keyword == "then":
            block.runs = both(holds, negated(block.taken))
            block.taken = either(block.taken, holds)
        else:
            block.runs = negated(block.taken)
        block.testing = keyword == "elif"
        self.status = True
        self._begun(block, keyword)

    def _begun(self, block: _Block, label: str) -> None:
        if block.said is not None:
            before = block.said.branches
            if not (label == "then" and before and before[-1].label == "elif"):
                before.append(Branch(label, self.where))

    def _note_test(self, statement: Statement) -> None:
        """Keeps the text of a condition for the report."""
        block = self.blocks[-1] if self.blocks else None
        if block is None or not block.testing or block.kind == "case":
            return
        if block.said is None:
            block.said = Undecided(re.sub(r"^(if|while|until)\s+", "", statement.text), block.where)
        elif not block.said.branches:
            block.said.test += f" {statement.behind.strip() or ';'} {statement.text}"

    def pattern(self, block: _Block, statement: Statement) -> None:
        """A pattern of a `case`, up to its bracket."""
        block.patterns += [self.operand(raw) for raw in statement.words]
        if statement.ended == ")":
            self.matched(block)

    def matched(self, block: _Block) -> None:
        """What stands behind the patterns of a `case` runs where one of them matches and none before did."""
        found: Truth = False
        for pattern in block.patterns:
            found = either(found, self._matches(block.subject, pattern))
        block.runs, block.taken = both(found, negated(block.taken)), either(block.taken, found)
        self._begun(block, "|".join(shown(pattern.text) for pattern in block.patterns) + ")")
        block.patterns, block.testing = [], False

    def _matches(self, subject: Operand | None, pattern: Operand) -> Truth:
        if pattern.text == "*" and not pattern.quoted:
            return True
        if subject is None or not subject.sure or not pattern.sure:
            return None
        return subject.text == pattern.text if pattern.quoted else matches(subject.text, pattern.text)

    def operand(self, raw: Raw) -> Operand:
        """A word of a test, not split."""
        text = self.joined(raw.parts)
        return Operand(text, any(part.quoted for part in raw.parts), self.sure(raw, text))

    def sure(self, raw: Raw, text: str) -> bool:
        """Whether what a word stands for is known, and not set under a condition that is not."""
        names = {name for part in raw.parts if part.kind != "text" for name in _NAMES.findall(part.text)}
        return UNKNOWN.search(text) is None and not self.doubts(names)

    def doubts(self, names: Iterable[str]) -> dict[str, str]:
        """Of variables, and of what their values were made of, those that are also set under a condition."""
        out: dict[str, str] = {}
        for name in names:
            out |= self.doubted.get(name, {})
            if name in self.script.conditional:
                out[name] = self.script.conditional[name]
        return out

    def tested(self, words: list[Raw]) -> Truth:
        """Whether a command succeeds, where it is a test that can be known."""
        first = self.joined(words[0].parts)
        if first in (":", "true", "false") and len(words) == 1:
            return first != "false"
        if words[0].is_text("((") and len(words) > 1:
            text = words[1].parts[0].text
            return None if self.doubts(_NAMES.findall(text)) else arithmetic_holds(text, self.number)
        closing = _TESTS.get(first)
        if closing is None or (closing and not words[-1].is_text(closing)):
            return None
        inside = words[1:-1] if closing else words[1:]
        if first == "[[":
            return test_holds([self.operand(raw) for raw in inside], double=True)
        operands = []
        for raw in inside:
            quoted = any(part.quoted for part in raw.parts)
            operands += [Operand(word, quoted, self.sure(raw, word)) for word in self.expand(raw)]
        return test_holds(operands, double=False)

    def _assigned(self, raw: Raw, runs: Truth) -> bool:
        """Takes an assignment; False where the word is none."""
        first = raw.parts[0] if raw.parts else None
        match = _ASSIGNMENT.match(first.text) if first is not None and first.kind == "text" else None
        if match is None or first is None or first.quoted:
            return False
        name, more = match[1], bool(match[2])
        self.read = set()
        if raw.array is not None:
            value = [word for item in raw.array for word in self.expand(item)]
        else:
            value = [self.joined([Part("text", match[3], False), *raw.parts[1:]])]
        if runs is None:
            self._left_out(name, value if raw.array is not None else PIECE.findall(value[0]))
            return True
        if name in self.given and raw.array is None and _POSITIONAL.match(value[0]):
            return True  # a script before this one says what its argument is
        self.doubted[name] = self.doubts(self.read) | (self.doubted.get(name, {}) if more else {})
        before = self.script.variables.get(name, [])
        if more and raw.array is not None:
            value = [*before, *value]
        elif more:
            value = [*before[:-1], (before[-1] if before else "") + value[0]]
        else:
            self.script.conditional.pop(name, None)
        self.spend(sum(map(len, value)))
        self.script.variables[name] = value
        return True

    def _left_out(self, name: str, words: list[str]) -> None:
        """Notes an assignment under a condition that is not known."""
        self.script.conditional.setdefault(name, self.where)
        block = next((b for b in reversed(self.blocks) if b.runs is None), None)
        if block is not None and block.said is not None and block.said.branches:
            branch = block.said.branches[-1]
        else:
            branch = Branch("then", self.where)
            self.script.undecided.append(Undecided(self.chain, self.where, [branch]))
        branch.flags += [shown(w).split()[0] for w in words if w.startswith("--")]
        branch.names.append(name)
