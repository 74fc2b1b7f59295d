/* MIG: the mode, and MIG devices, each of which is a compute instance. */
#include <stdio.h>
#include <strings.h>
#include <unistd.h>

#include "nvml.h"

/* ---- Handles of instances -------------------------------------------------------------------------------- */

/*
 * A number that says where the instance is and which one it is: TAG, GPU, GPU instance, compute instance (NONE for
 * a GPU instance), serial. No later instance has the same one.
 */
enum { TAG = 0x5d, NONE = 0xff };

void *handle_of(struct part part)
{
    uint64_t gpu = part.gpu - state->gpus, instance = part.instance - part.gpu->instances;
    uint64_t compute = part.compute ? (uint64_t)(part.compute - part.instance->computes) : NONE;
    uint64_t serial = part.compute ? part.compute->serial : part.instance->serial;

    return (void *)(uintptr_t)((uint64_t)TAG << 56 | gpu << 48 | instance << 40 | compute << 32 | serial);
}

bool find_part(const void *handle, struct part *part)
{
    uint64_t bits = (uintptr_t)handle;
    unsigned int gpu = bits >> 48 & 0xff, instance = bits >> 40 & 0xff, compute = bits >> 32 & 0xff;

    *part = (struct part){(struct sim_gpu *)handle, NULL, NULL};
    if (part->gpu >= state->gpus && part->gpu < state->gpus + state->gpu_count)
        return true;
    if (bits >> 56 != TAG || gpu >= state->gpu_count || instance >= SIM_MAX_INSTANCES || !(uint32_t)bits)
        return false;
    part->gpu = &state->gpus[gpu];
    part->instance = &part->gpu->instances[instance];
    if (compute == NONE)
        return part->instance->serial == (uint32_t)bits;
    part->compute = compute < SIM_MAX_INSTANCES ? &part->instance->computes[compute] : NULL;
    return part->compute && part->instance->serial && part->compute->serial == (uint32_t)bits;
}

struct sim_profile *profile_of(struct part part)
{
    return &part.gpu->profiles[part.instance->profile];
}

bool has_process(struct part part, const struct sim_process *process)
{
    return process->pid && (!part.instance || process->gpu_instance == part.instance->id) &&
           (!part.compute || process->compute_instance == part.compute->id);
}

bool has_clients(struct part part)
{
    for (size_t i = 0; i < COUNT(part.gpu->processes); i++)
        if (has_process(part, &part.gpu->processes[i]))
            return true;
    return false;
}

/* ---- The mode -------------------------------------------------------------------------------------------- */

enum { DEFAULT_MODE = 0 }; /* NVML_COMPUTEMODE_DEFAULT */

/* End a GPU instance (UINT_MAX: all), even in use, with all in it, as a reset does. The caller has the lock. */
static void end_instances(struct sim_gpu *gpu, unsigned int id)
{
    for (size_t i = 0; i < COUNT(gpu->instances); i++) {
        struct part part = {gpu, &gpu->instances[i], NULL};
        if (!part.instance->serial || (id != UINT_MAX && part.instance->id != id))
            continue;
        for (size_t p = 0; p < COUNT(gpu->processes); p++)
            if (has_process(part, &gpu->processes[p]))
                gpu->processes[p].pid = 0;
        for (size_t c = 0; c < COUNT(part.instance->computes); c++)
            if (part.instance->computes[c].serial)
                remove_access((struct part){gpu, part.instance, &part.instance->computes[c]});
        remove_access(part);
        memset(part.instance, 0, sizeof *part.instance);
    }
}

void reset_gpu(struct sim_gpu *gpu)
{
    int lock = lock_state();

    end_instances(gpu, UINT_MAX);
    for (size_t i = 0; i < COUNT(gpu->processes); i++)
        gpu->processes[i].pid = 0;
    gpu->mig_current = gpu->mig_pending;
    gpu->compute_mode = DEFAULT_MODE;
    gpu->reset_required = 0;
    unlock_state(lock);
    changed();
}

/* For Python (gpu.py), which leaves instances and their files to this library. */
PUBLIC void simhost_end_instances(unsigned int slot, unsigned int id)
{
    if (!map_state() || slot >= state->gpu_count)
        return;
    int lock = lock_state();
    end_instances(&state->gpus[slot], id);
    unlock_state(lock);
    changed();
}

PUBLIC void simhost_reset(unsigned int slot)
{
    if (map_state() && slot < state->gpu_count)
        reset_gpu(&state->gpus[slot]);
}

NVML nvmlDeviceGetMigMode(nvmlDevice_t gpu, unsigned int *current, unsigned int *pending)
{
    ENTER_DEVICE(gpu, current && pending);
    if (!gpu->mig_capable)
        return NOT_SUPPORTED;
    *pending = gpu->mig_pending;
    return give(current, gpu->mig_current);
}

/*
 * *status says what prevents the change; the mode is then pending until the call is repeated or the GPU is reset.
 * A failure of nvmlDeviceSetMigModeActivation, which is no call, is its status.
 */
NVML nvmlDeviceSetMigMode(nvmlDevice_t gpu, unsigned int mode, nvmlReturn_t *status)
{
    ENTER_DEVICE(gpu, status && mode <= 1);
    if (!gpu->mig_capable)
        return NOT_SUPPORTED;
    if (geteuid() != 0)
        return NO_PERMISSION;
    nvmlReturn_t refused = injected("nvmlDeviceSetMigModeActivation", (int)(gpu - state->gpus));
    int lock = lock_state();
    bool same = gpu->mig_current == mode, in_use = has_clients((struct part){gpu, NULL, NULL});
    gpu->mig_pending = mode;
    bool by_reset = gpu->mig_needs_reset || gpu->reset_required;
    *status = refused ? refused : same ? SUCCESS : in_use ? IN_USE : by_reset ? RESET_REQUIRED : SUCCESS;
    if (!same && !*status) {
        end_instances(gpu, UINT_MAX);
        gpu->mig_current = mode;
        gpu->compute_mode = DEFAULT_MODE; /* its lifetime is that of the GPU's initialisation, which ends here */
    }
    unlock_state(lock);
    changed();
    return SUCCESS;
}

/* ---- MIG devices ----------------------------------------------------------------------------------------- */

static unsigned int most_devices(const struct sim_gpu *gpu)
{
    unsigned int most = 0;

    for (size_t i = 0; i < COUNT(gpu->profiles); i++)
        most = gpu->profiles[i].count > most ? gpu->profiles[i].count : most;
    return gpu->mig_current ? most : 0;
}

NVML nvmlDeviceGetMaxMigDeviceCount(nvmlDevice_t gpu, unsigned int *count)
{
    ENTER_DEVICE(gpu, count);
    return give(count, most_devices(gpu));
}

/* The first compute instance after `last` in the order of ids, which is that of MIG devices. */
static struct part next_device(struct sim_gpu *gpu, struct part last)
{
    struct part next = {0};
    unsigned int after = last.compute ? last.instance->id * 16 + last.compute->id + 1 : 0, least = UINT_MAX;

    for (size_t i = 0; i < COUNT(gpu->instances); i++)
        for (size_t c = 0; gpu->instances[i].serial && c < COUNT(gpu->instances[i].computes); c++) {
            struct part part = {gpu, &gpu->instances[i], &gpu->instances[i].computes[c]};
            unsigned int place = part.instance->id * 16 + part.compute->id;
            if (part.compute->serial && place >= after && place < least)
                least = place, next = part;
        }
    return next;
}

NVML nvmlDeviceGetMigDeviceHandleByIndex(nvmlDevice_t gpu, unsigned int index, nvmlDevice_t *device)
{
    ENTER_DEVICE(gpu, device);
    if (!gpu->mig_current)
        return NOT_SUPPORTED;
    if (index >= most_devices(gpu))
        return INVALID_ARGUMENT;
    struct part part = next_device(gpu, (struct part){0});
    while (part.compute && index--)
        part = next_device(gpu, part);
    if (!part.compute)
        return NOT_FOUND;
    *device = handle_of(part);
    return SUCCESS;
}

nvmlDevice_t find_mig_device(struct sim_gpu *gpu, const char *uuid)
{
    for (struct part part = next_device(gpu, (struct part){0}); part.compute; part = next_device(gpu, part))
        if (!strcasecmp(part.compute->uuid, uuid))
            return handle_of(part);
    return NULL;
}

unsigned int index_of_mig_device(struct part part)
{
    unsigned int index = 0;

    for (struct part at = next_device(part.gpu, (struct part){0}); at.compute && at.compute != part.compute;)
        index++, at = next_device(part.gpu, at);
    return index;
}

NVML nvmlDeviceIsMigDeviceHandle(nvmlDevice_t device, unsigned int *is)
{
    ENTER_PART(device, is);
    return give(is, part.compute != NULL);
}

NVML nvmlDeviceGetGpuInstanceId(nvmlDevice_t device, unsigned int *id)
{
    ENTER_PART(device, id && part.compute);
    return give(id, part.instance->id);
}

NVML nvmlDeviceGetComputeInstanceId(nvmlDevice_t device, unsigned int *id)
{
    ENTER_PART(device, id && part.compute);
    return give(id, part.compute->id);
}

NVML nvmlDeviceGetDeviceHandleFromMigDeviceHandle(nvmlDevice_t device, nvmlDevice_t *gpu)
{
    ENTER_PART(device, gpu && part.compute);
    *gpu = part.gpu;
    return SUCCESS;
}

typedef struct {
    unsigned int sm, copy, decoders, encoders, jpeg, ofa, gpu_slices, compute_slices;
    unsigned long long memory_mib;
} nvmlDeviceAttributes_t;

NVML nvmlDeviceGetAttributes_v2(nvmlDevice_t device, nvmlDeviceAttributes_t *attributes)
{
    ENTER_PART(device, attributes);
    if (!part.compute)
        return NOT_SUPPORTED;
    struct sim_profile *profile = profile_of(part);
    *attributes = (nvmlDeviceAttributes_t){
        compute_sm(part, part.compute->slices), profile->copy, profile->decoders, 0, profile->jpeg,
        profile->ofa, profile->slices, part.compute->slices, profile->memory_mib,
    };
    return SUCCESS;
}

typedef struct { unsigned long long total, free, used; } nvmlBAR1Memory_t;

/* nvidia-smi leaves out a MIG device that has none of these two. */
NVML nvmlDeviceGetBAR1MemoryInfo(nvmlDevice_t device, nvmlBAR1Memory_t *memory)
{
    unsigned long long mib = 1;

    ENTER_PART(device, memory);
    if (!part.compute)
        return NOT_SUPPORTED;
    while (mib < profile_of(part)->memory_mib)
        mib *= 2;
    *memory = (nvmlBAR1Memory_t){(mib - 1) * MIB, (mib - 1) * MIB, 0};
    return SUCCESS;
}

NVML nvmlDeviceGetMemoryErrorCounter(nvmlDevice_t device, unsigned int type, unsigned int counter,
                                     unsigned int location, unsigned long long *count)
{
    (void)type, (void)counter, (void)location;
    ENTER_PART(device, count);
    *count = 0;
    return part.compute ? SUCCESS : NOT_SUPPORTED;
}
