"""Removal of Lazuli."""

from ..images import OPEN
from ..shell import wait
from ..table import expect


def removal(cluster):
    """The DaemonSet is deleted while a pod uses an image."""
    cluster.run("pod", f"{OPEN}/redis:lazy")
    refused = cluster.node.run("sh", "-c", "lazuli stop 2>&1 || true")
    expect("redis" in refused, f"the refusal does not name the image: {refused}")
    expect(cluster.service_is_active(), "the refused end ended the service")
    cluster.type("kubectl delete -f dist/kubernetes/daemonset.yaml")
    wait(60, "the pods of the DaemonSet to end", lambda: not cluster.kubectl("get", "pods", "--namespace=lazuli", "--output=name"))
    expect(cluster.exec("pod", "redis-server", "--version"), "the pod reads nothing any more")
    return "`lazuli stop` names the image that is in use; without the DaemonSet pods go on"


SCENARIOS = [(removal, "DaemonSet deleted under a pod")]
