"""A model that was trained here writes the same text where transformers has loaded its export."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.commands import SMALL
from tests.support.forked import run_alone
from tests.support.launched import mtrain

CASES = {
    "one rank, own output layer": ["model.tie_word_embeddings=false"],
    "tensor and pipeline parallel, tied": ["model.tie_word_embeddings=true", "parallel=tp2pp2"],
}
TOKENS = 24
PROMPTS = ("alpha beta", "return")


def _corpus(folder: Path) -> None:
    """Write lines in which one word always follows another, so that a little training makes texts
    that continue.
    """
    names = ["alpha", "beta", "gamma", "delta", "return", "import", "self", "print"]
    folder.mkdir()
    for i in range(20):
        lines = [" ".join(names[(i + j + k) % 8] for k in range(8)) + f" = {j}" for j in range(60)]
        (folder / f"file{i}.txt").write_text("\n".join(lines))


def _written_by_transformers(folder: Path) -> list[str]:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    texts = []
    for prompt in PROMPTS:
        ids = tokenizer(prompt, return_tensors="pt", add_special_tokens=False).input_ids
        found = model.generate(ids, max_new_tokens=TOKENS, min_new_tokens=TOKENS, do_sample=False)
        texts.append(tokenizer.decode(found[0][ids.shape[1] :]))
    return texts


@pytest.mark.full
@pytest.mark.parametrize("name", CASES)
def test_exported_text_transformers_equals_generate(name: str, tmp_path: Path) -> None:
    _corpus(tmp_path / "corpus")
    words = [word for word in SMALL if not word.startswith(("data=", "model.vocab", "parallel="))]
    words += [
        "data=text",
        "data.path=corpus",
        "data.seq_length=64",
        "data.tokenizer_vocab_size=400",
    ]
    words += [
        "model.vocab_size=401",
        "data.cache_dir=cache",
        "trainer.train_iters=60",
        "optim.lr=0.01",
        "log.name=run",
    ]
    done = mtrain(*words, *CASES[name], cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert mtrain("convert", "export", "runs/run", "theirs", cwd=tmp_path).returncode == 0
    (tmp_path / "prompts.jsonl").write_text("\n".join(json.dumps(prompt) for prompt in PROMPTS))
    words = ["prompts=prompts.jsonl", f"tokens={TOKENS}", "temperature=0", "--json"]
    done = mtrain("generate", "runs/run", *words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    ours = [text["text"] for text in json.loads(done.stdout)["texts"]]
    assert run_alone(lambda: _written_by_transformers(tmp_path / "theirs")) == ours
    assert len(set(ours)) == len(PROMPTS)
    assert all(len(set(text.split())) > 3 for text in ours), (
        "texts that repeat themselves show little"
    )
