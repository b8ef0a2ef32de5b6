"""Composition: argv -> one validated configuration, with the origin of each key.

Precedence, lowest first: schema default, group file, recipe (or the run file, which is complete),
command line. Hydra composes. This module reads every file before Hydra sees it, collects all
problems, and finds origins.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from mtrain.config.compose.choices import is_path, unknown_choice
from mtrain.config.compose.dump import spell
from mtrain.config.compose.hydra_source import NotComposed, composed, not_composed, quoted
from mtrain.config.compose.interpolate import at, drop, leaves, put, refused, resolve_references
from mtrain.config.compose.library import CONFIG, RECIPE, RECIPE_FILE, RUN, Library, restored
from mtrain.config.compose.lock_file import edited, upgrade
from mtrain.config.compose.origins import COMMAND_LINE, Layer, Origins, Setting, as_written
from mtrain.config.compose.overrides import Overrides, read_overrides
from mtrain.config.compose.paths import folders, user_path
from mtrain.config.compose.recipe import Recipe, read_recipe, reserved_keys
from mtrain.config.compose.replaced import Replaced, brought, entries_of, layer
from mtrain.config.compose.write_paths import (
    KEYS,
    foreign_hooks,
    foreign_launcher,
    foreign_remote,
    foreign_reward_url,
    strays,
)
from mtrain.config.compose.yaml_reader import Document, filled, load
from mtrain.config.disk.files import read_text
from mtrain.config.messages.keys import is_under_a_value
from mtrain.config.messages.problem import distinct
from mtrain.config.messages.suggestions import default_choices, usual_choice
from mtrain.config.messages.validate import unknown_key, validate, whole
from mtrain.config.resolve.model_tokenizer import describes_a_model, start_of
from mtrain.config.schema.model import ModelConfig
from mtrain.config.schema.run import GROUPS, UnresolvedRun
from mtrain.errors import ConfigError, Problem

# Keys that a model must set, because they have no default.
ARCHITECTURE = tuple(
    name for name, field in ModelConfig.model_fields.items() if field.is_required()
)
# The choice of `model` that means the model of the starting weights.
WEIGHTS = "weights.given"


@dataclass(frozen=True)
class Composed:
    """A configuration that passed the schema."""

    run: UnresolvedRun
    origins: dict[str, str]
    """The origin of each leaf: a file with its line, `command line` or `default`."""
    choices: dict[str, str]
    """group -> choice; for a run file only the groups that the command line replaced."""
    warnings: tuple[Problem, ...] = ()
    history: tuple[Setting, ...] = ()
    """Everything that was set, in order: the later of two settings of a key wins."""
    files: Mapping[str, Path] = field(default_factory=dict)
    """Every file of the composition, under the name that problems show."""


class Rejected(ConfigError):
    """A refused configuration. `partial` is the rest, if it makes sense without the refused keys,
    so that rules can check it too.
    """

    def __init__(
        self,
        problems: Sequence[Problem],
        partial: Composed | None,
        warnings: Sequence[Problem] = (),
    ) -> None:
        super().__init__(problems)
        self.partial = partial
        self.warnings = tuple(warnings)


def compose(
    argv: Sequence[str], model_of: Callable[[str], Document | None] | None = None
) -> Composed:
    """Compose group files, a recipe or run file, and overrides.

    `model_of` reads the model from the folder of `checkpoint.init_from` if no model is chosen.

    Raises:
        Rejected: the schema refused some keys; the error holds every problem.
        ConfigError: the files do not compose; the error holds every problem.
    """
    return _Composition(read_overrides(argv), model_of).finish()


class _Composition:
    """One composition. It collects problems for as long as it can continue."""

    def __init__(
        self, overrides: Overrides, model_of: Callable[[str], Document | None] | None = None
    ) -> None:
        self.overrides = overrides
        self.model_of = model_of
        self.problems = list(overrides.problems)
        self.library = Library()
        self.usual, self.default_sources = default_choices()
        self.defaults = dict(self.usual)
        """group -> the choice of `config.yaml`, without groups that were deleted."""
        self.chosen: dict[str, str] = {}
        """group -> the choice of the recipe or the command line, in Hydra's words."""
        self.added: dict[str, str] = {}
        """The same for a user's own groups, which `config.yaml` does not list."""
        self.sources: dict[str, str] = {}
        """group -> the origin of its choice."""
        self.shown: dict[str, str] = {}
        """group -> its choice, as written."""
        self.replaced: Replaced | None = None
        """The recipe or run file, without the parts that choices on the command line replace."""

    def finish(self) -> Composed:
        # A step records its problems and continues where it can: a user sees all in one pass.
        recipe = self._recipe()
        base = self._run_file()
        self._choose(recipe)
        self._replace(recipe, base)
        # A run file is complete: no file of weights decides its model.
        if base is None:
            self._take_model(recipe)
        own = recipe is not None and "model" not in self.chosen and self._is_whole_model(recipe)
        primary, words = self._bases(recipe, base, own)
        layers, of_files = self._layers(primary, words, recipe is not None)
        origins = Origins(layers)
        # Before Hydra composes: origins are still those of the files, which `~key=value` must
        # match.
        gone = self._deletions(origins)
        values = self._composed(primary, words, self._settings(origins))
        for key in gone:
            drop(values, key)
        refused_values = self._note_settings(origins, values)
        self.problems += self.library.problems + refused_values
        self.problems += resolve_references(values, origins.where)
        run, problems = validate(values, origins.where)
        self.problems += [
            as_written(problem, self.library.documents.values()) for problem in problems
        ]
        strayed = self._strayed(run, origins)
        self.problems += strayed
        if run is None or self.problems:
            found = distinct(self.problems)
            paths = [p.path for p in (found if run is None else strayed)]
            if own:  # until then a refused key is validated with its values
                of_files = [
                    layer(self.library, f"model/{usual_choice('model')}", "model", self._chooser),
                    *of_files,
                ]
            rest: UnresolvedRun | None = run
            if strayed or not run:
                rest = self._without(values, origins, paths, of_files, layers)
            partial = self._result(rest, origins) if rest is not None else None
            raise Rejected(found, partial, self._warnings(None, origins))
        return self._result(run, origins, self._warnings(run, origins))

    def _result(
        self, run: UnresolvedRun, origins: Origins, warnings: tuple[Problem, ...] = ()
    ) -> Composed:
        known = {key: origins.of(key) for key in run.flat()}
        files = dict(self.library.files)
        return Composed(
            run, known, self.shown, warnings, history=tuple(origins.history), files=files
        )

    def _warnings(self, run: UnresolvedRun | None, origins: Origins) -> tuple[Problem, ...]:
        """Return a warning for each part of a recipe that choices on the command line replaced."""
        return tuple(
            self.replaced.problems(self.overrides.values, run, origins.has) if self.replaced else ()
        )

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
            path = user_path(self.overrides.run)
            document = filled(load(path))
            upgrade(document.values)
            self.library.files[document.source] = path
            changed = edited(read_text(path, document.source), document.source)
            self.problems += [changed] if changed is not None else []
        except ConfigError as error:
            self.problems += error.problems
            return None
        values = {key: value for key, value in document.values.items() if key != "defaults"}
        if "defaults" in document.values:
            rule = (
                "a run file is complete and stands on no other file; what names choices is a recipe"
            )
            said = document.values["defaults"]
            fix = f"recipe={self.overrides.run}"
            self.problems.append(
                Problem("MT017", "defaults", said, rule, fix, document.where("defaults"))
            )
        self.problems += reserved_keys(values, document)
        self.problems += refused(values, document.where)
        return document

    def _choose(self, recipe: Recipe | None) -> None:
        """Record the existing choices of the recipe and, over them, of the command line."""
        # The later of two choices of a group wins, so the command line comes last.
        layers = [(recipe.choices, recipe.choice_lines)] if recipe is not None else []
        for choices, lines in [*layers, (self.overrides.choices, {})]:
            for group, choice in choices.items():
                source = lines.get(group, COMMAND_LINE)
                if (name := self._named(group, choice, source)) is not None:
                    self.chosen[group] = name
                    self.shown[group] = choice
                    self.sources[group] = source
        for group, choice in self.overrides.added.items():
            if (name := self._named(group, choice, COMMAND_LINE)) is not None:
                self.added[group] = name

    def _replace(self, recipe: Recipe | None, base: Document | None) -> None:
        """Drop the recipe's or run file's groups and keys that command-line choices set."""
        chosen = {
            group: self.chosen[group]
            for group, source in self.sources.items()
            if source == COMMAND_LINE
        }
        if base is not None:
            self.replaced = Replaced(base, copy.deepcopy(base.values))
        elif recipe is not None:
            self.replaced = Replaced(recipe.document, copy.deepcopy(recipe.values))
        if self.replaced is None or not (chosen or self.added):
            return
        more = brought(self.library, self.defaults, chosen, self.added)
        rest = {group: choice for group, choice in self.chosen.items() if group not in more.choices}
        # before the files that choose them: Hydra looks for them there
        self.chosen = {
            **more.choices,
            **rest,
        }
        self.shown |= more.choices
        self.sources |= dict.fromkeys(more.choices, COMMAND_LINE)
        named = {group: self.shown[group] for group in chosen}
        self.replaced.replace({**named, **more.choices}, more.keys)
        if recipe is not None:
            recipe.values = self.replaced.values

    def _take_model(self, recipe: Recipe | None) -> None:
        """Choose the model of the starting weights, unless a model is chosen or described."""
        said = recipe.values if recipe is not None else {}
        chosen = "model" in (*self.chosen, *self.overrides.deleted) or describes_a_model(
            said, ARCHITECTURE
        )
        if self.model_of is None or chosen:
            return
        file = f"checkpoint/{self.chosen.get('checkpoint') or self.defaults.get('checkpoint')}"
        start = start_of(
            self.overrides.values, said, self.library.values(file) if self.library.has(file) else {}
        )
        document = self.model_of(start) if start is not None else None
        if document is not None:
            self.library.give(f"model/{WEIGHTS}", document, document.values)
            self.chosen["model"] = WEIGHTS
            self.sources["model"] = COMMAND_LINE
            self.shown["model"] = document.source

    def _named(self, group: str, choice: str, source: str) -> str | None:
        """Return a choice in Hydra's words; record a problem and return None if it is unknown."""
        # A path outside of the folders of choices has no name for Hydra: the library invents one.
        if is_path(choice):
            return self.library.give_path(group, choice)
        problem = unknown_choice(group, choice, source)
        self.problems += [problem] if problem is not None else []
        return choice if problem is None else None

    def _is_group(self, key: str) -> bool:
        return key in GROUPS or key in self.usual

    def _is_whole_model(self, recipe: Recipe) -> bool:
        """Return whether a recipe without a choice of model describes a whole model.

        A partial description is refused: the default model would silently fill the rest.
        """
        stated = recipe.values.get("model")
        if not isinstance(stated, dict) or not stated:
            return False
        said = {
            *stated,
            *(key.split(".")[1] for key in self.overrides.values if key.startswith("model.")),
        }
        missing = [name for name in ARCHITECTURE if name not in said]
        if missing:
            default = usual_choice("model")
            rule = (
                f"a model of its own that lacks {', '.join(missing)}; a recipe states them all, or"
                f" names the model that it changes: `defaults: [override /model: {default}]`"
            )
            source = recipe.document.where("model")
            self.problems.append(
                Problem("MT018", "model", stated, rule, f"model={default}", source)
            )
        return not missing

    def _bases(
        self, recipe: Recipe | None, base: Document | None, own: bool
    ) -> tuple[str, list[str]]:
        """Return the name of Hydra's primary configuration, and the arguments that choose."""
        deleted = self._deleted_groups()
        added = [quoted("+", *choice) for choice in self.added.items()]
        if base is not None:
            gone = {*deleted, *self.chosen, "defaults"}
            self.library.give(RUN, base, {k: v for k, v in base.values.items() if k not in gone})
            return RUN, [quoted("+", *choice) for choice in self.chosen.items()] + added
        words = [
            quoted("", *choice)
            for choice in self.chosen.items()
            if self.sources[choice[0]] == COMMAND_LINE
        ]
        for group in [*deleted, *(["model"] if own else [])]:
            if self.defaults.pop(group, None) is not None:
                words.append(f"~{group}")
        if recipe is not None:
            chosen = [
                {f"override /{g}": c} for g, c in recipe.choices.items() if self.chosen.get(g) == c
            ]
            values = {**recipe.values, "defaults": chosen}
            self.library.give(RECIPE_FILE, recipe.document, values, "_global_")
            words.append(f"+{RECIPE}={RECIPE}")
        self.shown = {**self.defaults, **self.shown}
        return CONFIG, words + added

    def _deleted_groups(self) -> list[str]:
        """Return the groups that the command line deletes, including a recipe's."""
        deleted: list[str] = []
        for group, argument in self.overrides.deleted.items():
            if not self._is_group(group):
                continue
            choice = self.shown.get(group) or (
                "" if self.overrides.run else self.usual.get(group, "")
            )
            if self.overrides.only.get(group, choice) != choice:
                rule = f"{argument}: the choice of {group} is {choice or 'unset'}"
                self.problems.append(Problem("MT010", "", None, rule, f"~{group}", COMMAND_LINE))
                continue
            deleted.append(group)
            for chosen in (self.chosen, self.shown, self.sources):
                chosen.pop(group, None)
        return deleted

    def _layers(
        self, primary: str, words: list[str], recipe: bool
    ) -> tuple[list[Layer], list[Layer]]:
        """Return the layers below the command line, lowest precedence first, and those outside
        recipes.

        Raises:
            ConfigError: a file cannot be read as data, or the files do not compose.
        """
        usual = {**self.defaults, **self.chosen} if primary == CONFIG else self.chosen
        wrong = [
            unknown_choice(g, c, self.default_sources[g])
            for g, c in usual.items()
            if g not in self.chosen
        ]
        if found := [problem for problem in wrong if problem is not None]:
            raise ConfigError([*self.problems, *found])
        entries = [
            (primary, ""),
            *((f"{group}/{choice}", group) for group, choice in usual.items()),
        ]
        entries += [(RECIPE_FILE, "")] if recipe else []
        try:
            entries, known = entries_of(self.library, entries, words)
        except NotComposed as error:
            raise not_composed(error, self.problems) from None
        except ConfigError as error:
            raise ConfigError([*self.problems, *error.problems]) from None
        self.shown |= {g: c for g, c in known.items() if g in GROUPS and g not in self.chosen}
        layers = [layer(self.library, name, package, self._chooser) for name, package in entries]
        of_files = [
            one for (name, _), one in zip(entries, layers, strict=True) if name != RECIPE_FILE
        ]
        return layers, of_files

    @property
    def _chooser(self) -> str:
        """Return the origin of the chosen layout."""
        return self.sources.get("parallel") or self.default_sources.get("parallel", COMMAND_LINE)

    def _deletions(self, origins: Origins) -> list[str]:
        """Return the existing keys that the command line deletes."""
        gone: list[str] = []
        for key, argument in self.overrides.deleted.items():
            if self._is_group(key):
                continue
            last = origins.last(key)
            if not origins.has(key):
                rule = f"{argument}: no file sets {key}, so there is nothing to delete"
                fix = "leave it out"
            elif key in self.overrides.only and (
                last is None or last.value != self.overrides.only[key]
            ):
                said = spell(last.value) if last is not None else "a mapping"
                rule = f"{argument}: {key} is {said}, at {origins.where(key)}"
                fix = f"~{key}"
            else:
                origins.drop(key)
                gone.append(key)
                continue
            self.problems.append(Problem("MT010", "", None, rule, fix, COMMAND_LINE))
        return gone

    def _settings(self, origins: Origins) -> dict[str, Any]:
        """Return dotted key -> value for the settings of the command line that Hydra can apply."""
        o = self.overrides
        for key, argument in o.new.items():
            if origins.has(key) and not origins.is_null(key):
                rule = (
                    f"{argument}: {key} is set already, at {origins.where(key)}; without the + it"
                    " is replaced"
                )
                self.problems.append(
                    Problem("MT010", "", None, rule, argument.lstrip("+"), COMMAND_LINE)
                )
        fine = {key: value for key, value in o.values.items() if not any(refused(value, str, key))}
        return {key: value for key, value in fine.items() if not is_under_a_value(key)}

    def _composed(
        self, primary: str, words: Sequence[str], settings: Mapping[str, Any]
    ) -> dict[str, Any]:
        try:
            values = composed(self.library, primary, words, settings)
        except NotComposed as error:
            raise not_composed(error, self.problems) from None
        except ConfigError as error:  # a file that another one names
            raise ConfigError([*self.problems, *error.problems]) from None
        return {key: restored(value) for key, value in values.items()}

    def _note_settings(self, origins: Origins, values: dict[str, Any]) -> list[Problem]:
        """Record the settings of the command line, and apply the ones that Hydra did not get."""
        problems: list[Problem] = []
        for path, value in self.overrides.values.items():
            wrong = list(refused(value, lambda _: COMMAND_LINE, path))
            if is_under_a_value(path):
                problems += [*wrong, unknown_key(path, value, lambda _: COMMAND_LINE)]
                continue
            if wrong:
                problems += wrong
                put(values, path, value)
            for leaf, inner in leaves(value, path):
                origins.put(leaf, inner, COMMAND_LINE)
        return problems

    def _strayed(self, run: UnresolvedRun | None, origins: Origins) -> list[Problem]:
        """Return outside paths that a file sets and the command line does not."""
        if run is None:
            return []
        files = self.library.sources()
        said = {key: origins.of(key) for key in KEYS if origins.of(key).rpartition(":")[0] in files}
        base = user_path(self.overrides.run) if self.overrides.run else None
        own = partial(self._own_file, "launch")
        found = strays(run, said, base)
        return [
            *found,
            *foreign_hooks(run, origins.of, partial(self._own_file, "log"), base),
            *foreign_launcher(run, origins.of, own, self.sources),
            *foreign_reward_url(run, origins.of, partial(self._own_file, "rollout"), base),
            *foreign_remote(run, origins.of, partial(self._own_file, "checkpoint"), base),
        ]

    def _own_file(self, group: str, source: str) -> bool:
        """Return whether a file is a choice of a group in a folder of choices, or one that the
        command line names by its path.
        """
        if is_path(self.shown.get(group, "")) and source in self.library.sources():
            return True
        file = self.library.files.get(source)
        return file is not None and any(file.is_relative_to(f / group) for f in folders())

    def _without(
        self,
        values: Mapping[str, Any],
        origins: Origins,
        paths: Sequence[str],
        of_files: Sequence[Layer],
        layers: Sequence[Layer],
    ) -> UnresolvedRun | None:
        """Return the configuration with each refused key reset to its value below, or default."""
        # The second round takes the schema's defaults, in case the files below are wrong, too.
        for under in ((of_files, layers), ((), ())):
            tried = copy.deepcopy(dict(values))
            for path in map(whole, filter(None, paths)):
                below = under[1] if origins.where(path) == COMMAND_LINE else under[0]
                parent, _, last = path.rpartition(".")
                node = at(tried, parent)
                if isinstance(node, dict):
                    node.pop(last, None)
                    found = [there for one in below if (there := at(one.values, path)) is not None]
                    if found:
                        node[last] = copy.deepcopy(found[-1])
            run = validate(tried, origins.where)[0]
            if run is not None:
                return run
        return None
