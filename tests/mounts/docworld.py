"""A machine in which the commands of the documentation can be run unchanged.

It has a root directory of its own with the directories that the pages name (/data, /srv, /scratch, /lustre, ...);
docfiles.py fills them, and nothing is visible outside. It has a network namespace of its own, in which nginx serves
https://host, https://example.org and, as a proxy of moto, https://storage.example.org. Each command gets its own copy
of the files, and mount and PID namespaces that end with it. For software that cannot be installed, PATH has
substitutes: container runtimes (CONTAINER) and the fake Flux.

    with DocWorld() as world:
        done = world.shell("zarrfs ls refs.json")
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests import forkserver
from tests.conftest import PROGRAM
from tests.machine import ROOT, Machine
from tests.mounts.docfiles import CASE, FLUX, HOME, S3_PORT, WEB

# Python, its virtual environment and the repository stay visible where the copies of /tmp and /home would hide them
_OURS = " ".join(sorted({sys.base_prefix, sys.prefix, str(ROOT)}, key=len))  # the outer ones first
_BACK = f"for place in {_OURS}; do mkdir -p $place && mount --bind /run/world/ours$place $place; done"
# The new root: a tmpfs with the directories that pages write to; all other names are bound from the machine's root
_ROOT = f"""
set -e
mkdir /run/new
mount -t tmpfs -o mode=755 world /run/new
cd /run/new
mkdir -p run/world/copy {WEB.relative_to("/")} old data srv scratch mnt project lustre local home var tmp
mkdir run/world/server && mount --bind "$server" run/world/server
for place in {_OURS}; do mkdir -p run/world/ours$place && mount --bind $place run/world/ours$place; done
for name in /*; do
    [ ! -e .$name ] || continue
    if [ -L $name ]; then cp -P $name .; elif [ -d $name ]; then mkdir .$name && mount --rbind $name .$name; fi
done
pivot_root . old
umount -l old
{_BACK}
mkdir -p {CASE} /var/tmp /mnt/data /mnt/job /mnt/store /mnt/set /mnt/inputs
chmod 1777 /tmp /var/tmp
echo 11.0.0.1 host example.org storage.example.org >>/etc/hosts
groupadd climate
{ROOT}/scripts/install-helper >/dev/null
"""
PLACES = "data srv scratch project lustre local home var tmp"  # each command gets a copy of these directories
# One certificate for all host names, signed by a certificate authority of the tests
_CERTIFICATE = """
set -e
cd /run/world
exec 2>openssl.log
openssl req -x509 -newkey rsa:2048 -nodes -keyout ca.key -out ca.pem -days 2 -subj '/CN=authority of tests'
openssl req -x509 -CA ca.pem -CAkey ca.key -newkey rsa:2048 -nodes -keyout key.pem -out cert.pem -days 2 \\
    -subj /CN=host -addext subjectAltName=DNS:host,DNS:example.org,DNS:storage.example.org \\
    -addext basicConstraints=critical,CA:FALSE
"""
_NGINX = f"""
daemon off; master_process off; pid /run/world/nginx.pid; user root;
events {{ worker_connections 256; }}
http {{
    access_log off; client_body_temp_path /run/world/body; proxy_temp_path /run/world/proxy;
    fastcgi_temp_path /run/world/fcgi; uwsgi_temp_path /run/world/uwsgi; scgi_temp_path /run/world/scgi;
    ssl_certificate /run/world/cert.pem; ssl_certificate_key /run/world/key.pem;
    server {{ listen 443 ssl; server_name host example.org; root {WEB}; }}
    server {{
        listen 443 ssl; server_name storage.example.org;
        location / {{ proxy_pass http://127.0.0.1:{S3_PORT}; }}
    }}
}}
"""
# The network: a public address on the loopback device, as reference sets may not reach private ones, and the servers
_SERVERS = f"""
ip link set lo up && ip addr add 11.0.0.1/32 dev lo
touch /run/world/net && mount --bind /proc/self/ns/net /run/world/net
nginx -c /run/world/nginx.conf -e /run/world/nginx.log &
exec {sys.executable} {Path(sys.executable).parent}/moto_server -H 127.0.0.1 -p {S3_PORT} >/run/world/moto.log 2>&1
"""
# A substitute for "apptainer exec --bind FROM:TO:ro IMAGE COMMAND..." and "docker run -v FROM:TO:OPTIONS IMAGE
# COMMAND...": it makes the bind mount and runs the command on this machine instead of in the image
CONTAINER = r"""#!/bin/sh
set -eu
case "${0##*/} $1 $2" in "apptainer exec --bind" | "docker run -v") ;; *) echo "$0: $*" >&2; exit 2 ;; esac
from=${3%%:*} to=${3#*:}
to=${to%%:*}
shift 4
exec unshare --mount --propagation slave sh -ec 'mount --rbind "$0" "$1"; ls "$1"/* >/dev/null; shift; exec "$@"' \
    "$from" "$to" "$@"
"""
# _RUN comes before a command, and gives it a copy of the files. _READ comes after the command: it reads all files of
# each mount that the command made, and unmounts it unless a process keeps it in use
_RUN = f"""
mount -t tmpfs copy /run/world/copy
cp -a /run/world/files/. /run/world/copy
for name in {PLACES}; do mount --bind /run/world/copy/$name /$name; done
{_BACK}
cd {CASE}
mounts() {{ sed -n 's/^[^ ]* [^ ]* [^ ]* [^ ]* \\([^ ]*\\) .* - fuse.zarrfs .*/\\1/p' /proc/self/mountinfo; }}
ready() {{ for _ in $(seq 1000); do "$@" && return; sleep 0.02; done; return 1; }}
"""
_READ = """
for point in $(mounts); do
    echo "mounted: $point, $(find $point -type f | wc -l) files" >&2
    find $point -type f -exec cat {} + >/dev/null || exit 99
    [ $kept = yes ] || umount $point || exit 98
done
exit $status
"""


class DocWorld(Machine):
    """The machine of the documentation, with its files and servers."""

    def __enter__(self) -> DocWorld:
        super().__enter__()
        try:
            self._make()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *details: object) -> None:
        super().__exit__(*details)
        if hasattr(self, "_servers"):
            self._servers.communicate()

    def _make(self) -> None:
        """Make the root directory, start the servers, and write the files."""
        self.root(f"server={forkserver.address({}).parent}\n{_ROOT}")
        for name, text in {"nginx.conf": _NGINX, "apptainer": CONTAINER, "docker": CONTAINER}.items():
            self.path(f"/run/world/{name}").write_text(text)
            self.path(f"/run/world/{name}").chmod(0o755)
        self.root(_CERTIFICATE)
        self._servers = self.start("unshare", "--net", "bash", "-c", _SERVERS)
        ready = f"for _ in $(seq 500); do (: </dev/tcp/127.0.0.1/{S3_PORT}) 2>/dev/null && break; sleep 0.05; done"
        done = self.bash("until mountpoint -q /run/world/net; do sleep 0.02; done\n", network=False)
        assert done.returncode == 0, done.stderr
        fill = f"{ready}\ncd {ROOT} && {sys.executable} -m tests.mounts.docfiles"
        done = self.bash(fill, timeout=300)
        assert done.returncode == 0, done.stdout + done.stderr
        self.root(f"mkdir /run/world/files && cd / && cp -ax {PLACES} /run/world/files")

    def bash(self, script: str, network: bool = True, timeout: float = 60) -> subprocess.CompletedProcess[str]:
        """Run a script in the namespaces of the DocWorld, without a copy of the files."""
        net = ["nsenter", "--net=/run/world/net"] if network else []
        return self.run(*net, *self.environment, "bash", "-c", script, timeout=timeout)

    def shell(self, line: str, before: str = "", kept: bool = False) -> subprocess.CompletedProcess[str]:
        """Run a shell line on its own copy of the files, after the lines in `before`; then read its mounts.

        With `kept`, another process keeps the mounts in use: they are not unmounted.
        """
        keep = "yes" if kept else "no"
        script = f"{_RUN}set -e\n{before}\nset +e -o pipefail\n{line}\nstatus=$? kept={keep}\n{_READ}"
        space = ["unshare", "--mount", "--propagation", "private", "--pid", "--fork", "--kill-child", "--mount-proc"]
        net = ["nsenter", "--net=/run/world/net"]
        return self.run(*net, *space, *self.environment, "bash", "-c", script, timeout=100)

    @property
    def environment(self) -> list[str]:
        """The env(1) command that sets the variables of a user."""
        programs = f"{os.path.dirname(PROGRAM)}:{os.path.dirname(sys.executable)}"
        path = f"/run/world:{FLUX}/bin:{programs}:/usr/sbin:/usr/bin:/sbin:/bin"
        variables = forkserver.variables(path, Path("/run/world/server/server")) | {
            "HOME": str(HOME), "XDG_RUNTIME_DIR": "/tmp", "SSL_CERT_FILE": "/run/world/ca.pem",
            "AWS_CA_BUNDLE": "/run/world/ca.pem", "ZARRFS_STATE_DIR": "/var/tmp/state",
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{S3_PORT}", "AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b",
            "AWS_DEFAULT_REGION": "us-east-1", "SLURM_JOB_ID": "17",
        }  # fmt: skip
        return ["env", *(f"{name}={text}" for name, text in variables.items())]
