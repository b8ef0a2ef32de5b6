"""Checkpoints in a real client and server of S3 on this machine: `python -m
tests.support.loopback_store MIB` prints, as JSON, what happened to one of that size.

It needs moto and s3fs, whose botocore is another than that of the tests; see `.moto-5.2` in the
Makefile.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

KEYS = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test"}


def main(mib: int) -> dict[str, Any]:
    """Upload a checkpoint of `mib` MiB, read it back, and try what has to fail."""
    import boto3
    from moto.server import ThreadedMotoServer

    from mtrain.ckpt.remote import transfer
    from mtrain.ckpt.remote.place import Place
    from mtrain.errors import MtrainError

    def refused(url: str) -> str:
        begun = time.monotonic()
        try:
            Place(url).claim({"id": "1", "run": "runs/a"})
        except MtrainError as error:
            return f"{type(error).__name__} after {time.monotonic() - begun:.1f} s: {error}"
        return ""

    server = ThreadedMotoServer(port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    os.environ |= {"AWS_ENDPOINT_URL": f"http://{host}:{port}", "AWS_DEFAULT_REGION": "us-east-1"}
    os.environ |= {"AWS_EC2_METADATA_DISABLED": "true"}
    found: dict[str, Any] = {"no credentials": refused("s3://bucket/run")}
    os.environ |= KEYS
    boto3.client("s3").create_bucket(Bucket="bucket")
    found["no bucket"] = refused("s3://missing/run")
    with tempfile.TemporaryDirectory() as scratch:
        saved = saved_at(Path(scratch), mib)
        place = Place("s3://bucket/run") / saved.name
        sent = transfer.upload(saved, place)
        found["sent"] = [sent.files, sent.nbytes, sent.seconds]
        found["sent again"] = transfer.upload(saved, place).files
        found["created twice"] = place.create("manifest.json", b"{}")
        begun = time.monotonic()
        nbytes = transfer.download(place, Path(scratch) / "out")
        found["fetched"] = [nbytes, time.monotonic() - begun]
        found["damage"] = transfer.verified(place).damage
        place.remove([transfer.MANIFEST])
        found["newest without manifest"] = Place("s3://bucket/run").newest() is not None
    server.stop()
    return found


def saved_at(root: Path, mib: int, step: int = 1) -> Path:
    """Return a checkpoint of random bytes in two files."""
    from mtrain.ckpt import folder, hashes

    draft = root / "draft"
    draft.mkdir()
    (draft / folder.RUN_FILE).write_text("{}\n")
    files = {}
    for rank in (0, 1):
        data = os.urandom(mib << 19)
        metadata = hashes.metadata_of({"a": hashes.hash_blocks(data)})
        entry = {"dtype": "U8", "shape": [len(data)], "data_offsets": [0, len(data)]}
        header = json.dumps({"__metadata__": metadata, "a": entry}).encode()
        file = draft / folder.shard_name(rank)
        length = len(header).to_bytes(hashes.LENGTH_BYTES, "little")
        file.write_bytes(length + header + data)
        files[file.name] = hashes.wrote(file)
    body: dict[str, Any] = {"step": step, "ranks": 2, "state": {}, "tensors": {}, "files": files}
    folder.commit(draft, root / folder.folder_name(step), body)
    return root / folder.folder_name(step)


if __name__ == "__main__":
    print(json.dumps(main(int(sys.argv[1]))))
