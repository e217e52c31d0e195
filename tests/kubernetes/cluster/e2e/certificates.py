"""The certificates and kubeconfigs of a cluster."""

import subprocess

NAMES = {
    "apiserver": ("/CN=kube-apiserver", "DNS:kubernetes.default.svc,IP:10.123.0.1,IP:127.0.0.1,IP:10.96.0.1"),
    "admin": ("/O=system:masters/CN=admin", None),
    "kubelet": ("/O=system:nodes/CN=system:node:node1", None),
}

KUBECONFIG = """\
apiVersion: v1
kind: Config
current-context: here
clusters: [{{name: here, cluster: {{server: "https://10.123.0.1:6443", certificate-authority: /etc/kubernetes/ca.crt}}}}]
contexts: [{{name: here, context: {{cluster: here, user: {user}}}}}]
users: [{{name: {user}, user: {{client-certificate: /etc/kubernetes/{user}.crt, client-key: /etc/kubernetes/{user}.key}}}}]
"""


def make(directory):
    """Writes them to `directory`, the node's /etc/kubernetes."""
    directory.mkdir(parents=True)

    def openssl(*arguments):
        subprocess.run(["openssl", *arguments], check=True, cwd=directory, capture_output=True)

    key = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes"]
    openssl("req", "-x509", *key, "-keyout", "ca.key", "-out", "ca.crt", "-days", "10", "-subj", "/CN=cluster")
    for name, (subject, addresses) in NAMES.items():
        openssl("req", *key, "-keyout", f"{name}.key", "-out", f"{name}.csr", "-subj", subject)
        extensions = "extendedKeyUsage=serverAuth,clientAuth\n" + (f"subjectAltName={addresses}\n" if addresses else "")
        (directory / "extensions").write_text(extensions)
        openssl("x509", "-req", "-in", f"{name}.csr", "-CA", "ca.crt", "-CAkey", "ca.key", "-CAcreateserial",
                "-out", f"{name}.crt", "-days", "10", "-extfile", "extensions")
    openssl("genpkey", "-algorithm", "RSA", "-pkeyopt", "rsa_keygen_bits:2048", "-out", "accounts.key")
    openssl("pkey", "-in", "accounts.key", "-pubout", "-out", "accounts.pub")
    for user in ("admin", "kubelet"):
        (directory / f"{user}.conf").write_text(KUBECONFIG.format(user=user))
