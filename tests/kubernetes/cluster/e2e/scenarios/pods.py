"""Pods of many kinds with lazy images."""

import base64
import contextlib
import hashlib
import json
import os
import shutil
import time

from ..images import LOGIN, OPEN, PRIVATE
from ..shell import wait
from ..table import expect
from .observing import configured


def cold_and_warm(cluster):
    """The second start of an image needs no request of its data."""
    image = f"{OPEN}/debian-slim:lazy"
    cold = cluster.run("cold", image)
    expect(cluster.mount_of(f"{OPEN}/debian-slim"), "the image is not mounted lazily")
    warm = cluster.run("warm", image)
    fetched = cluster.mount_of(f"{OPEN}/debian-slim")
    expect(cluster.exec("warm", "cat", "/etc/debian_version"), "a file cannot be read")
    share = 100 * fetched["bytes_fetched"] / fetched["bytes_total"]
    return f"cold {cold:.1f} s, warm {warm:.1f} s, with {share:.1f} % of the image fetched"


def init_and_sidecar(cluster):
    """Init containers, and one that goes on as a sidecar."""
    busybox, redis = f"{OPEN}/busybox:lazy", f"{OPEN}/redis:lazy"
    share = [{"name": "shared", "mountPath": "/shared"}]
    cluster.start("pod", redis, container={"volumeMounts": share}, volumes=[{"name": "shared", "emptyDir": {}}], initContainers=[
        {"name": "first", "image": busybox, "command": ["sh", "-c", "echo first > /shared/first"], "volumeMounts": share},
        {"name": "beside", "image": busybox, "command": ["sh", "-c", "echo beside > /shared/beside; sleep infinity"], "restartPolicy": "Always", "volumeMounts": share},
    ])
    cluster.ready("pod")
    said = wait(20, "the sidecar's file", lambda: cluster.exec("pod", "cat", "/shared/first", "/shared/beside"))
    expect(said.split() == ["first", "beside"], f"the containers wrote {said!r}")
    return "an init container ran to its end, a sidecar goes on beside the main container"


def exec_and_debug(cluster):
    """kubectl exec, cp and debug."""
    cluster.run("pod", f"{OPEN}/redis:lazy")
    version = cluster.exec("pod", "redis-server", "--version")
    expect("Redis" in version, version)
    cluster.kubectl("debug", "pod", f"--image={OPEN}/busybox:lazy", "--target=main", "--container=debugger", "--", "sleep", "infinity")
    wait(60, "the debugger", lambda: "running" in str(cluster.get("pod", "pod")["status"].get("ephemeralContainerStatuses")))
    seen = cluster.kubectl("exec", "pod", "--container=debugger", "--", "ps")
    expect("sleep infinity" in seen, f"the debugger does not see the container's processes: {seen}")
    return "commands run, an ephemeral container with another lazy image sees its processes"


def static_pod(cluster):
    """A pod that the kubelet reads from a file."""
    with static(cluster, f"{OPEN}/redis:lazy"):
        return "runs"


@contextlib.contextmanager
def static(cluster, image):
    """The pod static-node1, which no secret of the cluster reaches."""
    directory = cluster.node.root / "etc/kubernetes/manifests"
    directory.mkdir()
    config = cluster.node.root / "etc/kubernetes/kubelet.yaml"
    before = config.read_text()
    config.write_text(before + "staticPodPath: /etc/kubernetes/manifests\n")
    cluster.node.run("systemctl", "restart", "kubelet")
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "static", "annotations": {}},
           "spec": {"terminationGracePeriodSeconds": 0, "automountServiceAccountToken": False,
                    "containers": [{"name": "main", "image": image, "command": ["sleep", "infinity"]}]}}
    (directory / "static.json").write_text(json.dumps(pod))
    try:
        cluster.ready("static-node1")
        yield
    finally:
        (directory / "static.json").unlink()
        wait(60, "the static pod to end", lambda: not cluster.kubectl("get", "pod", "static-node1", "--ignore-not-found"))
        config.write_text(before)
        directory.rmdir()
        cluster.node.run("systemctl", "restart", "kubelet")


def roll_out(cluster):
    """A deployment whose image changes."""
    labels = {"app": "app"}
    container = {"name": "main", "image": f"{OPEN}/redis:lazy", "command": ["sleep", "infinity"]}
    template = {"metadata": {"labels": labels}, "spec": {"terminationGracePeriodSeconds": 0, "containers": [container]}}
    cluster.apply({"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": "app"},
                   "spec": {"replicas": 3, "selector": {"matchLabels": labels}, "template": template}})
    cluster.rolled_out("app")
    cluster.kubectl("set", "image", "deployment/app", f"main={OPEN}/debian-slim:lazy")
    cluster.rolled_out("app")
    return "3 replicas, replaced by another image"


def pull_secret(cluster):
    """imagePullSecrets reach Lazuli through the mirror, and only those who have them."""
    image = f"{PRIVATE}/redis:lazy"
    cluster.start("without", image)
    refused(cluster, "without")
    log_in(cluster, *LOGIN.split(":"))
    cluster.run("with", image, imagePullSecrets=SECRET)
    sums = cluster.exec("with", "sh", "-c", "md5sum /usr/bin/redis-server /usr/local/bin/redis-server 2>/dev/null | head -n 1")
    expect(sums, "the image's data cannot be read")
    return "refused without the secret, with it the data is read, too"


def secret_rotated(cluster):
    """Another password, and then no login at all, under a pod that reads."""
    image = cluster.images.private("busybox", "rotated", 64 << 20)
    always = {"container": {"imagePullPolicy": "Always"}, "imagePullSecrets": SECRET}
    user, password = LOGIN.split(":")
    passwords = cluster.node.root / "etc/registry/passwords"
    before = passwords.read_text()
    with configured(cluster, '\n[fetch]\ndeadline_seconds = 2\n\n[prefetch]\nahead = "nothing"\nrest_bytes_per_second = 0\n'):
        log_in(cluster, user, password)
        cluster.run("first", image, **always)
        read(cluster, "first", 8)
        try:
            cluster.node.run("htpasswd", "-Bb", "/etc/registry/passwords", user, "another")
            time.sleep(ANSWERS)
            cluster.start("late", image, **always)
            refused(cluster, "late")
            log_in(cluster, user, "another")
            cluster.run("second", image, **always)
            read(cluster, "first", 24)
            cluster.node.run("htpasswd", "-D", "/etc/registry/passwords", user)
            time.sleep(ANSWERS)
            cluster.start("third", image, **always)
            refused(cluster, "third")
            read(cluster, "first", 8)
            failed = cluster.exec("first", "sh", "-c", f"{READ.format(40)} 2>&1 || true")
            expect("Input/output error" in failed, f"bytes that no login may fetch were read: {failed}")
        finally:
            passwords.write_text(before)
    return ("rotated: the old one is refused, and pods that run read on with the new one; withdrawn: new pods are refused, "
            "those that run read what is there, and get EIO for the rest")


PROVIDER = """#!/bin/sh
cat <<ANSWER
{"kind": "CredentialProviderResponse", "apiVersion": "credentialprovider.kubelet.k8s.io/v1", "cacheKeyType": "Image",
 "auth": {"%s": {"username": "%s", "password": "%s"}}}
ANSWER
"""


def credential_provider(cluster):
    """A static pod with a private image, whose login the kubelet gets from a plugin."""
    image = cluster.images.private("debian-slim", "provided", 8 << 20)
    root, directory = cluster.node.root, "/usr/local/libexec/credentials"
    (root / directory[1:]).mkdir(parents=True)
    program = root / directory[1:] / "provider"
    program.write_text(PROVIDER % (PRIVATE, *LOGIN.split(":")))
    program.chmod(0o755)
    config = {"apiVersion": "kubelet.config.k8s.io/v1", "kind": "CredentialProviderConfig",
              "providers": [{"name": "provider", "matchImages": [PRIVATE], "defaultCacheDuration": "0s",
                             "apiVersion": "credentialprovider.kubelet.k8s.io/v1"}]}
    (root / "etc/kubernetes/credentials.json").write_text(json.dumps(config))
    node = root / "etc/kubernetes/node"
    before = node.read_text()
    node.write_text(f"{before}FLAGS='--image-credential-provider-config=/etc/kubernetes/credentials.json "
                    f"--image-credential-provider-bin-dir={directory}'\n")
    try:
        with static(cluster, image):
            expect(cluster.mount_of(image), "the image is not mounted lazily")
            read(cluster, "static-node1", 4)
    finally:
        node.write_text(before)
        cluster.node.run("systemctl", "restart", "kubelet")
    return "a static pod starts lazily with the login of a plugin, and its data is read"


def without_the_mirror(cluster):
    """A private image whose data the node reads with a login of its own."""
    # Lazuli keeps the logins of the repository of any other.
    image = cluster.images.private("redis-next", "far", 8 << 20)
    user, password = LOGIN.split(":")
    log_in(cluster, user, password)
    file = cluster.node.root / "root/.docker/config.json"
    cluster.node.run("lazuli", "setup", "mirror", "--undo")
    try:
        cluster.start("without", image, imagePullSecrets=SECRET)
        refused(cluster, "without")
        file.parent.mkdir()
        login = base64.b64encode(LOGIN.encode()).decode()
        file.write_text(json.dumps({"auths": {PRIVATE: {"auth": login}}}))
        cluster.run("with", image, imagePullSecrets=SECRET)
        expect(cluster.mount_of(image), "the image is not mounted lazily")
        read(cluster, "with", 4)
    finally:
        shutil.rmtree(file.parent, ignore_errors=True)
        cluster.node.run("lazuli", "setup", "mirror")
    return "refused without a login of the node's; with one in /root/.docker the pod starts and its data is read"


SECRET = [{"name": "login"}]
# Seconds for which the mirror gives the same client the same manifest.
ANSWERS = 31
READ = "dd if=/ballast of=/dev/null bs=1M skip={} count=1"


def read(cluster, name, at):
    """Reads the MiB `at` of a pod's ballast."""
    cluster.exec(name, "sh", "-c", READ.format(at))


def log_in(cluster, user, password):
    """Makes the secret, or changes it."""
    cluster.kubectl("delete", "secret", "login", "--ignore-not-found")
    cluster.kubectl("create", "secret", "docker-registry", "login", f"--docker-server={PRIVATE}", f"--docker-username={user}", f"--docker-password={password}")


def refused(cluster, name):
    """Waits until a pod's pull is refused, and takes the pod away."""
    wait(60, f"the pull of {name} to be refused", lambda: "pull" in waiting(cluster, name).lower())
    cluster.delete(name)


def waiting(cluster, name):
    """Why a pod's container does not run."""
    statuses = cluster.get("pod", name)["status"].get("containerStatuses") or [{}]
    return statuses[0].get("state", {}).get("waiting", {}).get("reason", "")


def user_namespace(cluster):
    """hostUsers: false, with lazy and ordinary images, and with a FUSE mount on the node."""
    host = cluster.run("host", f"{OPEN}/busybox:lazy")
    lazy = cluster.run("lazy", f"{OPEN}/busybox:lazy", hostUsers=False)
    mapped = cluster.exec("lazy", "cat", "/proc/self/uid_map").split()
    expect(mapped[1] != "0", f"the pod has the node's ids: {mapped}")
    expect(cluster.exec("lazy", "stat", "-c", "%u", "/bin/busybox") == "0", "the image's files belong to others")
    cluster.exec("lazy", "sh", "-c", "echo new > /new")
    cluster.run("plain", f"{OPEN}/redis:plain", hostUsers=False)
    return f"lazy {lazy:.1f} s, {host:.1f} s with the node's users; ordinary images start, too"


def fuse_beside_user_namespaces(cluster):
    """An image that FUSE serves on the node does not disturb pods with user namespaces."""
    configure(cluster, '[snapshotter]', '[snapshotter]\ndriver = "fuse"')
    try:
        image = cluster.images.variant("busybox", "fuse", 1 << 20)
        cluster.run("fuse", image)
        mount = cluster.mount_of(image)
        expect(mount["driver"] == "fuse", f"the driver is {mount['driver']}")
        cluster.run("plain", f"{OPEN}/redis:plain", hostUsers=False)
    finally:
        configure(cluster, '[snapshotter]\ndriver = "fuse"', '[snapshotter]')
    return "an ordinary image of several layers starts with hostUsers: false beside it"


def configure(cluster, before, after):
    """Changes the node's configuration of Lazuli."""
    file = cluster.node.root / "etc/lazuli/config.toml"
    text = file.read_text()
    expect(before in text, f"the configuration does not have {before!r}")
    file.write_text(text.replace(before, after, 1))
    cluster.node.run("systemctl", "reload", "lazuli")


def both_forms(cluster):
    """One tag with the ordinary and the lazy form."""
    image = f"{OPEN}/redis-next:both"
    index = json.loads(cluster.node.beside("skopeo", "inspect", "--raw", "--tls-verify=false", f"docker://{image}"))
    form = {entry["digest"]: "lazy" if entry["platform"].get("os.features") else "ordinary" for entry in index["manifests"]}
    cluster.run("ordinary", image)
    expect("lazy" not in mounted_forms(cluster, form), "the lazy form is taken")
    cluster.delete("ordinary")
    cluster.remove_image(f"{OPEN}/redis-next")
    configure(cluster, "[mirror]", f'[mirror]\nlazy = ["{OPEN}/redis-next"]')
    try:
        cluster.run("lazy", image)
        expect("lazy" in mounted_forms(cluster, form), "the lazy form is not taken")
        cluster.exec("lazy", "sh", "-c", "ls /usr > /dev/null")
    finally:
        configure(cluster, f'[mirror]\nlazy = ["{OPEN}/redis-next"]', "[mirror]")
    return "the ordinary form without, the lazy one with `lazy` of the mirror"


def model_volume(cluster):
    """A model in an image volume, of which only metadata was made."""
    weights = os.urandom(256 << 20)
    image = cluster.images.model({"model-1.safetensors": weights, "config.json": b"{}"})
    volume = {"volumes": [{"name": "model", "image": {"reference": image}}],
              "container": {"volumeMounts": [{"name": "model", "mountPath": "/model", "readOnly": True}]}}
    seconds = cluster.run("pod", f"{OPEN}/redis:lazy", **volume)
    mount = cluster.mount_of(f"{OPEN}/model")
    expect(mount, "the model is not mounted lazily")
    here = mount["bytes_fetched"] >> 20
    expect(here < 64, f"{here} MiB were fetched before anything was read")
    expect(cluster.exec("pod", "cat", "/model/config.json") == "{}", "a file of the model has another content")
    said = cluster.exec("pod", "sha256sum", "/model/model-1.safetensors").split()[0]
    expect(said == hashlib.sha256(weights).hexdigest(), "the weights are others")
    return f"Ready after {seconds:.1f} s with {here} of 256 MiB here; the weights have the right digest"


def mounted_forms(cluster, form):
    """Which forms of redis-next are mounted; the ordinary one is when it was indexed while it was
    pulled."""
    mounts = [mount["image"].partition("@") for mount in cluster.status()["mounts"]]
    return {form[digest] for name, _, digest in mounts if name.startswith(f"{OPEN}/redis-next")}


SCENARIOS = [
    (cold_and_warm, "a pod cold and warm"),
    (init_and_sidecar, "init container and sidecar"),
    (exec_and_debug, "exec and debug"),
    (static_pod, "static pod"),
    (roll_out, "roll-out"),
    (pull_secret, "pull secret"),
    (secret_rotated, "pull secret, rotated and withdrawn"),
    (credential_provider, "credential provider of the kubelet, static pod"),
    (without_the_mirror, "pull secret without the mirror"),
    (user_namespace, "`hostUsers: false`"),
    (fuse_beside_user_namespaces, "`hostUsers: false` beside an image served by FUSE"),
    (both_forms, "one tag with both forms"),
    (model_volume, "a model in an image volume"),
]
