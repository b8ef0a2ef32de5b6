"""Checkpoints in an emulator of Google Cloud Storage on this machine: `python -m
tests.support.loopback_gcs MIB` prints, as JSON, what happened to one of that size.

It needs gcp-storage-emulator and gcsfs; see `.gcs-2026.7` in the Makefile. The emulator ignores the
condition by which gcsfs creates an object only if there is none, so that is not tried.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.support.launched import free_port
from tests.support.loopback_store import saved_at


def main(mib: int) -> dict[str, Any]:
    """Upload a checkpoint of `mib` MiB, and read it where it is."""
    from gcp_storage_emulator.server import create_server

    from mtrain.ckpt import folder
    from mtrain.ckpt.remote import transfer
    from mtrain.ckpt.remote.place import Place
    from mtrain.errors import CorruptData
    from mtrain.launching.verdict.damage import damage

    port = free_port()
    os.environ["STORAGE_EMULATOR_HOST"] = f"http://127.0.0.1:{port}"
    # No search for a machine of the cloud, nor for a kind of bucket that the emulator lacks.
    os.environ |= {"NO_GCE_CHECK": "true", "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false"}
    server = create_server("127.0.0.1", port, in_memory=True, default_bucket="bucket")
    server.start()
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as scratch:
        saved = saved_at(Path(scratch), mib)
        place = Place("gs://bucket/run") / saved.name
        sent = transfer.upload(saved, place)
        found["sent"] = [sent.files, sent.nbytes]
        found["sent again"] = transfer.upload(saved, place).files
        found["damage"] = transfer.verified(place).damage
        found["steps"] = [one.step for one in Place("gs://bucket/run").committed()]
        standing = Path(scratch) / "standing/step_00000001"
        standing.mkdir(parents=True)
        transfer.referred(place, standing)
        manifest = folder.read_manifest(standing, verify=True)
        found["standing"] = [damage(standing, manifest), len(list(standing.iterdir()))]
        name = folder.shard_name(1)
        data = bytearray(place.read(name))
        data[-9] ^= 1
        place.write(name, bytes(data))
        try:
            folder.read_manifest(standing, verify=True)
        except CorruptData as error:
            found["altered"] = str(error)
        place.remove([transfer.MANIFEST])
        found["newest without manifest"] = Place("gs://bucket/run").newest() is not None
    server.stop()
    return found


if __name__ == "__main__":
    print(json.dumps(main(int(sys.argv[1]))))
    # The emulator's threads, and the client's, would end later.
    sys.stdout.flush()
    os._exit(0)
