"""Prometheus and promtool: the machine's own, or those that scripts/setup has unpacked."""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

from integration.daemon_host import PATIENCE_S, eventually
from integration.gateway_host import free_port
from simhost.host import Closes

CHECKOUT = Path(__file__).resolve().parent.parent.parent
RULES = CHECKOUT / "etc/prometheus/yunion-mps.rules.yml"


def program(name: str) -> str:
    found = shutil.which(name) or str(CHECKOUT / ".prometheus/usr/bin" / name)
    assert Path(found).exists(), f"{name} is not there: run scripts/setup"
    return found


def promtool(*arguments: object, text: str = "") -> str:
    command = [program("promtool"), *map(str, arguments)]
    done = subprocess.run(command, input=text, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


class Prometheus(Closes):
    """One Prometheus that scrapes a port here; nothing of it is left at the end. A context manager."""

    def __init__(self, folder: Path, rules: Path, scraped: int, every: str = "500ms") -> None:
        """`rules` are watched, `scraped` is the port of the metrics, and both is done `every` so often."""
        self._folder = folder
        self._port = free_port()
        config = {
            "global": {"scrape_interval": every, "scrape_timeout": every, "evaluation_interval": every},
            "rule_files": [str(rules)],
            "scrape_configs": [
                {"job_name": "yunion-mps", "static_configs": [{"targets": [f"127.0.0.1:{scraped}"]}]}
            ],
        }
        (folder / "prometheus.yml").write_text(json.dumps(config))  # which is YAML as well
        self._log = folder / "prometheus.log"
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [
                    program("prometheus"),
                    f"--config.file={folder / 'prometheus.yml'}",
                    f"--storage.tsdb.path={folder / 'data'}",
                    f"--web.listen-address=127.0.0.1:{self._port}",
                    "--log.level=warn",
                ],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    def ask(self, path: str) -> Any:
        """What its API answers; None while it does not serve."""
        with contextlib.suppress(urllib.error.URLError, ConnectionError):
            where = f"http://127.0.0.1:{self._port}/api/v1/{path}"
            with urllib.request.urlopen(where, timeout=PATIENCE_S) as answer:
                return json.load(answer)["data"]
        assert self._process.poll() is None, self._log.read_text()
        return None

    def firing(self) -> dict[str, dict[str, str]]:
        """The annotations of the alerts that fire, by their name; the last one's if there are several."""
        alerts = (self.ask("alerts") or {"alerts": []})["alerts"]
        return {
            alert["labels"]["alertname"]: alert["annotations"]
            for alert in alerts
            if alert["state"] == "firing"
        }

    def wait_for(
        self, *names: str, perhaps: str = "", poll: Callable[[], object] = bool
    ) -> dict[str, dict[str, str]]:
        """Wait until just these alerts fire, and perhaps one more; return their annotations.

        `poll` is called before each look, to have the daemon notice a change of the GPUs at once.
        """

        def look() -> bool:
            poll()
            return set(self.firing()) - {perhaps} == set(names)

        eventually(look, f"{names}", trouble=lambda: str(self.firing()))
        return self.firing()

    def value(self, query: str) -> float | None:
        found = (self.ask(f"query?query={query}") or {"result": []})["result"]
        return float(found[0]["value"][1]) if found else None

    def close(self) -> None:
        self._process.kill()
        self._process.wait(PATIENCE_S)
