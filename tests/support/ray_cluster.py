"""A Ray cluster of two machines in processes of this one: `python -m tests.support.ray_cluster
FOLDER` runs `ray_job.py` of a folder there, and exits with its exit code.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

MEMORY = 200 << 20
"""The smallest object store that works; no object of a job is larger than its configuration."""


def main(folder: Path) -> int:
    """Start the cluster, run the job's program in it, and return the program's exit code."""
    from ray.cluster_utils import Cluster

    machine = {"num_cpus": 1, "object_store_memory": MEMORY, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=machine)
    try:
        cluster.add_node(num_cpus=1, object_store_memory=MEMORY)
        values = {**os.environ, "RAY_ADDRESS": cluster.address}
        program = [sys.executable, str(folder / "ray_job.py")]
        return subprocess.run(program, cwd=folder, env=values, check=False).returncode
    finally:
        cluster.shutdown()


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
