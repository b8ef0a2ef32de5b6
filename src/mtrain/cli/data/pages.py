"""The pages of `data` and of its subverbs; a new subverb is a line of `SUBVERBS`, a module and a page here."""

from __future__ import annotations

from mtrain.cli.page import JSON, Page

DATA_PAGES: dict[str, Page] = {
    "tokenize": Page(
        "data tokenize INPUT... --out PREFIX --tokenizer PATH [NAME=VALUE ...]",
        "Tokenizes documents into PREFIX.bin and PREFIX.idx, byte for byte as Megatron-LM's preprocess_data.py does.\n"
        "Beside them PREFIX.manifest.json has counts and hashes, PREFIX.rejects.jsonl what was left out, with file and\n"
        "line. The files are there when all is done. After a kill the same command goes on where it was.",
        (
            ("INPUT...", ".jsonl .json .parquet .arrow .tar .txt .md, some with .gz or .zst, or folders of them"),
            ("out=PREFIX", "where the corpus goes"),
            ("tokenizer=PATH", "tokenizer.json, *.model, *.tiktoken, vocab.json, vocab.txt, or the folder of one"),
            ("key=NAME", "of the text in a record, with dots into inner ones; a list is of sentences (text)"),
            ("template=TEXT", r"instead: text and keys, as in '{title}\n{text}'"),
            ("format=FORMAT", "of all inputs: jsonl, parquet, arrow, tar or text (by their endings)"),
            ("lines=true", "a line of a text file is a document (a file is)"),
            ("eod=false", "no token behind a document (Megatron-LM's --append-eod is true here)"),
            ("eod_token=NAME", "the token behind a document (what the tokenizer says)"),
            ("sentences=LANGUAGE", "cut documents by nltk's Punkt, a sequence a sentence; keep_newlines=true"),
            ("special=text", "names of special tokens in documents are text (token, as in Megatron-LM)"),
            ("dtype=TYPE", "uint16 or int32 (uint16 below 65500 ids)"),
            ("workers=N", "processes (all cores); the bytes are the same with any number"),
            ("max_rejects=N", "records that may be left out: bad JSON, encoding, no key (1000)"),
            ("max_document=MIB", "size of the largest document (64)"),
            ("fresh=true", "begin again where a killed run left something"),
            ("overwrite=true", "replace a corpus of this name"),
            ("kind=KIND", "of the tokenizer: tokenizer.json, sentencepiece, tiktoken, gpt2, bert; merges=FILE of gpt2"),
            ("lower_case=false", "bert: keep capitals"),
            ("pattern=NAME", "tiktoken: gpt2, cl100k, o200k, v1 or v2 of Megatron-LM, or a regular expression"),
            ("special_tokens=JSON", "tiktoken: names and ids; num_special_tokens=N, vocab_size=N of its JSON form"),
        ),
        (JSON,),
        (
            ("data tokenize docs.jsonl --out corpus --tokenizer tokenizer.json", "then: data=indexed data.path=corpus"),
            ("data tokenize parts --out corpus --tokenizer gpt2 --key content --workers 8", "a folder of Parquet"),
        ),
    ),
}
"""Subverb -> page."""
DATA = Page(
    "data SUBVERB ...",
    "What becomes of text before training. `data SUBVERB --help` says more. `--name VALUE` and `name=VALUE` are the\n"
    "same.",
    tuple((name, page.text.partition("\n")[0]) for name, page in DATA_PAGES.items()),
    (),
    tuple(page.examples[0] for page in DATA_PAGES.values()),
)
