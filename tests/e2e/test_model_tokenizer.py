"""A model keeps its tokenizer: text is tokenized with it, another is refused, and an export ships
it.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

from mtrain.data.store.indexed import IndexedDataset
from tests.support.chats import CHATML, chats_file, folder_of, turns
from tests.support.commands import mtrain as fresh
from tests.support.forked import run_alone
from tests.support.launched import mtrain

STEP = (
    "trainer.train_iters=1 trainer.global_batch_size=1 trainer.micro_batch_size=1"
    " data.seq_length=64 "
)
STEP += (
    "trainer.eval_iters=0 trainer.eval_interval=null trainer.sample_tokens=0 data.split=[1,0,0]"
    " data.cache_dir=cache "
)
STEP += "optim.warmup_iters=0 log.progress=none"
TINY = (
    "model=llama_tiny model.num_layers=1 model.hidden_size=64 model.ffn_hidden_size=128"
    " model.vocab_size=400"
)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a Hugging Face folder `hf`, the run `mine` that was imported from it,
    texts and chats.
    """
    import transformers.models.llama.modeling_llama  # noqa: F401  # once for all forks

    home = tmp_path_factory.mktemp("kept")
    folder_of(home / "hf", "chatml")
    folder_of(home / "other", "llama3")
    size = Tokenizer.from_file(str(home / "hf/tokenizer.json")).get_vocab_size()

    def save() -> None:
        from transformers import LlamaConfig, LlamaForCausalLM

        shape = {
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 1,
            "num_attention_heads": 4,
        }
        config = LlamaConfig(
            **shape, vocab_size=size, max_position_embeddings=128, tie_word_embeddings=False
        )
        LlamaForCausalLM(config).save_pretrained(home / "hf")

    run_alone(save)
    (home / "text").mkdir()
    (home / "text" / "a.txt").write_text("What is it? It is a cat. def f(x): return x\n" * 40)
    chats_file(home / "chats.jsonl", [turns("2+2?", "four"), turns("3+3?", "six")])
    done = mtrain("convert", "import", "hf", "runs/mine", cwd=home)
    assert done.returncode == 0, done.stderr
    return home


def copied(home: Path, name: str) -> str:
    shutil.copytree(home / "runs/mine", home / "runs" / name)
    return f"runs/{name}"


def tokens_of_text(home: Path) -> np.ndarray:
    """Return the tokens of the newest corpus made of `text`."""
    made = max((home / "cache").glob("text-*/tokens.idx"), key=lambda file: file.stat().st_mtime_ns)
    return np.asarray(IndexedDataset(made.with_suffix("")).tokens[:])


def expected(home: Path) -> list[int]:
    tokenizer = Tokenizer.from_file(str(home / "hf/tokenizer.json"))
    ids = tokenizer.encode((home / "text/a.txt").read_text(), add_special_tokens=False).ids
    end = tokenizer.token_to_id("<|im_end|>")
    assert end is not None, "the eos_token of its tokenizer_config.json"
    return [*ids, end]


@pytest.mark.full
def test_model_tokenizer_import_reads_text_in_fresh_process(home: Path) -> None:
    run = copied(home, "text")
    kept = (home / run / "tokenizer.json").read_bytes()
    done = fresh("resume", run, "data=text", "data.path=text", *STEP.split(), cwd=home)
    assert done.returncode == 0, done.stderr
    assert (
        (home / run / "tokenizer.json").read_bytes()
        == kept
        == (home / "hf/tokenizer.json").read_bytes()
    )
    assert tokens_of_text(home).tolist() == expected(home)


@pytest.mark.full
def test_model_tokenizer_comes_with_starting_weights(home: Path) -> None:
    for source, name in (("hf", "of-folder"), (copied(home, "source"), "of-run")):
        shutil.rmtree(home / "cache", ignore_errors=True)
        words = [
            "run=runs/mine/run.yaml",
            "data=text",
            "data.path=text",
            f"checkpoint.init_from={source}",
        ]
        done = mtrain(*words, f"log.name={name}", *STEP.split(), cwd=home)
        assert done.returncode == 0, done.stderr
        assert tokens_of_text(home).tolist() == expected(home)
        assert (home / "runs" / name / "tokenizer_config.json").is_file()


@pytest.mark.parametrize(
    "where", ["resume runs/mine", "check run=runs/mine/run.yaml checkpoint.init_from=hf"]
)
def test_model_tokenizer_foreign_is_refused_by_name(where: str, home: Path) -> None:
    words = [
        *where.split(),
        "data=text",
        "data.path=text",
        "data.tokenizer=other/tokenizer.json",
        *STEP.split(),
    ]
    done = mtrain(*words, cwd=home)
    assert done.returncode == 2
    assert "MT345" in done.stderr
    assert "other/tokenizer.json: cannot give the model another tokenizer" in done.stderr
    own = "hf" if "checkpoint.init_from=hf" in words else "runs/mine"
    assert f"Use data.tokenizer={own}/tokenizer.json" in done.stderr
    shutil.copy(home / "hf/tokenizer.json", home / "same.json")
    words = [
        "check",
        "run=runs/mine/run.yaml",
        "checkpoint.init_from=hf",
        "data=text",
        "data.path=text",
    ]
    assert mtrain(*words, "data.tokenizer=same.json", *STEP.split(), cwd=home).returncode == 0


@pytest.mark.parametrize("begun", ["auto", "latest"])
def test_model_tokenizer_begun_or_resumed_run_keeps_it(begun: str, home: Path) -> None:
    words = [
        "run=runs/mine/run.yaml",
        "checkpoint.init_from=hf",
        "data=text",
        "data.path=text",
        *STEP.split(),
    ]
    words += [f"checkpoint.resume={begun}", "log.name=new", "checkpoint.accept_changes=true"]
    refused = mtrain("check", *words[:-1], "data.tokenizer=other/tokenizer.json", cwd=home)
    assert refused.returncode == 2
    assert "other/tokenizer.json: cannot give the model another tokenizer" in refused.stderr
    if begun == "auto":
        shutil.rmtree(home / "cache", ignore_errors=True)
        done = mtrain("data", "preview", *words, cwd=home)
        assert done.returncode == 0, done.stderr
        assert tokens_of_text(home).tolist() == expected(home)


@pytest.mark.full
def test_model_tokenizer_foreign_corpus_is_refused_by_name(home: Path) -> None:
    for name in ("hf", "other"):
        words = (
            "text/a.txt",
            f"out={name}-corpus",
            f"tokenizer={name}/tokenizer.json",
            "workers=1",
        )
        assert mtrain("data", "tokenize", *words, cwd=home).returncode == 0
    words_ = [
        "check",
        "run=runs/mine/run.yaml",
        "checkpoint.init_from=hf",
        "data=indexed",
        *STEP.split(),
    ]
    assert mtrain(*words_, "data.path=hf-corpus", cwd=home).returncode == 0
    done = mtrain(*words_, "data.path=other-corpus", "model.vocab_size=400", cwd=home)
    assert done.returncode == 2
    assert "other-corpus was made by another tokenizer" in done.stderr


@pytest.mark.full
def test_model_tokenizer_unread_is_not_replaced(home: Path) -> None:
    for name in ("tokenizer.model", "tekken.json", "tiktoken.model"):
        pieces = shutil.copytree(home / "hf", home / "pieces", dirs_exist_ok=True)
        (pieces / "tokenizer.json").rename(pieces / name)
        words = [
            "check",
            "run=runs/mine/run.yaml",
            "checkpoint.init_from=pieces",
            "data=text",
            "data.path=text",
        ]
        done = mtrain(*words, *STEP.split(), cwd=home)
        assert done.returncode == 2
        assert f"pieces/{name}, which is not read" in done.stderr
        shutil.rmtree(home / "runs/pieces", ignore_errors=True)
        assert mtrain("convert", "import", "pieces", "runs/pieces", cwd=home).returncode == 0
        done = mtrain(
            "resume", "runs/pieces", "data=text", "data.path=text", *STEP.split(), cwd=home
        )
        assert done.returncode == 2
        assert f"{name}, which is not read" in done.stderr
        shutil.rmtree(pieces)


def loaded(folder: Path) -> dict[str, object]:
    """Return the facts that transformers reads from a tokenizer's folder."""

    def read() -> dict[str, object]:
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(folder)
        if tokenizer.chat_template:
            chat = tokenizer.apply_chat_template(turns("2+2?", "four"), tokenize=False)
        else:
            chat = ""
        names = {name: getattr(tokenizer, name) for name in ("eos_token", "bos_token", "pad_token")}
        return {
            **names,
            "chat": chat,
            "ids": tokenizer("a cat <|im_end|>", add_special_tokens=False).input_ids,
        }

    found: dict[str, object] = run_alone(read)
    return found


def test_model_tokenizer_export_has_trained_template_and_tokens(
    home: Path,
) -> None:
    template = home / "mine.jinja"
    template.write_text(CHATML.replace("[[", "").replace("]]", "").replace("<tool_call>", "<call>"))
    settings = json.loads((home / "hf/tokenizer_config.json").read_text())
    tokens = home / "tokens"
    shutil.copytree(
        home / "hf", tokens, ignore=shutil.ignore_patterns("*.safetensors", "config.json")
    )
    (tokens / "tokenizer_config.json").write_text(
        json.dumps({**settings, "pad_token": "<|endoftext|>"})
    )
    words = [
        *TINY.split(),
        "data=sft",
        "data.path=chats.jsonl",
        "data.tokenizer=tokens/tokenizer.json",
    ]
    done = mtrain(
        *words, f"data.chat_template={template}", "log.name=chat", *STEP.split(), cwd=home
    )
    assert done.returncode == 0, done.stderr
    done = mtrain("convert", "export", "runs/chat", "exported", cwd=home)
    assert done.returncode == 0, done.stderr
    assert (home / "exported/chat_template.jinja").read_text() == template.read_text()
    found = loaded(home / "exported")
    there = loaded(tokens)
    assert (found["eos_token"], found["pad_token"]) == ("<|im_end|>", "<|endoftext|>")
    assert (found["chat"], found["ids"]) == (there["chat"], there["ids"])
    for name in ("config.json", "generation_config.json"):
        ids = json.loads((home / "exported" / name).read_text())
        tokenizer = Tokenizer.from_file(str(home / "hf/tokenizer.json"))
        assert ids["eos_token_id"] == tokenizer.token_to_id("<|im_end|>")
        assert ids["pad_token_id"] == tokenizer.token_to_id("<|endoftext|>")


@pytest.mark.full
def test_model_tokenizer_import_learns_chats_and_exports_all(
    home: Path,
) -> None:
    run = copied(home, "chats")
    done = mtrain("resume", run, "data=sft", "data.path=chats.jsonl", *STEP.split(), cwd=home)
    assert done.returncode == 0, done.stderr
    assert mtrain("convert", "export", run, "back", cwd=home).returncode == 0
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        assert (home / "back" / name).read_bytes() == (home / "hf" / name).read_bytes()


@pytest.mark.full
def test_model_tokenizer_export_names_end_of_text_token(home: Path) -> None:
    words = [
        *TINY.split(),
        "data=text",
        "data.path=text",
        "data.tokenizer_vocab_size=300",
        "log.name=bpe",
    ]
    assert mtrain(*words, *STEP.split(), cwd=home).returncode == 0
    assert mtrain("convert", "export", "runs/bpe", "exported-bpe", cwd=home).returncode == 0
    assert loaded(home / "exported-bpe")["eos_token"] == "<|endoftext|>"


@pytest.mark.parametrize("size", [400, 5000])
def test_model_tokenizer_is_not_trained_for_weights_without_one(size: int, home: Path) -> None:
    bare = home / f"bare{size}"
    shutil.copytree(home / "hf", bare)
    (bare / "tokenizer.json").unlink()
    config = json.loads((bare / "config.json").read_text())
    (bare / "config.json").write_text(json.dumps({**config, "vocab_size": size}))
    done = mtrain(
        "check", f"checkpoint.init_from={bare.name}", "data=text", "data.path=text", cwd=home
    )
    assert done.returncode == 2
    assert f"{bare.name} has weights and no tokenizer.json" in done.stderr
    assert "Use data.tokenizer=PATH of the model's tokenizer.json" in done.stderr
    assert "model.vocab_size=" not in done.stderr, "which the weights do not have"
