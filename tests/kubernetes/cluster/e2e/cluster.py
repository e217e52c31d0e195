"""The cluster: kubectl, pods, the kubelet's statistics, and Lazuli on the node."""

import contextlib
import json
import shutil
import time

from .docs import REPOSITORY, Docs
from .images import NODE_IMAGE, Images
from .node import Node
from .shell import PATIENCE, wait
from .table import Failed, expect

READY = 90


class Cluster:
    """`with` boots it and pushes its images."""

    def __init__(self, lazuli, testkit, corpus, minutes):
        self.lazuli, self.testkit, self.corpus, self.minutes = lazuli, testkit, corpus, minutes
        self.docs = Docs()

    def __enter__(self):
        with contextlib.ExitStack() as stack:
            started = time.monotonic()
            self.node = stack.enter_context(Node(self.corpus))
            print(f"▸ the node's system, up after {time.monotonic() - started:.0f} s", flush=True)
            shutil.copytree(REPOSITORY / "dist", self.node.root / "test/dist")
            self.images = Images(self.node, self.lazuli, self.testkit, self.corpus, self.node.scratch)
            wait(60, "the registries", lambda: self.node.sh("curl -s 127.0.0.1:5000/v2/ > /dev/null && echo yes"))
            self.images.push_all()
            print(f"▸ images, pushed after {time.monotonic() - started:.0f} s", flush=True)
            try:
                wait(120, "the node to be Ready", self.node_is_ready)
                wait(60, "the default service account", lambda: self.kubectl("get", "serviceaccount", "default"))
            except Failed:
                self.explain()
                raise
            print(f"▸ a cluster, Ready after {time.monotonic() - started:.0f} s", flush=True)
            self.stack = stack.pop_all()
        return self

    def __exit__(self, *_):
        return self.stack.__exit__(None, None, None)

    # kubectl

    def kubectl(self, *arguments, stdin=None, **options):
        """Runs kubectl and returns what it printed."""
        return self.node.run("kubectl", *arguments, input=stdin or "", **options)

    def type(self, line, **options):
        """Types a line of docs/kubernetes.md."""
        return self.node.sh(self.docs.line(line), **options)

    def get(self, *arguments):
        """An object."""
        return json.loads(self.kubectl("get", "--output=json", *arguments))

    def apply(self, *objects):
        """Applies objects."""
        self.kubectl("apply", "--filename=-", stdin=json.dumps({"apiVersion": "v1", "kind": "List", "items": list(objects)}))

    def node_is_ready(self):
        """Whether the API server says so."""
        conditions = self.get("node", "node1")["status"]["conditions"]
        return any(it["type"] == "Ready" and it["status"] == "True" for it in conditions)

    def condition(self, name):
        """The status of a condition of the node."""
        conditions = self.get("node", "node1")["status"]["conditions"]
        return next((it["status"] for it in conditions if it["type"] == name), None)

    def rolled_out(self, deployment, seconds=READY):
        """Waits until a deployment has its pods."""
        self.kubectl("rollout", "status", "deployment", deployment, f"--timeout={seconds * PATIENCE:.0f}s")

    # pods

    def start(self, name, image, command=("sleep", "infinity"), **spec):
        """Creates a pod with one container, and returns at once."""
        container = {"name": "main", "image": image, "command": list(command)} | spec.pop("container", {})
        if command is None:
            del container["command"]
        spec = {"containers": [container], "terminationGracePeriodSeconds": 0, "automountServiceAccountToken": False} | spec
        metadata = {"name": name, "annotations": spec.pop("annotations", {})}
        self.apply({"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec})

    def ready(self, name, seconds=READY):
        """Waits until a pod is Ready."""
        wait(seconds, f"pod {name} to be Ready: {self.events(name)}", lambda: self.is_ready(name))

    def is_ready(self, name):
        """Whether a pod is."""
        conditions = self.get("pod", name)["status"].get("conditions", [])
        return any(it["type"] == "Ready" and it["status"] == "True" for it in conditions)

    def run(self, name, image, **options):
        """Starts a pod, waits until it is Ready, and returns the seconds that it took."""
        started = time.monotonic()
        self.start(name, image, **options)
        self.ready(name)
        return time.monotonic() - started

    def exec(self, name, *command):
        """Runs a command in a pod."""
        return self.kubectl("exec", name, "--", *command)

    def delete(self, *names):
        """Deletes pods, and waits until they are gone."""
        self.kubectl("delete", "pod", "--grace-period=0", "--force", "--ignore-not-found", *names)
        for name in names:
            wait(60, f"pod {name} to be gone", lambda name=name: not self.kubectl("get", "pod", name, "--ignore-not-found"))

    def events(self, name):
        """What was said of a pod."""
        with contextlib.suppress(Exception):
            events = self.get("events", f"--field-selector=involvedObject.name={name}")["items"]
            return "; ".join(f"{it['reason']}: {it['message']}" for it in events if it["type"] != "Normal")[-800:]
        return ""

    def tidy(self):
        """Deletes what a scenario left."""
        self.kubectl("delete", "pods,deployments,daemonsets,secrets,jobs", "--all", "--grace-period=0", "--force", f"--timeout={60 * PATIENCE:.0f}s")
        wait(60, "pods to be gone", lambda: not self.kubectl("get", "pods", "--output=name"))

    # the node

    def summary(self):
        """The kubelet's statistics of the node, or the failure to get them."""
        return json.loads(self.kubectl("get", "--raw", "/api/v1/nodes/node1/proxy/stats/summary"))

    def status(self):
        """What Lazuli serves."""
        return self.node.status()

    def mount_of(self, image):
        """The mount of an image, if it is mounted."""
        return next((mount for mount in self.status()["mounts"] if mount["image"].startswith(image)), None)

    def service_is_active(self):
        """Whether systemd says so."""
        return self.node.sh("systemctl is-active lazuli || true") == "active"

    def restart_runtime(self):
        """Restarts containerd."""
        self.node.run("systemctl", "restart", "containerd")
        wait(60, "containerd", lambda: self.node.run("ctr", "version"))

    def restart_containerd(self):
        """Restarts it, and waits until the kubelet finds it again."""
        self.restart_runtime()
        wait(60, "the node to be Ready", self.node_is_ready)

    def remove_image(self, name):
        """Removes the images whose names begin so from containerd, by all names that they have:
        CRI also gives one after the image's configuration."""
        images = [line.split() for line in self.node.run("ctr", "-n", "k8s.io", "images", "ls").splitlines()[1:]]
        digests = {image[2] for image in images if image[0].startswith(name)}
        names = [image[0] for image in images if image[2] in digests]
        if names:
            self.node.run("ctr", "-n", "k8s.io", "images", "rm", "--sync", *names)

    def explain(self):
        """Prints what helps to understand a failure."""
        for script in ("kubectl get pods --all-namespaces --output=wide",
                       "kubectl get events --all-namespaces --field-selector=type!=Normal | tail -n 15",
                       "kubectl -n lazuli logs daemonset/lazuli --tail=20",
                       "journalctl -u lazuli --no-pager -o cat | tail -n 15",
                       "journalctl -u etcd -u kube-apiserver -u kubelet --no-pager -o cat | grep -E '^[EF][0-9]|^(etcd|kube)' | tail -n 20",
                       "journalctl -u containerd --no-pager -o cat | grep -E 'level=(error|warn)' | tail -n 8"):
            with contextlib.suppress(Exception):
                print("    $ " + script + "\n" + "\n".join("    " + line[:400] for line in self.node.sh(script + " 2>&1").splitlines()))

    # the DaemonSet

    def manifest(self, tag="1", **environment):
        """The DaemonSet of the repository, with our image and values in its container's
        environment."""
        text = (REPOSITORY / "dist/kubernetes/daemonset.yaml").read_text()
        expect("registry.example/lazuli-node:0.1.0" in text, "daemonset.yaml names another image")
        text = text.replace("registry.example/lazuli-node:0.1.0", f"{NODE_IMAGE}:{tag}")
        for name, value in environment.items():
            line = f"            - name: {name}\n              value: "
            before, found, after = text.partition(line)
            expect(found, f"daemonset.yaml does not have the variable {name}")
            text = before + line + json.dumps(value) + "\n" + after.partition("\n")[2]
        (self.node.root / "test/dist/kubernetes/daemonset.yaml").write_text(text)

    def daemonset_is_ready(self):
        """Whether all of its pods are, and are of the newest version."""
        daemonset = self.get("daemonset", "lazuli", "--namespace=lazuli")
        status = daemonset["status"]
        wanted = status["desiredNumberScheduled"]
        return (wanted and status.get("numberReady", 0) == wanted and status.get("updatedNumberScheduled", 0) == wanted
                and status.get("observedGeneration") == daemonset["metadata"]["generation"])
