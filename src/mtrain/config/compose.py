"""argv -> one validated configuration, with who set each key.

Precedence, lowest first: schema default, group file, recipe (or the run file, which is complete), command line.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mtrain.config.files import read_text
from mtrain.config.interpolate import leaves, refused, resolve_references
from mtrain.config.keys import schema_keys
from mtrain.config.layout_string import looks_like_layout, nearest_layout, parse_layout
from mtrain.config.load import Document, filled, load
from mtrain.config.locked import edited
from mtrain.config.model import ModelConfig
from mtrain.config.near import choice_fix, default_choices, layouts_near
from mtrain.config.overrides import COMMAND_LINE, Overrides, read_overrides
from mtrain.config.paths import choices_of_group, conf_dir
from mtrain.config.recipe import Recipe, read_recipe, reserved_keys
from mtrain.config.run import GROUPS, RunConfig
from mtrain.config.validate import unknown_key, validate, whole, wrong_kind
from mtrain.config.written import KEYS, strays
from mtrain.errors import ConfigError, Problem

DEFAULT = "default"
ARCHITECTURE = tuple(name for name, field in ModelConfig.model_fields.items() if field.is_required())
"""What a model cannot be without: its keys that have no default of their own."""


@dataclass(frozen=True)
class Composed:
    """A configuration that passed the schema."""

    run: RunConfig
    origins: dict[str, str]
    """Who set each leaf: `conf/model/llama3_8b.yaml:7`, a recipe's `file:line`, `command line`, `default`."""
    choices: dict[str, str]
    """group -> choice; with a run file only the groups that the command line replaced."""
    warnings: tuple[Problem, ...] = ()
    history: tuple[Setting, ...] = ()
    """Everything that was set, in order: of two settings of one key the later one holds."""
    files: Mapping[str, Path] = field(default_factory=dict)
    """Every file that it was composed from, by the name that problems show."""


@dataclass(frozen=True)
class Setting:
    """A key or a section that something set."""

    path: str
    value: Any
    source: str


class Rejected(ConfigError):
    """What the schema refused; `partial` is the rest where it makes sense alone, to be validated as well."""

    def __init__(self, problems: Sequence[Problem], partial: Composed | None) -> None:
        super().__init__(problems)
        self.partial = partial


def compose(argv: Sequence[str]) -> Composed:
    """Composes group files, a recipe or run file, and overrides.

    Raises:
        Rejected: with every problem that was found.
    """
    return _Composition(read_overrides(argv)).finish()


@dataclass
class _Tree:
    """Values with the origin of every leaf."""

    values: dict[str, Any] = field(default_factory=dict)
    origins: dict[str, str] = field(default_factory=dict)
    history: list[Setting] = field(default_factory=list)

    def merge(self, values: Mapping[str, Any], where: Callable[[str], str], prefix: str = "") -> None:
        """Lays `values` (nested) over what is there; `where` gives the origin of a dotted key."""
        parent = self.section(prefix)
        for key, value in values.items():
            path = f"{prefix}.{key}" if prefix else key
            if isinstance(value, dict) and value and isinstance(parent.get(key), dict):
                self.merge(value, where, path)
            else:
                self.replace(path, value, where)

    def replace(self, path: str, value: Any, where: Callable[[str], str]) -> None:
        """Sets the key at `path`, with everything under it.

        Raises:
            KeyError: a part of the path is no mapping.
        """
        parent, _, last = path.rpartition(".")
        section = self.section(parent)
        if last in section:  # only then something beneath it was set
            for known in [k for k in self.origins if k == path or k.startswith(f"{path}.")]:
                del self.origins[known]
        section[last] = value
        for leaf, inner in leaves(value, path):
            self.origins[leaf] = where(leaf)
            self.history.append(Setting(leaf, inner, self.origins[leaf]))

    def section(self, path: str) -> dict[str, Any]:
        node = self.values
        for part in path.split(".") if path else ():
            inner = node.get(part)
            if inner is None:
                inner = node[part] = {}
            if not isinstance(inner, dict):
                raise KeyError(path)
            node = inner
        return node

    def where(self, path: str) -> str:
        """Who set the key at `path`; for one that nobody set, who set its neighbours."""
        if path in self.origins:
            return self.origins[path]
        prefix = path
        while prefix:
            inside = [source for key, source in self.origins.items() if key.startswith(f"{prefix}.")]
            if inside:
                return inside[0].rpartition(":")[0] if ":" in inside[0] and prefix != path else inside[0]
            prefix = prefix.rpartition(".")[0]
            if prefix in self.origins:
                return self.origins[prefix]
        return DEFAULT


class _Composition:
    """One composition; collects problems as far as it can go."""

    def __init__(self, overrides: Overrides) -> None:
        self.overrides = overrides
        self.problems = list(overrides.problems)
        self.conf = conf_dir()
        self.documents: dict[str, Document] = {}
        self.files: dict[str, Path] = {}
        self.layouts: dict[str, dict[str, Any]] = {}
        self.default_sources: dict[str, str] = {}
        self.tree = _Tree()

    def finish(self) -> Composed:
        recipe = self._recipe()
        base = self._run_file()
        chosen, sources = self._choices(recipe)
        own = recipe is not None and "model" not in chosen and self._is_whole_model(recipe)
        known = self._groups(chosen, sources, base, without=("model",) if own else ())
        beneath = [copy.deepcopy(self.tree.values)]
        if own:  # what a refused key of it is validated with for the time being
            beneath[0]["model"] = dict(self._document(f"model/{default_choices(self.conf)[0]['model']}").values)
        if recipe is not None:
            self.tree.merge(recipe.values, recipe.document.where)
        beneath.append(copy.deepcopy(self.tree.values))
        self._values()
        self.problems += resolve_references(self.tree.values, self.tree.where)
        run, problems = validate(self.tree.values, self.tree.where)
        self.problems += problems
        strayed: list[Problem] = []
        if run is not None:
            files = {document.source for document in (recipe and recipe.document, base) if document}
            said = {key: self._origin(key) for key in KEYS if self._origin(key).rpartition(":")[0] in files}
            strayed = strays(run, said, Path(self.overrides.run) if self.overrides.run else None)
            self.problems += strayed
        choices = chosen if base is not None else known
        if run is None or self.problems:
            found = _distinct(self.problems)
            paths = [p.path for p in (found if run is None else strayed)]
            rest = run if run and not strayed else self._without(paths, *beneath) or self._without(paths)
            raise Rejected(found, self._composed(rest, choices) if rest is not None else None)
        return self._composed(run, choices)

    def _composed(self, run: RunConfig, choices: dict[str, str]) -> Composed:
        origins = {key: self._origin(key) for key in run.flat()}
        return Composed(run, origins, choices, history=tuple(self.tree.history), files=dict(self.files))

    def _without(
        self, paths: Sequence[str], files: Mapping[str, Any] | None = None, recipe: Mapping[str, Any] | None = None
    ) -> RunConfig | None:
        """The configuration with each refused key as it was beneath the one that set it, or at its default.

        `files` are the values of the group files, `recipe` those with the recipe's.
        """
        values = copy.deepcopy(self.tree.values)
        for path in map(whole, filter(None, paths)):
            parent, _, last = path.rpartition(".")
            under = recipe if self.tree.where(path) == COMMAND_LINE else files
            node, before = _at(values, parent), _at(under or {}, parent)
            if isinstance(node, dict):
                node.pop(last, None)
                if isinstance(before, dict) and last in before:
                    node[last] = copy.deepcopy(before[last])
        return validate(values, self.tree.where)[0]

    def _origin(self, key: str) -> str:
        while key:
            if key in self.tree.origins:
                return self.tree.origins[key]
            key = key.rpartition(".")[0]
        return DEFAULT

    def _recipe(self) -> Recipe | None:
        if self.overrides.recipe is None or self.overrides.run is not None:
            return None
        recipe, problems = read_recipe(self.overrides.recipe)
        self.problems += problems
        if recipe is not None:
            self.files[recipe.document.source] = recipe.path
        return recipe

    def _run_file(self) -> Document | None:
        if self.overrides.run is None:
            return None
        try:
            path = Path(self.overrides.run)
            document = filled(load(path))
            self.files[document.source] = path
            changed = edited(read_text(path, document.source), document.source)
            self.problems += [changed] if changed is not None else []
        except ConfigError as error:
            self.problems += error.problems
            return None
        self.problems += reserved_keys(document.values, document)
        self.problems += refused(document.values, document.where)
        return document

    def _choices(self, recipe: Recipe | None) -> tuple[dict[str, str], dict[str, str]]:
        """group -> choice and group -> who chose, of those choices that exist."""
        chosen: dict[str, str] = {}
        sources: dict[str, str] = {}
        layers = [(recipe.choices, recipe.choice_lines)] if recipe is not None else []
        for choices, lines in [*layers, (self.overrides.choices, {})]:
            for group, choice in choices.items():
                source = lines.get(group, COMMAND_LINE)
                problem = self._unknown(group, choice, source)
                if problem is None:
                    chosen[group], sources[group] = choice, source
                else:
                    self.problems.append(problem)
        return chosen, sources

    def _unknown(self, group: str, choice: str, source: str) -> Problem | None:
        choices = choices_of_group(group)
        if choice in choices:
            return None
        if group == "parallel":
            try:
                self.layouts[choice] = parse_layout(choice)
                return None
            except ValueError as error:
                if looks_like_layout(choice):
                    return Problem("MT016", group, choice, str(error), _layout_fix(choice), source)
        fix = choice_fix(group, choice, default_choices(self.conf)[0][group])
        also = ", or a layout such as tp4pp4" if group == "parallel" else ""
        rule = f"there is no such choice; choices: {', '.join(choices)}{also}"
        return Problem("MT011", group, choice, rule, fix, source)

    def _is_whole_model(self, recipe: Recipe) -> bool:
        """Whether a recipe that names no model describes one of its own, which then stands on no other.

        One that describes a part only is refused: the rest would be the default model's, and nobody said so.
        """
        stated = recipe.values.get("model")
        if not isinstance(stated, dict) or not stated:
            return False
        said = {*stated, *(key.split(".")[1] for key in self.overrides.values if key.startswith("model."))}
        missing = [name for name in ARCHITECTURE if name not in said]
        if missing:
            default = default_choices(self.conf)[0]["model"]
            rule = (
                f"a model of its own that lacks {', '.join(missing)}; a recipe states them all, or names the model "
                f"that it changes: `defaults: [override /model: {default}]`"
            )
            source = recipe.document.where("model")
            self.problems.append(Problem("MT018", "model", stated, rule, f"model={default}", source))
        return not missing

    def _groups(
        self, chosen: dict[str, str], sources: dict[str, str], base: Document | None, without: Sequence[str] = ()
    ) -> dict[str, str]:
        """Fills the tree from the run file and the group files; returns group -> choice.

        `without` are groups whose default choice is left out.
        """
        if base is not None:
            self.tree.merge(base.values, base.where)
        if base is not None and not chosen:
            return {}
        files, known = self._files(chosen)
        for group in chosen if base is not None else ():
            self.tree.replace(group, {}, lambda _: COMMAND_LINE)
            del self.tree.origins[group]
        for path, package in files:
            group = path.partition("/")[0]
            if group not in GROUPS or group in without or (base is not None and group not in chosen):
                continue
            layout = self.layouts.get(path.partition("/")[2]) if group == "parallel" else None
            if layout is not None:
                source = sources.get(group) or self.default_sources.get(group, DEFAULT)
                self.tree.merge(layout, lambda _, s=source: s, package)  # type: ignore[misc]
            else:
                self._merge_file(path, package)
        return {group: choice for group, choice in known.items() if group not in without}

    def _files(self, chosen: Mapping[str, str]) -> tuple[list[tuple[str, str]], dict[str, str]]:
        """The group files in order of rising precedence with the key each fills, and group -> choice.

        Reads them with our own reader first: its problems name the line. Where a file has a defaults list of
        its own, Hydra follows it.
        """
        choices, self.default_sources = default_choices(self.conf)
        self.files["conf/config.yaml"] = self.conf / "config.yaml"
        parallel = choices.get("parallel", "")
        if parallel not in choices_of_group("parallel"):
            self.layouts[parallel] = parse_layout(parallel)
        problems: list[Problem] = []
        for group, choice in {**choices, **chosen}.items():
            if group != "parallel" or choice not in self.layouts:
                try:
                    self._document(f"{group}/{choice}")
                except ConfigError as error:
                    problems += error.problems
        if problems:
            raise ConfigError([*self.problems, *problems])
        known = {**choices, **chosen}
        if any(d.packaged or "defaults" in d.values for d in self.documents.values()):
            from mtrain.config.source import defaults_list

            return defaults_list(self.conf, chosen, self.layouts)
        return [(f"{group}/{choice}", group) for group, choice in known.items()], known

    def _document(self, path: str) -> Document:
        if path not in self.documents:
            file = self.conf / f"{path}.yaml"
            self.documents[path] = load(file)
            self.files[self.documents[path].source] = file
        return self.documents[path]

    def _merge_file(self, path: str, package: str) -> None:
        document = self._document(path)
        cut = len(package) + 1 if package else 0
        values = {key: value for key, value in document.values.items() if key != "defaults"}
        self.problems += reserved_keys(values, document)
        self.problems += refused(values, lambda key: document.where(key[cut:]), package)
        self.tree.merge(values, lambda key: document.where(key[cut:]), package)

    def _values(self) -> None:
        for path, value in self.overrides.values.items():
            self.problems += refused(value, lambda _: COMMAND_LINE, path)
            try:
                if isinstance(value, dict) and value:
                    self.tree.merge(value, lambda _: COMMAND_LINE, path)
                else:
                    self.tree.replace(path, value, lambda _: COMMAND_LINE)
            except KeyError:
                make = wrong_kind if path in schema_keys() else unknown_key
                self.problems.append(make(path, value, lambda _: COMMAND_LINE))


def _layout_fix(choice: str) -> str:
    return " or ".join(f"parallel={word}" for word in layouts_near(choice)) or nearest_layout(choice)


def _at(values: Mapping[str, Any], path: str) -> Any:
    """What stands at a dotted path; None where nothing does."""
    node: Any = values
    for name in path.split(".") if path else ():
        node = node.get(name) if isinstance(node, Mapping) else None
    return node


def _distinct(problems: Sequence[Problem]) -> list[Problem]:
    """`problems` without repetitions; a refused reference is not validated by its type as well."""
    seen: dict[tuple[str, str, str, str], Problem] = {}
    refused_at: set[str] = set()
    for problem in problems:
        if problem.path in refused_at:
            continue
        if problem.code == "MT007":
            refused_at.add(problem.path)
        seen.setdefault((problem.code, problem.path, problem.rule, problem.source), problem)
    return list(seen.values())
