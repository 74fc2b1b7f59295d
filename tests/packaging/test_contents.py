"""What the packages install, and what they say of themselves."""

from __future__ import annotations

import stat
import subprocess
import sys
from pathlib import Path

import pytest
from yunion_mps import __version__

from packages.versions import REQUIRED_MIB

from .conftest import ARCHITECTURES, DAEMON, KUBELET_PLUGIN, ROOT, Built, run

#: Where the families expect the same file in different places, and what only one of them has.
ELSEWHERE = {
    "/etc/default/yunion-mps-daemon": "/etc/sysconfig/yunion-mps-daemon",
    "/usr/share/zsh/vendor-completions/_yunion-mps": "/usr/share/zsh/site-functions/_yunion-mps",
}
ONLY_DEBIAN = ("/usr/share/doc/{}/changelog.Debian.gz", "/usr/share/lintian/overrides/{}")
PROGRAMS = {
    "/usr/bin/yunion-mps",
    "/usr/bin/yunion-mps-daemon",
    "/usr/bin/yunion-mps-kubelet-plugin",
    "/usr/lib/yunion-mps/maintain",
    *(
        f"/usr/libexec/yunion-mps/slurm-{hook}"
        for hook in ("prolog", "task-prolog", "epilog", "health-check")
    ),
}
EXPECTED = {
    "/usr/lib/systemd/system/yunion-mps-daemon.service",
    "/usr/lib/systemd/system/yunion-mps-gateway.path",
    "/usr/lib/systemd/system/yunion-mps-gateway.service",
    "/usr/lib/systemd/system-preset/90-yunion-mps.preset",
    "/usr/lib/sysusers.d/yunion-mps.conf",
    "/usr/lib/tmpfiles.d/yunion-mps.conf",
    "/usr/lib/tmpfiles.d/yunion-mps-directory.conf",
    "/usr/lib/yunion-mps/yunion_mps/gateway/page/index.html",
    "/usr/share/bash-completion/completions/yunion-mps",
    "/usr/share/fish/vendor_completions.d/yunion-mps.fish",
    "/usr/share/man/man1/yunion-mps.1.gz",
    "/usr/share/man/man5/yunion-mps-host.conf.5.gz",
    "/usr/share/man/man5/yunion-mps-host_container_device.yml.5.gz",
    "/usr/share/man/man8/yunion-mps-daemon.8.gz",
    "/usr/share/yunion-mps/grafana/yunion-mps.json",
    "/usr/share/yunion-mps/host.conf",
    "/usr/share/yunion-mps/host_container_device.yml",
    "/usr/share/yunion-mps/prometheus/yunion-mps.rules.yml",
    "/usr/share/doc/yunion-mps-daemon/copyright",
    "/usr/share/doc/yunion-mps-daemon/sbom.cdx.json",
}
OF_THE_PLUGIN = {
    "/usr/bin/yunion-mps-kubelet-plugin",
    "/usr/lib/systemd/system/yunion-mps-kubelet-plugin.service",
    "/usr/lib/systemd/system-preset/90-yunion-mps-kubelet-plugin.preset",
    "/usr/lib/yunion-mps/vendor-kubelet-plugin/h2/connection.py",
    "/usr/lib/yunion-mps/yunion_mps/kubernetes/service.py",
    "/usr/share/doc/yunion-mps-kubelet-plugin/copyright",
    "/usr/share/doc/yunion-mps-kubelet-plugin/sbom.cdx.json",
    "/usr/share/man/man8/yunion-mps-kubelet-plugin.8.gz",
    *(
        f"/usr/share/yunion-mps/{path.relative_to(ROOT / 'etc')}"
        for path in (ROOT / "etc/kubernetes").rglob("*")
        if path.is_file()
    ),
}


def test_both_formats_install_the_same_files(each: Built) -> None:
    of_deb = each.deb_files()
    only_debian = [name.format(each.package) for name in ONLY_DEBIAN]
    same = {ELSEWHERE.get(name, name): file for name, file in of_deb.items() if name not in only_debian}
    of_rpm = each.rpm_files()
    finders = {name: of_rpm.pop(name) for name in list(of_rpm) if name.endswith("/yunion-mps.pth")}
    if each.package == DAEMON:
        (of_debian,) = {name for name in same if name.endswith("/yunion-mps.pth")}
        assert len(finders) > 1, "one for each Python"
        assert set(finders.values()) == {same.pop(of_debian)}
    assert same == of_rpm


def test_no_file_is_in_both_packages(built: Built, plugin: Built) -> None:
    """A directory belongs to both, or is owned by the daemon's, on which the plugin's depends."""
    assert built.rpm_files().keys().isdisjoint(plugin.rpm_files())
    directories = [
        run("rpm", "-qp", "--qf", "[%{FILENAMES} %{FILEMODES:perms}\n]", one.rpm) for one in (built, plugin)
    ]
    owned = [{line for line in text.splitlines() if line.endswith("drwxr-xr-x")} for text in directories]
    assert all(owned)
    assert owned[0].isdisjoint(owned[1])


def test_the_packages_have_units_manuals_and_examples(built: Built, plugin: Built) -> None:
    assert set(built.rpm_files()) >= EXPECTED | PROGRAMS - OF_THE_PLUGIN | set(ELSEWHERE.values())
    assert set(plugin.rpm_files()) >= OF_THE_PLUGIN


def test_only_programs_are_executable_and_only_root_can_write(each: Built, unpacked: Path) -> None:
    for name, file in each.deb_files().items():
        assert file.owner == "root/root"
        assert file.mode == ("-rwxr-xr-x" if name in PROGRAMS else "-rw-r--r--")
    for path in unpacked.rglob("*"):
        if path.is_dir():
            assert stat.S_IMODE(path.stat().st_mode) == 0o755


def test_the_environment_file_is_the_only_file_in_etc(built: Built, plugin: Built) -> None:
    """Those in /etc/yunion are made where there are none: packaged, a removal would take Cloudpods' away."""
    assert [name for name in built.rpm_files() if name.startswith("/etc/")] == [
        "/etc/sysconfig/yunion-mps-daemon"
    ]
    assert [name for name in plugin.rpm_files() if name.startswith("/etc/")] == []
    configuration = run("rpm", "-qp", "--qf", "[%{FILENAMES} %{FILEFLAGS:fflags}\n]", built.rpm)
    assert "/etc/sysconfig/yunion-mps-daemon cn\n" in configuration  # %config(noreplace)
    assert run("dpkg-deb", "-I", built.deb, "conffiles") == "/etc/default/yunion-mps-daemon\n"


def test_the_installed_size_with_bytecode_is_small(unpacked: Path, tmp_path: Path) -> None:
    run("cp", "-a", f"{unpacked}/.", tmp_path)
    run(sys.executable, "-IS", "-m", "compileall", "-q", tmp_path / "usr/lib/yunion-mps")
    size = sum(path.stat().st_size for path in tmp_path.rglob("*") if path.is_file())
    assert size <= REQUIRED_MIB * 1024 * 1024


@pytest.mark.parametrize(
    ("packages", "libraries"),
    [
        ([DAEMON], ["click", "h11", "prometheus_client.samples", "pynvml", "yaml"]),
        ([DAEMON, KUBELET_PLUGIN], ["h2.connection"]),
    ],
    ids=["the daemon's package", "both packages"],
)
def test_the_packages_need_no_other_python_packages(
    built: Built, tmp_path: Path, packages: list[str], libraries: list[str]
) -> None:
    for package in packages:
        run("dpkg-deb", "-x", Built(built.directory, package).deb, tmp_path)
    library = tmp_path / "usr/lib/yunion-mps"
    modules = [
        str(path.relative_to(library).with_suffix("")).replace("/", ".")
        for path in (library / "yunion_mps").rglob("*.py")
        if path.name != "__main__.py"
    ]
    code = f"""
import importlib, sys
sys.path[:0] = {[str(library / name) for name in ("", "vendor", "vendor-kubelet-plugin")]!r}
for name in {modules!r}:
    importlib.import_module(name.removesuffix(".__init__"))
for name in {libraries!r}:
    print(sys.modules.get(name) or importlib.import_module(name))
"""
    found = run(sys.executable, "-B", "-IS", "-c", code).splitlines()
    assert len(found) == len(libraries)
    assert all(str(library / "vendor") in line for line in found)


def test_the_packages_have_a_higher_version_than_cloudpods(each: Built) -> None:
    """Its package has the daemon's name and versions such as 3.11: only an epoch makes ours an upgrade."""
    version = run("dpkg-deb", "-f", each.deb, "Version").strip()
    assert version == f"1:{__version__}"
    newer = ["dpkg", "--compare-versions", version, "gt", "999.0-24112208"]
    assert subprocess.run(newer, check=False).returncode == 0
    assert each.asked_rpm("%{EPOCH}:%{VERSION}-%{RELEASE}") == f"1:{__version__}-1"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("Package", "yunion-mps-daemon"),
        ("Depends", "libc6 (>= 2.17)"),
        (
            "Pre-Depends",
            "python3, python3 (>= 3.9) | python3.9 | python3.10 | python3.11 | python3.12 | python3.13",
        ),
        ("Provides", f"yunion-mps (= 1:{__version__})"),
        ("Conflicts", "yunion-mps"),
        ("Replaces", "yunion-mps"),
        ("Recommends", "systemd"),
    ],
)
def test_the_deb_declares_its_dependencies_and_replacements(built: Built, field: str, value: str) -> None:
    assert run("dpkg-deb", "-f", built.deb, field).strip() == value


def test_the_rpm_needs_a_python_and_basic_tools(built: Built) -> None:
    needed = {
        line
        for line in run("rpm", "-qp", "--requires", built.rpm).splitlines()
        if not line.startswith(("rpmlib(", "/bin/sh"))
    }
    tools = {"coreutils", "findutils", "grep", "sed", "util-linux"}
    assert needed - tools == {"python(abi) >= 3.9", "glibc >= 2.17"}
    assert f"yunion-mps = 1:{__version__}-1" in run("rpm", "-qp", "--provides", built.rpm)


def test_the_plugin_needs_exactly_its_version_of_the_daemon(plugin: Built) -> None:
    """They share modules."""
    depends = run("dpkg-deb", "-f", plugin.deb, "Depends").strip()
    assert depends == f"libc6 (>= 2.17), python3, yunion-mps-daemon (= 1:{__version__})"
    needed = set(run("rpm", "-qp", "--requires", plugin.rpm).splitlines())
    ours = {line for line in needed if not line.startswith(("rpmlib(", "/bin/sh"))}
    assert ours == {"glibc >= 2.17", f"yunion-mps-daemon = 1:{__version__}"}


def test_the_packages_name_the_processor_that_they_are_for(each: Built) -> None:
    assert run("dpkg-deb", "-f", each.deb, "Architecture").strip() == each.architecture
    assert each.asked_rpm("%{ARCH}") == ARCHITECTURES[each.architecture]


def test_lintian_finds_nothing(each: Built) -> None:
    done = subprocess.run(
        ["lintian", "--allow-root", "--fail-on", "error,warning", each.deb],
        check=False, capture_output=True, text=True,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, "")


def test_rpmlint_finds_nothing(each: Built) -> None:
    done = subprocess.run(
        ["rpmlint", "--config", ROOT / "packaging/rpmlint.toml", each.rpm],
        check=False, capture_output=True, text=True,
    )  # fmt: skip
    assert "0 errors, 0 warnings" in done.stdout, done.stdout
    assert done.returncode == 0
