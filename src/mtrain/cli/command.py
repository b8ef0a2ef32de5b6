"""A verb as a click command with flags, words that click leaves unread, and a page of `--help`."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Never

import click

from mtrain.cli.output import refusal
from mtrain.config.compose.paths import program
from mtrain.errors import ConfigError, say_page

SETTINGS = {
    "GROUP=CHOICE": "a file under conf/, as in model=llama3_8b; `choices GROUP` lists them",
    "parallel=LAYOUT": "a layout in one word: tp4pp4, tp8pp12cp2vpp4ep8, tp2pp2dp2, tp4sp",
    "KEY=VALUE": "one key, as in optim.lr=3e-4; `explain KEY` describes it",
    "recipe=NAME": "a recipe under recipes/, or the path of one",
    "run=FILE": "a resolved file, such as the run.yaml of a run folder",
}
DEBUG = "print the traceback of an error"
FLAGS = {
    "--json": "print JSON for a machine",
    "--multirun": "one run for each combination of KEY=A,B or KEY=range(1,4)",
    "--output": "write to this file; an existing file is an error",
    "--debug": DEBUG,
}
# `json` and `all` would hide a module and a built-in function
PARAMETERS = {"--json": "as_json", "--all": "everything"}
HELP = ("-h", "--help")
SHARED = frozenset({"--json", "-m", "--multirun", "--debug", *HELP, "--version"})
WIDTH = 100


@dataclass(frozen=True)
class Page:
    """The declaration of a verb: a file under `pages/`, or a part of one for a subverb."""

    usage: str
    """The command line, without the name of the program."""
    help: str
    examples: Mapping[str, str]
    """Command lines, without the name of the program -> what each does."""
    short: str = ""
    """Summary in the list of all verbs."""
    runs: str = ""
    """Module and function under `mtrain.cli`; the function receives `words` and the flags, and
    returns the exit code."""
    arguments: Mapping[str, str | None] = field(default_factory=dict)
    """Argument -> its description; the name `SETTINGS` stands for the rows of a configuration."""
    flags: Mapping[str, str | None] = field(default_factory=dict)
    """`-o, --output FILE` -> what it does; without a text, that of `FLAGS`."""
    hidden: Mapping[str, str] = field(default_factory=dict)
    """The same for flags of tests, which no page shows."""
    first: Sequence[str] = ("settings",)
    """Completions of the first word: sources of `completion`, or words."""
    then: Sequence[str] | None = None
    """The same for later words; None: as for the first."""
    path_at: int | None = None
    """Number of bare words before the path that may also precede the verb; None: no path may."""
    subverbs: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)


class Valued(click.Option):
    """A flag that takes a value, at most once."""

    def __init__(self, *args: Any, **attributes: Any) -> None:
        # click takes the last of several values in silence; the callback sees all of them.
        attributes |= {"multiple": True, "callback": self.value}
        super().__init__(*args, **attributes)

    def refusal(self) -> ConfigError:
        """Return the error of this flag without its value."""
        flag = self.opts[-1]
        return refusal(f"{flag}: needs a value", f"{flag} {self.metavar}")

    def value(
        self, ctx: click.Context, param: click.Parameter, values: tuple[str, ...]
    ) -> str | None:
        """Return the value; None: the flag is absent.

        Raises:
            ConfigError: the value is empty or another flag, or there are several.
        """
        # click keeps the sign of -o=FILE
        texts = [text.removeprefix("=") for text in values]
        if any(not text or text.startswith("--") for text in texts):
            raise self.refusal()
        if len(texts) > 1:
            flag = self.opts[-1]
            raise refusal(f"{flag}: is given twice", f"{flag} {texts[0]}, once")
        return texts[0] if texts else None


def _option(spelled: str, text: str | None, *, hidden: bool = False) -> click.Option:
    """Return the flag that a page writes as `-o, --output FILE`."""
    *names, last = spelled.split(", ")
    flag, _, metavar = last.partition(" ")
    parameter = PARAMETERS.get(flag, flag.strip("-").replace("-", "_"))
    declared = [*names, flag, parameter]
    if metavar:
        return Valued(declared, metavar=metavar, help=text or FLAGS[flag], hidden=hidden)
    return click.Option(declared, is_flag=True, help=text or FLAGS[flag], hidden=hidden)


class Paged(click.Command):
    """A command with a page of `--help`."""

    def __init__(self, name: str, page: Page, params: Sequence[click.Parameter] = ()) -> None:
        # A paragraph of a page is one line of its file's text.
        paragraphs = (textwrap.fill(line, WIDTH) for line in page.help.split("\n"))
        own = [_option(spelled, text) for spelled, text in page.flags.items()]
        own += [_option(spelled, text, hidden=True) for spelled, text in page.hidden.items()]
        super().__init__(
            name,
            params=[*own, *_shared(own), *params],
            help="\n".join(paragraphs),
            short_help=page.short,
            add_help_option=False,
            # other systems' flags reach `parsing`, which names the setting that they mean
            context_settings={"ignore_unknown_options": True},
        )
        self.declared = page

    def options(self) -> list[click.Option]:
        """Return the flags that the page shows."""
        return [p for p in self.params if isinstance(p, click.Option) and not p.hidden]

    def flags(self) -> list[str]:
        """Return the flags that the page shows, one word for each spelling."""
        return [flag for option in self.options() for flag in option.opts]

    def page(self) -> str:
        """Return the page: usage, what the verb does, arguments, flags, examples."""
        page = self.declared
        lines = [f"usage: {program()} {page.usage}".rstrip(), "", self.help or ""]
        words: dict[str, str] = {}
        for name, text in page.arguments.items():
            words |= SETTINGS if name == "SETTINGS" else {name: text or ""}
        flags = {
            " ".join(filter(None, (", ".join(o.opts), o.metavar))): o.help or ""
            for o in self.options()
        }
        for title, rows in (("arguments", words), ("flags", flags)):
            if rows:
                width = max(map(len, rows))
                lines += ["", title, *(f"  {name:<{width}}  {text}" for name, text in rows.items())]
        return "\n".join([*lines, "", "examples", *example_lines(page.examples)])


def example_lines(examples: Mapping[str, str]) -> list[str]:
    """Return commands as a user types them here, each with what it does in the line below."""
    lines = []
    for words, text in examples.items():
        typed = program() if words == "train" else f"{program()} {words}"
        lines += [f"  {typed}", f"      {text}".rstrip()]
    return lines


def _print_page(ctx: click.Context, param: click.Parameter, wanted: bool) -> None:
    if wanted and isinstance(ctx.command, Paged):
        say_page(ctx.command.page())
        ctx.exit()


def _print_version(ctx: click.Context, param: click.Parameter, wanted: bool) -> None:
    if wanted:
        from mtrain import __version__

        say_page(f"mtrain {__version__}")
        ctx.exit()


def _refuse_many(ctx: click.Context, param: click.Parameter, wanted: bool) -> None:
    if wanted:
        verb = ctx.command.name
        rule = f"-m: train and check take several values; {verb} takes one run"
        raise refusal(rule, f"{verb}, without -m")


def _shared(own: Sequence[click.Option]) -> list[click.Option]:
    """Return the flags that every verb knows and this one does not declare."""
    silent: dict[str, Any] = {"is_flag": True, "expose_value": False}
    hidden = {**silent, "hidden": True}
    every = (
        # Every verb accepts --json, also one without data: with it, errors are JSON.
        click.Option(["--json"], **hidden),
        click.Option(["-m", "--multirun"], callback=_refuse_many, **hidden),
        click.Option(["--debug"], help=DEBUG, **silent),
        # Eager flags act first: `--help` prints the page whatever else the line has.
        click.Option(["--version"], is_eager=True, callback=_print_version, **hidden),
        click.Option(HELP, is_eager=True, callback=_print_page, help="print this page", **silent),
    )
    taken = {name for option in own for name in option.opts}
    return [option for option in every if option.opts[-1] not in taken]


class Verb(Paged):
    """A command whose words click does not interpret: settings, paths, and flags that no verb has.

    Its function receives `words` and its own flags, and returns the exit code.
    """

    def __init__(self, name: str, page: Page) -> None:
        words = click.Argument(["words"], nargs=-1, type=click.UNPROCESSED)
        super().__init__(name, page, [words])

    def call(self, args: Sequence[str]) -> dict[str, Any]:
        """Return the arguments of the verb's function.

        Raises:
            ConfigError: a flag lacks its value, or has one that it does not take.
            click.exceptions.Exit: the page or the version was printed instead.
        """
        try:
            # This parses and runs nothing: `parsing` first checks the words that click leaves
            # unread.
            context = self.make_context(self.name, list(args))
        except click.UsageError as error:
            self._refuse(error)
        return {**context.params, "words": list(context.params["words"])}

    def _refuse(self, error: click.UsageError) -> Never:
        # click has its own words for usage errors; mtrain's have a code and a fix.
        flag = str(getattr(error, "option_name", ""))
        for param in self.params:
            if flag in param.opts:
                if isinstance(param, Valued):
                    raise param.refusal() from None
                raise refusal(f"{flag}: takes no value", flag) from None
        raise refusal(error.format_message(), f"{self.name} --help") from None


class Subverbs(Paged):
    """A verb whose first word names what it does."""

    def __init__(self, name: str, page: Page) -> None:
        super().__init__(name, page)
        # No click.Group: it wants the subverb first, and here flags and settings may stand before
        # it.
        self.commands = {sub: Verb(sub, Page(**inner)) for sub, inner in page.subverbs.items()}
