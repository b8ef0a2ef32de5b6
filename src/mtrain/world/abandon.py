"""The end of a world whose ranks go on: a rank that failed wakes its peers, and each releases its
groups, its model and megatron-core's state, so that the same processes can join again.

gloo has no call that ends a collective: its `abort` does nothing, and its destructor waits for the
collectives under way. Connections that are shut down end them on both sides.
"""

from __future__ import annotations

import ctypes
import functools
import gc
import os
import socket
import stat
import sys
import threading
import weakref
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist

from mtrain.devices.base import Device
from mtrain.world.rank_env import RankEnv

WATCH = "watch"
"""The part of the world's store in which watchdogs meet."""
FAILED = "failed"
"""The key by which a rank tells the watchdogs of the others that the world is over."""
MEGATRON = "megatron.core"
# macOS has the second.
DESCRIPTORS = ("/proc/self/fd", "/dev/fd")


class PeerFailedError(RuntimeError):
    """Another rank has failed, and this one waits for it in vain."""


_over = threading.Event()
_store: dist.Store | None = None
_tracked: list[weakref.ref[Any]] = []


def track(objects: Iterable[Any]) -> None:
    """Note objects that must not outlive the world, such as parameters."""
    _tracked.extend(map(weakref.ref, objects))


def require_peers() -> None:
    """Raise PeerFailedError if this rank knows that the world is over."""
    if _over.is_set():
        raise PeerFailedError("another rank has failed")


def enter(store: dist.Store) -> None:
    """Note the store of the world that this rank has joined."""
    global _store
    _store = store


def abandon(*, first: bool = True) -> None:
    """End the collectives of this rank and of its peers; a second call changes nothing.

    `first`: this rank tells the watchdogs of the others, on the connection of its main thread.
    """
    if _over.is_set():
        return
    _over.set()
    if first and _store is not None:
        with suppress(RuntimeError):  # the process that serves the store is gone
            dist.PrefixStore(WATCH, _store).set(FAILED, "1")
    if not dist.is_initialized():
        return
    if dist.get_backend() == dist.Backend.GLOO:
        _shut_connections()
    else:
        dist.distributed_c10d._abort_process_group()


def _shut_connections() -> None:
    """Shut down the connections between ranks of this machine, without that of the store."""
    folder = next(filter(os.path.isdir, DESCRIPTORS))
    for name in os.listdir(folder):
        with suppress(OSError):
            if not stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                continue
            with socket.socket(fileno=os.dup(int(name))) as end:
                if end.type == socket.SOCK_STREAM and _joins_ranks(end):
                    end.shutdown(socket.SHUT_RDWR)


def _joins_ranks(end: socket.socket) -> bool:
    """Return whether a connection is one of gloo: both ends have the same address."""
    if end.family not in (socket.AF_INET, socket.AF_INET6):
        return False
    here = end.getsockname()
    there = end.getpeername()
    return here[0] == there[0] and RankEnv.here().port not in (here[1], there[1])


def release(device: Device) -> int:
    """Release the groups, the state of megatron-core and all that nothing refers to any more;
    return how many of the tracked objects something still refers to.
    """
    global _store
    _take_apart()
    gc.collect()  # collectives under way belong to tensors of the step
    if dist.is_initialized():
        dist.destroy_process_group()
    _reset_megatron()
    gc.collect()
    device.namespace.empty_cache()
    # The allocator of the C library keeps freed memory, and the next model would add to it.
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # of glibc
    if trim is not None:
        trim(0)
    alive = sum(ref() is not None for ref in _tracked)
    _tracked.clear()
    _store = None
    _over.clear()
    return alive


def _take_apart() -> None:
    """Empty the tracked modules.

    Layers of experts keep tensors of a step. The collector cannot follow the graph of these to the
    hooks of gradients, which refer to the model again.
    """
    for chunk in [thing for ref in _tracked if isinstance(thing := ref(), torch.nn.Module)]:
        for module in list(chunk.modules()):
            vars(module).clear()


def _reset_megatron() -> None:
    """Reset the state that megatron-core keeps in its modules."""
    from mtrain.mcore import api as mcore

    state = mcore.parallel_state
    state.destroy_model_parallel()
    # It leaves some groups, which would keep their connections.
    for name, value in vars(state).items():
        if not name.startswith("_") or name.startswith("__"):
            continue
        if isinstance(value, dict):
            value.clear()
        elif isinstance(value, dist.ProcessGroup | list):
            setattr(state, name, None)
    for module in [m for name, m in sys.modules.items() if name.startswith(MEGATRON)]:
        _clear(vars(module))
        for thing in [t for t in vars(module).values() if isinstance(t, type)]:
            _clear(vars(thing))


def _clear(names: Mapping[str, Any]) -> None:
    """Clear the caches of functions, which keep modules with their groups, and the losses that are
    only logged, which keep groups.
    """
    for name, value in names.items():
        if isinstance(value, dict) and name.lower().endswith("tracker"):
            value.clear()
        elif isinstance(value, functools._lru_cache_wrapper):
            value.cache_clear()
