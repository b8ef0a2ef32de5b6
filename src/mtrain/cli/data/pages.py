"""The pages of `data` and of its subverbs; a new subverb is a line of `SUBVERBS`, a module and a
page here.
"""

from __future__ import annotations

from mtrain.cli.page import JSON, OVERRIDES, SETTINGS, Page

_PREFIX = (("PREFIX", "of a .bin and an .idx"),)
_OUT = (
    ("out=PREFIX", "where the corpus goes"),
    ("overwrite=true", "replace a corpus of this name"),
)
_RECORDS = (
    (
        "key=NAME",
        (
            "of the text in a record (text); template=TEXT, format=FORMAT, lines=true as in `data"
            " tokenize`"
        ),
    ),
    ("max_rejects=N", "records that may be left out (1000)"),
)
DATA_PAGES: dict[str, Page] = {
    "tokenize": Page(
        "data tokenize INPUT... --out PREFIX --tokenizer PATH [NAME=VALUE ...]",
        "Tokenizes documents into PREFIX.bin and PREFIX.idx, byte for byte as Megatron-LM's"
        " preprocess_data.py.\nBeside them PREFIX.manifest.json has counts and hashes,"
        " PREFIX.rejects.jsonl what was left out, with file\nand line. The files are there when all"
        " is done. After a kill the same command goes on where it was.",
        (
            (
                "INPUT...",
                (
                    ".jsonl .json .parquet .arrow .tar .txt .md, some with .gz or .zst, or folders"
                    " of them"
                ),
            ),
            ("out=PREFIX", "where the corpus goes"),
            (
                "tokenizer=PATH",
                "tokenizer.json, *.model, *.tiktoken, vocab.json, vocab.txt, or the folder of one",
            ),
            (
                "key=NAME",
                "of the text in a record, with dots into inner ones; a list is of sentences (text)",
            ),
            ("template=TEXT", r"instead: text and keys, as in '{title}\n{text}'"),
            (
                "format=FORMAT",
                "of all inputs: jsonl, parquet, arrow, tar or text (by their endings)",
            ),
            ("lines=true", "a line of a text file is a document (a file is)"),
            ("eod=false", "no token behind a document (Megatron-LM's --append-eod is true here)"),
            ("eod_token=NAME", "the token behind a document (what the tokenizer says)"),
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
            ("max_rejects=N", "records that may be left out: bad JSON, encoding, no key (1000)"),
            ("max_document=MIB", "size of the largest document (64)"),
            (
                "ignored_keys=KEY",
                (
                    "a key weight, loss, train or loss_mask that does not say whether a record is"
                    " learned"
                ),
            ),
            ("fresh=true", "begin again where a killed run left something"),
            ("overwrite=true", "replace a corpus of this name"),
            (
                "kind=KIND",
                (
                    "of the tokenizer: tokenizer.json, sentencepiece, tiktoken, gpt2, bert;"
                    " merges=FILE of gpt2"
                ),
            ),
            (
                "engine=NAME",
                (
                    "tokenizers, or gigatoken where it is installed and its ids are the same on"
                    " samples (auto)"
                ),
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
        (JSON,),
        (
            (
                "data tokenize docs.jsonl --out corpus --tokenizer tokenizer.json",
                "then: data=indexed data.path=corpus",
            ),
            (
                "data tokenize parts --out corpus --tokenizer gpt2 --key content --workers 8",
                "a folder of Parquet",
            ),
        ),
    ),
    "inspect": Page(
        "data inspect PREFIX [--doc N] [--tokenizer PATH]",
        "Counts and lengths of a corpus; with doc, the tokens of one document, a mark between"
        " tokens and a line for\neach sequence.",
        (
            *_PREFIX,
            ("doc=N", "the document to show, from 0"),
            ("tokenizer=PATH", "shows tokens as text; of other kinds the words of `data tokenize`"),
        ),
        (JSON,),
        (("data inspect corpus --doc 0 --tokenizer tokenizer.json", "the first document"),),
    ),
    "verify": Page(
        "data verify PREFIX...",
        "Reads every byte of a corpus: hashes and counts against its manifest, index, and that ids"
        " are in range.\nExit code 4 where one is not as it was written.",
        (
            *_PREFIX,
            ("vocab_size=N", "ids are below it (what the manifest says)"),
            ("manifest=false", "there is none: look at the index and the ids alone"),
            (
                "write=true",
                "where there is none, write it: counts and hashes of the files as they are",
            ),
            (
                "tokenizer=PATH",
                "that made the tokens, for write=true; of other kinds the words of `data tokenize`",
            ),
        ),
        (JSON,),
        (
            ("data verify corpus", "before a long run"),
            ("data verify theirs manifest=false vocab_size=50257", "of others"),
        ),
    ),
    "stats": Page(
        "data stats PREFIX...",
        "Counts of each file and of all: tokens, bytes a token, tokens a word (fertility), share of"
        " unknown bytes.",
        (*_PREFIX, ("files=false", "of all alone")),
        (JSON,),
        (("data stats corpus", "of a corpus that `data tokenize` made"),),
    ),
    "train-tokenizer": Page(
        "data train-tokenizer INPUT... --out FILE [--vocab-size N] [--kind KIND]",
        "Trains a tokenizer on documents, and writes its tokenizer.json.",
        (
            ("INPUT...", "as in `data tokenize`"),
            ("out=FILE", "a new file"),
            ("vocab_size=N", "tokens at most (32000)"),
            ("kind=KIND", "bpe of bytes, wordpiece as BERT's, or unigram (bpe)"),
            (
                "special=NAME",
                "a special token, several times or a JSON list (<|endoftext|>; wordpiece: BERT's)",
            ),
            ("limit_mib=N", "of text that is read (1024)"),
            ("lower_case=false", "wordpiece: keep capitals"),
            *_RECORDS,
        ),
        (JSON,),
        (
            (
                "data train-tokenizer docs.jsonl --out tokenizer.json --vocab-size 16000",
                "a BPE of your own",
            ),
        ),
    ),
    "merge": Page(
        "data merge PREFIX... --out PREFIX",
        "Joins corpora of one tokenizer, one behind the other.",
        (*_PREFIX, *_OUT),
        (JSON,),
        (("data merge part1 part2 --out corpus", "documents of part1, then those of part2"),),
    ),
    "split": Page(
        "data split PREFIX --out PREFIX --shares 0.98,0.01,0.01",
        "Cuts a corpus into parts: PREFIX-train, PREFIX-validation and PREFIX-test, by tokens in"
        " its order, or with\nseed by documents that are drawn. More than three are called 0,"
        " 1, ...",
        (*_PREFIX, ("shares=N,N,...", "of each"), ("seed=N", "draw documents"), *_OUT),
        (JSON,),
        (("data split corpus --out parts --shares 0.98,0.02 --seed 1", "two, drawn"),),
    ),
    "sample": Page(
        "data sample PREFIX --out PREFIX --documents N",
        "Draws documents without repetition; they keep their order.",
        (
            *_PREFIX,
            ("documents=N", "so many"),
            (
                "tokens=N",
                (
                    "instead: so many tokens at most; a document too long for what is left is"
                    " passed over"
                ),
            ),
            ("share=X", "instead: this share of all tokens"),
            ("seed=N", "of what is drawn (0)"),
            *_OUT,
        ),
        (JSON,),
        (("data sample corpus --out small --tokens 1000000", "a small one"),),
    ),
    "dedup": Page(
        "data dedup PREFIX --out PREFIX [--method minhash]",
        "Leaves out documents that repeat an earlier one; PREFIX.removed.jsonl says which, and what"
        " they repeat.",
        (
            *_PREFIX,
            ("method=minhash", "also what is nearly the same, by datasketch (exact)"),
            ("threshold=X", "minhash: share of runs of tokens that both have (0.8)"),
            ("ngram=N", "minhash: tokens of a run (5); permutations=N, more are more exact (128)"),
            *_OUT,
        ),
        (JSON,),
        (("data dedup corpus --out unique --method minhash --threshold 0.7", "near copies too"),),
    ),
    "preview": Page(
        f"data preview {OVERRIDES} [samples=N] [split=NAME] [--html FILE]",
        "The first samples of any configuration as a person reads them: tokens, which of them carry"
        " loss, where\ndocuments begin and end, positions, padding. In colours on a terminal.",
        (
            ("samples=N", "how many (3)"),
            ("split=NAME", "train, validation or test (train)"),
            ("--html FILE", "one page that needs nothing else"),
            *SETTINGS,
        ),
        (JSON,),
        (
            ("data preview", "of the default run"),
            (
                "data preview data=sft data.path=chats.jsonl data.tokenizer=HF_DIR/tokenizer.json",
                "chats",
            ),
            (
                "data preview run=runs/NAME/run.yaml samples=10 split=validation",
                "what a run is evaluated on",
            ),
        ),
    ),
}
"""Subverb -> page."""


DATA = Page(
    "data SUBVERB ...",
    "What becomes of text before training. `data SUBVERB --help` says more. `--name VALUE` and"
    " `name=VALUE` are the\nsame.",
    (
        ("tokenize", "documents of many formats to .bin and .idx"),
        ("train-tokenizer", "a tokenizer of documents"),
        ("inspect, stats", "counts, lengths and text of a corpus; tokens and fertility by file"),
        ("verify", "whether a corpus is byte for byte what it was"),
        ("merge, split, sample", "corpora made of documents of others"),
        ("dedup", "a corpus without documents that are there twice, or nearly"),
        ("preview", "the first samples of a configuration as a person reads them"),
    ),
    (),
    tuple(page.examples[0] for page in DATA_PAGES.values()),
)
