/* Loaded into the daemon before libc: counts the calls by which it changes anything outside itself, ends it
 * (SIGKILL) just before the one that a test has chosen, and shifts its wall clock. The page of `hands.py`,
 * which $LEVERS names, is shared with the test. Only the process that comes first is counted, by its PID, which
 * a program that it re-executes has as well. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <signal.h>
#include <spawn.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

struct page {
    uint64_t steps, last_step; /* 0: never */
    int64_t clock_offset_s, pid;
};

static struct page *page;

__attribute__((constructor)) static void map_page(void)
{
    const char *path = getenv("LEVERS");
    int file = path ? open(path, O_RDWR | O_CLOEXEC) : -1;
    void *place = file < 0 ? MAP_FAILED : mmap(NULL, sizeof *page, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    if (file >= 0)
        close(file);
    if (place == MAP_FAILED)
        return;
    if (((struct page *)place)->pid == 0)
        ((struct page *)place)->pid = getpid();
    page = place;
}

static void step(void)
{
    if (!page || page->pid != getpid())
        return;
    uint64_t now = __atomic_add_fetch(&page->steps, 1, __ATOMIC_SEQ_CST);
    if (page->last_step && now >= page->last_step)
        for (;;)
            syscall(SYS_kill, getpid(), SIGKILL);
}

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))
#define STEP(type, name, parameters, arguments)                                                                \
    type name parameters                                                                                       \
    {                                                                                                          \
        static __typeof__(&name) real;                                                                         \
        if (!real)                                                                                             \
            real = REAL(name);                                                                                 \
        step();                                                                                                \
        return real arguments;                                                                                 \
    }

STEP(ssize_t, write, (int file, const void *data, size_t size), (file, data, size))
STEP(ssize_t, pwrite, (int file, const void *data, size_t size, off_t at), (file, data, size, at))
STEP(ssize_t, pwrite64, (int file, const void *data, size_t size, off64_t at), (file, data, size, at))
STEP(ssize_t, send, (int to, const void *data, size_t size, int flags), (to, data, size, flags))
STEP(ssize_t, sendmsg, (int to, const struct msghdr *message, int flags), (to, message, flags))
STEP(ssize_t, sendto,
     (int to, const void *data, size_t size, int flags, const struct sockaddr *address, socklen_t length),
     (to, data, size, flags, address, length))
STEP(int, connect, (int from, const struct sockaddr *address, socklen_t length), (from, address, length))
STEP(int, bind, (int what, const struct sockaddr *address, socklen_t length), (what, address, length))
STEP(int, listen, (int where, int waiting), (where, waiting))
STEP(int, ftruncate, (int file, off_t size), (file, size))
STEP(int, ftruncate64, (int file, off64_t size), (file, size))
STEP(int, mkdir, (const char *path, mode_t mode), (path, mode))
STEP(int, mkdirat, (int in, const char *path, mode_t mode), (in, path, mode))
STEP(int, unlink, (const char *path), (path))
STEP(int, rename, (const char *old, const char *new), (old, new))
STEP(int, chmod, (const char *path, mode_t mode), (path, mode))
STEP(int, fchmod, (int file, mode_t mode), (file, mode))
STEP(int, kill, (pid_t pid, int number), (pid, number))
STEP(int, posix_spawn,
     (pid_t *pid, const char *path, const posix_spawn_file_actions_t *actions, const posix_spawnattr_t *attributes,
      char *const arguments[], char *const environment[]),
     (pid, path, actions, attributes, arguments, environment))

/* Only one that makes or empties a file changes anything. */
#define OPENING(name, parameters, ...)                                                                         \
    int name parameters                                                                                        \
    {                                                                                                          \
        static __typeof__(&name) real;                                                                         \
        va_list rest;                                                                                          \
        va_start(rest, flags);                                                                                 \
        mode_t mode = flags & (O_CREAT | __O_TMPFILE) ? va_arg(rest, mode_t) : 0;                              \
        va_end(rest);                                                                                          \
        if (!real)                                                                                             \
            real = REAL(name);                                                                                 \
        if (flags & (O_CREAT | O_TRUNC))                                                                       \
            step();                                                                                            \
        return real(__VA_ARGS__, mode);                                                                        \
    }

OPENING(open, (const char *path, int flags, ...), path, flags)
OPENING(open64, (const char *path, int flags, ...), path, flags)
OPENING(openat, (int in, const char *path, int flags, ...), in, path, flags)
OPENING(openat64, (int in, const char *path, int flags, ...), in, path, flags)

static int64_t clock_offset_s(void)
{
    return page ? __atomic_load_n(&page->clock_offset_s, __ATOMIC_SEQ_CST) : 0;
}

int clock_gettime(clockid_t clock, struct timespec *now)
{
    static __typeof__(&clock_gettime) real;
    if (!real)
        real = REAL(clock_gettime);
    int failed = real(clock, now);
    if (!failed && clock == CLOCK_REALTIME)
        now->tv_sec += clock_offset_s();
    return failed;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone)
{
    static __typeof__(&gettimeofday) real;
    if (!real)
        real = REAL(gettimeofday);
    int failed = real(now, zone);
    now->tv_sec += clock_offset_s();
    return failed;
}

time_t time(time_t *place)
{
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (place)
        *place = now.tv_sec;
    return now.tv_sec;
}
