"""Runs that upload to a real server of S3 on this machine: `python -m tests.support.loopback_runs`
prints, as JSON, what happened. It needs what `loopback_store` needs.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from tests.support.commands import ROOT, SMALL
from tests.support.loopback_store import saved_at

PACKAGES = ROOT / ".moto-5.2"
SECRET = "canary-of-the-store"
RUN = (*SMALL, "parallel=single", "checkpoint.save_interval=2", "log.name=run")
KILLS = 13
"""Points before and after each request that writes or deletes, and one that is not reached."""
URL = "s3://bucket/killed"


def main() -> dict[str, Any]:
    """Train, lose the machine, continue, and break what can break on the way."""
    import boto3
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    os.environ |= {"AWS_ENDPOINT_URL": f"http://{host}:{port}", "AWS_DEFAULT_REGION": "us-east-1"}
    os.environ |= {"AWS_EC2_METADATA_DISABLED": "true"}
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as scratch:
        os.chdir(scratch)
        _without(PACKAGES, "antlr4")
        found["no credentials"] = trained(6, "checkpoint.remote=s3://bucket/run")
        os.environ |= {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": SECRET}
        client = boto3.client("s3")
        client.create_bucket(Bucket="bucket")
        found["no bucket"] = trained(6, "checkpoint.remote=s3://missing/run")
        found["first"] = trained(6, "checkpoint.remote=s3://bucket/run")
        found["secrets"] = [str(path) for path in Path("runs").rglob("*") if _has_secret(path)]
        shutil.rmtree("runs")
        again = ("checkpoint.remote=s3://bucket/run", "checkpoint.resume=latest")
        found["again"] = trained(8, "checkpoint.accept_changes=true", *again)
        found["verdict"] = looked("checkpoint", "verdict", "s3://bucket/run", "--json")
        found["evaluate"] = looked("evaluate", "s3://bucket/run")
        found["there"] = sorted({name.split("/")[1] for name in _keys(client, "run/step_")})
        shutil.rmtree("runs")
        key = next(name for name in _keys(client, "run/step_00000008") if "rank_" in name)
        data = bytearray(client.get_object(Bucket="bucket", Key=key)["Body"].read())
        data[-9] ^= 1
        client.put_object(Bucket="bucket", Key=key, Body=bytes(data))
        found["altered"] = trained(8, *again)
        found["killed"] = [killed(number) for number in range(KILLS)]
    server.stop()
    return found


def _without(packages: Path, name: str) -> None:
    """Hide a package, whose version Hydra cannot use, from processes that are started later."""
    Path("packages").mkdir()
    for path in packages.iterdir():
        if not path.name.startswith(name):
            Path("packages", path.name).symlink_to(path)
    here = str(Path("packages").absolute())
    paths = os.environ["PYTHONPATH"].split(os.pathsep)
    os.environ["PYTHONPATH"] = os.pathsep.join([here, *(p for p in paths if p != str(packages))])


def trained(steps: int, *words: str) -> list[Any]:
    """Return the exit code of a run, and what it printed."""
    done = subprocess.run(
        [sys.executable, "-m", "mtrain", *RUN, f"trainer.train_iters={steps}", *words],
        capture_output=True,
        text=True,
        timeout=200,
    )
    return [done.returncode, done.stdout + done.stderr]


def looked(*words: str) -> list[Any]:
    """Return the exit code of a command, its output, and the seconds that it took."""
    begun = time.monotonic()
    command = [sys.executable, "-m", "mtrain", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    return [done.returncode, done.stdout or done.stderr, time.monotonic() - begun]


def killed(number: int) -> list[Any]:
    """Kill an uploader before or after a request that writes; return how it ended, the steps that
    are complete then, and those after another one has gone on, with damage.
    """
    from mtrain.ckpt.remote import transfer
    from mtrain.ckpt.remote.place import Place
    from mtrain.ckpt.remote.uploader import Uploader
    from mtrain.ckpt.retention import Policy

    place = Place(f"{URL}-{number}")
    place.claim({"id": "1", "run": "a"})
    home = Path(f"killed-{number}")
    for step in (1, 2):
        (home / "checkpoints").mkdir(parents=True, exist_ok=True)
        saved = saved_at(home, 1, step)
        saved.rename(home / "checkpoints" / saved.name)
        if step == 1:
            Uploader(home, place.url, "1", Policy(1), begun=1).run()
    command = [sys.executable, "-m", "tests.support.loopback_runs", place.url, str(home)]
    code = subprocess.run([*command, str(number)], timeout=60, capture_output=True).returncode
    steps = [one.step for one in place.committed()]
    whole = not any(transfer.verified(place / f"step_{step:08d}").damage for step in steps)
    Uploader(home, place.url, "1", Policy(1), begun=1).run()
    after = [one.step for one in place.checkpoints()]
    damage = transfer.verified(place / "step_00000002").damage
    return [code, steps, whole, after, list(damage)]


def until_killed(url: str, home: str, number: int) -> None:
    """Upload, and end by SIGKILL before or after a request, by its number."""
    from mtrain.ckpt.remote import transfer
    from mtrain.ckpt.remote.place import Place
    from mtrain.ckpt.remote.uploader import Uploader
    from mtrain.ckpt.retention import Policy

    transfer.AT_ONCE = 1
    at = 0

    def reach() -> None:
        nonlocal at
        if at == number:
            os.kill(os.getpid(), signal.SIGKILL)
        at += 1

    def counted(name: str) -> None:
        whole = getattr(Place, name)

        def call(self: Place, *words: Any) -> Any:
            reach()
            answer = whole(self, *words)
            reach()
            return answer

        setattr(Place, name, call)

    for name in ("send", "create", "remove"):
        counted(name)
    Uploader(Path(home), url, "1", Policy(1), begun=1).run()


def _keys(client: Any, prefix: str) -> list[str]:
    listed = client.list_objects_v2(Bucket="bucket", Prefix=prefix)
    return [one["Key"] for one in listed.get("Contents", [])]


def _has_secret(path: Path) -> bool:
    return path.is_file() and SECRET.encode() in path.read_bytes()


if __name__ == "__main__":
    if len(sys.argv) > 1:
        until_killed(sys.argv[1], sys.argv[2], int(sys.argv[3]))
    else:
        print(json.dumps(main()))
