/* The file that all processes of the host share, and its lock. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/futex.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "nvml.h"

#ifdef __x86_64__
/* So that a library that was built here also runs on a Debian older than this one. */
__asm__(".symver dladdr,dladdr@GLIBC_2.2.5");
#endif

struct sim_state *state;
static char state_path[PATH_MAX];
unsigned int references;

static bool find_state_path(void)
{
    const char *named = secure_getenv("SIMHOST_STATE");
    Dl_info self;

    if (named && *named)
        return snprintf(state_path, sizeof state_path, "%s", named) < (int)sizeof state_path;
    if (!dladdr((void *)find_state_path, &self) || !self.dli_fname)
        return false;
    const char *slash = strrchr(self.dli_fname, '/');
    int folder = slash ? (int)(slash - self.dli_fname) : 1;
    return snprintf(state_path, sizeof state_path, "%.*s/simhost.state", folder, slash ? self.dli_fname : ".")
           < (int)sizeof state_path;
}

bool map_state(void)
{
    struct sim_state *map;

    if (state)
        return true;
    if (!find_state_path())
        return false;
    int fd = open(state_path, O_RDWR | O_CLOEXEC);
    if (fd < 0 || lseek(fd, 0, SEEK_END) != (off_t)sizeof *map) {
        fprintf(stderr, "simhost: %s: no state of this library's layout\n", state_path);
        if (fd >= 0)
            close(fd);
        return false;
    }
    map = mmap(NULL, sizeof *map, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    close(fd);
    if (map == MAP_FAILED)
        return false;
    if (map->magic != SIM_MAGIC || map->version != SIM_VERSION || map->size != sizeof *map) {
        fprintf(stderr, "simhost: %s: made by another version of simhost\n", state_path);
        munmap(map, sizeof *map);
        return false;
    }
    state = map;
    return true;
}

void path_of_root(char *path, size_t size) /* the state is <root>/lib/simhost.state */
{
    snprintf(path, size, "%s", state_path);
    for (int i = 0; i < 2; i++) {
        char *slash = strrchr(path, '/');
        if (slash)
            *slash = '\0';
    }
}

int lock_state(void)
{
    int fd = open(state_path, O_RDWR | O_CLOEXEC);

    while (fd >= 0 && flock(fd, LOCK_EX) < 0 && errno == EINTR)
        ;
    return fd;
}

void unlock_state(int fd)
{
    if (fd >= 0)
        close(fd);
}

long long now_ms(void)
{
    struct timespec now;

    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000LL + now.tv_nsec / 1000000;
}

bool wait_for_change(uint32_t seen, long long until_ms)
{
    long long left = until_ms - now_ms();

    if (left <= 0)
        return false;
    struct timespec timeout = {left / 1000, left % 1000 * 1000000};
    syscall(SYS_futex, &state->changes, FUTEX_WAIT, seen, &timeout, NULL, 0);
    return true;
}

uint32_t changes(void)
{
    return __atomic_load_n(&state->changes, __ATOMIC_ACQUIRE);
}

void changed(void)
{
    __atomic_add_fetch(&state->changes, 1, __ATOMIC_RELEASE);
    syscall(SYS_futex, &state->changes, FUTEX_WAKE, INT_MAX, NULL, NULL, 0);
}
