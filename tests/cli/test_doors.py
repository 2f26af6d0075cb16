"""Who can reach the ranks that `seqpar` starts: nobody but this machine, and no other user its folder."""

from __future__ import annotations

import os
import re
import stat
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path

import pytest

from seqpar.cli.ranks import INTERFACES, loopback
from tests.cli.processes import running

LISTENS, UNBOUND = "0A", "07"  # states of TCP and UDP sockets that take what comes
# what another user tries; it says what works
TRIES = """
import os, sys
os.setgroups([]), os.setgid(65534), os.setuid(65534)
works = {
    "list": os.listdir,
    "read": lambda path: open(path).read(),
    "write": lambda path: open(path, "a"),
    "make": lambda path: open(path + "/more", "x"),
    "rename": lambda path: os.rename(path, path + ".old"),
    "remove": os.unlink,
}
for path in sys.argv[1:]:
    for name, work in works.items():
        try:
            work(path)
            print(name, os.path.basename(path))
        except OSError:
            pass
"""


def open_doors(processes: list[int]) -> list[str]:
    """Return the local addresses of the sockets of these processes that wait for others, as the kernel writes them."""
    mine = {inode for process in processes for inode in _sockets(process)}
    found = list[str]()
    for table in ("tcp", "tcp6", "udp", "udp6"):
        file = Path("/proc/net", table)
        for line in file.read_text().splitlines()[1:] if file.exists() else ():
            _, local, _, state, *_, inode = line.split()[:10]
            if inode in mine and state in (LISTENS, UNBOUND):
                found.append(local.partition(":")[0])
    return found


def _sockets(process: int) -> list[str]:
    links = list[str]()
    for file in Path(f"/proc/{process}/fd").iterdir():
        try:
            links.append(os.readlink(file))
        except FileNotFoundError:
            continue
    return [match[1] for link in links if (match := re.fullmatch(r"socket:\[(\d+)\]", link))]


@pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="finds sockets in /proc")
def test_a_job_is_reached_from_this_machine_alone_and_its_folder_by_nobody(tmp_path: Path) -> None:
    with ExitStack() as opened:
        temporary = Path(opened.enter_context(tempfile.TemporaryDirectory()))  # not below a folder that is ours alone
        temporary.chmod(0o1777)
        process, ranks = opened.enter_context(running(tmp_path, temporary))
        doors = {"starter": open_doors([process.pid]), "ranks": open_doors(ranks)}
        (folder,) = (path for path in temporary.iterdir() if path.name.startswith("seqpar-"))
        files = [folder / name for name in ("store", "seqpar-heartbeat-0.json", "seqpar-heartbeat-1.json")]
        assert all(file.is_file() for file in files), list(folder.iterdir())
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        assert folder.stat().st_uid == os.getuid()
        if os.getuid() == 0:
            (control := temporary / "control").touch()
            control.chmod(0o644)
            words = [sys.executable, "-S", "-c", TRIES, *map(str, (folder, *files, control))]
            tried = subprocess.run(words, capture_output=True, text=True, check=True)
            assert tried.stdout == "read control\n", tried
    assert doors["starter"] == []  # no store
    assert doors["ranks"]  # gloo's
    assert set(doors["ranks"]) <= {"0100007F", "00000000000000000000000001000000"}
    listening = subprocess.Popen([sys.executable, "-c", SERVER], stdout=subprocess.PIPE)  # a negative control
    with listening:
        assert listening.stdout is not None
        listening.stdout.readline()
        assert open_doors([listening.pid]) == ["00000000", "00000000"]
        listening.kill()


SERVER = """
import socket, time
server = socket.create_server(("", 0))
datagrams = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
datagrams.bind(("", 0))
print("ready", flush=True)
time.sleep(60)
"""


def test_the_loopback_is_found_whatever_its_name(tmp_path: Path) -> None:
    for name, flags in {"eth0": "0x1003", "down": "0x8", "lop7": "0x9"}.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "flags").write_text(flags + "\n")
    assert loopback(tmp_path) == "lop7"
    (tmp_path / "lop7" / "flags").write_text("0x8\n")
    with pytest.raises(ValueError, match=f"name another interface by {INTERFACES[0]} and"):
        loopback(tmp_path)
