"""argv -> one validated configuration, with who set each key.

Precedence, lowest first: schema default, group file, recipe (or the run file, which is complete), command line. Hydra
composes. Here everything is read before Hydra sees it, all that is wrong is collected, and origins are found.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_origin

from mtrain.config.choices import is_path, unknown_choice
from mtrain.config.files import read_text
from mtrain.config.hydra_source import NotComposed, composed
from mtrain.config.interpolate import leaves, refused, resolve_references
from mtrain.config.keys import field_of, section_in
from mtrain.config.layers import entries_of, layer
from mtrain.config.library import CONFIG, RECIPE, RECIPE_FILE, RUN, Library, restored
from mtrain.config.load import Document, filled, load
from mtrain.config.locked import edited
from mtrain.config.model import ModelConfig
from mtrain.config.near import default_choices
from mtrain.config.origins import COMMAND_LINE, Layer, Origins, Setting
from mtrain.config.overrides import Overrides, read_overrides
from mtrain.config.paths import user_path
from mtrain.config.recipe import Recipe, read_recipe, reserved_keys
from mtrain.config.run import GROUPS, RunConfig
from mtrain.config.validate import unknown_key, validate, whole
from mtrain.config.written import KEYS, strays
from mtrain.errors import ConfigError, Problem

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


class _Composition:
    """One composition; collects problems as far as it can go."""

    def __init__(self, overrides: Overrides) -> None:
        self.overrides = overrides
        self.problems = list(overrides.problems)
        self.library = Library()
        self.usual, self.default_sources = default_choices()
        self.defaults = dict(self.usual)
        """group -> the choice of `config.yaml`, but for groups that are taken away."""
        self.chosen: dict[str, str] = {}
        """group -> the choice of the recipe or the command line, as Hydra calls it."""
        self.sources: dict[str, str] = {}
        """group -> who chose."""
        self.shown: dict[str, str] = {}
        """group -> choice, as it was written."""

    def finish(self) -> Composed:
        recipe, base = self._recipe(), self._run_file()
        self._choose(recipe)
        own = recipe is not None and "model" not in self.chosen and self._is_whole_model(recipe)
        primary, words = self._bases(recipe, base, own)
        beneath = self._layers(primary, words, recipe is not None)
        origins = Origins(one for layers in beneath for one in layers)
        words += self._deletions(origins)
        values = self._composed(primary, words, self._settings(origins))
        refused_values = self._note_settings(origins, values)
        self.problems += self.library.problems + refused_values
        self.problems += resolve_references(values, origins.where)
        run, problems = validate(values, origins.where)
        self.problems += problems
        strayed = self._strayed(run, origins, recipe, base)
        self.problems += strayed
        if run is None or self.problems:
            found = _distinct(self.problems)
            paths = [p.path for p in (found if run is None else strayed)]
            if own:  # what a refused key of it is validated with for the time being
                beneath[0].append(layer(self.library, f"model/{self.usual['model']}", "model", self._chooser))
            rest = run if run and not strayed else self._without(values, origins, paths, beneath)
            raise Rejected(found, self._result(rest, origins) if rest is not None else None)
        return self._result(run, origins)

    def _result(self, run: RunConfig, origins: Origins) -> Composed:
        known = {key: origins.of(key) for key in run.flat()}
        return Composed(run, known, self.shown, history=tuple(origins.history), files=dict(self.library.files))

    def _recipe(self) -> Recipe | None:
        if self.overrides.recipe is None or self.overrides.run is not None:
            return None
        recipe, problems = read_recipe(self.overrides.recipe)
        self.problems += problems
        if recipe is not None:
            self.library.files[recipe.document.source] = recipe.path
        return recipe

    def _run_file(self) -> Document | None:
        if self.overrides.run is None:
            return None
        try:
            path = Path(self.overrides.run)
            document = filled(load(path))
            self.library.files[document.source] = path
            changed = edited(read_text(path, document.source), document.source)
            self.problems += [changed] if changed is not None else []
        except ConfigError as error:
            self.problems += error.problems
            return None
        values = {key: value for key, value in document.values.items() if key != "defaults"}
        if "defaults" in document.values:
            rule = "a run file is complete and stands on no other file; what names choices is a recipe"
            said, fix = document.values["defaults"], f"recipe={self.overrides.run}"
            self.problems.append(Problem("MT017", "defaults", said, rule, fix, document.where("defaults")))
        self.problems += reserved_keys(values, document)
        self.problems += refused(values, document.where)
        return document

    def _choose(self, recipe: Recipe | None) -> None:
        """Notes the choices of the recipe and, over them, of the command line; those that exist."""
        layers = [(recipe.choices, recipe.choice_lines)] if recipe is not None else []
        for choices, lines in [*layers, (self.overrides.choices, {})]:
            for group, choice in choices.items():
                source = lines.get(group, COMMAND_LINE)
                if is_path(choice):
                    self.chosen[group] = self.library.give_path(group, user_path(choice))
                elif (problem := unknown_choice(group, choice, source)) is not None:
                    self.problems.append(problem)
                    continue
                else:
                    self.chosen[group] = choice
                self.shown[group], self.sources[group] = choice, source
        for group, choice in list(self.overrides.added.items()):
            if (problem := unknown_choice(group, choice, COMMAND_LINE)) is not None:
                self.problems.append(problem)
                del self.overrides.added[group]

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
            default = self.usual["model"]
            rule = (
                f"a model of its own that lacks {', '.join(missing)}; a recipe states them all, or names the model "
                f"that it changes: `defaults: [override /model: {default}]`"
            )
            source = recipe.document.where("model")
            self.problems.append(Problem("MT018", "model", stated, rule, f"model={default}", source))
        return not missing

    def _bases(self, recipe: Recipe | None, base: Document | None, own: bool) -> tuple[str, list[str]]:
        """The name of what Hydra begins with, and the arguments for it that choose."""
        deleted = [group for group in self.overrides.deleted if group in GROUPS]
        added = [f"+{group}={choice}" for group, choice in self.overrides.added.items()]
        if base is not None:
            gone = {*deleted, *self.chosen, "defaults"}
            self.library.give(RUN, base, {k: v for k, v in base.values.items() if k not in gone})
            return RUN, [f"+{group}={choice}" for group, choice in self.chosen.items()] + added
        words = [f"{group}={choice}" for group, choice in self.chosen.items() if self.sources[group] == COMMAND_LINE]
        for group in [*deleted, *(["model"] if own and "model" not in deleted else [])]:
            if group in self.defaults:
                words.append(f"~{group}")
                del self.defaults[group]
        if recipe is not None:
            chosen = [
                {f"override /{g}": c} for g, c in recipe.choices.items() if g in self.chosen and g in self.defaults
            ]
            values = {**recipe.values, "defaults": chosen}
            self.library.give(RECIPE_FILE, recipe.document, values, "_global_")
            words.append(f"+{RECIPE}={RECIPE}")
        self.shown = {**self.defaults, **self.shown}
        return CONFIG, words + added

    def _layers(self, primary: str, words: list[str], recipe: bool) -> list[list[Layer]]:
        """The layers beneath the command line: those of files of choices or of a run file, and those of a recipe.

        Raises:
            ConfigError: a file cannot be read as data, or the files do not compose.
        """
        usual = {**self.defaults, **self.chosen} if primary == CONFIG else self.chosen
        entries = [(primary, ""), *((f"{group}/{choice}", group) for group, choice in usual.items())]
        entries += [(RECIPE_FILE, "")] if recipe else []
        try:
            entries, known = entries_of(self.library, entries, words)
        except NotComposed as error:
            raise _not_composed(error, self.problems) from None
        except ConfigError as error:
            raise ConfigError([*self.problems, *error.problems]) from None
        self.shown |= {g: c for g, c in known.items() if g in GROUPS and g not in self.chosen}
        layers = [(name, layer(self.library, name, package, self._chooser)) for name, package in entries]
        return [
            [found for name, found in layers if (name == RECIPE_FILE) is of_recipe] for of_recipe in (False, True)
        ]

    @property
    def _chooser(self) -> str:
        """Who chose the layout."""
        return self.sources.get("parallel") or self.default_sources.get("parallel", COMMAND_LINE)

    def _deletions(self, origins: Origins) -> list[str]:
        """The arguments that take a key away, in Hydra's grammar, of those that are there."""
        words: list[str] = []
        for key, argument in self.overrides.deleted.items():
            if key in GROUPS:
                continue
            if origins.has(key):
                words += [] if origins.is_null(key) else [argument]  # to Hydra a null is not there
                origins.drop(key)
            else:
                rule = f"{argument}: no file says {key}, so there is nothing to take away"
                self.problems.append(Problem("MT010", "", None, rule, "leave it out", COMMAND_LINE))
        return words

    def _settings(self, origins: Origins) -> dict[str, Any]:
        """Dotted key -> value, of those settings of the command line that can be laid over the rest."""
        o = self.overrides
        for key, argument in o.new.items():
            if origins.has(key) and not origins.is_null(key):
                rule = f"{argument}: {key} is set already, at {origins.where(key)}; without the + it is replaced"
                self.problems.append(Problem("MT010", "", None, rule, argument.lstrip("+"), COMMAND_LINE))
        fine = {key: value for key, value in o.values.items() if not any(refused(value, str, key))}
        return {key: value for key, value in fine.items() if not _is_under_a_value(key)}

    def _composed(self, primary: str, words: Sequence[str], settings: Mapping[str, Any]) -> dict[str, Any]:
        try:
            values = composed(self.library, primary, words, settings)
        except NotComposed as error:
            raise _not_composed(error, self.problems) from None
        except ConfigError as error:  # a file that another one names
            raise ConfigError([*self.problems, *error.problems]) from None
        return {key: restored(value) for key, value in values.items()}

    def _note_settings(self, origins: Origins, values: dict[str, Any]) -> list[Problem]:
        """Notes what the command line set; the problems of what Hydra was not given, which is put in its place."""
        problems: list[Problem] = []
        for path, value in self.overrides.values.items():
            wrong = list(refused(value, lambda _: COMMAND_LINE, path))
            if _is_under_a_value(path):
                problems += [*wrong, unknown_key(path, value, lambda _: COMMAND_LINE)]
                continue
            if wrong:
                problems += wrong
                _put(values, path, value)
            for leaf, inner in leaves(value, path):
                origins.put(leaf, inner, COMMAND_LINE)
        return problems

    def _strayed(
        self, run: RunConfig | None, origins: Origins, recipe: Recipe | None, base: Document | None
    ) -> list[Problem]:
        """Places beyond the working folder that only a file names."""
        if run is None:
            return []
        files = {document.source for document in (recipe and recipe.document, base) if document}
        said = {key: origins.of(key) for key in KEYS if origins.of(key).rpartition(":")[0] in files}
        return strays(run, said, Path(self.overrides.run) if self.overrides.run else None)

    def _without(
        self, values: Mapping[str, Any], origins: Origins, paths: Sequence[str], beneath: Sequence[Sequence[Layer]]
    ) -> RunConfig | None:
        """The configuration with each refused key as it was beneath the one that set it, or at its default."""
        files, recipe = beneath
        for under in ((files, [*files, *recipe]), ((), ())):
            tried = copy.deepcopy(dict(values))
            for path in map(whole, filter(None, paths)):
                layers = under[1] if origins.where(path) == COMMAND_LINE else under[0]
                parent, _, last = path.rpartition(".")
                node = _at(tried, parent)
                if isinstance(node, dict):
                    node.pop(last, None)
                    found = [at for one in layers if (at := _at(one.values, path)) is not None]
                    if found:
                        node[last] = copy.deepcopy(found[-1])
            run = validate(tried, origins.where)[0]
            if run is not None:
                return run
        return None


def _not_composed(error: Exception, before: Sequence[Problem]) -> ConfigError:
    rule = f"the group files do not compose: {error}"
    fix = "write entries of defaults as `- NAME` of a file in the same folder, and `_self_` where its own keys come"
    return ConfigError([*before, Problem("MT011", "", None, rule, fix, "conf")])


def _is_under_a_value(path: str) -> bool:
    """Whether a dotted key goes on behind one that holds a plain value, as in `model.num_layers.x`."""
    names = path.split(".")
    above = [field_of(".".join(names[:i])) for i in range(1, len(names))]
    return any(
        f is not None and section_in(f.annotation) is None and get_origin(f.annotation) is not dict for f in above
    )


def _put(values: dict[str, Any], path: str, value: Any) -> None:
    *parents, last = path.split(".")
    node = values
    for name in parents:
        inner = node.get(name)
        if not isinstance(inner, dict):
            inner = node[name] = {}
        node = inner
    node[last] = value


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
