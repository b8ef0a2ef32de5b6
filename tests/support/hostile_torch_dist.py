"""Checkpoints of megatron-core that somebody else made: pickles that run code, metadata that lies,
links.
"""

from __future__ import annotations

import io
import os
import pickle
import shutil
import struct
import warnings
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

FILE = "__0_0.distcp"
NAME = "decoder.final_layernorm.weight"
OTHER = "output_layer.weight"
_METADATA = "torch.distributed.checkpoint.metadata"


def write_good(folder: Path) -> Path:
    """Write a checkpoint of two tensors and an object with its tracker; return its iteration's
    folder.
    """
    path = folder / "iter_0000100"
    state = {
        NAME: torch.arange(8.0),
        OTHER: torch.ones(4, 8, dtype=torch.bfloat16),
        "rng_state": {"seed": 3},
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that torch.distributed is not in use
        dcp.save(state, storage_writer=dcp.FileSystemWriter(path, thread_count=1), no_dist=True)
    (path / "metadata.json").write_text(
        '{"sharded_backend": "torch_dist", "sharded_backend_version": 1}'
    )
    (folder / "latest_checkpointed_iteration.txt").write_text("100")
    return path


def text(value: str) -> bytes:
    """Return the pickle of a text."""
    return b"X" + struct.pack("<I", len(value.encode())) + value.encode()


def calls(module: str, name: str, *arguments: bytes) -> bytes:
    """Return a pickle that calls a function."""
    return b"\x80\x04c" + f"{module}\n{name}\n".encode() + b"(" + b"".join(arguments) + b"tR."


def _top(key: bytes) -> bytes:
    """Return metadata with a tensor of this name."""
    made = b"\x80\x04" + f"c{_METADATA}\nMetadata\n".encode() + b")\x81}("
    return made + text("state_dict_metadata") + b"}" + key + b"Ns" + text("storage_data") + b"}ub."


def pickles(canary: Path) -> dict[str, bytes]:
    """Return replacements of `.metadata` that are never read and never create the file `canary`."""
    touch = text(f"touch {canary}")
    python = text(f"open({str(canary)!r}, 'w')")
    out = {
        f"calls {module}.{name}": calls(module, name, argument)
        for module, name, argument in (
            ("os", "system", touch),
            ("posix", "system", touch),
            ("subprocess", "Popen", text("true")),
            ("subprocess", "check_output", text("true")),
            ("builtins", "eval", python),
            ("builtins", "exec", python),
            ("builtins", "compile", python),
            ("builtins", "__import__", text("os")),
            ("builtins", "open", text(str(canary)) + text("w")),
            ("builtins", "getattr", text("a") + text("b")),
            ("builtins", "list", b"]"),
            ("__builtin__", "eval", python),
            ("importlib", "import_module", text("this")),
            ("runpy", "run_path", text(str(canary))),
            ("shutil", "rmtree", text(str(canary.parent))),
            ("pathlib", "Path.touch", text(str(canary))),
            ("operator", "attrgetter", text("system")),
            ("functools", "partial", touch),
            ("pickle", "loads", text("N.")),
            ("torch", "load", text(str(canary))),
            ("torch.storage", "_load_from_bytes", text("x")),
            ("torch._utils", "_rebuild_tensor_v2", b"N"),
            ("numpy.core.multiarray", "_reconstruct", b"N"),
            ("copyreg", "_reconstructor", b"N"),
            ("types", "FunctionType", b"N"),
            ("argparse", "Namespace", b"N"),
            ("io", "BytesIO", b"N"),
            (_METADATA, "os.system", touch),
            (f"{_METADATA}.Metadata", "__init__", b"N"),
            ("", "", b"N"),
        )
    }
    inner = calls("os", "system", touch)[2:-1]
    admitted = f"c{_METADATA}\nMetadata\n".encode()
    stack = b"\x80\x04\x8c\x02os\x94\x8c\x06system\x94"
    shared = b"\x80\x04)\x94" + b"".join(
        b"h" + bytes([i]) + b"h" + bytes([i]) + b"\x86\x94" for i in range(200)
    )
    doubled = b")\x940" + b"".join(b"h%ch%c\x86\x940" % (i, i) for i in range(60)) + b"h\x3c"
    out |= {
        "a name from the stack": stack + b"\x93" + touch + b"\x85R.",
        "a name from the memo": stack + b"00h\x00h\x01\x93" + touch + b"\x85R.",
        "a name of bytes": b"\x80\x04C\x02osC\x06system\x93.",
        "a name of a tuple": b"\x80\x04)" + text("system") + b"\x93.",
        "a dotted name": b"\x80\x04"
        + text(_METADATA)
        + text("Metadata.__init__.__globals__")
        + b"\x93.",
        "a name of many letters": b"\x80\x04" + text("x" * 10_000) + text("y") + b"\x93.",
        "a name with a line": b"\x80\x04" + text("os\n\x1b[2J") + text("system") + b"\x93.",
        "code as an argument": b"\x80\x04" + admitted + b"(" + inner + b"tR.",
        "code as a state": b"\x80\x04" + admitted + b")\x81" + inner + b"b.",
        "code in a key": b"\x80\x04" + admitted + b")\x81}" + inner + b"Nsb.",
        "an admitted class with bad arguments": b"\x80\x04" + admitted + b"K\x01\x85R.",
        "an admitted class called twice": b"\x80\x04" + admitted + b")R)R.",
        "arguments that are no tuple": b"\x80\x04" + admitted + b"NR.",
        "a state given twice": b"\x80\x04" + admitted + b")\x81}b}b.",
        "a state of a list": b"\x80\x04]}b.",
        "a class for a value": b"\x80\x04" + admitted + b".",
        "a reference": b"\x80\x04N" + b"Q.",
        "a persistent name": b"\x80\x04Pos.system\n.",
        "an old instance": b"\x80\x04(" + touch + b"ios\nsystem\n.",
        "an old object": b"\x80\x04(" + admitted + touch + b"o.",
        "an extension": b"\x80\x04\x82\x01.",
        "named arguments": b"\x80\x04" + admitted + b")}\x92.",
        "a frame of exabytes": b"\x80\x04\x95" + b"\xff" * 8 + b"N.",
        "a text of gigabytes": b"\x80\x04X\xff\xff\xff\xffa.",
        "a text of exabytes": b"\x80\x04\x8d" + b"\xff" * 7 + b"\x7fa.",
        "bytes of gigabytes": b"\x80\x04B\xff\xff\xff\xffa.",
        "bytes of exabytes": b"\x80\x04\x8e" + b"\xff" * 7 + b"\x7fa.",
        "an array of exabytes": b"\x80\x05\x96" + b"\xff" * 7 + b"\x7fa.",
        "an integer of gigabytes": b"\x80\x04\x8b\xff\xff\xff\x7f1.",
        "an integer of 200 bytes": b"\x80\x04\x8a\xc8" + b"\xff" * 200 + b".",
        "an integer of many digits": b"\x80\x04I" + b"9" * 100_000 + b"\n.",
        "a long of many digits": b"\x80\x04L" + b"9" * 100_000 + b"L\n.",
        "a memo of gigabytes": b"\x80\x04Nr\xff\xff\xff\x7f.",
        "a memo that is empty": b"\x80\x04j\xff\xff\xff\x7f.",
        "a hundred thousand tuples in each other": b"\x80\x04)" + b"\x85" * 100_000 + b".",
        "a million lists in each other": b"\x80\x04" + b"]" * 1_000_000 + b"a" * 999_999 + b".",
        "a million marks": b"\x80\x04" + b"(" * 1_000_000 + b".",
        "a list that holds itself": b"\x80\x04]\x94h\x00a.",
        "a tuple of 2**200": shared + b".",
        "a dict whose key is 2**200": shared.replace(b")\x94", b"})\x94", 1) + b"Ns.",
        "a name without end": _top(doubled),
        "a name of a hundred thousand tuples": _top(b")" + b"\x85" * 100_000),
        "nothing": b"",
        "a protocol alone": b"\x80\x04",
        "protocol 0": b"(lp0\n.",
        "protocol 99": b"\x80\x63N.",
        "an end at once": b"\x80\x04.",
        "two values": b"\x80\x04NN.",
        "a value missing": b"\x80\x04\x85.",
        "a group that did not begin": b"\x80\x04Nt.",
        "no end": b"\x80\x04N",
        "a text that is no text": b"\x80\x04X\x02\x00\x00\x00\xff\xfe.",
        "a list of pairs": b"\x80\x04]N" + b"Ns.",
        "a line without end": b"\x80\x04c" + b"o" * 100_000,
        "another file": b"PK\x03\x04" + bytes(100),
    }
    return out


def _tensor(meta: Metadata) -> TensorStorageMetadata:
    found = meta.state_dict_metadata[OTHER]
    assert isinstance(found, TensorStorageMetadata)
    return found


def _chunks(*boxes: tuple[tuple[int, ...], tuple[int, ...]]) -> Callable[[Metadata], None]:
    """Return a change: the tensor has these chunks, stored in place of its one chunk."""

    def change(meta: Metadata) -> None:
        _tensor(meta).chunks = [
            ChunkStorageMetadata(torch.Size(o), torch.Size(s)) for o, s in boxes
        ]
        info = meta.storage_data.pop(MetadataIndex(OTHER, (0, 0)))
        share = info.length // len(boxes)
        for number, (offset, _) in enumerate(boxes):
            part = replace(info, offset=info.offset + number * share, length=share)
            meta.storage_data[MetadataIndex(OTHER, offset)] = part

    return change


def stored(**changes: Any) -> Callable[[Metadata], None]:
    """Return a change of the location of a tensor's bytes."""

    def change(meta: Metadata) -> None:
        index = MetadataIndex(OTHER, (0, 0))
        meta.storage_data[index] = replace(meta.storage_data[index], **changes)

    return change


def _set(**changes: Any) -> Callable[[Metadata], None]:
    return lambda meta: vars(_tensor(meta)).update(changes)


def _put(meta: Metadata, name: Any, value: Any) -> None:
    meta.state_dict_metadata[name] = value


_NO = TensorProperties(dtype=torch.complex64)


def _doubled(times: int) -> Any:
    """Return a pickle of nested pairs of equal tuples: a few bytes that take ages to print."""
    out: Any = ()
    for _ in range(times):
        out = (out, out)
    return out


METADATA: dict[str, Callable[[Metadata], None]] = {
    "a path of 2**200": stored(relative_path=_doubled(200)),
    "a first byte of 2**200": stored(offset=_doubled(200)),
    "a length of 2**200": stored(length=_doubled(200)),
    "a shape of 2**200": _set(size=_doubled(200)),
    "a path above": stored(relative_path="../x.distcp"),
    "a path from the root": stored(relative_path="/etc/passwd"),
    "a path below": stored(relative_path="x/y.distcp"),
    "a hidden file": stored(relative_path=".metadata"),
    "a name of another kind": stored(relative_path="common.pt"),
    "a path with a zero byte": stored(relative_path="a\0.distcp"),
    "a path with a line": stored(relative_path="a.distcp\n"),
    "a path that is a number": stored(relative_path=3),
    "a file that is not there": stored(relative_path="__9_9.distcp"),
    "a negative first byte": stored(offset=-1),
    "a first byte of exabytes": stored(offset=1 << 62),
    "a first byte that is text": stored(offset="0"),
    "a first byte that is true": stored(offset=True),
    "no bytes": stored(length=0),
    "negative bytes": stored(length=-5),
    "exabytes": stored(length=1 << 59),
    "bytes behind the file": stored(length=1 << 20),
    "bytes of another tensor": stored(offset=0),
    "a transform": stored(transform_descriptors=["zstd"]),
    "a number format of 2**200": lambda m: _set(properties=_doubled(200))(m),
    "a tensor of 2**200": lambda m: _put(m, OTHER, _doubled(200)),
    "no place": lambda m: m.storage_data.clear(),
    "no storage": lambda m: setattr(m, "storage_data", None),
    "a storage that is a list": lambda m: setattr(m, "storage_data", [1]),
    "places of texts": lambda m: m.storage_data.update({"a": "b"}),
    "a place that is a text": lambda m: m.storage_data.update({MetadataIndex("x", (0,)): "b"}),
    "no tensors": lambda m: setattr(m, "state_dict_metadata", None),
    "tensors that are a list": lambda m: setattr(m, "state_dict_metadata", []),
    "a name that is a number": lambda m: _put(m, 3, _tensor(m)),
    "a name that is empty": lambda m: _put(m, "", _tensor(m)),
    "a name of many letters": lambda m: _put(m, "x" * 5000, _tensor(m)),
    "a tensor that is a text": lambda m: _put(m, OTHER, "tensor"),
    "a tensor that is a size": lambda m: _put(m, OTHER, torch.Size([1])),
    "a shape of exabytes": _set(size=torch.Size([1 << 40, 1 << 20])),
    "a shape of another size": _set(size=torch.Size([4, 9])),
    "a shape of fewer dimensions": _set(size=torch.Size([32])),
    "a shape that is a number": _set(size=4),
    "a shape that is a text": _set(size="48"),
    "a shape of true": _set(size=[True, 8]),
    "a negative shape": _set(size=[-4, 8]),
    "a shape of fractions": _set(size=[4.0, 8.0]),
    "a shape of many digits": _set(size=[1 << 100, 8]),
    "forty dimensions": _set(size=torch.Size([1] * 40)),
    "a shape of nothing": _set(size=torch.Size([0, 8])),
    "no number format": _set(properties=None),
    "a number format that is text": _set(properties="float32"),
    "complex numbers": _set(properties=_NO),
    "twice as wide numbers": lambda m: (
        _chunks(((0, 0), (4, 8000)))(m) or _set(size=torch.Size([4, 8000]))(m)
    ),
    "no chunks": _set(chunks=[]),
    "chunks that are a number": _set(chunks=3),
    "a chunk that is a text": _set(chunks=["a"]),
    "chunks without end": lambda m: _set(chunks=_tensor(m).chunks * 100_000)(m),
    "a chunk twice": lambda m: _set(chunks=_tensor(m).chunks * 2)(m),
    "a chunk that is cut": _chunks(((0, 0), (3, 8))),
    "a chunk that is moved": _chunks(((1, 0), (4, 8))),
    "a chunk of another dimension": _chunks(((0, 0), (4, 8, 1))),
    "an empty chunk": _chunks(((0, 0), (4, 0))),
    "a hole": _chunks(((0, 0), (2, 8)), ((3, 0), (1, 8))),
    "an overlap": _chunks(((0, 0), (3, 8)), ((2, 0), (2, 8))),
    "an overlap as large as a hole": _chunks(((0, 0), (2, 8)), ((1, 0), (2, 8))),
}


def change_metadata(path: Path, change: Callable[[Metadata], Any]) -> None:
    """Change the metadata of a checkpoint that this module wrote."""
    meta = pickle.loads((path / ".metadata").read_bytes())
    change(meta)
    (path / ".metadata").write_bytes(pickle.dumps(meta))


def _link(path: Path, name: str) -> None:
    shutil.move(path / name, path.parent / "elsewhere")
    (path / name).symlink_to(path.parent / "elsewhere")


def _folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def _pipe(path: Path, name: str) -> None:
    (path / name).unlink()
    os.mkfifo(path / name)


def _tracker(content: bytes) -> Callable[[Path], object]:
    return lambda path: (path.parent / "latest_checkpointed_iteration.txt").write_bytes(content)


def _backend(content: str) -> Callable[[Path], object]:
    return lambda path: (path / "metadata.json").write_text(content)


def _cut(path: Path, name: str, size: int) -> None:
    with (path / name).open("rb+") as file:
        file.truncate(size)


def _grow(path: Path) -> None:
    with (path / ".metadata").open("rb+") as file:
        file.truncate(1 << 40)  # of which the disk holds nothing


FOLDERS: dict[str, Callable[[Path], object]] = {
    "metadata behind a link": lambda p: _link(p, ".metadata"),
    "metadata that is a pipe": lambda p: _pipe(p, ".metadata"),
    "metadata that is a folder": lambda p: _folder(p / ".metadata"),
    "metadata of a terabyte": _grow,
    "half of the metadata": lambda p: _cut(p, ".metadata", 500),
    "metadata but for its end": lambda p: _cut(
        p, ".metadata", (p / ".metadata").stat().st_size - 1
    ),
    "no metadata": lambda p: (p / ".metadata").unlink(),
    "data behind a link": lambda p: _link(p, FILE),
    "data that is a pipe": lambda p: _pipe(p, FILE),
    "data that is a folder": lambda p: _folder(p / FILE),
    "half of the data": lambda p: _cut(p, FILE, 1000),
    "no data": lambda p: (p / FILE).unlink(),
    "a tracker that leads up": _tracker(b"../iter_0000100"),
    "a tracker that leads to the root": _tracker(b"/etc"),
    "a tracker without a number": _tracker(b""),
    "a tracker of bytes": _tracker(b"\xff\xfe\x00"),
    "a tracker of many digits": _tracker(b"9" * 60),
    "a tracker of gigabytes": lambda p: _cut(
        p.parent, "latest_checkpointed_iteration.txt", 1 << 40
    ),
    "a tracker of an iteration that is not there": _tracker(b"101"),
    "a tracker of a release that is not there": _tracker(b"release"),
    "a folder behind a link": lambda p: _link(p.parent / ".", p.name),
    "another backend": _backend('{"sharded_backend": "zarr"}'),
    "a backend that is a list": _backend("[]"),
    "a backend that is deep": _backend("[" * 60_000),
    "no backend": _backend(""),
}


def item(pickled: bytes, numbers: bytes = bytes(64), **changes: Any) -> bytes:
    """Return a tensor as torch saves it, with the given pickle and numbers."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", changes.get("compression", zipfile.ZIP_STORED)) as archive:
        for name, content in {
            "data.pkl": pickled,
            "byteorder": changes.get("order", b"little"),
            changes.get("name", "data/0"): numbers,
            "version": b"3\n",
        }.items():
            archive.writestr(f"archive/{name}", content)
    return out.getvalue()


_HOOKS = b"ccollections\nOrderedDict\n)R"


def tensor_pickle(
    shape: tuple[int, ...] = (4, 8),
    strides: tuple[int, ...] = (8, 1),
    first: int = 0,
    held: int = 32,
    kind: str = "BFloat16Storage",
    key: str = "0",
) -> bytes:
    """Return the bytes that torch writes for a tensor."""

    def number(value: int) -> bytes:
        data = value.to_bytes(16, "little", signed=True)
        return b"\x8a\x10" + data

    def numbers(values: tuple[int, ...]) -> bytes:
        return b"(" + b"".join(map(number, values)) + b"t"

    storage = (
        b"("
        + text("storage")
        + f"ctorch\n{kind}\n".encode()
        + text(key)
        + text("cpu")
        + number(held)
        + b"tQ"
    )
    body = storage + number(first) + numbers(shape) + numbers(strides) + b"\x89" + _HOOKS
    return b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n(" + body + b"tR."


def items(canary: Path) -> dict[str, bytes]:
    """Return replacements of the bytes of a bf16 tensor of shape [4, 8]."""
    touch = text(f"touch {canary}")
    good = item(tensor_pickle())
    lies = bytearray(good)
    directory = good.index(b"PK\x01\x02")
    lies[directory + 20 : directory + 28] = b"\xff" * 8
    end = good.index(b"PK\x05\x06")
    sizes = bytearray(good)
    sizes[end + 12 : end + 16] = b"\xff\xff\xff\x7f"
    outside = bytearray(good)
    outside[directory + 42 : directory + 46] = b"\xff\xff\xff\x7f"
    return {
        "a pickle that runs code": item(calls("os", "system", touch)),
        "a bare pickle": calls("os", "system", touch),
        "code for a storage": item(tensor_pickle().replace(b"BFloat16Storage", b"os.system")),
        "code for hooks": item(
            tensor_pickle().replace(
                b"ccollections\nOrderedDict\n)R", calls("os", "system", touch)[2:-1]
            )
        ),
        "another number format": item(tensor_pickle(kind="FloatStorage"), bytes(128)),
        "a storage that is not known": item(tensor_pickle(kind="ComplexFloatStorage"), bytes(256)),
        "another shape": item(tensor_pickle(shape=(8, 4))),
        "a larger shape": item(tensor_pickle(shape=(4, 1 << 40))),
        "negative strides": item(tensor_pickle(strides=(-8, 1))),
        "strides beyond the storage": item(tensor_pickle(strides=(1 << 40, 1))),
        "fewer strides": item(tensor_pickle(strides=(8,))),
        "a negative first number": item(tensor_pickle(first=-1)),
        "a first number beyond the storage": item(tensor_pickle(first=1)),
        "a storage of more than there is": item(tensor_pickle(held=1 << 50)),
        "a storage of less": item(tensor_pickle(held=31)),
        "fewer numbers": item(tensor_pickle(), bytes(62)),
        "no numbers": item(tensor_pickle(), name="data/1"),
        "numbers of a path above": item(tensor_pickle(key="../0"), name="data/1"),
        "the other order of bytes": item(tensor_pickle(), order=b"big"),
        "compressed": item(tensor_pickle(), compression=zipfile.ZIP_DEFLATED),
        "a bomb": item(tensor_pickle(), bytes(1 << 22), compression=zipfile.ZIP_DEFLATED),
        "a large pickle": item(b"\x80\x02" + b"N0" * (1 << 20) + b"N."),
        "no pickle": item(b""),
        "a size that lies": bytes(lies),
        "a directory of gigabytes": bytes(sizes),
        "an entry outside": bytes(outside),
        "cut": good[:-30],
        "zeros": bytes(len(good)),
    }


def put_item(path: Path, data: bytes) -> None:
    """Replace the bytes of a tensor in a checkpoint that this module wrote."""
    (path / "__1_0.distcp").write_bytes(data)
    change_metadata(path, stored(relative_path="__1_0.distcp", offset=0, length=len(data)))
