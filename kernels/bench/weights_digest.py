"""Compares the digest of the numbers that weights begin with, made on this device, with the
recorded one.
"""

from __future__ import annotations

import sys

import torch


def main() -> int:
    """Print both digests; returns 1 where they differ."""
    from mtrain.assembly import philox

    device = "cuda" if torch.cuda.is_available() else "cpu"
    found = philox.digest(device)
    print(f"{device}: {found}, recorded {philox.DIGEST}")
    return 0 if found == philox.DIGEST else 1


if __name__ == "__main__":
    sys.exit(main())
