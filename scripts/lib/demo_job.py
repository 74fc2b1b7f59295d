"""The job of scripts/demo: allocate MIB of GPU memory with CUDA and keep it (demo_job.py MIB)."""

import ctypes
import os
import signal
import sys

mib = int(sys.argv[1])
try:
    cuda = ctypes.CDLL("libcuda.so.1")
except OSError as error:
    sys.exit(f"demo_job: {error}")
context, address = ctypes.c_void_p(), ctypes.c_uint64()
for call, arguments in (
    ("cuInit", (0,)),
    ("cuDevicePrimaryCtxRetain", (ctypes.byref(context), 0)),
    ("cuCtxSetCurrent", (context,)),
    ("cuMemAlloc_v2", (ctypes.byref(address), ctypes.c_size_t(mib << 20))),
):
    code = getattr(cuda, call)(*arguments)
    if code:
        name = ctypes.c_char_p()
        cuda.cuGetErrorName(code, ctypes.byref(name))
        sys.exit(f"demo_job: {call}: {(name.value or b'?').decode()} ({code})")
print(f"{mib} MiB allocated on device {os.environ.get('YUNION_MPS_DEVICE', 'none')}", flush=True)
signal.pause()
