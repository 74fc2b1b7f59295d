"""The control plane of a real cluster: etcd, API server, scheduler and controllers, on free local ports.

with ControlPlane(folder) as cluster:
    cluster.create("/api/v1/namespaces/default/pods", {...})
    program = start(cluster.write_kubeconfig(path, token))
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import shutil
import ssl
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from integration.daemon_host import PATIENCE_S, eventually
from integration.gateway_host import free_port
from simhost.host import Closes

#: The environment variable with the folder of the programs.
ASSETS = "KUBERNETES_ASSETS"
NODE = "node-1"
#: Features that are tested, and not on by default before Kubernetes 1.36. Taints of devices stay off there.
FEATURES = "--feature-gates=DRAConsumableCapacity=true,ResourceHealthStatus=true"
#: Tokens of an administrator and of the node's kubelet.
ADMIN, KUBELET = "admin", "kubelet"
_TOKENS = f"""\
{ADMIN},admin,1,"system:masters"
{KUBELET},system:node:{NODE},2,"system:nodes"
"""
_KUBECONFIG = """\
apiVersion: v1
kind: Config
current-context: test
contexts: [{{name: test, context: {{cluster: here, user: user}}}}]
clusters:
- {{name: here, cluster: {{server: "https://127.0.0.1:{port}", certificate-authority: {authority}}}}}
users: [{{name: user, user: {{token: {token}}}}}]
"""

Object = dict[str, Any]


class ApiError(Exception):
    """The API server refused a request."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(f"{status}: {message}")
        self.status = status


class Program(Closes):
    """A program with its log, which can be killed and started again. A context manager."""

    def __init__(self, log: Path, command: Sequence[object]) -> None:
        self._log = log
        self._command = [str(word) for word in command]
        self.start()

    def start(self) -> None:
        with self._log.open("ab") as log:
            self.process = subprocess.Popen(
                self._command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(PATIENCE_S)

    def restart(self) -> None:
        self.kill()
        self.start()

    close = kill

    @property
    def log(self) -> str:
        """The last lines of the log."""
        return "\n".join(self._log.read_text().splitlines()[-30:])


class ControlPlane(Closes):
    def __init__(self, folder: Path) -> None:
        """`folder` is an empty directory."""
        self.assets = Path(os.environ[ASSETS])
        self._folder = folder
        self._port = free_port()
        self._authority = folder / "certificates/apiserver.crt"
        self._stack = contextlib.ExitStack()
        try:
            self._start()
        except BaseException:
            self.close()
            raise

    def _start(self) -> None:
        folder, key = self._folder, self._authority.with_suffix(".key")  # the API server creates both
        (folder / "tokens").write_text(_TOKENS)
        etcd, peers = (f"http://127.0.0.1:{free_port()}" for _ in range(2))
        self._run(
            "etcd",
            f"--data-dir={folder}/etcd",
            f"--listen-client-urls={etcd}",
            f"--advertise-client-urls={etcd}",
            f"--listen-peer-urls={peers}",
            "--unsafe-no-fsync",
        )
        self.api_server = self._run(
            "kube-apiserver",
            f"--etcd-servers={etcd}",
            "--bind-address=127.0.0.1",
            f"--secure-port={self._port}",
            f"--cert-dir={self._authority.parent}",
            "--service-cluster-ip-range=10.0.0.0/24",
            "--endpoint-reconciler-type=none",
            f"--token-auth-file={folder}/tokens",
            "--authorization-mode=Node,RBAC",
            "--service-account-issuer=https://cluster.test",
            f"--service-account-key-file={key}",
            f"--service-account-signing-key-file={key}",
            "--disable-admission-plugins=ServiceAccount",  # pods have no tokens
            FEATURES,
        )
        self._wait_ready()
        kubeconfig = self.write_kubeconfig(folder / "kubeconfig", ADMIN)
        shared = f"--kubeconfig={kubeconfig}", "--leader-elect=false", "--secure-port=0", FEATURES
        self._run("kube-scheduler", *shared)
        self._run("kube-controller-manager", *shared, "--node-monitor-grace-period=1h")

    def _run(self, name: str, *options: str) -> Program:
        log = self._folder / f"{name}.log"
        return self._stack.enter_context(Program(log, [self.assets / name, *options]))

    def start_api_server(self) -> None:
        """Start the API server after it was killed."""
        self.api_server.start()
        self._wait_ready()

    def _wait_ready(self) -> None:
        eventually(self._is_ready, "the API server", trouble=lambda: self.api_server.log)

    def _is_ready(self) -> bool:
        with contextlib.suppress(OSError, ApiError):
            self.request("GET", "/readyz")
            return True
        return False

    def close(self) -> None:
        self._stack.close()

    # -- its objects

    def write_kubeconfig(self, path: Path, token: str) -> Path:
        """Write a kubeconfig, and the API server's certificate next to it."""
        authority = path.with_name("ca.crt")
        shutil.copy(self._authority, authority)
        path.write_text(_KUBECONFIG.format(port=self._port, authority=authority.name, token=token))
        return path

    def kubectl(self, *words: str | Path) -> str:
        """What kubectl(1) prints as an administrator."""
        command = ["kubectl", f"--kubeconfig={self._folder}/kubeconfig", f"--cache-dir={self._folder}/cache"]
        done = subprocess.run(
            [*command, *words], capture_output=True, text=True, timeout=PATIENCE_S, cwd=self._folder
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    @property
    def minor_version(self) -> int:
        return int(self.get("/version")["minor"])

    def create(self, path: str, made: Object) -> Object:
        return self.request("POST", path, made)

    def get(self, path: str) -> Object:
        return self.request("GET", path)

    def patch(self, path: str, changes: Object) -> Object:
        return self.request("PATCH", path, changes)

    def delete(self, path: str, **query: int) -> None:
        """Delete an object; it may already be gone."""
        try:
            self.request("DELETE", f"{path}?{urlencode(query)}")
        except ApiError as error:
            if error.status != http.client.NOT_FOUND:
                raise

    def request(self, method: str, path: str, body: Object | None = None, token: str = ADMIN) -> Object:
        """Raises ApiError, OSError."""
        tls = ssl.create_default_context(cafile=str(self._authority))
        connection = http.client.HTTPSConnection("127.0.0.1", self._port, context=tls, timeout=PATIENCE_S)
        kind = "application/merge-patch+json" if method == "PATCH" else "application/json"
        headers = {"Authorization": f"Bearer {token}", "Content-Type": kind}
        data = json.dumps(body) if body else None
        with contextlib.closing(connection):
            connection.request(method, path, data, headers)
            response = connection.getresponse()
            answer = response.read().decode()
        if response.status >= http.client.BAD_REQUEST:
            raise ApiError(response.status, answer)
        return dict(json.loads(answer)) if answer.startswith("{") else {}
