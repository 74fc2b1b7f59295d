/* The files by which programs may use an instance: in /proc what it is called, in /dev what they open. */
#include <fcntl.h>
#include <stdio.h>
#include <sys/stat.h>
#include <unistd.h>

#include "nvml.h"

/* As in /proc/driver/nvidia-caps/mig-minors, which tree.py writes. */
static unsigned int minor_of(struct part part)
{
    unsigned int gpu_instance = 3 + (part.gpu->minor * 15 + part.instance->id) * 9;

    return part.compute ? gpu_instance + 1 + part.compute->id : gpu_instance;
}

static void paths_of(struct part part, char proc[PATH_MAX], char dev[PATH_MAX])
{
    char root[PATH_MAX - 128], compute[32] = "";

    path_of_root(root, sizeof root);
    if (part.compute)
        snprintf(compute, sizeof compute, "/ci%u", part.compute->id);
    snprintf(proc, PATH_MAX, "%s/proc/driver/nvidia/capabilities/gpu%u/mig/gi%u%s/access", root, part.gpu->minor,
             part.instance->id, compute);
    snprintf(dev, PATH_MAX, "%s/dev/nvidia-caps/nvidia-cap%u", root, minor_of(part));
}

static void write_file(char *path, const char *text, mode_t mode)
{
    for (char *slash = strchr(path + 1, '/'); slash; slash = strchr(slash + 1, '/')) {
        *slash = '\0';
        mkdir(path, 0755);
        *slash = '/';
    }
    FILE *file = fopen(path, "we");
    if (file) {
        fputs(text, file);
        fclose(file);
        chmod(path, mode);
    }
}

void make_access(struct part part)
{
    char proc[PATH_MAX], dev[PATH_MAX], text[96];

    paths_of(part, proc, dev);
    snprintf(text, sizeof text, "DeviceFileMinor: %u\nDeviceFileMode: 292\nDeviceFileModify: 1\n", minor_of(part));
    write_file(proc, text, 0444);
    write_file(dev, "", 0444);
}

void remove_access(struct part part)
{
    char proc[PATH_MAX], dev[PATH_MAX];

    paths_of(part, proc, dev);
    unlink(dev);
    unlink(proc);
    *strrchr(proc, '/') = '\0';
    rmdir(proc);
}
