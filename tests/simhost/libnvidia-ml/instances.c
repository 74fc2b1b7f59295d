/* GPU instances: profiles, placements, creation and destruction. */
#include <stdio.h>
#include <unistd.h>

#include "nvml.h"

/* ---- Profiles -------------------------------------------------------------------------------------------- */

enum { KNOWN_PROFILES = 0x12 }; /* NVML_GPU_INSTANCE_PROFILE_COUNT */

static struct sim_profile *by_id(struct sim_gpu *gpu, unsigned int id)
{
    for (size_t i = 0; i < COUNT(gpu->profiles); i++)
        if (gpu->profiles[i].name[0] && gpu->profiles[i].id == id)
            return &gpu->profiles[i];
    return NULL;
}

static struct sim_profile *by_number(struct sim_gpu *gpu, unsigned int number)
{
    for (size_t i = 0; i < COUNT(gpu->profiles); i++)
        if (gpu->profiles[i].name[0] && gpu->profiles[i].number == number)
            return &gpu->profiles[i];
    return NULL;
}

/* The fields that all versions have in common, from `id` on. */
#define FILL_PROFILE(info, profile)                                                                           \
    do {                                                                                                      \
        (info)->id = (profile)->id, (info)->slices = (profile)->slices, (info)->count = (profile)->count;     \
        (info)->sm = (profile)->sm, (info)->copy = (profile)->copy, (info)->decoders = (profile)->decoders;   \
        (info)->encoders = 0, (info)->jpeg = (profile)->jpeg, (info)->ofa = (profile)->ofa;                   \
        (info)->memory_mib = (profile)->memory_mib;                                                           \
    } while (0)

typedef struct {
    unsigned int id, p2p, slices, count, sm, copy, decoders, encoders, jpeg, ofa;
    unsigned long long memory_mib;
} nvmlGpuInstanceProfileInfo_t;
typedef struct {
    unsigned int version, id, p2p, slices, count, sm, copy, decoders, encoders, jpeg, ofa;
    unsigned long long memory_mib;
    char name[96];
} nvmlGpuInstanceProfileInfo_v2_t;
typedef struct {
    unsigned int version, id, slices, count, sm, copy, decoders, encoders, jpeg, ofa;
    unsigned long long memory_mib;
    char name[96];
    unsigned int capabilities;
} nvmlGpuInstanceProfileInfo_v3_t;

/* Also while MIG mode is off: mig-parted relies on it. */
NVML nvmlDeviceGetGpuInstanceProfileInfo(nvmlDevice_t gpu, unsigned int number, nvmlGpuInstanceProfileInfo_t *info)
{
    ENTER_DEVICE(gpu, info && number < KNOWN_PROFILES);
    struct sim_profile *profile = by_number(gpu, number);
    if (!profile)
        return NOT_SUPPORTED;
    info->p2p = 0;
    FILL_PROFILE(info, profile);
    return SUCCESS;
}

static nvmlReturn_t give_profile(const struct sim_profile *profile, void *out)
{
    nvmlGpuInstanceProfileInfo_v2_t *v2 = out;
    nvmlGpuInstanceProfileInfo_v3_t *v3 = out;

    if (v2->version == (sizeof *v2 | 2u << 24)) {
        v2->p2p = 0;
        FILL_PROFILE(v2, profile);
        snprintf(v2->name, sizeof v2->name, "MIG %s", profile->name);
    } else if (v2->version == (sizeof *v3 | 3u << 24)) {
        v3->capabilities = 0;
        FILL_PROFILE(v3, profile);
        snprintf(v3->name, sizeof v3->name, "MIG %s", profile->name);
    } else {
        return ARGUMENT_VERSION_MISMATCH;
    }
    return SUCCESS;
}

NVML nvmlDeviceGetGpuInstanceProfileInfoV(nvmlDevice_t gpu, unsigned int number, void *info)
{
    ENTER_DEVICE(gpu, info && number < KNOWN_PROFILES);
    struct sim_profile *profile = by_number(gpu, number);
    return profile ? give_profile(profile, info) : NOT_SUPPORTED;
}

NVML nvmlDeviceGetGpuInstanceProfileInfoByIdV(nvmlDevice_t gpu, unsigned int id, void *info)
{
    ENTER_DEVICE(gpu, info);
    struct sim_profile *profile = by_id(gpu, id);
    return profile ? give_profile(profile, info) : gpu->mig_capable ? INVALID_ARGUMENT : NOT_SUPPORTED;
}

/* ---- Placements ------------------------------------------------------------------------------------------ */

static uint32_t slices_at(const struct sim_profile *profile, unsigned int start)
{
    return ((1u << profile->size) - 1) << start;
}

static uint32_t taken_slices(const struct sim_gpu *gpu)
{
    uint32_t taken = 0;

    for (size_t i = 0; i < COUNT(gpu->instances); i++)
        if (gpu->instances[i].serial)
            taken |= slices_at(&gpu->profiles[gpu->instances[i].profile], gpu->instances[i].start);
    return taken;
}

static bool is_free(const struct sim_profile *profile, unsigned int start, uint32_t taken)
{
    return profile->starts >> start & 1 && !(slices_at(profile, start) & taken);
}

/* How many more instances of a profile fit beside each other. */
static unsigned int remaining(const struct sim_gpu *gpu, const struct sim_profile *profile)
{
    unsigned int fit = 0, there = 0;
    uint32_t taken = taken_slices(gpu);

    for (size_t i = 0; i < COUNT(gpu->instances); i++)
        there += gpu->instances[i].serial && &gpu->profiles[gpu->instances[i].profile] == profile;
    for (unsigned int start = 0; start < 8; start++)
        if (is_free(profile, start, taken))
            fit++, taken |= slices_at(profile, start);
    return fit < profile->count - there ? fit : profile->count - there;
}

/* How many free placements an instance would block: the driver chooses the one that blocks the fewest. */
static unsigned int blocked_by(const struct sim_gpu *gpu, uint32_t slices, uint32_t taken)
{
    unsigned int blocked = 0;

    for (size_t i = 0; i < COUNT(gpu->profiles); i++)
        for (unsigned int start = 0; gpu->profiles[i].name[0] && start < 8; start++)
            blocked += is_free(&gpu->profiles[i], start, taken) && slices_at(&gpu->profiles[i], start) & slices;
    return blocked;
}

static unsigned int best_start(const struct sim_gpu *gpu, const struct sim_profile *profile)
{
    uint32_t taken = taken_slices(gpu);
    unsigned int best = 0, least = UINT_MAX;

    for (unsigned int start = 0; start < 8; start++) {
        unsigned int blocked = blocked_by(gpu, slices_at(profile, start), taken);
        if (is_free(profile, start, taken) && blocked < least)
            least = blocked, best = start;
    }
    return best;
}

NVML nvmlDeviceGetGpuInstancePossiblePlacements_v2(nvmlDevice_t gpu, unsigned int id, nvmlPlacement_t *placements,
                                                   unsigned int *count)
{
    ENTER_DEVICE(gpu, count);
    struct sim_profile *profile = by_id(gpu, id);
    if (!profile)
        return gpu->mig_capable ? INVALID_ARGUMENT : NOT_SUPPORTED;
    *count = 0;
    for (unsigned int start = 0; start < 8; start++)
        if (profile->starts >> start & 1) {
            if (placements)
                placements[*count] = (nvmlPlacement_t){start, profile->size};
            ++*count;
        }
    return SUCCESS;
}

NVML nvmlDeviceGetGpuInstanceRemainingCapacity(nvmlDevice_t gpu, unsigned int id, unsigned int *count)
{
    ENTER_DEVICE(gpu, count);
    struct sim_profile *profile = by_id(gpu, id);
    if (!gpu->mig_current)
        return NOT_SUPPORTED;
    return profile ? give(count, remaining(gpu, profile)) : INVALID_ARGUMENT;
}

/* ---- Instances ------------------------------------------------------------------------------------------- */

/* As the driver numbers them: the whole GPU is 0, its halves are 1 and 2, its quarters 3 to 6, ... */
static unsigned int id_at(const struct sim_gpu *gpu, const struct sim_profile *profile, unsigned int start)
{
    unsigned int whole = 0;

    for (size_t i = 0; i < COUNT(gpu->profiles); i++)
        whole = gpu->profiles[i].size > whole ? gpu->profiles[i].size : whole;
    return whole / profile->size - 1 + start / profile->size;
}

static nvmlReturn_t create(struct sim_gpu *gpu, const struct sim_profile *profile, const nvmlPlacement_t *asked,
                           void **handle)
{
    unsigned int start = asked ? asked->start : best_start(gpu, profile);

    if (gpu->reset_required)
        return RESET_REQUIRED;
    if (asked && (start >= 8 || asked->size != profile->size || !(profile->starts >> start & 1)))
        return INVALID_ARGUMENT;
    if (!remaining(gpu, profile) || !is_free(profile, start, taken_slices(gpu)))
        return INSUFFICIENT_RESOURCES;
    for (size_t i = 0; i < COUNT(gpu->instances); i++)
        if (!gpu->instances[i].serial) {
            struct part part = {gpu, &gpu->instances[i], NULL};
            part.instance->serial = ++gpu->last_serial;
            part.instance->id = id_at(gpu, profile, start);
            part.instance->profile = profile - gpu->profiles;
            part.instance->start = start;
            make_access(part);
            *handle = handle_of(part);
            return SUCCESS;
        }
    return INSUFFICIENT_RESOURCES;
}

static nvmlReturn_t try_create(struct sim_gpu *gpu, unsigned int id, const nvmlPlacement_t *asked, void **handle)
{
    struct sim_profile *profile = by_id(gpu, id);

    if (geteuid() != 0)
        return NO_PERMISSION;
    if (!gpu->mig_current)
        return NOT_SUPPORTED;
    if (!profile)
        return INVALID_ARGUMENT;
    int lock = lock_state();
    nvmlReturn_t error = create(gpu, profile, asked, handle);
    unlock_state(lock);
    changed();
    return error;
}

NVML nvmlDeviceCreateGpuInstance(nvmlDevice_t gpu, unsigned int id, void **instance)
{
    ENTER_DEVICE(gpu, instance);
    return try_create(gpu, id, NULL, instance);
}

NVML nvmlDeviceCreateGpuInstanceWithPlacement(nvmlDevice_t gpu, unsigned int id, const nvmlPlacement_t *placement,
                                              void **instance)
{
    ENTER_DEVICE(gpu, placement && instance);
    return try_create(gpu, id, placement, instance);
}

static bool is_empty(struct part part)
{
    for (size_t i = 0; i < COUNT(part.instance->computes); i++)
        if (part.instance->computes[i].serial)
            return false;
    return true;
}

NVML nvmlGpuInstanceDestroy(void *instance)
{
    ENTER_PART(instance, part.instance && !part.compute);
    if (geteuid() != 0)
        return NO_PERMISSION;
    int lock = lock_state();
    nvmlReturn_t error = !find_part(instance, &part) ? INVALID_ARGUMENT : SUCCESS; /* it may be gone meanwhile */
    if (!error && (!is_empty(part) || has_clients(part)))
        error = IN_USE;
    if (!error) {
        remove_access(part);
        part.instance->serial = 0;
    }
    unlock_state(lock);
    changed();
    return error;
}

NVML nvmlDeviceGetGpuInstances(nvmlDevice_t gpu, unsigned int profile_id, void **instances, unsigned int *count)
{
    ENTER_DEVICE(gpu, instances && count);
    struct sim_profile *profile = by_id(gpu, profile_id);
    if (!gpu->mig_current)
        return NOT_SUPPORTED;
    if (!profile)
        return INVALID_ARGUMENT;
    *count = 0;
    for (unsigned int start = 0; start < 8; start++) /* the order of ids, too */
        for (size_t i = 0; i < COUNT(gpu->instances); i++) {
            struct part part = {gpu, &gpu->instances[i], NULL};
            if (part.instance->serial && profile_of(part) == profile && part.instance->start == start)
                instances[(*count)++] = handle_of(part);
        }
    return SUCCESS;
}

NVML nvmlDeviceGetGpuInstanceById(nvmlDevice_t gpu, unsigned int id, void **instance)
{
    ENTER_DEVICE(gpu, instance);
    if (!gpu->mig_current)
        return NOT_SUPPORTED;
    for (size_t i = 0; i < COUNT(gpu->instances); i++)
        if (gpu->instances[i].serial && gpu->instances[i].id == id) {
            *instance = handle_of((struct part){gpu, &gpu->instances[i], NULL});
            return SUCCESS;
        }
    return NOT_FOUND;
}

typedef struct { nvmlDevice_t device; unsigned int id, profile_id; nvmlPlacement_t placement; }
    nvmlGpuInstanceInfo_t;

NVML nvmlGpuInstanceGetInfo(void *instance, nvmlGpuInstanceInfo_t *info)
{
    ENTER_PART(instance, info && part.instance && !part.compute);
    struct sim_profile *profile = profile_of(part);
    *info = (nvmlGpuInstanceInfo_t){
        part.gpu, part.instance->id, profile->id, {part.instance->start, profile->size},
    };
    return SUCCESS;
}
