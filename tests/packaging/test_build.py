"""The build: the same each time, from what the lock file names, whole, with a list of what is bundled."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from importlib.metadata import distributions
from pathlib import Path

import pytest
from yunion_mps import __version__

from packages.versions import build, copy_checkout

from .conftest import ARCHITECTURES, DAEMON, KUBELET_PLUGIN, ROOT, Built, run

#: The directories of bundled libraries below the root, and the packages that have them.
LIBRARIES = {
    DAEMON: "usr/lib/yunion-mps/vendor",
    KUBELET_PLUGIN: "usr/lib/yunion-mps/vendor-kubelet-plugin",
}
#: What ELF files say of the processor that they are for (e_machine).
MACHINES = {"amd64": 62, "arm64": 183}


@pytest.fixture(scope="module")
def libraries(each: Built, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of the libraries that a package bundles."""
    root = tmp_path_factory.mktemp("root")
    run("dpkg-deb", "-x", each.deb, root)
    return root / LIBRARIES[each.package]


def locked() -> dict[str, str]:
    """Name and version of each library in the lock file of what is imported."""
    text = (ROOT / "requirements/runtime.lock").read_text()
    found = dict(re.findall(r"^(\S+)==(\S+)", text, re.M))
    del found["colorama"]  # which is for Windows
    return found


def normalized(name: str) -> str:
    return re.sub("[-_.]+", "-", name).lower()


def test_two_builds_are_identical(built: Built, tmp_path: Path) -> None:
    """The second is of a copy in another place, by another user's habits, at another time of its files."""
    copy, again, scratch = (tmp_path / name for name in ("another place", "dist", "scratch"))
    copy_checkout(copy)
    for path in copy.rglob("*"):
        os.utime(path, (1_000_000_000, 1_000_000_000), follow_symlinks=False)
    scratch.mkdir()
    before = os.umask(0o077)
    try:
        build(copy, again, {
            "TMPDIR": str(scratch), "TZ": "Pacific/Chatham", "LC_ALL": "C", "PYTHONHASHSEED": "7",
            "COLUMNS": "40", "YUNION_MPS_LOG_LEVEL": "debug", "YUNION_MPS_ROOT": "/x",
        })  # fmt: skip
    finally:
        os.umask(before)
    changes = run("git", "-C", ROOT, "status", "--porcelain")
    since = f"files that are not committed may have changed since the first build:\n{changes}"
    assert hashes(again) == hashes(built.directory), since if changes else "the copy's place, time or user"
    assert list(scratch.iterdir()) == []
    assert {path.stat().st_mode & 0o777 for path in built.directory.rglob("*") if path.is_file()} == {0o644}


def hashes(directory: Path) -> dict[str, str]:
    """The hash of each file by its path, also of those in the repository."""
    found = {}
    for path in directory.rglob("*"):
        if path.is_file():
            found[str(path.relative_to(directory))] = hashlib.sha256(path.read_bytes()).hexdigest()
    return found


def test_the_checksums_are_those_of_all_other_files(built: Built) -> None:
    sums = built.directory / "SHA256SUMS"
    lines = {}
    for line in sums.read_text().splitlines():
        digest, _, name = line.partition("  ")
        lines[name] = digest
    beside = {path.name for path in built.directory.iterdir() if path.is_file()} - {sums.name}
    assert lines == {name: digest for name, digest in hashes(built.directory).items() if name in beside}
    assert list(lines) == sorted(lines)


def test_the_lock_file_lists_the_same_libraries_for_every_python() -> None:
    """Otherwise the Python that runs the build would determine what is bundled."""
    text = (ROOT / "requirements/runtime.lock").read_text()
    assert set(re.findall(r"^\S+==\S+ ;(.+?) *\\?$", text, re.M)) == {" sys_platform == 'win32'"}


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_the_packages_bundle_the_libraries_of_the_lock_file(
    built: Built, tmp_path: Path, architecture: str
) -> None:
    bundled = []
    for package, directory in LIBRARIES.items():
        run("dpkg-deb", "-x", Built(built.directory, package, architecture).deb, tmp_path)
        for library in distributions(path=[str(tmp_path / directory)]):
            bundled.append((normalized(library.metadata["Name"]), library.version))
    assert sorted(bundled) == sorted(locked().items())


def test_libraries_are_bundled_whole_and_nothing_else_is(libraries: Path) -> None:
    recorded = {}
    for library in distributions(path=[str(libraries)]):
        for file in library.files or []:
            recorded[str(file)] = file.hash.value if file.hash else None
    assert recorded
    files = {str(path.relative_to(libraries)): path for path in libraries.rglob("*") if path.is_file()}
    assert set(files) == set(recorded)
    for name, path in files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(path.read_bytes()).digest()).decode().rstrip("=")
        assert recorded[name] in (digest, None), name  # RECORD does not have its own hash


def test_compiled_libraries_fit_every_python_and_the_processor(each: Built, libraries: Path) -> None:
    for tags in libraries.glob("*.dist-info/WHEEL"):
        for tag in re.findall(r"^Tag: (.+)$", tags.read_text(), re.M):
            assert re.fullmatch(r"(py2-none-any|py3-none-any|cp3[6-9]-abi3-\w+)", tag), tags
    for path in libraries.rglob("*.so*"):
        assert path.name.endswith(".abi3.so")
        assert int.from_bytes(path.read_bytes()[18:20], "little") == MACHINES[each.architecture], path


@pytest.mark.parametrize(
    ("wheel", "content", "refusal"),
    [
        (
            "a-1-cp311-cp311-linux_x86_64.whl",
            "a.py",
            "is for one version of Python only, so it cannot be bundled",
        ),
        ("a-1-py3-none-any.whl", "a-1.data/scripts/a", "installs files elsewhere: a-1.data/scripts/a"),
    ],
)
def test_a_library_that_cannot_be_bundled_whole_is_refused(
    tmp_path: Path, wheel: str, content: str, refusal: str
) -> None:
    with zipfile.ZipFile(tmp_path / wheel, "w") as archive:
        archive.writestr(content, "")
    code = "import sys; from package_build.bundle import unpack; unpack(*sys.argv[1:])"
    command: list[str | Path] = [sys.executable, "-c", code, tmp_path / wheel, tmp_path / "unpacked"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "scripts/lib")}
    done = subprocess.run(command, check=False, capture_output=True, text=True, env=environment)
    assert (done.returncode, done.stderr) == (1, f"package: {wheel} {refusal}\n")


def test_each_bundled_library_has_its_licence(libraries: Path) -> None:
    for library in distributions(path=[str(libraries)]):
        name = normalized(library.metadata["Name"])
        if name == "nvidia-ml-py":
            licence = (libraries / "pynvml.py").read_text()[:2000]
        else:
            (file, *_) = [file for file in library.files or [] if file.name.startswith("LICENSE")]
            licence = file.read_text()
        assert "opyright" in licence, name


def test_the_list_of_libraries_names_exactly_what_is_bundled(each: Built, libraries: Path) -> None:
    sbom = json.loads(each.sbom.read_text())
    assert (sbom["bomFormat"], sbom["metadata"]["component"]["name"]) == ("CycloneDX", each.package)
    assert sbom["metadata"]["component"]["version"] == __version__
    bundled = {(one.metadata["Name"], one.version) for one in distributions(path=[str(libraries)])}
    assert {(one["name"], one["version"]) for one in sbom["components"]} == bundled
    for one in sbom["components"]:
        assert one["purl"] == f"pkg:pypi/{normalized(one['name'])}@{one['version']}"
        assert one["licenses"]
    (needs,) = [one for one in sbom["dependencies"] if one["ref"] == "root-component"]
    assert sorted(needs["dependsOn"]) == sorted(one["bom-ref"] for one in sbom["components"])


def test_the_installed_list_is_the_published_one(each: Built, libraries: Path) -> None:
    root = libraries.parents[3]
    installed = root / f"usr/share/doc/{each.package}/sbom.cdx.json"
    assert installed.read_bytes() == each.sbom.read_bytes()


def test_the_sdist_builds_the_same_wheel(built: Built, tmp_path: Path) -> None:
    run("tar", "-C", tmp_path, "-xf", built.sdist)
    (source,) = tmp_path.iterdir()
    code = "from flit_core.buildapi import build_wheel; build_wheel('dist')"
    (source / "dist").mkdir()
    epoch_s = run("git", "-C", ROOT, "log", "-1", "--format=%ct").strip()
    environment = {**os.environ, "SOURCE_DATE_EPOCH": epoch_s}
    subprocess.run([sys.executable, "-c", code], check=True, cwd=source, env=environment)
    (wheel,) = (source / "dist").iterdir()
    assert wheel.read_bytes() == built.wheel.read_bytes()


def test_building_outside_a_checkout_fails_with_one_line(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "scripts/lib", tmp_path / "scripts/lib")
    above = {"PYTHONPATH": str(tmp_path / "scripts/lib"), "GIT_CEILING_DIRECTORIES": str(tmp_path.parent)}
    done = subprocess.run(
        [sys.executable, "-m", "package_build"],
        cwd=tmp_path, check=False, capture_output=True, text=True, env={**os.environ, **above},
    )  # fmt: skip
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert done.stderr.splitlines()[-1].startswith("package: ")
