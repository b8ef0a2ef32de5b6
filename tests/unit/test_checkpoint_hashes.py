"""The hashes of a checkpoint's blocks: both algorithms find damage, and neither is taken for the
sha256 of a tensor that it is not.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest

from mtrain.ckpt import hashes
from mtrain.ckpt.new_file import Writer
from mtrain.errors import CorruptData

ALGORITHMS = pytest.mark.parametrize("name", sorted(hashes.ALGORITHMS))
SIZES = {"small": 12, "a_block": hashes.BLOCK_BYTES, "more": 2 * hashes.BLOCK_BYTES, "empty": 0}


def written(path: Path, algorithm: hashes.Algorithm) -> dict[str, bytes]:
    """Write a shard with an entry of each size; return their bytes."""
    dice = np.random.default_rng(0)
    held = {name: dice.bytes(size) for name, size in SIZES.items()}
    hashed = {name: hashes.hash_blocks(data, algorithm) for name, data in held.items()}
    metadata = hashes.metadata_of(hashed, algorithm=algorithm)
    with Writer(path, held, len(json.dumps(metadata))) as writer:
        for name, data in held.items():
            writer.write(name, "U8", [len(data)], memoryview(data))
        writer.close(metadata)
    return held


@ALGORITHMS
def test_hashes_every_flipped_byte_is_found(name: str, tmp_path: Path) -> None:
    algorithm = hashes.ALGORITHMS[name]
    path = tmp_path / "shard.safetensors"
    held = written(path, algorithm)
    facts = hashes.wrote(path)
    content = path.read_bytes()
    at = {entry: one.at for entry, one in hashes.Shard(path).header.entries.items()}
    for entry, data in held.items():
        for place in {0, len(data) // 2, len(data) - 1} if data else ():
            damaged = bytearray(content)
            damaged[at[entry] + place] ^= 1
            path.write_bytes(damaged)
            hashes._sound.clear()
            shard = hashes.checked(path, facts)  # the header is as it was
            with pytest.raises(CorruptData, match=f"the {algorithm.name} of {entry} differs"):
                shard.check()
    # also one of the hashes in the header
    place = content.index(hashes.hash_blocks(held["more"], algorithm).encode())
    path.write_bytes(content[:place] + b"x" + content[place + 1 :])
    with pytest.raises(CorruptData, match=f"{path.name}.* the sha256 of its header differs"):
        hashes.checked(path, facts)


@ALGORITHMS
def test_hashes_identity_of_tensor_is_sha256_or_unknown(name: str, tmp_path: Path) -> None:
    path = tmp_path / "shard.safetensors"
    held = written(path, hashes.ALGORITHMS[name])
    entries = hashes.Shard(path).header.entries
    # two hashes of xxh3 are as long as one of sha256
    assert len(entries["more"].hashes) in (64, 128)
    known = {entry: one.sha256 for entry, one in entries.items() if one.sha256}
    expected = {"small", "a_block", "empty"} if name == "sha256" else set()
    assert known == {entry: hashlib.sha256(held[entry]).hexdigest() for entry in expected}


def test_hashes_of_another_length_are_refused(tmp_path: Path) -> None:
    data = bytes(12)
    metadata = hashes.metadata_of({"a": hashes.hash_blocks(data, hashes.SHA256)})
    path = tmp_path / "shard.safetensors"
    with Writer(path, ["a"], len(json.dumps(metadata))) as writer:
        writer.write("a", "U8", [12], memoryview(data))
        writer.close(metadata)
    with pytest.raises(CorruptData, match="its header does not describe a"):
        hashes.Shard(path)
