/* A stand-in for libcuda.so.1, so that scripts/gpu-check and the doctor's self-test run without a GPU.
 *
 * One device of 16 GiB and 16 SMs; a kernel sleeps. With a control daemon in CUDA_MPS_PIPE_DIRECTORY it attaches
 * to its MPS server, as tests/simhost/mps_client.py does, and keeps the limits of its own environment. What a
 * real driver does is not imitated: this shows that both run, and nothing about MPS.
 */
#define _GNU_SOURCE
#include <poll.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

enum { OK, INVALID = 1, MEMORY = 2, NO_DEVICE = 100, ADDRESS = 700, REFUSED = 805, RPC = 806, TERMINATED = 810 };
enum { SMS = 16 };

static const unsigned char UUID_BYTES[] =
    "\x76\xae\xf7\xff\x37\x2d\x24\x32\xb4\xb4\xbe\xca\x4d\x8d\x34\x00";
static const uint64_t TOTAL = 16ull << 30;

static int server = -1, broken;
static uint64_t limit, used;
static uint32_t pending;
static double percentage = 100;

/* What an error number is called in cuda.h. */
int cuGetErrorName(int code, const char **name)
{
    *name = code == MEMORY       ? "CUDA_ERROR_OUT_OF_MEMORY"
            : code == NO_DEVICE  ? "CUDA_ERROR_NO_DEVICE"
            : code == ADDRESS    ? "CUDA_ERROR_ILLEGAL_ADDRESS"
            : code == REFUSED    ? "CUDA_ERROR_MPS_CONNECTION_FAILED"
            : code == RPC        ? "CUDA_ERROR_MPS_RPC_FAILURE"
            : code == TERMINATED ? "CUDA_ERROR_MPS_CLIENT_TERMINATED"
                                 : "CUDA_ERROR_INVALID_VALUE";
    return OK;
}

/* Become a client of the control daemon's server; without a control daemon, of none. */
static int attach(void)
{
    const char *directory = getenv("CUDA_MPS_PIPE_DIRECTORY");
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    int control = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0), as_client = 2, attached = 0;
    char text[64], ancillary[CMSG_SPACE(sizeof(int))];
    struct iovec part = {text, sizeof text};
    struct msghdr message = {
        .msg_iov = &part, .msg_iovlen = 1, .msg_control = ancillary, .msg_controllen = sizeof ancillary};
    struct cmsghdr *header;

    snprintf(address.sun_path, sizeof address.sun_path, "%s/control", directory ? directory : "/nowhere");
    if (connect(control, (struct sockaddr *)&address, sizeof address))
        return close(control), OK;
    if (recv(control, text, sizeof text, 0) <= 0)
        return REFUSED;
    send(control, "OUTBCRED", 9, MSG_NOSIGNAL);
    send(control, &as_client, sizeof as_client, MSG_NOSIGNAL);
    if (recvmsg(control, &message, 0) <= 0 || !(header = CMSG_FIRSTHDR(&message)))
        return REFUSED;
    memcpy(&server, CMSG_DATA(header), sizeof server);
    send(server, "client", 6, MSG_NOSIGNAL);
    send(control, &attached, sizeof attached, MSG_NOSIGNAL);
    close(control);
    return recv(server, text, sizeof text, 0) > 0 ? OK : RPC;
}

/* What has become of this client meanwhile. */
static int state(void)
{
    struct pollfd ready = {server, POLLIN, 0};
    char text[64];

    if (!broken && server >= 0 && poll(&ready, 1, 0) > 0)
        broken = recv(server, text, sizeof text, 0) > 0 ? TERMINATED : RPC;
    return broken;
}

static void read_limits(void)
{
    const char *text = getenv("CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"), *equals = text ? strchr(text, '=') : NULL;
    char unit = 'M';
    unsigned long long number;

    if (equals && sscanf(equals + 1, "%llu%c", &number, &unit) >= 1)
        limit = number << (unit == 'G' ? 30 : 20);
    if ((text = getenv("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE")))
        percentage = atof(text);
}

int cuInit(unsigned flags)
{
    if (getenv("STANDIN_NO_DEVICE"))
        return NO_DEVICE;
    if (getenv("STANDIN_HANGS"))
        pause();
    read_limits();
    return flags ? INVALID : attach();
}

int cuDriverGetVersion(int *version) { return *version = 13000, OK; }
int cuDeviceGetCount(int *count) { return *count = 1, OK; }
int cuDeviceGet(int *device, int ordinal) { return *device = ordinal, ordinal ? INVALID : OK; }
int cuDeviceGetName(char *name, int size, int device) { return snprintf(name, size, "Stand-in GPU %d", device), OK; }
int cuDeviceGetUuid(void *uuid, int device) { return memcpy(uuid, UUID_BYTES, 16), device; }
int cuDeviceTotalMem_v2(size_t *bytes, int device) { return *bytes = TOTAL, device; }
int cuDevicePrimaryCtxRetain(void **context, int device) { return *context = &server, device ? INVALID : state(); }
int cuDevicePrimaryCtxRelease_v2(int device) { return device; }
int cuCtxSetCurrent(void *context) { return context ? OK : INVALID; }

int cuDeviceGetAttribute(int *value, int attribute, int device)
{
    *value = attribute == 16 ? SMS : attribute == 75 ? 9 : attribute == 133 ? server >= 0 : 0;
    return device;
}

int cuModuleLoadData(void **module, const char *text)
{
    *module = &server;
    return strstr(text, ".entry work") ? OK : INVALID;
}

int cuModuleGetFunction(const char **function, void *module, const char *name)
{
    *function = name;
    return module && !strcmp(name, "work") ? OK : INVALID;
}

int cuMemGetInfo_v2(size_t *left, size_t *total)
{
    *total = limit ? limit : TOTAL;
    *left = *total - used;
    return state();
}

/* Small pieces are real, because the client reads its marks back; large ones are only counted. */
int cuMemAlloc_v2(uint64_t *address, size_t size)
{
    if (state())
        return broken;
    if (used + size > (limit ? limit : TOTAL) - (300 << 20))
        return MEMORY;
    if (size < 1 << 20)
        return *address = (uintptr_t)calloc(1, size), OK;
    used += size;
    return *address = size, OK;
}

int cuMemFree_v2(uint64_t address) { return used -= address, state(); }

int cuMemsetD32_v2(uint64_t address, uint32_t value, size_t count)
{
    for (size_t i = 0; i < count; i++)
        ((uint32_t *)(uintptr_t)address)[i] = value;
    return state();
}

int cuMemcpyDtoH_v2(void *to, uint64_t from, size_t size) { return memcpy(to, (void *)(uintptr_t)from, size), state(); }

int cuLaunchKernel(const char *function, unsigned x, unsigned y, unsigned z, unsigned bx, unsigned by, unsigned bz,
                   unsigned shared, void *stream, void **arguments, void **extra)
{
    (void)function, (void)y, (void)z, (void)bx, (void)by, (void)bz, (void)shared, (void)stream, (void)extra;
    if (state())
        return broken;
    uint32_t *marks = *(uint32_t **)arguments[0];
    if ((uintptr_t)marks < 4096) /* nothing is there */
        return broken = ADDRESS, OK;
    for (unsigned sm = 0; sm < x && sm < SMS * percentage / 100; sm++)
        marks[sm] = 1;
    pending += *(uint32_t *)arguments[1];
    return OK;
}

/* An iteration takes 10 ns. */
int cuCtxSynchronize(void)
{
    struct timespec span = {pending / 100000000, pending % 100000000 * 10};

    pending = 0;
    if (!state())
        nanosleep(&span, NULL);
    return state();
}
