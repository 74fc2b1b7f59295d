/* The processes on a GPU, as NVML tells them and as nvidia-smi asks for them. */
#include <stdio.h>
#include <time.h>

#include "nvml.h"

typedef struct { unsigned int pid; unsigned long long used; } nvmlProcessInfo_v1_t;
typedef struct { unsigned int pid; unsigned long long used; unsigned int gpu_instance, compute_instance; }
    nvmlProcessInfo_v2_t;
typedef struct { /* nvidia-smi's own; NVML's is how it begins */
    unsigned int pid;
    unsigned long long used;
    unsigned int gpu_instance, compute_instance;
    unsigned long long used_protected;
    char name[4096];
} process_view_t;
_Static_assert(sizeof(process_view_t) == 0x1020, "what nvidia-smi 535 and 550 take");

/* The command line's first word, cut to the buffer, as the real one gives it. */
static bool process_name(unsigned int pid, char *name, size_t size)
{
    char path[32];

    snprintf(path, sizeof path, "/proc/%u/cmdline", pid);
    FILE *file = fopen(path, "re");
    if (!file)
        return false;
    name[fread(name, 1, size - 1, file)] = '\0';
    fclose(file);
    return true;
}

NVML nvmlSystemGetProcessName(unsigned int pid, char *name, unsigned int size)
{
    ENTER(name && size);
    return process_name(pid, name, size) ? SUCCESS : NOT_FOUND;
}

static void view_process(const struct sim_process *process, process_view_t *view, bool named)
{
    view->pid = process->pid;
    view->used = process->used_mib == SIM_UNKNOWN_MIB ? SIM_UNKNOWN_MIB : process->used_mib * MIB;
    view->gpu_instance = process->gpu_instance; /* SIM_UNSET is NVML's word for none */
    view->compute_instance = process->compute_instance;
    view->used_protected = 0;
    if (named && !process_name(process->pid, view->name, sizeof view->name))
        strcpy(view->name, "[Not Found]");
}

/*
 * Fills at most *count entries of `size` bytes, each as much of a process_view_t as fits. A client of MPS is a
 * compute process too: nvidia-smi merges the two lists and shows it as M+C.
 */
static nvmlReturn_t give_processes(struct part part, uint32_t type, unsigned int *count, void *out, size_t size)
{
    unsigned int n = 0, room = *count;
    process_view_t view;
    int lock = lock_state();

    for (size_t i = 0; i < COUNT(part.gpu->processes); i++) {
        const struct sim_process *process = &part.gpu->processes[i];
        bool fits = process->type == type || (type == SIM_PROCESS_COMPUTE && process->type == SIM_PROCESS_MPS);
        if (!has_process(part, process) || !fits)
            continue;
        if (n < room && out) {
            view_process(process, &view, size == sizeof view);
            memcpy((char *)out + n * size, &view, size);
        }
        n++;
    }
    unlock_state(lock);
    *count = n;
    return n > room ? INSUFFICIENT_SIZE : SUCCESS;
}

/* Some drivers answer Success, with the count, to a query that has no room: a failure of this name makes it so. */
static const char size_query[] = "nvmlDeviceGetRunningProcessesSize";

#define PROCESSES(function, type, info_t)                                                      \
    NVML function(nvmlDevice_t gpu, unsigned int *count, info_t *processes)                    \
    {                                                                                          \
        ENTER_PART(gpu, count && (processes || !*count));                                      \
        bool succeeds = !*count && injected(size_query, (int)(part.gpu - state->gpus));        \
        nvmlReturn_t error = give_processes(part, type, count, processes, sizeof *processes);  \
        return succeeds ? SUCCESS : error;                                                     \
    }

PROCESSES(nvmlDeviceGetComputeRunningProcesses_v3, SIM_PROCESS_COMPUTE, nvmlProcessInfo_v2_t)
PROCESSES(nvmlDeviceGetComputeRunningProcesses_v2, SIM_PROCESS_COMPUTE, nvmlProcessInfo_v2_t)
PROCESSES(nvmlDeviceGetComputeRunningProcesses, SIM_PROCESS_COMPUTE, nvmlProcessInfo_v1_t)
PROCESSES(nvmlDeviceGetMPSComputeRunningProcesses_v3, SIM_PROCESS_MPS, nvmlProcessInfo_v2_t)
PROCESSES(nvmlDeviceGetMPSComputeRunningProcesses_v2, SIM_PROCESS_MPS, nvmlProcessInfo_v2_t)
PROCESSES(nvmlDeviceGetMPSComputeRunningProcesses, SIM_PROCESS_MPS, nvmlProcessInfo_v1_t)

typedef struct {
    unsigned int pid;
    unsigned long long timestamp_us;
    unsigned int sm, memory, encoder, decoder;
} nvmlProcessUtilizationSample_t;
_Static_assert(sizeof(nvmlProcessUtilizationSample_t) == 32, "what pynvml takes");

/*
 * A sample for each process that has one, as taken this moment; Maxwell and newer, not in MIG mode. With no room for
 * them all it gives their number, with none it is NOT_FOUND: both as the real one does.
 */
NVML nvmlDeviceGetProcessUtilization(nvmlDevice_t gpu, nvmlProcessUtilizationSample_t *samples,
                                     unsigned int *count, unsigned long long last_seen_us)
{
    unsigned int n = 0;
    struct timespec now;

    ENTER_DEVICE(gpu, count && (samples || !*count));
    if (gpu->capability_major < 5 || gpu->mig_current)
        return NOT_SUPPORTED;
    clock_gettime(CLOCK_REALTIME, &now);
    unsigned long long now_us = now.tv_sec * 1000000ULL + now.tv_nsec / 1000;
    unsigned int room = *count;
    int lock = lock_state();
    for (size_t i = 0; i < COUNT(gpu->processes) && now_us > last_seen_us; i++) {
        const struct sim_process *process = &gpu->processes[i];
        if (!process->pid || process->sm_percent == SIM_UNSET)
            continue;
        if (n < room)
            samples[n] = (nvmlProcessUtilizationSample_t){process->pid, now_us, process->sm_percent, 0, 0, 0};
        n++;
    }
    unlock_state(lock);
    *count = n;
    return !n ? NOT_FOUND : n > room ? INSUFFICIENT_SIZE : SUCCESS;
}

/* What nvidia-smi calls through the table of table.c. */
#define PRIVATE_PROCESSES(function, type)                                                             \
    nvmlReturn_t function(nvmlDevice_t gpu, unsigned int *count, process_view_t *processes)    \
    {                                                                                                 \
        ENTER_PART(gpu, count && processes);                                                        \
        return give_processes(part, type, count, processes, sizeof *processes);                        \
    }

PRIVATE_PROCESSES(nvmlDeviceGetComputeRunningProcesses_private, SIM_PROCESS_COMPUTE)
PRIVATE_PROCESSES(nvmlDeviceGetMPSComputeRunningProcesses_private, SIM_PROCESS_MPS)
PRIVATE_PROCESSES(nvmlDeviceGetGraphicsRunningProcesses_private, 0) /* there are none */
