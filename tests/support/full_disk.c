/* Makes calls of the process that loads this library fail, as a full or a read-only disk does.
 *
 * FULL_DISK_AT=N: from the Nth write to a regular file on, writes fail with ENOSPC.
 * READ_ONLY_BELOW=PATH: files below that path, as the process spells it, cannot be made or changed. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

static int is_full(int fd) {
    static atomic_long writes;
    const char *at = getenv("FULL_DISK_AT");
    struct stat found;
    if (!at || fstat(fd, &found) != 0 || !S_ISREG(found.st_mode)) return 0;
    return atomic_fetch_add(&writes, 1) + 1 >= atol(at);
}

static int is_read_only(const char *path) {
    const char *below = getenv("READ_ONLY_BELOW");
    return below && strncmp(path, below, strlen(below)) == 0;
}

ssize_t write(int fd, const void *bytes, size_t length) {
    static ssize_t (*real)(int, const void *, size_t);
    if (!real) real = dlsym(RTLD_NEXT, "write");
    if (is_full(fd)) {
        errno = ENOSPC;
        return -1;
    }
    return real(fd, bytes, length);
}

static int opened(const char *name, const char *path, int flags, mode_t mode) {
    int (*real)(const char *, int, ...) = dlsym(RTLD_NEXT, name);
    if ((flags & (O_WRONLY | O_RDWR | O_CREAT)) && is_read_only(path)) {
        errno = EROFS;
        return -1;
    }
    return real(path, flags, mode);
}

#define OPEN(name)                                             \
    int name(const char *path, int flags, ...) {               \
        va_list rest;                                          \
        va_start(rest, flags);                                 \
        mode_t mode = flags & O_CREAT ? va_arg(rest, int) : 0; \
        va_end(rest);                                          \
        return opened(#name, path, flags, mode);               \
    }
OPEN(open)
OPEN(open64)

int mkdir(const char *path, mode_t mode) {
    int (*real)(const char *, mode_t) = dlsym(RTLD_NEXT, "mkdir");
    if (is_read_only(path)) {
        errno = access(path, F_OK) == 0 ? EEXIST : EROFS;
        return -1;
    }
    return real(path, mode);
}
