"""Chat templates: a tokenizer's template renders the messages of a chat as text, in a sandbox."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from mtrain import strict_json
from mtrain.config.disk.files import kind_of
from mtrain.errors import ConfigError, CorruptData

SETTINGS_FILE = "tokenizer_config.json"
TEMPLATE_FILE = "chat_template.jinja"
# Files that may accompany a tokenizer.json
FILES = (SETTINGS_FILE, TEMPLATE_FILE, "special_tokens_map.json", "added_tokens.json")
GENERATION = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
LIMIT_BYTES = 16 << 20
# Older versions of jinja2 have known escapes from the sandbox
JINJA = (3, 1, 6)
# Characters that a template may make of a chat
MAX_TEXT = 16 << 20
# Keys for the reasoning of a message; a template reads one of them
REASONING = ("reasoning_content", "thinking", "reasoning")
Message = Mapping[str, Any]


@dataclass(frozen=True)
class Rendered:
    """A chat as text."""

    text: str
    marked: list[tuple[int, int]]
    """Begin and end of each part that the template marks with `{% generation %}` as the model's."""


class ChatFormat:
    """The chat settings in a tokenizer's folder; `template_file` replaces the folder's template.

    Raises CorruptData for a file that cannot be used.
    """

    def __init__(self, folder: Path, template_file: Path | None = None) -> None:
        self.folder = folder
        self.template_file = template_file
        self._compiled: dict[str, Any] = {}
        """Source -> compiled template."""

    @cached_property
    def settings(self) -> dict[str, Any]:
        """Return the tokenizer_config.json, or {} without one."""
        path = self.folder / SETTINGS_FILE
        text = _text(path)
        try:
            value = json.loads(text) if text is not None else {}
        except (ValueError, RecursionError) as error:
            raise CorruptData(f"{path}: not JSON: {error}") from error
        if not isinstance(value, dict):
            raise CorruptData(f"{path}: not a JSON object")
        return value

    def special(self, name: str) -> str | None:
        """Return the text of a special token such as `eos_token`."""
        token = self.settings.get(name)
        token = token.get("content") if isinstance(token, dict) else token
        return token if isinstance(token, str) else None

    @property
    def shown(self) -> Path:
        """Return the file or folder that messages name for the template."""
        return self.template_file or self.folder

    @cached_property
    def templates(self) -> dict[str, str]:
        """Return the templates by name: `default`, and maybe `tool_use` for chats with tools."""
        source: Any
        if self.template_file is not None:
            source = _text(self.template_file)
        else:
            source = _text(self.folder / TEMPLATE_FILE) or self.settings.get("chat_template")
        rows = source if isinstance(source, list) else [{"name": "default", "template": source}]
        named = {one.get("name"): one.get("template") for one in rows if isinstance(one, dict)}
        return {
            name: text
            for name, text in named.items()
            if isinstance(name, str) and isinstance(text, str)
        }

    @property
    def template(self) -> str | None:
        """Return the `default` template."""
        return self.templates.get("default")

    @cached_property
    def special_tokens(self) -> dict[str, str]:
        """Return the texts of the named special tokens, such as `eos_token`."""
        names = (name for name in self.settings if name.endswith("_token"))
        return {name: token for name in names if (token := self.special(name))}

    def render(self, messages: Sequence[Message]) -> str:
        """Return the text of a chat up to where the model's answer begins.

        Raises:
            ConfigError: there is no template, jinja2 is missing, or the template refuses the
                messages.
        """
        if self.template is None:
            fix = (
                f"prompt=TEXT without a chat, or {SETTINGS_FILE} of the model next to the"
                " tokenizer.json"
            )
            raise ConfigError.of("MT509", "", None, self.missing, fix)
        try:
            return self.write(messages, prompt=True).text
        except CorruptData as error:
            fix = "messages that the template accepts, such as alternating roles"
            raise ConfigError.of("MT509", "", None, str(error), fix) from error

    @property
    def missing(self) -> str:
        """Return the message for a missing template."""
        if self.template_file is not None:
            return f"{self.template_file}: there is no such file"
        return f"{self.folder} has no {TEMPLATE_FILE} and no chat_template in {SETTINGS_FILE}"

    def write(
        self, messages: Sequence[Message], tools: Sequence[Any] | None = None, *, prompt: bool
    ) -> Rendered:
        """Return a chat as transformers' apply_chat_template writes it.

        With `prompt`, the text ends where the model's answer begins.

        Raises:
            CorruptData: the template refuses the messages, fails, or makes too much text of them.
            ConfigError: jinja2 is missing.
        """
        names = ("tool_use", "default") if tools is not None else ("default",)
        source = next(self.templates[name] for name in names if name in self.templates)
        environment = self._environment
        given = {"messages": [_plain(one) for one in messages], "tools": tools, "documents": None}
        marks = _marks_of(environment)
        try:
            if source not in self._compiled:
                self._compiled[source] = environment.from_string(source)
            pieces = self._compiled[source].generate(
                **given, add_generation_prompt=prompt, **self.special_tokens
            )
            return marks.joined(pieces)
        except Exception as error:  # a template is a foreign program and may raise anything
            raise CorruptData(
                f"the chat template of {self.shown} ends with {type(error).__name__}:"
                f" {str(error)[:500]}"
            ) from error

    def require_jinja(self) -> None:
        """Raise ConfigError if jinja2 is missing or too old.

        This compiles no template, as compiling one may never end.
        """
        assert self._environment is not None

    def marks(self, *, with_tools: bool) -> bool:
        """Return whether the template marks the model's parts with `{% generation %}`."""
        name = "tool_use" if with_tools and "tool_use" in self.templates else "default"
        return GENERATION.search(self.templates.get(name, "")) is not None

    @cached_property
    def _environment(self) -> Any:
        return _sandbox()


def _plain(message: Message) -> dict[str, Any]:
    """Return a message without null values, its reasoning under every key that templates read."""
    made = {key: value for key, value in message.items() if value is not None}
    reasoning = next((made[key] for key in REASONING if key in made), None)
    if reasoning is None:
        return made
    return {**dict.fromkeys(REASONING, reasoning), **made, REASONING[0]: reasoning}


def _text(path: Path) -> str | None:
    try:
        if kind_of(path) or path.stat().st_size > LIMIT_BYTES:
            raise CorruptData(f"{path}: not a regular file of at most {LIMIT_BYTES >> 20} MiB")
        return path.read_bytes().decode()
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise CorruptData(f"{path}: cannot be read: {error}") from error


def _sandbox() -> Any:
    """Return jinja2 as transformers sets it up: immutable, with no attribute that leads out."""
    try:
        installed = tuple(int(part) for part in version("jinja2").split(".") if part.isdigit())
    except PackageNotFoundError:
        installed = ()
    if installed < JINJA:
        rule = f"the template of a chat needs jinja2, at least {'.'.join(map(str, JINJA))}"
        raise ConfigError.of("MT510", "", None, rule, "pip install 'mtrain[chat]'")
    import jinja2
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    # A namespace answers for every name that a template sets in it. Code outside of the sandbox
    # looks names with underscores up on objects, such as `__html__`, and would call the result.
    class Namespace(jinja2.utils.Namespace):  # type: ignore[name-defined, misc]
        def __init__(*args: Any, **kwargs: Any) -> None:
            self = args[0]
            values = dict(*args[1:], **kwargs)
            for name in values:
                Namespace._check(name)
            jinja2.utils.Namespace.__init__(self, values)

        def __setitem__(self, name: str, value: Any) -> None:
            Namespace._check(name)
            super().__setitem__(name, value)

        @staticmethod
        def _check(name: str) -> None:
            if str(name).startswith("_"):
                raise jinja2.exceptions.SecurityError(f"a template may not set {name}")

    def refuse(text: str) -> None:
        raise jinja2.TemplateError(text)

    # jinja2's own filter escapes < and & for HTML; transformers replaces it for that reason
    def tojson(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
        return strict_json.dumps(value, ensure_ascii=ensure_ascii, **options)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_generation_tag(), "jinja2.ext.loopcontrols"],
    )
    environment.filters["tojson"] = tojson
    environment.globals |= {
        "raise_exception": refuse,
        "strftime_now": lambda form: datetime.now().strftime(form),
        "dict": _Dict(),
        "namespace": Namespace,
    }
    return environment


class _Dict:
    """The `dict` of templates: an object with two functions, and not Python's class."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        """Return a new dict."""
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        """Return a dict of keys with one value."""
        return dict.fromkeys(*args, **kwargs)


def _generation_tag() -> Any:
    """Return the extension for `{% generation %}`, with which templates mark the model's parts."""
    import jinja2
    from jinja2 import nodes
    from jinja2.ext import Extension

    class Generation(Extension):
        tags = {"generation"}

        def __init__(self, environment: Any) -> None:
            super().__init__(environment)
            self.length = 0
            self.found = list[tuple[int, str]]()

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.CallBlock(self.call_method("_mark"), [], [], body).set_lineno(line)

        @jinja2.pass_eval_context
        def _mark(self, context: Any, caller: Any) -> str:
            text = str(caller())
            self.found.append((self.length, text))
            return text

        def joined(self, pieces: Iterable[str]) -> Rendered:
            """Return the joined pieces of a template's output, with the marks set meanwhile."""
            self.length = 0
            self.found = []
            kept = []
            for piece in pieces:
                kept.append(str(piece))
                self.length += len(piece)
                if self.length > MAX_TEXT:
                    raise ValueError(f"more than {MAX_TEXT} characters")
            text = "".join(kept)
            # inside a macro, a mark is made before the text around it is counted
            if not all(text.startswith(marked, start) for start, marked in self.found):
                raise ValueError(
                    "{% generation %} inside a macro or a set block, so its place is not known"
                )
            spans = [(start, start + len(marked)) for start, marked in self.found]
            return Rendered(text, spans)

    return Generation


def _marks_of(environment: Any) -> Any:
    """Return the extension of an environment that handles `{% generation %}`."""
    return next(one for one in environment.extensions.values() if "generation" in one.tags)
