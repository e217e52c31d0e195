"""The configuration of nydus-snapshotter and of its nydusd, for a node in a directory."""

import json

# As upstream's misc/snapshotter/config.toml has it, but for what is the machine's: no cgroup, no
# ports, no sockets elsewhere.
SNAPSHOTTER = """\
version = 1
root = "{work}/nydus"
address = "{work}/nydus.sock"
daemon_mode = "{mode}"
cleanup_on_close = {cleanup}

[system]
enable = {system}
address = "{work}/nydus-system.sock"

[daemon]
nydusd_config = "{work}/nydusd.json"
nydusd_path = "{work}/nydusd"
nydusimage_path = "{nydus_image}"
fs_driver = "fusedev"
recover_policy = "failover"
threads_number = 4
failover_policy = "resend"

[log]
log_to_stdout = true
level = "info"
"""

# Upstream's misc/snapshotter/nydusd-config.fusedev.json, which fetches whole images in the
# background; the registry has no TLS.
NYDUSD = {
    "device": {
        "backend": {
            "type": "registry",
            "config": {"scheme": "http", "timeout": 5, "connect_timeout": 5, "retry_limit": 2},
        },
        "cache": {"type": "blobcache"},
    },
    "mode": "direct",
    "digest_validate": False,
    "iostats_files": False,
    "enable_xattr": True,
    "amplify_io": 1048576,
    "fs_prefetch": {"enable": True, "threads_count": 8, "merging_size": 1048576, "prefetch_all": True},
}


def configure(work, nydus_image, mode="dedicated", cleanup=True, system=False):
    """Write both files; returns that of the snapshotter. Its processes end with it if `cleanup`; an
    operator has a socket if `system`."""
    text = {True: "true", False: "false"}
    file = work / "nydus.toml"
    file.write_text(SNAPSHOTTER.format(work=work, nydus_image=nydus_image, mode=mode,
                                       cleanup=text[cleanup], system=text[system]))
    (work / "nydusd.json").write_text(json.dumps(NYDUSD))
    return file
