"""Commands of the first hour: suggestions, a list of changes, a summary of everything, the next
steps.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mtrain.cli.check_all import Report
from mtrain.cli.main import main
from mtrain.config.compose import paths
from mtrain.config.compose.composer import compose
from mtrain.config.disk.files import download_of
from mtrain.config.messages.suggestions import near_choice


def test_first_hour_smallest_of_equal_prefix_is_first() -> None:
    names = paths.choices_of_group("model")
    assert near_choice("llama3", names)[:2] == ["llama3_8b", "llama3_70b"]
    assert near_choice("llama31", names) == ["llama31_8b", "llama31_70b", "llama31_405b"]
    assert near_choice("gpt2", names) == ["gpt2"]
    assert near_choice("gpt", names) == ["gpt_1.7b", "gpt_7.1b", "gpt_16b"]
    assert near_choice("qwen3", names) == ["qwen3_0.6b", "qwen3_1.7b", "qwen3_4b"]
    assert near_choice("pythia", names)[0] == "pythia_70m"


def test_first_hour_nearest_number_is_first() -> None:
    clusters = paths.choices_of_group("cluster")
    models = paths.choices_of_group("model")
    assert set(near_choice("h100x12", clusters)[:2]) == {"h100x8", "h100x16"}
    assert near_choice("a100x12", clusters)[0] == "a100x8"
    assert near_choice("h100x2000", clusters)[0] == "h100x1024"
    assert near_choice("llama3_9b", models)[:2] == ["llama3_8b", "llama3_70b"]
    assert near_choice("gpt_2t", models)[0] == "gpt_1t"
    assert near_choice("llama3_70", models)[0] == "llama3_70b"


@pytest.mark.parametrize(
    "words",
    [
        "convert import Org/Model-1B runs/x",
        "check checkpoint.init_from=Org/Model-1B",
        "recipe import Org/Model-1B",
        "convert inspect Org/Model-1B",
        "convert verify Org/Model-1B other",
        "check data.tokenizer=Org/Model-1B",
    ],
)
def test_first_hour_hub_name_suggests_download(
    words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(words.split()) == 2
    said = capsys.readouterr().err
    assert "nothing is downloaded here" in said
    assert "Use hf download Org/Model-1B " in said
    assert "--local-dir Model-1B, then " in said
    for placeholder in ("PATH", " A B"):
        assert placeholder not in said


def test_first_hour_path_is_no_hub_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert download_of("org/model") == ("hf download org/model --local-dir model", "model")
    assert download_of("exported/tokenizer.json") is None
    (tmp_path / "org").mkdir()
    assert download_of("org/model") is None


def test_first_hour_only_changes_are_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", "--changed"]) == 0
    assert capsys.readouterr().out == "nothing is changed\n"
    words = ["recipe=llama/tiny_cpu_lora", "optim.lr=0.5", "model=gpt2"]
    assert main(["show", "--changed", *words]) == 0
    rows = dict(row.split("  # ") for row in capsys.readouterr().out.splitlines())
    assert rows["optim.lr=0.5"] == "command line"
    assert rows["model=gpt2"] == rows["peft=lora"] == "a choice"
    assert rows["optim.schedule=cosine"] == "recipes/llama/tiny_cpu_lora.yaml:13"
    assert not any(row.startswith("trainer.") for row in rows)
    assert main(["show", "--changed", "--json", *words]) == 0
    assert json.loads(capsys.readouterr().out)["optim.lr"] == {
        "value": 0.5,
        "source": "command line",
    }


def test_first_hour_full_table_is_a_summary(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from mtrain.cli import check_all

    def few(axes: dict[str, list[str]], *_: object) -> list[Report]:
        rows = [
            Report(m, "single", "bf16", c, True) for m in axes["model"] for c in axes["cluster"]
        ]
        return [*rows, Report("gpt2", "tp3", "bf16", "cpu", False, "MT101", "12 heads")]

    monkeypatch.setattr(check_all, "validated", few)
    assert main(["check", "--all"]) == 0
    out = capsys.readouterr().out
    assert len(out.splitlines()) < 60
    assert "MT101" in out
    assert "--json" in out
    assert main(["check", "--all", "model=gpt2", "parallel=single", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)


def test_first_hour_installed_files_have_their_paths(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "site-packages" / "mtrain" / "_conf"
    folder.parent.mkdir(parents=True)
    folder.symlink_to(paths.conf_dir())
    monkeypatch.setattr(paths, "conf_dir", lambda: folder)
    monkeypatch.chdir(tmp_path)  # where conf/model/llama_tiny.yaml would be no file
    file, _, line = compose([]).origins["model.num_layers"].rpartition(":")
    assert Path(file).is_file()
    assert "num_layers" in Path(file).read_text().splitlines()[int(line) - 1]


def test_first_hour_first_run_suggests_next_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from mtrain.launching import local, preflight

    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.setattr(local, "launch", lambda run, argv, injected: Path("runs/mine"))
    monkeypatch.setattr(preflight, "check", lambda *_: None)
    assert main([]) == 0
    out = capsys.readouterr().out
    assert "generate runs/mine" in out
    assert "resume runs/mine" in out
    assert main(["data=mock"]) == 0
    assert "generate" not in capsys.readouterr().out
