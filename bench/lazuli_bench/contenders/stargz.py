"""eStargz images and the stargz snapshotter, which fetches layers in the background."""

import contextlib

from lab import background, run, unmount_below
from lab.containerd import listens

from . import Contender, Service, program

# A program of ours around upstream's packages, see bench/contenders/stargz.
PROGRAM = "contender-stargz"


class Stargz(Contender):
    name, title = "stargz", "eStargz"

    def missing(self):
        if not program(PROGRAM):
            return f"no {PROGRAM}: scripts/contenders builds it"
        return None

    def version(self):
        return f"stargz-snapshotter {run(program(PROGRAM), 'version').decode().strip()}"

    def publish(self, layout, reference, work):
        converted = work / "layout"
        run(program(PROGRAM), "convert", directory(layout), converted)
        run("skopeo", "--insecure-policy", "copy", "--dest-tls-verify=false", f"oci:{converted}:latest", f"docker://{reference}")

    @contextlib.contextmanager
    def service(self, work):
        socket = work / "stargz.sock"
        command = [program(PROGRAM), "serve", "--address", socket, "--root", work / "stargz"]
        try:
            with background(*command, log=work / "stargz.log", ready=lambda: listens(socket)) as process:
                yield Service("stargz", socket, lambda: [process.pid])
        finally:
            unmount_below(work)


def directory(layout):
    """The directory of what skopeo calls `DIR:TAG`: the converter takes the only image there is."""
    return str(layout).removesuffix(":latest")
