"""Two nodes on this machine: each with a network, a host name and a disk of its own.

A node is a network, host-name and mount namespace; a cable of two ends joins the two. Both see one
file system, as a cluster's shared one, but FOLDER/disk, which is FOLDER/disks/NODE on each. No
privilege is needed where the kernel lets users have namespaces.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

NAMES = ("node-1", "node-2")
_OWN = ("unshare", "--user", "--map-root-user", "--net", "--uts", "--mount")
# This shell is the first node, and a process that waits keeps the namespaces of the second. What
# it starts ends with the outer process's session.
_SCRIPT = """
set -eu
folder=$1; shift
unshare --net --uts --mount tail -f /dev/null & second=$!
trap 'kill $second' EXIT
while [ "$(readlink /proc/$second/ns/mnt)" = "$(readlink /proc/$$/ns/mnt)" ]; do :; done
ip link add cable type veth peer name cable netns $second
cat > "$folder/node" <<'END'
set -eu
folder=$1; name=$2; address=$3; shift 3
hostname "$name"
ip link set lo up
ip address add "$address/24" dev cable
ip link set cable up
mount --bind "$folder/disks/$name" "$folder/disk"
mount --bind "$folder/hosts" /etc/hosts
cd "$folder"
exec "$@"
END
nsenter --target $second --net --uts --mount sh "$folder/node" "$folder" node-2 10.77.0.2 "$@" &
other=$!
status=0
(exec sh "$folder/node" "$folder" node-1 10.77.0.1 "$@") || status=$?
wait $other
exit $status
"""


@cache
def can_be_had() -> bool:
    """Whether this kernel and its programs make namespaces and cables for this user."""
    cable = "ip link add cable type veth peer name other && nsenter --target $$ --net true"
    try:
        done = subprocess.run([*_OWN, "sh", "-c", cable], capture_output=True)
    except OSError:
        return False
    return done.returncode == 0


def started(
    folder: Path, command: Sequence[str], environment: Mapping[str, str]
) -> subprocess.Popen[str]:
    """A session that runs the command on both nodes, and ends with the status of one that failed.

    folder: has `disk` on each node, and `disks` of both.
    """
    for name in NAMES:
        (folder / "disks" / name).mkdir(parents=True)
    (folder / "disk").mkdir()
    (folder / "hosts").write_text(
        "127.0.0.1 localhost\n10.77.0.1 node-1\n10.77.0.2 node-2\n", encoding="utf-8"
    )
    return subprocess.Popen(
        [*_OWN, "sh", "-c", _SCRIPT, "nodes", str(folder), *command],
        env=os.environ | dict(environment), cwd=folder, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True, encoding="utf-8", start_new_session=True,
    )  # fmt: skip
