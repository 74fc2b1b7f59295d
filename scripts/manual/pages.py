"""The manual pages: of the command, of the daemon, and of the two configuration files."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from inspect import cleandoc

import click
from yunion_mps.cli.root import cli
from yunion_mps.config import KEYS
from yunion_mps.core.paths import ROOT_VARIABLE, Paths
from yunion_mps.daemon.options import daemon_command
from yunion_mps.kubernetes import service as kubelet_plugin
from yunion_mps.kubernetes.options import KEYS as OPTION_KEYS
from yunion_mps.planning.environment import DEVICE_VARIABLE

from manual.keys import (
    Key,
    device_file_example,
    device_file_keys,
    device_keys,
    host_conf_example,
    host_keys,
    texts,
    written,
)
from manual.roff import Page

_PROGRAM = "yunion-mps"
#: What click takes for a paragraph whose lines stay as they are.
_KEPT = "\b\n"
_HELP_OPTION = ("-h, --help", "--help")

_WHO_MAY = """\
`yunion-mps` talks to `yunion-mps-daemon`(8) on its socket. Root and the members of the group `yunion-mps` may
list everything and manage their own leases; only root may change other users' leases and jobs, or reload the
daemon. The commands `config`, `doctor` and `completion` also work without the daemon."""
_ENVIRONMENT = {
    DEVICE_VARIABLE: """\
The default for DEVICE of `show` and `env`. A process that uses a device has this variable in its environment,
so inside a job it names the job's own device.""",
    ROOT_VARIABLE: """\
A directory that replaces / in every path, for tests and for inspecting an unpacked host.""",
}


def command_page(date: str) -> str:
    """The source of the page."""
    root = click.Context(cli, info_name=_PROGRAM, **cli.context_settings)
    (title, *prose), kept = _help(cli)
    made = Page(_PROGRAM, 1, date, title.rstrip("."))
    made.section("Synopsis")
    made.synopsis(_PROGRAM, " ".join(cli.collect_usage_pieces(root)))
    made.section("Description")
    for text in (*prose, _WHO_MAY):
        made.paragraph(text)
    _add_kept(made, kept)
    made.section("Options")
    for option, words in _options(root):
        made.term(f"`{option}`", words)
    made.section("Commands")
    made.paragraph("`yunion-mps COMMAND --help` prints the same text.")
    for context, names in _commands(root):
        _add_command(made, context, names)
    _add_statuses(made, cli)
    made.section("Environment")
    for variable, words in _ENVIRONMENT.items():
        made.term(f"`{variable}`", words)
    add_files(made, "host_conf", "socket")
    made.see_also(
        [
            "yunion-mps-daemon(8)",
            "yunion-mps-host.conf(5)",
            "yunion-mps-host_container_device.yml(5)",
            "nvidia-smi(1)",
            "nvidia-cuda-mps-control(1)",
        ]
    )
    return str(made)


def statuses(text: str) -> list[tuple[str, str]]:
    """Return each exit status with its meaning, from a program's help: `Exit status: 0 success; 1 …`."""
    listed = " ".join(text.partition("xit status:")[2].split())
    return [
        (number, words) for number, _, words in (part.strip().partition(" ") for part in listed.split(";"))
    ]


def _commands(parent: click.Context) -> Iterator[tuple[click.Context, list[str]]]:
    """Every command below `parent` that the help shows, with all its names; the first is its own."""
    group = parent.command
    assert isinstance(group, click.Group)
    names: dict[click.Command, list[str]] = {}
    for name in group.list_commands(parent):
        command = group.get_command(parent, name)
        assert command
        if not command.hidden:
            names.setdefault(command, []).append(f"{parent.command_path} {name}")
    for command, called in names.items():
        context = click.Context(command, info_name=called[0].rpartition(" ")[2], parent=parent)
        yield context, called
        if isinstance(command, click.Group):
            yield from _commands(context)


def _add_command(made: Page, context: click.Context, names: list[str]) -> None:
    command = context.command
    made.subsection(f"{', '.join(names)} {' '.join(command.collect_usage_pieces(context))}")
    prose, kept = _help(command)
    for text in prose:
        made.paragraph(text)
    for option, words in _options(context):
        if option not in _HELP_OPTION:
            made.term(f"`{option}`", words)
    _add_kept(made, kept)


def _options(context: click.Context) -> list[tuple[str, str]]:
    records = [parameter.get_help_record(context) for parameter in context.command.get_params(context)]
    return [record for record in records if record]


def _help(command: click.Command) -> tuple[list[str], list[str]]:
    """Return the help's paragraphs, and those of them in which click keeps the lines."""
    texts = re.split(r"\n\s*\n", cleandoc(command.help or ""))
    prose = [" ".join(text.split()) for text in texts if not text.startswith(_KEPT)]
    return prose, [text[len(_KEPT) :] for text in texts if text.startswith(_KEPT)]


def _add_kept(made: Page, texts: list[str]) -> None:
    for text in texts:
        title, _, rest = text.partition("\n")
        if title.endswith(":"):
            made.paragraph(title)
        made.verbatim((rest if title.endswith(":") else text).splitlines())


def daemon_page(date: str) -> str:
    """The source of the page."""
    told, words = daemon_command(), texts("daemon")
    made = _begun(told, date, "run NVIDIA MPS as a service", words["description"])
    for section in ("stop and reload", "signals", "environment"):
        made.section(section)
        _add_terms(made, words[section])
    add_files(made)
    _add_statuses(made, told)
    made.section("Examples")
    for title, lines in words["examples"].items():
        made.paragraph(title)
        made.verbatim(f"  {line}" for line in lines.splitlines())
    made.see_also(
        [
            "yunion-mps(1)",
            "yunion-mps-host.conf(5)",
            "yunion-mps-host_container_device.yml(5)",
            "nvidia-cuda-mps-control(1)",
            "systemctl(1)",
            "journalctl(1)",
        ]
    )
    return str(made)


_PLUGIN_FILE = """\
A YAML file with one key and value per line, read at the start. Every key is optional, and the file may be
missing. `yunion-mps-kubelet-plugin --check` prints every problem with its line."""


def kubelet_plugin_page(date: str) -> str:
    """The source of the page, which also documents the plugin's file."""
    told, words = kubelet_plugin.plugin_command(), texts("kubelet-plugin")
    made = _begun(told, date, "offer MPS devices to Kubernetes", words["description"])
    made.section("Configuration")
    made.paragraph(_PLUGIN_FILE)
    for name, key in OPTION_KEYS.items():
        made.term(f"`{name}`; default: {written(key.default)}", f"{key.help} {words['keys'][name]}".strip())
    made.section("Environment of containers")
    _add_terms(made, words["environment"])
    add_files(made, "kubelet_plugin", "socket", "device_plugins", "pod_resources")
    _add_statuses(made, told)
    made.see_also(["yunion-mps-daemon(8)", "yunion-mps-host_container_device.yml(5)", "yunion-mps(1)"])
    return str(made)


def _begun(program: click.Command, date: str, title: str, more: Iterable[str]) -> Page:
    """Begin the page of a program without commands; its description is the help, and `more`."""
    name = program.name or ""
    context = click.Context(program, info_name=name, **program.context_settings)
    made = Page(name, 8, date, title)
    made.section("Synopsis")
    made.synopsis(name, " ".join(program.collect_usage_pieces(context)))
    made.section("Description")
    for text in (*_help(program)[0], *more):
        made.paragraph(text)
    made.section("Options")
    for option, about in _options(context):
        made.term(f"`{option}`", about)
    return made


def _add_statuses(made: Page, program: click.Command) -> None:
    made.section("Exit status")
    for number, meaning in statuses(program.epilog or ""):
        made.term(number, meaning)


def _add_terms(made: Page, terms: dict[str, str]) -> None:
    stop_s = KEYS["cuda_mps_stop_timeout_s"].default
    for name, text in terms.items():
        made.term(f"`{name}`", *text.format(stop_s=stop_s).split("\n"))


_CHECK = """\
`yunion-mps config check` checks the files, prints every problem with its line, and changes nothing. The
daemon reads the files when it starts and on `systemctl reload yunion-mps-daemon`. If they have errors, the
daemon does not start, and a reload changes nothing."""
_HOST_CONF = """\
A YAML file with one key and value per line. On a host with Cloudpods, it is shared with Cloudpods' host
agent. The keys below belong to yunion-mps, and all others are ignored, except that a misspelt key, or an
unknown one that begins with `cuda_mps_`, is an error. Values in `host_local.conf` replace those in
`host.conf`.

Both are read as by Cloudpods: numbers and `true` may be in quotes, keys may have dashes instead of
underscores, the file may have lines `key = value` instead of YAML, and only the first document of a file is
read. A key twice with different values is an error."""
_DEVICE_FILE = """\
A YAML file with the key `devices`: a list of entries, each of which divides one GPU. On a host with
Cloudpods, it is shared with Cloudpods' host agent. `container_device_config_file` in
`yunion-mps-host.conf`(5) can name another file."""
_NO_ENTRY = """\
A GPU without an entry offers no devices. If there is no entry of type NVIDIA_MPS or NVIDIA_GPU_SHARE at all,
every GPU is divided into `cuda_mps_replicas` devices. An entry has `path`, `type` and one of
`virtual_number`, `slices` and `memory_unit`:"""
_BESIDE = """\
In addition to `devices`, the file may have:"""


def host_conf_page(date: str) -> str:
    """The source of yunion-mps-host.conf(5)."""
    made = Page("yunion-mps-host.conf", 5, date, "the keys of yunion-mps in /etc/yunion/host.conf")
    made.section("Synopsis")
    made.paragraph("`/etc/yunion/host.conf`, `/etc/yunion/host_local.conf`")
    made.section("Description")
    for paragraph in _HOST_CONF.split("\n\n"):
        made.paragraph(paragraph)
    made.paragraph(_CHECK)
    made.section("Keys")
    _add_keys(made, host_keys())
    return _finished(made, host_conf_example(), "yunion-mps-host_container_device.yml(5)")


def device_file_page(date: str) -> str:
    """The source of yunion-mps-host_container_device.yml(5)."""
    title = "how GPUs are divided into MPS devices"
    made = Page("yunion-mps-host_container_device.yml", 5, date, title)
    made.section("Synopsis")
    made.paragraph("`/etc/yunion/host_container_device.yml`")
    made.section("Description")
    made.paragraph(_DEVICE_FILE)
    made.paragraph(_CHECK)
    made.section("Keys")
    made.paragraph(_NO_ENTRY)
    _add_keys(made, device_keys())
    made.paragraph(_BESIDE)
    _add_keys(made, device_file_keys())
    return _finished(made, device_file_example(), "yunion-mps-host.conf(5)")


def _add_keys(made: Page, keys: Iterable[Key]) -> None:
    for key in keys:
        default = f"; default: {key.default}" if key.default else ""
        first, *more = key.about
        made.term(f"`{key.name}`: {key.type}{default}", first, *more)


def _finished(made: Page, example: str, other: str) -> str:
    made.section("Example")
    made.verbatim(line for line in example.splitlines() if line and not line.startswith("#"))
    made.see_also(["yunion-mps(1)", "yunion-mps-daemon(8)", other])
    return str(made)


def add_files(made: Page, *names: str) -> None:
    """Add the section, with these of `files.yml`, or all."""
    about = texts("files")
    made.section("Files")
    for name in names or about:
        made.term(f"`{_path(name)}`", about[name])


def _path(name: str) -> str:
    if name.startswith("/"):
        return name
    return str(KEYS[name].default if name in KEYS else getattr(Paths(), name))
