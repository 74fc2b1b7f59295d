"""The schemas of what happens while the daemon runs: events, changes of the configuration, clients."""

from __future__ import annotations

from yunion_mps.http.schema_parts import Schema, list_of, number, object_of, or_null, ref, text, truth
from yunion_mps.service.queries import EVENT_KINDS
from yunion_mps.service.usage import MINUTES, STEP_S

_MOMENT = 1788000000.25
_WAITS_FOR = "its MPS server (PID 4250) has ended"


def schemas() -> Schema:
    """The schemas by name."""
    leases = {
        "leases": list_of("Who has which devices.", ref("Lease")),
        "waiting": list_of("Those who wait for devices, in the order of their coming.", ref("Waiter")),
        "total": number("The number of leases.", 1),
    }
    changed = {
        "changes": list_of("What is, or would be, different.", ref("Change")),
        "pending": list_of("What is still to come into force, empty where all is.", ref("Pending")),
    }
    clients = {
        "servers": list_of("The MPS servers.", ref("Server")),
        "clients": list_of("Their clients, and other processes on their GPUs.", ref("Client")),
        "waiting": list_of(
            "Those whom another user's MPS server keeps waiting, the first to come first.",
            ref("WaitingClient"),
        ),
        "troubles": list_of("Of what nothing is known, and why.", {"type": "string"}, []),
        "total": number("The number of clients.", 1),
    }
    events = {
        "events": list_of("The oldest first.", ref("Event")),
        "last": number("The id to ask on from, with `after`; 0 where nothing has happened yet.", 17),
    }
    ended = {
        "pid": number("The client's PID.", 4260, minimum=1),
        "ended": truth("Whether it has ended.", example=True),
        "how": text("What was done.", "its MPS server let go of it; ended by SIGTERM"),
    }
    anew = {"pid": number("The daemon's PID, which stays.", 4200, minimum=1)}
    return {
        "Lease": object_of("Devices that are somebody's until it ends.", _lease()),
        "Waiter": object_of("Somebody who waits for devices.", _waiter()),
        "LeaseList": object_of("All leases.", leases),
        "Event": object_of("Something that changed, why, and what it means.", _event()),
        "EventList": object_of("Events, and where to go on.", events),
        "Usage": object_of("Memory used, minute by minute; the last one is the present minute.", _usage()),
        "Used": object_of("What processes had of a GPU or a device.", _used()),
        "Change": object_of("One thing that becomes another.", _change()),
        "Pending": object_of("What a domain waits for.", _pending()),
        "ChangeList": object_of("What another configuration changes, and when.", changed),
        "Server": object_of("One MPS server.", {**_process("nvidia-cuda-mps-server", 4250), **_server()}),
        "Client": object_of(
            "One process that uses GPUs.", {**_process("python train.py", 4260), **_client()}
        ),
        "WaitingClient": object_of(
            "One process that waits for an MPS server.",
            {**_process("python eval.py", 4262, 1001, "bob"), **_waiting_client()},
        ),
        "ClientList": object_of("Who uses the GPUs through MPS.", clients),
        "Ended": object_of("How a client was ended.", ended),
        "Anew": object_of("The program is run anew within moments.", anew),
    }


def _event() -> Schema:
    return {
        "id": number("Grows, and is never used twice.", 17, minimum=1),
        "time": number("When, in seconds since 1970.", _MOMENT, "number"),
        "severity": text("How bad it is.", "warning", enum=["info", "warning", "error"]),
        "kind": text("What it is about.", "domain", enum=list(EVENT_KINDS)),
        "subject": text("The name of what changed.", "host"),
        "what": text("What happened.", "ready -> backoff"),
        "cause": text("Why, where that is known.", "the control daemon (PID 4242) was killed by signal 9"),
        "consequence": text(
            "What it means for devices and jobs, where it means anything.",
            "its devices are not served until it was started again",
        ),
    }


def _usage() -> Schema:
    hour = {"minItems": MINUTES, "maxItems": MINUTES}
    looked = (
        "Whether anybody looked in that minute: not before the daemon's start, nor while the driver hung."
    )
    return {
        "begin": number("When the first minute began, in seconds since 1970.", _MOMENT, "number"),
        "step": {
            "const": STEP_S,
            "description": "Seconds from one number to the next.",
            "examples": [STEP_S],
        },
        "looked": {**list_of(looked, {"type": "boolean"}, [True] * MINUTES), **hour},
        "gpus": list_of("GPUs; one that is not here used nothing.", ref("Used")),
        "devices": list_of(
            "Devices, by YUNION_MPS_DEVICE or the leases of processes; one that is not here used nothing.",
            ref("Used"),
        ),
    }


def _used() -> Schema:
    used = "The most of each minute in MiB; a budget of several devices fills them in turn. Null: not looked."
    item = {"type": ["integer", "null"], "minimum": 0}
    hour = {"minItems": MINUTES, "maxItems": MINUTES}
    return {
        "addr": text("The address of the GPU or device.", "00:06.0-1"),
        "memory_used": {**list_of(used, item, [512] * MINUTES), **hour},
    }


def _change() -> Schema:
    kinds = ["control daemon", "budget", "compute mode", "setting"]
    return {
        "kind": text("What changes.", "budget", enum=kinds),
        "subject": text("A GPU's address, a domain's name or a key.", "00:06.0"),
        "before": text("Empty where there was none.", "4 x 5760 MiB, 25 %"),
        "after": text("Empty where there is to be none.", "2 x 11520 MiB, 50 %"),
        "effect": text("`at once`, or what it waits for.", f"when {_WAITS_FOR}"),
    }


def _pending() -> Schema:
    return {
        "domain": text("The domain's name.", "host"),
        "pending": text("What waits for what.", f"other limits come into force when {_WAITS_FOR}"),
        "leases": list_of(
            "Ids of the leases that it waits for, if it waits for leases.", {"type": "string"}, []
        ),
    }


def _process(command: str, pid: int, uid: int = 1000, user: str = "alice") -> Schema:
    return {
        "pid": number("Its PID.", pid, minimum=1),
        "uid": or_null(number("Its user's id; null where it has just ended.", uid)),
        "user": or_null(text("Its user's name, or the id where it has none.", user)),
        "command": or_null(text("Its command line, cut to 500 characters.", command, maxLength=500)),
        "started": or_null(number("When it started, in seconds since 1970.", _MOMENT, "number")),
    }


def _container() -> Schema:
    name = "The container that it is in, by its name, or the beginning of its id; null where it is in none."
    container_id = "The container's whole id."
    return {
        "container": or_null(text(name, None)),
        "container_id": or_null(text(container_id, None, pattern="^[0-9a-f]{64}$")),
    }


def _client() -> Schema:
    memory = "What it has on its domain's GPUs, in MiB; null where the driver does not tell."
    through = "False: past MPS, so that no budget holds it; null where nobody can tell."
    by_gpu = {"type": ["integer", "null"], "minimum": 0}
    return {
        **_container(),
        "mps": or_null(truth(through, example=True)),
        "server": or_null(number("The PID of its MPS server.", 4250, minimum=1)),
        "domain": text("The control daemon that serves it.", "host"),
        "device": or_null(text("Its device, by YUNION_MPS_DEVICE in its environment.", "00:06.0-1")),
        "gpus": list_of("Addresses of the GPUs that it has memory on.", {"type": "string"}, ["00:06.0"]),
        "memory_by_gpu": list_of("What it has on each of these, in MiB, or null.", by_gpu, [512]),
        "memory_used": or_null(number(memory, 512)),
    }


def _waiting_client() -> Schema:
    return {
        "since": number("When it asked for a server, in seconds since 1970.", _MOMENT, "number"),
        "server": number("The PID of the MPS server that it waits for.", 4250, minimum=1),
        "server_user": text("Whose server that is: a name, or the id where it has none.", "alice"),
        "domain": text("The control daemon that keeps it waiting.", "host"),
    }


def _server() -> Schema:
    states = "Null where the control daemon does not know it (before 550); FAULT: its jobs have failed."
    return {
        "domain": text("The control daemon that it belongs to.", "host"),
        "state": or_null(text(states, "ACTIVE")),
    }


def _who(command: str) -> Schema:
    return {
        "pid": or_null(number("Its process; null where it is a name.", 4260, minimum=1)),
        "uid": number("Its user's id.", 1000),
        "user": text("Its user's name, or the id where it has none.", "alice"),
        "command": or_null(text("The process' command line, cut to 100 characters.", command)),
        **_container(),
        "name": or_null(text("Its name; null where it is a process or a connection.", None)),
    }


def _lease() -> Schema:
    until = "When it ends unless it is renewed, in seconds since 1970; null where that is not how it ends."
    return {
        "id": text("A random UUID.", "7c1f0e7a-8a52-4f0e-8b5e-3f9d2a6c1b44"),
        "devices": list_of("The devices' addresses.", {"type": "string"}, ["00:06.0-1"]),
        "gpus": list_of("Their GPUs' addresses.", {"type": "string"}, ["00:06.0"]),
        "memory": list_of("Each device's memory in MiB.", {"type": "integer", "minimum": 0}, [5760]),
        "thread_percentage": number("The smallest of the devices'.", 25, "number"),
        "budget_enforced": truth("Whether MPS keeps their budgets: not before Volta.", example=False),
        "unenforced_gpus": list_of(
            "The addresses of those of its GPUs that are older than Volta.", {"type": "string"}, ["00:06.0"]
        ),
        "binding": text("What ends it.", "process", enum=["process", "connection", "name", "container"]),
        **_who("python train.py"),
        "since": number("When it began, in seconds since 1970.", _MOMENT, "number"),
        "expires": or_null(number(until, None, "number")),
        "cdi": or_null(
            text("What a container is given it by: podman run --device; null where it is none.", None)
        ),
        "environment": {
            "type": "object",
            "description": "The environment of a process that uses them.",
            "additionalProperties": {"type": "string"},
            "examples": [{"CUDA_VISIBLE_DEVICES": "GPU-76aef7ff-372d-2432-b4b4-beca4d8d3400"}],
        },
    }


def _waiter() -> Schema:
    return {
        **_who("yunion-mps run python train.py"),
        "since": number("Since when, in seconds since 1970.", _MOMENT, "number"),
        "wants": text("What for.", "2 devices on one GPU"),
    }
