"""`scripts/gpu-check`: say what is missing, ask one question after another, end all that they started."""

from __future__ import annotations

import argparse
import datetime as dt
import multiprocessing
import os
import re
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence

from gpu_check import daemon, mps
from gpu_check.bench import Bench, Page, Question
from gpu_check.host import CHECKOUT, Host, ask_gpu, describe_host, find_host, find_missing, has_module
from gpu_check.processes import QuestionError, become_subreaper, duration, end_descendants, reap_orphans

_DESCRIPTION = """\
Answer questions about MPS on a real NVIDIA GPU. This changes no setting of the GPU, touches no control daemon
that it did not start, and ends everything that it started. Without a GPU, it says so and exits with 0."""

#: In the order of their worth: what lets jobs survive, limits that hold, what is shown. The first is whether
#: MPS works at all. A fault, which may leave the GPU in a bad state, comes after what matters most.
QUESTIONS = (
    mps.start,
    mps.killed_client,
    daemon.deaths,
    mps.killed_control,
    mps.killed_server,
    mps.terminate_client,
    mps.memory_limit,
    daemon.life,
    mps.thread_limit,
    mps.fault,
    mps.memory_by_uuid,
    mps.nvml,
    mps.shutdown_now,
    mps.quit_timeout,
    mps.sixty_clients,
    daemon.time_slicing,
)

#: How long a question that was told to stop may take to end what it started.
_GRACE_S = 8.0
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class _Interrupted(BaseException):
    """A signal came; the text is its number."""


def main(arguments: Sequence[str], questions: Sequence[Question] = QUESTIONS) -> int:
    """Run the command; returns its exit status."""
    options = _parse(arguments, questions)
    begun_s = time.monotonic()
    host = find_host(options.programs)
    missing = find_missing(host)
    for line in missing:
        print(f"gpu-check: missing: {line}", flush=True)
    if not host.libcuda:
        return 0
    directory = tempfile.mkdtemp(prefix="gc-")
    os.chmod(directory, 0o755)
    become_subreaper()
    for number in _SIGNALS:
        signal.signal(number, _interrupt)
    try:
        run = Run(host, directory, begun_s + options.minutes * 60)
        if run.begin(options.output, missing):
            run.ask_all([question for question in questions if question.name in options.only])
    except _Interrupted as error:
        print("gpu-check: interrupted; the answers so far have been written", flush=True)
        return 128 + int(str(error))
    finally:
        end_descendants()
        shutil.rmtree(directory, ignore_errors=True)
    return 0


def _interrupt(number: int, _: object) -> None:
    for each in _SIGNALS:
        signal.signal(each, signal.SIG_IGN)
    raise _Interrupted(number)


def _parse(arguments: Sequence[str], questions: Sequence[Question]) -> argparse.Namespace:
    names = [question.name for question in questions]
    parser = argparse.ArgumentParser("gpu-check", description=_DESCRIPTION)
    parser.add_argument("--output", metavar="DIR", default=f"{CHECKOUT}/docs/gpu", help="default: docs/gpu")
    parser.add_argument("--minutes", metavar="N", type=float, default=9.0, help="for everything; default: 9")
    parser.add_argument("--programs", metavar="DIR", default="", help="first place of NVIDIA's programs")
    parser.add_argument("--only", metavar="NAME[,NAME...]", default="", help=f"of {', '.join(names)}")
    options = parser.parse_args(arguments)
    options.only = options.only.split(",") if options.only else names
    for name in options.only:
        if name not in names:
            parser.error(f"unknown question: {name} (choose from: {', '.join(names)})")
    return options


class Run:
    """One run: its host, its directory, its results and its end (monotonic seconds)."""

    def __init__(self, host: Host, directory: str, end_s: float) -> None:
        self._host = host
        self._directory = directory
        self._end_s = end_s
        self._mps_works = True
        self._page = Page(f"{directory}/first")

    def begin(self, folder: str, missing: Sequence[str]) -> bool:
        """Begin the page with what is known of the machine; returns False if no client can use the GPU."""
        bench = Bench(self._host, self._directory, self._page, "first")
        client = bench.client("a client without MPS", "hold")
        words = client.describe_start(90)
        ready = client.events("ready")
        bench.close()
        if not ready:
            print(f"gpu-check: missing: a GPU that can be used: {words}", flush=True)
            return False
        name = ready[0]["name"]
        self._host = self._host._replace(multiprocessors=ready[0]["multiprocessors"])
        os.makedirs(folder, exist_ok=True)
        now = dt.datetime.now(dt.timezone.utc)
        slug = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
        self._page = Page(f"{folder}/{now:%Y-%m-%d-%H%M%S}-{slug}.md")
        self._page.write(f"# MPS on {name}, {now:%Y-%m-%d %H:%M:%S} UTC, by scripts/gpu-check")
        facts = [*describe_host(self._host), words]
        facts += [f"missing: {line}" for line in missing]
        self._page.write("\n".join(f"- {fact}" for fact in facts))
        print(f"gpu-check: {name}: writing {self._page.path}", flush=True)
        return True

    def ask_all(self, questions: Sequence[Question]) -> None:
        """Ask each question that can be asked, until the time is up."""
        for question in questions:
            self._page.write(f"## {question.name}: {question.text}")
            begun_s = time.monotonic()
            status = "interrupted"
            try:
                status = self._why_not(question) or self._ask(question, begun_s)
            finally:
                took = duration(time.monotonic() - begun_s)
                self._page.write(f"*{status}, {took}*")
                print(f"gpu-check: {took:>7} {question.name}: {status}", flush=True)
            if question.name == mps.start.name:
                self._mps_works = status == "answered"
        self._page.write(f"At the end: {' '.join(ask_gpu(self._host).values())}")

    def _why_not(self, question: Question) -> str:
        """Return why a question cannot be asked here and now; empty if it can."""
        if "programs" in question.needs and not (self._host.control and self._host.server):
            return "not asked: NVIDIA's programs for MPS are missing"
        if "mps" in question.needs and not self._mps_works:
            return f"not asked: {mps.start.name} has no good answer"
        if "daemon" in question.needs and not (has_module("pynvml") and self._host.gpu):
            return "not asked: pynvml or nvidia-smi is missing"
        if self._end_s - time.monotonic() < 2 * _GRACE_S:
            return "not asked: the time is up"
        return ""

    def _ask(self, question: Question, begun_s: float) -> str:
        """Ask one question, and return how that ended."""
        allowed_s = min(question.deadline_s, self._end_s - begun_s - _GRACE_S)
        bench = Bench(self._host, self._directory, self._page, question.name)
        process = multiprocessing.get_context("fork").Process(target=_answer, args=(question, bench))
        process.start()
        assert process.pid is not None
        try:
            while process.is_alive() and time.monotonic() < begun_s + allowed_s:
                process.join(0.05)
                reap_orphans(process.pid)
            if process.is_alive():
                return f"no full answer within {duration(allowed_s)}"
            return "answered" if process.exitcode == 0 else f"no full answer (status {process.exitcode})"
        finally:
            if process.is_alive():
                process.terminate()
                process.join(_GRACE_S - 2)
                process.kill()
            end_descendants()


def _answer(question: Question, bench: Bench) -> None:
    """Be the process of a question."""
    try:
        question.ask(bench)
    except QuestionError as error:
        bench.answer(f"**No further answer: {error}.**")
        sys.exit(1)
    except _Interrupted:
        sys.exit(2)
    except Exception:  # noqa: BLE001 - whatever it is, the next question is asked
        bench.show("**No further answer, because of a mistake in gpu-check**", traceback.format_exc())
        sys.exit(3)
    finally:
        bench.close()
