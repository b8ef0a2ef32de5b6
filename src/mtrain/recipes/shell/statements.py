"""The statements of a shell script: commands, branches, loops, groups and functions."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from mtrain.errors import ConfigError
from mtrain.recipes.shell.lexer import MAX_NESTED, Lexer, Raw

_ASSIGNMENT = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)(\[[^]]*\])?(\+?)=", re.DOTALL)
# <( and >( begin substitutions
_REDIRECTION = re.compile(r"(?:[0-9]*|\{\w+\})(?:<<<|<<-?|<>|<&|>&|>\||>>|&>>|&>|<(?!\()|>(?!\())")
_FUNCTION = re.compile(r"([^\s;&|<>()'\"$`\\]+)[ \t]*\([ \t]*\)\s*")
_ENDS = frozenset(("then", "elif", "else", "fi", "do", "done", "esac", "}", "in"))


@dataclass
class Command:
    """One command, or only assignments."""

    words: list[Raw]
    line: int
    text: str
    """The command as it is written, in one line."""
    stdin: Raw | None = None
    """The text after `<<`, expanded."""
    writes: list[Raw] = field(default_factory=list)
    """The words after `>` and similar redirections."""


@dataclass
class Branches:
    """An `if`, a `case`, or the right side of `&&` or `||`: at most one of several bodies runs."""

    line: int
    text: str
    first: list[Node]
    """Statements that run in any case: the first condition."""
    bodies: list[list[Node]]
    whole: bool
    """True if one of the bodies certainly runs."""
    expected: bool = False
    """True if the body is meant to run, as after `cd FOLDER &&`."""


@dataclass
class Loop:
    """A body that runs any number of times."""

    line: int
    text: str
    names: list[str]
    """Variables that the loop itself sets."""
    body: list[Node]


@dataclass
class Group:
    """A body that runs once; in a `subshell`, its variables end with it."""

    line: int
    body: list[Node]
    subshell: bool


@dataclass
class Function:
    """A body that runs where it is called."""

    line: int
    name: str
    body: list[Node]


Node = Command | Branches | Loop | Group | Function


def assignment(word: Raw) -> re.Match[str] | None:
    """Return name, index and sign of a word that is an assignment, else None."""
    first = word.parts[0] if word.parts else None
    if first is None or first.kind != "text" or first.quoted:
        return None
    return _ASSIGNMENT.match(first.text)


def commands_in(nodes: Sequence[Node]) -> Iterator[Command | Loop]:
    """Yield every command and loop in statements, but not in functions and subshells."""
    for node in nodes:
        if isinstance(node, Command):
            yield node
        elif isinstance(node, Branches):
            yield from commands_in(node.first)
            for body in node.bodies:
                yield from commands_in(body)
        elif isinstance(node, Loop):
            yield node
            yield from commands_in(node.body)
        elif isinstance(node, Group) and not node.subshell:
            yield from commands_in(node.body)


def parse_script(text: str, source: str, line: int = 1) -> list[Node]:
    """Return the statements of a script.

    Raises:
        ConfigError: a quote, a bracket or a statement does not close.
    """
    # scripts that were edited on Windows end lines with \r\n
    parser = _Parser(text.replace("\r\n", "\n"), source, line)
    nodes = parser.body(())
    if parser.at < len(parser.text):
        raise parser.bad(
            f"{parser.text[parser.at : parser.at + 20].split()[0]!r} stands where a command is to"
            " begin"
        )

    return nodes


@dataclass
class _Heredoc:
    end: str
    quoted: bool
    tabs: bool
    command: Command | None = None


class _Parser(Lexer):
    """Recursive descent over a script."""

    def __init__(self, text: str, source: str, line: int) -> None:
        super().__init__(text, source, line)
        self.heredocs: list[_Heredoc] = []
        self.depth = 0

    def keyword(self) -> str:
        """Return the next plain word, without passing over it."""
        match = re.compile(r"[A-Za-z]+|[{}!]|\[\[").match(self.text, self.at)
        if match is None:
            return ""
        after = self.text[match.end() : match.end() + 1]
        # `fi` begins the word `file`, and is no keyword in it
        return match.group() if not after or after in " \t\r\n;&|<>()" else ""

    def since(self, start: int) -> str:
        """Return the text from `start` up to here, in one line."""
        return " ".join(self.text[start : self.at].split())

    def body(self, ends: Sequence[str]) -> list[Node]:
        """Return statements up to a word or a sign that ends them, which is not passed over."""
        out: list[Node] = []
        self.depth += 1
        # a foreign script could exhaust Python's own stack
        if self.depth > MAX_NESTED:
            raise self.bad(f"statements nested deeper than {MAX_NESTED}")
        while True:
            self.between()
            if self.at >= len(self.text) or self.ahead(")", ";;", ";&") or self.keyword() in _ENDS:
                break
            out += self.listed()
        self.depth -= 1
        if ends and not (self.keyword() in ends or self.ahead(*ends)):
            raise self.bad(f"{' or '.join(ends)} is missing")
        return out

    def between(self) -> None:
        """Pass over separators of statements; texts of `<<` begin at the end of the line."""
        while self.at < len(self.text):
            self.blank()
            if self.ahead("\n"):
                self.at += 1
                self.read_heredocs()
            # `;;` and `;&` end a case, `&&` joins commands, and `&>` redirects
            elif self.ahead(";", "&") and not self.ahead(";;", ";&", "&&", "&>"):
                self.at += 1
            else:
                return

    def listed(self) -> list[Node]:
        """Return a list of commands with `&&` and `||` between them."""
        left = self.pipeline()
        while True:
            self.blank()
            sign = self.ahead("&&", "||")
            if not sign:
                break
            self.at += 2
            self.blank("\n")
            line = self.line
            start = self.at
            right = self.pipeline()
            # an assignment cannot fail, so that the command after it always runs
            succeeds = sign == "&&" and all(
                isinstance(n, Command) and _only_assigns(n) for n in left
            )
            text = f"{_first_text(left)} {sign} {self.since(start)}"
            # `cd FOLDER && torchrun ...` is meant to run; a command after a test may not be
            expected = sign == "&&" and not any(isinstance(n, Command) and _tests(n) for n in left)
            if succeeds:
                left = [*left, *right]
            else:
                left = [Branches(line, text, left, [right], False, expected)]
        # a background command has a subshell, whose variables are lost
        if self.ahead("&") and not self.ahead("&&", "&>"):
            self.at += 1
            return [Group(self.line, left, True)]
        return left

    def pipeline(self) -> list[Node]:
        """Return commands with `|` between them: several run in subshells."""
        while self.keyword() in ("!", "time"):
            self.word()
            self.blank()
            if self.ahead("-p "):
                self.word()
                self.blank()
        parts = [self.command()]
        while True:
            self.blank()
            if not self.ahead("|") or self.ahead("||"):
                break
            self.at += 2 if self.ahead("|&") else 1
            self.blank("\n")
            parts.append(self.command())
        if len(parts) == 1:
            return parts[0]
        # each part of a pipeline has its own subshell
        return [Group(self.line, part, True) for part in parts]

    def command(self) -> list[Node]:
        """Return one command, simple or compound."""
        line = self.line
        keyword = self.keyword()
        function = _FUNCTION.match(self.text, self.at)
        # A=() is an array and no function
        if keyword == "function" or (function and "=" not in function[1]):
            return [self.function(line)]
        readers: dict[str, Callable[[int], Node]] = {
            "if": self.branches,
            "case": self.case,
            "{": self.group,
        }
        read = readers.get(keyword)
        if keyword in ("while", "until", "for", "select"):
            nodes: list[Node] = [self.loop(line, keyword)]
        elif read is not None:
            nodes = [read(line)]
        elif keyword == "[[" or self.arithmetic():
            return [self.test(line, keyword)]
        elif self.ahead("("):
            self.at += 1
            nodes = [Group(line, self.body((")",)), True)]
            self.at += 1
        else:
            return [self.simple(line)]
        redirections = self.simple(line)
        # files that a loop or a group writes matter: the script may source them
        return [*nodes, redirections] if redirections.writes else nodes

    def arithmetic(self) -> bool:
        """Return whether `((...))` comes next, and not two subshells."""
        if not self.ahead("(("):
            return False
        before = self.at
        self.at = self.at + 2
        try:
            self.balanced("(", "))")
        except ConfigError:
            return False
        finally:
            self.at = before
        return True

    def test(self, line: int, keyword: str) -> Command:
        """Return `[[ ... ]]` or `((...))`, as one word."""
        start = self.at
        self.at += 2
        if keyword == "[[":
            # in a test, signs such as < and && neither redirect nor join commands
            while self.at < len(self.text) and self.keyword_end() != "]]":
                if not self.word().parts:
                    self.at += 1
                self.blank("\n")
            self.at += 2
        else:
            self.balanced("(", "))")
        text = self.text[start : self.at]
        inner = Lexer(text[2:-2], self.source, line)
        raw = Raw()
        inner.quoted(raw, "")
        first = Lexer(text[:2] if keyword else "let", self.source, line).word()
        return Command([first, raw], line, " ".join(text.split()))

    def keyword_end(self) -> str:
        """Return `]]` if it comes next."""
        self.blank("\n")
        if self.at >= len(self.text):
            raise self.bad("a [[ does not close")
        return self.ahead("]]")

    def function(self, line: int) -> Function:
        """Return a function with its body."""
        if self.keyword() == "function":
            self.word()
            self.blank()
            match = re.compile(r"([^\s;&|<>()'\"$`\\]+)[ \t]*(?:\([ \t]*\))?\s*").match(
                self.text, self.at
            )
        else:
            match = _FUNCTION.match(self.text, self.at)
        if match is None:
            raise self.bad("a function has no name")
        self.at = match.end()
        self.blank("\n")
        return Function(line, match[1], self.command())

    def expect(self, word: str) -> None:
        """Pass over a keyword."""
        if self.keyword() != word and not (len(word) < 3 and self.ahead(word)):
            raise self.bad(f"{word} is missing")
        self.at += len(word)

    def group(self, line: int) -> Group:
        self.at += 1
        nodes = self.body(("}",))
        self.at += 1
        return Group(line, nodes, False)

    def branches(self, line: int) -> Branches:
        """Return an `if` up to its `fi`."""
        start = self.at + 2
        self.at = start
        first = self.body(("then",))
        text = self.since(start).removesuffix(";")
        bodies = []
        whole = False
        before = list[Node]()
        while True:
            word = self.keyword()
            self.at += len(word)
            if word == "elif":
                # the condition of an elif runs only after the conditions before it
                before = [*before, *self.body(("then",))]
                continue
            whole = whole or word == "else"
            if word == "fi":
                # without an else, the last condition may be all that runs
                bodies += [before] if before and not whole else []
                return Branches(line, text, first, bodies, whole or bool(before))
            bodies.append([*before, *self.body(("elif", "else", "fi"))])

    def case(self, line: int) -> Branches:
        """Return a `case` up to its `esac`."""
        self.at += 4
        self.blank("\n")
        start = self.at
        subject = self.word()
        text = f"case {self.text[start : self.at]}"
        self.blank("\n")
        self.expect("in")
        bodies = list[list[Node]]()
        whole = False
        falls = False
        while True:
            self.between()
            if self.keyword() == "esac":
                self.at += 4
                break
            if self.ahead("("):
                self.at += 1
            start = self.at
            while not self.ahead(")"):
                if self.at >= len(self.text):
                    raise self.bad("esac is missing")
                if not self.word().parts:
                    self.at += 1
                self.blank("\n")
            # a case with a pattern for everything runs one of its bodies
            whole = whole or self.text[start : self.at].strip() == "*"
            self.at += 1
            body = self.body((";;", ";&", "esac"))
            bodies.append(
                [*bodies.pop(), Branches(line, text, [], [body], False)] if falls else body
            )
            # these two go on with the next body or pattern
            falls = bool(self.ahead(";&", ";;&"))
            self.at += len(self.ahead(";;&", ";;", ";&"))
        # the subject may set a variable, as ${A:=x} does
        first: list[Node] = [Command([Lexer(":", self.source).word(), subject], line, text)]
        return Branches(line, text, first, bodies, whole)

    def loop(self, line: int, keyword: str) -> Loop:
        """Return a loop up to its `done`."""
        start = self.at
        self.at += len(keyword)
        names = list[str]()
        before = list[Node]()
        self.blank()
        if keyword in ("while", "until"):
            before = self.body(("do",))
        elif self.ahead("(("):
            self.at += 2
            names = re.findall(r"[A-Za-z_]\w*", self.balanced("(", "))"))
        else:
            names = [self.word().plain or ""]
            self.blank("\n")
            # `in` and the words after it
            words = [] if self.keyword() == "do" else self.simple(line).words
            before = [Command([Lexer(":", self.source).word(), *words], line, "")]
        text = self.since(start).removesuffix(";")
        self.between()
        brace = self.ahead("{")
        self.expect(brace or "do")
        body = self.body(("}",) if brace else ("done",))
        self.expect("}" if brace else "done")
        return Loop(line, text, names, [*before, *body])

    def simple(self, line: int) -> Command:
        """Return a command with its words; redirections are passed over."""
        start = self.at
        command = Command([], line, "")
        while True:
            self.blank()
            redirection = _REDIRECTION.match(self.text, self.at)
            if redirection:
                self.redirect(redirection, command)
                continue
            word = self.word() if self.at < len(self.text) else Raw()
            if not word.parts:
                break
            command.words.append(word)
        if self.ahead("("):
            raise self.bad(f"{self.text[self.at]!r} stands where a command is to begin")
        command.text = self.since(start)
        return command

    def redirect(self, match: re.Match[str], command: Command) -> None:
        """Pass over a redirection and its word; the text of `<<` belongs to the command."""
        self.at = match.end()
        self.blank()
        word = self.word()
        if match.group().rstrip("-").endswith("<<") and not match.group().endswith("<<<"):
            # quotes around the end mark, which are no part of it, turn expansions off
            end = "".join(part.text for part in word.parts)
            quoted = any(part.quoted for part in word.parts)
            self.heredocs.append(_Heredoc(end, quoted, match.group().endswith("-"), command))
        elif match.group().endswith("<<<"):
            command.stdin = word
        elif ">" in match.group():
            command.writes.append(word)

    def read_heredocs(self) -> None:
        """Read the texts of the `<<` redirections of the previous line."""
        waiting = self.heredocs
        self.heredocs = []
        for heredoc in waiting:
            # `<<-` allows tabs before the end mark
            tabs = r"\t*" if heredoc.tabs else ""
            end = re.compile(rf"^{tabs}{re.escape(heredoc.end)}$", re.MULTILINE).search(
                self.text, self.at
            )
            text = self.text[self.at : end.start() if end else len(self.text)]
            inner = Lexer(text, self.source, self.line)
            raw = Raw()
            if heredoc.quoted:
                raw = Raw([*Lexer("''", self.source).word().parts])
                # one quoted part, which nothing expands
                raw.parts[0].text = text
            else:
                inner.quoted(raw, "")
            if heredoc.command is not None:
                heredoc.command.stdin = raw
            self.at = min(len(self.text), end.end() + 1) if end else len(self.text)


def _only_assigns(command: Command) -> bool:
    """Return whether a command has only assignments that cannot fail."""
    words = [word for raw in command.words for word in (raw, *(raw.array or ()))]
    return all(assignment(raw) for raw in command.words) and all(
        part.kind != "command" for word in words for part in word.parts
    )


def _tests(command: Command) -> bool:
    """Return whether a command is a test of values."""
    return bool(command.words) and command.words[0].plain in ("[", "[[", "test", "let", "false")


def _first_text(nodes: Sequence[Node]) -> str:
    return next((node.text for node in nodes if not isinstance(node, Group | Function)), "...")
