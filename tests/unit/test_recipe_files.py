"""`recipe list, show, new, diff, lock, verify` as functions of the command line."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mtrain.cli import multirun
from mtrain.cli.main import main
from mtrain.cli.recipe import files
from mtrain.config.compose import paths
from mtrain.config.compose.composer import compose
from mtrain.config.compose.dump import run_yaml
from mtrain.config.compose.lock_file import content
from mtrain.config.compose.paths import recipe_names, recipes_dir
from mtrain.config.compose.yaml_reader import load
from mtrain.config.engine import release
from mtrain.config.resolve.resolution import Machine, resolve
from mtrain.config.schema.run import RunConfig
from mtrain.errors import ConfigError
from mtrain.loading import configuration
from mtrain.recipes.delta import Delta, delta, recipe_text, unequal
from mtrain.recipes.diff import differences, overrides_of
from mtrain.recipes.lock import PACKAGES, versions
from tests.support.configs import LAPTOP
from tests.support.covering import some_recipes
from tests.support.patience import patient
from tests.support.tables import tables

TABLES = tables("recipe_files")

Run = Callable[..., tuple[int, str, str]]
NAMES = sorted(
    f.relative_to(recipes_dir()).with_suffix("").as_posix() for f in recipes_dir().rglob("*.yaml")
)


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Return a function that runs a command in an empty folder and returns exit code, stdout and
    stderr.
    """
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("WORLD_SIZE", raising=False)

    def call(*argv: str) -> tuple[int, str, str]:
        code = main(argv)
        shown = capsys.readouterr()
        return code, shown.out, shown.err

    return call


def test_recipe_list_has_all_with_description(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    assert files.recipe_names() == NAMES
    # each of the others takes some hundredths of a second
    few = list(dict.fromkeys([*NAMES[::9], "llama3/70b_h100x64"]))
    monkeypatch.setattr(files, "recipe_names", lambda: few)
    code, out, _ = run("recipe", "list", "--json")
    cards = {card["name"]: card for card in json.loads(out)}
    assert (code, list(cards)) == (0, few)
    card = cards["llama3/70b_h100x64"]
    assert (card["layout"], card["model"]) == ("tp4 pp4 dp4 on 64 ranks", "llama3_70b")
    assert card["title"]
    assert card["hardware"]
    assert card["verified"]
    plain = run("recipe", "list")[1]
    assert all(name in plain for name in few)


def test_recipe_show_prints_as_written(run: Run) -> None:
    assert (
        run("recipe", "show", "llama/tiny_cpu")[1]
        == (recipes_dir() / "llama/tiny_cpu.yaml").read_text()
    )


@pytest.mark.sampled(6)
@pytest.mark.parametrize("name", some_recipes(NAMES))
def test_recipe_resolved_is_one_equivalent_file(run: Run, name: str, tmp_path: Path) -> None:
    (tmp_path / "whole.yaml").write_text(run("recipe", "show", name, "--resolved")[1])
    digests = [
        json.loads(run("check", "--json", word)[1])["digest"]
        for word in (f"recipe={name}", "run=whole.yaml")
    ]
    assert digests[0] == digests[1]


def test_recipe_hostile_is_refused_before_show(run: Run, tmp_path: Path) -> None:
    (tmp_path / "h.yaml").write_bytes(b"a: \x1b]0;owned\x07\n")
    code, out, _ = run("recipe", "show", "h.yaml")
    assert (code, out) == (2, "")


@pytest.mark.parametrize(
    "argv",
    TABLES["new"],
    ids=lambda words: " ".join(words) or "default",
)
def test_recipe_new_holds_command_line_in_twelve_lines(
    run: Run, argv: list[str], tmp_path: Path
) -> None:
    assert run("recipe", "new", "mine", *argv)[0] == 0
    text = (tmp_path / "mine.yaml").read_text()
    assert text.startswith("# yaml-language-server: $schema=")
    body = [line for line in text.splitlines() if not line.startswith("#")]
    assert len([line for line in body[6:] if line.strip()]) <= 12
    assert unequal(compose(["recipe=mine.yaml"]).run, compose(argv).run) == []
    assert set(load(tmp_path / "mine.yaml").values["recipe"]) == {
        "title",
        "purpose",
        "hardware",
        "source",
        "verified",
    }


def test_recipe_with_everything_takes_twelve_lines() -> None:
    from mtrain.config.rules import apply

    wanted = compose(
        ["model=mixtral_8x7b", "cluster=h100x64", "parallel=tp2sp", "precision=fp16", "optim=sgd"]
    ).run
    changes: dict[str, Any] = {
        "model.attention_dropout": 0.25,
        "parallel.overlap_grad_reduce": True,
        "precision.loss_scale_window": 7,
        "data.eod_mask_loss": True,
        "optim.lr": 0.5,
        "trainer.seed": 5,
        "kernels.norm": "reference",
        "checkpoint.keep": 9,
        "log.interval": 3,
        "cluster.name": "mine",
    }
    text = recipe_text(delta(apply(wanted, changes)), {"title": "x"}, short=True)
    assert len(text.splitlines()) - 3 <= 12


def test_recipe_file_is_never_overwritten(run: Run, tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("precious\n")
    code, _, err = run("recipe", "new", "mine.yaml")
    assert (code, (tmp_path / "mine.yaml").read_text()) == (2, "precious\n")
    assert "MT704" in err
    assert run("recipe", "lock", "llama/tiny_cpu", "-o", "mine.yaml")[0] == 2
    assert (tmp_path / "mine.yaml").read_text() == "precious\n"


def test_recipe_remote_data_prevents_no_writing(run: Run, tmp_path: Path) -> None:
    words = [
        "data=indexed",
        "data.path=/cluster/tokens",
        "data.tokenizer=/cluster/tokenizer.json",
        "data.seq_length=64",
    ]
    for argv in (
        ["new", "mine", *words],
        ["lock", "llama/tiny_cpu", *words],
        ["export", "llama/tiny_cpu", *words],
    ):
        code, out, err = run("recipe", *argv)
        assert code == 0, err
        assert "/cluster/tokens" in err
        assert out
    assert compose(["recipe=mine.yaml"]).run.data.path == "/cluster/tokens"


def test_recipe_broken_rule_writes_nothing(run: Run, tmp_path: Path) -> None:
    code, _, err = run("recipe", "new", "mine", "parallel=tp3")
    assert (code, list(tmp_path.iterdir())) == (2, [])
    assert "MT101" in err


def test_recipe_nearest_choices_are_taken_with_note() -> None:
    wanted = compose(
        ["model=llama3_8b", "parallel=tp4pp2sp", "cluster=h100x8", "data=mock", "optim.lr=1e-4"]
    ).run
    found = delta(wanted)
    assert found.choices == {
        "model": "llama3_8b",
        "parallel": "tp4pp2sp",
        "data": "mock",
        "cluster": "h100x8",
    }
    assert found.values == {"optim": {"lr": 1e-4}}
    assert delta(compose([]).run) == Delta()


def test_recipe_diff_numbers_differences_with_meaning(run: Run, tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text(
        "defaults: [override /model: llama_tiny]\nmodel: {hidden_size: 512}\noptim: {lr:"
        " 1e-3}\nlog: {interval: 5}\n"
    )
    (tmp_path / "b.yaml").write_text("optim: {lr: 2.0e-3}\nparallel: {overlap_grad_reduce: true}\n")
    code, out, _ = run("recipe", "diff", "a.yaml", "b.yaml")
    rows = {line.split()[1]: line for line in out.splitlines()[:-1]}
    assert code == 1
    assert rows["model.hidden_size"].startswith("1. ")
    assert rows["model.hidden_size"].endswith("architecture")
    assert "0.001 -> 0.002" in rows["optim.lr"]
    assert rows["optim.lr"].endswith("numerics")
    assert rows["parallel.overlap_grad_reduce"].endswith("parallelism")
    assert rows["log.interval"].endswith("runtime")
    as_json = json.loads(run("recipe", "diff", "--json", "a.yaml", "b.yaml")[1])
    assert (as_json["equal"], len(as_json["differences"])) == (False, len(rows))


def test_recipe_diff_equates_equal_kinds(run: Run, tmp_path: Path) -> None:
    run_folder = tmp_path / "runs/x"
    checkpoint = run_folder / "checkpoints/step_00000010"
    checkpoint.mkdir(parents=True)
    text = run_yaml(resolve(compose([]).run, Machine.here()))
    (run_folder / "run.yaml").write_text(text)
    shutil.copy(run_folder / "run.yaml", checkpoint)
    (tmp_path / "whole.yaml").write_text(text)
    for other in ("runs/x", "runs/x/checkpoints/step_00000010", "whole.yaml", "runs/x/run.yaml"):
        code, out, _ = run("recipe", "diff", "llama/tiny_cpu", other)
        # the recipe names the CPU; the default finds it
        assert (code, "cluster" in out or "equal" in out) == (1, True), other
        assert run("recipe", "diff", "whole.yaml", other)[0] == 0


def test_recipe_diff_resolves_planned_layout(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = [
        "model=llama32_1b",
        "data=mock",
        "cluster=h100",
        "cluster.devices_per_node=2",
        "parallel=auto",
    ]
    defaults = ", ".join(f"override /{w.replace('=', ': ')}" for w in words if "." not in w)
    folder = tmp_path / "conf/recipes"
    folder.mkdir(parents=True)
    (folder / "open.yaml").write_text(f"defaults: [{defaults}]\ncluster: {{devices_per_node: 2}}\n")
    loaded = configuration.load(words, environment={}, to_run=False).run
    (tmp_path / "run.yaml").write_text(run_yaml(loaded))
    assert run("recipe", "diff", str(folder / "open.yaml"), "run.yaml")[:2] == (
        0, f"equal: {folder}/open.yaml and run.yaml are the same run\n"
    )  # fmt: skip
    swept = multirun._composed(words)
    assert swept is not None
    assert swept.parallel == loaded.parallel
    monkeypatch.setattr(files, "recipe_names", lambda: set(recipe_names()) & {"open"})
    cards = json.loads(run("recipe", "list", "--json", "--config-dir", str(tmp_path / "conf"))[1])
    assert [card["layout"] for card in cards] == ["auto on 2 ranks"]


def test_recipe_diff_names_keys_of_one_sided_section() -> None:
    dense, experts = (
        resolve(compose([f"model={m}"]).run, LAPTOP) for m in ("llama_tiny", "mixtral_tiny")
    )
    found = {d.key: (d.left, d.right) for d in differences(dense, experts)}
    assert "model.moe" not in found
    assert found["model.moe.num_experts"] == ("(absent)", 4)
    assert {d.key for d in differences(experts, dense)} == set(found)
    assert differences(dense, dense) == []


@pytest.mark.parametrize("word", ["nope", "folder", "llama3/70b_h100x46"])
def test_recipe_diff_names_incomparable(run: Run, word: str, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    code, _, err = run("recipe", "diff", word, "llama/tiny_cpu")
    assert code == 2
    assert word in err


def test_recipe_lock_runs_and_verifies(run: Run, tmp_path: Path) -> None:
    assert run("recipe", "lock", "llama/tiny_cpu", "-o", "t.lock.yaml")[0] == 0
    digests = [
        json.loads(run("check", "--json", w)[1])["digest"]
        for w in ("recipe=llama/tiny_cpu", "run=t.lock.yaml")
    ]
    assert digests[0] == digests[1]
    text = (tmp_path / "t.lock.yaml").read_text()
    assert f"# digest: {digests[0]}" in text.replace('"', "")
    assert load(tmp_path / "t.lock.yaml").values.keys() == RunConfig.model_fields.keys(), (
        "nothing but the schema's keys"
    )
    code, out, _ = run("recipe", "verify", "t.lock.yaml")
    assert (code, out.startswith("verified")) == (0, True)


HERE = release.words(release.release() or release.SUPPORTED[0])


def test_recipe_lock_knows_installed_versions() -> None:
    found = versions()
    assert set(found) == {"python", "mtrain", *PACKAGES}
    assert found["megatron-core"] == HERE


@pytest.mark.parametrize(
    ("old", "new", "code", "what"),
    [
        ("seed: 1234", "seed: 1235", 4, "content"),
        (f'megatron-core: "{HERE}"', 'megatron-core: "0.99.0"', 3, "megatron-core"),
        ("\n# digest: ", "\n# digest: 0", 4, "digest"),
    ],
)
def test_recipe_lock_verification_reports_changes(
    run: Run, tmp_path: Path, old: str, new: str, code: int, what: str
) -> None:
    run("recipe", "lock", "llama/tiny_cpu", "-o", "t.yaml")
    text = (tmp_path / "t.yaml").read_text()
    assert old in text
    (tmp_path / "t.yaml").write_text(text.replace(old, new, 1))
    found, out, _ = run("recipe", "verify", "t.yaml", "--json")
    answer = json.loads(out)
    assert (found, answer["ok"], [d["name"] for d in answer["differences"]]) == (
        code,
        False,
        [what],
    )


def test_recipe_lock_of_old_version_names_missing_keys(run: Run, tmp_path: Path) -> None:
    import hashlib

    run("recipe", "lock", "llama/tiny_cpu", "-o", "t.yaml")
    lines = (tmp_path / "t.yaml").read_text().splitlines(keepends=True)
    body = "".join(
        line for line in lines if not line.startswith("#") and "sample_prompt" not in line
    )
    head = [line for line in lines if line.startswith("#")]
    content = hashlib.sha256(body.encode()).hexdigest()
    head = [f"# content: {content}\n" if "content" in line else line for line in head]
    head = [
        f"# digest: {'0' * 64}\n".replace("0", "a") if "digest:" in line else line for line in head
    ]
    (tmp_path / "t.yaml").write_text("".join(head) + body)
    code, out, _ = run("recipe", "verify", "t.yaml")
    assert code == 3
    assert "trainer.sample_prompt" in out


def test_recipe_lock_needs_gpus_only_where_it_had_them(run: Run, tmp_path: Path) -> None:
    run("recipe", "lock", "llama3/70b_h100x64", "-o", "t.yaml")
    code, out, _ = run("recipe", "verify", "t.yaml")
    assert (code, out.startswith("verified")) == (0, True), out
    text = (tmp_path / "t.yaml").read_text()
    gpus = Machine.here().gpus
    for had, expected in (("8", 3 if gpus < 8 else 0), ("0", 0)):
        (tmp_path / "t.yaml").write_text(text.replace(f"gpus: {gpus}}}", f"gpus: {had}}}", 1))
        code, out, _ = run("recipe", "verify", "t.yaml")
        assert (code, "device cuda" in out) == (expected, expected == 3), had


def test_recipe_edited_lock_does_not_run(run: Run, tmp_path: Path) -> None:
    run("recipe", "lock", "llama/tiny_cpu", "-o", "t.yaml")
    text = (tmp_path / "t.yaml").read_text()
    assert run("check", "run=t.yaml", "trainer.seed=7")[0] == 0, (
        "changes are given on the command line"
    )
    digest = next(line for line in text.splitlines() if line.startswith("# digest: "))
    body = text.replace("seed: 1234", "seed: 1235")
    resealed = body.replace(
        re.findall("# content: (.*)", body)[0],
        content("".join(re.findall(r"(?m)^[^#\n].*\n", body))),
    )
    for changed, word in (
        (body, "content"),
        (resealed, "digest"),
        (text.replace("interval: 10", "interval: 11"), "content"),
        (text + "# a remark\n", "content"),
        (text.replace(digest, "# digest: a"), "digest"),
        (text.replace(digest + "\n", ""), "lacks digest"),
    ):
        (tmp_path / "t.yaml").write_text(changed)
        code, _, err = run("check", "run=t.yaml")
        assert (code, "MT705" in err, word in err) == (2, True, True), err


def test_recipe_lock_knows_every_source_file(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "conf"
    shutil.copytree(paths.conf_dir(), folder)
    monkeypatch.setattr(paths, "conf_dir", lambda: folder)
    monkeypatch.setattr("mtrain.cli.recipe.files.conf_dir", lambda: folder)
    (folder / "optim/mine.yaml").write_text("defaults: [adamw, _self_]\neps: 1.0e-7\n")
    (tmp_path / "my.yaml").write_text("defaults: [override /optim: mine]\nlog: {interval: 3}\n")
    assert run("recipe", "lock", "my.yaml", "-o", "t.yaml")[0] == 0
    assert run("recipe", "verify", "t.yaml")[0] == 0
    names = (
        "my.yaml",
        "conf/optim/mine.yaml",
        "conf/optim/adamw.yaml",
        "conf/data/auto.yaml",
        "conf/config.yaml",
    )
    for name in names:
        file = tmp_path / name
        text = file.read_text()
        file.write_text(text + "# changed\n")
        code, out, _ = run("recipe", "verify", "t.yaml")
        assert (code, out.startswith(f"source {name}: ")) == (4, True), out
        file.unlink()
        code, out, _ = run("recipe", "verify", "t.yaml")
        assert (code, out.startswith(f"source {name}: ")) == (
            3,
            True,
        ), "a file that is not here is no other file"
        file.write_text(text)
    assert run("recipe", "verify", "t.yaml")[0] == 0
    (folder / "optim/muon.yaml").write_text("name: muon\n")
    assert run("recipe", "verify", "t.yaml")[0] == 0, "what it does not stand on may change"


def test_recipe_lock_detects_other_data_and_tokenizer(run: Run, tmp_path: Path) -> None:
    from mtrain.data.store.indexed import IndexedWriter

    def write(last: int) -> None:
        with IndexedWriter(tmp_path / "tokens", np.dtype(np.uint16)) as writer:
            for start in range(40):
                writer.add(np.arange(start, start + 300, dtype=np.uint16) % last)

    write(97)
    vocabulary = '{"version": "1.0", "model": {"type": "BPE", "merges": [], "vocab": {"%s": 0}}}'
    (tmp_path / "t.json").write_text(vocabulary % "a")
    words = ["data=indexed", "data.path=tokens", "data.tokenizer=t.json", "data.seq_length=32"]
    assert run("recipe", "lock", "llama/tiny_cpu", *words, "-o", "t.yaml")[0] == 0
    assert run("recipe", "verify", "t.yaml")[0] == 0
    (tmp_path / "t.json").write_text(vocabulary % "b")
    code, out, _ = run("recipe", "verify", "t.yaml")
    assert (code, out.startswith("tokenizer")) == (4, True)
    (tmp_path / "t.json").write_text(vocabulary % "a")
    for suffix in (".bin", ".idx"):
        (tmp_path / f"tokens{suffix}").unlink()
    code, out, _ = run("recipe", "verify", "t.yaml")
    assert (code, "none here" in out) == (3, True), "data that is not here is no other data"
    write(89)
    code, out, _ = run("recipe", "verify", "t.yaml")
    assert (code, out.startswith("data")) == (4, True)


@pytest.mark.parametrize(
    ("head", "code"),
    TABLES["bad_locks"],
)
def test_recipe_bad_lock_is_refused(run: Run, tmp_path: Path, head: str, code: str) -> None:
    (tmp_path / "t.yaml").write_text(head + run_yaml(resolve(compose([]).run, LAPTOP)))
    found, out, err = run("recipe", "verify", "t.yaml")
    assert (found, out) == (2, "")
    assert code in err


def test_recipe_lock_reads_no_unrelated_file(run: Run, tmp_path: Path) -> None:
    import os

    os.mkfifo(tmp_path / "t.json")
    body = run_yaml(
        resolve(
            compose(["data=indexed", "data.path=/dev/zero", "data.tokenizer=t.json"]).run, LAPTOP
        )
    )
    (tmp_path / "t.yaml").write_text(
        "# mtrain lock 1\n# digest: a\n# content: a\n# versions: {}\n# device: {}\n# digests: {}\n#"
        " sources: []\n" + body
    )
    assert run("recipe", "verify", "t.yaml")[0] == 4


def test_recipe_names_mean_recipes_folders_or_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert overrides_of(["llama/tiny_cpu", "optim.lr=1"]) == ["recipe=llama/tiny_cpu", "optim.lr=1"]
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match="MT502"):
        overrides_of(["empty"])


@pytest.mark.parametrize(
    "argv", [["recipe"], ["recipe", "--help"], ["recipe", "nope"], ["recipe", "list", "--nope"]]
)
def test_recipe_verb_explains_itself(run: Run, argv: list[str]) -> None:
    code, out, err = run(*argv)
    assert code == (0 if "--help" in argv else 2)
    assert "import" in out + err or "--json" in err


FLAGS = "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --vocab-size 9 --seq-length 8"


@pytest.mark.full
@pytest.mark.parametrize("words", ["list", f"import -- {FLAGS}"], ids=["list", "import"])
def test_recipe_subverbs_are_fast_without_torch(words: str, tmp_path: Path) -> None:
    import os
    import subprocess
    import sys

    code = (
        "import sys\nfrom mtrain.cli.main import main\n"
        f"code = main(['recipe', *{words.split()!r}])\n"
        "print(code, sorted(m for m in ('torch', 'megatron', 'numpy') if m in sys.modules))\n"
    )
    before = os.times()
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=patient(60),
        cwd=tmp_path,
    )
    after = os.times()
    assert done.stdout.splitlines()[-1] == "0 []", done.stderr
    allowed = 0.1 * len(recipe_names()) if words == "list" else 3
    assert after.children_user - before.children_user < allowed, "seconds of the processor"
