"""Chats as the text that a model was trained on: the template of its tokenizer, in a sandbox."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cached_property
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from mtrain import strict_json
from mtrain.config.files import kind_of
from mtrain.errors import ConfigError, CorruptData, Problem

SETTINGS_FILE, TEMPLATE_FILE = "tokenizer_config.json", "chat_template.jinja"
FILES = (SETTINGS_FILE, TEMPLATE_FILE)
"""What may lie beside a tokenizer.json."""
LIMIT_BYTES = 16 << 20
JINJA = (3, 1, 6)
"""Older versions of jinja2 have known ways out of the sandbox."""
Message = Mapping[str, Any]


class ChatFormat:
    """What a tokenizer's folder says of chats.

    Raises CorruptData for a file that is not what it should be.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @cached_property
    def settings(self) -> dict[str, Any]:
        """The tokenizer_config.json; empty where there is none."""
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
        """The text of a special token such as `eos_token`."""
        token = self.settings.get(name)
        token = token.get("content") if isinstance(token, dict) else token
        return token if isinstance(token, str) else None

    @property
    def template(self) -> str | None:
        """The template, of several that which is called `default`."""
        found = _text(self.folder / TEMPLATE_FILE) or self.settings.get("chat_template")
        if isinstance(found, list):
            named = {t.get("name"): t.get("template") for t in found if isinstance(t, dict)}
            found = named.get("default")
        return found if isinstance(found, str) else None

    def render(self, messages: Sequence[Message]) -> str:
        """The text of a chat up to where the model's answer begins.

        Raises:
            ConfigError: there is no template, jinja2 is missing, or the template refuses the messages.
        """
        source = self.template
        if source is None:
            rule = f"{self.folder} has no {TEMPLATE_FILE} and no chat_template in {SETTINGS_FILE}"
            fix = f"prompt=TEXT without a chat, or {SETTINGS_FILE} of the model beside the tokenizer.json"
            raise ConfigError([Problem("MT509", "", None, rule, fix)])
        special = {name: token for name in self.settings if (token := self.special(name)) and name.endswith("_token")}
        environment = _environment()
        try:
            template = environment.from_string(source)
            return str(template.render(messages=list(messages), add_generation_prompt=True, **special))
        except Exception as error:  # templates are programs, and these are theirs
            rule = f"the chat template of {self.folder} ends with {type(error).__name__}: {error}"
            fix = "messages as it wants them, such as roles in turn"
            raise ConfigError([Problem("MT509", "", None, rule, fix)]) from error


def _text(path: Path) -> str | None:
    try:
        if kind_of(path) or path.stat().st_size > LIMIT_BYTES:
            raise CorruptData(f"{path}: no file of at most {LIMIT_BYTES >> 20} MiB")
        return path.read_bytes().decode()
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise CorruptData(f"{path}: cannot be read: {error}") from error


def _environment() -> Any:
    """Jinja as transformers sets it up: nothing can be changed, and no attribute leads out."""
    try:
        found = tuple(int(part) for part in version("jinja2").split(".") if part.isdigit())
    except PackageNotFoundError:
        found = ()
    if found < JINJA:
        rule = f"the template of a chat needs jinja2, at least {'.'.join(map(str, JINJA))}"
        raise ConfigError([Problem("MT510", "", None, rule, "pip install 'mtrain[chat]'")])
    import jinja2
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Namespace(jinja2.utils.Namespace):  # type: ignore[name-defined, misc]
        def __init__(*args: Any, **kwargs: Any) -> None:
            self, values = args[0], dict(*args[1:], **kwargs)
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

    def tojson(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
        return strict_json.dumps(value, ensure_ascii=ensure_ascii, **options)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_generation_tag(), "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = tojson
    environment.globals |= {
        "raise_exception": refuse,
        "strftime_now": lambda form: datetime.now().strftime(form),
        "dict": lambda *args, **kwargs: dict(*args, **kwargs),
        "namespace": Namespace,
    }
    return environment


def _generation_tag() -> Any:
    """`{% generation %}`, with which templates mark what the model says: here it marks nothing."""
    from jinja2 import nodes
    from jinja2.ext import Extension

    class Generation(Extension):
        tags = {"generation"}

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.Scope(body, lineno=line)

    return Generation
