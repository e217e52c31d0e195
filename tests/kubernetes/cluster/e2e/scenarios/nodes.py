"""A second node joins, is drained, and dies."""

import os
import signal

from ..images import OPEN
from ..node import Node
from ..shell import wait
from ..table import expect

SECOND = "node2"
REPLICAS = 6


def second_node(cluster):
    """Pods on both nodes; the DaemonSet is replaced under them; one node is drained, then killed."""
    with Node(cluster.corpus, SECOND, "10.123.0.2", cluster.node) as node:
        try:
            wait(120, "the DaemonSet to be Ready on both nodes", lambda: pods_ready(cluster) == 2)
            expect("taints" not in cluster.get("node", SECOND)["spec"], "the second node still has a taint")
            deploy(cluster)
            spread = placed(cluster)
            expect(len(spread) == 2, f"pods are on {spread}")
            mounts = [mount["image"] for mount in node.status()["mounts"]]
            expect(any(image.startswith(f"{OPEN}/redis") for image in mounts), f"the second node serves {mounts}")
            keepers = [it.status()["daemon"]["keeper_pid"] for it in (cluster.node, node)]
            cluster.type("kubectl -n lazuli rollout restart daemonset lazuli")
            wait(180, "the DaemonSet to be Ready", lambda: cluster.daemonset_is_ready() and pods_ready(cluster) == 2)
            expect(keepers == [it.status()["daemon"]["keeper_pid"] for it in (cluster.node, node)], "a roll-out replaced a service")
            cluster.kubectl("drain", SECOND, "--ignore-daemonsets", "--delete-emptydir-data", "--force")
            cluster.rolled_out("spread")
            drained = placed(cluster)
            expect(set(drained) == {cluster.node.name}, f"after a drain pods are on {drained}")
            cluster.kubectl("uncordon", SECOND)
            cluster.kubectl("rollout", "restart", "deployment", "spread")
            cluster.rolled_out("spread")
            expect(len(placed(cluster)) == 2, f"after its return pods are on {placed(cluster)}")
            os.kill(node.pid, signal.SIGKILL)
            wait(120, "pods of the dead node to run elsewhere", lambda: placed(cluster) == {cluster.node.name: REPLICAS}, step=2)
        finally:
            cluster.kubectl("delete", "node", SECOND, "--ignore-not-found")
    wait(60, "the DaemonSet to be Ready on one node", lambda: pods_ready(cluster) == 1)
    return (f"Ready by itself; {REPLICAS} lazy pods on both, a roll-out of the DaemonSet leaves both services; drained, its pods start on the other "
            "node; it returns; killed, its pods start on the other node")


def deploy(cluster):
    """Lazy pods, spread over the nodes, which leave a dead one at once."""
    labels = {"app": "spread"}
    gone = [{"key": f"node.kubernetes.io/{key}", "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 0} for key in ("not-ready", "unreachable")]
    spread = {"maxSkew": 1, "topologyKey": "kubernetes.io/hostname", "whenUnsatisfiable": "ScheduleAnyway", "labelSelector": {"matchLabels": labels}}
    container = {"name": "main", "image": f"{OPEN}/redis:lazy", "command": ["sh", "-c", "redis-server --version && sleep infinity"]}
    template = {"metadata": {"labels": labels},
                "spec": {"terminationGracePeriodSeconds": 0, "automountServiceAccountToken": False, "containers": [container],
                         "tolerations": gone, "topologySpreadConstraints": [spread]}}
    cluster.apply({"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": "spread"},
                   "spec": {"replicas": REPLICAS, "selector": {"matchLabels": labels}, "template": template}})
    cluster.rolled_out("spread")


def placed(cluster):
    """How many Ready pods of the deployment each node has."""
    nodes = {}
    for pod in cluster.get("pods", "--selector=app=spread")["items"]:
        ready = any(it["type"] == "Ready" and it["status"] == "True" for it in pod["status"].get("conditions", []))
        if ready and "deletionTimestamp" not in pod["metadata"]:
            nodes[pod["spec"]["nodeName"]] = nodes.get(pod["spec"]["nodeName"], 0) + 1
    return nodes


def pods_ready(cluster):
    """On how many nodes the DaemonSet's pod is Ready."""
    return cluster.get("daemonset", "lazuli", "--namespace=lazuli")["status"].get("numberReady", 0)


SCENARIOS = [(second_node, "a second node")]
