"""Chats of a JSON Lines file, encoded once with the model's chat template.

A prepared file is a folder of the cache: `tokens.bin/.idx` with one document for a chat and two for
a pair; `learned.bin`, the loss mask, a byte for each token; `chats.bin`, the source line and the
learned range of each document (0 of a prompt), and whether it is chosen; `rejects.jsonl`, the lines
that are not JSON; and of prompts `records.jsonl`, the line of each document.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import resource
import signal
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from importlib.metadata import version
from mmap import mmap
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np

from mtrain import strict_json
from mtrain.config.compose.paths import user_path
from mtrain.config.disk.files import PreferenceForm, form_of, records_of
from mtrain.config.resolve.model_tokenizer import sha256_of
from mtrain.config.schema.data import DataConfig
from mtrain.data.chats import messages
from mtrain.data.chats.loss_mask import EncodedChat, encode_chat, encode_prompt
from mtrain.data.chats.messages import NotJson
from mtrain.data.chats.template import ChatFormat
from mtrain.data.records import JsonLines, Keys
from mtrain.data.store import cache
from mtrain.data.store.cache import writing
from mtrain.data.store.corpus import Corpus
from mtrain.data.store.indexed import IndexedWriter, token_dtype
from mtrain.errors import BadEnvironment, ConfigError, CorruptData, MtrainError
from mtrain.units import GIB

if TYPE_CHECKING:  # importing it loads the tokenizers library
    from mtrain.data.text.tokenizer import Tokenizer


FORMAT = 7
TOKENS = "tokens"
LEARNED = "learned.bin"
TABLE = "chats.bin"
REJECTS = "rejects.jsonl"
RECORDS = "records.jsonl"
# Columns of `chats.bin`, int64, a row for each document: line, first and last learned token, 1 if
# it is chosen, else 0, and the bits of its margin, float64
COLUMNS = 5
# Lines at the start of a file in which the first preference tells the form of all
MOST_BEFORE = 1000
# Characters of a line that `rejects.jsonl` shows
SHOWN = 200


def prepare(data: DataConfig, note: Callable[[str], None], tokenizer: Path | None = None) -> Corpus:
    """Encode every chat of the file with the chat template, unless the cache has it.

    Raises:
        ConfigError: the file, the tokenizer or the template is missing.
        CorruptData: the template refuses a line, or too many lines are not JSON.
        BadEnvironment: the cache cannot be written.
    """
    given = tokenizer or (user_path(data.tokenizer) if data.tokenizer else None)
    if given is None:
        rule = f"cannot be null because data.kind={data.kind} encodes chats with a tokenizer"
        fix = "data.tokenizer=PATH of a tokenizer.json, or checkpoint.init_from=HF_DIR"
        raise ConfigError.of("MT603", "data.tokenizer", None, rule, fix)
    from mtrain.data.text.tokenizer import Tokenizer

    file = _file(data.path)
    form = format_of(data, given)
    loaded = Tokenizer(given)
    sha256 = sha256_of(given)
    settings = _settings(data, file, form, sha256)
    folder = user_path(data.cache_dir) / f"chats-{cache.name_of(settings)}"

    def make(building: Path) -> None:
        lines = JsonLines(file)
        cache.tidy(folder.parent, note)
        kinds = {"sft": "chats", "preference": "preferences", "prompts": "prompts"}
        what = kinds[data.kind]
        note(f"{file}: encoding {len(lines)} {what} with the chat template")
        _make(lines, data, form, loaded, building)

    with writing(folder.parent):
        meta = cache.build_once(folder, lambda: _meta(folder), make)
    own = {"vocab_size": loaded.vocab_size, "eod": loaded.eod, "tokenizer_sha256": sha256}
    return Corpus(
        folder / TOKENS, given, {**meta, **own, "file": str(file)}, template=form.template_file
    )


def format_of(data: DataConfig, tokenizer: Path) -> ChatFormat:
    """Return the chat template of a configuration.

    Raises ConfigError if there is no template or jinja2 is missing.
    """
    form = ChatFormat(
        tokenizer.parent, user_path(data.chat_template) if data.chat_template else None
    )
    if form.template is None:
        fix = (
            "data.chat_template=FILE, or the tokenizer_config.json of the model next to its"
            " tokenizer.json"
        )
        raise ConfigError.of("MT509", "data.chat_template", data.chat_template, form.missing, fix)
    form.require_jinja()
    return form


def _file(path: str | None) -> Path:
    file = None
    rule = "cannot be null because chats are read from a file"
    if path is not None:
        file, rule = records_of(user_path(path), "what the chats are")
    if file is None:
        fix = "data.path=FILE.jsonl with one chat a line"
        raise ConfigError.of("MT615", "data.path", path, rule, fix)
    return file


def _settings(data: DataConfig, file: Path, form: ChatFormat, tokenizer: str) -> dict[str, Any]:
    """Return everything that the encoded chats depend on; its hash names their folder."""
    stamp = os.stat(file)
    return {
        "format": FORMAT,
        "kind": data.kind,
        "loss_on": data.loss_on,
        "bad_lines": data.bad_lines,
        "ignored_keys": sorted(data.ignored_keys),
        "file": str(file.resolve()),
        "stamp": [stamp.st_size, stamp.st_mtime_ns, stamp.st_ino],
        "tokenizer": tokenizer,
        "templates": form.templates,
        "special": form.special_tokens,
        "versions": [version("tokenizers"), version("jinja2")],
    }


def _meta(folder: Path) -> dict[str, Any] | None:
    """Return the metadata of prepared chats, or None unless every file has its written size."""
    try:
        meta = cache.read_meta(folder)
        complete = all(
            (folder / name).stat().st_size == size for name, size in meta["sizes"].items()
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return meta if complete and meta["sizes"] else None


def _form(lines: JsonLines) -> PreferenceForm:
    """Return the form of the preferences of a file: that of the first preference in it."""
    for number in range(min(len(lines), MOST_BEFORE)):
        with contextlib.suppress(CorruptData):
            form = form_of(messages.parse_line(lines.line(number)))
            if form is not None:
                return form
    return "pairs"


def _work(
    data: DataConfig, form: ChatFormat, tokenizer: Tokenizer, preferences: PreferenceForm | None
) -> Work:
    """Return the function that encodes a line: its chat, its pairs or its labelled chat."""
    keys = Keys(frozenset(data.ignored_keys), "\n".join(form.templates.values()))

    def encode(line: bytes) -> Sequence[EncodedChat]:
        values = messages.parse_line(line)
        if data.kind == "prompts":
            return [encode_prompt(messages.parse_prompt(values, keys), form, tokenizer)]
        chats: list[tuple[messages.Chat, bool]]
        if preferences is None:
            chats = [(messages.parse_chat(values, keys), True)]
        elif preferences == "labels":
            chats = [messages.parse_labelled(values, keys)]
        else:
            if preferences == "scores":
                pairs = messages.parse_ranking(values, keys)
            else:
                pairs = [messages.parse_pair(values, keys)]
            chats = [one for pair in pairs for one in zip(pair, (True, False), strict=True)]
        return [
            replace(
                encode_chat(chat, form, tokenizer, data.loss_on), chosen=chosen, margin=chat.margin
            )
            for chat, chosen in chats
        ]

    return encode


def _make(
    lines: JsonLines, data: DataConfig, form: ChatFormat, tokenizer: Tokenizer, folder: Path
) -> None:
    digest = hashlib.sha256()
    learned = 0
    largest = -1
    chats = 0
    bad = 0
    parsed = 0
    used = 0
    margins = 0
    last = -1
    preferences = _form(lines) if data.kind == "preference" else None
    names = (LEARNED, TABLE, REJECTS, *((RECORDS,) if data.kind == "prompts" else ()))
    files = [open(folder / name, "wb") for name in names]  # noqa: SIM115
    known, table, rejects, *records = files
    with (
        ExitStack() as stack,
        IndexedWriter(folder / TOKENS, token_dtype(tokenizer.vocab_size)) as writer,
    ):
        for file in files:
            stack.enter_context(file)
        encoded = encode_lines(lines, _work(data, form, tokenizer, preferences))
        for number, chat in _kept(lines, enumerate(encoded), data, rejects):
            places = np.flatnonzero(chat.learned[1:]) + 1
            writer.add(chat.ids)
            ends = (places[0], places[-1]) if len(places) else (0, 0)
            margin = np.float64(chat.margin)
            row = [lines.numbers[number], *ends, chat.chosen, margin.view(np.int64)]
            table.write(np.array(row, "<i8").tobytes())
            used += number != last
            last = number
            for file in records:
                line = lines.line(number).removeprefix(b"\xef\xbb\xbf").strip() + b"\n"
                digest.update(line)
                file.write(line)
            known.write(chat.learned.tobytes())
            digest.update(chat.ids.tobytes() + chat.learned.tobytes())
            if preferences == "labels":
                digest.update(bytes([chat.chosen]))
            if margin and preferences == "pairs":
                digest.update(margin.tobytes())
                margins += 1
            parsed += chat.parsed
            learned += len(places)
            largest = max(largest, int(chat.ids.max()))
            chats += 1
        bad = rejects.tell()
    if not chats:
        why = "it has no chat"
        if preferences == "scores":
            why = "no line of it makes a pair, because all scores of a prompt are equal"
        raise CorruptData(f"{lines.file}: {why}")
    bad_lines = sum(1 for _ in open(folder / REJECTS, "rb")) if bad else 0  # noqa: SIM115
    sizes = {file.name: file.stat().st_size for file in folder.iterdir()}
    meta = {
        "kind": data.kind,
        "source": lines.file.name,
        "documents": chats,
        "tokens": sizes[f"{TOKENS}.bin"] // writer.dtype.itemsize,
        "learned": learned,
        "parsed_arguments": parsed,
        "bad_lines": bad_lines,
        "preferences": preferences,
        "margins": margins,
        "lines": len(lines),
        "lines_unused": len(lines) - used - bad_lines,
        "largest_id": largest,
        "fingerprint": digest.hexdigest()[:32],
        "sizes": sizes,
    }
    cache.write_meta(folder, meta)


def _kept(
    lines: JsonLines, results: Any, data: DataConfig, rejects: Any
) -> Iterator[tuple[int, EncodedChat]]:
    """Yield line number and documents of each line; write lines that are not JSON to `rejects`."""
    # a file with more damaged lines is hardly JSON Lines
    limit = 100 if data.bad_lines is None else data.bad_lines
    bad = 0
    for number, result in results:
        if not isinstance(result, Fault):
            yield from ((number, chat) for chat in result)
            continue
        if not result.is_not_json:
            raise CorruptData(f"{lines.place(number)}: {result.text}")
        bad += 1
        row = {"line": int(lines.numbers[number]), "why": result.text}
        row["text"] = lines.line(number)[:SHOWN].decode("utf-8", "replace")
        rejects.write((strict_json.dumps(row) + "\n").encode())
        if bad > limit:
            raise CorruptData(
                f"{lines.place(number)}: {result.text}; {bad} lines are not JSON, and"
                f" data.bad_lines is {limit}: correct the file, or data.bad_lines={2 * bad}"
            )


# Time limit of one chat; an ordinary one takes a millisecond
SECONDS = 20
# Memory that a process may take beyond its size at the start
MEMORY_BYTES = 2 * GIB
# Chats that one process encodes before it is the turn of the next
BATCH = 32
MOST_PROCESSES = 16
# Chats that justify the start of another process
WORTH_A_PROCESS = 512
MOST_TOKENS = 1 << 26
# Kind and length of a part. E, or P if tool arguments were parsed: ids of a chat, in lower case of
# one that is not chosen; T: its margin, float64, and their loss mask; X and R: a fault, R of a line
# that is not JSON; N: the end of a line.
_HEAD = struct.Struct("<cI")
Work = Callable[[bytes], Sequence[EncodedChat]]


@dataclass(frozen=True)
class Fault:
    """The fault of a line; a line that is not JSON may be left out."""

    text: str
    is_not_json: bool


Result = list[EncodedChat] | Fault


def encode_lines(lines: JsonLines, work: Work, most: int | None = None) -> Iterator[Result]:
    """Yield the result of `work` for every line, in order, from as many processes as cores.

    Raises:
        CorruptData: a line took too much time or memory, with its place.
    """
    # Processes, and not threads: a template is a foreign program that may never end, and only a
    # process can be limited in time and memory and be killed.
    cores = len(os.sched_getaffinity(0))
    count = max(
        1, min(cores, MOST_PROCESSES, len(lines) // WORTH_A_PROCESS, most or MOST_PROCESSES)
    )
    writers: list[_Writer] = []
    try:
        for index in range(count):
            writers.append(_Writer(lines, work, index, count))
        for first in range(0, len(lines), BATCH):
            writer = writers[first // BATCH % count]
            for number in range(first, min(first + BATCH, len(lines))):
                yield writer.result(number)
    finally:
        for writer in writers:
            writer.end()


class _Writer:
    """A process that encodes every `count`-th batch of lines from batch `index` on."""

    def __init__(self, lines: JsonLines, work: Work, index: int, count: int) -> None:
        self.lines = lines
        # shared memory: the number of the line at work, for the message if the process is killed
        self._at = mmap(-1, 8)
        read_end, write_end = os.pipe()
        try:
            self.pid = os.fork()
        except OSError as error:
            os.close(read_end)
            os.close(write_end)
            raise BadEnvironment(
                f"a worker process cannot be started: {error.strerror or error}"
            ) from None
        if self.pid == 0:
            os.close(read_end)
            _run(lines, work, range(index * BATCH, len(lines), count * BATCH), self._at, write_end)
        os.close(write_end)
        self.pipe: BinaryIO = os.fdopen(read_end, "rb")

    def result(self, number: int) -> Result:
        """Return the result of a line."""
        out: list[EncodedChat] = []
        while True:
            kind, body = self._part()
            if kind == b"N":
                return out
            if kind in b"XR":
                return Fault(body.decode("utf-8", "replace"), kind == b"R")
            known, learned = self._part()
            ids = np.frombuffer(body, "<i4").astype(np.int64)
            if (
                kind not in (b"E", b"P", b"e", b"p")
                or known != b"T"
                or len(learned) != len(ids) + 8
            ):
                raise self._died(number)
            mask = np.frombuffer(learned, np.uint8, offset=8) != 0
            margin = float(np.frombuffer(learned, "<f8", 1)[0])
            out.append(EncodedChat(ids, mask, kind.upper() == b"P", kind.isupper(), margin))

    def _part(self) -> tuple[bytes, bytes]:
        head = self.pipe.read(_HEAD.size)
        if len(head) == _HEAD.size:
            kind, size = _HEAD.unpack(head)
            # the size comes from another process: read no more than a chat can have
            body = self.pipe.read(size) if size <= 4 * MOST_TOKENS else b""
            if len(body) == size:
                return kind, body
        raise self._died(int.from_bytes(self._at[:8], "little"))

    def _died(self, number: int) -> MtrainError:
        place = self.lines.place(min(number, len(self.lines) - 1))
        return CorruptData(
            f"{place}: this chat takes more than {SECONDS} s or {MEMORY_BYTES // GIB} GiB to write."
            " Use another data.chat_template, or a shorter chat"
        )

    def end(self) -> None:
        """Kill the process, finished or not."""
        self.pipe.close()
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)


def _run(lines: JsonLines, work: Work, firsts: range, at: mmap, write_end: int) -> None:
    """Encode the batches of a worker process, write the results to its pipe, and exit."""
    code = 1
    try:
        # Ctrl-C reaches every process of a terminal; this one is ended by its parent
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGALRM, _too_long)
        os.environ["TOKENIZERS_PARALLELISM"] = "false"
        _bound_memory()
        with os.fdopen(write_end, "wb") as pipe:
            for first in firsts:
                for number in range(first, min(first + BATCH, len(lines))):
                    at[:8] = number.to_bytes(8, "little")
                    result = _bounded(work, lines.line(number))
                    _send(pipe, result)
                    if isinstance(result, Fault):
                        # it may end the whole run, and the next line may take long
                        pipe.flush()
                pipe.flush()
        code = 0
    except BaseException:  # the reader sees the end of the pipe and the line in `at`
        code = 1
    finally:
        os._exit(code)


def _bounded(work: Work, line: bytes) -> Result:
    """Return the result of a line within `SECONDS`.

    Code that no signal interrupts is killed by the limit on CPU time a bit later.
    """
    # a regular expression or a loop in C does not return to Python, where signals are handled
    _, hardest = resource.getrlimit(resource.RLIMIT_CPU)
    limit = int(time.process_time()) + 2 * SECONDS
    resource.setrlimit(resource.RLIMIT_CPU, (_within(limit, hardest), hardest))
    signal.setitimer(signal.ITIMER_REAL, SECONDS)
    try:
        return list(work(line))
    except MemoryError:
        return Fault(f"this chat takes more than {MEMORY_BYTES // GIB} GiB to write", False)
    except MtrainError as error:
        return Fault(str(error), isinstance(error, NotJson))
    except Exception as error:
        return Fault(f"it cannot be written: {type(error).__name__}: {error}", False)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def _send(pipe: BinaryIO, result: Result) -> None:
    if isinstance(result, Fault):
        body = result.text.encode("utf-8", "backslashreplace")[:4000]
        pipe.write(_HEAD.pack(b"R" if result.is_not_json else b"X", len(body)) + body)
        return
    for one in result:
        ids = one.ids.astype("<i4").tobytes()
        learned = np.array(one.margin, "<f8").tobytes() + one.learned.tobytes()
        kind = b"P" if one.parsed else b"E"
        pipe.write(
            _HEAD.pack(kind if one.chosen else kind.lower(), len(ids))
            + ids
            + _HEAD.pack(b"T", len(learned))
            + learned
        )
    pipe.write(_HEAD.pack(b"N", 0))


def _bound_memory() -> None:
    with open("/proc/self/statm", encoding="ascii") as file:
        now = int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    _, hardest = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (_within(now + MEMORY_BYTES, hardest), hardest))
    # a process that is killed at its limit would write gigabytes of a core file
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _within(limit: int, hardest: int) -> int:
    """Return a limit that is within the hard limit of the process."""
    return limit if hardest == resource.RLIM_INFINITY else min(limit, hardest)


def _too_long(number: int, frame: Any) -> None:
    raise TimeoutError(f"more than {SECONDS} s")
