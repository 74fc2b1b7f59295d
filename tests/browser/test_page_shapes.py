"""The web page on a large host, on a phone, with a keyboard, and for those who do not see it."""

from __future__ import annotations

import http.client
import itertools
import socket
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest

from browser.chromium import Chromium, Page
from browser.scene import Scene, Served, scene_on, sticks_out
from integration.conftest import MakeDaemon, MakeHost
from integration.daemon_host import Daemon
from request_bodies import request_body
from simhost import SimHost

GPUS_64 = [
    {"kind": "h100", "count": 62, "virtual_number": 4},
    {"kind": "h100", "count": 2, "virtual_number": 48},
]
V100S = [{"kind": "v100", "virtual_number": 12}, {"kind": "v100", "virtual_number": 2}]


@pytest.fixture(scope="module")
def busy() -> Iterator[Scene]:
    """Two V100s, some of whose devices are in use, one over its budget; tests only look at it."""
    with SimHost.create(V100S) as host, scene_on(host) as scene:
        scene.jobs.start("train.py", ["--data", "/a/path/that/is/long/" * 8], device="00:06.0-3", mib=700)
        scene.jobs.start("notebook.py", device="00:06.0-4")
        scene.jobs.start("render.py", device="00:07.0-1", mib=9000)
        yield scene


def open_page(browser: Chromium, scene: Scene, width: int = 1280, height: int = 900) -> Page:
    page = browser.page(scene.served.url, width=width, height=height)
    page.wait_text("render.py", "#rows")
    page.wait_text("granted to", "#list")
    return page


def test_three_gpus_with_twelve_devices_in_use_fit_1400_pixels(
    make_host: MakeHost, browser: Chromium
) -> None:
    host = make_host([{"kind": "h100", "count": 3, "virtual_number": 4}])
    with scene_on(host) as scene:
        lease_by_name(scene.daemon, 11)
        scene.jobs.start("greedy.py", device="00:08.0-3", mib=30000)
        page = browser.page(scene.served.url)
        page.wait_text("Problem: ", "#problems")
        page.wait("document.querySelectorAll('#rows tr').length === 12")
        page.wait("document.querySelectorAll('#list li').length === 8")
        assert page.ask("document.documentElement.scrollHeight") <= 1400


def test_64_gpus_are_drawn_once_and_then_updated(
    make_host: MakeHost, make_daemon: MakeDaemon, browser: Chromium
) -> None:
    daemon = make_daemon(make_host(GPUS_64))
    daemon.configure(cuda_mps_scope="gpu")
    daemon.start().wait_ready()
    lease_by_name(daemon, 128, "&placement=spread")
    with Served(daemon.host) as served:
        page = browser.page(served.url)
        page.wait("document.querySelectorAll('.bar .part').length === 344")
        assert page.ask("document.querySelectorAll('.bar .free').length") == 216
        assert page.ask("document.documentElement.scrollHeight") < 2400
        page.ask("window.parts = [...document.querySelectorAll('.bar .part')]")
        lease_by_name(daemon, 1)
        page.wait("document.querySelectorAll('.bar .free').length === 215")
        assert page.ask("[...document.querySelectorAll('.bar .part')].every((one, n) => one === parts[n])")
        assert page.ask("document.documentElement.scrollWidth") == 1280
        assert page.errors() == []


def test_holders_and_events_are_paged_and_idle_gpus_folded(make_host: MakeHost, browser: Chromium) -> None:
    host = make_host([{"kind": "h100", "count": 8, "virtual_number": 12}])
    with scene_on(host) as scene:
        scene.jobs.start("train.py", device="00:0d.0-11", mib=700)
        scene.wait_measured("00:0d.0-11", 700)
        names = lease_by_name(scene.daemon, 19)
        page = browser.page(scene.served.url)
        assert page.wait_text("6 idle GPUs, 72 devices free", "#idle")
        assert not page.ask("document.querySelector('#idle').open")
        page.wait_text("1\u201315 of 20", "#who-pages")
        click(page, "#who-pages", "Next")
        page.wait_text("16\u201320 of 20", "#who-pages")
        page.wait("document.querySelectorAll('#rows .chart[aria-label*=\"0.7 GiB now\"]').length === 1")
        page.wait_text(f"granted to {names[-1]}", "#list")
        click(page, "#event-pages", "Older")
        page.wait_text(f"granted to {names[-9]}", "#list")
        (newer,) = lease_by_name(scene.daemon, 1)
        assert f"granted to {names[-9]}" in page.wait_text("10\u201317", "#events")
        click(page, "#event-pages", "Newer")
        click(page, "#event-pages", "Newer")
        page.wait_text(f"granted to {newer}", "#list")
        assert page.errors() == []


def test_leases_move_no_xid_off_the_first_page_of_events(make_host: MakeHost, browser: Chromium) -> None:
    host = make_host([{"kind": "h100", "virtual_number": 20}])
    with scene_on(host) as scene:
        page = browser.page(scene.served.url)
        page.wait_text("Events", "#events")
        host.gpus[0].xid(13)
        page.wait_text("Xid 13", "#list")
        assert page.ask("document.querySelector('#earlier').hidden")
        names = lease_by_name(scene.daemon, 18)
        page.wait_text(f"granted to {names[-1]}", "#list")
        page.wait_text("Xid 13", "#earlier")
        later = browser.page(scene.served.url)
        later.wait_text("Xid 13", "#earlier")
        click(later, "#event-pages", "Older")
        later.wait("document.querySelector('#earlier').hidden")
        assert [*page.errors(), *later.errors()] == []


def click(page: Page, where: str, name: str) -> None:
    buttons = f"[...document.querySelectorAll('{where} button')]"
    page.ask(f"{buttons}.find((one) => one.textContent === '{name}').click()")


def lease_by_name(daemon: Daemon, count: int, request: str = "") -> list[str]:
    """Give devices to so many, by name, over one connection; returns the names."""
    names = [f"job-{next(_NUMBERS)}" for _ in range(count)]
    connection = http.client.HTTPConnection("localhost")
    connection.sock = socket.socket(socket.AF_UNIX)
    connection.sock.connect(str(daemon.socket_path))
    with closing(connection):
        for name in names:
            words = f"holder.ttl_s=3600&holder.name={name}{request}"
            connection.request("POST", "/v1/leases", *request_body(words))
            answer = connection.getresponse()
            body = answer.read()
            assert answer.status == 201, body
    return names


_NUMBERS = itertools.count()


@pytest.mark.parametrize("width", [320, 390, 768, 1280, 2560])
def test_nothing_needs_sideways_scrolling(busy: Scene, browser: Chromium, width: int) -> None:
    assert sticks_out(open_page(browser, busy, width, 740), width) == []


PHONES = [320, 360, 390]
#: The least height of something to tap, in CSS pixels (WCAG 2.2, success criterion 2.5.5).
LEAST_PX = 44


@pytest.mark.parametrize("width", PHONES)
def test_what_is_tapped_on_a_phone_is_44_pixels_high(busy: Scene, browser: Chromium, width: int) -> None:
    page = open_page(browser, busy, width, 740)
    low = f"(one) => one.offsetHeight > 0 && one.offsetHeight < {LEAST_PX}"
    tapped = "[...document.querySelectorAll('main button, main summary, main input')]"
    assert page.ask(f"{tapped}.filter({low}).map((one) => one.outerHTML)") == []


@pytest.mark.parametrize("width", PHONES)
def test_no_state_is_cut_on_a_phone(busy: Scene, browser: Chromium, width: int) -> None:
    page = open_page(browser, busy, width, 740)
    states = "[...document.querySelectorAll('.cell-state')]"
    assert "over budget" in page.ask(f"{states}.map((one) => one.textContent)")
    cut = f"{states}.filter((one) => one.scrollWidth > one.clientWidth).map((one) => one.textContent)"
    assert page.ask(cut) == []


def test_the_tab_key_reaches_and_leaves_every_control(busy: Scene, browser: Chromium) -> None:
    page = open_page(browser, busy)
    forward = focused_names(page, shift=False)
    assert forward == [
        "GPUs", "Holders", "Events", "00:06.0", "00:07.0", "Filter", "Older",
    ]  # fmt: skip
    assert focused_names(page, shift=True) == forward[::-1]


def focused_names(page: Page, *, shift: bool) -> list[str]:
    """The names of what has the focus one after another, each of which must show that it has it."""
    page.ask("document.activeElement.blur()")
    names: list[str] = []
    for _ in range(30):
        page.press("Tab", shift=shift)
        name, visible = page.ask(_FOCUS)
        if name is None or name in names:
            return names
        assert visible, f"{name} does not show that it has the focus"
        names.append(name)
    return names


_FOCUS = """
(() => {
  const one = document.activeElement;
  if (one === document.body) return [null, true];
  const name = one.getAttribute("aria-label") ?? one.labels?.[0]?.textContent ?? one.textContent;
  const box = one.getBoundingClientRect();
  const inside = box.right > 0 && box.bottom > 0 && box.left < innerWidth;
  return [name, inside && getComputedStyle(one).outlineStyle !== "none"];
})()
"""


def test_the_keyboard_sets_and_clears_the_filter_by_gpu(busy: Scene, browser: Chromium) -> None:
    page = open_page(browser, busy)
    for _ in range(4):
        page.press("Tab")
    page.press("Enter")
    page.wait("document.querySelectorAll('#rows tr').length === 2")
    assert page.ask("[document.activeElement.id, document.activeElement.value]") == ["filter", "00:06.0"]
    page.type(" notebook")
    page.wait("document.querySelectorAll('#rows tr').length === 1")
    assert "1 of 3" in page.wait_text("1 of 3", "#shown")
    page.press("Escape")
    page.wait("document.querySelectorAll('#rows tr').length === 3")


def test_visual_states_have_text_for_screen_readers(busy: Scene, browser: Chromium) -> None:
    """What the browser tells a screen reader: landmarks, headings, a table, and each drawing in words."""
    page = open_page(browser, busy)
    page.wait("document.querySelectorAll('.chart[aria-label]').length >= 3")
    nodes = [one for one in page.tell("Accessibility.getFullAXTree")["nodes"] if not one["ignored"]]
    named: dict[str, list[Any]] = {}
    for one in nodes:
        named.setdefault(one["role"]["value"], []).append(one.get("name", {}).get("value"))
    host, *headings = named["heading"]
    assert host == page.ask("document.querySelector('#host').textContent")
    assert headings[:3] == ["Problems", "Usage", "GPUs"]
    assert headings[3:5] == ["Holders", "Events"]
    assert headings[5:] == ["00:06.0 Tesla V100-SXM2-16GB", "00:07.0 Tesla V100-SXM2-16GB"]
    assert {"Problems", "Usage", "GPUs", "Holders", "Events"} <= set(named["region"])
    assert named["table"] == ["Holders"]
    assert named["columnheader"] == [
        "Device", "State", "User", "Command", "PID", "Memory (MiB)", "Peak", "Util %", "SM %", "Age",
        "Last hour",
    ]  # fmt: skip
    assert named["searchbox"] == ["Filter"]
    assert "1 in use, 1 idle, 10 free for root" in named["image"]
    assert any(
        name.startswith("1 over budget, 1 free for root; 00:07.0-0: free, 8192 MiB; 00:07.0-1: root, over")
        for name in named["image"]
    )
    assert all(named["image"]), "no drawing is without words"


def test_states_differ_by_more_than_their_colour(busy: Scene, browser: Chromium) -> None:
    page = open_page(browser, busy)
    page.wait("document.querySelectorAll('.bar .part.used').length === 1")
    looks = page.ask(_LOOKS)
    assert len(looks) == len(set(looks)) == 5


_LOOKS = """
[...document.querySelectorAll(".key .part")].map((one) => {
  const { backgroundImage, borderStyle, borderWidth } = getComputedStyle(one);
  const filled = one.firstElementChild?.offsetHeight ?? 0;
  return [backgroundImage.replace(/rgba?\\([^)]*\\)/g, ""), borderStyle, borderWidth, filled].join(" ");
})
"""


def test_reduced_motion_disables_transitions(busy: Scene, browser: Chromium) -> None:
    page = open_page(browser, busy)
    duration = "getComputedStyle(document.querySelector('.bar .part b')).transitionDuration"
    assert page.ask(duration) == "0s"
    page.prefer(dark=False, reduced=False)
    assert page.ask(duration) != "0s"
