"""Types of the fields in the API's answers, with their JSON schemas.

They are separate from `enums`, which every program loads: creating these types takes a millisecond, and only
mypy and the schemas need them.
"""

from __future__ import annotations

from typing import Annotated, Any, Optional

from yunion_mps.core.addresses import SHOWN_ADDRESS


class Field:
    """What the JSON schema of a value has beyond its type."""

    def __init__(self, description: str = "", **keywords: Any) -> None:
        self._keywords = {"description": description, **keywords} if description else keywords

    def __get_pydantic_json_schema__(self, schema: Any, handler: Any) -> dict[str, Any]:
        return {**handler(schema), **self._keywords}


Count = Annotated[int, Field(minimum=0)]
Mib = Annotated[int, Field("In MiB.", minimum=0)]
Percentage = Annotated[float, Field("Of the GPU's SM threads.", minimum=0.1, maximum=100)]
Utilization = Annotated[
    int, Field("Percentage of the time in which kernels ran, at the last poll.", minimum=0, maximum=100)
]
UtilizationList = Annotated[
    list[Optional[Utilization]], Field("Null: the driver has no sample, or does not report it.")
]
_HOUR = {"minItems": 60, "maxItems": 60}  # one value a minute
MibByMinute = Annotated[
    list[Optional[Mib]], Field("The highest value of each minute in MiB; null: not read.", **_HOUR)
]
UtilizationByMinute = Annotated[
    list[Optional[Utilization]], Field("The highest value of each minute; null: not reported.", **_HOUR)
]
PolledByMinute = Annotated[
    list[bool],
    Field(
        "False if the minute was not polled, because the daemon was not running or the driver hung.", **_HOUR
    ),
]
Pid = Annotated[int, Field(minimum=1)]
Time = Annotated[str, Field("RFC 3339, in UTC with milliseconds.", format="date-time", pattern="Z$")]
NumaNode = Annotated[int, Field("-1 if there is none.", minimum=-1)]
Uuid = Annotated[str, Field(format="uuid")]
ReasonCode = Annotated[str, Field("The reason code; empty if there is no reason.")]
_INSTANCE = "-g[0-9]+"
GpuAddress = Annotated[
    str,
    Field(
        "A PCI address; domain 0000 is omitted. -g1 is a MIG instance.",
        pattern=f"^{SHOWN_ADDRESS}({_INSTANCE})?$",
    ),
]
DeviceAddress = Annotated[
    str,
    Field(
        "The GPU's address and the slot; for a whole MIG instance, only its address.",
        pattern=f"^{SHOWN_ADDRESS}({_INSTANCE}|({_INSTANCE})?-m?[0-9]+)$",
    ),
]
VendorDeviceId = Annotated[str, Field("PCI vendor and device.", pattern="^[0-9a-f]{4}:[0-9a-f]{4}$")]
