"""What the project holds itself to, beyond what its linters check."""

from __future__ import annotations

import ast
import contextlib
import re
import shutil
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
import yaml
from yunion_mps.config import KEYS, load
from yunion_mps.core.errors import ConfigError
from yunion_mps.core.paths import Paths

CHECKOUT = Path(__file__).resolve().parent.parent


def test_no_test_has_a_name_of_more_than_70_characters() -> None:
    names = {
        name
        for path in CHECKOUT.glob("tests/**/*.py")
        for name in re.findall(r"^ *(?:async )?def (test_\w+)", path.read_text(), re.MULTILINE)
    }
    assert len(names) > 1000
    assert {name for name in names if len(name) > 70} == set()


def package_modules() -> Iterator[tuple[str, ast.Module]]:
    """The path and the syntax tree of each module of the package."""
    for path in sorted(CHECKOUT.glob("yunion_mps/**/*.py")):
        yield str(path.relative_to(CHECKOUT)), ast.parse(path.read_text())


def test_a_public_name_has_one_meaning_in_the_package() -> None:
    places: dict[str, list[str]] = {}
    for path, module in package_modules():
        for node in module.body:
            if not isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
                continue
            if not node.name.startswith("_") and node.name != "main":
                places.setdefault(node.name, []).append(path)
    assert len(places) > 1000
    assert {name: paths for name, paths in places.items() if len(paths) > 1} == {}


_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
#: How much of what is slow to read the package may have, all in all and per 1,000 lines.
_MOST_IN_ALL = {"more than five positional arguments": 15, "a starred argument among others": 15}
_MOST_PER_1000_LINES = {"comprehensions": 25.0, "nested comprehensions": 0.5}
_VAGUE = {"both", "done", "found", "gone", "had", "it", "kept", "made", "now", "one", "rest", "that", "who"}
_VAGUE |= {"told", "what"}
#: How many variables and parameters of functions may have a name that does not say what they hold.
_MOST_VAGUE_NAMES = 2


def slow_to_read(module: ast.Module) -> Iterator[str]:
    """What is slow to read in the module, once for each place."""
    inner: set[ast.AST] = set()
    for node in ast.walk(module):
        if isinstance(node, _COMPREHENSIONS):
            parts = [part for part in ast.walk(node) if isinstance(part, _COMPREHENSIONS) and part != node]
            yield "comprehensions"
            if node not in inner and (parts or len(node.generators) > 1):
                yield "nested comprehensions"
            inner.update(parts)
        elif isinstance(node, ast.Call):
            starred = [argument for argument in node.args if isinstance(argument, ast.Starred)]
            if len(node.args) - len(starred) > 5:
                yield "more than five positional arguments"
            elif starred and len(node.args) > 1:
                yield "a starred argument among others"


def vague_names(module: ast.Module) -> Iterator[str]:
    """The names of variables and parameters of functions that do not say what they hold."""
    inside: set[ast.AST] = set()
    for node in ast.walk(module):
        if isinstance(node, (*_Function, ast.Lambda)):
            inside.update(ast.walk(node))
    for node in inside:
        if isinstance(node, ast.arg) and node.arg in _VAGUE:
            yield node.arg
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and node.id in _VAGUE:
            yield node.id


def test_the_package_has_few_places_that_are_slow_to_read() -> None:
    counts: Counter[str] = Counter()
    lines = 0
    for path, module in package_modules():
        lines += len((CHECKOUT / path).read_text().splitlines())
        counts.update(slow_to_read(module))
    for what, most in _MOST_IN_ALL.items():
        assert counts[what] <= most, what
    for what, most_per_1000 in _MOST_PER_1000_LINES.items():
        assert counts[what] * 1000 <= most_per_1000 * lines, what


def test_what_is_slow_to_read_is_counted() -> None:
    calls = "f(1, 2, 3, 4, 5, 6); f(1, *x); f(*x)"
    comprehensions = "[a for a in b if c]; [a for b in c for a in b]; [[] for a in [b for b in c]]"
    code = f"{calls}; {comprehensions}"
    counts = Counter(slow_to_read(ast.parse(code)))
    assert counts == {
        "comprehensions": 4,
        "nested comprehensions": 2,
        "more than five positional arguments": 1,
        "a starred argument among others": 1,
    }


def test_variables_are_named_after_what_they_hold() -> None:
    names: list[str] = []
    for _, module in package_modules():
        names += vague_names(module)
    assert len(names) <= _MOST_VAGUE_NAMES


def test_vague_names_are_found() -> None:
    code = "class A:\n    what: str\ndef f(found, end):\n    now = done(end, one=1)\n    return now"
    assert sorted(vague_names(ast.parse(code))) == ["found", "now"]


#: Where an attribute of another library's object is set; ours have attributes of the same name.
_SET_IN_LIBRARIES = {
    ("yunion_mps/cli/root.py", "error.message"),
    ("yunion_mps/kubernetes/kubelet/grpc.py", "stream.buffer"),
}


def own_attributes(module: ast.Module) -> set[str]:
    """The attributes that the module's classes declare, or set in their own objects."""
    names: set[str] = set()
    for node in ast.walk(module):
        if isinstance(node, ast.ClassDef):
            for statement in node.body:
                if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
                    names.add(statement.target.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and is_own(node):
            names.add(node.attr)
    return names


def is_own(node: ast.Attribute) -> bool:
    return isinstance(node.value, ast.Name) and node.value.id == "self"


def set_from_outside(module: ast.Module) -> Iterator[str]:
    """The attributes that the module sets in objects of classes that are not its own, such as `x.y.z`."""
    own = own_attributes(module)
    in_new: set[ast.AST] = set()
    for node in ast.walk(module):
        if isinstance(node, ast.FunctionDef) and node.name == "__new__":
            in_new.update(ast.walk(node))
        if not isinstance(node, ast.Attribute) or isinstance(node.ctx, ast.Load) or node in in_new:
            continue
        if not is_own(node) and node.attr not in own:
            yield ast.unparse(node)


def test_no_object_is_wired_by_assignment_after_its_construction() -> None:
    """What an object works with is an argument of its constructor, or of the call that needs it."""
    modules = list(package_modules())
    ours: set[str] = set()
    for _, module in modules:
        ours |= own_attributes(module)
    assert len(ours) > 1000
    found = set()
    for path, module in modules:
        for name in set_from_outside(module):
            if name.rpartition(".")[2] in ours:
                found.add((path, name))
    assert found == _SET_IN_LIBRARIES


def test_attributes_that_are_set_from_outside_are_found() -> None:
    method = "    def f(self) -> None:\n        self.b = self.c.d = 1\n        self.c.b.x += 1\n"
    construction = "    def __new__(cls) -> A:\n        one.j = 1\n"
    code = f"class A:\n    a: int\n{method}{construction}one.a = one.b = one.e = 1\n"
    code += "one.f, [one.g] = 1, [2]\ndel one.h\none.i[0] = 1\n"
    assert sorted(set_from_outside(ast.parse(code))) == [
        "one.e", "one.f", "one.g", "one.h", "self.c.b.x", "self.c.d",
    ]  # fmt: skip


def test_docstrings_of_public_functions_say_which_error_they_raise() -> None:
    """A command's docstring is its help text: its exit statuses say it. Any check of doctor may skip."""
    errors = error_classes()
    assert {"YunionError", "NothingFreeError", "BadRequestError"} <= errors
    unsaid: list[str] = []
    for path in sorted(CHECKOUT.glob("yunion_mps/**/*.py")):
        module = path.relative_to(CHECKOUT / "yunion_mps")
        for function in public_functions(ast.parse(path.read_text())):
            docstring = ast.get_docstring(function) or ""
            raised = raised_by(function) & errors
            if is_check(function):
                raised.discard("SkipError")
            for error in raised:
                if error not in docstring and "aises" not in docstring and not is_command(function):
                    unsaid.append(f"{module}: {function.name} raises {error}")
    assert unsaid == []


def error_classes() -> set[str]:
    """Return the names of YunionError and of all its subclasses in the package."""
    bases: dict[str, set[str]] = {}
    for path in CHECKOUT.glob("yunion_mps/**/*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                bases[node.name] = {base.id for base in node.bases if isinstance(base, ast.Name)}
    errors = {"YunionError"}
    while more := {name for name, names in bases.items() if names & errors} - errors:
        errors |= more
    return errors


def public_functions(tree: ast.Module | ast.ClassDef) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in tree.body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and not node.name.startswith("_"):
            yield node
        elif isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            yield from public_functions(node)


def raised_by(function: ast.AST) -> set[str]:
    """Return the names in its `raise NAME(…)` and `raise NAME`, without those of functions inside."""
    names: set[str] = set()
    for node in ast.iter_child_nodes(function):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            continue
        if isinstance(node, ast.Raise):
            raised = node.exc.func if isinstance(node.exc, ast.Call) else node.exc
            if isinstance(raised, ast.Name):
                names.add(raised.id)
        names |= raised_by(node)
    return names


def is_command(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    decorators = [ast.unparse(decorator) for decorator in function.decorator_list]
    return any(re.match(r"\w+\.(command|group)\(", decorator) for decorator in decorators)


def is_check(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    return any(
        ast.unparse(decorator).startswith(("check(", "host_check(")) for decorator in function.decorator_list
    )


#: Names that begin with an underscore, but that Python or a library documents or leaves no other way to.
_NOT_OURS = {
    "_asdict": "of a NamedTuple",
    "_fields": "of a NamedTuple",
    "_replace": "of a NamedTuple",
    "_exit": "of os: the end of a forked child",
    "_Environ": "of os: the type of the environment",
    "_base_executable": "of sys: the interpreter outside the virtual environment",
    "_fields_": "of ctypes",
    "_length_": "of ctypes",
    "_type_": "of ctypes",
    "_nvmlGetFunctionPointer_cache": "of pynvml: the functions of a library that was loaded before",
}
_SETTERS = {"setattr", "delattr", "getattr", "hasattr", "patch", "object"}
_Function = (ast.FunctionDef, ast.AsyncFunctionDef)


def is_private(name: str) -> bool:
    """Whether it begins with one underscore, and is ours."""
    return name.startswith("_") and not name.startswith("__") and name not in _NOT_OURS


def programs_in(module: ast.Module) -> Iterator[ast.Module]:
    """The programs that the module has as texts and that use the package."""
    for node in ast.walk(module):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and "yunion_mps" in node.value:
            with contextlib.suppress(SyntaxError, ValueError):
                yield ast.parse(node.value)


def private_names_used(module: ast.Module) -> Iterator[str]:
    """Each private name of another object or module that the module uses."""
    for node in ast.walk(module):
        if isinstance(node, ast.Attribute) and is_private(node.attr):
            if ast.unparse(node.value) not in ("self", "cls", "super()"):
                yield ast.unparse(node)
        elif isinstance(node, ast.ImportFrom):
            yield from filter(is_private, [imported.name for imported in node.names])
        elif isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] in _SETTERS:
            yield from filter(is_private, names_in(node.args))


def names_in(arguments: Iterable[ast.expr]) -> Iterator[str]:
    """The last part of each text among the arguments, such as `name` of "module.name"."""
    for argument in arguments:
        if isinstance(argument, ast.Constant) and isinstance(argument.value, str):
            yield argument.value.rpartition(".")[2]


def private_members(owner: ast.ClassDef, *, with_hooks: bool = True) -> set[str]:
    """The private methods and attributes that a class has or uses; hooks only raise NotImplementedError."""
    members: set[str] = set()
    hooks: set[str] = set()
    for node in ast.walk(owner):
        if isinstance(node, _Function):
            members.add(node.name)
            if ast.unparse(node.body[-1]).startswith("raise NotImplementedError"):
                hooks.add(node.name)
        elif isinstance(node, ast.Attribute) and ast.unparse(node.value) in ("self", "super()"):
            members.add(node.attr)
    return {name for name in members if is_private(name) and (with_hooks or name not in hooks)}


def bases(owner: ast.ClassDef) -> list[str]:
    """The names of its base classes, without modules and type arguments."""
    return [re.sub(r"\[.*", "", ast.unparse(base)).rpartition(".")[2] for base in owner.bases]


def test_no_test_knows_a_private_name_of_another_object() -> None:
    """What is tested is what a caller gets: an answer, an event, a condition, a line of the log."""
    used: dict[str, list[str]] = {}
    for path in [*CHECKOUT.glob("tests/**/*.py"), *CHECKOUT.glob("scripts/**/*.py")]:
        module = ast.parse(path.read_text())
        names = list(private_names_used(module))
        for program in programs_in(module) if path != Path(__file__) else ():
            names += private_names_used(program)
        if names and not path.stem.endswith("_pb2"):  # generated
            used[str(path.relative_to(CHECKOUT))] = names
    assert used == {}


def test_no_test_knows_a_private_name_of_a_base_class_of_ours() -> None:
    """A subclass in the tests may fill in a hook of its base class, and knows nothing else of it."""
    classes: dict[str, ast.ClassDef] = {}
    for _, module in package_modules():
        for node in ast.walk(module):
            if isinstance(node, ast.ClassDef):
                classes[node.name] = node
    known: dict[str, set[str]] = {}
    for path in [*CHECKOUT.glob("tests/**/*.py"), *CHECKOUT.glob("scripts/**/*.py")]:
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.ClassDef):
                continue
            ancestors = [classes[name] for name in bases(node) if name in classes]
            for ancestor in ancestors:  # which grows
                ancestors += [classes[name] for name in bases(ancestor) if name in classes]
                shared = private_members(node) & private_members(ancestor, with_hooks=False)
                if shared:
                    known[f"{path.relative_to(CHECKOUT)}: {node.name} of {ancestor.name}"] = shared
    assert known == {}


def test_private_names_of_others_are_found() -> None:
    code = """
from yunion_mps.module import _imported, public
monkeypatch.setattr(module, "_replaced", 1)
monkeypatch.setattr("yunion_mps.module._named", 1)
other._attribute, found._replace(a=1), self._own, super()._own, other.__dict__, os._exit(1)
"""
    assert sorted(private_names_used(ast.parse(code))) == [
        "_imported",
        "_named",
        "_replaced",
        "other._attribute",
    ]


def test_programs_in_texts_are_found() -> None:
    module = ast.parse('write("from yunion_mps.host import threads\\nthreads._KEPT = 0")')
    (program,) = programs_in(module)
    assert list(private_names_used(program)) == ["threads._KEPT"]


#: Functions of ours that tests replace, with the reason.
_REPLACED = {
    # The locale of a program is that of its start, and pytest was started with any.
    "tests/unit/cli/conftest.py": {"yunion_mps.host.proc.environment_of"},
    # A process is between its control group and its end only for a moment, in the kernel.
    "tests/unit/service/test_permissions.py": {"yunion_mps.service.permissions.job_unit_of"},
}
#: Where methods are replaced on objects: of asyncio's loops, of the tests' own stand-ins, or of ours.
_METHODS_REPLACED = {
    "tests/kubernetes/test_api_server.py": "of the stand-in for the API server",
    "tests/kubernetes/test_pod_deletions.py": "of the stand-in for the API server",
    "tests/unit/gpus/test_reconciler.py": "of a kind of setting that only exists there",
    "tests/unit/service/test_reload.py": "of the fleet, for a job that begins right before servers end",
}


def parts_replaced(module: ast.Module) -> Iterator[str]:
    """Each function or class of ours that `setattr` or `patch` replaces; constants may be replaced."""
    ours: dict[str, str] = {}
    for node in ast.walk(module):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("yunion_mps"):
            for imported in node.names:
                ours[imported.asname or imported.name] = f"{node.module}.{imported.name}"
    for node in ast.walk(module):
        if not isinstance(node, ast.Call) or ast.unparse(node.func).rpartition(".")[2] not in _SETTERS:
            continue
        names = [ast.unparse(argument) for argument in node.args[:2]]
        target = ast.literal_eval(names[0]) if names and names[0].startswith(("'", '"')) else ""
        if not target and len(names) == 2 and names[0] in ours and names[1].startswith("'"):
            target = f"{ours[names[0]]}.{ast.literal_eval(names[1])}"
        if target.startswith("yunion_mps.") and not target.rpartition(".")[2].isupper():
            yield target


def test_no_test_replaces_a_part_of_ours() -> None:
    """Tests act with real parts, and replace only what is outside: clocks, system calls and the driver."""
    replaced: dict[str, set[str]] = {}
    methods: set[str] = set()
    for path in CHECKOUT.glob("tests/**/*.py"):
        name = str(path.relative_to(CHECKOUT))
        text = path.read_text()
        parts = set(parts_replaced(ast.parse(text)))
        if parts:
            replaced[name] = parts
        if re.search(r"# type: ignore\[.*method-assign", text):
            methods.add(name)
    assert replaced == _REPLACED
    assert methods == set(_METHODS_REPLACED)


def test_replaced_parts_are_found() -> None:
    code = """
from yunion_mps.service import leases as module
monkeypatch.setattr(module, "grant", None)
monkeypatch.setattr(module, "RETRY_S", 0.0)
monkeypatch.setattr(os, "mkdir", None)
mock.patch("yunion_mps.host.proc.environment_of")
"""
    found = ["yunion_mps.host.proc.environment_of", "yunion_mps.service.leases.grant"]
    assert sorted(parts_replaced(ast.parse(code))) == found


def test_no_test_asserts_how_long_something_took() -> None:
    """Beside load everything takes longer: what is meant is asserted, and waits are for conditions."""
    clock = r"\btime\.(?:time|monotonic|perf_counter)\(\)"
    took = re.compile(rf"assert .*(?:{clock} - |(?<!end_s )- {clock})")
    found = {str(path): took.findall(path.read_text()) for path in CHECKOUT.glob("tests/**/*.py")}
    assert {path: clocks for path, clocks in found.items() if clocks} == {}


def test_no_test_waits_with_select() -> None:
    """It fails on descriptors from 1024 on, and tests of crowds have more: `waiting.readable` polls."""
    waiting = {
        str(path) for path in CHECKOUT.glob("tests/**/*.py") if "select.select" + "(" in path.read_text()
    }
    assert waiting == set()


def test_only_the_storage_of_leases_reads_them_from_the_state_file() -> None:
    """It tolerates rows that it cannot read; a reader that compares their text does not."""
    sql = re.compile(r"\b(FROM|INTO|UPDATE|TABLE IF NOT EXISTS) lease\b", re.IGNORECASE)
    readers = set()
    for path in CHECKOUT.glob("yunion_mps/**/*.py"):
        if sql.search(path.read_text()):
            readers.add(str(path.relative_to(CHECKOUT / "yunion_mps")))
    assert readers == {"host/store.py", "leases/storage.py"}


def test_only_originals_has_the_records_of_what_gpus_had_before() -> None:
    imported = r"host.store import .*\b(FORMER_\w+|MIG)\b"
    named = r"\bformer_(compute_mode|time_slice|setting)\b"
    owners = set()
    for path in CHECKOUT.glob("yunion_mps/**/*.py"):
        if re.search(f"{imported}|{named}", path.read_text()):
            owners.add(str(path.relative_to(CHECKOUT / "yunion_mps")))
    assert owners == {"gpus/originals.py", "host/store.py"}


def test_only_the_inventory_uses_pynvml_and_only_process_spawns() -> None:
    users = {"pynvml": set(), "posix_spawn": set(), "subprocess": set()}  # type: dict[str, set[str]]
    for path in CHECKOUT.glob("yunion_mps/**/*.py"):
        text = path.read_text()
        for word, found in users.items():
            if re.search(
                rf"^\s*(import|from) {word}|os\.{word}\(|import_module\(\"{word}", text, re.MULTILINE
            ):
                found.add(str(path.relative_to(CHECKOUT)))
    assert users["pynvml"] == {"yunion_mps/inventory/driver.py"}
    assert users["posix_spawn"] == {"yunion_mps/host/processes.py"}
    assert users["subprocess"] == set()


def test_only_one_module_replaces_files() -> None:
    users = {path for path in CHECKOUT.glob("yunion_mps/**/*.py") if "os.replace(" in path.read_text()}
    others = {"host/store.py", "inventory/scan.py", "supervisor/event_log.py"}  # they put a file aside
    assert {str(path.relative_to(CHECKOUT / "yunion_mps")) for path in users} == {"host/files.py", *others}


def test_nothing_in_the_package_knows_of_the_simulated_host() -> None:
    for path in CHECKOUT.glob("yunion_mps/**/*.py"):
        assert "simhost" not in path.read_text().lower(), path


def test_the_documentation_explains_every_key_with_its_default() -> None:
    text = (CHECKOUT / "docs/configure.md").read_text()
    rows = dict(re.findall(r"^\| `(\w+)` \| `?([^`|]*?)`? \|", text, re.MULTILINE))
    words = {None: "not set", False: "false"}
    defaults = {name: words.get(key.default, str(key.default)) for name, key in KEYS.items()}
    assert {name: rows.get(name) for name in KEYS} == defaults


def test_the_documentation_explains_every_key_of_an_entry() -> None:
    text = (CHECKOUT / "docs/configure.md").read_text()
    explained = set(re.findall(r"^\| `(\w+): ", text, re.MULTILINE))
    keys = yaml.safe_load((CHECKOUT / "scripts/manual/keys.yml").read_text())["host_container_device.yml"]
    assert len(keys) > 10
    assert set(keys) - explained == {"path"}, "path has a section of its own"


@pytest.fixture
def examples() -> Iterator[Path]:
    """A root with the example files; its path is short, for a socket's address has to fit below it."""
    with tempfile.TemporaryDirectory(prefix="cfg.", dir="/tmp") as root:
        shutil.copytree(CHECKOUT / "etc", Path(root, "etc"))
        yield Path(root)


def test_the_example_files_explain_every_key_and_are_right(examples: Path) -> None:
    config, problems = load(Paths(str(examples)))
    assert problems == []
    assert config.enable_cuda_mps
    assert [(entry.path, entry.virtual_number) for entry in config.devices] == [("/dev/dri/renderD128", 4)]
    text = (CHECKOUT / "etc/yunion/host.conf").read_text()
    for name in KEYS:
        assert re.search(rf"^#?{name}: ", text, re.MULTILINE), name


def test_the_commented_defaults_of_the_example_are_valid(examples: Path) -> None:
    conf = examples / "etc/yunion/host.conf"
    conf.write_text(re.sub(r"^#(\w+: )", r"\1", conf.read_text(), flags=re.MULTILINE))
    config, problems = load(Paths(str(examples)))
    assert problems == []
    for name, key in KEYS.items():
        assert config.sources[name].line is not None
        if name != "enable_cuda_mps" and key.default is not None:
            assert getattr(config, name) == key.default, name


def test_systemd_accepts_the_unit(tmp_path: Path) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.fail("systemd-analyze is missing: scripts/setup installs it")
    unit = tmp_path / "yunion-mps-daemon.service"
    text = (CHECKOUT / "systemd/yunion-mps-daemon.service").read_text()
    assert "ExecStart=/usr/bin/yunion-mps-daemon\n" in text
    # A bad configuration ends the service for good; a stop outlasts a call of NVML that hangs.
    assert f"\nRestartPreventExitStatus={ConfigError([]).exit_code}\n" in text
    assert "\nTimeoutStopSec=90s\n" in text
    assert "\nExecReload=/usr/bin/yunion-mps reload\n" in text
    unit.write_text(re.sub(r"/usr/bin/yunion-mps(-daemon)?", shutil.which("true") or "", text))
    verify(unit)


@pytest.mark.parametrize("name", ["yunion-mps-gateway.service", "yunion-mps-gateway.path"])
def test_systemd_accepts_the_gateways_units(tmp_path: Path, name: str) -> None:
    for path in CHECKOUT.glob("systemd/yunion-mps-gateway.*"):
        text = path.read_text().replace("/usr/bin/yunion-mps", shutil.which("true") or "")
        (tmp_path / path.name).write_text(text)
    assert "\nPartOf=yunion-mps-daemon.service\n" in (tmp_path / name).read_text()
    assert "\nStartLimitIntervalSec=0\n" in (tmp_path / name).read_text(), "it starts with the daemon"
    daemon = (CHECKOUT / "systemd/yunion-mps-daemon.service").read_text()
    assert "\nWants=yunion-mps-gateway.path\n" in daemon
    verify(tmp_path / name)


def test_systemd_accepts_the_kubelet_plugin_s_unit(tmp_path: Path) -> None:
    unit = tmp_path / "yunion-mps-kubelet-plugin.service"
    text = (CHECKOUT / "systemd" / unit.name).read_text()
    assert "\nRestart=always\n" in text
    assert "Requires=" not in text
    # If it started after the kubelet, pods would be refused at boot (docs/decisions/0016).
    assert "\nBefore=kubelet.service\n" in text
    assert "\nTimeoutStartSec=10s\n" in text
    unit.write_text(text.replace("/usr/bin/yunion-mps-kubelet-plugin", shutil.which("true") or ""))
    verify(unit)


def test_the_gateways_memory_is_bounded_by_its_unit() -> None:
    assert "\nMemoryMax=256M\n" in (CHECKOUT / "systemd/yunion-mps-gateway.service").read_text()


def verify(unit: Path) -> None:
    result = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", str(unit)], capture_output=True, text=True, timeout=60
    )
    ours = [line for line in result.stderr.splitlines() if unit.name in line]
    assert ours == []
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize(("name", "most"), [("daemon", 4.0), ("gateway", 1.5), ("kubelet-plugin", 1.6)])
def test_the_units_sandboxes_are_rated_at_most(name: str, most: float) -> None:
    unit = CHECKOUT / f"systemd/yunion-mps-{name}.service"
    threshold = f"--threshold={most * 10:.0f}"
    command = ["systemd-analyze", "security", "--offline=yes", threshold, "--no-pager", str(unit)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stdout[-200:] + result.stderr


def test_lock_files_have_hashes_and_no_address() -> None:
    locks = list((CHECKOUT / "requirements").glob("*.lock"))
    assert {path.stem for path in locks} == {"build", "dev", "engines", "package", "runtime"}
    for path in locks:
        text = path.read_text()
        assert "--hash=sha256:" in text
        assert "://" not in text
        assert "index-url" not in text
