"""The Helm chart instead of the manifest."""

import shutil
from pathlib import Path

from ..docs import REPOSITORY
from ..images import NODE_IMAGE, OPEN
from ..shell import run, wait
from ..table import expect

CHART = "lazuli /test/dist/helm/lazuli --namespace lazuli"
METRICS = "http://10.123.0.1:9445/metrics"


def chart(cluster):
    """Installed, its values changed, and uninstalled."""
    shutil.copy(Path(run(REPOSITORY / "scripts/helm")), cluster.node.root / "usr/local/bin/helm")
    cluster.node.sh(f"helm install {CHART} --create-namespace --set image.repository={NODE_IMAGE} --set-string image.tag=1 --set pods=all --set restartContainerd=true")
    wait(180, "the DaemonSet to be Ready", cluster.daemonset_is_ready)
    cluster.run("pod", f"{OPEN}/redis:lazy")
    expect(cluster.mount_of(f"{OPEN}/redis"), "the image is not mounted lazily")
    expect(cluster.condition("LazyPulls") == "True", "the node's condition is not written")
    cluster.node.sh(f"helm upgrade {CHART} --reuse-values --set metrics.listen=10.123.0.1:9445")
    wait(180, "the metrics that a value asks for", lambda: "lazuli_" in cluster.node.run("curl", "--silent", "--fail", METRICS))
    wait(180, "the DaemonSet to be Ready", cluster.daemonset_is_ready)
    cluster.node.sh("helm uninstall lazuli --namespace lazuli --wait")
    expect(cluster.exec("pod", "redis-server", "--version"), "the pod reads nothing any more")
    return "installed, a lazy pod runs; a changed value reaches the node; uninstalled, the pod goes on"


SCENARIOS = [(chart, "the Helm chart: installed, upgraded, uninstalled")]
