"""Makes docs/images/web*.png: a real daemon with jobs on a simulated host, in a real browser.

The jobs' users are those that /etc/passwd names for the uids below. The hour before is made up: in the
browser, curves up to what is used replace the daemon's answer to /v1/usage.
"""

from __future__ import annotations

import base64
import json
import math
import os
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from yunion_mps.core.units import rfc3339

from browser.chromium import Chromium, Page
from browser.png import with_palette
from browser.scene import Served
from integration.daemon_host import Daemon, eventually
from simhost import SimHost
from simhost.mps import StandIns

Json = dict[str, Any]

_GPUS = [
    {"kind": "h100", "virtual_number": 7},
    {"kind": "a100", "virtual_number": 4},
    {"kind": "l40s", "virtual_number": 3},
    {"kind": "l40s", "count": 2, "virtual_number": 4},
]
_LAST = "- path: /dev/dri/renderD130\n  type: NVIDIA_MPS\n  virtual_number: 3\n"
_UNITS = "- path: /dev/dri/renderD130\n  type: NVIDIA_MPS\n  virtual_number: 0\n  memory_unit: 1GiB\n"
ALICE, BOB, CAROL = 2001, 2002, 2003

#: The width of each picture, and whether the browser prefers dark.
PICTURES = {"web": (1280, False), "web-dark": (1280, True), "web-phone": (390, False)}


def main(folder: Path) -> None:
    with SimHost.create(_GPUS) as host, StandIns(host), Daemon(host) as daemon, ExitStack() as stack:
        file = host.root / "etc/yunion/host_container_device.yml"
        file.write_text(file.read_text().replace(_LAST, _UNITS))
        daemon.start().wait_ready()
        fill_with_jobs(daemon, stack)
        with Served(host) as served, Chromium() as browser:
            for name, (width, dark) in PICTURES.items():
                page = browser.page("about:blank", width=width, dark=dark)
                make_up_an_hour(browser, page)
                page.tell("Page.navigate", {"url": served.url})
                page.wait_text("whisper.py")
                page.wait("document.querySelectorAll('td .chart .line[d]').length > 3")
                page.wait("document.querySelectorAll('.cell-peak:not(:empty)').length === 10")
                (folder / f"{name}.png").write_bytes(with_palette(page.picture()))


def fill_with_jobs(daemon: Daemon, stack: ExitStack) -> None:
    """Some of everything: busy, idle, over its budget, out of a pool."""

    def job(user: int, request: str, mib: int, sm: int, *command: str) -> None:
        folder = daemon.host.root / "tmp"
        (folder / command[0]).write_text("import time\ntime.sleep(600)\n")
        as_user = {"user": user, "group": 0, "extra_groups": []}
        process = daemon.host.popen(["env", "python3", *command], cwd=folder, **as_user)
        stack.callback(process.communicate)
        stack.callback(process.kill)
        shown = Path(f"/proc/{process.pid}/cmdline")
        eventually(lambda: shown.read_bytes().startswith(b"python3\0"), "the job")
        os.seteuid(user)
        try:
            code, lease = daemon.ask("POST", "/v1/leases", f"holder.pid={process.pid}&{request}")
        finally:
            os.seteuid(0)
        assert code == 201, lease
        if mib:
            order = ["00:06.0", "00:07.0", "00:08.0"]
            daemon.host.gpus[order.index(lease["gpus"][0])].add_process(process.pid, mib, "M+C", sm)

    for gpu, load in zip(daemon.host.gpus, ((44, 58, 391), (54, 61, 287), (57, 66, 248))):
        gpu.load(*load)
    long = ["--trial", "17", "--data", "/srv/data/imagenet-2012/train"]
    job(ALICE, "devices=00:06.0-0", 9800, 12, "train.py", "--model", "resnet50", "--epochs", "90")
    job(ALICE, "devices=00:06.0-1", 11100, 14, "train.py", "--model", "vit-b16")
    job(BOB, "devices=00:06.0-2", 4100, 5, "serve.py", "--port", "8000")
    job(CAROL, "devices=00:06.0-3", 0, 0, "notebook.py")
    job(CAROL, "devices=00:06.0-4", 8200, 13, "sweep.py", *long)
    job(BOB, "devices=00:07.0-0", 21700, 24, "finetune.py", "--lora", "--rank", "16")
    job(CAROL, "devices=00:07.0-2", 6200, 9, "embed.py", "corpus/")
    job(ALICE, "devices=00:07.0-3", 9100, 21, "rerank.py", "--workers", "4")
    job(ALICE, "gpu=00:08.0&memory_mib=8192", 7400, 16, "infer.py", "--batch", "32")
    job(BOB, "gpu=00:08.0&memory_mib=16384", 12800, 34, "diffusion.py", "--steps", "30")
    job(BOB, "gpu=00:08.0&memory_mib=4096", 2900, 7, "whisper.py")


def make_up_an_hour(browser: Chromium, page: Page) -> None:
    """Have the browser show curves for the hour before now."""

    def answer(event: Json) -> None:
        if event["sessionId"] != page.session:
            return
        body = base64.b64encode(json.dumps(an_hour(event)).encode()).decode()
        number = event["params"]["requestId"]
        page.tell("Fetch.fulfillRequest", {"requestId": number, "responseCode": 200, "body": body})

    browser.answering["Fetch.requestPaused"] = answer
    page.tell("Fetch.enable", {"patterns": [{"urlPattern": "*/v1/usage*"}]})


def an_hour(event: Json) -> Json:
    del event
    ends = {
        "00:06.0-0": 9800, "00:06.0-1": 11100, "00:06.0-2": 4100, "00:06.0-4": 8200, "00:07.0-0": 21700,
        "00:07.0-2": 6200, "00:07.0-3": 9100, "00:08.0-m0": 7400, "00:08.0-m1": 12800, "00:08.0-m2": 2900,
    }  # fmt: skip
    devices = {name: memory_curve(place, mib) for place, (name, mib) in enumerate(ends.items())}
    gpus: dict[str, list[int]] = {}
    for name, curve_of_it in devices.items():
        gpu = name.rpartition("-")[0]
        gpus[gpu] = [a + b for a, b in zip(gpus.get(gpu, [0] * 60), curve_of_it)]
    return {
        "begin": rfc3339(time.time() - 3600), "step_s": 60, "polled": [True] * 60,
        "gpus": [{"addr": name, "memory_used_mib": used} for name, used in gpus.items()],
        "devices": [{"addr": name, "memory_used_mib": used} for name, used in devices.items()],
    }  # fmt: skip


def memory_curve(place: int, end_mib: int) -> list[int]:
    """From nothing at some minute, by and by to what is used now, with the wave of a training's batches."""
    start = (place * 17) % 45
    rise = [0.0 if minute < start else 1 - math.exp(-(minute - start) / 3) for minute in range(60)]
    wave = [1 - 0.12 * abs(math.sin(minute / (1.5 + place % 3))) for minute in range(59)]
    return [int(end_mib * up * share) for up, share in zip(rise, [*wave, 1.0])]


if __name__ == "__main__":
    main(Path(sys.argv[1]))
