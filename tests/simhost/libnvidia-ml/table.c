/*
 * What nvidia-smi calls without a name: a table of functions that no header describes. Those for processes are
 * where 535 and 550 look for them, the others where 535 does.
 */
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

/* ---- nvidia-smi --gpu-reset, which asks several things first ----------------------------------------------- */

static nvmlReturn_t nvmlDeviceIsPrimary(nvmlDevice_t gpu, unsigned int *primary)
{
    ENTER_DEVICE(gpu, primary);
    return give(primary, 0);
}

/* All are reset, or none. What else it takes is left alone. */
static nvmlReturn_t nvmlDevicesReset(unsigned int count, const nvmlDevice_t *gpus)
{
    ENTER(gpus);
    if (geteuid() != 0)
        return NO_PERMISSION;
    for (unsigned int i = 0; i < count; i++) {
        nvmlReturn_t error = enter_device(__func__, gpus[i]);
        if (!error && has_clients((struct part){gpus[i], NULL, NULL}))
            error = IN_USE;
        if (error && error != GPU_IS_LOST)
            return error;
    }
    for (unsigned int i = 0; i < count; i++)
        reset_gpu(gpus[i]);
    return SUCCESS;
}

static nvmlReturn_t agreed(void) { return SUCCESS; } /* whether GPUs are on a fabric, which are reset together */
static nvmlReturn_t unsupported(void) { return NOT_SUPPORTED; }

/*
 * nvidia-smi refuses a library without this ("Mismatch in versions"). A table begins with its size in bytes. These
 * calls are where nvidia-smi looks for them; the others say that they are not supported, which it shows as N/A.
 */
NVML nvmlInternalGetExportTable(const void **table, const void *id)
{
    enum {
        IS_PRIMARY = 20, RESET = 168, FABRIC = 169, GROUP = 182, LOCK_GROUP = 183, UNLOCK_GROUP = 184,
        SET_POLICY = 192, GET_POLICIES = 193, COMPUTE = 213, MPS = 214, GRAPHICS = 215
    };
    static const void *slots[512];

    (void)id;
    if (!table)
        return INVALID_ARGUMENT;
    slots[0] = (void *)sizeof slots;
    for (size_t i = 1; i < COUNT(slots); i++)
        slots[i] = (void *)unsupported;
    slots[IS_PRIMARY] = (void *)nvmlDeviceIsPrimary;
    slots[FABRIC] = slots[GROUP] = slots[LOCK_GROUP] = slots[UNLOCK_GROUP] = (void *)agreed;
    slots[RESET] = (void *)nvmlDevicesReset;
    slots[SET_POLICY] = (void *)nvmlDeviceSetComputePolicy;
    slots[GET_POLICIES] = (void *)nvmlDeviceGetComputePolicies;
    slots[COMPUTE] = (void *)nvmlDeviceGetComputeRunningProcesses_private;
    slots[MPS] = (void *)nvmlDeviceGetMPSComputeRunningProcesses_private;
    slots[GRAPHICS] = (void *)nvmlDeviceGetGraphicsRunningProcesses_private;
    *table = slots;
    return SUCCESS;
}
