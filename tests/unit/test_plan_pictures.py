"""The pictures of a plan: a schedule that could run, memory that is the plan's, a page that needs
nothing else.
"""

from __future__ import annotations

import re
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path

import pytest

from mtrain.cli import plan_page
from mtrain.cli.main import main
from mtrain.config.compose.composer import compose
from mtrain.config.resolve.resolution import resolve
from mtrain.config.schema.run import RunConfig
from mtrain.layout.grid import Machines, RankGrid, machines
from mtrain.plan.rank import stage_memories
from mtrain.plan.timeline import kept_over_time, timeline
from tests.support.commands import ROOT
from tests.support.configs import LAPTOP
from tests.support.launched import light


def run_of(*words: str) -> RunConfig:
    given = ["model=llama_tiny", "data=mock", "cluster=h100", "trainer.micro_batch_size=1", *words]
    return resolve(compose(given).run, LAPTOP)


SCHEDULES = {
    "one stage": ("parallel=single", "trainer.global_batch_size=32"),
    "1f1b": ("parallel=pp4", "trainer.global_batch_size=12"),
    "fewer than stages": ("parallel=pp4", "trainer.global_batch_size=2"),
    "interleaved": ("parallel=pp2", "parallel.vpp=2", "trainer.global_batch_size=8"),
    "recompute": (
        "parallel=pp2",
        "trainer.global_batch_size=6",
        "parallel.recompute.granularity=full",
    ),
}


@pytest.mark.parametrize("words", SCHEDULES.values(), ids=SCHEDULES)
def test_plan_pictures_chunk_awaits_its_predecessor(words: tuple[str, ...]) -> None:
    run = run_of(*words)
    stages = stage_memories(run)
    line = timeline(stages, whole=True)
    assert line.micro == line.of == run.trainer.batch // run.parallel.dp
    last = len(stages) * run.parallel.vpp - 1
    ends = {
        (b.forward, b.micro, b.chunk * len(stages) + b.stage): b
        for blocks in line.blocks
        for b in blocks
    }
    assert len(ends) == 2 * line.micro * (last + 1)
    for (forward, micro, place), block in ends.items():
        before = (forward, micro, place - 1 if forward else place + 1)
        before = (True, micro, last) if not forward and place == last else before
        if not forward or place:
            assert block.begin >= ends[before].end
    for blocks in line.blocks:
        assert all(one.end <= two.begin for one, two in pairwise(blocks))


@pytest.mark.parametrize(("pp", "vpp", "micro"), [(4, 1, 8), (2, 2, 8), (2, 1, 2)])
def test_plan_pictures_bubble_of_equal_stages_follows_formula(
    pp: int, vpp: int, micro: int
) -> None:
    run = run_of(f"parallel=pp{pp}", f"parallel.vpp={vpp}", f"trainer.global_batch_size={micro}")
    stages = [  # only layers: no output layer that makes the last stage larger
        type(stage)(
            run, stage.stage, stage.held, stage.states, tuple(chunk[1:-1] for chunk in stage.chunks)
        )
        for stage in stage_memories(run)
    ]
    for whole in (False, True):
        line = timeline(stages, whole=whole)
        assert line.bubble == pytest.approx((pp - 1) / (vpp * line.of + pp - 1))


@pytest.mark.parametrize("words", SCHEDULES.values(), ids=SCHEDULES)
def test_plan_pictures_memory_over_time_equals_plan(words: tuple[str, ...]) -> None:
    stages = stage_memories(run_of(*words))
    line = timeline(stages, whole=True)
    for stage in stages:
        series = [size for _, size in kept_over_time(stage, line.blocks[stage.stage])]
        assert stage.in_flight[0] <= max(series) <= stage.in_flight[0] * 1.01 + sum(stage.kept)
        assert series[0] == series[-1] == 0


def test_plan_pictures_equal_machines_are_grouped() -> None:
    assert machines(RankGrid(64, tp=4, pp=4), 8) == [Machines(2 * n, 2, (n,) * 8) for n in range(4)]
    assert machines(RankGrid(8, tp=2, pp=4), 8) == [Machines(0, 1, (0, 0, 1, 1, 2, 2, 3, 3))]


class Reader(HTMLParser):
    """Tags that are open, and every attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: set[str] = set()
        self.tags: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_startendtag(tag, attrs)
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.seen |= {name for name, _ in attrs}

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_plan_pictures_page_needs_no_network(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "plan.html"
    assert (
        main(["plan", "recipe=deepseek/v3_h100x1024", "--html", str(page), "cluster.name=a.b"]) == 0
    )
    text = page.read_text()
    reader = Reader()
    reader.feed(text)
    assert reader.open == []
    assert not reader.tags & {"script", "link", "img", "iframe", "object"}
    assert not reader.seen & {"src", "href", "xlink:href", "onclick", "onload"}
    assert not re.search(r"https?://|url\(|@import", text)
    for said in (
        "Memory of a rank",
        "Memory over a step",
        "Pipeline schedule",
        "Ranks on machines",
        "Parameters",
    ):
        assert said in text
    assert text.count("<rect") > 1000
    assert main(["plan", f"--html={page}"]) == 2
    assert "is there already" in capsys.readouterr().err
    assert main(["plan", "--html"]) == 2
    assert "--html FILE" in capsys.readouterr().err
    assert main(["plan", "--html", str(tmp_path / "no" / "plan.html")]) == 2
    assert "Use --html FILE in an existing folder" in capsys.readouterr().err
    (tmp_path / "link.html").symlink_to(tmp_path / "elsewhere.html")
    assert main(["plan", "--html", str(tmp_path / "link.html")]) == 2
    assert "is there already" in capsys.readouterr().err
    assert not (tmp_path / "elsewhere.html").exists()


def test_plan_pictures_block_numbers_are_legible() -> None:
    """Require a contrast of 4 on each colour (WCAG 2.1, 1.4.3 requires 3 of large text and 4.5 of
    small).
    """

    def light(colour: str) -> float:
        digits = colour.removeprefix("#")
        wide = digits if len(digits) == 6 else "".join(2 * digit for digit in digits)
        parts = [int(wide[at : at + 2], 16) / 255 for at in (0, 2, 4)]
        red, green, blue = (
            v / 12.92 if v <= 0.04045 else ((v + 0.055) / 1.055) ** 2.4 for v in parts
        )
        return 0.2126 * red + 0.7152 * green + 0.0722 * blue + 0.05

    for colours in (plan_page.FORWARD, plan_page.BACKWARD):
        for below, above in zip(colours, plan_page.NUMBERS, strict=True):
            dark, bright = sorted((light(below), light(above)))
            assert bright / dark > 4, (below, above)


def test_plan_pictures_large_machine_stays_in_picture(tmp_path: Path) -> None:
    page = tmp_path / "plan.html"
    words = [
        "model=llama3_8b",
        "parallel=tp8pp16",
        "parallel.ranks=128",
        "cluster=cpu",
        "data=mock",
    ]
    assert main(["plan", *words, "--html", str(page)]) == 0
    picture = page.read_text().partition("<h2>Ranks on machines</h2>")[2].partition("</svg>")[0]
    places = [
        tuple(map(float, at))
        for at in re.findall(r'<rect x="([\d.]+)" y="([\d.]+)" width="([\d.]+)"', picture)
    ]
    assert len(places) == len({at[:2] for at in places}) == 128
    assert max(x + width for x, _, width in places) <= 1000
    height = float(re.findall(r'viewBox="0 0 1000 ([\d.]+)"', picture)[0])
    assert max(y + width for _, y, width in places) <= height


def test_plan_pictures_terminal_output(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "140")
    assert main(["plan", "recipe=llama3/70b_h100x64", "--draw"]) == 0
    lines = capsys.readouterr().out.splitlines()
    schedule = lines[
        next(n for n, line in enumerate(lines) if line.startswith("pipeline schedule")) + 1 :
    ][:4]
    assert [line.split()[:2] for line in schedule] == [["stage", str(n)] for n in range(4)]
    assert schedule[0].split()[2].startswith("0011223")
    assert schedule[3].split()[2].startswith("....")
    assert max(map(len, lines)) <= 140


def test_plan_pictures_bars_fit_narrow_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    assert main(["plan", "recipe=llama3/70b_h100x64", "--draw"]) == 0
    lines = capsys.readouterr().out.splitlines()
    bars = [
        line
        for line in lines
        if line.startswith("  stage ") and "layers" not in line and "in flight" not in line
    ]
    assert len(bars) == 8
    assert max(map(len, bars)) <= 60


def test_plan_pictures_timeline_needs_operations() -> None:
    stages = stage_memories(run_of("parallel=pp2"))
    bare = [type(stage)(stage.run, stage.stage, stage.held, stage.states, ()) for stage in stages]
    with pytest.raises(ValueError, match="does not say"):
        timeline(bare)


def test_plan_pictures_long_step_draws_first_micro_batches() -> None:
    line = timeline(stage_memories(run_of("parallel=pp4", "trainer.global_batch_size=4096")))
    assert line.micro == 12
    assert line.of > 1000


def test_plan_pictures_cut_schedule_ends_with_last_micro_batch(tmp_path: Path) -> None:
    """Begin with the first micro-batch, continue after the cut as full as before, and drain once,
    at the end.
    """
    page = tmp_path / "plan.html"
    words = [
        "model=llama3_8b",
        "parallel=pp4",
        "cluster=h100x8",
        "data=mock",
        "trainer.global_batch_size=256",
    ]
    done = light("plan", *words, "trainer.micro_batch_size=1", "--html", str(page), cwd=ROOT)
    assert done.returncode == 0, done.stderr
    picture = page.read_text().partition("<h2>Pipeline schedule</h2>")[2].partition("</svg>")[0]
    numbers = {
        int(n) for n in re.findall(r"<title>(?:forward|backward) of micro-batch (\d+)", picture)
    }
    assert {0, 127} <= numbers
    assert max(numbers) == 127
    assert len(numbers) < 30
    assert "what is left out" in picture
    memory = page.read_text().partition("<h2>Memory over a step</h2>")[2].partition("</svg>")[0]
    assert "what is left out" in memory
    assert "GiB</text>" in memory


def test_plan_pictures_one_replica_has_all_experts(tmp_path: Path) -> None:
    page = tmp_path / "plan.html"
    words = [
        "model=mixtral_8x7b",
        "parallel=pp2ep8",
        "cluster=h100x64",
        "data=mock",
        "data.seq_length=4096",
    ]
    assert main(["plan", *words, "--html", str(page)]) == 0
    picture = page.read_text().partition("<h2>Ranks on machines</h2>")[2].partition("</svg>")[0]
    assert picture.count('stroke="currentColor"') == 16


def test_plan_pictures_page_states_batch_without_scaled_text(tmp_path: Path) -> None:
    page = tmp_path / "plan.html"
    words = [
        "model=llama3_8b",
        "parallel=pp2vpp4",
        "cluster=h100x8",
        "data=mock",
        "data.seq_length=4096",
    ]
    assert main(["plan", *words, "trainer.global_batch_size=64", "--html", str(page)]) == 0
    text = page.read_text()
    assert "<b>64 samples</b>" in text
    assert "<b>4096 tokens</b>" in text
    assert "@media screen and (max-width: 900px) { .pic svg { width: 1000px; }" in text
    assert text.count("<svg") == text.count('<div class="pic"><svg') > 3
    picture = text.partition("<h2>Pipeline schedule</h2>")[2].partition("</svg>")[0]
    blocks = [
        float(w)
        for w, said in re.findall(r'width="([\d.]+)" height="22.0"[^>]*><title>(\w+ of)', picture)
    ]
    assert min(blocks) > 5
    assert "backward of chunk 3" in text
