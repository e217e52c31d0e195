"""Reports of the DaemonSet's pods to the API server, and their permissions."""

import json
import time

from ..shell import wait
from ..table import expect
from .observing import observed, registry_away
from .pods import configure

POD = "kubectl -n lazuli get pods --output=jsonpath={.items[0].metadata.name}"


def lazy_pulls(cluster):
    """The condition LazyPulls, as the API server has it."""
    conditions = cluster.get("node", "node1")["status"]["conditions"]
    return next((it for it in conditions if it["type"] == "LazyPulls"), {"status": "", "reason": ""})


def node_condition(cluster):
    """It follows what containerd has read."""
    wait(60, "the condition", lambda: lazy_pulls(cluster)["status"] == "True")
    kubelet = cluster.condition("Ready")
    file = "/etc/containerd/conf.d/lazuli_setup.toml"
    started = time.monotonic()
    cluster.node.sh(f"mv {file} /root/")
    try:
        cluster.restart_containerd()
        lacking = wait(60, "the condition to be False", lambda: lazy_pulls(cluster)["status"] == "False" and lazy_pulls(cluster))
        seconds = time.monotonic() - started
        expect(lacking["reason"] == "PluginLacking", f"it says {lacking}")
    finally:
        cluster.node.sh(f"mv /root/lazuli_setup.toml {file}")
        cluster.restart_containerd()
    wait(60, "the condition to be True again", lambda: lazy_pulls(cluster)["status"] == "True")
    expect(kubelet == cluster.condition("Ready") == "True", "the kubelet's own condition was changed")
    return f"`LazyPulls` is `False` {seconds:.0f} s after containerd was started without the plugin, with `PluginLacking`, and `True` again"


def events(cluster):
    """A read that fails is an event of its pod; an outage, and FUSE, are events of the node."""
    wait(60, "the condition", lambda: lazy_pulls(cluster)["status"] == "True")
    image = cluster.images.variant("busybox", "reported", 8 << 20)
    with observed(cluster):
        cluster.run("reader", image)
        cluster.exec("reader", "/bin/busybox", "true")
        # A look of the reporter at the worker that serves now.
        time.sleep(20)
        with registry_away(cluster):
            cluster.exec("reader", "sh", "-c", "cat /ballast > /dev/null 2>&1 || true")
            wait(60, "an event of the pod", lambda: said(cluster, "Pod", "reader", "ReadFailed"))
            wait(60, "an event of the node", lambda: said(cluster, "Node", "node1", "RegistryUnavailable"))
    message = said(cluster, "Pod", "reader", "ReadFailed")[0]["message"]
    expect("file /ballast" in message and image in message, f"the pod's event says {message}")
    described = cluster.kubectl("describe", "pod", "reader")
    expect("ReadFailed" in described, f"kubectl describe does not show it: {described[-600:]}")
    described = cluster.kubectl("describe", "node", "node1")
    expect("RegistryUnavailable" in described, f"kubectl describe does not show the node's: {described[-600:]}")
    return "`kubectl describe` shows `ReadFailed` for the pod, with its file and image, and `RegistryUnavailable` for the node"


def said(cluster, kind, name, reason):
    """Events of ours."""
    fields = f"involvedObject.kind={kind},involvedObject.name={name},reason={reason}"
    return [it for it in cluster.get("events", f"--field-selector={fields}")["items"] if it["source"].get("component") == "lazuli"]


def its_rights(cluster):
    """What the pod's token may not do."""
    cluster.apply({"apiVersion": "v1", "kind": "Node", "metadata": {"name": "node2"}, "spec": {"unschedulable": True}})
    try:
        pod = cluster.node.sh(POD)
        token = cluster.kubectl("-n", "lazuli", "create", "token", "lazuli", "--bound-object-kind=Pod", f"--bound-object-name={pod}")
        unbound = cluster.kubectl("-n", "lazuli", "create", "token", "lazuli")
        taint = [{"op": "add", "path": "/spec/taints", "value": [{"key": "lazuli/not-ready", "effect": "NoSchedule"}]}]
        mine = {"type": "LazyPulls", "status": "True", "reason": "Ready", "message": ""}
        status = {"status": {"conditions": [mine]}}
        allowed = [(token, "nodes/node1/status", status)]
        refused = [
            (unbound, "nodes/node1/status", status),
            (token, "nodes/node2/status", status),
            (token, "nodes/node2", [{"op": "add", "path": "/spec/taints", "value": []}]),
            (token, "nodes/node1/status", {"status": {"conditions": [mine | {"type": "Ready", "status": "False"}]}}),
            (token, "nodes/node1/status", {"status": {"capacity": {"example.com/thing": "1"}}}),
            (token, "nodes/node1", taint),
            (token, "nodes/node1", [{"op": "add", "path": "/spec/unschedulable", "value": True}]),
            (token, "nodes/node1", [{"op": "add", "path": "/metadata/labels/role", "value": "x"}]),
            (token, "nodes/node1", [{"op": "add", "path": "/metadata/annotations/role", "value": "x"}]),
            (token, "namespaces/lazuli/configmaps/lazuli", {"data": {}}),
        ]
        for tried in allowed:
            status, said = patch(cluster, *tried)
            expect(status == 200, f"{tried[1:]} is refused: {said}")
        for tried in refused:
            expect_denied(tried[1:], *patch(cluster, *tried))
        expect_denied("secrets", *request(cluster, token, "namespaces/lazuli/secrets"))
    finally:
        cluster.kubectl("delete", "node", "node2")
    return f"its own condition is written; {len(refused)} other changes, of this node and of another one, are refused, and so are secrets"


def expect_denied(tried, status, said):
    """By its role, or by the admission policy: not because the request makes no sense."""
    expect(status in (403, 422) and ("cannot " in said or "ValidatingAdmissionPolicy" in said), f"{tried} gets {status}: {said}")


def patch(cluster, token, path, body):
    """The status of a patch with a token, and the message."""
    kind = "json-patch" if isinstance(body, list) else "strategic-merge-patch"
    return request(cluster, token, path, "-X", "PATCH", "-H", f"Content-Type: application/{kind}+json", "-d", json.dumps(body))


def request(cluster, token, path, *options):
    """The status of a request with a token, and the message."""
    answer = cluster.node.run("curl", "-s", "-w", "\n%{http_code}", "--cacert", "/etc/kubernetes/ca.crt",
                              "-H", f"Authorization: Bearer {token}", *options, f"https://10.96.0.1/api/v1/{path}")
    body, _, status = answer.rpartition("\n")
    return int(status), json.loads(body).get("message", "")


def fuse_fallback(cluster):
    """The node serves by FUSE."""
    configure(cluster, "[snapshotter]", '[snapshotter]\ndriver = "fuse"')
    try:
        cluster.run("pod", cluster.images.variant("busybox", "fallback", 1 << 20))
        event = wait(60, "an event", lambda: said(cluster, "Node", "node1", "FuseFallback"))[0]
    finally:
        configure(cluster, '[snapshotter]\ndriver = "fuse"', "[snapshotter]")
    return f"`FuseFallback` for the node: {event['message']}"


SCENARIOS = [
    (node_condition, "the node's condition"),
    (events, "events while the registry is away"),
    (fuse_fallback, "event of a fallback to FUSE"),
    (its_rights, "what the DaemonSet's pod may do"),
]
