/*
 * A libnvidia-ml.so.1 without hardware: the part of NVML's ABI that pynvml and nvidia-smi use, answered from a
 * memory-mapped file that all processes of a simulated host share (../layout.py says what is in it).
 *
 * Names, types, numbers and semantics are those of NVIDIA's NVML API Reference. A device handle is the address of
 * the GPU's slot in the mapping; mig.c makes those of MIG's instances. What is not here does not exist for a caller,
 * as in an old driver's library.
 */
#ifndef SIM_NVML_H
#define SIM_NVML_H

#include <limits.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "layout.h"

#define PUBLIC __attribute__((visibility("default")))
#define NVML PUBLIC nvmlReturn_t
#define COUNT(array) (sizeof(array) / sizeof((array)[0]))
#define MIB (1024ULL * 1024ULL)

typedef unsigned int nvmlReturn_t;
typedef struct sim_gpu *nvmlDevice_t;
typedef struct { unsigned int start, size; } nvmlPlacement_t;

enum {
    SUCCESS = 0, UNINITIALIZED = 1, INVALID_ARGUMENT = 2, NOT_SUPPORTED = 3, NO_PERMISSION = 4, NOT_FOUND = 6,
    INSUFFICIENT_SIZE = 7, DRIVER_NOT_LOADED = 9, TIMEOUT = 10, GPU_IS_LOST = 15, RESET_REQUIRED = 16,
    LIB_RM_VERSION_MISMATCH = 18, IN_USE = 19, MEMORY = 20,
    INSUFFICIENT_RESOURCES = 23, ARGUMENT_VERSION_MISMATCH = 25, UNKNOWN = 999
};

/* ---- state.c: the file that all share -------------------------------------------------------------------- */

extern struct sim_state *state;
extern unsigned int references; /* nvmlInit less nvmlShutdown */

bool map_state(void);
void path_of_root(char *path, size_t size); /* of the host's tree */

/*
 * The lock of all writers. Opening the file again each time makes it exclude threads, forked children and Python in
 * this very process alike, and the kernel drops it when its holder dies. A host that is gone needs no lock.
 */
int lock_state(void);
void unlock_state(int lock);

uint32_t changes(void); /* how many there have been */
void changed(void);     /* one more: wake all who wait */

long long now_ms(void);
/* Wait until another process changes the state after `seen`, or the time has come. False: it has. */
bool wait_for_change(uint32_t seen, long long until_ms);

/* ---- enter.c: what every call does first ----------------------------------------------------------------- */

/* The failure that is to meet this call, or SUCCESS. `slot` is -1 for a call that concerns no GPU. */
nvmlReturn_t injected(const char *call, int slot);
nvmlReturn_t enter(const char *call);
nvmlReturn_t enter_device(const char *call, nvmlDevice_t gpu);

/* A GPU, or one of its instances: a MIG device has both. */
struct part {
    struct sim_gpu *gpu;
    struct sim_instance *instance;
    struct sim_compute *compute;
};

/* The same for a handle of either. */
nvmlReturn_t enter_part(const char *call, const void *handle, struct part *part);

#define ENTER(valid)                              \
    do {                                          \
        nvmlReturn_t entered = enter(__func__);   \
        if (entered)                              \
            return entered;                       \
        if (!(valid))                             \
            return INVALID_ARGUMENT;              \
    } while (0)

#define ENTER_DEVICE(gpu, valid)                             \
    do {                                                     \
        nvmlReturn_t entered = enter_device(__func__, gpu);  \
        if (entered)                                         \
            return entered;                                  \
        if (!(valid))                                        \
            return INVALID_ARGUMENT;                         \
    } while (0)

#define ENTER_PART(handle, valid)                                \
    struct part part;                                            \
    do {                                                         \
        nvmlReturn_t entered = enter_part(__func__, handle, &part); \
        if (entered)                                             \
            return entered;                                      \
        if (!(valid))                                            \
            return INVALID_ARGUMENT;                             \
    } while (0)

/* ---- How calls answer ------------------------------------------------------------------------------------ */

static inline nvmlReturn_t give_text(char *out, unsigned int size, const char *text)
{
    if (strlen(text) >= size)
        return INSUFFICIENT_SIZE;
    strcpy(out, text);
    return SUCCESS;
}

static inline nvmlReturn_t give(unsigned int *out, unsigned int value)
{
    *out = value;
    return SUCCESS;
}

/* ---- lookup.c -------------------------------------------------------------------------------------------- */

void find_gpus(void); /* the first nvmlInit finds those that are there then */

/* Whether it is not the one any more that this process has found, even if it, or another one, is there again. */
bool is_gone(const struct sim_gpu *gpu);

/* ---- mig.c, computes.c, access.c -------------------------------------------------------------------------- */

bool find_part(const void *handle, struct part *part); /* false: there is no such GPU or instance (any more) */
void *handle_of(struct part part);
bool has_clients(struct part part);
bool has_process(struct part part, const struct sim_process *process); /* it runs there */

struct sim_profile *profile_of(struct part part); /* that of its GPU instance */
unsigned int compute_sm(struct part part, unsigned int slices);
nvmlDevice_t find_mig_device(struct sim_gpu *gpu, const char *uuid);
void reset_gpu(struct sim_gpu *gpu); /* applies a pending MIG mode; ends all clients and instances */
unsigned int index_of_mig_device(struct part part);

void make_access(struct part part); /* the files by which programs may use an instance */
void remove_access(struct part part);

#endif
