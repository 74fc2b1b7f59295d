/* What nvidia-smi calls without a name: a table of functions that no header describes, as versions 535 and 550 use it. */
#include <unistd.h>

#include "nvml.h"

nvmlReturn_t nvmlDeviceGetComputeRunningProcesses_private(nvmlDevice_t, unsigned int *, void *);
nvmlReturn_t nvmlDeviceGetMPSComputeRunningProcesses_private(nvmlDevice_t, unsigned int *, void *);
nvmlReturn_t nvmlDeviceGetGraphicsRunningProcesses_private(nvmlDevice_t, unsigned int *, void *);

enum { TIME_SLICE = 0, TIME_SLICES = 4 };
typedef struct { unsigned int policy, value; } policy_t;
typedef struct { unsigned int count; policy_t policies[8]; } policies_t;

/* Behind nvidia-smi compute-policy; NVML has no public call for it. */
static nvmlReturn_t nvmlDeviceSetComputePolicy(nvmlDevice_t gpu, const policy_t *asked)
{
    ENTER_DEVICE(gpu, asked && asked->policy == TIME_SLICE && asked->value < TIME_SLICES);
    if (gpu->capability_major < 6) /* older ones do not pre-empt within a kernel */
        return NOT_SUPPORTED;
    if (geteuid() != 0)
        return NO_PERMISSION;
    int lock = lock_state();
    gpu->time_slice = asked->value;
    unlock_state(lock);
    changed();
    return SUCCESS;
}

static nvmlReturn_t nvmlDeviceGetComputePolicies(nvmlDevice_t gpu, policies_t *policies)
{
    ENTER_DEVICE(gpu, policies);
    if (gpu->capability_major < 6)
        return NOT_SUPPORTED;
    policies->count = 1;
    policies->policies[0] = (policy_t){TIME_SLICE, gpu->time_slice};
    return SUCCESS;
}

static nvmlReturn_t unsupported(void) { return NOT_SUPPORTED; }

/*
 * nvidia-smi refuses a library without this ("Mismatch in versions"). A table begins with its size in bytes. These
 * calls are where nvidia-smi looks for them; the others say that they are not supported, which it shows as N/A.
 */
NVML nvmlInternalGetExportTable(const void **table, const void *id)
{
    enum { SET_POLICY = 192, GET_POLICIES = 193, COMPUTE = 213, MPS = 214, GRAPHICS = 215 };
    static const void *slots[512];

    (void)id;
    if (!table)
        return INVALID_ARGUMENT;
    slots[0] = (void *)sizeof slots;
    for (size_t i = 1; i < COUNT(slots); i++)
        slots[i] = (void *)unsupported;
    slots[SET_POLICY] = (void *)nvmlDeviceSetComputePolicy;
    slots[GET_POLICIES] = (void *)nvmlDeviceGetComputePolicies;
    slots[COMPUTE] = (void *)nvmlDeviceGetComputeRunningProcesses_private;
    slots[MPS] = (void *)nvmlDeviceGetMPSComputeRunningProcesses_private;
    slots[GRAPHICS] = (void *)nvmlDeviceGetGraphicsRunningProcesses_private;
    *table = slots;
    return SUCCESS;
}
