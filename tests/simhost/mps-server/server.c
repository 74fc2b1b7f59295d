/* A stand-in for nvidia-cuda-mps-server: all that a real control daemon (535, 550) asks of it, and no GPU.
 *
 * Between it and the control daemon every message is as the latter has it. Between it and a client there is
 * only what mps_client.py says, as the real server's part there needs a GPU.
 *
 * The file `behaviour` beside it says in words what it does:
 * `asked`: the control daemon is one that asks for its status, and whether it can end (550);
 * `failing`: it exits with 1, as without a GPU; `refusing:UID`: so does one of this user only;
 * `dying`: it connects to the control daemon, and exits with 1 before it is ready. */
#define _GNU_SOURCE
#include <libgen.h>
#include <limits.h>
#include <poll.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

enum {
    AS_SERVER = 1, LIMITS = 32, CLIENTS = 64,
    /* Two paths of shared memory that it would have, and whether all of CUDA's files there go with it. */
    SHARED_MEMORY_SIZE = 516,
};

enum command {
    NEW_CLIENT = 2, SHUT_DOWN = 5, CLIENT_LIST = 6,
    TELL_PERCENTAGE = 8, SET_PERCENTAGE = 9, TELL_LIMIT = 11, SET_LIMIT = 12,
    TERMINATE = 13, PROCESSES = 14, SET_PRIORITY = 15, TELL_STATUS = 17,
};

/* How the lists show a client. */
struct entry {
    int32_t pid, context, is_mig, device;
    uint8_t uuid[16];
    int32_t id, priority;
};

_Static_assert(sizeof(struct entry) == 40, "as the control daemon reads it");

static struct {
    int connection;
    struct entry entry;
} clients[CLIENTS];
static int client_count, clients_served, control, is_ready;
static double percentage;
static uint64_t limits[LIMITS];
static const uint8_t uuid[16] = "stand-in's GPU..";

static int behaves(const char *word)
{
    char path[PATH_MAX + 16] = "", words[256] = "";
    if (readlink("/proc/self/exe", path, PATH_MAX - 1) < 0)
        return 0;
    strcat(dirname(path), "/behaviour");
    FILE *file = fopen(path, "r");
    if (file) {
        words[fread(words, 1, sizeof words - 1, file)] = 0;
        fclose(file);
    }
    return strstr(words, word) != NULL;
}

static void leave_control(void)
{
    close(control);
    control = -1;
}

/* The control daemon went without a word: it serves on until its last client is gone. */
static void lose_control(void)
{
    if (!is_ready)
        exit(1);
    leave_control();
}

static void say(const void *message, size_t size)
{
    if (send(control, message, size, MSG_NOSIGNAL) != (ssize_t)size)
        lose_control();
}

static void say_number(int32_t number) { say(&number, sizeof number); }

static void hear(void *message, size_t size)
{
    memset(message, 0, size);
    if (recv(control, message, size, 0) != (ssize_t)size)
        lose_control();
}

static int32_t hear_number(void)
{
    int32_t number;
    hear(&number, sizeof number);
    return number;
}

static void connect_to_control(void)
{
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    const char *directory = getenv("CUDA_MPS_PIPE_DIRECTORY");
    char hello[9];
    control = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
    if (!directory)
        directory = "/tmp/nvidia-mps";
    snprintf(address.sun_path, sizeof address.sun_path, "%s/control", directory);
    if (connect(control, (struct sockaddr *)&address, sizeof address) < 0)
        exit(1);
    hear(hello, sizeof hello);
    say("OUTBCRED", sizeof "OUTBCRED"); /* the kernel adds the credentials */
}

static void register_as_ready(void)
{
    static const char no_shared_memory[SHARED_MEMORY_SIZE];
    uint64_t count, limit;
    say_number(AS_SERVER);
    say(no_shared_memory, sizeof no_shared_memory);
    hear(&percentage, sizeof percentage);
    hear(&count, sizeof count);
    for (uint64_t device = 0; device < count; device++) {
        hear(&limit, sizeof limit);
        if (device < LIMITS)
            limits[device] = limit;
    }
    hear_number(); /* the priority of clients */
    is_ready = 1;
}

/* One message and what comes with it: a descriptor, or who sent it. Returns its size, 0 at the end. */
static ssize_t hear_with(int connection, int kind, void *with, size_t size)
{
    char message[64], room[256];
    struct iovec into = {message, sizeof message};
    struct msghdr header = {
        .msg_iov = &into, .msg_iovlen = 1, .msg_control = room, .msg_controllen = sizeof room};
    ssize_t length = recvmsg(connection, &header, MSG_CMSG_CLOEXEC);
    for (struct cmsghdr *part = CMSG_FIRSTHDR(&header); part; part = CMSG_NXTHDR(&header, part))
        if (part->cmsg_level == SOL_SOCKET && part->cmsg_type == kind)
            memcpy(with, CMSG_DATA(part), size);
    return length < 0 ? 0 : length;
}

static void take_client(void)
{
    int connection = -1;
    struct ucred sender = {0};
    hear_with(control, SCM_RIGHTS, &connection, sizeof connection);
    if (connection < 0 || !hear_with(connection, SCM_CREDENTIALS, &sender, sizeof sender) ||
        client_count == CLIENTS) {
        close(connection); /* it ended while it was waiting */
        return;
    }
    clients_served++;
    clients[client_count].connection = connection;
    clients[client_count].entry =
        (struct entry){.pid = sender.pid, .context = clients_served, .id = clients_served};
    memcpy(clients[client_count].entry.uuid, uuid, sizeof uuid);
    client_count++;
    send(connection, "welcome", 7, MSG_NOSIGNAL);
}

static void drop_client(int index)
{
    close(clients[index].connection);
    client_count--;
    memmove(&clients[index], &clients[index + 1], (size_t)(client_count - index) * sizeof clients[0]);
}

static void terminate(int32_t pid)
{
    int status = 1;
    for (int index = client_count - 1; index >= 0; index--)
        if (clients[index].entry.pid == pid) {
            send(clients[index].connection, "terminated", 10, MSG_NOSIGNAL);
            drop_client(index);
            status = 0;
        }
    say_number(status);
}

static void say_clients(void)
{
    say_number(client_count);
    for (int index = 0; index < client_count; index++)
        say_number(clients[index].entry.pid);
}

static void say_entries(void)
{
    say_number(client_count);
    for (int index = 0; index < client_count; index++)
        say(&clients[index].entry, sizeof clients[index].entry);
}

static void shut_down(void)
{
    if (!behaves("asked")) {
        hear_number(); /* how many clients it was given; it ends with the last of them */
        leave_control();
        return;
    }
    say_number(client_count); /* above 0 it goes on as before, and is asked again */
    if (client_count == 0)
        leave_control();
}

static void obey(enum command command)
{
    int32_t number;
    switch (command) {
    case NEW_CLIENT: take_client(); break;
    case SHUT_DOWN: shut_down(); break;
    case CLIENT_LIST: say_clients(); break;
    case TELL_PERCENTAGE: say(&percentage, sizeof percentage); break;
    case SET_PERCENTAGE: hear(&percentage, sizeof percentage); break;
    case TELL_LIMIT:
        number = hear_number();
        say(&limits[number % LIMITS], sizeof limits[0]);
        break;
    case SET_LIMIT:
        number = hear_number();
        hear(&limits[number % LIMITS], sizeof limits[0]);
        break;
    case TERMINATE: terminate(hear_number()); break;
    case PROCESSES:
        say_entries();
        hear_number(); /* all were read */
        break;
    case SET_PRIORITY: hear_number(); break;
    case TELL_STATUS:
        say_number(1); /* active; 0 is a fault */
        break;
    }
}

static void serve(void)
{
    struct pollfd sources[CLIENTS + 1];
    char message[64];
    int32_t command;
    while (control >= 0 || client_count > 0) {
        int waiting = client_count;
        for (int index = 0; index < waiting; index++)
            sources[index] = (struct pollfd){.fd = clients[index].connection, .events = POLLIN};
        sources[waiting] = (struct pollfd){.fd = control, .events = POLLIN};
        if (poll(sources, (nfds_t)waiting + 1, -1) < 0)
            continue;
        for (int index = waiting - 1; index >= 0; index--)
            if (sources[index].revents && recv(clients[index].connection, message, sizeof message, 0) <= 0)
                drop_client(index);
        if (!sources[waiting].revents)
            continue;
        if (recv(control, &command, sizeof command, 0) == sizeof command)
            obey((enum command)command);
        else
            lose_control();
    }
}

int main(void)
{
    signal(SIGINT, SIG_DFL); /* which ends it by force; a shell may have it ignored */
    char refusing[32];
    snprintf(refusing, sizeof refusing, "refusing:%u", getuid());
    if (behaves("failing") || behaves(refusing))
        return 1;
    connect_to_control();
    if (behaves("dying"))
        return 1;
    register_as_ready();
    serve();
    return 0;
}
