"""The process that writes checkpoints in the background, where two ranks are a group."""

from __future__ import annotations

import sys

from mtrain.ckpt import index
from mtrain.ckpt.saving import process, writer

MOST_WHOLE = 2
GROUP = 2


def use() -> None:
    """Let this process, and writers that it starts, write files of groups."""
    index.MOST_WHOLE = MOST_WHOLE
    index.GROUP = GROUP
    process.MODULE = __name__


if __name__ == "__main__":
    use()
    writer.main(sys.argv[1:])
