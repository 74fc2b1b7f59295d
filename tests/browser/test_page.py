"""The web page in a real browser, with a real daemon: what comes and goes, and what is wrong."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import yunion_mps

from browser.__main__ import PICTURES
from browser.chromium import Chromium
from browser.png import size_of
from browser.scene import Scene, Served, scene_on, texts_of_low_contrast
from integration.conftest import MakeDaemon, MakeHost
from simhost import SimHost

V100_BY_4 = [{"kind": "v100", "virtual_number": 4}]


@pytest.fixture
def scene(make_host: MakeHost) -> Iterator[Scene]:
    with scene_on(make_host(V100_BY_4)) as scene:
        yield scene


def test_the_page_shows_leases_taken_used_and_released_at_once(scene: Scene, browser: Chromium) -> None:
    page = browser.page(scene.served.url)
    page.wait_text("1 idle GPU, 4 devices free", "#idle")
    page.wait_text("No device is in use.")
    job = scene.jobs.start("train.py", ["--epochs", "3"], device="00:06.0-1", mib=2048)
    for words in ("00:06.0-1", "in use", "root", "python3 train.py --epochs 3", str(job), "2048 of 4096"):
        page.wait_text(words, "#rows")
    page.wait_text("1 in use, 3 free", "#busy")
    page.ask("window.bar = document.querySelector('.bar'); window.part = bar.children[1]; 0")
    assert page.ask("[part.className, part.textContent]") == ["part used", "root"]
    assert page.ask("part.querySelector('b').style.width") == "50%"
    page.wait_text("granted to python3 train.py", "#list")
    other = scene.jobs.start("serve.py", device="00:06.0-0")
    page.wait_text("1 in use, 1 idle, 2 free", "#busy")
    assert page.ask("bar === document.querySelector('.bar') && part === bar.children[1]"), "it is kept"
    scene.jobs.end(job)
    scene.jobs.end(other)
    page.wait_text("1 idle GPU, 4 devices free", "#idle")
    page.wait_text("ended, held by", "#list")
    assert page.errors() == []


def test_the_memory_used_on_a_lost_gpu_is_a_question_mark(scene: Scene, browser: Chromium) -> None:
    job = scene.jobs.start("train.py", device="00:06.0-1")
    page = browser.page(scene.served.url)
    page.wait_text("0 of 4096", "#rows")
    (gpu,) = scene.daemon.host.gpus
    gpu.lose()
    page.wait_text("? of 4096", "#rows")
    page.wait_text("? of 16 GiB", "#busy")
    gpu.restore()
    page.wait_text("0 of 4096", "#rows")
    scene.jobs.end(job)
    assert page.errors() == []


def test_problems_come_first_with_the_hint_of_status(scene: Scene, browser: Chromium) -> None:
    scene.jobs.start("train.py", device="00:06.0-0", mib=100)
    scene.jobs.start("greedy.py", device="00:06.0-1", mib=6000)
    page = browser.page(scene.served.url)
    shown = page.wait_text("Problem: 00:06.0-1 uses 6000 of 4096 MiB", "main").splitlines()
    assert shown[0] == "Problems"
    (hint,) = (line for line in shown if line.startswith("Hint"))
    told = scene.daemon.host.run(["yunion-mps", "status"]).stdout
    assert hint.partition(": ")[2] in told
    assert page.wait("document.title").startswith("(1) ")
    first, _ = page.ask("[...document.querySelectorAll('#rows tr')].map((one) => one.innerText)")
    assert "over budget" in first
    assert page.ask("document.querySelector('.bar .part.over').textContent") == "! root"


def test_the_last_hour_is_charted_for_host_gpu_and_device(scene: Scene, browser: Chromium) -> None:
    scene.jobs.start("train.py", device="00:06.0-2", mib=2048)
    scene.wait_measured("00:06.0-2", 2048)
    page = browser.page(scene.served.url)
    drawn = "[...document.querySelectorAll('.chart')].map((one) => one.getAttribute('aria-label') ?? '')"
    page.wait(f"{drawn}.length === 3 && {drawn}.every((words) => words.includes('2 GiB now, at most 2 GiB'))")


def test_compute_use_is_shown_beside_its_limit(scene: Scene, browser: Chromium) -> None:
    (gpu,) = scene.daemon.host.gpus
    gpu.load(44, 58, 291.4)
    job = scene.jobs.start("train.py", device="00:06.0-2")
    gpu.add_process(job, 2048, "M+C", 12)
    scene.wait_measured("00:06.0-2", 2048)
    page = browser.page(scene.served.url)
    page.wait_text("44 % · 58 °C · 291 W", "#busy")
    page.wait_text("44 %", "#figures")
    page.wait_text("12", "#rows .cell-util")
    page.wait_text("2048", "#rows .cell-peak")


def test_the_page_shows_its_age_while_the_daemon_is_down(scene: Scene, browser: Chromium) -> None:
    page = browser.page(scene.served.url, brief_pauses=True)
    page.wait_text("4 devices free")
    scene.daemon.kill()
    gone = page.wait_text("No answer since", "#gone")
    assert "the daemon is not running. Everything below is as of " in gone
    assert "systemctl status yunion-mps-daemon" in gone
    page.wait("/as of .*, \\d+s ago/.test(document.querySelector('#age').textContent)")
    assert page.ask("document.title").startswith("no answer ")
    assert "no answer" in page.ask("document.querySelector('#state').innerText")
    assert "4 devices free" in page.ask("document.body.innerText"), "what was known stays to be seen"
    scene.daemon.start().wait_ready()
    page.wait("document.querySelector('#gone').hidden")
    assert "ready" in page.ask("document.querySelector('#state').innerText")
    page.wait_text("The daemon answers again, after ", "#said")
    job = scene.jobs.start("again.py", device="00:06.0-3")
    page.wait_text("again.py", "#rows")
    scene.jobs.end(job)
    page.wait_text("ended, held by", "#list")


def test_ages_are_computed_with_the_hosts_clock(scene: Scene, browser: Chromium) -> None:
    scene.jobs.start("train.py", device="00:06.0-1")
    page = browser.page("about:blank")
    slow = "const real = Date.now; Date.now = () => real() + 7200e3;"
    page.tell("Page.addScriptToEvaluateOnNewDocument", {"source": slow})
    page.tell("Page.navigate", {"url": scene.served.url})
    page.wait_text("train.py", "#rows")
    age = page.ask("document.querySelector('#rows .cell-age').innerText")
    up = page.ask("document.querySelector('#about').innerText").rpartition("up ")[2]
    assert not [words for words in (age, up) if not re.fullmatch(r"(\d+m)?(\d+s)?", words)]


def test_minutes_without_a_poll_are_gaps_in_the_chart(scene: Scene, browser: Chromium) -> None:
    page = browser.page(scene.served.url)
    page.wait_text("4 devices free")
    drawn = """
      import("/chart.js").then(({ Series, Chart }) => {
        const chart = new Chart();
        const polled = [true, true, false, false, true, true];
        chart.show(new Series({ begin: 0, step: 60, polled }, [100, 100, null, null, 50, 0]), 100);
        return [chart.line.getAttribute("d"), chart.element.getAttribute("aria-label")];
      })
    """
    line, words = page.ask(drawn)
    assert line == "M0,2h0L1,2M4,50h0L5,98"
    assert words.startswith("Memory used in the last hour: 0 GiB now, at most 0.1 GiB (at ")


def test_the_page_waits_until_its_server_reports_a_hung_daemon(scene: Scene, browser: Chromium) -> None:
    page = browser.page("about:blank")
    noted = "window.timeouts = []; const real = AbortSignal.timeout.bind(AbortSignal);"
    noted += "AbortSignal.timeout = (ms) => { timeouts.push(ms); return real(ms); };"
    page.tell("Page.addScriptToEvaluateOnNewDocument", {"source": noted})
    page.tell("Page.navigate", {"url": scene.served.url})
    page.wait_text("4 devices free")
    assert min(page.ask("timeouts")) > 10_000, "its server waits for 10 s, and then says what is wrong"


def test_the_page_says_that_its_server_has_ended(scene: Scene, browser: Chromium) -> None:
    with Served(scene.daemon.host) as other:
        page = browser.page(other.url, brief_pauses=True)
        page.wait_text("4 devices free")
    assert "the web server does not answer" in page.wait_text("No answer since", "#gone")
    with Served(scene.daemon.host, other.port):
        page.wait("document.querySelector('#gone').hidden")


def test_an_open_page_reloads_after_an_upgrade_with_its_filter(
    scene: Scene, browser: Chromium, tmp_path: Path
) -> None:
    shutil.copytree(Path(yunion_mps.__file__).parent, tmp_path / "yunion_mps")
    words = tmp_path / "yunion_mps/gateway/page/words.js"
    words.write_text(words.read_text().replace("GiB", "gibibytes"))
    scene.jobs.start("train.py", device="00:06.0-2", mib=2048)
    with Served(scene.daemon.host) as before:
        page = browser.page(before.url, brief_pauses=True)
        page.wait_text("2 of 16 GiB", "#busy")
        page.ask("document.querySelector('#filter').focus()")
        page.type("train")
        page.wait_text("1 of 1", "#shown")
    page.wait_text("No answer since", "#gone")
    with Served(scene.daemon.host, before.port, PYTHONPATH=str(tmp_path)):
        page.wait_text("2 of 16 gibibytes", "#busy")
        assert page.ask("document.querySelector('#filter').value") == "train"
        assert page.wait_text("1 of 1", "#shown")


def test_a_command_line_is_inserted_as_text_only(scene: Scene, browser: Chromium) -> None:
    page = browser.page(scene.served.url, brief_pauses=True)
    page.wait_text("No device is in use")
    hostile = '<img src=x onerror="window.hacked=1"><script>window.hacked=2</script>'
    scene.jobs.start("evil.py", [hostile], device="00:06.0-0", mib=9999)
    assert hostile in page.wait_text("evil.py", "#rows")
    page.wait_text("evil.py", "#problems")
    assert page.ask("document.querySelectorAll('img').length + document.scripts.length") == 1
    assert page.ask("window.hacked ?? 0") == 0
    assert page.errors() == []


def test_a_host_that_offers_nothing_says_why(
    make_host: MakeHost, make_daemon: MakeDaemon, browser: Chromium
) -> None:
    daemon = make_daemon(make_host(V100_BY_4))
    daemon.write_host_conf({"enable_cuda_mps": False})
    daemon.start().wait_ready()
    with Served(daemon.host) as served:
        page = browser.page(served.url)
        page.wait_text("disabled", "#state")
        page.wait_text("Notice: MPS is disabled: enable_cuda_mps is false")
        page.wait_text("Hint: set enable_cuda_mps: true in host.conf")
        assert page.errors() == []


def with_pool(host: SimHost, reserved: str = "") -> SimHost:
    """Let the GPU of the host be leased in units of memory."""
    (host.root / "etc/yunion/host_container_device.yml").write_text(
        "devices:\n- path: /dev/dri/renderD128\n  type: NVIDIA_MPS\n"
        f"  virtual_number: 0\n  memory_unit: 1GiB\n{reserved}"
    )
    return host


def test_the_memory_of_a_reserved_pool_is_not_free(make_host: MakeHost, browser: Chromium) -> None:
    with scene_on(with_pool(make_host(V100_BY_4), "  reserved_for: kubernetes\n")) as scene:
        page = browser.page(scene.served.url)
        page.wait_text("16 GiB reserved", "#busy .counts")
        assert page.ask("document.querySelector('.bar .part.out').textContent") == "16 GiB reserved"
        assert "free in pools" not in page.wait_text("0 free", "#figures")
        assert page.ask("document.querySelector('#idle').hidden")


def test_a_pools_bar_shows_leased_and_free_memory(make_host: MakeHost, browser: Chromium) -> None:
    with scene_on(with_pool(make_host(V100_BY_4))) as scene:
        page = browser.page(scene.served.url)
        page.wait_text("16 GiB free", "#idle")
        scene.jobs.start("infer.py", options=["--gpu-mem", "4GiB"])
        page.wait_text("1 idle, 12 GiB free", "#busy")
        widths = page.ask("[...document.querySelectorAll('.bar .part')].map((one) => one.offsetWidth)")
        assert widths[1] == pytest.approx(3 * widths[0], rel=0.02)


def test_memory_of_mig_instances_is_not_counted_twice(
    make_host: MakeHost, make_daemon: MakeDaemon, browser: Chromium
) -> None:
    host = make_host([{"kind": "h100"}])
    host.divide("mig: [3g.40gb, 3g.40gb]")
    daemon = make_daemon(host).start().wait_ready()
    with Served(daemon.host) as served:
        page = browser.page(served.url)
        page.wait_text("2 idle MIG instances, 2 devices free", "#idle")
        page.wait_text("of 79.6 GiB", "#figures")
        assert page.errors() == []


@pytest.mark.parametrize("dark", [False, True])
def test_text_has_enough_contrast_in_light_and_dark_mode(scene: Scene, browser: Chromium, dark: bool) -> None:
    """WCAG 2.2, 1.4.3: a contrast of 4.5 to 1."""
    scene.jobs.start("train.py", device="00:06.0-0", mib=6000)
    scene.jobs.start("other.py", device="00:06.0-1", mib=100)
    page = browser.page(scene.served.url, dark=dark, brief_pauses=True)
    page.wait_text("other.py", "#rows")
    page.wait_text("Problem:")
    ground = page.ask("getComputedStyle(document.body).backgroundColor")
    assert (sum(int(one) for one in ground[4:-1].split(",")) < 150) == dark
    assert texts_of_low_contrast(page) == []
    scene.daemon.kill()
    page.wait("!document.querySelector('#gone').hidden")
    assert texts_of_low_contrast(page) == [], "what is shown is old, and to be read all the same"


def test_the_documents_have_desktop_phone_and_dark_screenshots() -> None:
    images = Path(__file__).parent.parent.parent / "docs/images"
    for name, (width, _) in PICTURES.items():
        picture = (images / f"{name}.png").read_bytes()
        assert size_of(picture)[0] == width
        assert len(picture) < 150 << 10
