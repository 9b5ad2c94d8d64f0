"""Runs a Slurm cluster of this one machine for a command and the jobs that it submits, to try batch scripts for real.

    python slurm_one_node.py bash slurm-array.sh --accel-device=cpu

It needs Debian's packages ``slurm-wlm`` and ``munge``, or others with the same programs, and no running service:
munged, slurmctld and slurmd run in a temporary folder, as the user that starts them, on free ports, and are stopped in
the end with all jobs. Standard library alone. The exit status is that of the command; 1 where the cluster does not
start or jobs are still there after the time limit.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import getpass
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "scancel", "scontrol", "sinfo", "squeue")
START = 30.0
"""Seconds that each daemon has to answer."""
STOP = 10.0
"""Seconds that each daemon and the cancelled jobs have to end."""


class ClusterError(RuntimeError):
    """The cluster does not start, or its jobs do not end; the message has the last lines of the daemons' logs."""


def program(name: str) -> str | None:
    """Path of one of the `PROGRAMS`; daemons are in folders that are not on every user's PATH."""
    return shutil.which(name, path=f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/sbin")


def missing() -> list[str]:
    """The `PROGRAMS` that are not installed."""
    return [name for name in PROGRAMS if program(name) is None]


@contextlib.contextmanager
def cluster() -> Iterator[Mapping[str, str]]:
    """A running cluster; gives the environment in which commands of Slurm talk to it.

    Raises:
        ClusterError: A program is not installed, or a daemon does not answer.
    """
    if absent := missing():
        raise ClusterError(f"not installed: {', '.join(absent)}; apt-get install slurm-wlm munge")
    with tempfile.TemporaryDirectory(prefix="slurm-") as name, contextlib.ExitStack() as stack:
        folder = Path(name)
        folder.chmod(0o711)  # munged refuses a socket in a folder that others cannot pass
        environ = {**os.environ, "SLURM_CONF": str(_configure(folder))}
        stack.enter_context(_munged(folder, environ))
        stack.enter_context(_daemon("slurmctld", ["-D"], folder, environ))
        _until(lambda: _ask("scontrol", "ping", environ=environ).endswith("is UP"), "slurmctld", folder)
        stack.enter_context(_daemon("slurmd", ["-D", "-N", _host()], folder, environ))
        stack.callback(_cancel, environ)
        _until(lambda: _ask("sinfo", "-h", "-o", "%t", environ=environ) == "idle", "slurmd", folder)
        yield environ


def wait(environ: Mapping[str, str], seconds: float) -> None:
    """Wait until no job is left.

    Raises:
        ClusterError: One is there after `seconds`.
    """
    end = time.monotonic() + seconds
    while jobs := _ask("squeue", "-h", "-o", "%i %j %T %r", environ=environ):
        if time.monotonic() > end:
            raise ClusterError(f"jobs are left after {seconds:.0f} s:\n{jobs}")
        time.sleep(0.5)


def _host() -> str:
    return socket.gethostname().partition(".")[0]


def _configure(folder: Path) -> Path:
    (folder / "munge.key").write_bytes(secrets.token_bytes(128))
    (folder / "munge.key").chmod(0o600)
    user, host, cores = getpass.getuser(), _host(), len(os.sched_getaffinity(0))
    with contextlib.ExitStack() as stack:  # held together, so that the two differ
        first, second = (stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(2))
        ports = first.getsockname()[1], second.getsockname()[1]
    settings = {
        "ClusterName": "one-node",
        "SlurmctldHost": f"{host}(127.0.0.1)",
        "SlurmctldPort": ports[0],
        "SlurmdPort": ports[1],
        "SlurmUser": user,
        "SlurmdUser": user,
        "AuthType": "auth/munge",
        "CredType": "cred/munge",
        "AuthInfo": f"socket={folder / 'munge.socket'}",
        "StateSaveLocation": folder / "state",
        "SlurmdSpoolDir": folder / "spool",
        "SlurmctldPidFile": folder / "slurmctld.pid",
        "SlurmdPidFile": folder / "slurmd.pid",
        "ProctrackType": "proctrack/pgid",  # no cgroups: a container may have none
        "TaskPlugin": "task/none",
        "JobAcctGatherType": "jobacct_gather/none",
        "MpiDefault": "none",
        "SwitchType": "switch/none",
        "SelectType": "select/cons_tres",
        "SelectTypeParameters": "CR_Core",
        "SlurmdParameters": "config_overrides",  # what the node has is what the next but one line says
        "ReturnToService": 2,
    }
    lines = [f"{name}={value}" for name, value in settings.items()]
    lines += [
        f"NodeName={host} NodeAddr=127.0.0.1 CPUs={cores} State=UNKNOWN",
        f"PartitionName=all Nodes={host} Default=YES",
    ]
    (folder / "state").mkdir()
    (folder / "spool").mkdir()
    path = folder / "slurm.conf"
    path.write_text("\n".join([*lines, ""]), encoding="ascii")
    return path


@contextlib.contextmanager
def _munged(folder: Path, environ: Mapping[str, str]) -> Iterator[None]:
    paths = {
        "key-file": "munge.key",
        "socket": "munge.socket",
        "pid-file": "munge.pid",
        "log-file": "munge.log",
        "seed-file": "munge.seed",
    }
    words = ["--foreground", "--force", *(f"--{name}={folder / path}" for name, path in paths.items())]
    with _daemon("munged", words, folder, environ):
        _until((folder / "munge.socket").exists, "munged", folder)
        yield


@contextlib.contextmanager
def _daemon(name: str, words: list[str], folder: Path, environ: Mapping[str, str]) -> Iterator[None]:
    with (folder / f"{name}.out").open("wb") as out:
        started = subprocess.Popen(  # noqa: S603 - a program of Slurm, with paths of this run
            [program(name) or name, *words], stdin=subprocess.DEVNULL, stdout=out, stderr=out, env=environ
        )
        try:
            yield
        finally:
            started.terminate()
            try:
                started.wait(STOP)
            except subprocess.TimeoutExpired:
                started.kill()
                started.wait()


def _ask(name: str, *words: str, environ: Mapping[str, str]) -> str:
    """Returns the output of a command of Slurm; empty where it fails."""
    done = subprocess.run(  # noqa: S603 - a program of Slurm
        [program(name) or name, *words], env=environ, capture_output=True, text=True, check=False, timeout=60
    )
    return done.stdout.strip() if done.returncode == 0 else ""


def _until(reached: Callable[[], bool], name: str, folder: Path) -> None:
    end = time.monotonic() + START
    while not reached():
        if time.monotonic() > end:
            logs = sorted(folder.glob("*.out")) + sorted(folder.glob("*.log"))
            last = (
                f"{log.name}: {line}" for log in logs for line in log.read_text(errors="replace").splitlines()[-10:]
            )
            raise ClusterError("\n".join([f"{name} does not answer after {START:.0f} s", *last]))
        time.sleep(0.2)


def _cancel(environ: Mapping[str, str]) -> None:
    """End all jobs: their processes would outlive slurmd."""
    _ask("scancel", f"--user={getpass.getuser()}", environ=environ)
    with contextlib.suppress(ClusterError):
        wait(environ, STOP)


def _adopt() -> None:
    """Become the parent of what daemons leave behind, such as slurmd's process of each job."""
    ctypes.CDLL(None).prctl(36, 1)  # PR_SET_CHILD_SUBREAPER of <linux/prctl.h>


def _end_orphans() -> None:
    """End what is left of the daemons, and of the jobs."""
    with contextlib.suppress(ChildProcessError):  # there is none any more
        while True:
            for child in Path("/proc/self/task").glob("*/children"):
                for word in child.read_text(encoding="ascii").split():
                    os.kill(int(word), signal.SIGKILL)
            os.waitpid(-1, 0)


def main() -> int:
    """Run a command on the cluster, and wait for the jobs that it submits."""
    parser = argparse.ArgumentParser(description="A Slurm cluster of this machine, for one command and its jobs.")
    parser.add_argument(
        "--limit", type=float, default=600.0, metavar="SECONDS", help="time that jobs may take (default 600)"
    )
    parser.add_argument("command", nargs=argparse.REMAINDER, help="such as: bash slurm-array.sh --accel-device=cpu")
    given = parser.parse_args()
    if not given.command:
        parser.error("expected a command that submits jobs")
    _adopt()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # stops the daemons as it unwinds
    try:
        with cluster() as environ:
            status = subprocess.run(given.command, env=environ, check=False).returncode  # noqa: S603 - user's command
            wait(environ, given.limit)
            return status
    except ClusterError as error:
        print(f"slurm_one_node: {error}", file=sys.stderr)
        return 1
    finally:
        _end_orphans()


if __name__ == "__main__":
    sys.exit(main())
