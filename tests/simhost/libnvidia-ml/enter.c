/* What every call does first: is the library initialised, is the GPU there, is the call to fail. */
#include <fnmatch.h>
#include <stdio.h>

#include "nvml.h"

/* The name without its version, so that a failure of a call meets all versions of it. */
static void plain_name(const char *call, char *plain, size_t size)
{
    size_t length = strcspn(call, "_"); /* no name has a _ but before its version */

    if (!strncmp(call, "nvmlInit", 8))
        length = 8;
    snprintf(plain, size, "%.*s", (int)length, call);
}

/* A rule is for all versions of a call, unless it names one: then the name in it has a version. */
static struct sim_failure *find_failure(const char *call, const char *plain, int slot)
{
    for (size_t i = 0; i < COUNT(state->failures); i++) {
        struct sim_failure *failure = &state->failures[i];
        bool concerned = failure->gpu == SIM_ALL_GPUS || failure->gpu == slot;
        bool named = !fnmatch(failure->call, plain, 0) || !strcmp(failure->call, call);
        if (failure->call[0] && failure->times && concerned && named)
            return failure;
    }
    return NULL;
}

static void use_up(struct sim_failure *failure)
{
    if (failure->times != SIM_FOREVER && --failure->times == 0) {
        failure->call[0] = '\0';
        state->failure_count--;
    }
}

/* Like `injected`; `meets` says whether a rule meets the call, which may be one that lets it succeed. */
static nvmlReturn_t meet(const char *call, int slot, bool *meets)
{
    char plain[sizeof state->failures[0].call];

    *meets = false;
    if (!__atomic_load_n(&state->failure_count, __ATOMIC_ACQUIRE))
        return SUCCESS;
    plain_name(call, plain, sizeof plain);
    int lock = lock_state();
    struct sim_failure *failure = find_failure(call, plain, slot);
    if (failure && failure->skip) {
        failure->skip--;
        failure = NULL;
    }
    if (!failure) {
        unlock_state(lock);
        return SUCCESS;
    }
    size_t place = (size_t)(failure - state->failures);
    nvmlReturn_t error = failure->error;
    uint32_t id = failure->id;
    bool forever = failure->times == SIM_FOREVER;
    long long until = now_ms() + failure->delay_ms;
    use_up(failure);
    unlock_state(lock);
    *meets = true;

    for (;;) { /* a rule without end that is cleared meanwhile lets its callers go, and they succeed */
        uint32_t seen = changes();
        if (forever && (state->failures[place].id != id || !state->failures[place].call[0]))
            return SUCCESS;
        if (!wait_for_change(seen, until))
            return error;
    }
}

nvmlReturn_t injected(const char *call, int slot)
{
    bool meets;

    return meet(call, slot, &meets);
}

nvmlReturn_t enter(const char *call)
{
    return __atomic_load_n(&references, __ATOMIC_ACQUIRE) ? injected(call, -1) : UNINITIALIZED;
}

nvmlReturn_t enter_part(const char *call, const void *handle, struct part *part)
{
    if (!__atomic_load_n(&references, __ATOMIC_ACQUIRE))
        return UNINITIALIZED;
    if (!find_part(handle, part))
        return INVALID_ARGUMENT;
    bool meets;
    nvmlReturn_t error = meet(call, (int)(part->gpu - state->gpus), &meets);
    if (error)
        return error;
    if (part->gpu->lost && meets) /* some drivers answer from memory what they know of a lost GPU */
        return SUCCESS;
    return part->gpu->lost || is_gone(part->gpu) ? GPU_IS_LOST : SUCCESS;
}

nvmlReturn_t enter_device(const char *call, nvmlDevice_t gpu)
{
    struct part part = {0};
    nvmlReturn_t error = enter_part(call, gpu, &part);

    return part.instance ? INVALID_ARGUMENT : error;
}
