"""Words of a shell script, expanded by the script's own variables; unknown parts stay gaps."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from mtrain.errors import ConfigError, Problem
from mtrain.recipes.shell.arithmetic import whole_number
from mtrain.recipes.shell.gaps import Gap, Unread, Value, Word, between, shown, split, word_of
from mtrain.recipes.shell.lexer import Lexer, Part, Raw

# lines such as A=$A$A would otherwise fill the memory of a reader
MAX_EXPANDED = 4 << 20
MAX_DEPTH = 16
ITEM = 16
"""Characters that a word counts in addition to its own."""
NOT_SET = "the script does not set"
OUTPUT = "is the output of a command"

_BRACED = re.compile(
    r"([A-Za-z_]\w*|[@*0-9])(\[[@*0-9]+\])?(?:(:?[-=+?])(.*)|(:[^-=+?].*))?\Z", re.DOTALL
)
_ASSIGNS = re.compile(r"\+\+|--|(?<![=!<>])=(?!=)|<<=|>>=")
_COMPUTED = re.compile(
    r"(?:\$\w+|\}|\$[@*])\s*(?:\+\+|--|(?:[-+*/%&|^]|<<|>>)?=(?!=))|(?:\+\+|--)\s*\$"
)
_NAMES = re.compile(r"[A-Za-z_]\w*")
# signs of a pattern that a shell replaces by the names of files
_GLOB = re.compile(r"[*?]|\[[^]]*\]")
_QUOTED_DEFAULT = re.compile(r"\w+:?[-=+]([\"']).*\s.*\1\Z", re.DOTALL)
_LISTED = re.compile(r"[-0-9\[\](),*+|EtmL]*\Z")
"""A list of layers, such as `([0]*3+[1]*58)` or `Et*3|m|L`: no file has such a name."""
_BRACES = re.compile(r"\{[^{}\s]*(?:,|\.\.)[^{}\s]*\}")
_SHELL_VARIABLES = re.compile(
    "|".join(
        re.findall(
            r"\S+",
            r"""
            BASH.* RANDOM SRANDOM SECONDS LINENO PPID UID EUID PIPESTATUS FUNCNAME EPOCH.* HOSTNAME
            HOSTTYPE OSTYPE MACHTYPE SHLVL PWD OLDPWD OPTIND OPTARG REPLY MAPFILE COPROC DIRSTACK
            GROUPS IFS _ [0#?$!-]
            """,
        )
    )
)
"""Variables that a shell itself sets."""


@dataclass
class State:
    """The variables of a script at one place in it."""

    variables: dict[str, list[Value] | Gap] = field(default_factory=dict)
    """The items of each variable; a plain one has one item. A gap: its value is no longer known."""
    arguments: list[Value] | Gap = field(default_factory=list)
    """`$1`, `$2`, ..."""
    called: bool = False
    """True if the arguments are those of a call in the script, all of them known."""
    lost: Gap | None = None
    """The statement that may have set any variable that is not set here."""
    splits: bool = True
    """True while words are split at spaces, until IFS is set."""
    ended: bool = False
    """True if the statements after this place do not run."""
    moved: bool = False
    """True if the script has left the folder in which it began."""

    def copy(self) -> State:
        """Return a copy that can change independently."""
        return replace(self, variables=dict(self.variables), ended=False)


class Expander:
    """A reader that expands words by the variables of a script."""

    def __init__(
        self, variables: dict[str, list[Value] | Gap] | None = None, source: str = ""
    ) -> None:
        self.state = State(variables if variables is not None else {})
        self.source = source
        self.line = 0
        self.left = MAX_EXPANDED
        self.defaults: dict[str, str] = {}
        """Variables whose default was taken, with `file:line`."""
        self.stand_ins: dict[str, str] = {}
        """The reader's own variables -> the script's text in their place."""
        self.homes: set[str] = set()
        """Words that begin with `~`."""

    @property
    def where(self) -> str:
        """Return the current `file:line`."""
        return f"{self.source}:{self.line}"

    def spend(self, size: int) -> None:
        """Count characters that an expansion made.

        Raises:
            ConfigError: the script makes too many.
        """
        # an empty expansion takes time, too
        self.left -= size + 1
        if self.left < 0:
            rule = f"expands to more than {MAX_EXPANDED} characters"
            raise ConfigError([Problem("MT005", "", None, rule, "", self.where)])

    def gap(
        self, text: str, why: str, *, absent: bool = False, words: tuple[Word, ...] | None = None
    ) -> Gap:
        """Return a gap for an unknown text at this place."""
        for name, original in self.stand_ins.items():
            text = text.replace(f"${{{name}}}", original)
            why = why.replace(f"${{{name}}}", original)
        return Gap(" ".join(text.split()), self.where, " ".join(why.split()), absent, words)

    def stand_in(self, gap: Gap) -> str:
        """Return a variable in place of a gap, for a text that is parsed again."""
        name = f"unread_{len(self.stand_ins)}_"
        self.stand_ins[name] = gap.text
        self.state.variables[name] = [(gap,)]
        return f"${{{name}}}"

    def forget(self, names: Iterable[str], why: str) -> None:
        """Make variables unknown from here on."""
        for name in names:
            self.state.variables[name] = self.gap(f"${name}", why)
            # words are split at other signs from here on
            if name == "IFS":
                self.state.splits = False

    def forget_all(self, why: str) -> None:
        """Make every variable unknown from here on."""
        self.spend(len(self.state.variables))
        # not the method of a subclass, which calls this one for references
        Expander.forget(self, list(self.state.variables), why)
        self.state.lost = self.gap("", why)
        self.state.arguments = self.gap("$@", why)

    def joined(self, parts: Sequence[Part], depth: int = 0) -> Value:
        """Return parts as one text, without splitting, as an assignment stores it."""
        out = list[str | Gap]()
        for part in parts:
            if part.kind == "text":
                out.append(part.text)
                continue
            for index, item in enumerate(self.value(part, depth)):
                out += [" "] if index else []
                out += item
        self.spend(sum(len(piece) for piece in out if isinstance(piece, str)) + len(out))
        return tuple(out)

    def expand(self, raw: Raw) -> list[Word]:
        """Return the words of a word: none, or several of an array or unquoted list."""
        if has_braces(raw):
            several = word_of(self.joined(raw.parts))
            return [Unread((self.gap(shown(several), "names several words in braces"),))]
        out = list[Word]()
        current: list[str | Gap] | None = None
        loose = False  # whether a shell may read a part of it as a pattern
        for index, part in enumerate(raw.parts):
            if part.kind == "text":
                text = part.text
                # only a tilde at the beginning of a word is the home folder
                if not part.quoted and index == 0 and text.startswith("~"):
                    self.homes.add(text)
                current = [*(current or ()), text]
                loose = loose or (not part.quoted and re.search(r"[*?\[]", text) is not None)
                continue
            items = self.value(part, 0)
            if not part.quoted and part.kind == "variable" and _QUOTED_DEFAULT.match(part.text):
                items = [
                    (self.gap(f"${{{part.text}}}", "has a default whose quotes make it one word"),)
                ]
            if part.quoted:
                if "@" in part.text and not items and current == [""]:
                    current = None  # "$@" without arguments is no word
                pieces = [list(item) for item in items]
                before = False
                after = False
            else:
                before, pieces, after = self._split(items)
                loose = loose or any(
                    isinstance(p, str) and _GLOB.search(p) for piece in pieces for p in piece
                )
            if before and current is not None:
                out.append(self._finished(current, loose))
                current = None
            for number, piece in enumerate(pieces):
                if number:
                    out.append(self._finished(current or [], loose))
                    current = None
                current = [*(current or ()), *piece]
            if after and current is not None:
                out.append(self._finished(current, loose))
                current = None
        if current is not None:
            out.append(self._finished(current, loose))
        self.spend(sum(ITEM + len(shown(word)) for word in out))
        return out

    def _finished(self, pieces: list[str | Gap], loose: bool) -> Word:
        """Return a word, unless a shell would replace it by the names of files."""
        word = word_of(pieces)
        text = shown(word)
        listed = isinstance(word, str) and _LISTED.match(text) and re.search(r"[0-9\])]", text)
        if loose and _GLOB.search(text) and not listed:
            return Unread((self.gap(text, "names files by a pattern"),))
        return word

    def _split(self, items: Sequence[Value]) -> tuple[bool, list[list[str | Gap]], bool]:
        """Return values cut at spaces, and whether spaces stand before and after all of them."""
        odd = next(
            (p for i in items for p in i if isinstance(p, str) and re.search(r"\W", p)), None
        )
        # with another IFS, a letter or a sign may cut the text
        if not self.state.splits and odd is not None:
            return False, [[self.gap(odd, "is split by another IFS")]], False
        pieces = [piece for item in items for piece in split(item)]
        first, last = (items[0], items[-1]) if items else ((), ())
        before = bool(first) and isinstance(first[0], str) and first[0][:1].isspace()
        after = bool(last) and isinstance(last[-1], str) and last[-1][-1:].isspace()
        return before, pieces, after

    def value(self, part: Part, depth: int) -> list[Value]:
        """Return the values of an expansion; an array gives its items."""
        # defaults may nest, each with another inside
        if depth > MAX_DEPTH:
            raise ConfigError(
                [Problem("MT005", "", None, "expansions are nested too deep", "", self.source)]
            )
        if part.kind == "command":
            return [(self.gap(f"$({part.text})", OUTPUT),)]
        if part.kind == "arithmetic":
            return [(self._arithmetic(part.text),)]
        match = _BRACED.match(part.text)
        if match is None:
            if re.search(r"[\[:]", part.text) and _ASSIGNS.search(part.text):
                self.forget(_NAMES.findall(part.text), f"is set by ${{{part.text}}}")
            return [(self.gap(f"${{{part.text}}}", "is no plain variable"),)]
        spelled = f"${part.text}" if re.fullmatch(r"\w+|[@*]", part.text) else f"${{{part.text}}}"
        held = self._held(match[1], match[2], spelled, part.quoted)
        if match[5] is not None:
            if _ASSIGNS.search(match[5]):
                self.forget(_NAMES.findall(match[5]), f"is set by ${{{part.text}}}")
            if isinstance(held, Gap):
                return [(Gap(spelled, held.where, held.why, held.absent),)]
            return [
                (self.gap(spelled, "is a part of a variable", words=tuple(map(word_of, held))),)
            ]
        if match[3] is None:
            out: list[Value] = held if isinstance(held, list) else [(held,)]
        else:
            out = self._or_default(match, held, spelled, part.quoted, depth)
        self.spend(
            sum(len(piece) for item in out for piece in item if isinstance(piece, str))
            + ITEM * len(out)
        )
        return out

    def _held(self, name: str, index: str | None, spelled: str, quoted: bool) -> list[Value] | Gap:
        """Return the items of a variable, or why they are unknown."""
        if name in "@*" or (name.isdigit() and name != "0"):
            return self._argument(name, spelled)
        held = self.state.variables.get(name)
        if isinstance(held, Gap):
            return Gap(spelled, held.where, held.why, False, held.words)
        if held is None and (_SHELL_VARIABLES.fullmatch(name) or self.state.lost):
            lost = self.state.lost
            if lost is not None and not _SHELL_VARIABLES.fullmatch(name):
                return Gap(spelled, lost.where, lost.why)
            return self.gap(spelled, "the shell itself sets")
        if held is None:
            return self.gap(spelled, NOT_SET, absent=True)
        if index is None:
            # $A of an array is its first item
            return held[:1] or [("",)]
        if index in ("[@]", "[*]"):
            if index == "[*]" and quoted:
                if self.state.splits:
                    return [between(held)]
                return self.gap(spelled, "is joined by another IFS")
            return list(held)
        place = int(index[1:-1])
        # an item that does not exist is empty, and no error
        return [held[place]] if place < len(held) else [("",)]

    def _argument(self, name: str, spelled: str) -> list[Value] | Gap:
        given = self.state.arguments
        if isinstance(given, Gap):
            return Gap(spelled, given.where, given.why)
        if name in "@*":
            # a script that is called without arguments and one called with some look the same here
            if not given and not self.state.called:
                return self.gap(spelled, "is what the script is called with", absent=True)
            if name == "*" and not self.state.splits:
                return self.gap(spelled, "is joined by another IFS")
            return [between(given)] if name == "*" else list(given)
        if 0 < int(name) <= len(given):
            return [given[int(name) - 1]]
        if self.state.called:
            return [("",)]
        return self.gap(spelled, "is what the script is called with", absent=True)

    def _or_default(
        self, match: re.Match[str], held: list[Value] | Gap, spelled: str, quoted: bool, depth: int
    ) -> list[Value]:
        """Return the value of `${NAME:-default}` and similar forms."""
        name = match[1]
        operator = match[3]
        word = match[4] or ""
        # `:-` also replaces an empty value, `-` only one that is not set
        empty = isinstance(held, list) and not any(piece for item in held for piece in item)
        if (
            isinstance(held, list)
            and not empty
            and all(isinstance(p, Gap) for item in held for p in item)
        ):
            return [(self.gap(spelled, "is known only to a run"),)]
        if isinstance(held, Gap) and not held.absent:
            return [(Gap(spelled, held.where, held.why),)]
        present = isinstance(held, list) and (
            not empty or (not operator.startswith(":") and held != [])
        )
        # the script ends if the value is empty, so that it has one afterwards
        if operator.endswith("?"):
            return held if isinstance(held, list) else [(held,)]
        if isinstance(held, Gap):
            # for a note: the environment may set the variable otherwise
            self.defaults.setdefault(name, self.where)
        if operator.endswith("+"):
            return [self._inner(word, spelled, quoted, depth)] if present else [("",)]
        if present and isinstance(held, list):
            return held
        out = [self._inner(word, spelled, quoted, depth)]
        # `:=` sets the variable as well
        if operator.endswith("="):
            self.state.variables[name] = list(out)
        return out

    def _inner(self, text: str, spelled: str, quoted: bool, depth: int) -> Value:
        """Return the text after `:-`; with quotes inside, it is unknown."""
        if len(text) > 1 and text[0] == text[-1] == '"' and text.count('"') == 2:
            text = text[1:-1]
        elif len(text) > 1 and text[0] == text[-1] == "'" and text.count("'") == 2 and not quoted:
            return (text[1:-1],)
        # quotes in a default follow rules that differ in and outside of double quotes
        if re.search("['\"\\\\]", text):
            return (self.gap(spelled, "has quotes inside of its default"),)
        raw = Raw()
        Lexer(text, self.source, self.line).quoted(raw, "")
        return self.joined(raw.parts, depth + 1)

    def _arithmetic(self, text: str) -> str | Gap:
        if self.calculated(text, f"$(({text}))"):
            return self.gap(f"$(({text}))", "sets a variable")
        number = whole_number(text, self.number)
        return str(number) if number is not None else self.gap(f"$(({text}))", "is not known")

    def calculated(self, text: str, by: str) -> bool:
        """Forget the variables that arithmetic sets; return whether it sets any."""
        sets = _ASSIGNS.search(text) is not None
        if sets:
            self.forget(_NAMES.findall(text), f"is set by {by}")
        # `$1 += 2` sets the variable that $1 names
        if sets and sets_computed(text):
            self.forget_all(f"may be set by {by}")
        return sets

    def number(self, name: str) -> str | None:
        """Return the text of a plain variable; None if it is unknown."""
        held = self.state.variables.get(name)
        if not isinstance(held, list) or not held:
            return None
        word = word_of(held[0])
        return word if isinstance(word, str) else None


def has_braces(raw: Raw) -> bool:
    """Return whether a word becomes several by its braces: `{a,b}`, or `{$A,"b"}`."""
    return (
        _BRACES.search(
            "".join(p.text if p.kind == "text" and not p.quoted else "x" for p in raw.parts)
        )
        is not None
    )


def sets_computed(text: str) -> bool:
    """Return whether arithmetic sets a variable whose name is a value, as `$1 += 2` does."""
    return "$" in text and _COMPUTED.search(text) is not None
