/* Finding GPUs: by index, UUID and PCI address. */
#include <stdio.h>
#include <strings.h>

#include "nvml.h"

static unsigned int order[SIM_MAX_GPUS], order_count; /* slots by NVML index */
static uint32_t arrivals[SIM_MAX_GPUS];               /* those of each slot when it was found */

static uint64_t address_of(const struct sim_gpu *gpu)
{
    return (uint64_t)gpu->pci_domain << 16 | gpu->pci_bus << 8 | gpu->pci_device;
}

void find_gpus(void)
{
    order_count = 0;
    for (unsigned int i = 0; i < state->gpu_count; i++) {
        arrivals[i] = state->gpus[i].arrivals;
        if (!state->gpus[i].present)
            continue;
        unsigned int place = order_count++;
        for (; place && address_of(&state->gpus[order[place - 1]]) > address_of(&state->gpus[i]); place--)
            order[place] = order[place - 1];
        order[place] = i;
    }
}

bool is_gone(const struct sim_gpu *gpu)
{
    return !gpu->present || gpu->arrivals != arrivals[gpu - state->gpus];
}

static nvmlReturn_t found(struct sim_gpu *gpu, nvmlDevice_t *device)
{
    if (is_gone(gpu))
        return GPU_IS_LOST;
    if (gpu->lost && gpu->lost_lookup)
        return gpu->lost_lookup;
    *device = gpu;
    return SUCCESS;
}

/* A failure of a lookup may name the GPU that is looked up. */
static nvmlReturn_t look_up(const char *call, struct sim_gpu *gpu, nvmlDevice_t *device)
{
    nvmlReturn_t error;

    if (!__atomic_load_n(&references, __ATOMIC_ACQUIRE))
        return UNINITIALIZED;
    error = injected(call, gpu ? (int)(gpu - state->gpus) : -1);
    return error ? error : gpu ? found(gpu, device) : NOT_FOUND;
}

NVML nvmlDeviceGetCount_v2(unsigned int *count) { ENTER(count); return give(count, order_count); }

NVML nvmlDeviceGetHandleByIndex_v2(unsigned int index, nvmlDevice_t *device)
{
    if (references && (!device || index >= order_count))
        return INVALID_ARGUMENT;
    return look_up(__func__, references ? &state->gpus[order[index]] : NULL, device);
}

NVML nvmlDeviceGetHandleByUUID(const char *uuid, nvmlDevice_t *device)
{
    struct sim_gpu *gpu = NULL;
    nvmlDevice_t mig_device = NULL;

    if (references && (!device || !uuid))
        return INVALID_ARGUMENT;
    for (unsigned int i = 0; references && !gpu && i < order_count; i++) {
        struct sim_gpu *next = &state->gpus[order[i]];
        mig_device = find_mig_device(next, uuid);
        if (mig_device || !strcasecmp(next->uuid, uuid))
            gpu = next;
    }
    nvmlReturn_t error = look_up(__func__, gpu, device);
    if (!error && mig_device)
        *device = mig_device;
    return error;
}

static bool has_address(const struct sim_gpu *gpu, const char *text)
{
    unsigned int domain, bus, device, function;
    int end = 0;

    if (sscanf(text, "%x:%x:%x.%x%n", &domain, &bus, &device, &function, &end) != 4 || text[end]) {
        domain = 0, end = 0;
        if (sscanf(text, "%x:%x.%x%n", &bus, &device, &function, &end) != 3 || text[end])
            return false;
    }
    return gpu->pci_domain == domain && gpu->pci_bus == bus && gpu->pci_device == device && function == 0;
}

NVML nvmlDeviceGetHandleByPciBusId_v2(const char *address, nvmlDevice_t *device)
{
    struct sim_gpu *gpu = NULL;

    if (references && (!device || !address))
        return INVALID_ARGUMENT;
    for (unsigned int i = 0; references && i < order_count; i++)
        if (has_address(&state->gpus[order[i]], address))
            gpu = &state->gpus[order[i]];
    return look_up(__func__, gpu, device);
}

NVML nvmlDeviceGetIndex(nvmlDevice_t gpu, unsigned int *index)
{
    ENTER_PART(gpu, index);
    if (part.compute)
        return give(index, index_of_mig_device(part));
    for (unsigned int i = 0; i < order_count; i++)
        if (&state->gpus[order[i]] == part.gpu)
            return give(index, i);
    return NOT_FOUND;
}
