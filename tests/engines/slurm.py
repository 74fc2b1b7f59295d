"""A real Slurm cluster on simulated hosts: munged, slurmctld and a slurmd for each host, all on 127.0.0.1.

It runs without systemd, D-Bus and cgroups, from Debian's packages, which scripts/setup has unpacked. Its
hooks are ours, in the environment of the simulated host.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from engines.processes import kill_all_of, processes_of
from integration.daemon_host import PATIENCE_S, Daemon, eventually, is_running
from integration.gateway_host import free_port
from integration.lease_host import leases_of
from simhost import SimHost
from simhost.environment import CHECKOUT
from simhost.host import Closes

VERSIONS = ("22.05", "24.11")
NODE = "node1"
#: The hooks of slurm.conf, and the command of each.
HOOKS = {
    "Prolog": "prolog",
    "TaskProlog": "task-prolog",
    "Epilog": "epilog",
    "HealthCheckProgram": "health-check",
}
#: nobody: a user who is neither root nor in a group of ours.
USER = 65534


class Slurm(Closes):
    """A context manager for one cluster; call `start` once gres.conf and the nodes' lines are known.

    Its nodes are `node1` on `host`, `node2` on the next host, and so on.
    """

    def __init__(self, host: SimHost, version: str, *others: SimHost) -> None:
        self.host = host
        self.hosts = {f"node{number}": one for number, one in enumerate((host, *others), 1)}
        self.version = version
        self.installed = CHECKOUT / f".slurm-{version}/usr"
        self.folder = host.root / "slurm"
        self.folder.mkdir()
        self.env = {
            **host.env,
            "PATH": f"{self.installed}/bin:{host.env['PATH']}",
            "SLURM_CONF": str(self.folder / "slurm.conf"),
        }
        self._ports = [free_port() for _ in range(1 + len(self.hosts))]
        self._processes: dict[str, subprocess.Popen[bytes]] = {}

    # -- its configuration

    def configure(self, types: str, gres_of_nodes: Sequence[str], gres: str) -> None:
        """Write gres.conf and slurm.conf, with these types of gres and words of the nodes' lines."""
        (self.folder / "gres.conf").write_text(gres)
        for hook in HOOKS.values():
            self.write_hook(hook)
        port, *ports = self._ports
        settings: dict[str, object] = {
            "ClusterName": "test",
            "SlurmctldHost": "localhost(127.0.0.1)",
            "SlurmUser": "root",
            "AuthInfo": f"socket={self.folder}/munge.socket",
            "PluginDir": next(self.installed.glob("lib/*/slurm-wlm")),
            "StateSaveLocation": self.folder / "state",
            "SlurmctldPort": port,
            "SlurmdSpoolDir": self.folder / "spool-%n",
            "SlurmctldPidFile": self.folder / "slurmctld.pid",
            "SlurmdPidFile": self.folder / "slurmd-%n.pid",
            "ProctrackType": "proctrack/linuxproc",
            "TaskPlugin": "task/none",
            "JobAcctGatherType": "jobacct_gather/none",
            "SelectType": "select/cons_tres",
            "SelectTypeParameters": "CR_Core",
            "SchedulerParameters": "bf_interval=1,sched_interval=1,nohold_on_prolog_fail",
            "SlurmdParameters": "config_overrides",
            "GresTypes": types,
            "ReturnToService": 2,
            "KillWait": 1,
            "MinJobAge": 300,
            "HealthCheckNodeState": "ANY",
            "PrologFlags": "Alloc",
            "SlurmctldDebug": "debug",
            "SlurmdDebug": "debug",
            **{name: self.folder / hook for name, hook in HOOKS.items()},
        }
        text = "".join(f"{name}={value}\n" for name, value in settings.items())
        for name, port, words in zip(self.hosts, ports, gres_of_nodes):
            text += f"NodeName={name} NodeAddr=127.0.0.1 Port={port} CPUs=16 {words} State=UNKNOWN\n"
        text += f"PartitionName=all Nodes={','.join(self.hosts)} Default=YES MaxTime=INFINITE State=UP\n"
        (self.folder / "slurm.conf").write_text(text)
        if self.version != "22.05":
            (self.folder / "cgroup.conf").write_text("CgroupPlugin=disabled\n")

    def write_hook(self, hook: str, before: str = "", after: str = "") -> None:
        """Write a hook that runs the package's, with shell commands before and after it."""
        exports = "".join(f"export {name}='{self.env[name]}'\n" for name in ("PATH", "SLURM_CONF"))
        roots = (f"{node}) export YUNION_MPS_ROOT={host.root};;" for node, host in self.hosts.items())
        exports += f"case $SLURMD_NODENAME in {' '.join(roots)} esac\n"
        program = CHECKOUT / "libexec" / f"slurm-{hook}"
        run = f"{program} 2>>'{self.folder}/{hook}.log'\nstatus=$?\n{after}\nexit $status\n"
        if hook == "task-prolog":  # it runs as the job's user, who cannot write there
            run = f"exec {program}\n"
        self.write_script(hook, f"{exports}{before}\n{run}")

    def write_script(self, hook: str, script: str) -> None:
        """Make a shell script the hook, also while the former one runs."""
        new = self.folder / f"{hook}.new"
        new.write_text(f"#!/bin/sh\n{script}")
        new.chmod(0o755)
        new.rename(self.folder / hook)

    def install(self, *options: str) -> Slurm:
        """Configure Slurm with the lines that `gres-conf` prints."""
        gres, nodes = "", []
        for node, host in self.hosts.items():
            done = host.run(["yunion-mps", "slurm", "gres-conf", "--node", node, "--install", *options])
            assert done.returncode == 0, done.stderr
            (types,) = re.findall(r"^# GresTypes=(.*)$", done.stdout, re.MULTILINE)
            nodes += re.findall(rf"^# NodeName={node} (Gres=.*)$", done.stdout, re.MULTILINE)
            gres += done.stdout
        self.configure(types, nodes, gres)
        return self

    def set(self, **settings: object) -> None:
        """Change settings of slurm.conf while Slurm runs."""
        with (self.folder / "slurm.conf").open("a") as file:
            file.writelines(f"{name}={value}\n" for name, value in settings.items())
        self.ask("scontrol", "reconfigure")

    # -- its hooks

    def hold(self, hook: str, program: str = "", when: str = "begins") -> None:
        """Make the hook wait until `release`: at its begin or end, or before this program.

        `when` is "begins" or "has ended".
        """
        gate, held = self.folder / f"{hook}.gate", self.folder / f"{hook}.held"
        held.unlink(missing_ok=True)
        gate.touch()
        wait = f"[ ! -e {gate} ] || touch {held}\nwhile [ -e {gate} ]; do sleep 0.05; done\n"
        if program:
            wrapper = self.folder / f"{hook}.bin" / program
            wrapper.parent.mkdir(exist_ok=True)
            wrapper.write_text(f'#!/bin/sh\n{wait}exec {self.installed}/bin/{program} "$@"\n')
            wrapper.chmod(0o755)
            wait = f'PATH="{wrapper.parent}:$PATH"'
        self.write_hook(hook, *([wait] if when == "begins" else ["", wait]))

    def is_held(self, hook: str) -> bool:
        return (self.folder / f"{hook}.held").exists()

    def release(self, hook: str) -> None:
        (self.folder / f"{hook}.gate").unlink()
        self.write_hook(hook)

    def begin_health_check(self) -> subprocess.Popen[str]:
        """Run the health check now; Slurm itself never runs it, unless HealthCheckInterval is set."""
        return self.popen("env", f"SLURMD_NODENAME={NODE}", self.folder / "health-check", user=0)

    def check_health(self) -> None:
        with self.begin_health_check() as check:
            output, _ = check.communicate(timeout=PATIENCE_S)
        assert check.returncode == 0, output

    def check_health_a_minute_later(self) -> None:
        """Run the health check as it runs a minute after a Prolog has failed."""
        failure = self.host.root / "run/yunion-mps/slurm/failure"
        os.utime(failure, (failure.stat().st_mtime - 60,) * 2)
        self.check_health()

    # -- its life

    def start(self) -> Slurm:
        for name in ("state", *(f"spool-{node}" for node in self.hosts)):
            (self.folder / name).mkdir(exist_ok=True)
        self.start_munge()
        self.start_controller()
        for node in self.hosts:
            self.start_node(node)
        return self

    def start_munge(self) -> None:
        key = self.folder / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o600)
        words = [f"--{name}-file={self.folder}/munge.{name}" for name in ("key", "pid", "log", "seed")]
        program = self.installed / "sbin/munged"
        self._start(
            "munged", program, "--foreground", "--force", f"--socket={self.folder}/munge.socket", *words
        )
        eventually((self.folder / "munge.socket").exists, "munge's socket", trouble=self.logs)

    def start_controller(self) -> None:
        self._start("slurmctld", self.installed / "sbin/slurmctld", "-D")
        eventually(lambda: "UP" in self.peek("scontrol", "ping"), "slurmctld", trouble=self.logs)

    def start_node(self, node: str = NODE) -> None:
        name = "slurmd" if node == NODE else f"slurmd-{node}"
        stepd = self.installed / "sbin/slurmstepd"
        self._start(name, self.installed / "sbin/slurmd", "-D", "-N", node, "-d", stepd)
        is_up = ("idle", "mixed", "allocated", "completing")
        eventually(lambda: self.state(node) in is_up, node, trouble=self.logs)

    def wait_saved(self) -> None:
        """Wait until slurmctld has saved its state, which it does seconds after a change."""
        state = self.folder / "state/job_state"
        before = state.stat().st_mtime_ns if state.exists() else 0
        self.submit("true", "--hold")
        self.wait(lambda: state.exists() and state.stat().st_mtime_ns != before, "slurmctld's state")

    def kill(self, daemon: str) -> None:
        self._processes[daemon].kill()
        self._processes[daemon].wait()

    def logs(self) -> str:
        found = sorted(self.folder.glob("*.log"))
        return "\n".join(f"--- {path.name}\n{path.read_text(errors='replace')[-6000:]}" for path in found)

    def close(self) -> None:
        """Kill the daemons, and the jobs that they have started. At a SIGTERM, slurmctld takes 9 s."""
        for name in self._processes:
            self.kill(name)
        kill_all_of(self.folder)

    def kill_jobs(self) -> None:
        """Kill the processes that slurmd has started, as a reboot does."""
        daemons = {process.pid for process in self._processes.values()}
        for pid in processes_of(self.folder):
            if pid not in daemons and b"slurmctld" not in _command(pid):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
                eventually(lambda pid=pid: not is_running(pid), f"the end of PID {pid}")  # type: ignore[misc]

    def _start(self, name: str, *command: object) -> None:
        with (self.folder / f"{name}.log").open("ab") as log:
            words = [str(word) for word in command]
            env = {name: value for name, value in self.env.items() if name != "LD_LIBRARY_PATH"}
            self._processes[name] = subprocess.Popen(
                words, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=env, start_new_session=True
            )

    # -- its commands

    def run(self, *command: object, user: int = USER, **options: Any) -> subprocess.CompletedProcess[str]:
        """Run one of Slurm's commands, by default as a user; its output is captured."""
        return subprocess.run(
            self._argv(command), capture_output=True, text=True, timeout=120, **self._settings(user, options)
        )

    def popen(self, *command: object, user: int = USER, **options: Any) -> subprocess.Popen[str]:
        settings = self._settings(user, options)
        pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        process: subprocess.Popen[str] = subprocess.Popen(self._argv(command), **pipes, **settings)
        return process

    def _argv(self, command: Sequence[object]) -> list[str]:
        words = [str(word) for word in command]
        return [str(shutil.which(words[0], path=self.env["PATH"])), *words[1:]]

    def _settings(self, user: int, options: dict[str, Any]) -> dict[str, Any]:
        env = {name: value for name, value in self.env.items() if name != "LD_LIBRARY_PATH"}
        who = {} if user == 0 else {"user": user, "group": user, "extra_groups": []}
        return {"env": env, "cwd": "/", "stdin": subprocess.DEVNULL, **who, **options}

    def ask(self, *command: object) -> str:
        """The output of a command that root runs; fails if the command fails."""
        done = self.run(*command, user=0)
        assert done.returncode == 0, f"{command}: {done.stderr}"
        return done.stdout.strip()

    def peek(self, *command: object) -> str:
        """The output of a command that root runs; empty if it fails, as it does while slurmctld starts."""
        done = self.run(*command, user=0)
        return done.stdout.strip() if done.returncode == 0 else ""

    def srun(self, *words: object, **options: Any) -> subprocess.CompletedProcess[str]:
        return self.run("srun", *words, **options)

    def submit(self, script: str, *words: object, **options: Any) -> str:
        """Submit a batch script; return the job's id."""
        output = f"--output={self.folder}/out/%A_%a.txt"
        (self.folder / "out").mkdir(exist_ok=True)
        (self.folder / "out").chmod(0o777)
        command = ["sbatch", "--parsable", output, *words]
        done = self.run(*command, input=f"#!/bin/sh\n{script}\n", **{"stdin": None, **options})
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    @property
    def until_told(self) -> str:
        """The part of a batch script that waits for `tell_jobs`."""
        return f"while ! [ -e {self.folder}/go ]; do sleep 0.05; done"

    def tell_jobs(self) -> None:
        (self.folder / "go").touch()

    def output(self, job: str) -> str:
        found = sorted(self.folder.glob(f"out/{job}_*.txt"))
        return "".join(path.read_text() for path in found)

    def job_state(self, job: str) -> str:
        found = re.findall(r"JobState=(\w+)", self.peek("scontrol", "show", "job", job))
        return found[0] if found else ""

    def wait_job(self, job: str, *states: str) -> None:
        eventually(
            lambda: self.job_state(job) in states, f"{job} as {states}", trouble=lambda: self.trouble(job)
        )

    def start_again(self, job: str) -> None:
        """Start a requeued job soon; Slurm would start it after two minutes.

        It does not start within the same second, because slurmd would refuse it as still revoked.
        """
        self.wait_job(job, "PENDING")
        self.ask("scontrol", "update", f"JobId={job}", "StartTime=now+2")

    def end_by_time_limit(self, job: str) -> None:
        """Repeated: slurmctld rejects a time that has passed, and sets the end again after the Prolog."""

        def has_ended() -> bool:
            self.peek("scontrol", "update", f"JobId={job}", "EndTime=now")
            return self.job_state(job) == "TIMEOUT"

        eventually(has_ended, f"the time limit of {job}", trouble=lambda: self.trouble(job))

    def trouble(self, job: str) -> str:
        shown = [self.peek("scontrol", "show", *words) for words in (("job", job), ("node",))]
        return "\n".join([*shown, self.output(job), self.logs()])

    def state(self, node: str = NODE) -> str:
        """The node's state, as sinfo shows it: idle, mixed, drained…

        All nodes are listed, because for a single one, slurmctld does not update what is allocated.
        """
        listed = self.peek("sinfo", "--noheader", "--Node", "--format=%N %T").splitlines()
        return next((state.rstrip("*") for name, state in map(str.split, listed) if name == node), "")

    def reason(self) -> str:
        """The reason why the node is drained; none if it is not drained."""
        return self.peek("sinfo", "--noheader", f"--nodes={NODE}", "--format=%E")

    def is_completed(self, job: str) -> bool:
        """Whether the job has ended well; meanwhile, ends the drain of a slurmd that was killed."""
        if self.state().startswith("drain") and self.reason() == "Duplicate jobid":
            self.ask("scontrol", "update", f"NodeName={NODE}", "State=RESUME")
        return self.job_state(job) == "COMPLETED"

    def wait(self, look: Callable[[], Any], what: str) -> None:
        eventually(look, what, PATIENCE_S, lambda: f"{self.peek('scontrol', 'show', 'node')}\n{self.logs()}")


def wait_unused(slurm: Slurm, *daemons: Daemon) -> None:
    slurm.wait(lambda: not any(map(leases_of, daemons)), "the release of all devices")


def _command(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def environment(text: str) -> dict[str, str]:
    """The variables in the output of env(1)."""
    return dict(line.split("=", 1) for line in text.splitlines() if "=" in line)
