"""Loads megatron.core with `torch.cuda` replaced by a device's namespace; torch itself is never
touched.

Sources are rewritten as syntax trees while they are imported, with their line numbers, so that
tracebacks stay true:

| source                                | becomes                                    |
|---------------------------------------|--------------------------------------------|
| `torch.cuda.X`                        | the device namespace's `X`                 |
| `from torch.cuda.m import X`          | `X` of the namespace's `m`                 |
| `"cuda"`, `"cuda:1"`, `f"cuda:{i}"`   | the same with the device's torch type      |
| `"torch.cuda.FloatTensor"`            | the same with the device's type prefix     |
| `x.cuda(...)`, `x.is_cuda`            | `x.to(...)`, `x.is_<type>`                 |
| `backend="nccl"`                      | the device's backend                       |
| `pin_memory=...`, `x.pin_memory()`    | `False`, `x`, where the device cannot pin  |
| `x.cpu()`, `x.to("cpu")`, `x.pin_memory()` | a copy of `x`, where the CPU is the device |

A tensor that megatron-core takes to host memory is a copy for it, which outlives the original; so
it is where both are the same memory. On CUDA this module is not used at all.
"""

from __future__ import annotations

import ast
import contextlib
import hashlib
import importlib.abc
import importlib.machinery
import marshal
import os
import re
import stat
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from types import CodeType, ModuleType
from typing import TYPE_CHECKING, Any

from mtrain.config.machine.installed import cache_folder

if TYPE_CHECKING:
    import torch

    from mtrain.devices.base import Device

PACKAGE = "megatron.core"
_NAMESPACE = "__device_namespace__"
_ADAPTER = "__device_adapter__"
_DEVICE_STRING = re.compile(r"cuda(:\d+)?")
_TYPE_STRING = re.compile(r"torch\.cuda\.(\w+Tensor)")
WORDS = (b"cuda", b"pin_memory", b"nccl", b".cpu(", b"'cpu'", b'"cpu"')
"""A source without any of them is loaded as it is."""
# A part of the key of cached code: another version of this file rewrites differently.
_REWRITER = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()

_rewrites: dict[str, Counter[str]] = {}


def rewrites() -> dict[str, dict[str, int]]:
    """Count the rewrites of each kind, by module, in the modules imported so far; empty on CUDA."""
    return {module: dict(counts) for module, counts in sorted(_rewrites.items())}


def install(device: Device) -> None:
    """Put the rewriting finder before all others; megatron.core must not have been imported yet."""
    sys.meta_path.insert(0, _Finder(device))


def rewrite(source: bytes, path: str, device: Device) -> tuple[ast.Module, Counter[str]]:
    """Return the syntax tree of `source` adapted to `device`, and the rewrites of each kind."""
    rewriter = _Rewriter(device)
    tree = ast.fix_missing_locations(rewriter.visit(ast.parse(source, path)))
    return tree, rewriter.counts


class _Rewriter(ast.NodeTransformer):
    def __init__(self, device: Device) -> None:
        self.device = device
        self.counts: Counter[str] = Counter()

    def visit_Attribute(self, node: ast.Attribute) -> ast.expr:
        self.generic_visit(node)
        if node.attr == "cuda" and _is_torch(node.value):
            self.counts["namespace"] += 1
            return ast.copy_location(ast.Name(_NAMESPACE, node.ctx), node)
        if node.attr == "is_cuda":
            self.counts["is_cuda"] += 1
            node.attr = f"is_{self.device.torch_type}"
        return node

    def visit_Call(self, node: ast.Call) -> ast.expr:
        method = node.func
        if isinstance(method, ast.Attribute) and not _is_torch(method.value):
            if method.attr == "cuda":
                self.counts["cuda()"] += 1
                # Only the running program knows whether `x` is a module or a tensor, so a function
                # decides.
                node.args.insert(0, method.value)
                node.func = self._adapter("move", method)
            elif method.attr == "pin_memory" and not self.device.pin_memory:
                self.counts["pin_memory"] += 1
                # Without pinning, a copy to a device with memory of its own is slower and no other.
                # Where host and device share memory, a pinned tensor has to be a copy, unless the
                # `x.cpu()` inside makes one.
                if self.device.is_indexed or _is_to_host(method.value):
                    return self.visit(method.value)
                node = self._copied(node, method)
            elif _is_to_host(node) and not self.device.is_indexed:
                node = self._copied(node, method)
        self.generic_visit(node)
        return node

    def _copied(self, node: ast.Call, method: ast.Attribute) -> ast.Call:
        self.counts["host copy"] += 1
        node.args.insert(0, method.value)
        node.func = self._adapter("to_host", method)
        return node

    def visit_keyword(self, node: ast.keyword) -> ast.keyword:
        self.generic_visit(node)
        if node.arg == "pin_memory" and not self.device.pin_memory:
            self.counts["pin_memory"] += 1
            node.value = ast.copy_location(ast.Constant(False), node.value)
        elif (
            node.arg == "backend"
            and isinstance(node.value, ast.Constant)
            and node.value.value == "nccl"
        ):
            self.counts["backend"] += 1
            node.value = ast.copy_location(ast.Constant(self.device.backend), node.value)
        return node

    def visit_JoinedStr(self, node: ast.JoinedStr) -> ast.expr:
        head = node.values[0] if node.values else None
        if len(node.values) == 2 and isinstance(head, ast.Constant) and head.value == "cuda:":
            index = node.values[1]
            if isinstance(index, ast.FormattedValue):
                self.counts["device string"] += 1
                call = ast.Call(self._adapter("indexed", node), [self.visit(index.value)], [])
                return ast.copy_location(call, node)
        self.generic_visit(node)
        return node

    def visit_Constant(self, node: ast.Constant) -> ast.expr:
        if isinstance(node.value, str):
            if device := _DEVICE_STRING.fullmatch(node.value):
                self.counts["device string"] += 1
                # torch takes `cpu` and `cpu:0` for two devices.
                index = device[1] or ""
                node.value = self.device.torch_type + (index if self.device.is_indexed else "")
            elif tensor_type := _TYPE_STRING.fullmatch(node.value):
                self.counts["type string"] += 1
                node.value = self.device.type_prefix + tensor_type[1]
        return node

    def visit_ImportFrom(self, node: ast.ImportFrom) -> Any:
        if node.level or not (node.module or "").startswith("torch.cuda"):
            return node
        self.counts["import"] += 1
        # An assignment replaces the import, for a namespace need not be a module.
        within = (node.module or "").removeprefix("torch.cuda").lstrip(".")
        return [
            self._bind(alias.asname or alias.name, f"{within}.{alias.name}".lstrip("."), node)
            for alias in node.names
        ]

    def visit_Import(self, node: ast.Import) -> Any:
        kept = []
        bound = []
        for alias in node.names:
            # Without `as`, the statement binds only `torch`, whose uses are rewritten where they
            # stand.
            if alias.name.startswith("torch.cuda.") and alias.asname:
                self.counts["import"] += 1
                bound.append(self._bind(alias.asname, alias.name.removeprefix("torch.cuda."), node))
            else:
                kept.append(alias)
        node.names = kept
        return [*([node] if kept else []), *bound]

    def _adapter(self, name: str, at: ast.AST) -> ast.expr:
        return ast.copy_location(
            ast.Attribute(ast.Name(_ADAPTER, ast.Load()), name, ast.Load()), at
        )

    def _bind(self, name: str, dotted: str, at: ast.stmt) -> ast.stmt:
        value = ast.Call(self._adapter("pick", at), [ast.Constant(dotted)], [])
        return ast.copy_location(ast.Assign([ast.Name(name, ast.Store())], value), at)


def _is_torch(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id == "torch"


def _is_to_host(node: ast.expr) -> bool:
    """Return whether it is `x.cpu(...)`, or `x.to(...)` with the CPU written out."""
    if (
        not isinstance(node, ast.Call)
        or not isinstance(node.func, ast.Attribute)
        or _is_torch(node.func.value)
    ):
        return False
    given = [*node.args, *(keyword.value for keyword in node.keywords if keyword.arg == "device")]
    return node.func.attr == "cpu" or (node.func.attr == "to" and any(map(_is_cpu, given)))


def _is_cpu(node: ast.expr) -> bool:
    if isinstance(node, ast.Call) and ast.unparse(node.func) == "torch.device" and node.args:
        node = node.args[0]
    return isinstance(node, ast.Constant) and node.value == "cpu"


class _Adapter:
    """Functions that rewritten code calls where renaming is not enough."""

    def __init__(self, device: Device) -> None:
        self._device = device

    def move(self, value: Any, device: Any = None, non_blocking: bool = False) -> Any:
        """Do as `value.cuda(device, non_blocking)` of a tensor or module."""
        target = self._device.torch_type if device is None else self.indexed(device)
        if _is_module(value):
            return value.to(target)
        # A meta tensor has no memory to move.
        return value if value.is_meta else value.to(target, non_blocking=non_blocking)

    def to_host(self, value: Any, *args: Any, **kwargs: Any) -> Any:
        """Do as `value.cpu()`, `value.to("cpu", ...)` or `value.pin_memory()`: return memory of its
        own, but for a module's.
        """
        if _is_module(value):
            return value.to(*(args or ("cpu",)), **kwargs)
        return value.to(*args, **kwargs, copy=True) if args or kwargs else value.clone()

    def indexed(self, index: int | str | torch.device) -> str:
        """Return the device string of an index; a namespace may use a torch.device instead."""
        return f"{self._device.torch_type}:{index}" if isinstance(index, int) else str(index)

    def pick(self, dotted: str) -> Any:
        """Import `dotted` as `from torch.cuda import dotted` does, with its ImportError."""
        value = self._device.namespace
        for part in dotted.split("."):
            try:
                value = getattr(value, part)
            except AttributeError:
                raise ImportError(
                    f"device {self._device.name!r} has no {dotted!r} in its namespace"
                ) from None
        return value


def _is_module(value: Any) -> bool:
    return hasattr(value, "named_parameters")


class _Loader(importlib.machinery.SourceFileLoader):
    def __init__(self, name: str, path: str, device: Device) -> None:
        super().__init__(name, path)
        self._device = device

    def get_code(self, fullname: str) -> CodeType | None:
        path = self.get_filename(fullname)
        source = self.get_data(path)
        # Searching is much cheaper than parsing, and Python's own cache serves these modules.
        if not any(word in source for word in WORDS):
            return super().get_code(fullname)
        key = _cache_key(source, path, self._device)
        found = load(key)
        if found is None:
            tree, counts = rewrite(source, path, self._device)
            # `dont_inherit`, or this file's `from __future__ import annotations` would apply there,
            # too.
            found = compile(tree, path, "exec", dont_inherit=True), dict(counts)
            store(key, *found)
        code, counted = found
        _rewrites[fullname] = Counter(counted)
        return code

    def exec_module(self, module: ModuleType) -> None:
        # Before the module runs: its top level may use them already.
        module.__dict__[_NAMESPACE] = self._device.namespace
        module.__dict__[_ADAPTER] = _Adapter(self._device)
        super().exec_module(module)


def _cache_key(source: bytes, path: str, device: Device) -> str:
    facts = (
        sys.version,
        sys.implementation.cache_tag,
        sys.flags.optimize,
        _REWRITER,
        device.torch_type,
        device.type_prefix,
        device.backend,
        device.pin_memory,
        path,
    )
    return hashlib.sha256(repr(facts).encode() + source).hexdigest()


class _Finder(importlib.abc.MetaPathFinder):
    def __init__(self, device: Device) -> None:
        self._device = device

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != PACKAGE and not fullname.startswith(PACKAGE + "."):
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        # Extension modules and namespace packages have no source.
        if spec is not None and type(spec.loader) is importlib.machinery.SourceFileLoader:
            spec.loader = _Loader(spec.loader.name, spec.loader.path, self._device)
        return spec


Entry = tuple[CodeType, dict[str, int]]
UNUSED_DAYS = 90
DAY_S = 86_400


def folder() -> Path:
    """Return `code` under $MTRAIN_CACHE, else under ~/.cache/mtrain.

    Raises:
        FileNotFoundError: this user has no home.
    """
    root = cache_folder()
    if root is None:
        raise FileNotFoundError("this user has no home folder")
    return root / "code"


def load(key: str) -> Entry | None:
    """Return the entry stored under `key`; None if there is no entry that only this user can have
    written.

    Code from a file is run, so the file and its folder must belong to this user and be closed to
    writing by others.
    """
    try:
        if not _is_private(os.lstat(folder())):
            return None
        # A symbolic link could lead to code that another user wrote.
        file = os.open(folder() / key, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return None
    with open(file, "rb") as stream:
        # Checked on the open file: its path could name another one by the time it is read.
        status = os.fstat(stream.fileno())
        if not _is_private(status):
            return None
        # The time of modification stands for the time of the last load. Once a day is exact enough,
        # and spares most loads a write.
        if status.st_mtime < time.time() - DAY_S:
            with contextlib.suppress(OSError):
                os.utime(stream.fileno())
        try:
            code, counts = marshal.loads(stream.read())
        except (OSError, EOFError, ValueError, TypeError):
            return None
    return code, counts


def store(key: str, code: CodeType, counts: dict[str, int]) -> None:
    """Keep `code` and `counts` under `key`; where that is impossible, do nothing."""
    try:
        folder().mkdir(mode=0o700, parents=True, exist_ok=True)
        if not _is_private(os.lstat(folder())):
            return
        file, draft = tempfile.mkstemp(prefix="draft-", dir=folder())
    except OSError:
        return
    try:
        with open(file, "wb") as stream:
            stream.write(marshal.dumps((code, counts)))
        # The ranks of a machine start together and store the same entries. A rename is atomic: no
        # rank reads a file that another has half written.
        os.replace(draft, folder() / key)
        _prune()
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(draft)


def _prune() -> None:
    """Remove entries that nobody has loaded for long, and drafts that a killed process left."""
    oldest = time.time() - UNUSED_DAYS * DAY_S
    for path in folder().iterdir():
        if path.lstat().st_mtime < oldest:
            path.unlink(missing_ok=True)


def _is_private(status: os.stat_result) -> bool:
    writable_by_others = status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    return (
        status.st_uid == os.getuid() and not writable_by_others and not stat.S_ISLNK(status.st_mode)
    )
