"""`-m`: Hydra's grammar of several values, against Hydra's own sweeper; bounded; validated one by
one.
"""

from __future__ import annotations

import json
import time

import pytest

from mtrain.cli.main import main
from mtrain.cli.multirun import worst
from mtrain.config.compose.composer import compose
from mtrain.config.compose.overrides import MAX_RUNS, jobs
from mtrain.config.compose.paths import choices_of_group, recipes_dir
from mtrain.errors import ConfigError

LIKE_HYDRA = [
    ["optim.lr=1e-3,1e-2"],
    ["optim.lr=choice(1e-3,1e-2)", "trainer.seed=1,2,3"],
    ["trainer.seed=range(1,5)"],
    ["trainer.seed=range(0,10,5)", "optim.lr=range(0,1,0.25)"],
    ["trainer.sample_prompt='a b','c,d'"],
    ["data.split=[1,1,1],[2,1,1]"],
    ["data.suffixes=[.py,.md]", "trainer.seed=5"],
    ["optim.clip_grad=null,1.0", "parallel.sequence_parallel=true,false"],
    ["trainer.seed=sort(3,1,2)", "optim.lr=sort(1,2,3,reverse=true)"],
    ["trainer.seed=tag(t,choice(4,5))"],
    ["trainer.sample_prompt='f(x, y)'"],
    ["model.name=a.b,c/d"],
]


@pytest.mark.parametrize("argv", LIKE_HYDRA, ids=" ".join)
def test_sweep_makes_runs_of_hydra(argv: list[str]) -> None:
    from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
    from hydra.core.override_parser.overrides_parser import OverridesParser

    (batch,) = BasicSweeper.split_arguments(OverridesParser.create().parse_overrides(argv), None)
    wanted = [_values(words) for words in batch]
    assert [_values(list(job.argv)) for job in jobs(argv)] == wanted


def _values(words: list[str]) -> list[tuple[str, object]]:
    from mtrain.config.compose.grammar import parse_value

    return [(word.partition("=")[0], parse_value(word.partition("=")[2])) for word in words]


def test_sweep_covers_groups_and_recipes() -> None:
    assert [job.argv for job in jobs(["parallel=tp2,pp2"])] == [
        ("parallel=tp2",),
        ("parallel=pp2",),
    ]
    llamas = [name for name in choices_of_group("model") if name.startswith("llama3_")]
    assert [job.swept["model"] for job in jobs(["model=glob(llama3_*)"])] == llamas
    recipes = sorted(f"llama3/{file.stem}" for file in recipes_dir().glob("llama3/*.yaml"))
    assert [job.swept["recipe"] for job in jobs(["recipe=glob(llama3/*)"])] == recipes
    assert [
        j.swept["optim.schedule"] for j in jobs(["optim.schedule=glob([c*,w*],exclude=cos*)"])
    ] == [
        "constant",
        "wsd",
    ]


def test_sweep_run_has_its_own_values() -> None:
    runs = [
        compose(job.argv).run
        for job in jobs(["optim.lr=1e-3,2e-3", "parallel=tp2,single", "trainer.seed=7"])
    ]
    assert [(r.optim.lr, r.parallel.tp, r.trainer.seed) for r in runs] == [
        (1e-3, 2, 7),
        (1e-3, 1, 7),
        (2e-3, 2, 7),
        (2e-3, 1, 7),
    ]


def test_sweep_repeated_swept_key_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"set twice, as optim\.lr=1,2,3 and as optim\.lr=5"):
        jobs(["optim.lr=1,2,3", "optim.lr=5"])
    assert [job.argv for job in jobs(["parallel=tp2,pp2", "parallel.cp=2"])][1] == (
        "parallel=pp2",
        "parallel.cp=2",
    )


@pytest.mark.parametrize(
    "argv",
    [
        [f"trainer.seed=range({MAX_RUNS + 1})"],
        ["trainer.seed=range(0,1e15)"],
        ["trainer.seed=shuffle(range(0,1e15))"],
        ["optim.lr=range(0,1,1e-12)"],
        ["optim.lr=range(0,1,0)"],
        ["trainer.seed=range(1,5,0)"],
        ["trainer.seed=range(100)", "model.num_layers=range(1,100)"],
        ["optim.lr=interval(0,1)"],
        ["model=glob(nothing*)"],
        ["optim.lr=1,,2"],
        ["optim.lr=choice("],
        ["trainer.seed=" + ",".join(map(str, range(MAX_RUNS + 1)))],
    ],
    ids=lambda words: words[0][:40],
)
def test_sweep_endless_or_empty_is_refused(argv: list[str]) -> None:
    start = time.process_time()
    with pytest.raises(ConfigError) as caught:
        jobs(argv)
    assert {p.code for p in caught.value.problems} == {"MT010"}
    assert time.process_time() - start < 5


def test_sweep_judges_all_and_exits_with_worst(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["check", "-m", "--json", "parallel=tp2,tp3", "optim.lr=1e-3,1e-2"]) == 2
    rows = json.loads(capsys.readouterr().out)
    assert [row["ok"] for row in rows] == [True, True, False, False]
    assert rows[0]["differs"] == "parallel=tp2 optim.lr=0.001"
    assert {p["code"] for p in rows[2]["problems"]} >= {"MT101"}
    assert main(["check", "-m", "trainer.seed=1,2"]) == 0
    assert "2 of 2 pass" in capsys.readouterr().out
    assert main(["check", "--multirun", "model=llama_tiny"]) == 0


def test_sweep_comma_without_flag_names_flag(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "optim.lr=1e-3,1e-2"]) == 2
    assert "-m" in capsys.readouterr().err


@pytest.mark.parametrize("verb", ["show", "prove", "resume"])
def test_sweep_other_verbs_take_one_run(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([verb, "-m", "optim.lr=1,2"]) == 2
    assert "-m" in capsys.readouterr().err


def test_sweep_rank_of_launcher_starts_none(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main(["-m", "optim.lr=1,2"]) == 2
    assert "torchrun" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("codes", "code"),
    [([], 0), ([0, 0], 0), ([0, 75], 75), ([75, 2, 0], 2), ([5, 2, 3], 5), ([5, 130, 0], 130)],
)
def test_sweep_reports_worst_exit_code(codes: list[int], code: int) -> None:
    assert worst(codes) == code
