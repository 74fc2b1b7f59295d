"""The page's list of events in Node.js, with stand-ins for the page's elements."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yunion_mps

PAGE = Path(yunion_mps.__file__).parent / "gateway/page"
NODE = shutil.which("node")

pytestmark = pytest.mark.skipif(NODE is None, reason="Node.js is not installed")

#: Elements that remember their children and texts, and a daemon that gives `answers`, one after another.
_BEGIN = """
class Element {
  constructor() { this.children = []; this.textContent = ""; }
  get firstChild() { return null; }
  append(...added) { this.children.push(...added); }
  insertBefore(added) { this.children.push(added); }
  remove() {}
  setAttribute() {}
  toggleAttribute() {}
  addEventListener() {}
}
const elements = {};
globalThis.document = {
  createElement: () => new Element(),
  getElementById: (id) => (elements[id] ??= new Element()),
};
document.getElementById("event-pages").children = [new Element(), new Element(), new Element()];
const { Events } = await import("./events.js");
const answers = ANSWERS;
const asked = [];
const events = new Events(async (query) => {
  asked.push(query);
  const answer = answers.shift();
  if (answer.status) throw Object.assign(new Error("refused"), answer);
  return answer;
});
await events.begin();
const ids = (list) => list.map((one) => one.id);
"""


def event(number: int, severity: str = "info", rank: int = 4, count: int = 1) -> dict[str, Any]:
    return {
        "id": number, "severity": severity, "rank": rank, "count": count, "kind": "gpu", "subject": "a",
        "what": "b", "time": "2999-01-01T00:00:00Z", "last_time": "2999-01-01T00:00:00Z",
    }  # fmt: skip


def show(tmp_path: Path, answers: list[Any], script: str) -> Any:
    """Return the value that the script prints after the page has loaded the first events."""
    for name in ("events.js", "dom.js", "words.js"):
        shutil.copy(PAGE / name, tmp_path)
    (tmp_path / "package.json").write_text('{"type": "module"}')
    begin = _BEGIN.replace("ANSWERS", json.dumps(answers))
    (tmp_path / "main.js").write_text(f"{begin}\n{script}")
    done = subprocess.run([str(NODE), "main.js"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.stderr == ""
    return json.loads(done.stdout)


XID = event(1, "warning", 1)
FIRST = [{"events": [XID], "last": 1}, {"events": [XID], "last": 1}]


def test_what_users_cause_moves_no_xid_off_an_open_page(tmp_path: Path) -> None:
    followed = {"events": [event(number, "warning", 3) for number in range(2, 14)], "last": 13}
    script = f"events.add({json.dumps(followed)}); console.log(JSON.stringify(ids(events.severe)))"
    assert show(tmp_path, FIRST, script) == [13, 12, 11, 10, 9, 8, 7, 1]


def test_an_event_that_happened_again_is_shown_once_with_its_count(tmp_path: Path) -> None:
    followed = {"events": [event(1, "warning", 1, count=2), event(2)], "last": 3}
    shown = "[events.last, ...events.events.map((one) => [one.id, one.count]), ids(events.severe)]"
    script = f"events.add({json.dumps(followed)}); console.log(JSON.stringify({shown}))"
    assert show(tmp_path, FIRST, script) == [3, [2, 1], [1, 2], [1]]


def test_a_daemon_that_cannot_rank_events_still_has_its_events_shown(tmp_path: Path) -> None:
    listed = [{**XID}, event(2)]
    for answered in listed:
        del answered["rank"]
    answers = [{"events": listed, "last": 2}, {"status": 400}]
    script = "console.log(JSON.stringify([asked.length, ids(events.events), ids(events.severe)]))"
    assert show(tmp_path, answers, script) == [2, [2, 1], [1]]
