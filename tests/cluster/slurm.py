"""A Slurm of two nodes on this machine, for as long as its standard input is open.

    python tests/cluster/slurm.py FOLDER        # FOLDER is made, and removed at the end

It needs Debian's `slurm-wlm` and `munge`. Daemons and jobs belong to the user who starts it. When it is ready it prints
`ready`: with `SLURM_CONF=FOLDER/slurm.conf` in their environment `sinfo`, `sbatch` and the others speak to this Slurm.
The nodes are `n1` and `n2`, and in the partition `gpus` `g1` and `g2`, with two processors each. Each is a `slurmd`
with a port and a spool folder of its own. The GPUs are pretended: Slurm hands them out, but they are other devices.
Commands are read line by line, and `ready` answers each:

    kill NODE       the node is lost: its daemon and everything that runs on it are killed
    stop NODE       its daemon alone is killed
    start NODE      its daemon starts again, unless it runs

At the end of the input, or after a signal, everything that runs below it is killed and the folder is removed.
"""

from __future__ import annotations

import getpass
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, Self

PROGRAMS = ("slurmctld", "slurmd", "sbatch", "srun", "munged")
NODES = ("n1", "n2")
GPU_NODES = ("g1", "g2")
READY_S = 120
CONF = """\
ClusterName=mmrl
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
FirstJobId={port}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=10
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/affinity
TaskPluginParam=autobind=threads
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
SlurmdTimeout=300
ReturnToService=2
MessageTimeout=30
GresTypes=gpu
{nodes}
PartitionName=all Nodes={names} Default=YES MaxTime=INFINITE
PartitionName=gpus Nodes={gpu_names} MaxTime=INFINITE
"""


class Slurm:
    """The daemons, their folder, and what runs below them.

    Args:
        folder: Made here; its path is short, since a socket is in it.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._environment = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf")}
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> Self:
        self.folder.mkdir(mode=0o755)
        try:
            self._write()
            munge = {name: str(self.folder / f"munge.{name}") for name in ("key", "socket", "pid", "seed", "log")}
            options = [f"--{name.replace('key', 'key-file')}={munge[name]}" for name in ("key", "socket")]
            options += [f"--{name}-file={munge[name]}" for name in ("pid", "seed", "log")]
            self._start("munged", "munged", "--foreground", "--force", *options)
            self._until("munged answers", Path(munge["socket"]).exists)
            self._start("slurmctld", "slurmctld", "-D")
            for name in (*NODES, *GPU_NODES):
                self.start(name)
            self._until("all nodes are idle", lambda: {*self._ask("sinfo", "-hN", "-o", "%t")} == {"idle"})
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def start(self, node: str) -> None:
        """Start the daemon of a node, unless it runs."""
        if node not in self._daemons or self._daemons[node].poll() is not None:
            self._start(node, "slurmd", "-D", "-N", node)

    def stop(self, node: str) -> None:
        """Kill the daemon of a node, and nothing else."""
        self._daemons[node].kill()
        self._daemons[node].wait()

    def kill(self, node: str) -> None:
        """Kill the daemon of a node and all that runs on it, as the loss of the machine would."""
        self.stop(node)
        kill_all(lambda environment: self._runs_on(node, environment))

    def close(self) -> None:
        """Kill everything, and remove the folder."""
        for daemon in self._daemons.values():
            daemon.kill()
            daemon.wait()
        kill_all(lambda environment: any(self._runs_on(node, environment) for node in self._daemons))
        shutil.rmtree(self.folder, ignore_errors=True)

    def _runs_on(self, node: str, environment: list[str]) -> bool:
        """True for steps, and for what they start; false for a shell that only speaks to this Slurm."""
        return {f"SLURMD_NODENAME={node}", f"SLURM_CONF={self.folder / 'slurm.conf'}"} <= {*environment}

    def _write(self) -> None:
        """The files of settings, the key and the folders."""
        (self.folder / "state").mkdir()
        key = self.folder / "munge.key"
        key.touch(mode=0o600)
        key.write_bytes(secrets.token_bytes(128))
        host = socket.gethostname().partition(".")[0]
        names = (*NODES, *GPU_NODES)
        with ExitStack() as probes:
            ports = [
                probes.enter_context(socket.create_server(("", 0))).getsockname()[1] for _ in ("controller", *names)
            ]
        nodes = []
        for name, port in zip(names, ports[1:], strict=True):
            (self.folder / f"spool-{name}").mkdir()
            devices = " Gres=gpu:2" if name in GPU_NODES else ""
            nodes.append(f"NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs=2{devices}")
        pretended = f"NodeName={','.join(GPU_NODES)} Name=gpu File=/dev/null\n"
        (self.folder / "gres.conf").write_text(pretended + pretended.replace("null", "zero"))
        (self.folder / "slurm.conf").write_text(
            CONF.format(
                host=host,
                port=ports[0],
                user=getpass.getuser(),
                folder=self.folder,
                nodes="\n".join(nodes),
                names=",".join(NODES),
                gpu_names=",".join(GPU_NODES),
            )
        )

    def _start(self, name: str, *command: str) -> None:
        with (self.folder / f"{name}.out").open("ab") as out:
            path = os.pathsep.join([self._environment["PATH"], "/usr/sbin", "/sbin"])
            self._daemons[name] = subprocess.Popen(
                command,
                env=self._environment | {"PATH": path, "SLURMD_NODENAME": name},
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
            )

    def _ask(self, *command: str) -> list[str]:
        answer = subprocess.run(command, env=self._environment, capture_output=True, text=True, check=False)
        return answer.stdout.split()

    def _until(self, what: str, holds: Callable[[], bool]) -> None:
        deadline = time.monotonic() + READY_S
        while not holds():
            if time.monotonic() > deadline or any(each.poll() is not None for each in self._daemons.values()):
                logs = [*self.folder.glob("*.out"), *self.folder.glob("*.log")]
                said = "\n".join(f"{log.name}:\n{log.read_text(errors='replace')[-2000:]}" for log in logs)
                raise SystemExit(f"{said}\n{what}: not so")
            time.sleep(0.2)


def kill_all(chosen: Callable[[list[str]], bool]) -> None:
    """Kill the processes that have such an environment, and those that they start meanwhile."""
    while found := [pid for pid, environment in environments() if chosen(environment)]:
        for pid in found:
            with suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.1)


def environments() -> Iterator[tuple[int, list[str]]]:
    """Processes and the environments that they were started with, as far as they can be read."""
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            yield int(process.name), (process / "environ").read_bytes().decode(errors="replace").split("\0")


def main(folder: str) -> None:
    def leave(*_: Any) -> None:
        raise SystemExit(1)

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, leave)
    with Slurm(Path(folder).absolute()) as slurm:
        verbs = {"kill": slurm.kill, "stop": slurm.stop, "start": slurm.start}
        print("ready", flush=True)
        for line in sys.stdin:
            verb, node = line.split()
            verbs[verb](node)
            print("ready", flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
