"""`data`: text before training: corpora, tokenizers, and samples as a person reads them.

The words of each subverb, `name=value` or `--name value`, are declared where they are read.
"""

from __future__ import annotations

import click

from mtrain.cli.command import OVERRIDES, SETTINGS, Subverbs, as_json

PREFIX = ("PREFIX", "the path of a .bin and an .idx, without the ending")
OUT = (("out=PREFIX", "the new corpus"), ("overwrite=true", "replace a corpus of this name"))
PREVIEW_EXAMPLES = (
    ("data preview", "of the default run"),
    (
        "data preview data=sft data.path=chats.jsonl data.tokenizer=HF_DIR/tokenizer.json",
        "chats",
    ),
    ("data preview run=runs/NAME/run.yaml samples=10 split=validation", "what a run evaluates"),
)
TOKENIZE_EXAMPLES = (
    (
        "data tokenize docs.jsonl --out corpus --tokenizer tokenizer.json",
        "then: data=indexed data.path=corpus",
    ),
    (
        "data tokenize parts --out corpus --tokenizer gpt2 --key content --workers 8",
        "a folder of Parquet",
    ),
)


@click.group(
    "data",
    cls=Subverbs,
    short_help="text to tokens, and what tokens are: data --help",
    usage="data SUBVERB ...",
    help=(
        "Prepare text for training. `data SUBVERB --help` says more. `--name VALUE` and"
        " `name=VALUE` mean the same."
    ),
    arguments=(
        ("tokenize", "documents of many formats to .bin and .idx"),
        ("train-tokenizer", "a tokenizer of documents"),
        ("inspect, stats", "counts, lengths and text of a corpus; tokens and fertility by file"),
        ("verify", "whether a corpus is byte for byte as it was written"),
        ("merge, split, sample", "new corpora from documents of others"),
        ("dedup", "a corpus without repeated or nearly repeated documents"),
        ("preview", "the first samples of a configuration as a person reads them"),
    ),
    examples=(
        TOKENIZE_EXAMPLES[0],
        ("data inspect corpus --doc 0 --tokenizer tokenizer.json", "the first document"),
        ("data verify corpus", "before a long run"),
        ("data dedup corpus --out unique --method minhash --threshold 0.7", "near copies too"),
        PREVIEW_EXAMPLES[0],
    ),
    path_at=1,
)
def data() -> None:
    """Group the subverbs."""


@data.command(
    "tokenize",
    usage="data tokenize INPUT... --out PREFIX --tokenizer PATH [NAME=VALUE ...]",
    help=(
        "Tokenize documents into PREFIX.bin and PREFIX.idx, byte for byte as Megatron-LM's"
        " preprocess_data.py does.\nPREFIX.manifest.json has counts and hashes,"
        " PREFIX.rejects.jsonl every rejected record with file and line.\nThe files appear when"
        " all are complete. After a kill, the same command continues where it stopped."
    ),
    arguments=(
        (
            "INPUT...",
            ".jsonl .json .parquet .arrow .tar .txt .md, some with .gz or .zst, or folders of them",
        ),
        OUT[0],
        (
            "tokenizer=PATH",
            "tokenizer.json, *.model, *.tiktoken, vocab.json, vocab.txt, or the folder of one",
        ),
        (
            "key=NAME",
            "the key of the text, with dots into inner records; a list is of sentences (text)",
        ),
        ("template=TEXT", r"instead: text and keys, as in '{title}\n{text}'"),
        ("format=FORMAT", "of all inputs: jsonl, parquet, arrow, tar or text (by their endings)"),
        ("lines=true", "a line of a text file is a document (a file is)"),
        ("eod=false", "no token after a document (Megatron-LM's --append-eod is true here)"),
        ("eod_token=NAME", "the token after a document (that of the tokenizer)"),
        (
            "sentences=LANGUAGE",
            "cut documents by nltk's Punkt, a sequence a sentence; keep_newlines=true",
        ),
        (
            "special=text",
            "names of special tokens in documents are text (token, as in Megatron-LM)",
        ),
        ("dtype=TYPE", "uint16 or int32 (uint16 below 65500 ids)"),
        ("workers=N", "processes (all cores); the bytes are the same with any number"),
        ("max_rejects=N", "most rejected records: bad JSON, encoding, no key (1000)"),
        ("max_document=MIB", "size of the largest document (64)"),
        (
            "ignored_keys=KEY",
            "a key weight, loss, train or loss_mask that does not mark records to learn from",
        ),
        ("fresh=true", "start over where a killed run left files"),
        OUT[1],
        (
            "kind=KIND",
            "of the tokenizer: tokenizer.json, sentencepiece, tiktoken, gpt2 (merges=FILE), bert",
        ),
        (
            "engine=NAME",
            "tokenizers, or gigatoken where it is installed and agrees on samples (auto)",
        ),
        ("lower_case=false", "bert: keep capitals"),
        (
            "pattern=NAME",
            "tiktoken: gpt2, cl100k, o200k, v1 or v2 of Megatron-LM, or a regular expression",
        ),
        (
            "special_tokens=JSON",
            "tiktoken: names and ids; num_special_tokens=N, vocab_size=N of its JSON form",
        ),
    ),
    examples=TOKENIZE_EXAMPLES,
)
@as_json
def tokenize(words: list[str], as_json: bool) -> int:
    """Tokenize documents into a corpus."""
    from mtrain.cli.data import tokenize as subverb

    return subverb.tokenize(words, as_json=as_json)


@data.command(
    "train-tokenizer",
    usage="data train-tokenizer INPUT... --out FILE [--vocab-size N] [--kind KIND]",
    help="Train a tokenizer on documents, and write its tokenizer.json.",
    arguments=(
        ("INPUT...", "as in `data tokenize`"),
        ("out=FILE", "a new file"),
        ("vocab_size=N", "most tokens (32000)"),
        ("kind=KIND", "bpe of bytes, wordpiece as BERT's, or unigram (bpe)"),
        (
            "special=NAME",
            "a special token, several times or a JSON list (<|endoftext|>; wordpiece: BERT's)",
        ),
        ("limit_mib=N", "read at most so much text (1024)"),
        ("lower_case=false", "wordpiece: keep capitals"),
        (
            "key=NAME",
            "the key of the text (text); template=TEXT, format=FORMAT, lines=true as in tokenize",
        ),
        ("max_rejects=N", "most rejected records (1000)"),
    ),
    examples=(
        (
            "data train-tokenizer docs.jsonl --out tokenizer.json --vocab-size 16000",
            "a BPE of your own",
        ),
    ),
)
@as_json
def train_tokenizer(words: list[str], as_json: bool) -> int:
    """Train a tokenizer."""
    from mtrain.cli.data import train as subverb

    return subverb.train_tokenizer(words, as_json=as_json)


@data.command(
    "inspect",
    usage="data inspect PREFIX [--doc N] [--tokenizer PATH]",
    help=(
        "Print counts and lengths of a corpus; with doc, the tokens of one document, a mark between"
        " tokens and a line per\nsequence."
    ),
    arguments=(
        PREFIX,
        ("doc=N", "the document to show, from 0"),
        (
            "tokenizer=PATH",
            "shows tokens as text; for other kinds also the words of `data tokenize`",
        ),
    ),
    examples=(("data inspect corpus --doc 0 --tokenizer tokenizer.json", "the first document"),),
)
@as_json
def inspect(words: list[str], as_json: bool) -> int:
    """Print counts, or one document."""
    from mtrain.cli.data import look as subverb

    return subverb.inspect(words, as_json=as_json)


@data.command(
    "verify",
    usage="data verify PREFIX...",
    help=(
        "Read every byte of a corpus: compare hashes and counts with its manifest, and check the"
        " index and the range of ids.\nExit code 4 for a corpus that is not as it was written."
    ),
    arguments=(
        PREFIX,
        ("vocab_size=N", "every id is below it (that of the manifest)"),
        ("manifest=false", "without one: check only the index and the ids"),
        ("write=true", "without one: write it, with counts and hashes of the files as they are"),
        (
            "tokenizer=PATH",
            "of the tokens, for write=true; for other kinds also the words of `data tokenize`",
        ),
    ),
    examples=(
        ("data verify corpus", "before a long run"),
        ("data verify theirs manifest=false vocab_size=50257", "a corpus of another system"),
    ),
)
@as_json
def verify(words: list[str], as_json: bool) -> int:
    """Compare a corpus with its manifest."""
    from mtrain.cli.data import look as subverb

    return subverb.verify(words, as_json=as_json)


@data.command(
    "stats",
    usage="data stats PREFIX...",
    help=(
        "Print counts of each file and in total: tokens, bytes per token, tokens per word"
        " (fertility), share of unknown bytes."
    ),
    arguments=(PREFIX, ("files=false", "only the total")),
    examples=(("data stats corpus", "of a corpus from `data tokenize`"),),
)
@as_json
def stats(words: list[str], as_json: bool) -> int:
    """Print counts of each file and in total."""
    from mtrain.cli.data import look as subverb

    return subverb.stats(words, as_json=as_json)


@data.command(
    "merge",
    usage="data merge PREFIX... --out PREFIX",
    help="Concatenate corpora of one tokenizer.",
    arguments=(PREFIX, *OUT),
    examples=(("data merge part1 part2 --out corpus", "documents of part1, then those of part2"),),
)
@as_json
def merge(words: list[str], as_json: bool) -> int:
    """Concatenate corpora."""
    from mtrain.cli.data import change as subverb

    return subverb.merge(words, as_json=as_json)


@data.command(
    "split",
    usage="data split PREFIX --out PREFIX --shares 0.98,0.01,0.01",
    help=(
        "Cut a corpus into parts, PREFIX-train, PREFIX-validation and PREFIX-test, by tokens in its"
        " order, or with\nseed by randomly drawn documents. More than three parts are named 0, 1,"
        " ..."
    ),
    arguments=(PREFIX, ("shares=N,N,...", "of each part"), ("seed=N", "draw documents"), *OUT),
    examples=(("data split corpus --out parts --shares 0.98,0.02 --seed 1", "two, drawn"),),
)
@as_json
def split(words: list[str], as_json: bool) -> int:
    """Cut a corpus into parts."""
    from mtrain.cli.data import change as subverb

    return subverb.split(words, as_json=as_json)


@data.command(
    "sample",
    usage="data sample PREFIX --out PREFIX --documents N",
    help="Draw documents without repetition; they keep their order.",
    arguments=(
        PREFIX,
        ("documents=N", "so many"),
        ("tokens=N", "instead: at most so many tokens; skips a document that exceeds the rest"),
        ("share=X", "instead: this share of all tokens"),
        ("seed=N", "of the draw (0)"),
        *OUT,
    ),
    examples=(("data sample corpus --out small --tokens 1000000", "a small one"),),
)
@as_json
def sample(words: list[str], as_json: bool) -> int:
    """Draw documents."""
    from mtrain.cli.data import change as subverb

    return subverb.sample(words, as_json=as_json)


@data.command(
    "dedup",
    usage="data dedup PREFIX --out PREFIX [--method minhash]",
    help=(
        "Leave out documents that repeat an earlier one; PREFIX.removed.jsonl lists them, and which"
        " document each repeats."
    ),
    arguments=(
        PREFIX,
        ("method=minhash", "also near copies, by datasketch (exact)"),
        ("threshold=X", "minhash: the share of common runs of tokens (0.8)"),
        (
            "ngram=N",
            "minhash: tokens of a run (5); permutations=N, more are more exact (128)",
        ),
        *OUT,
    ),
    examples=(
        ("data dedup corpus --out unique --method minhash --threshold 0.7", "near copies too"),
    ),
)
@as_json
def dedup(words: list[str], as_json: bool) -> int:
    """Leave out repeated documents."""
    from mtrain.cli.data import change as subverb

    return subverb.dedup(words, as_json=as_json)


@data.command(
    "preview",
    usage=f"data preview {OVERRIDES} [samples=N] [split=NAME] [--html FILE]",
    help=(
        "Print the first samples of any configuration as a person reads them: tokens, which of them"
        " carry loss, where\ndocuments begin and end, positions, padding. In colours on a terminal."
    ),
    arguments=(
        ("samples=N", "so many (3)"),
        ("split=NAME", "train, validation or test (train)"),
        ("--html FILE", "one page that needs nothing else"),
        *SETTINGS,
    ),
    examples=PREVIEW_EXAMPLES,
)
@as_json
def preview(words: list[str], as_json: bool) -> int:
    """Print the first samples of a configuration."""
    from mtrain.cli.data import preview as subverb

    return subverb.preview(words, as_json=as_json)
