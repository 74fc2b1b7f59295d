"""The web page of a host whose GPUs are shared in every way: MPS, time-slicing, MIG, and these on MIG."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from browser.chromium import Chromium, Page
from browser.scene import Scene, scene_on, sticks_out, texts_of_low_contrast
from simhost import SimHost

UNLIMITED = "--allow-unlimited"
#: The entries of five H100s, 00:06.0 to 00:0a.0.
WAYS = (
    4,
    "type: NVIDIA_GPU_SHARE\n  virtual_number: 3\n  time_slice: short",
    "mig: all-balanced",
    "mig: [3g.40gb, 3g.40gb]\n  virtual_number: 2",
    "type: NVIDIA_GPU_SHARE\n  mig: [3g.40gb, 3g.40gb]\n  virtual_number: 2",
)


@pytest.fixture(scope="module")
def scene() -> Iterator[Scene]:
    """A job on each GPU, and memory in use on a MIG instance; tests only look at it."""
    with SimHost.create([{"kind": "h100", "count": 5}]) as host:
        host.divide(*WAYS)
        with scene_on(host) as scene:
            scene.jobs.start("mps.py", device="00:06.0-0", mib=700)
            scene.jobs.start("sliced.py", options=["--gpu", "00:07.0", UNLIMITED], mib=900)
            big = next(one for one in host.gpus[2].mig_devices() if one.profile == "3g.40gb")
            job = scene.jobs.start("instance.py", device=f"00:08.0-g{big.gpu_instance}")
            host.gpus[2].add_process(job, 10240, on=(big.gpu_instance, big.compute_instance))
            scene.jobs.start("mps_on_mig.py", options=["--gpu", "00:09.0"])
            scene.jobs.start("sliced_on_mig.py", options=["--gpu", "00:0a.0", UNLIMITED])
            yield scene


def open_page(browser: Chromium, scene: Scene, width: int = 1280, *, dark: bool = False) -> Page:
    page = browser.page(scene.served.url, width=width, height=900, dark=dark)
    page.wait_text("sliced_on_mig.py", "#rows")
    page.wait_text("10240 of 40448", "#rows")
    page.wait_text("granted to", "#list")
    return page


def texts_of_rows(page: Page) -> dict[str, str]:
    """What each row of a GPU or an instance says below its name."""
    rows = "[...document.querySelectorAll('#busy .gpu')]"
    texts = f"{rows}.map((one) => ['.address', '.counts'].map((part) => one.querySelector(part).textContent))"
    return dict(page.ask(texts))


def test_each_gpu_and_instance_names_its_way_of_sharing(browser: Chromium, scene: Scene) -> None:
    page = open_page(browser, scene)
    shown = texts_of_rows(page)
    assert {address: text for address, text in shown.items() if "-g" not in address} == {
        "00:06.0": "1 in use, 3 free for root",
        "00:07.0": "1 in use, 2 free, time-slicing (short), not enforced",
        "00:08.0": "MIG mode",
        "00:09.0": "MIG mode",
        "00:0a.0": "MIG mode",
    }
    parts = {address.partition("-")[0]: text for address, text in shown.items() if "-g" in address}
    assert parts == {
        "00:08.0": "1 in use",
        "00:09.0": "1 idle, 1 free for root, MPS",
        "00:0a.0": "1 idle, 1 free, time-slicing, not enforced",
    }
    assert page.errors() == []


def test_idle_instances_are_folded_and_memory_counts_once(browser: Chromium, scene: Scene) -> None:
    page = open_page(browser, scene)
    page.wait_text("5 idle MIG instances, 7 devices free", "#idle")
    figures = page.wait_text("of 398 GiB", "#figures")
    assert "11.6 GiB" in figures
    assert "5 of 19" in figures


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", [320, 390, 768, 1280])
def test_it_fits_and_can_be_read_in_both_themes(
    browser: Chromium, scene: Scene, width: int, dark: bool
) -> None:
    page = open_page(browser, scene, width, dark=dark)
    assert sticks_out(page, width) == []
    page.ask("document.querySelector('#idle').open = true")
    assert sticks_out(page, width) == []
    assert texts_of_low_contrast(page) == []
