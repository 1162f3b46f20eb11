/* Loaded by LD_PRELOAD under the programs that the tests start: what a disk can do to their system calls. It does
   nothing until plugin.py calls shim_arm in the process: then the FIRST-th call of a kind on a path that matches (or,
   with GO_ON, that and all later ones) is the fault's, or, for the action "record", every call that changes what
   matches is appended to the log, as "CALL\tPATH\tTARGET\tINODE\tOFFSET\tSIZE\n" and SIZE bytes, in the order of effect;
   INODE is of a descriptor. It sees what goes through libc, and so not the renames of Rust's rustix. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <fnmatch.h>
#include <limits.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

enum { DORMANT, RECORD, KILL, TERM, STALL, FAIL };
static int action = DORMANT, error;
static long first, go_on, reached;
static pid_t recorded; /* a process that it forks has nothing to do with the order of its calls */
static char kind[32], pattern[PATH_MAX], journal[PATH_MAX];
static pthread_mutex_t order = PTHREAD_MUTEX_INITIALIZER;

typedef char Path[2 * PATH_MAX];

#define REAL(name) \
    static __typeof__(name) *real; \
    if (!real) \
        real = dlsym(RTLD_NEXT, #name)

void shim_arm(const char *what, const char *call, const char *matching, long n, long later, const char *into) {
    action = !strcmp(what, "record") ? RECORD
             : !strcmp(what, "kill") ? KILL
             : !strcmp(what, "term") ? TERM
             : !strcmp(what, "stall") ? STALL
                                     : FAIL;
    error = !strcmp(what, "enospc") ? ENOSPC : EIO;
    snprintf(kind, sizeof kind, "%s", call);
    snprintf(pattern, sizeof pattern, "%s", matching);
    snprintf(journal, sizeof journal, "%s", into);
    first = n, go_on = later, recorded = getpid();
}

static int open_log(void) {
    REAL(open);
    return real(journal, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
}

/* The path of a name in a directory, or, without a name, of a descriptor. */
static void resolve(int directory, const char *name, Path path) {
    char link[64];
    ssize_t size = 0;
    if (!name || (name[0] != '/' && directory != AT_FDCWD)) {
        snprintf(link, sizeof link, "/proc/self/fd/%d", directory);
        size = readlink(link, path, PATH_MAX);
        size = size < 0 ? 0 : size;
    } else if (name[0] != '/' && getcwd(path, PATH_MAX))
        size = strlen(path);
    path[size] = 0;
    if (name)
        snprintf(path + size, PATH_MAX, "%s%s", size ? "/" : "", name);
}

static int due(const char *call, const char *path) {
    if (action <= RECORD || strcmp(call, kind) || fnmatch(pattern, path, 0))
        return 0;
    long n = __sync_add_and_fetch(&reached, 1);
    if (n != first && !(go_on && n > first))
        return 0;
    int fd = open_log();
    dprintf(fd, "%s(%s)\n", call, path);
    close(fd);
    return 1;
}

/* Whether the call fails, with errno set. */
static int act(void) {
    if (action == TERM)
        kill(getpid(), SIGTERM);
    if (action == KILL)
        kill(getpid(), SIGKILL);
    while (action == KILL || action == STALL)
        sleep(3600);
    errno = error;
    return action == FAIL;
}

static int begin(const char *path) {
    int records = action == RECORD && getpid() == recorded && !fnmatch(pattern, path, 0);
    if (records)
        pthread_mutex_lock(&order);
    return records;
}

static void end(int records, int done, const char *call, const char *path, const char *target, int d, off_t offset,
                const void *data, size_t size) {
    static int fd = -1;
    int saved = errno;
    if (!records)
        return;
    if (fd < 0)
        fd = open_log();
    if (done) {
        char header[4 * PATH_MAX + 128];
        struct stat status = {0};
        fstat(d, &status);
        int length = snprintf(header, sizeof header, "%s\t%s\t%s\t%lld\t%lld\t%zu\n", call, path, target,
                              (long long)status.st_ino, (long long)offset, size);
        struct iovec parts[] = {{header, length}, {(void *)data, size}};
        if (writev(fd, parts, 2) != (ssize_t)(length + size))
            abort();
    }
    pthread_mutex_unlock(&order);
    errno = saved;
}

/* Calls that take paths, or a descriptor, and return 0. */
#define CALL(name, parameters, arguments, label, dir, from, to_dir, to, offset) \
    int name parameters { \
        REAL(name); \
        if (!action) \
            return real arguments; \
        Path path, target = ""; \
        resolve(dir, from, path); \
        if (to) \
            resolve(to_dir, to, target); \
        if (due(label, to ? target : path) && act()) \
            return -1; \
        int records = begin(path), result = real arguments; \
        end(records, result == 0, label, path, target, from ? -1 : dir, offset, "", 0); \
        return result; \
    }
#define NONE ((const char *)0)

CALL(rename, (const char *a, const char *b), (a, b), "rename", AT_FDCWD, a, AT_FDCWD, b, 0)
CALL(unlink, (const char *a), (a), "unlink", AT_FDCWD, a, 0, NONE, 0)
CALL(unlinkat, (int d, const char *a, int f), (d, a, f), "unlink", d, a, 0, NONE, 0)
CALL(rmdir, (const char *a), (a), "unlink", AT_FDCWD, a, 0, NONE, 0)
CALL(mkdir, (const char *a, mode_t m), (a, m), "mkdir", AT_FDCWD, a, 0, NONE, 0)
CALL(fsync, (int d), (d), "fsync", d, NONE, 0, NONE, 0)
CALL(ftruncate, (int d, off_t n), (d, n), "truncate", d, NONE, 0, NONE, n)
CALL(ftruncate64, (int d, off64_t n), (d, n), "truncate", d, NONE, 0, NONE, n)

#define OPEN(name) \
    int name(const char *file, int flags, ...) { \
        REAL(name); \
        mode_t mode = 0; \
        if (flags & (O_CREAT | __O_TMPFILE)) { \
            va_list more; \
            va_start(more, flags); \
            mode = va_arg(more, mode_t); \
            va_end(more); \
        } \
        if (!action || !(flags & (O_CREAT | O_TRUNC))) \
            return real(file, flags, mode); \
        Path path; \
        resolve(AT_FDCWD, file, path); \
        if (due("open", path) && act()) \
            return -1; \
        int records = begin(path), result = real(file, flags, mode); \
        end(records, result >= 0, "open", path, "", result, !!(flags & O_TRUNC), "", 0); \
        return result; \
    }

OPEN(open)
OPEN(open64)

/* A process that is killed while it writes has written half. */
ssize_t write(int d, const void *data, size_t n) {
    REAL(write);
    if (!action)
        return real(d, data, n);
    Path path;
    resolve(d, NONE, path);
    if (due("write", path)) {
        if (action == KILL)
            n = real(d, data, n / 2);
        if (act())
            return -1;
    }
    int records = begin(path);
    ssize_t size = real(d, data, n);
    end(records, size > 0, "write", path, "", d, records ? lseek(d, 0, SEEK_CUR) - size : 0, data, size > 0 ? size : 0);
    return size;
}
