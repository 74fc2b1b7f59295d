/* Events of GPUs: Xid errors that a program waits for. */
#include <stdlib.h>

#include "nvml.h"

typedef struct {
    nvmlDevice_t device;
    unsigned long long type, data;
    unsigned int gpu_instance, compute_instance;
} nvmlEventData_t;

struct event_set { /* nvmlEventSet_t */
    uint32_t next; /* the first event not yet handed out */
    unsigned long long types[SIM_MAX_GPUS];
};

enum { EVENT_XID = 0x8 };

NVML nvmlEventSetCreate(struct event_set **set)
{
    ENTER(set);
    *set = calloc(1, sizeof **set);
    if (!*set)
        return MEMORY;
    (*set)->next = __atomic_load_n(&state->event_count, __ATOMIC_ACQUIRE);
    return SUCCESS;
}

NVML nvmlEventSetFree(struct event_set *set)
{
    ENTER(set);
    free(set);
    return SUCCESS;
}

NVML nvmlDeviceGetSupportedEventTypes(nvmlDevice_t gpu, unsigned long long *types)
{
    ENTER_DEVICE(gpu, types);
    *types = EVENT_XID;
    return SUCCESS;
}

NVML nvmlDeviceRegisterEvents(nvmlDevice_t gpu, unsigned long long types, struct event_set *set)
{
    ENTER_DEVICE(gpu, set);
    if (types & ~(unsigned long long)EVENT_XID)
        return NOT_SUPPORTED;
    set->types[gpu - state->gpus] |= types;
    return SUCCESS;
}

static bool take_event(struct event_set *set, nvmlEventData_t *data)
{
    bool taken = false;
    int lock = lock_state();

    if (state->event_count - set->next > SIM_MAX_EVENTS)
        set->next = state->event_count - SIM_MAX_EVENTS;
    while (!taken && set->next != state->event_count) {
        const struct sim_event *event = &state->events[set->next++ % SIM_MAX_EVENTS];
        taken = event->gpu < SIM_MAX_GPUS && set->types[event->gpu] & event->type;
        if (taken)
            *data = (nvmlEventData_t){&state->gpus[event->gpu], event->type, event->data, UINT_MAX, UINT_MAX};
    }
    unlock_state(lock);
    return taken;
}

static bool watches_lost_gpu(const struct event_set *set)
{
    for (unsigned int i = 0; i < state->gpu_count; i++)
        if (set->types[i] && (state->gpus[i].lost || is_gone(&state->gpus[i])))
            return true;
    return false;
}

NVML nvmlEventSetWait_v2(struct event_set *set, nvmlEventData_t *data, unsigned int timeout_ms)
{
    ENTER(set && data);
    for (long long until = now_ms() + timeout_ms;;) {
        uint32_t seen = changes();
        if (take_event(set, data))
            return SUCCESS;
        if (watches_lost_gpu(set))
            return GPU_IS_LOST;
        nvmlReturn_t error = injected(__func__, -1); /* a failure may come while a program waits */
        if (error)
            return error;
        if (!wait_for_change(seen, until))
            return TIMEOUT;
    }
}
