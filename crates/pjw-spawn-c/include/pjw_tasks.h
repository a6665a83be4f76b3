/* pjw_tasks.h: what the processes of one `pjwctl spawn` do together.
 *
 * With `pjwctl spawn --share memory` they are tasks: processes in one address space. Then an address of one is good in all
 * others. Without that option they have the same calls, which use memory files (memfd_create(2)): pjw_tasks_shared() tells.
 *
 * The header is all there is: nothing has to be linked, so that programs linked with -static-pie can use it. It needs Linux
 * and GCC or clang, and compiles as GNU C11 (or with _GNU_SOURCE) and as C++. The functions may be called by several threads,
 * except pjw_tasks_init. A child that a process makes by fork(2) must not call them. See pjw_tasks(3).
 */
#ifndef PJW_TASKS_H
#define PJW_TASKS_H

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <linux/futex.h>
#include <sched.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#ifdef __cplusplus
extern "C" {
#endif

/* The longest name of pjw_tasks_publish and pjw_tasks_alloc, with its NUL byte. */
#define PJW_TASKS_NAME_MAX 96
/* A time limit that never passes. */
#define PJW_TASKS_FOREVER (-1)

/* What follows with a final underscore is not for programs. pjwctl has the same layout. */
#define PJW_TASKS_MAGIC_ 0x31534b5341544a50u
#define PJW_TASKS_NAMES_ 4096
#define PJW_TASKS_SPACE_BYTES_ 524328
/* The phases of an entry, in the two low bits of its state: being written, written, published. */
#define PJW_TASKS_CLAIMED_ 1u
#define PJW_TASKS_WRITTEN_ 2u
#define PJW_TASKS_PUBLISHED_ 3u

struct pjw_tasks_name_ {
    uint64_t state; /* the process id of the publisher times 4, plus the phase; 0 if free */
    uint64_t address;
    uint64_t bytes;
    uint32_t descriptor; /* of the memory file, plus 1; 0 for an address only */
    uint32_t unused;
    char text[PJW_TASKS_NAME_MAX];
};

struct pjw_tasks_space_ {
    uint64_t magic;
    uint64_t nonce;
    uint32_t size;
    uint32_t attached; /* without a shared address space: the processes that have found each other */
    uint64_t barrier;  /* the number of the barrier in the high half, the ranks that wait in the low half */
    uint32_t names_changed;
    uint32_t names_used;
    struct pjw_tasks_name_ names[PJW_TASKS_NAMES_];
};

struct pjw_tasks_state_ {
    struct pjw_tasks_space_ *space;
    uint32_t *pids; /* of the ranks; 0 before a rank has begun */
    uint32_t pid;   /* the process that has called pjw_tasks_init */
    int rank;
    int size;
    int shared;
};

/* One copy in a program of several files. */
__attribute__((weak)) struct pjw_tasks_state_ pjw_tasks_own_ = {0, 0, 0, -1, 0, 0};

static inline int pjw_tasks_fail_(int error) {
    errno = error;
    return -1;
}

/* Reads a decimal number from a variable. -1 if there is none. */
static inline int pjw_tasks_number_(const char *name) {
    const char *text = getenv(name);
    char *end;
    long number;
    if (text == NULL || *text < '0' || *text > '9') return -1;
    number = strtol(text, &end, 10);
    return *end == '\0' && number <= INT_MAX ? (int)number : -1;
}

/* The directory of the shared address space. NULL in another process, even if it has inherited the variable. */
static inline struct pjw_tasks_space_ *pjw_tasks_of_variable_(int rank, int size) {
    const char *text = getenv("PJW_TASKS");
    struct pjw_tasks_space_ *space;
    unsigned long long address, nonce;
    long page = sysconf(_SC_PAGESIZE);
    uint32_t *pids;
    if (text == NULL || sscanf(text, "%llx:%llx", &address, &nonce) != 2 || address % (unsigned long long)page != 0) {
        return NULL;
    }
    space = (struct pjw_tasks_space_ *)(uintptr_t)address;
    /* ENOMEM if there is no such memory. */
    if (msync((void *)space, sizeof *space + (size_t)size * sizeof *pids, MS_ASYNC) != 0) return NULL;
    pids = (uint32_t *)(space + 1);
    if (space->magic != PJW_TASKS_MAGIC_ || space->nonce != nonce || space->size != (uint32_t)size) return NULL;
    /* A process that a task has forked has a copy of all this. */
    return __atomic_load_n(&pids[rank], __ATOMIC_ACQUIRE) == (uint32_t)getpid() ? space : NULL;
}

/* Makes or opens the file in which processes without a shared address space find each other. The last one removes it. */
static inline struct pjw_tasks_space_ *pjw_tasks_of_group_(int rank, int size) {
    const char *group = getenv("PJW_GROUP");
    size_t bytes = sizeof(struct pjw_tasks_space_) + (size_t)size * sizeof(uint32_t);
    struct pjw_tasks_space_ *space;
    struct stat status;
    uint32_t none = 0, *pid;
    char path[128];
    void *at;
    int file, length;
    if (group == NULL || strchr(group, '/') != NULL) {
        errno = ENOENT;
        return NULL;
    }
    length = snprintf(path, sizeof path, "/dev/shm/pjw-tasks-%u-%s", (unsigned)geteuid(), group);
    if (length < 0 || (size_t)length >= sizeof path) {
        errno = ENAMETOOLONG;
        return NULL;
    }
    file = open(path, O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0600);
    if (file < 0) return NULL;
    if (fstat(file, &status) != 0 || status.st_uid != geteuid() || ftruncate(file, (off_t)bytes) != 0) {
        int error = errno != 0 ? errno : EACCES;
        close(file);
        errno = error;
        return NULL;
    }
    at = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    close(file);
    if (at == MAP_FAILED) return NULL;
    space = (struct pjw_tasks_space_ *)at;
    __atomic_store_n(&space->size, (uint32_t)size, __ATOMIC_RELAXED);
    __atomic_store_n(&space->magic, PJW_TASKS_MAGIC_, __ATOMIC_RELAXED);
    pid = &((uint32_t *)(space + 1))[rank];
    if (!__atomic_compare_exchange_n(pid, &none, (uint32_t)getpid(), 0, __ATOMIC_RELEASE, __ATOMIC_RELAXED)) {
        munmap(at, bytes);
        errno = EBUSY;
        return NULL;
    }
    if (__atomic_add_fetch(&space->attached, 1, __ATOMIC_ACQ_REL) == (uint32_t)size) unlink(path);
    return space;
}

/* Finds the other processes of this `pjwctl spawn`. To be called once, before the other functions, by one thread.
 * Returns 0, or -1 with errno: EINVAL without PJW_RANK and PJW_SIZE, ENOENT without PJW_GROUP (the process was not started
 * by pjwctl spawn), EBUSY if another process has this rank (it has inherited the variables, or has passed them on), and the
 * errors of open(2), ftruncate(2) and mmap(2). */
static inline int pjw_tasks_init(void) {
    struct pjw_tasks_state_ *own = &pjw_tasks_own_;
    struct pjw_tasks_space_ *space;
    int rank = pjw_tasks_number_("PJW_RANK"), size = pjw_tasks_number_("PJW_SIZE");
    if (own->space != NULL && own->pid == (uint32_t)getpid()) return 0;
    if (rank < 0 || size <= rank) return pjw_tasks_fail_(EINVAL);
    space = pjw_tasks_of_variable_(rank, size);
    /* A child of a task, or a program that a task executes, shares no address space. */
    if (space == NULL && getenv("PJW_TASKS") != NULL) return pjw_tasks_fail_(EBUSY);
    own->shared = space != NULL;
    if (space == NULL) space = pjw_tasks_of_group_(rank, size);
    if (space == NULL) return -1;
    own->space = space;
    own->pids = (uint32_t *)(space + 1);
    own->pid = (uint32_t)getpid();
    own->rank = rank;
    own->size = size;
    return 0;
}

/* The rank of this process, from 0. -1 before pjw_tasks_init. */
static inline int pjw_tasks_rank(void) {
    return pjw_tasks_own_.rank;
}

/* The number of ranks. 0 before pjw_tasks_init. */
static inline int pjw_tasks_size(void) {
    return pjw_tasks_own_.size;
}

/* 1 if the ranks share one address space, so that each may use the addresses of all. Else 0. */
static inline int pjw_tasks_shared(void) {
    return pjw_tasks_own_.shared;
}

/* The time on CLOCK_MONOTONIC at which a limit of so many milliseconds passes. */
static inline struct timespec pjw_tasks_deadline_(int limit_ms) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    if (limit_ms >= 0) {
        time.tv_sec += limit_ms / 1000;
        time.tv_nsec += (long)(limit_ms % 1000) * 1000000;
        if (time.tv_nsec >= 1000000000) {
            time.tv_sec += 1;
            time.tv_nsec -= 1000000000;
        }
    }
    return time;
}

/* Sleeps until a word changes, for 50 ms at most. Returns whether the limit has passed. */
static inline int pjw_tasks_wait_(uint32_t *word, uint32_t value, int limit_ms, const struct timespec *deadline) {
    struct timespec now, time = {0, 50000000};
    clock_gettime(CLOCK_MONOTONIC, &now);
    if (limit_ms >= 0) {
        int64_t left = (int64_t)(deadline->tv_sec - now.tv_sec) * 1000000000 + (deadline->tv_nsec - now.tv_nsec);
        if (left <= 0) return 1;
        if (left < time.tv_nsec) time.tv_nsec = (long)left;
    }
    syscall(SYS_futex, word, FUTEX_WAIT, value, &time, NULL, 0);
    return 0;
}

static inline void pjw_tasks_wake_(uint32_t *word) {
    syscall(SYS_futex, word, FUTEX_WAKE, INT_MAX, NULL, NULL, 0);
}

/* Whether a rank has begun and has ended. */
static inline int pjw_tasks_has_ended_(int rank) {
    uint32_t pid = __atomic_load_n(&pjw_tasks_own_.pids[rank], __ATOMIC_ACQUIRE);
    return pid != 0 && kill((pid_t)pid, 0) != 0 && errno == ESRCH;
}

/* Waits until all ranks have called it, for at most limit_ms milliseconds (PJW_TASKS_FOREVER: without a limit).
 * Returns 0, or -1 with errno: ETIMEDOUT, EOWNERDEAD if a rank has ended (others would wait for it for ever), EINVAL before
 * pjw_tasks_init. After an error this rank does not count as waiting. Without a shared address space, a rank that has ended
 * before its pjw_tasks_init is not known: only the limit ends the wait for it. */
static inline int pjw_tasks_barrier(int limit_ms) {
    struct pjw_tasks_space_ *space = pjw_tasks_own_.space;
    struct timespec deadline;
    uint64_t seen, next;
    uint32_t number, *word;
    int error = 0, rank;
    if (space == NULL) return pjw_tasks_fail_(EINVAL);
    /* The high half is the second word of a little-endian number. */
    word = (uint32_t *)&space->barrier + 1;
    deadline = pjw_tasks_deadline_(limit_ms);
    seen = __atomic_load_n(&space->barrier, __ATOMIC_ACQUIRE);
    do {
        int is_last = (uint32_t)seen + 1 >= space->size;
        next = is_last ? ((seen >> 32) + 1) << 32 : seen + 1;
    } while (!__atomic_compare_exchange_n(&space->barrier, &seen, next, 0, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE));
    number = (uint32_t)(seen >> 32);
    if (next >> 32 != seen >> 32) {
        pjw_tasks_wake_(word);
        return 0;
    }
    while (__atomic_load_n(word, __ATOMIC_ACQUIRE) == number && error == 0) {
        int spins = 0;
        while (spins < 200 && __atomic_load_n(word, __ATOMIC_ACQUIRE) == number) spins++;
        if (__atomic_load_n(word, __ATOMIC_ACQUIRE) != number) break;
        if (pjw_tasks_wait_(word, number, limit_ms, &deadline)) error = ETIMEDOUT;
        if (__atomic_load_n(word, __ATOMIC_ACQUIRE) != number) break;
        for (rank = 0; rank < pjw_tasks_own_.size && error == 0; rank++) {
            if (pjw_tasks_has_ended_(rank)) error = EOWNERDEAD;
        }
    }
    /* The rank takes itself back, unless the last rank came meanwhile. */
    seen = __atomic_load_n(&space->barrier, __ATOMIC_ACQUIRE);
    while (error != 0 && (uint32_t)(seen >> 32) == number) {
        if (__atomic_compare_exchange_n(&space->barrier, &seen, seen - 1, 0, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE)) {
            return pjw_tasks_fail_(error);
        }
    }
    return 0;
}

/* Publishes an address with the file that holds it. */
static inline int pjw_tasks_publish_(const char *name, const void *address, size_t bytes, int file) {
    struct pjw_tasks_space_ *space = pjw_tasks_own_.space;
    uint64_t pid = (uint64_t)pjw_tasks_own_.pid << 2, state;
    struct pjw_tasks_name_ *entry = NULL;
    uint32_t used;
    int index, other;
    for (index = 0; index < PJW_TASKS_NAMES_; index++) {
        state = 0;
        if (__atomic_compare_exchange_n(&space->names[index].state, &state, pid | PJW_TASKS_CLAIMED_, 0,
                                        __ATOMIC_ACQ_REL, __ATOMIC_RELAXED)) {
            entry = &space->names[index];
            break;
        }
    }
    if (entry == NULL) return pjw_tasks_fail_(ENOSPC);
    used = __atomic_load_n(&space->names_used, __ATOMIC_ACQUIRE);
    while (used <= (uint32_t)index && !__atomic_compare_exchange_n(&space->names_used, &used, (uint32_t)index + 1, 0,
                                                                   __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE)) {
    }
    entry->address = (uint64_t)(uintptr_t)address;
    entry->bytes = bytes;
    entry->descriptor = (uint32_t)(file + 1);
    strcpy(entry->text, name);
    __atomic_store_n(&entry->state, pid | PJW_TASKS_WRITTEN_, __ATOMIC_SEQ_CST);
    /* Of two that publish the same name at once, the one with the lower entry wins. */
    used = __atomic_load_n(&space->names_used, __ATOMIC_SEQ_CST);
    for (other = 0; other < (int)used; other++) {
        struct pjw_tasks_name_ *rival = &space->names[other];
        int spins = 0;
        if (rival == entry) continue;
        state = __atomic_load_n(&rival->state, __ATOMIC_SEQ_CST);
        while ((state & 3) == PJW_TASKS_CLAIMED_ && other < index) {
            /* The rival writes its name. A rank that has ended writes no more. */
            if (++spins % 1000 == 0 && kill((pid_t)(state >> 2), 0) != 0 && errno == ESRCH) break;
            sched_yield();
            state = __atomic_load_n(&rival->state, __ATOMIC_SEQ_CST);
        }
        if ((state & 3) == PJW_TASKS_PUBLISHED_ || ((state & 3) == PJW_TASKS_WRITTEN_ && other < index)) {
            if (strncmp(rival->text, name, PJW_TASKS_NAME_MAX) == 0) {
                __atomic_store_n(&entry->state, 0, __ATOMIC_RELEASE);
                return pjw_tasks_fail_(EEXIST);
            }
        }
    }
    __atomic_store_n(&entry->state, pid | PJW_TASKS_PUBLISHED_, __ATOMIC_RELEASE);
    __atomic_add_fetch(&space->names_changed, 1, __ATOMIC_ACQ_REL);
    pjw_tasks_wake_(&space->names_changed);
    return 0;
}

/* Checks a name. Returns 0 or an error number. */
static inline int pjw_tasks_check_(const char *name) {
    if (pjw_tasks_own_.space == NULL) return EINVAL;
    if (*name == '\0') return EINVAL;
    return strlen(name) < PJW_TASKS_NAME_MAX ? 0 : ENAMETOOLONG;
}

/* Publishes an address of this process under a name. All ranks may use the memory there until this process ends.
 * Returns 0, or -1 with errno: ENOTSUP without a shared address space (use pjw_tasks_alloc, which works in both), EEXIST if
 * the name is in use, ENAMETOOLONG, ENOSPC after 4,096 names, EINVAL for an empty name or before pjw_tasks_init. */
static inline int pjw_tasks_publish(const char *name, const void *address, size_t bytes) {
    int error = pjw_tasks_check_(name);
    if (error != 0) return pjw_tasks_fail_(error);
    if (!pjw_tasks_own_.shared) return pjw_tasks_fail_(ENOTSUP);
    return pjw_tasks_publish_(name, address, bytes, -1);
}

/* Allocates memory of zeros that all ranks may use, and publishes it under a name. The memory lives as long as this process.
 * Returns its address, or NULL with errno: those of pjw_tasks_publish without ENOTSUP, and of mmap(2). */
static inline void *pjw_tasks_alloc(const char *name, size_t bytes) {
    int error = pjw_tasks_check_(name), file = -1;
    void *at;
    if (error == 0 && bytes == 0) error = EINVAL;
    if (error != 0) {
        errno = error;
        return NULL;
    }
    if (!pjw_tasks_own_.shared) {
        file = (int)syscall(SYS_memfd_create, name, 1u /* MFD_CLOEXEC */);
        if (file < 0) return NULL;
        if (ftruncate(file, (off_t)bytes) != 0) {
            error = errno;
            close(file);
            errno = error;
            return NULL;
        }
    }
    at = mmap(NULL, bytes, PROT_READ | PROT_WRITE, file < 0 ? MAP_PRIVATE | MAP_ANONYMOUS : MAP_SHARED, file, 0);
    if (at == MAP_FAILED || pjw_tasks_publish_(name, at, bytes, file) != 0) {
        error = errno;
        if (at != MAP_FAILED) munmap(at, bytes);
        if (file >= 0) close(file);
        errno = error;
        return NULL;
    }
    return at;
}

/* Maps the memory file of another process. */
static inline void *pjw_tasks_open_(uint32_t pid, uint32_t descriptor, size_t bytes) {
    char path[64];
    int file, error;
    void *at;
    snprintf(path, sizeof path, "/proc/%u/fd/%u", (unsigned)pid, (unsigned)descriptor);
    file = open(path, O_RDWR | O_CLOEXEC);
    if (file < 0) return NULL;
    at = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    error = errno;
    close(file);
    errno = error;
    return at == MAP_FAILED ? NULL : at;
}

/* Waits until a rank has published a name, for at most limit_ms milliseconds (0: does not wait; PJW_TASKS_FOREVER: without a
 * limit). Returns an address at which this process finds the memory: in one address space, that of the publisher. `bytes` gets
 * its size, if it is not NULL. Returns NULL with errno: ETIMEDOUT, EINVAL for an empty name or before pjw_tasks_init,
 * ENAMETOOLONG, and without a shared address space those of open(2) and mmap(2). */
static inline void *pjw_tasks_find(const char *name, size_t *bytes, int limit_ms) {
    struct pjw_tasks_space_ *space = pjw_tasks_own_.space;
    struct timespec deadline;
    int error = pjw_tasks_check_(name);
    if (error != 0) {
        errno = error;
        return NULL;
    }
    deadline = pjw_tasks_deadline_(limit_ms);
    for (;;) {
        uint32_t changed = __atomic_load_n(&space->names_changed, __ATOMIC_ACQUIRE);
        uint32_t index, used = __atomic_load_n(&space->names_used, __ATOMIC_ACQUIRE);
        for (index = 0; index < used; index++) {
            struct pjw_tasks_name_ *entry = &space->names[index];
            uint64_t state = __atomic_load_n(&entry->state, __ATOMIC_ACQUIRE);
            if ((state & 3) == PJW_TASKS_PUBLISHED_ && strncmp(entry->text, name, PJW_TASKS_NAME_MAX) == 0) {
                uint32_t pid = (uint32_t)(state >> 2);
                void *at = (void *)(uintptr_t)__atomic_load_n(&entry->address, __ATOMIC_RELAXED);
                size_t length = __atomic_load_n(&entry->bytes, __ATOMIC_RELAXED);
                uint32_t descriptor = __atomic_load_n(&entry->descriptor, __ATOMIC_RELAXED);
                __atomic_thread_fence(__ATOMIC_ACQUIRE);
                if (__atomic_load_n(&entry->state, __ATOMIC_RELAXED) != state) {
                    /* The publisher has ended meanwhile, and another one may be writing the entry: the search begins again. */
                    index = UINT32_MAX;
                    continue;
                }
                if (bytes != NULL) *bytes = length;
                if (descriptor == 0 || pid == pjw_tasks_own_.pid) return at;
                return pjw_tasks_open_(pid, descriptor - 1, length);
            }
        }
        if (pjw_tasks_wait_(&space->names_changed, changed, limit_ms, &deadline)) {
            errno = ETIMEDOUT;
            return NULL;
        }
    }
}

#ifdef __cplusplus
}
#endif

#endif
