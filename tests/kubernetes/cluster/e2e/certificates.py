"""The certificates and kubeconfigs of a cluster."""

import shutil
import subprocess

NAMES = {
    "apiserver": ("/CN=kube-apiserver", "DNS:kubernetes.default.svc,IP:10.123.0.1,IP:127.0.0.1,IP:10.96.0.1"),
    "admin": ("/O=system:masters/CN=admin", None),
}

KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes")

KUBECONFIG = """\
apiVersion: v1
kind: Config
current-context: here
clusters: [{{name: here, cluster: {{server: "https://10.123.0.1:6443", certificate-authority: /etc/kubernetes/ca.crt}}}}]
contexts: [{{name: here, context: {{cluster: here, user: {user}}}}}]
users: [{{name: {user}, user: {{client-certificate: /etc/kubernetes/{user}.crt, client-key: /etc/kubernetes/{user}.key}}}}]
"""


def make(directory):
    """Writes those of the control plane to `directory`, the first node's /etc/kubernetes."""
    directory.mkdir(parents=True)
    openssl(directory, "req", "-x509", *KEY, "-keyout", "ca.key", "-out", "ca.crt", "-days", "10", "-subj", "/CN=cluster")
    for name, (subject, addresses) in NAMES.items():
        sign(directory, name, subject, addresses)
    openssl(directory, "genpkey", "-algorithm", "RSA", "-pkeyopt", "rsa_keygen_bits:2048", "-out", "accounts.key")
    openssl(directory, "pkey", "-in", "accounts.key", "-pubout", "-out", "accounts.pub")
    (directory / "admin.conf").write_text(KUBECONFIG.format(user="admin"))


def join(directory, control_plane, node):
    """Writes those of a node's kubelet to `directory`, signed by the first node's authority."""
    directory.mkdir(parents=True, exist_ok=True)
    for name in ("ca.crt", "ca.key"):
        if directory != control_plane:
            shutil.copy(control_plane / name, directory)
    sign(directory, "kubelet", f"/O=system:nodes/CN=system:node:{node}", None)
    (directory / "kubelet.conf").write_text(KUBECONFIG.format(user="kubelet"))


def sign(directory, name, subject, addresses):
    """Makes a key and a certificate for it."""
    openssl(directory, "req", *KEY, "-keyout", f"{name}.key", "-out", f"{name}.csr", "-subj", subject)
    extensions = "extendedKeyUsage=serverAuth,clientAuth\n" + (f"subjectAltName={addresses}\n" if addresses else "")
    (directory / "extensions").write_text(extensions)
    openssl(directory, "x509", "-req", "-in", f"{name}.csr", "-CA", "ca.crt", "-CAkey", "ca.key", "-CAcreateserial",
            "-out", f"{name}.crt", "-days", "10", "-extfile", "extensions")


def openssl(directory, *arguments):
    """Runs it there."""
    subprocess.run(["openssl", *arguments], check=True, cwd=directory, capture_output=True)
