"""The closed sets of words that the API's parameters and answers, metrics and events share."""

from __future__ import annotations

#: The states of a domain.
STOPPED = "stopped"
STARTING = "starting"  # the control daemon was started or adopted, and does not answer yet
APPLYING = "applying"  # its limits are being set and read back
READY = "ready"  # every limit was read back: clients are served within their budgets
DEGRADED = "degraded"  # as ready, but MPS servers fail to start, so no client is served
WEDGED = "wedged"  # it runs but does not answer, or cannot be reached
BACKOFF = "backoff"  # it ended or failed; the next start is scheduled
FAILED = "failed"  # an operator must act before a start can succeed; retried slowly
STOPPING = "stopping"  # it was asked to quit
DOMAIN_STATES = (STOPPED, STARTING, APPLYING, READY, DEGRADED, WEDGED, BACKOFF, FAILED, STOPPING)
#: The states in which the control daemon answers, and its limits were read back.
ANSWERING = (READY, DEGRADED)

HOST_STATES = (READY, DEGRADED, FAILED, "disabled")
EVENT_KINDS = ("domain", "limit", "gpu", "compute_mode", "mig", "configuration", "client", "lease", "daemon")
SEVERITIES = ("info", "warning", "error")
#: What ends a lease.
BINDINGS = ("process", "connection", "name", "container")
#: Which GPUs are preferred: the fullest, or the emptiest.
BINPACK = "binpack"
SPREAD = "spread"
PLACEMENTS = (BINPACK, SPREAD)
#: Client priorities; their indices are the values of CUDA_MPS_CLIENT_PRIORITY. They are hints to the driver.
#: Source: nvidia-cuda-mps-control(1), set_default_client_priority.
NORMAL = "normal"
PRIORITIES = (NORMAL, "below_normal")
CHANGE_KINDS = (
    "control daemon", "budget", "compute mode", "MIG layout", "time slice", "reservation", "setting",
)  # fmt: skip
RELOAD_MODES = ("drain", "now")
#: What a client is sent after its MPS server has disconnected it: nothing, SIGTERM, or also SIGKILL.
NO_SIGNAL = "none"
SIGNAL_TERM = "term"
SIGNAL_KILL = "kill"
CLIENT_SIGNALS = (NO_SIGNAL, SIGNAL_TERM, SIGNAL_KILL)

#: The ways of sharing a GPU, as NVIDIA's label nvidia.com/gpu.sharing-strategy names them.
#: Source: NVIDIA's k8s-device-plugin, docs/gpu-feature-discovery/README.md, section "Generated Labels".
MPS = "mps"
TIME_SLICING = "time-slicing"
NOT_SHARED = "none"
SHARING = (MPS, TIME_SLICING, NOT_SHARED)
#: A GPU is shared by its MIG instances, each of which is shared in one of those ways.
MIG = "mig"
#: The type of an entry, as Cloudpods names it, by the way of sharing.
ENTRY_TYPES = {MPS: "NVIDIA_MPS", TIME_SLICING: "NVIDIA_GPU_SHARE"}
#: The Dev_type of devices, by the way of sharing: that of the entry, or of a whole instance.
DEV_TYPES = {**ENTRY_TYPES, NOT_SHARED: "NVIDIA_GPU"}

#: Why a GPU that is shared in this way may not enforce budgets.
WHY_UNENFORCED = {MPS: "older than Volta or of unknown compute capability", TIME_SLICING: "time-sliced"}
#: The time slices of a GPU, in the order of the values of nvidia-smi compute-policy --set-timeslice.
#: Source: nvidia-smi compute-policy --help.
TIME_SLICES = ("default", "short", "medium", "long")

#: The states of a GPU.
AVAILABLE = "available"
UNAVAILABLE = "unavailable"
NOT_USED = "not used"
#: What devices can be reserved for.
KUBERNETES = "kubernetes"
SLURM = "slurm"
RESERVATIONS = (KUBERNETES, SLURM)
#: The states of a device.
FREE = "free"
RESERVED = "reserved"  # it can be leased, but only for what it is reserved for
LEASED = "leased"
NO_MEMORY = "no memory"
PENDING = "pending"  # it is added or removed once leases of a previous division have ended
DEVICE_STATES = (FREE, RESERVED, LEASED, NO_MEMORY, PENDING, UNAVAILABLE)
#: The states of a lease. A lease has the first of these states that any of its devices has.
IN_USE = "in use"
IDLE = "idle"
OVER_BUDGET = "over budget"
LEASE_STATES = (UNAVAILABLE, OVER_BUDGET, PENDING, IN_USE, IDLE)
#: What the daemon does about a lease that is over its budget.
REPORT = "report"
TERMINATE = "terminate"
#: What the daemon does about the compute mode of a GPU: it sets one, or leaves it alone.
SET_EXCLUSIVE = "exclusive_process"
KEEP = "keep"
#: The levels of a problem that `status` shows, in order.
NOTICE = "notice"
PROBLEM = "problem"
WARNING = "warning"
PROBLEM_LEVELS = (NOTICE, PROBLEM, WARNING, PENDING)
#: The statuses of a condition, beside `notice` and `pending`: what it is about does not work, the driver
#: refused a setting, or it works otherwise than configured.
BROKEN = "broken"
REFUSED = "refused"
IMPAIRED = "impaired"
CONDITION_STATUSES = (NOTICE, BROKEN, REFUSED, IMPAIRED, PENDING)
#: What a condition is about: the service as a whole, a domain, and a user whose MPS servers do not start;
ABOUT_SERVICE = "service"
ABOUT_DOMAIN = "domain"
ABOUT_SERVERS_OF_USER = "servers of a user"
#: a GPU, its devices and its settings; an entry whose GPU is missing;
ABOUT_GPU = "GPU"
ABOUT_DEVICES = "devices"
ABOUT_MIG_LAYOUT = "MIG layout"
ABOUT_COMPUTE_MODE = "compute mode"
ABOUT_TIME_SLICE = "time slice"
ABOUT_SETTING = "setting"
ABOUT_BUDGET = "budget"
ABOUT_ENTRY = "entry"
#: the way a GPU is shared, and its division, which wait for leases;
ABOUT_WAY_OF_SHARING = "way of sharing"
ABOUT_DIVISION = "division"
#: the files that the daemon reads and writes, and the driver;
ABOUT_CONFIGURATION = "configuration"
ABOUT_PIPE_DIRECTORY = "pipe directory"
ABOUT_RECORD = "record"
ABOUT_EVENT_LOG = "event log"
ABOUT_DRIVER = "driver"
ABOUT_CDI_FILES = "CDI files"
ABOUT_METRICS_FILE = "metrics file"
#: leases, and what programs do.
ABOUT_LEASE = "lease"
ABOUT_SERVER = "MPS server"
ABOUT_PROCESS = "process"
ABOUT_REQUEST = "request"
CONDITION_KINDS = (
    ABOUT_SERVICE, ABOUT_DOMAIN, ABOUT_SERVERS_OF_USER, ABOUT_GPU, ABOUT_DEVICES, ABOUT_MIG_LAYOUT,
    ABOUT_COMPUTE_MODE, ABOUT_TIME_SLICE, ABOUT_BUDGET, ABOUT_ENTRY, ABOUT_WAY_OF_SHARING, ABOUT_DIVISION,
    ABOUT_CONFIGURATION, ABOUT_PIPE_DIRECTORY, ABOUT_RECORD, ABOUT_EVENT_LOG, ABOUT_DRIVER, ABOUT_CDI_FILES,
    ABOUT_METRICS_FILE, ABOUT_SETTING, ABOUT_LEASE, ABOUT_SERVER, ABOUT_PROCESS, ABOUT_REQUEST,
)  # fmt: skip

#: What a process may use of each of its GPUs, in MiB, for frameworks; the least if that differs.
MEMORY_VARIABLE = "YUNION_MPS_MEMORY_MIB"
#: The fraction of the GPU's memory that JAX allocates; no other framework reads it.
JAX_VARIABLE = "XLA_PYTHON_CLIENT_MEM_FRACTION"
#: Variables that only a device's environment sets, and all that it may set.
BUDGET_VARIABLES = (
    "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", "CUDA_MPS_CLIENT_PRIORITY", "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT",
    "YUNION_MPS_DEVICE", "YUNION_MPS_LEASE", MEMORY_VARIABLE,
)  # fmt: skip
DEVICE_VARIABLES = (*BUDGET_VARIABLES, "CUDA_DEVICE_ORDER", "CUDA_MPS_PIPE_DIRECTORY", "CUDA_VISIBLE_DEVICES")

#: The state of an MPS server that a fault of a client blocks, until all clients with the fault have ended.
#: Source: NVIDIA: Multi-Process Service, section "Provisioning Sequence", Server.
SERVER_FAULT = "FAULT"

#: The media type of the metrics that Prometheus asks for; others get text.
OPENMETRICS = "application/openmetrics-text"
