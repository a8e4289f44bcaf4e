"""Several hosts on one machine: network namespaces with their own addresses on a bridge, and an sshd in each.

They share the file system, as nodes of a cluster do, and nothing of the network: a link that is taken down cuts a host
off as a pulled cable does. All of it needs root on Linux, and is gone afterwards.
"""

import contextlib
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from tests.waiting import until

NET = "10.77.0"
"""Beginning of the addresses. They are known in the namespaces only."""

SYSTEM_PATH = f"{os.environ['PATH']}:/usr/sbin:/sbin"


@dataclass(frozen=True)
class Namespaces:
    """The hosts.

    Attributes:
        addresses: Their addresses; the namespaces have names of their own.
        folder: Where keys and configurations are, and `bin/ssh`, which uses them.
        names: Of the namespaces.
        daemons: All sshd.
    """

    addresses: list[str]
    folder: Path
    names: list[str]
    daemons: list[subprocess.Popen[bytes]]

    def inside(self, index: int, *command: str) -> list[str]:
        """A command as it is run on a host."""
        return ["ip", "netns", "exec", self.names[index], *command]

    def link(self, index: int, state: str) -> None:
        """Take the link of a host `up` or `down`."""
        _run("ip", "-n", self.names[index], "link", "set", "eth0", state)

    def processes(self) -> list[psutil.Process]:
        """All that runs in the namespaces, but for the sshd that listen."""
        pids = {int(pid) for name in self.names for pid in _run("ip", "netns", "pids", name).split()}
        found = []
        for pid in pids:
            with contextlib.suppress(psutil.NoSuchProcess):
                process = psutil.Process(pid)
                if process.status() != psutil.STATUS_ZOMBIE and "[listener]" not in " ".join(process.cmdline()):
                    found.append(process)
        return found

    def serve(self, index: int, port: int = 22, mount: Sequence[str] = ()) -> None:
        """Start an sshd on a host, and come back once it listens.

        Args:
            index: The host.
            port: The port.
            mount: Arguments of a `mount` that those who come in by this daemon find, and nobody else.
        """
        config, log = self.folder / f"sshd_config_{index}_{port}", self.folder / f"sshd_{index}_{port}.log"
        config.write_text(
            f"ListenAddress {self.addresses[index]}:{port}\nHostKey {self.folder}/host\nPidFile none\nUsePAM no\n"
            f"AuthorizedKeysFile {self.folder}/authorized_keys\nStrictModes no\nPermitRootLogin prohibit-password\n"
            # Hosts have what these tests are about: processors.
            "SetEnv CUDA_VISIBLE_DEVICES= OMP_NUM_THREADS=1\n",
            encoding="ascii",
        )
        # Where sshd lets go of its rights; the service makes it, which may never have run here.
        Path("/run/sshd").mkdir(exist_ok=True)
        sshd = shutil.which("sshd", path=SYSTEM_PATH)
        assert sshd is not None
        # `ip netns exec` gives each command a mount namespace of its own.
        first = f"{shlex.join(['mount', *mount])} && " if mount else ""
        words = f"{first}exec {shlex.join([sshd, '-D', '-f', str(config), '-E', str(log)])}"
        self.daemons.append(subprocess.Popen(self.inside(index, "sh", "-c", words)))

        def listens() -> bool:
            told = log.read_text(encoding="utf-8") if log.exists() else ""
            assert self.daemons[-1].poll() is None, told
            return "Server listening" in told

        until(listens)

    def environment(self) -> dict[str, str]:
        """Variables for a command that is to find the hosts by ssh."""
        return {**os.environ, "PATH": f"{self.folder / 'bin'}{os.pathsep}{os.environ['PATH']}"}


def missing() -> str | None:
    """Why there can be no namespaces with sshd here; None where there can."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "network namespaces need root on Linux"
    for program in ("ip", "ssh", "sshd", "ssh-keygen"):
        if shutil.which(program, path=SYSTEM_PATH) is None:
            return f"{program} is not installed: apt-get install iproute2 openssh-client openssh-server"
    name = f"tk{os.getpid()}p"
    try:
        _run("ip", "netns", "add", name)
        _run("ip", "-n", name, *["link", "add", "br0", "type", "bridge"])
        _run("ip", "-n", name, *["link", "add", "v0", "type", "veth", "peer", "name", "v1"])
    except subprocess.CalledProcessError as error:
        return f"network namespaces cannot be made: {error.stderr.strip()}"
    finally:
        subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)
    return None


@contextlib.contextmanager
def namespaces(num: int, folder: Path) -> Iterator[Namespaces]:
    """Hosts that reach one another, each with an sshd that takes a key made for it.

    Args:
        num: Hosts.
        folder: Where keys and configurations are written.
    """
    stem = f"tk{os.getpid()}"
    bridge, names = f"{stem}b", [f"{stem}h{index}" for index in range(num)]
    hosts = Namespaces([f"{NET}.{index + 1}" for index in range(num)], folder, names, [])
    _write_keys(folder)
    try:
        _run("ip", "netns", "add", bridge)
        _run("ip", "-n", bridge, "link", "add", "br0", "type", "bridge")
        _run("ip", "-n", bridge, "link", "set", "br0", "up")
        for index, name in enumerate(names):
            _run("ip", "netns", "add", name)
            _run("ip", "-n", bridge, *f"link add v{index} type veth peer name eth0 netns {name}".split())
            _run("ip", "-n", bridge, *f"link set v{index} master br0 up".split())
            _run("ip", "-n", name, *f"addr add {hosts.addresses[index]}/24 dev eth0".split())
            _run("ip", "-n", name, "link", "set", "eth0", "up")
            _run("ip", "-n", name, "link", "set", "lo", "up")
        for index in range(num):
            hosts.serve(index)
        yield hosts
    finally:
        for daemon in hosts.daemons:
            daemon.kill()
            daemon.wait()
        for name in names:
            with contextlib.suppress(subprocess.CalledProcessError):
                for pid in _run("ip", "netns", "pids", name).split():
                    with contextlib.suppress(psutil.NoSuchProcess):
                        psutil.Process(int(pid)).kill()
        for name in (*names, bridge):
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


def _write_keys(folder: Path) -> None:
    """A key of a user, another that no host takes, one of the hosts, and an `ssh` that uses them."""
    (folder / "bin").mkdir(parents=True)
    for name in ("user", "stranger", "host"):
        _run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name))
    shutil.copy(folder / "user.pub", folder / "authorized_keys")
    key = " ".join((folder / "host.pub").read_text(encoding="ascii").split()[:2])
    (folder / "known_hosts").write_text(f"* {key}\n", encoding="ascii")
    (folder / "ssh_config").write_text(
        "Host *\n"
        f"IdentityFile {folder}/user\nIdentitiesOnly yes\nUser root\n"
        f"UserKnownHostsFile {folder}/known_hosts\nGlobalKnownHostsFile none\nStrictHostKeyChecking yes\n",
        encoding="ascii",
    )
    wrapper = folder / "bin" / "ssh"
    wrapper.write_text(f'#!/bin/sh\nexec {shutil.which("ssh")} -F {folder}/ssh_config "$@"\n', encoding="ascii")
    wrapper.chmod(0o755)


def _run(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout
