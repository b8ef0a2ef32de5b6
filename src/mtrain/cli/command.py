"""A verb of the command line: a click command with flags, words that click passes on unread, and a
page of `--help`.

A verb is declared in one file of `mtrain.cli.verbs`, which imports what it runs only when it runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Never

import click

from mtrain.config.compose.paths import program
from mtrain.errors import ConfigError, Problem, say_page

OVERRIDES = "[GROUP=CHOICE ...] [KEY=VALUE ...]"
SETTINGS = (
    ("GROUP=CHOICE", "a file under conf/, as in model=llama3_8b; `choices GROUP` lists them"),
    ("parallel=LAYOUT", "a layout in one word: tp4pp4, tp8pp12cp2vpp4ep8, tp2pp2dp2, tp4sp"),
    ("KEY=VALUE", "one key, as in optim.lr=3e-4; `explain KEY` describes it"),
    ("recipe=NAME", "a recipe under recipes/, or the path of one"),
    ("run=FILE", "a resolved file, such as the run.yaml of a run folder"),
)
RUN = ("RUN", "the folder of a run, or one of its checkpoints")
RECIPE = ("NAME", "a recipe under recipes/, the path of one, a lock, or the folder of a run")
OUTPUT = "write to this file; an existing file is an error"
DEBUG = "print the traceback of an error"
HELP = ("-h", "--help")
SHARED = frozenset({"--json", "-m", "--multirun", "--debug", "-h", "--help", "--version"})
"""Flags that every verb knows; a page shows those that have an effect."""
WIDTH = 100

Rows = Sequence[tuple[str, str]]
Offers = Callable[[Sequence[str], str], Iterable[str]]
"""The words before the cursor and the word at it -> the candidates of a completion."""


def refusal(rule: str, fix: str) -> ConfigError:
    """Return the error of a command line that cannot be read."""
    return ConfigError([Problem("MT010", "", None, rule, fix, "command line")])


def needed(words: Sequence[str], usage: str) -> str:
    """Return the first word.

    Raises:
        ConfigError: there are no words.
    """
    if not words:
        raise refusal("a word is missing", usage)
    return words[0]


class Valued(click.Option):
    """A flag that takes a value, at most once."""

    def __init__(self, *args: Any, example: str = "", **attributes: Any) -> None:
        attributes |= {"multiple": True, "callback": self.value}
        super().__init__(*args, **attributes)
        self.example = example or self.metavar

    def refusal(self) -> ConfigError:
        """Return the error of this flag without its value."""
        flag = self.opts[-1]
        return refusal(f"{flag}: needs a value", f"{flag} {self.example}")

    def value(
        self, ctx: click.Context, param: click.Parameter, values: tuple[str, ...]
    ) -> str | None:
        """Return the value; None: the flag is absent.

        Raises:
            ConfigError: the value is empty or another flag, or there are several.
        """
        texts = [text.removeprefix("=") for text in values]  # click keeps the sign of -o=FILE
        if any(not text or text.startswith("--") for text in texts):
            raise self.refusal()
        if len(texts) > 1:
            flag = self.opts[-1]
            raise refusal(f"{flag}: is given twice", f"{flag} {texts[0]}, once")
        return texts[0] if texts else None


def valued(*names: str, metavar: str, text: str, example: str = "") -> Callable[[Any], Any]:
    """Declare a flag with a value; the verb receives None without it."""
    return click.option(*names, cls=Valued, metavar=metavar, help=text, example=example)


as_json = click.option("--json", "as_json", is_flag=True, help="print JSON for a machine")
many = click.option(
    "-m",
    "--multirun",
    is_flag=True,
    help="one run for each combination of KEY=A,B or KEY=range(1,4)",
)


class Paged(click.Command):
    """A command with a page of `--help`.

    Attributes:
        usage: the command line, without the name of the program.
        arguments: what the words are.
        examples: command lines, without the name of the program, and what each does.
        offers: what completes a word of it; None: settings.
        path_at: how many bare words precede the path that may also stand before the verb; None: no
            path may.
    """

    def __init__(
        self,
        name: str | None = None,
        *,
        usage: str = "",
        arguments: Rows = (),
        examples: Rows = (),
        offers: Offers | None = None,
        path_at: int | None = None,
        **attributes: Any,
    ) -> None:
        super().__init__(name, **attributes)
        self.usage = usage
        self.arguments = arguments
        self.examples = examples
        self.offers = offers
        self.path_at = path_at

    def get_help_option(self, ctx: click.Context) -> click.Option:
        """Return the flag that prints the page."""
        return click.Option(
            HELP,
            is_flag=True,
            is_eager=True,
            expose_value=False,
            callback=_print_page,
            help="print this page",
        )

    def options(self) -> list[click.Option]:
        """Return the flags that the page shows."""
        with click.Context(self) as context:
            params = self.get_params(context)
        return [param for param in params if isinstance(param, click.Option) and not param.hidden]

    def flags(self) -> list[str]:
        """Return the flags that the page shows, each spelling as a word of its own."""
        return [flag for option in self.options() for flag in option.opts]

    def page(self) -> str:
        """Return the page: usage, what the verb does, arguments, flags, examples."""
        lines = [f"usage: {program()} {self.usage}".rstrip(), "", self.help or ""]
        flags = [_row(option) for option in self.options()]
        for title, rows in (("arguments", self.arguments), ("flags", flags)):
            if rows:
                width = max(len(name) for name, _ in rows)
                lines += ["", title, *(f"  {name:<{width}}  {text}" for name, text in rows)]
        if self.examples:
            lines += ["", "examples"]
        for words, text in self.examples:
            lines += [f"  {typed(words)}", f"      {text}".rstrip()]
        return "\n".join(lines)


def _row(option: click.Option) -> tuple[str, str]:
    names = ", ".join(option.opts)
    return (f"{names} {option.metavar}" if option.metavar else names), option.help or ""


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
        raise refusal(
            f"-m: train and check take several values; {verb} takes one run", f"{verb}, without -m"
        )


def _shared(declared: Sequence[click.Parameter]) -> list[click.Parameter]:
    """Return the flags that every verb knows and this one does not declare."""
    taken = {name for param in declared for name in param.opts}
    flags: list[click.Parameter] = []
    if "--json" not in taken:
        flags.append(click.Option(["--json"], is_flag=True, hidden=True, expose_value=False))
    if "--multirun" not in taken:
        flags.append(
            click.Option(
                ["-m", "--multirun"],
                is_flag=True,
                hidden=True,
                expose_value=False,
                callback=_refuse_many,
            )
        )
    if "--debug" not in taken:
        flags.append(click.Option(["--debug"], is_flag=True, expose_value=False, help=DEBUG))
    flags.append(
        click.Option(
            ["--version"],
            is_flag=True,
            is_eager=True,
            hidden=True,
            expose_value=False,
            callback=_print_version,
        )
    )
    return flags


class Verb(Paged):
    """A command whose words click does not interpret: settings, paths, and flags that no verb has.

    The function of a verb receives `words` and its own flags, and returns the exit code.
    """

    def __init__(
        self, name: str | None = None, *, params: list[click.Parameter], **attributes: Any
    ) -> None:
        words = click.Argument(["words"], nargs=-1, type=click.UNPROCESSED)
        super().__init__(
            name,
            params=[*params, *_shared(params), words],
            context_settings={"ignore_unknown_options": True},
            **attributes,
        )

    def call(self, args: Sequence[str], **further: Any) -> dict[str, Any]:
        """Return the arguments of the verb's function.

        Raises:
            ConfigError: a flag lacks its value, or has one that it does not take.
            click.exceptions.Exit: the page or the version was printed instead.
        """
        try:
            context = self.make_context(self.name, list(args))
        except click.UsageError as error:
            self._refuse(error)
        return {**context.params, "words": list(context.params["words"]), **further}

    def _refuse(self, error: click.UsageError) -> Never:
        flag = str(getattr(error, "option_name", ""))
        for param in self.params:
            if flag in param.opts:
                if isinstance(param, Valued):
                    raise param.refusal() from None
                raise refusal(f"{flag}: takes no value", flag) from None
        raise refusal(error.format_message(), f"{self.name} --help") from None


class Subverbs(Paged, click.Group):
    """A verb whose first word names what it does."""

    command_class = Verb

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        """Return the flags on the page of the verb itself."""
        return [*_shared([]), self.get_help_option(ctx)]


def typed(words: str) -> str:
    """Return a command as a user types it here."""
    return program() if words == "train" else f"{program()} {words}"
