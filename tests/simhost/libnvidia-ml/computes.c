/* Compute instances: what a GPU instance is divided into, and what programs run on. */
#include <stdio.h>
#include <unistd.h>

#include "nvml.h"

/* ---- Profiles: so many of the GPU instance's slices; all share its engines and its memory ----------------- */

enum { KNOWN_PROFILES = 9 }; /* NVML_COMPUTE_INSTANCE_PROFILE_COUNT */

/* Slices by NVML_COMPUTE_INSTANCE_PROFILE_*, which is also the profile's id; 0 for those of other models. */
static const unsigned int slices_by_number[KNOWN_PROFILES] = {1, 2, 3, 4, 7};

static unsigned int slices_of(struct part part, unsigned int number)
{
    unsigned int slices = number < KNOWN_PROFILES ? slices_by_number[number] : 0, all = profile_of(part)->slices;

    return slices > all || (slices == 3 && all == 4) ? 0 : slices;
}

static unsigned int number_of(unsigned int slices)
{
    unsigned int number = 0;

    while (slices_by_number[number] != slices)
        number++;
    return number;
}

unsigned int compute_sm(struct part part, unsigned int slices)
{
    struct sim_profile *profile = profile_of(part);

    return slices == profile->slices ? profile->sm : slices * part.gpu->profiles[0].sm; /* the first is 1g */
}

static void compute_name(struct part part, unsigned int slices, char *name, size_t size)
{
    struct sim_profile *profile = profile_of(part);

    if (slices == profile->slices)
        snprintf(name, size, "MIG %s", profile->name);
    else
        snprintf(name, size, "MIG %uc.%s", slices, profile->name);
}

#define FILL_PROFILE(info, part, slices_)                                                                       \
    do {                                                                                                        \
        struct sim_profile *profile = profile_of(part);                                                         \
        (info)->id = number_of(slices_), (info)->slices = (slices_), (info)->count = profile->slices / (slices_); \
        (info)->sm = compute_sm(part, slices_), (info)->copy = profile->copy;                                   \
        (info)->decoders = profile->decoders, (info)->encoders = 0;                                             \
        (info)->jpeg = profile->jpeg, (info)->ofa = profile->ofa;                                               \
    } while (0)

typedef struct { unsigned int id, slices, count, sm, copy, decoders, encoders, jpeg, ofa; }
    nvmlComputeInstanceProfileInfo_t;
typedef struct {
    unsigned int version, id, slices, count, sm, copy, decoders, encoders, jpeg, ofa;
    char name[96];
    unsigned int capabilities; /* since version 3 */
} nvmlComputeInstanceProfileInfo_v3_t;

NVML nvmlGpuInstanceGetComputeInstanceProfileInfo(void *instance, unsigned int number, unsigned int engines,
                                                  nvmlComputeInstanceProfileInfo_t *info)
{
    ENTER_PART(instance, info && part.instance && !part.compute && number < KNOWN_PROFILES && engines == 0);
    unsigned int slices = slices_of(part, number);
    if (!slices)
        return NOT_SUPPORTED;
    FILL_PROFILE(info, part, slices);
    return SUCCESS;
}

NVML nvmlGpuInstanceGetComputeInstanceProfileInfoV(void *instance, unsigned int number, unsigned int engines,
                                                   nvmlComputeInstanceProfileInfo_v3_t *info)
{
    ENTER_PART(instance, info && part.instance && !part.compute && number < KNOWN_PROFILES && engines == 0);
    unsigned int slices = slices_of(part, number);
    if (!slices)
        return NOT_SUPPORTED;
    if (info->version == (sizeof *info | 3u << 24))
        info->capabilities = 0;
    else if (info->version != (offsetof(nvmlComputeInstanceProfileInfo_v3_t, capabilities) | 2u << 24))
        return ARGUMENT_VERSION_MISMATCH;
    FILL_PROFILE(info, part, slices);
    compute_name(part, slices, info->name, sizeof info->name);
    return SUCCESS;
}

/* ---- Placements ------------------------------------------------------------------------------------------ */

static bool is_possible(struct part part, unsigned int slices, unsigned int start)
{
    unsigned int step = slices == 3 ? 4 : slices;

    return start % step == 0 && start + slices <= profile_of(part)->slices;
}

static bool is_free(struct part part, unsigned int slices, unsigned int start)
{
    for (size_t i = 0; i < COUNT(part.instance->computes); i++) {
        struct sim_compute *other = &part.instance->computes[i];
        if (other->serial && start < other->start + other->slices && other->start < start + slices)
            return false;
    }
    return is_possible(part, slices, start);
}

NVML nvmlGpuInstanceGetComputeInstancePossiblePlacements(void *instance, unsigned int id,
                                                         nvmlPlacement_t *placements, unsigned int *count)
{
    ENTER_PART(instance, count && part.instance && !part.compute);
    unsigned int slices = slices_of(part, id);
    if (!slices)
        return NOT_SUPPORTED;
    *count = 0;
    for (unsigned int start = 0; start < 8; start++)
        if (is_possible(part, slices, start)) {
            if (placements)
                placements[*count] = (nvmlPlacement_t){start, slices};
            ++*count;
        }
    return SUCCESS;
}

NVML nvmlGpuInstanceGetComputeInstanceRemainingCapacity(void *instance, unsigned int id, unsigned int *count)
{
    ENTER_PART(instance, count && part.instance && !part.compute);
    unsigned int slices = slices_of(part, id), free = 0;
    for (unsigned int start = 0; slices && start < 8; start++)
        free += is_free(part, slices, start);
    return slices ? give(count, free) : NOT_SUPPORTED;
}

/* ---- Instances ------------------------------------------------------------------------------------------- */

/* New for each instance, and the same for the same history of the GPU. */
static void make_uuid(const char *gpu, uint32_t serial, char *uuid, size_t size)
{
    uint64_t hash[2] = {0xcbf29ce484222325, 0x84222325cbf29ce4}; /* FNV-1a */

    for (int half = 0; half < 2; half++) {
        for (const char *at = gpu; *at; at++)
            hash[half] = (hash[half] ^ (unsigned char)*at) * 0x100000001b3;
        for (int at = 0; at < 8; at++)
            hash[half] = (hash[half] ^ (serial >> at % 4 * 8 & 0xff)) * 0x100000001b3;
    }
    snprintf(uuid, size, "MIG-%08x-%04x-5%03x-%04x-%012llx", (uint32_t)hash[0], (unsigned int)(hash[0] >> 48),
             (unsigned int)(hash[0] >> 32 & 0xfff), (unsigned int)(hash[1] >> 48 & 0x3fff) | 0x8000,
             (unsigned long long)hash[1] & 0xffffffffffff);
}

static struct sim_compute *with_id(struct part part, unsigned int id)
{
    for (size_t i = 0; i < COUNT(part.instance->computes); i++)
        if (part.instance->computes[i].serial && part.instance->computes[i].id == id)
            return &part.instance->computes[i];
    return NULL;
}

static nvmlReturn_t create(struct part part, unsigned int slices, const nvmlPlacement_t *asked, void **handle)
{
    unsigned int start = asked ? asked->start : 0, id = 0;

    if (part.gpu->reset_required)
        return RESET_REQUIRED;
    if (asked && (start >= 8 || asked->size != slices || !is_possible(part, slices, start)))
        return INVALID_ARGUMENT;
    while (!asked && start < 8 && !is_free(part, slices, start))
        start++;
    if (start >= 8 || !is_free(part, slices, start))
        return INSUFFICIENT_RESOURCES;
    while (with_id(part, id))
        id++;
    part.compute = part.instance->computes;
    while (part.compute->serial) /* at most seven are taken, as each has a slice */
        part.compute++;
    *part.compute = (struct sim_compute){++part.gpu->last_serial, id, slices, start, ""};
    make_uuid(part.gpu->uuid, part.compute->serial, part.compute->uuid, sizeof part.compute->uuid);
    make_access(part);
    *handle = handle_of(part);
    return SUCCESS;
}

static nvmlReturn_t try_create(struct part part, unsigned int id, const nvmlPlacement_t *asked, void **handle)
{
    unsigned int slices = slices_of(part, id);

    if (geteuid() != 0)
        return NO_PERMISSION;
    if (!slices)
        return NOT_SUPPORTED;
    void *instance = handle_of(part);
    int lock = lock_state();
    nvmlReturn_t error = find_part(instance, &part) ? create(part, slices, asked, handle) : INVALID_ARGUMENT;
    unlock_state(lock);
    changed();
    return error;
}

NVML nvmlGpuInstanceCreateComputeInstance(void *instance, unsigned int id, void **compute)
{
    ENTER_PART(instance, compute && part.instance && !part.compute);
    return try_create(part, id, NULL, compute);
}

NVML nvmlGpuInstanceCreateComputeInstanceWithPlacement(void *instance, unsigned int id,
                                                       const nvmlPlacement_t *placement, void **compute)
{
    ENTER_PART(instance, placement && compute && part.instance && !part.compute);
    return try_create(part, id, placement, compute);
}

NVML nvmlComputeInstanceDestroy(void *compute)
{
    ENTER_PART(compute, part.compute);
    if (geteuid() != 0)
        return NO_PERMISSION;
    int lock = lock_state();
    nvmlReturn_t error = !find_part(compute, &part) ? INVALID_ARGUMENT : has_clients(part) ? IN_USE : SUCCESS;
    if (!error) {
        remove_access(part);
        part.compute->serial = 0;
    }
    unlock_state(lock);
    changed();
    return error;
}

NVML nvmlGpuInstanceGetComputeInstances(void *instance, unsigned int id, void **computes, unsigned int *count)
{
    ENTER_PART(instance, computes && count && part.instance && !part.compute);
    unsigned int slices = slices_of(part, id);
    if (!slices)
        return NOT_SUPPORTED;
    *count = 0;
    for (unsigned int i = 0; i < SIM_MAX_INSTANCES; i++) {
        part.compute = with_id(part, i);
        if (part.compute && part.compute->slices == slices)
            computes[(*count)++] = handle_of(part);
    }
    return SUCCESS;
}

NVML nvmlGpuInstanceGetComputeInstanceById(void *instance, unsigned int id, void **compute)
{
    ENTER_PART(instance, compute && part.instance && !part.compute);
    part.compute = with_id(part, id);
    if (!part.compute)
        return NOT_FOUND;
    *compute = handle_of(part);
    return SUCCESS;
}

typedef struct {
    nvmlDevice_t device;
    void *instance;
    unsigned int id, profile_id;
    nvmlPlacement_t placement;
} nvmlComputeInstanceInfo_t;

NVML nvmlComputeInstanceGetInfo_v2(void *compute, nvmlComputeInstanceInfo_t *info)
{
    ENTER_PART(compute, info && part.compute);
    *info = (nvmlComputeInstanceInfo_t){
        part.gpu, handle_of((struct part){part.gpu, part.instance, NULL}), part.compute->id,
        number_of(part.compute->slices), {part.compute->start, part.compute->slices},
    };
    return SUCCESS;
}
