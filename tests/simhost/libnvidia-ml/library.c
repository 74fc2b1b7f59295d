/* The library itself: init, shutdown, words, versions. */
#include <pthread.h>

#include "nvml.h"

static pthread_mutex_t init_mutex = PTHREAD_MUTEX_INITIALIZER;

/* install.py writes the version of each copy of this library over this text. */
static const char version_of_file[80] = "simhost: version of this library";

/* A library works only with the kernel module of its own version. */
static nvmlReturn_t check_driver(void)
{
    const char *version = version_of_file;

    __asm__("" : "+r"(version)); /* it is not known when this is compiled */
    if (!state->driver_loaded)
        return DRIVER_NOT_LOADED;
    return strcmp(version, state->driver_version) ? LIB_RM_VERSION_MISMATCH : SUCCESS;
}

NVML nvmlInitWithFlags(unsigned int flags)
{
    (void)flags;
    pthread_mutex_lock(&init_mutex);
    nvmlReturn_t error = map_state() ? injected(__func__, -1) : UNKNOWN;
    if (!error && !references)
        error = check_driver();
    if (!error && !references)
        find_gpus();
    if (!error)
        __atomic_add_fetch(&references, 1, __ATOMIC_RELEASE);
    pthread_mutex_unlock(&init_mutex);
    return error;
}

NVML nvmlInit_v2(void) { return nvmlInitWithFlags(0); }

NVML nvmlShutdown(void)
{
    nvmlReturn_t error = enter(__func__);

    if (error)
        return error;
    pthread_mutex_lock(&init_mutex);
    if (references)
        __atomic_sub_fetch(&references, 1, __ATOMIC_RELEASE);
    else
        error = UNINITIALIZED;
    pthread_mutex_unlock(&init_mutex);
    return error;
}

PUBLIC const char *nvmlErrorString(nvmlReturn_t error)
{
    static const char *const words[] = {
        "Success", "Uninitialized", "Invalid Argument", "Not Supported", "Insufficient Permissions",
        "Already Initialized", "Not Found", "Insufficient Size", "Insufficient External Power",
        "Driver Not Loaded", "Timeout", "Interrupt Request Issue", "NVML Shared Library Not Found",
        "Function Not Found", "Corrupted infoROM", "GPU is lost", "GPU requires reset",
        "The operating system has blocked the request", "Driver/library version mismatch",
        "In use by another client", "Insufficient Memory", "No data", "vGPU ECC not supported",
        "Insufficient resources", "Frequency not supported", "Argument version mismatch", "Deprecated",
        "System is not ready", "GPU not found", "Invalid state", "Reset type not supported",
    };
    return error < COUNT(words) ? words[error] : "Unknown Error";
}

NVML nvmlSystemGetDriverVersion(char *version, unsigned int size)
{
    ENTER(version);
    return give_text(version, size, state->driver_version);
}

NVML nvmlSystemGetCudaDriverVersion_v2(int *version)
{
    ENTER(version);
    *version = (int)state->cuda_version;
    return SUCCESS;
}

NVML nvmlSystemGetCudaDriverVersion(int *version) { return nvmlSystemGetCudaDriverVersion_v2(version); }
