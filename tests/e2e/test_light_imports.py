"""Verbs and modules that load no heavy library: all in one fresh process, one after the other, so a
library is found at the first that loads it.
"""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from tests.support.patience import patient
from tests.unit.test_start_from_weights import LLAMA, folder

SMALL = (
    "model=llama32_1b cluster=h100 data.seq_length=4096 cluster.devices_per_node=2"
    " trainer.global_batch_size=4"
)
HEAVY = ("torch", "megatron", "numpy", "tokenizers", "hydra", "typer", "rich")
# In this order: each may load what those before it must not.
LIGHT: dict[str, tuple[str, tuple[str, ...]]] = {
    name: (verb, libraries)
    for libraries, verbs in (
        (
            HEAVY,
            {
                "complete a verb": "__complete|mtrain ",
                "complete a choice": "__complete|mtrain model=ll",
                "complete a key": "__complete|mtrain optim.",
                "complete a code": "__complete|mtrain explain MT",
            },
        ),
        (
            tuple(name for name in HEAVY if name != "hydra"),
            {
                "explain a code": "explain MT609",
                "explain a key": "explain model.num_layers",
                "check": "check",
                "check a cluster": "check model=llama3_70b parallel=tp4pp4 cluster=h100x64",
                "check what is refused": "check parallel=tp3",
                "check a recipe": "check recipe=llama3/70b_h100x64",
                "check a split": "check data.split=[1,1,1]",
                "recipe show": "recipe show llama3/70b_h100x64 --resolved",
                "recipe new": "recipe new x model=llama3_8b parallel=tp2 cluster=h100x8",
                "recipe diff": "recipe diff llama3/70b_h100x64 llama3/8b_h100x8",
                "recipe lock": "recipe lock llama3/70b_h100x64 -o locked.yaml",
                "recipe export": "recipe export --megatron llama3/70b_h100x64",
                "the launcher": "import mtrain.cli.train, mtrain.cli.prove, mtrain.cli.rehearse,"
                " mtrain.cli.generate, mtrain.cli.evaluate, mtrain.cli.multirun, mtrain.cli.verbs,"
                " mtrain.launching.local, mtrain.launching.torchrun",
                "the API": "import mtrain.api",
                "requests of generate": "import mtrain.cli.generate, mtrain.cli.named_values",
                "devices": "import mtrain.devices.registry, mtrain.devices.base",
            },
        ),
        (
            ("torch", "megatron", "tokenizers"),
            {
                "check weights": "check checkpoint.init_from=hf data=mock optim.lr=1e-4",
                "families": "import mtrain.models.registry, mtrain.plan.shrink",
                "plan": f"plan {SMALL}",
                "tune": f"tune {SMALL}",
                "mock data": "from mtrain.config.schema.data import DataConfig;"
                " from mtrain.data import open_splits, prepare;"
                " data = DataConfig(kind='mock', seq_length=16);"
                " open_splits(data, 99, 1, prepare(data))",
                "conversion": "import mtrain.convert.boxes, mtrain.convert.importer,"
                " mtrain.convert.exporter, mtrain.convert.checkpoint_reader,"
                " mtrain.convert.huggingface.reader, mtrain.convert.huggingface.model,"
                " mtrain.convert.megatron.reader, mtrain.models.gpt.hf, mtrain.models.t5.hf,"
                " mtrain.models.llava.hf, mtrain.models.bert.hf",
            },
        ),
    )
    for name, verb in verbs.items()
}
CODES = {"recipe diff": 1, "check what is refused": 2}
"""Exit codes of the verbs that end with another than 0."""
MOST_S = 3.0
"""CPU seconds of a `recipe` verb with all that it imports."""
PROBE = f"""
import contextlib, io, json, sys, time
spent = 0.0
for name, verb in json.load(sys.stdin).items():
    before = set(sys.modules)
    code = 0
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        if verb.startswith(("import ", "from ")):
            exec(verb)
        else:
            from mtrain.cli.main import main
            code = main(verb.split("|" if "|" in verb else None))
    found = [each for each in {HEAVY} if each in set(sys.modules) - before]
    print(json.dumps([name, code, found, time.process_time() - spent]))
    spent = time.process_time()
"""


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return the exit code of each verb, the heavy libraries that it loaded, and its CPU seconds;
    those of the first begin with the process.
    """
    home = tmp_path_factory.mktemp("light")
    folder(home / "hf", LLAMA)
    done = subprocess.run(
        [sys.executable, "-c", PROBE],
        input=json.dumps({name: verb for name, (verb, _) in LIGHT.items()}),
        capture_output=True,
        text=True,
        timeout=patient(120),
        cwd=home,
    )
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    return {name: rest for name, *rest in rows}


@pytest.mark.parametrize("name", LIGHT)
def test_light_verb_loads_no_heavy_library(name: str, loaded: dict[str, Any]) -> None:
    code, found, seconds = loaded[name]
    assert code == CODES.get(name, 0)
    assert not set(found) & set(LIGHT[name][1])
    if name.startswith("recipe "):
        imports = loaded["complete a verb"][2] + loaded["check"][2]
        assert imports + seconds < MOST_S


def test_light_verb_that_loads_one_is_found() -> None:
    rows = {"numbers": "import numpy", "again": "import numpy"}
    done = subprocess.run(
        [sys.executable, "-c", PROBE],
        input=json.dumps(rows),
        capture_output=True,
        text=True,
        timeout=patient(60),
    )
    found = [json.loads(line)[:3] for line in done.stdout.splitlines()]
    assert found == [["numbers", 0, ["numpy"]], ["again", 0, []]]
