"""Canaries in scripts: whatever the name or the shape of a secret, no output holds it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mtrain.cli.main import main
from mtrain.recipes.secrets import Secrets, names_secret

CANARY = "c4n4ry-9f8e7d"
BASE = (
    "torchrun --nproc-per-node 1 pretrain_gpt.py --num-layers 2 --hidden-size 64"
    " --num-attention-heads 4 --seq-length 8 --vocab-size 100 --train-iters 5 --lr 1e-3"
    " --micro-batch-size 1 --mock-data "
)
LEAKS = {
    "exported": f"export WANDB_API_KEY={CANARY}\n{BASE} --wandb-exp-name $WANDB_API_KEY",
    "flag": f"{BASE} --wandb-api-key {CANARY}",
    "joined flag": f"{BASE} --hf-token={CANARY}",
    "unknown flag": f"{BASE} --comet {CANARY}",
    "inside a word": f"MY_SECRET={CANARY}\n{BASE} --tensorboard-dir s3://x/$MY_SECRET/y",
    "placed": f"PASSWORD={CANARY}\n{BASE} --data-path /data/$PASSWORD/x",
    "array": f"TOKEN=({CANARY})\nA=(--wandb-entity ${{TOKEN[0]}})\n{BASE} ${{A[@]}}",
    "under a condition": f"export HF_TOKEN={CANARY}\nif x; then A=--load=$HF_TOKEN; fi\n{BASE}",
    "number": f"{BASE} --api-key {CANARY} --seed {CANARY}",
    "another command": f"curl -H {CANARY} x\nexport API_KEY={CANARY}\n{BASE} --spec $API_KEY",
    "unclosed": f"export API_KEY={CANARY}\n{BASE} --lr $API_KEY",
    "file": f"export API_KEY={CANARY}\nsource $API_KEY/x\n{BASE}",
}
SHAPES = (
    "hf_" + "a1B2" * 6,
    "sk-" + "abcd1234" * 3,
    "ghp_" + "0123456789" * 3,
    "0123456789abcdef0123456789abcdef01234567",
    "AKIAABCDEFGHIJKLMNOP",
)


@pytest.mark.sampled
@pytest.mark.parametrize("name", LEAKS)
@pytest.mark.parametrize("as_json", [False, True])
def test_secrets_never_reach_output(
    name: str, as_json: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "train.sh"
    script.write_text(LEAKS[name])
    main(
        [
            "recipe",
            "import",
            str(script),
            *(["--json"] if as_json else []),
            "-o",
            str(tmp_path / "out.yaml"),
        ]
    )
    shown = capsys.readouterr()
    written = (tmp_path / "out.yaml").read_text() if (tmp_path / "out.yaml").exists() else ""
    assert CANARY not in shown.out + shown.err + written
    assert shown.out + shown.err


@pytest.mark.parametrize("secret", SHAPES)
def test_secrets_token_is_known_by_shape(
    secret: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "train.sh"
    script.write_text(f"{BASE} --tensorboard-dir {secret} --data-path /x/{secret}\n")
    assert main(["recipe", "import", str(script)]) == 0
    shown = capsys.readouterr()
    assert secret not in shown.out + shown.err
    assert "***" in shown.err


def test_secrets_login_in_url_is_hidden() -> None:
    assert Secrets({}).hide("s3://user:pa55@host/x") == "s3://***@host/x"


def test_secrets_key_holding_one_is_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "train.sh"
    script.write_text(LEAKS["placed"].replace("--mock-data", ""))
    assert main(["recipe", "import", "--json", str(script)]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert [(u["flag"], u["why"]) for u in answer["unplaced"]] == [("--data-path", "secret")]


@pytest.mark.parametrize(
    "name", ["WANDB_API_KEY", "HF_TOKEN", "--hf-token", "db.password", "MY_SECRET", "--auth"]
)
def test_secrets_known_by_name(name: str) -> None:
    assert names_secret(name)


@pytest.mark.parametrize(
    "name", ["TOKENIZER_MODEL", "--tokenizer-type", "KEYS", "MONKEY", "AUTHOR", "MASTER_PORT"]
)
def test_secrets_lookalike_names_are_kept(name: str) -> None:
    assert not names_secret(name)
