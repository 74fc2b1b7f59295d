"""Which GPU each entry means, and whether it can divide that GPU.

An entry keeps meaning the GPU that its path led to first, whatever the path leads to later: render nodes get
other numbers when a GPU is missing, and cards are moved. Only a card that has replaced the recorded one in
its own slot is used instead: at once if the path names the slot, and after a reload if it is a render node.
Invariant, held by property tests: no GPU is divided that no entry ever meant.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from yunion_mps.core import reasons
from yunion_mps.core.enums import TIME_SLICING
from yunion_mps.core.errors import Problem
from yunion_mps.core.gpu_path import ADDRESS, RENDER_NODE, UUID, GpuPath, parse_gpu_path
from yunion_mps.core.mig import DISABLED
from yunion_mps.core.models import Gpu, Inventory, MeantGpu, MissingGpu, gpus_by_address, gpus_by_uuid
from yunion_mps.core.reasons import Reason
from yunion_mps.core.settings import Config, DeviceEntry, Mistake, Source
from yunion_mps.planning.division import (
    enforces_budgets,
    max_clients,
    memory_mistake,
    overcommit_of,
    pool_mistake,
    slices_mistakes,
)
from yunion_mps.planning.mig import LayoutError, layout_of

#: Where CUDA looks for a control daemon unless CUDA_MPS_PIPE_DIRECTORY is set.
#: Source: nvidia-cuda-mps-control(1), section "ENVIRONMENT".
DEFAULT_PIPE_DIRECTORY = "/tmp/nvidia-mps"


#: What an entry meant whose record could not be read: nothing, until the operator's next reload.
UNKNOWN_GPU = MeantGpu("", "")

#: As in sysfs.
_NVIDIA_VENDOR = "0x10de"

#: How it is known which GPU a path means: it has the UUID, it was recorded, or it leads there now.
_BY_UUID = "by UUID"
_BY_RECORD = "by record"
_BY_PATH = "by path"


class Resolution(NamedTuple):
    """The entries with their GPUs; `missing`, `meant` and `warnings` are the plan's."""

    #: The entry of each GPU, by PCI address.
    entries: Mapping[str, DeviceEntry] = {}
    #: Why entries cannot divide their GPUs, by PCI address.
    refused: Mapping[str, Reason] = {}
    missing: tuple[MissingGpu, ...] = ()
    meant: Mapping[str, MeantGpu] = {}
    warnings: tuple[Reason, ...] = ()
    #: The problems of the files; those of a single GPU are minor.
    problems: Sequence[Problem] = ()


def resolve_entries(config: Config, inventory: Inventory) -> Resolution:
    """Return which GPU each entry divides.

    Without entries, every GPU is divided into `cuda_mps_replicas` equal devices, except those that are bound
    to another driver.
    """
    if config.devices:
        resolver = _Resolver(config, inventory)
        resolver.resolve()
        return resolver.result()
    return _all_gpus(config, inventory)


def confirm_replacements(meant: Mapping[str, MeantGpu], inventory: Inventory) -> dict[str, MeantGpu]:
    """Return what the paths mean once the operator has confirmed replaced cards by a reload.

    A render node then means the card that is in the slot of the former one.
    """
    uuids = gpus_by_uuid(inventory.gpus).keys()
    meant_uuids = {gpu.uuid for gpu in meant.values()}
    by_address = gpus_by_address(inventory.gpus)
    confirmed = {}
    for key, gpu in meant.items():
        successor = by_address.get(gpu.pci_address)
        if successor and not successor.uuid:
            successor = None
        is_gone = gpu.uuid not in uuids
        if gpu == UNKNOWN_GPU:  # the path decides, as for a new entry
            continue
        stands_in = successor is not None and successor.uuid == gpu.uuid and gpu.replaced not in uuids
        if gpu.replaced and stands_in:
            confirmed[key] = gpu._replace(replaced="")
        elif gpu.replaced:  # the former card is back, or the other one was moved
            confirmed[key] = MeantGpu(gpu.replaced, gpu.pci_address)
        elif is_gone and successor and successor.render_node == key and successor.uuid not in meant_uuids:
            confirmed[key] = MeantGpu(str(successor.uuid), successor.pci_address)
        else:
            confirmed[key] = gpu
    return confirmed


class _Resolver:
    """Resolves the entries of one configuration, first those whose GPU is certain."""

    def __init__(self, config: Config, inventory: Inventory) -> None:
        self._config = config
        self._inventory = inventory
        self._gpus = [gpu for gpu in inventory.gpus if not gpu.parent]
        self._by_uuid = {gpu.uuid.lower(): gpu for gpu in self._gpus if gpu.uuid}
        self._by_address = gpus_by_address(self._gpus)
        self._entries: dict[str, DeviceEntry] = {}
        self._missing: list[tuple[DeviceEntry, Reason]] = []
        self._meant: dict[str, MeantGpu] = {}
        self._warnings: list[Reason] = []
        self._problems: list[Problem] = []

    def resolve(self) -> None:
        uncertain: list[tuple[DeviceEntry, GpuPath]] = []
        for entry, name in self._named_entries():
            gpu = self._gpu_by_uuid(name)
            if gpu:
                self._divide(entry, name, gpu)
            else:
                uncertain.append((entry, name))
        for entry, name in uncertain:
            self._resolve_uncertain(entry, name)

    def result(self) -> Resolution:
        refused: dict[str, Reason] = {}
        for address, entry in self._entries.items():
            gpu = self._by_address[address]
            for problem in entry_errors(entry, gpu, self._config, self._inventory):
                self._problems.append(problem)
                if problem.gpu:
                    refused.setdefault(address, Reason(str(problem), reasons.ENTRY_REFUSED))
        order = list(self._config.devices)
        self._missing.sort(key=lambda item: order.index(item[0]))
        self._problems.sort(key=lambda problem: (problem.file, problem.line or 0))
        missing = []
        for entry, reason in self._missing:
            missing.append(MissingGpu(entry.path, _place(entry), reason, entry.reserved_for))
        return Resolution(
            entries=self._entries,
            refused=refused,
            missing=tuple(missing),
            meant=self._meant,
            warnings=tuple(self._warnings),
            problems=self._problems,
        )

    def _named_entries(self) -> list[tuple[DeviceEntry, GpuPath]]:
        """Return the entries with what their paths name; two paths that name the same GPU are a problem."""
        named: dict[DeviceEntry, GpuPath] = {}
        earlier: dict[object, list[tuple[DeviceEntry, str]]] = {}
        for entry in self._config.devices:
            name = parse_gpu_path(entry.path)
            assert name, f"reading the file refuses {entry.path}"
            gpu, source = self._meaning(name)
            others = earlier.setdefault(gpu.pci_address if gpu else name, [])
            conflicting = _conflicting_entries(others, source)
            others.append((entry, source))
            named[entry] = name
            if not conflicting:
                continue
            # A render node without a record may lead to another GPU after the next boot: it is no reason not
            # to start, and leaves the GPU to the other entry. The same path twice is always an error.
            first = conflicting[0]
            certain = [other for other in conflicting if not self._is_uncertain(other)]
            is_certain = bool(certain) and not self._is_uncertain(entry)
            is_same_path = any(parse_gpu_path(other.path) == name for other in conflicting)
            if certain or self._is_uncertain(entry):
                loser = entry
                winner = certain[0] if certain else first
            else:
                loser = first
                winner = entry
            problem = _divided_twice(entry, first, gpu)
            is_minor = not (is_certain or is_same_path)
            self._problems.append(problem._replace(is_minor=is_minor, entry=loser.path))
            text = f"it is divided by the entry on line {winner.path_at.line}, too"
            self._missing.append((loser, Reason(text, reasons.ENTRY_REFUSED)))
            named.pop(loser, None)
            if gpu:
                for error in entry_errors(loser, gpu, self._config, self._inventory):
                    self._problems.append(error._replace(gpu="", entry=loser.path))
        return list(named.items())

    def _is_uncertain(self, entry: DeviceEntry) -> bool:
        """Return whether the entry has a render node without a record."""
        name = parse_gpu_path(entry.path)
        return name is not None and name.kind == RENDER_NODE and name.name not in self._inventory.meant

    def _meaning(self, name: GpuPath) -> tuple[Gpu | None, str]:
        """Return the GPU that a path means, if it is there, and how that is known."""
        certain = self._gpu_by_uuid(name)
        if name.kind == UUID:
            return certain, _BY_UUID
        if name.name in self._inventory.meant:
            return certain, _BY_RECORD
        return self._gpu_at_path(name), _BY_PATH

    def _gpu_at_path(self, name: GpuPath) -> Gpu | None:
        """Return the GPU to which the path leads now."""
        if name.kind == ADDRESS:
            return self._by_address.get(name.name)
        if name.kind == UUID:
            return self._by_uuid.get(name.name)
        for gpu in self._gpus:
            if gpu.render_node == name.name:
                return gpu
        return None

    def _gpu_by_uuid(self, name: GpuPath) -> Gpu | None:
        """Return the GPU with the UUID that the path names, or that was recorded for it."""
        if name.kind == UUID:
            return self._by_uuid.get(name.name)
        recorded = self._recorded(name)
        return self._by_uuid.get(recorded.uuid.lower()) if recorded else None

    def _recorded(self, name: GpuPath) -> MeantGpu | None:
        """Return what the path meant before; not a card that only stands in for it, until a reload."""
        recorded = self._inventory.meant.get(name.name)
        if recorded and recorded.replaced:
            return recorded._replace(uuid=recorded.replaced, replaced="")
        return recorded

    def _divide(self, entry: DeviceEntry, name: GpuPath, gpu: Gpu, replaced: str = "") -> None:
        """Let the entry divide this GPU, unless another one does."""
        other = self._entries.get(gpu.pci_address)
        recorded = self._inventory.meant.get(name.name)
        if other:
            text = f"it leads to GPU {gpu.address}, which belongs to the entry on line {other.path_at.line}"
            code = reasons.PATH_OUTDATED
            if recorded and not self._gpu_by_uuid(name):
                text = f"this host no longer has the GPU that the entry means ({recorded.uuid}); {text}"
                code = reasons.GPU_MISSING
            self._miss(entry, name, Reason(text, code))
            return
        self._entries[gpu.pci_address] = entry
        if gpu.uuid:
            self._meant[name.name] = MeantGpu(gpu.uuid, gpu.pci_address, replaced)
        elif recorded:
            self._meant[name.name] = recorded
        if replaced:
            text = f"path {entry.path} ({_place(entry)}) meant {replaced} before; "
            text += f"GPU {gpu.address} ({gpu.uuid}) is in its place now and is used"
            self._warnings.append(Reason(text, reasons.GPU_REPLACED))
        self._warn_if_outdated(entry, name, gpu)

    def _warn_if_outdated(self, entry: DeviceEntry, name: GpuPath, gpu: Gpu) -> None:
        """Warn if the path leads to another GPU than the one that the entry means."""
        gpu_at_path = self._gpu_at_path(name)
        if gpu_at_path is gpu or (gpu_at_path is None and name.kind != ADDRESS):
            return
        leads = f"leads to GPU {gpu_at_path.address}" if gpu_at_path else "leads to no GPU"
        text = f"path {entry.path} ({_place(entry)}) {leads} now, "
        text += f"but still means the GPU that it led to before: {gpu.address}"
        if gpu.uuid:
            text += f", {gpu.uuid}"
        self._warnings.append(Reason(text, reasons.PATH_OUTDATED))

    def _resolve_uncertain(self, entry: DeviceEntry, name: GpuPath) -> None:
        """Resolve an entry without a record, or whose recorded GPU is not there."""
        gpu = self._gpu_at_path(name)
        recorded = self._recorded(name)
        is_lost = recorded == UNKNOWN_GPU or (recorded is None and self._inventory.meant_is_damaged)
        if is_lost and name.kind == RENDER_NODE:
            leads = f"; it leads to GPU {gpu.address} ({gpu.uuid}) now" if gpu else ""
            text = f"which GPU the entry meant before is not known, because the record was damaged{leads}"
            self._miss(entry, name, Reason(text, reasons.RECORD_DAMAGED))
            self._meant[name.name] = UNKNOWN_GPU
            return
        if recorded is None or recorded == UNKNOWN_GPU:
            if gpu:
                self._divide(entry, name, gpu)
            else:
                self._miss(entry, name, self._why_missing(name))
            return
        unidentified = self._by_address.get(recorded.pci_address)
        if gpu and gpu.uuid is None:
            # A GPU without a UUID does not answer: it is presumably the recorded one.
            self._divide(entry, name, gpu)
        elif gpu and name.kind == ADDRESS:
            self._divide(entry, name, gpu, replaced=recorded.uuid)
        elif gpu and gpu.pci_address == recorded.pci_address:
            # A render node may lead to another card by chance, so the operator has to confirm it.
            text = f"GPU {gpu.address} is {gpu.uuid} now, but the entry meant {recorded.uuid}, "
            text += "which this host no longer has"
            self._miss(entry, name, Reason(text, reasons.GPU_REPLACED))
        elif unidentified and unidentified.uuid is None:
            self._divide(entry, name, unidentified)
        else:
            self._miss(entry, name, self._why_recorded_missing(name, gpu, recorded))

    def _miss(self, entry: DeviceEntry, name: GpuPath, reason: Reason) -> None:
        self._missing.append((entry, self._inventory.driver_reason or reason))
        recorded = self._inventory.meant.get(name.name)
        if recorded:
            self._meant[name.name] = recorded

    def _why_recorded_missing(self, name: GpuPath, gpu: Gpu | None, recorded: MeantGpu) -> Reason:
        address = Gpu(recorded.pci_address).address
        text = f"this host no longer has GPU {address} ({recorded.uuid})"
        successor = self._by_address.get(recorded.pci_address)
        if successor and successor.uuid:
            text += f"; another card is in its slot now ({successor.uuid})"
        if gpu:
            text += f"; {name.name} leads to GPU {gpu.address} now"
        return Reason(text, reasons.GPU_MISSING)

    def _why_missing(self, name: GpuPath) -> Reason:
        """Return why a path without a record leads to no GPU."""
        if name.kind == UUID:
            return self._why_uuid_missing()
        for controller in self._inventory.controllers:
            is_foreign = controller.vendor != _NVIDIA_VENDOR
            if is_foreign and name.name in (controller.pci_address, controller.render_node):
                driver = f" (driver {controller.driver})" if controller.driver else ""
                text = f"the device at {Gpu(controller.pci_address).address} is not an NVIDIA GPU{driver}"
                return Reason(text, reasons.GPU_MISSING)
        if name.kind == ADDRESS:
            return Reason(f"there is no GPU at {Gpu(name.name).address}", reasons.GPU_MISSING)
        if self._gpus and not any(gpu.render_node for gpu in self._gpus):
            text = "no NVIDIA GPU has a render node: nvidia-drm is not loaded"
            if self._inventory.drm_is_loaded:
                text = "no NVIDIA GPU has a link to a render node in /dev/dri/by-path"
            return Reason(text, reasons.RENDER_NODE_MISSING)
        return Reason("there is no such render node", reasons.GPU_MISSING)

    def _why_uuid_missing(self) -> Reason:
        """Return why no GPU has this UUID: perhaps one does not report its UUID, because it is broken."""
        for gpu in self._gpus:
            if gpu.uuid is None and gpu.reason:
                text = f"this host has no GPU with this UUID now; it may be GPU {gpu.address}: {gpu.reason}"
                return Reason(text, gpu.reason.code)
        return Reason("this host has no GPU with this UUID now", reasons.GPU_MISSING)


def _all_gpus(config: Config, inventory: Inventory) -> Resolution:
    source = config.sources["cuda_mps_replicas"]
    entries: dict[str, DeviceEntry] = {}
    refused: dict[str, Reason] = {}
    problems: list[Problem] = []
    for gpu in inventory.gpus:
        if gpu.parent or gpu.reason.code == reasons.GPU_OTHER_DRIVER:
            continue
        entry = DeviceEntry(
            path=gpu.pci_address,
            virtual_number=config.cuda_mps_replicas,
            path_at=source,
            divided_at=source,
        )
        entries[gpu.pci_address] = entry
        if gpu.reason:  # a broken GPU is not checked
            continue
        errors = _equal_devices_errors("cuda_mps_replicas", entry, gpu, config, inventory)
        problems += errors
        if errors:
            refused[gpu.pci_address] = Reason(str(errors[0]), reasons.ENTRY_REFUSED)
    return Resolution(entries=entries, refused=refused, problems=problems)


def _place(entry: DeviceEntry) -> str:
    source = entry.path_at
    return source.file if source.line is None else f"{source.file}:{source.line}"


def _conflicting_entries(earlier: Iterable[tuple[DeviceEntry, str]], source: str) -> list[DeviceEntry]:
    """Return those of the `earlier` entries for a GPU beside which the file must not have this one.

    A recorded path and one that only leads there now do not conflict, because a reboot can renumber render
    nodes.

    source: how this entry's GPU is known
    """
    return [entry for entry, known in earlier if {known, source} != {_BY_RECORD, _BY_PATH}]


def _divided_twice(entry: DeviceEntry, first: DeviceEntry, gpu: Gpu | None) -> Problem:
    line = first.path_at.line
    text = f"path {entry.path} is already divided on line {line}"
    if gpu:
        text = f"path {entry.path} is GPU {gpu.address}, which is already divided on line {line}"
    if entry.path != first.path:
        text += f" as {first.path}"
    return Problem(entry.path_at.file, entry.path_at.line, text, "remove one of the two entries")


# -- whether an entry can divide its GPU


def entry_errors(entry: DeviceEntry, gpu: Gpu, config: Config, inventory: Inventory) -> list[Problem]:
    """Return how the entry exceeds its GPU, as minor problems; a broken GPU is not checked."""
    if gpu.reason:
        return []
    source = entry.divided_at
    too_much_memory = memory_mistake(entry, gpu)
    if too_much_memory:
        return [_of_gpu(gpu, entry.memory_at or source, too_much_memory)]
    gpu = gpu._replace(memory_mib=entry.memory_mib or gpu.memory_mib)
    impossible_layout = _layout_mistake(entry, gpu)
    if impossible_layout:
        return [_of_gpu(gpu, entry.mig_at or source, impossible_layout)]
    is_split = entry.mig not in ((), (DISABLED,))
    if is_split and (entry.sharing == TIME_SLICING or not entry.virtual_number):
        return _found_by_every_program(gpu, config, "split into MIG instances")
    if entry.sharing == TIME_SLICING:
        problems = _found_by_every_program(gpu, config, "time-sliced")
        return [*problems, *_memory_errors("virtual_number", entry, gpu)]
    if entry.slices:
        too_many = _too_many("slices", len(entry.slices), gpu, source, config=config, inventory=inventory)
        return too_many + [_of_gpu(gpu, source, mistake) for mistake in slices_mistakes(entry, gpu, config)]
    if entry.memory_unit_mib:
        too_small = pool_mistake(entry, gpu)
        return [_of_gpu(gpu, source, too_small)] if too_small else []
    return _equal_devices_errors("virtual_number", entry, gpu, config, inventory)


def _equal_devices_errors(
    key: str, entry: DeviceEntry, gpu: Gpu, config: Config, inventory: Inventory
) -> list[Problem]:
    """Return why the GPU cannot have as many equal devices as `key` says."""
    source = entry.divided_at
    count = entry.virtual_number
    too_many = _too_many(key, count, gpu, source, config=config, inventory=inventory)
    if too_many:
        return too_many
    if entry.mig in ((), (DISABLED,)):
        too_small = _memory_errors(key, entry, gpu)
        if too_small:
            return too_small
    overcommit = overcommit_of(entry, config)
    if overcommit is None or count <= 1000 * overcommit:
        return []
    text = f"{key} is {count}, so each device of GPU {_name(gpu)} would have less than 0.1 % of its threads"
    return [_of_gpu(gpu, source, Mistake(text, f"write at most {1000 * overcommit:g}"))]


def _memory_errors(key: str, entry: DeviceEntry, gpu: Gpu) -> list[Problem]:
    """Return a problem if each equal device would have less than 1 MiB."""
    if gpu.memory_mib is None or entry.virtual_number <= gpu.memory_mib:
        return []
    text = f"{key} is {entry.virtual_number}, so each device of GPU {_name(gpu)} with {gpu.memory_mib} MiB "
    text += "would have less than 1 MiB"
    return [_of_gpu(gpu, entry.divided_at, Mistake(text, f"write at most {gpu.memory_mib}"))]


def _of_gpu(gpu: Gpu, source: Source, mistake: Mistake) -> Problem:
    return Problem(
        file=source.file,
        line=source.line,
        what=mistake.what,
        hint=mistake.hint,
        is_minor=True,
        gpu=gpu.pci_address,
    )


def _found_by_every_program(gpu: Gpu, config: Config, sharing: str) -> list[Problem]:
    """Return a problem if programs without MPS would find the control daemon of other GPUs."""
    source = config.sources["cuda_mps_pipe_directory"]
    if config.cuda_mps_scope != "host" or config.cuda_mps_pipe_directory != DEFAULT_PIPE_DIRECTORY:
        return []
    text = f"cuda_mps_pipe_directory is {DEFAULT_PIPE_DIRECTORY}, where every program finds the control "
    text += f"daemon, even one on GPU {gpu.address} ({gpu.name}), which is {sharing}"
    hint = "write another directory, such as /run/nvidia-mps/pipe"
    return [Problem(source.file, source.line, text, hint)]


def _layout_mistake(entry: DeviceEntry, gpu: Gpu) -> Mistake | None:
    try:
        if entry.mig:
            layout_of(entry, gpu)
    except LayoutError as error:
        return Mistake(error.what, error.hint)
    return None


def _too_many(
    key: str, count: int, gpu: Gpu, source: Source, *, config: Config, inventory: Inventory
) -> list[Problem]:
    """Return a problem if the GPU would have more devices than MPS allows clients."""
    limit = max_clients(gpu, inventory.driver, config.cuda_mps_max_clients)
    if count <= limit:
        return []
    if source.line is None:  # the default exceeds the operator's own override
        source = config.sources["cuda_mps_max_clients"]
    is_many = f"are {count}" if key == "slices" else f"is {count}"
    text = f"{key} {is_many}, more than the {limit} clients that MPS allows on GPU {_name(gpu)}"
    hint = f"write at most {limit}"
    if enforces_budgets(gpu):
        hint += ", or set cuda_mps_max_clients in host.conf if the driver allows more"
    return [_of_gpu(gpu, source, Mistake(text, hint))]


def _name(gpu: Gpu) -> str:
    return f"{gpu.address} ({gpu.name})" if gpu.name else gpu.address


def reservations(entries: Mapping[str, DeviceEntry], gpus: Sequence[Gpu]) -> dict[str, str]:
    """Return what GPUs and their MIG instances (UUIDs) are reserved for, even those without devices now."""
    entries_by_gpu = {gpu.uuid: entries.get(gpu.pci_address) for gpu in gpus}
    reserved: dict[str, str] = {}
    for gpu in gpus:
        entry = entries_by_gpu.get(gpu.parent or gpu.uuid)
        if gpu.uuid and entry and entry.reserved_for:
            reserved[gpu.uuid] = entry.reserved_for
    return reserved
