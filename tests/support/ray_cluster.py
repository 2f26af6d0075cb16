"""Two nodes of Ray on this machine, run as a script: it ends them when its input ends.

Its first line of output is {"raylets": process ids of the nodes}. A line of input is the path of a config file, which
is deployed, or the word "states". The answer has the number of replicas by deployment and state:
{"seqpar/Replica": {"RUNNING": 2}}.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import ray
from ray import serve
from ray.cluster_utils import Cluster

NODE = {"num_cpus": 4, "resources": {"node": 1}, "object_store_memory": 100 << 20}
# not 127.0.0.1, in whose place Ray takes the address by which other machines reach this one
FIRST = {"node_ip_address": "127.0.0.2", "include_dashboard": False}
SECOND = {"node_ip_address": "127.0.0.3"}


def states() -> dict[str, dict[str, int]]:
    return {
        f"{name}/{deployment}": {str(state): count for state, count in about.replica_states.items()}
        for name, application in serve.status().applications.items()
        for deployment, about in application.deployments.items()
    }


def deploy(address: str, path: str) -> None:
    """As an operator does."""
    words = ["serve", "run", "--non-blocking", "--address", address, "--app-dir", os.getcwd(), path]
    subprocess.run([sys.executable, "-m", "ray.serve.scripts", *words[1:]], check=True, stdout=sys.stderr)


def main() -> None:
    cluster: Any = Cluster(initialize_head=True, head_node_args={**NODE, **FIRST})
    try:
        second = cluster.add_node(**NODE, **SECOND)
        pids = [node.all_processes["raylet"][0].process.pid for node in (cluster.head_node, second)]
        ray.init(address=cluster.address, log_to_driver=False)
        print(json.dumps({"raylets": pids}), flush=True)
        for line in map(str.strip, sys.stdin):
            if line != "states":
                deploy(cluster.address, line)
            print(json.dumps(states()), flush=True)
    finally:
        ray.shutdown()
        cluster.shutdown()


if __name__ == "__main__":
    main()
