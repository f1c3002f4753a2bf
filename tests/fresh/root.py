"""A new Debian in a folder, by debootstrap: nothing is in it but what is installed into it.

    with new_root("bookworm", log) as root:              # Debian's smallest system, and a user `student` with an empty home
        root.run("apt-get update", user="root")          # as whoever sets the machine up
        root.run("bash chapters/07_patrickstar/train.sh", folder="course")

A command gets this machine's network and kernel, and this machine's settings of apt and pip: mirrors, certificates, proxies.
It has its own mounts and processes. When `unshare` ends, however it ends, the kernel ends the processes of the command and
unmounts everything, so that removing the folder removes nothing else.

A new root has no /etc/hosts: in it the name `localhost` is unknown.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

TOOLS = ("debootstrap", "unshare", "chroot", "mount", "git")
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
USER = "student"
HOMES = {USER: f"/home/{USER}", "root": "/root"}

# $1 is the root, $2 the user, $3 the command; the rest are files and folders that the root gets from this machine.
ENTER = """
set -e
root=$1 user=$2 command=$3
shift 3
mount -t proc proc "$root/proc"
mount --rbind /sys "$root/sys"
mount --rbind /dev "$root/dev"
mount -t tmpfs -o mode=1777 tmpfs "$root/dev/shm"
for path in "$@"; do
    if [ -d "$path" ]; then mkdir -p "$root$path"; else mkdir -p "$root${path%/*}"; touch "$root$path"; fi
    mount --bind -o ro "$path" "$root$path"
done
exec chroot --userspec="$user" "$root" bash -c "$command"
"""


class CommandFailed(Exception):
    """A command that ended with another status than 0; the message has its last lines."""


@dataclass
class Root:
    """A system in a folder.

    Attributes:
        path: its folder on this machine.
        log: an open file of this machine that gets the output of all commands.
    """

    path: Path
    log: BinaryIO

    def run(self, command: str, user: str = USER, folder: str = ".", **variables: str) -> tuple[float, str]:
        """Runs a command by bash; returns its seconds and its output. Raises CommandFailed.

        Args:
            command: what bash runs.
            user: USER or root.
            folder: where it runs, seen from the user's home.
            variables: more variables of its environment.
        """
        environment = {"HOME": HOMES[user], "USER": user, "PATH": PATH, "LANG": "C.UTF-8"}
        pip, paths = settings_of_pip() if user == USER else ({}, [])
        enter = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "--ipc", "bash", "-c", ENTER, "enter"]
        enter += [str(self.path), user, f"cd {HOMES[user]}/{folder} && {command}", *paths]
        begin, start = time.monotonic(), self.log.seek(0, os.SEEK_END)
        done = subprocess.run(enter, env={**environment, **proxies(), **pip, **variables}, stdin=subprocess.DEVNULL,
                              stdout=self.log, stderr=subprocess.STDOUT)  # fmt: skip
        seconds = time.monotonic() - begin
        output = Path(self.log.name).read_bytes()[start:].decode(errors="replace")
        if done.returncode:
            last = "\n".join(output.splitlines()[-40:])
            raise CommandFailed(f"{command}: status {done.returncode}\n{last}")
        return seconds, output


@contextlib.contextmanager
def new_root(suite: str, log: Path) -> Iterator[Root]:
    """A new root, which is removed after the block. Raises CommandFailed if debootstrap cannot make it.

    Args:
        suite: Debian's name of the release, e.g. bookworm.
        log: the file that gets the output of all commands, debootstrap's first.
    """
    with tempfile.TemporaryDirectory(prefix="fresh_", ignore_cleanup_errors=True) as folder, log.open("ab") as output:
        path = Path(folder) / "root"
        command = ["debootstrap", "--variant=minbase", suite, path, *mirror()]
        if subprocess.run(command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT).returncode:
            raise CommandFailed("\n".join(["debootstrap:", *log.read_text(errors="replace").splitlines()[-10:]]))
        (path / "etc/apt/apt.conf.d/99machine").write_text(settings_of_apt())
        root = Root(path, output)
        root.run(f"useradd --create-home --shell /bin/bash {USER}", user="root")
        yield root


def give(root: Root, commit: str = "HEAD") -> None:
    """Puts a commit of this checkout into the root, as `course` in its user's home. The root needs git."""
    home = root.path / HOMES[USER].lstrip("/")
    checkout = Path(__file__).parents[2]
    subprocess.run(["git", "bundle", "create", "--quiet", home / "course.bundle", commit], cwd=checkout, check=True)
    root.run("git clone --quiet course.bundle course && rm -f course.bundle")


def mirror() -> list[str]:
    """The address from which this machine's apt gets Debian, as debootstrap's argument; empty if apt names none."""
    if not shutil.which("apt-get"):
        return []
    wanted = ["indextargets", "--format", "$(REPO_URI)", "Created-By: Packages", "Origin: Debian", "Label: Debian"]
    found = subprocess.run(["apt-get", *wanted], capture_output=True, text=True, check=True).stdout.splitlines()
    return found[:1]


def settings_of_apt() -> str:
    """How this machine's apt reaches its mirror (proxies, certificates, checks of dates), in apt's syntax."""
    if not shutil.which("apt-config"):
        return ""
    known = subprocess.run(["apt-config", "dump"], capture_output=True, text=True, check=True).stdout.splitlines()
    kept = ("Acquire::http", "Acquire::https", "Acquire::Check-", "Acquire::Retries")
    return "".join(f"{line}\n" for line in known if line.startswith(kept) and not line.endswith(' "";'))


def settings_of_pip() -> tuple[dict[str, str], list[str]]:
    """What this machine's pip needs to reach packages: (environment variables, files and folders that they name)."""
    listed = subprocess.run([sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=True)
    pairs = [line.split("=", 1) for line in listed.stdout.splitlines() if not line.startswith(":env:")]
    settings = {f"PIP_{key.rpartition('.')[2].upper().replace('-', '_')}": value.strip("'") for key, value in pairs}
    settings |= {name: value for name, value in os.environ.items() if name.startswith("PIP_")}
    words = [word for value in settings.values() for word in value.split()]
    # An index refers to files next to it.
    places = [Path(word.removeprefix("file://")).parent if word.startswith("file://") else Path(word) for word in words]
    return settings, sorted({str(place) for place in places if place.is_absolute() and place.exists()})


def proxies() -> dict[str, str]:
    """The variables that name this machine's proxies."""
    return {name: value for name, value in os.environ.items() if name.lower().endswith("_proxy")}


def reason_why_not() -> str:
    """Why this machine cannot make a new Debian, with what would help; "" if it can."""
    if os.geteuid() != 0:
        return "a new Debian needs root, for debootstrap and chroot"
    if missing := [tool for tool in TOOLS if shutil.which(tool) is None]:
        return f"a new Debian needs {', '.join(missing)}: apt-get install debootstrap git util-linux"
    tried = subprocess.run(["unshare", "--mount", "mount", "-t", "tmpfs", "tmpfs", "/mnt"], capture_output=True, text=True)
    return f"the kernel refuses mounts: {tried.stderr.strip()}" if tried.returncode else ""
