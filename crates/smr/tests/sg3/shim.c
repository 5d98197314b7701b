/*
 * Gives a program that speaks SG_IO a disk that it reaches over a socket instead of a device.
 *
 * Preloaded into a program of sg3-utils, it answers for the file that SMR_NODE names: opens become
 * a connection to the unix socket SMR_SOCKET, and each SG_IO becomes one exchange on it. Numbers
 * are in this machine's byte order:
 *
 *   to the disk:   command length, direction (0 none, 1 out, 2 in), data length; command; data out
 *   from the disk: status, length of sense data, length of data in; sense data; data in
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <scsi/sg.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#define DESCRIPTORS_MAX 1024

static unsigned char is_disk[DESCRIPTORS_MAX];

static int node(const char *path) {
    const char *name = getenv("SMR_NODE");
    return name != NULL && strcmp(path, name) == 0;
}

static int connect_disk(void) {
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    const char *path = getenv("SMR_SOCKET");
    if (path == NULL || strlen(path) >= sizeof(address.sun_path)) {
        errno = ENOENT;
        return -1;
    }
    strcpy(address.sun_path, path);
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (fd < 0 || fd >= DESCRIPTORS_MAX ||
        connect(fd, (struct sockaddr *)&address, sizeof(address)) != 0) {
        return -1;
    }
    is_disk[fd] = 1;
    return fd;
}

static int move(int fd, void *bytes, size_t len, int out) {
    char *at = bytes;
    while (len > 0) {
        ssize_t moved = out ? write(fd, at, len) : read(fd, at, len);
        if (moved <= 0) {
            errno = EIO;
            return -1;
        }
        at += moved;
        len -= (size_t)moved;
    }
    return 0;
}

static int send_command(int fd, struct sg_io_hdr *io) {
    uint32_t direction = io->dxfer_direction == SG_DXFER_TO_DEV     ? 1
                         : io->dxfer_direction == SG_DXFER_FROM_DEV ? 2
                                                                    : 0;
    uint32_t head[3] = {io->cmd_len, direction, direction == 0 ? 0 : io->dxfer_len};
    uint32_t answer[3];
    if (io->iovec_count != 0) {
        errno = EINVAL;
        return -1;
    }
    if (move(fd, head, sizeof(head), 1) != 0 || move(fd, io->cmdp, io->cmd_len, 1) != 0 ||
        (direction == 1 && move(fd, io->dxferp, io->dxfer_len, 1) != 0) ||
        move(fd, answer, sizeof(answer), 0) != 0) {
        return -1;
    }
    unsigned char sense[256];
    if (answer[1] > sizeof(sense) || answer[2] > head[2] || move(fd, sense, answer[1], 0) != 0 ||
        (direction == 2 && move(fd, io->dxferp, answer[2], 0) != 0)) {
        errno = EIO;
        return -1;
    }
    size_t room = answer[1] < io->mx_sb_len ? answer[1] : io->mx_sb_len;
    if (io->sbp != NULL) {
        memcpy(io->sbp, sense, room);
    }
    io->status = (unsigned char)answer[0];
    io->masked_status = (io->status >> 1) & 0x1f;
    io->sb_len_wr = (unsigned char)room;
    io->driver_status = answer[1] > 0 ? 8 : 0;
    io->host_status = 0;
    io->resid = (int)(head[2] - answer[2]);
    io->duration = 0;
    io->info = io->status != 0 ? SG_INFO_CHECK : SG_INFO_OK;
    return 0;
}

static int open_file(const char *symbol, const char *path, int flags, mode_t mode) {
    int (*next)(const char *, int, ...) = dlsym(RTLD_NEXT, symbol);
    return node(path) ? connect_disk() : next(path, flags, mode);
}

int open(const char *path, int flags, ...) {
    va_list rest;
    va_start(rest, flags);
    mode_t mode = va_arg(rest, mode_t);
    va_end(rest);
    return open_file("open", path, flags, mode);
}

int open64(const char *path, int flags, ...) {
    va_list rest;
    va_start(rest, flags);
    mode_t mode = va_arg(rest, mode_t);
    va_end(rest);
    return open_file("open64", path, flags, mode);
}

/* What a fortified program calls for an open that creates nothing. */
int __open_2(const char *path, int flags) {
    return open_file("open", path, flags, 0);
}

int __open64_2(const char *path, int flags) {
    return open_file("open64", path, flags, 0);
}

int close(int fd) {
    int (*next)(int) = dlsym(RTLD_NEXT, "close");
    if (fd >= 0 && fd < DESCRIPTORS_MAX) {
        is_disk[fd] = 0;
    }
    return next(fd);
}

int ioctl(int fd, unsigned long request, ...) {
    int (*next)(int, unsigned long, ...) = dlsym(RTLD_NEXT, "ioctl");
    va_list rest;
    va_start(rest, request);
    void *argument = va_arg(rest, void *);
    va_end(rest);
    if (fd < 0 || fd >= DESCRIPTORS_MAX || !is_disk[fd]) {
        return next(fd, request, argument);
    }
    switch (request & 0xffff) {
    case SG_IO:
        return send_command(fd, argument);
    case SG_GET_VERSION_NUM:
        *(int *)argument = 30536;
        return 0;
    case SG_GET_SG_TABLESIZE:
        *(int *)argument = 128;
        return 0;
    case 0x1267: /* BLKSECTGET: a megabyte */
        *(int *)argument = 1 << 20;
        return 0;
    default:
        errno = ENOTTY;
        return -1;
    }
}
