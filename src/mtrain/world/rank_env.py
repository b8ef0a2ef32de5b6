"""The rank of this process, from the environment variables that torchrun and the local launcher
set.

`launchers` translates the variables of other launchers.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from mtrain.errors import BadEnvironment, MtrainError

# The variable with the launcher, such as `slurm`, whose variables were translated
LAUNCHER = "MTRAIN_LAUNCHER"
# The variable with the descriptor of the socket on which rank 0 serves the rendezvous
LISTEN_FD = "MTRAIN_LISTEN_FD"

# Ends the process from any thread; the flag says whether this rank reports the reason
End = Callable[[MtrainError, bool], None]


@dataclass(frozen=True)
class RankEnv:
    """A rank's number, and the address of the store."""

    rank: int
    size: int
    local_rank: int
    host: str | None
    """The host that serves the store; None: one process, or torch.distributed is ready."""
    port: int
    launcher_serves: bool
    """True if the launcher serves the store; otherwise rank 0 does."""
    listen_fd: int | None
    local_size: int = 1
    """Ranks on this machine."""
    launcher: str = ""
    """The launcher with translated variables; empty for torchrun and its equals."""

    @classmethod
    def here(cls, environment: Mapping[str, str] = os.environ) -> RankEnv:
        """Return the rank of this process; a process without a launcher is rank 0 of 1.

        Raises:
            BadEnvironment: a variable is not a number, or RANK is not below WORLD_SIZE.
        """
        rank = number(environment, "RANK", 0)
        size = number(environment, "WORLD_SIZE", 1)
        if rank >= size:
            raise BadEnvironment(
                f"RANK is {rank} and WORLD_SIZE is {size}: ranks are numbered from 0 to {size - 1}"
            )
        host = environment.get("MASTER_ADDR", "127.0.0.1")
        # Only rank 0 serves the store, whichever process inherits the variable.
        inherits = rank == 0 and LISTEN_FD in environment
        # torchrun's agent sets this where it serves the store that its workers use.
        agent = environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        return cls(
            rank=rank,
            size=size,
            local_rank=number(environment, "LOCAL_RANK", 0),
            host=host if "MASTER_PORT" in environment else None,
            port=number(environment, "MASTER_PORT", 0),
            launcher_serves=agent,
            listen_fd=number(environment, LISTEN_FD, 0) if inherits else None,
            local_size=number(environment, "LOCAL_WORLD_SIZE", 1),
            launcher=environment.get(LAUNCHER, ""),
        )

    def device_index(self, visible: int | None) -> int:
        """Return the number of this rank's device among the `visible` ones; with None, ranks share
        one device.

        Schedulers may show each task only its own device, which then has number 0 in every task.

        Raises:
            BadEnvironment: this rank has no device.
        """
        if visible is None or self.local_rank < visible:
            return self.local_rank
        if visible == 1 and self.launcher:
            return 0
        raise BadEnvironment(
            f"rank {self.rank} is number {self.local_rank} on this machine and sees {visible} "
            f"device{'' if visible == 1 else 's'}",
            "  fix: start no more ranks on a machine than it has devices, or let"
            " CUDA_VISIBLE_DEVICES show more",
        )

    @property
    def machine(self) -> int | None:
        """Return the number of this machine; None: it has all ranks."""
        return None if self.local_size >= self.size else self.rank // self.local_size

    @property
    def serves(self) -> bool:
        """Return whether this process serves the store."""
        return self.rank == 0 and not self.launcher_serves

    @property
    def server(self) -> str:
        """Return the server of the store, for messages."""
        who = "the launcher's store" if self.launcher_serves else "rank 0"
        return f"{who} at {self.host}:{self.port}" if self.host else who

    @property
    def speaks(self) -> bool:
        """Return whether this rank prints messages that concern its whole machine."""
        return self.rank == 0 or self.local_rank == 0


def number(environment: Mapping[str, str], name: str, default: int | None = None) -> int:
    """Return a variable as a number; `default` where it is missing.

    Raises:
        BadEnvironment: it is not a number, or is missing and there is no default.
    """
    text = environment.get(name, "" if default is None else str(default))
    # int() would accept signs, blanks and underscores as well.
    if not text.isdecimal():
        raise BadEnvironment(f"{name} is {text!r} in the environment: launchers set a number")
    return int(text)
