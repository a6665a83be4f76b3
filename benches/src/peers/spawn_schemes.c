/* Starts COUNT processes of PROGRAM by one of the other ways, each on one PU, and waits for all of them. Prints the CPU time
   of this process and its children, and the time that passed, both in us.

   spawn_schemes SCHEME COUNT BALLAST_MB PU,PU,... PROGRAM

   Before the measurement, BALLAST_MB of memory are written. Compiled with WITH_FORK_HERE and started with one argument, it is
   the program of a late fork, whose processes end at once. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <pthread.h>
#include <sched.h>
#include <spawn.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>
#ifdef WITH_FORK_HERE
#include "pjw_spawn.h"
#endif

extern char **environ;

static const char *scheme, *program;
static char *arguments[2];
static int pus[1024], pu_count, count;
static atomic_int failures;

static void fail(const char *what) {
    perror(what);
    exit(1);
}

static void pin(pid_t pid, int pu) {
    cpu_set_t *one = CPU_ALLOC(8192);
    size_t size = CPU_ALLOC_SIZE(8192);
    CPU_ZERO_S(size, one);
    CPU_SET_S(pu, size, one);
    /* The process may have ended. */
    sched_setaffinity(pid, size, one);
    CPU_FREE(one);
}

/* Waits for children of this thread. Returns how many have ended. */
static int reap(int flags) {
    int ended = 0, status;
    while (waitpid(-1, &status, flags | __WNOTHREAD) > 0) {
        ended++;
        if (!WIFEXITED(status) || WEXITSTATUS(status) != 0) failures++;
    }
    return ended;
}

static pid_t by_fork(int pu, int waits, int execs) {
    int ends[2];
    char byte;
    if (waits && pipe2(ends, O_CLOEXEC) != 0) fail("pipe2");
    pid_t pid = fork();
    if (pid == 0) {
        if (!waits) pin(0, pu);
        if (execs) execv(program, arguments);
        _exit(execs ? 127 : 0);
    }
    if (waits) {
        close(ends[1]);
        if (read(ends[0], &byte, 1) != 0) fail("read");
        close(ends[0]);
        if (pid > 0) pin(pid, pu);
    }
    return pid;
}

static pid_t by_vfork(cpu_set_t *mask, size_t size) {
    pid_t pid = vfork();
    if (pid == 0) {
        if (mask) sched_setaffinity(0, size, mask);
        execv(program, arguments);
        _exit(127);
    }
    return pid;
}

static pid_t by_posix_spawn(void) {
    pid_t pid;
    if (posix_spawn(&pid, program, 0, 0, arguments, environ) != 0) fail("posix_spawn");
    return pid;
}

static pid_t start_one(int pu) {
    pid_t pid;
    if (strcmp(scheme, "sfork") == 0) return by_fork(pu, 1, 1);
    if (strcmp(scheme, "afork") == 0) return by_fork(pu, 0, 1);
    if (strcmp(scheme, "fork") == 0) return by_fork(pu, 0, 0);
    if (strcmp(scheme, "vfork") == 0) {
        cpu_set_t *one = CPU_ALLOC(8192);
        size_t size = CPU_ALLOC_SIZE(8192);
        CPU_ZERO_S(size, one);
        CPU_SET_S(pu, size, one);
        pid = by_vfork(one, size);
        CPU_FREE(one);
        return pid;
    }
    pid = by_posix_spawn();
    pin(pid, pu);
    return pid;
}

static void serial(void) {
    int running = 0;
    for (int i = 0; i < count; i++) {
        if (start_one(pus[i % pu_count]) < 0) fail(scheme);
        running++;
        running -= reap(WNOHANG);
    }
    if (reap(0) != running) fail("waitpid");
}

/* The first process makes all others, and becomes one of the group when they have ended. */
static void parallel_fork(void) {
    pid_t first = fork();
    if (first < 0) fail("fork");
    if (first > 0) {
        if (reap(0) != 1) fail("waitpid");
        return;
    }
    int running = 0;
    for (int i = 1; i < count; i++) {
        if (by_fork(pus[i % pu_count], 0, 1) < 0) fail("fork");
        running++;
        running -= reap(WNOHANG);
    }
    if (reap(0) != running || failures) _exit(1);
    pin(0, pus[0]);
    execv(program, arguments);
    _exit(127);
}

/* One loop on one PU: the processes inherit its mask. */
static void *loop_on_pu(void *number_as_pointer) {
    int number = (int)(size_t)number_as_pointer, bare = strcmp(scheme, "limit") == 0, running = 0;
    pin(0, pus[number]);
    for (int i = number; i < count; i += pu_count) {
        if ((bare ? by_vfork(0, 0) : by_posix_spawn()) < 0) fail(scheme);
        running++;
        running -= reap(WNOHANG);
    }
    if (reap(0) != running) fail("waitpid");
    return 0;
}

static void parallel(void) {
    pthread_t threads[1024];
    for (int i = 0; i < pu_count; i++)
        if (pthread_create(&threads[i], 0, loop_on_pu, (void *)(size_t)i) != 0) fail("pthread_create");
    for (int i = 0; i < pu_count; i++) pthread_join(threads[i], 0);
}

/* A process for each PU, which makes processes by fork that do nothing. They inherit its mask. */
static void fork_loops(void) {
    for (int number = 0; number < pu_count; number++) {
        pid_t loop = fork();
        if (loop < 0) fail("fork");
        if (loop > 0) continue;
        int running = 0;
        pin(0, pus[number]);
        for (int i = number; i < count; i += pu_count) {
            pid_t pid = fork();
            if (pid < 0) fail("fork");
            if (pid == 0) _exit(0);
            running++;
            running -= reap(WNOHANG);
        }
        _exit(reap(0) == running && !failures ? 0 : 1);
    }
    if (reap(0) != pu_count) fail("waitpid");
}

static double cpu_us(void) {
    struct rusage own, children;
    getrusage(RUSAGE_SELF, &own);
    getrusage(RUSAGE_CHILDREN, &children);
    return 1e6 * (own.ru_utime.tv_sec + own.ru_stime.tv_sec + children.ru_utime.tv_sec + children.ru_stime.tv_sec)
        + own.ru_utime.tv_usec + own.ru_stime.tv_usec + children.ru_utime.tv_usec + children.ru_stime.tv_usec;
}

static double now_us(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return 1e6 * now.tv_sec + now.tv_nsec / 1e3;
}

int main(int argc, char **argv) {
#ifdef WITH_FORK_HERE
    if (argc == 2) _exit(pspawn_fork_here(0, 0) == 1 ? 0 : 1);
#endif
    if (argc != 6) return 2;
    scheme = argv[1];
    count = atoi(argv[2]);
    size_t ballast = (size_t)atoi(argv[3]) << 20;
    for (char *pu = strtok(argv[4], ","); pu && pu_count < 1024; pu = strtok(0, ",")) pus[pu_count++] = atoi(pu);
    program = arguments[0] = argv[5];
    char *written = malloc(ballast + 1);
    if (!written) fail("malloc");
    memset(written, 1, ballast + 1);
    double cpu = cpu_us(), start = now_us();
    if (strcmp(scheme, "limit") == 0 || strcmp(scheme, "posix_spawn_per_pu") == 0) parallel();
    else if (strcmp(scheme, "fork_per_pu") == 0) fork_loops();
    else if (strcmp(scheme, "pfork") == 0) parallel_fork();
    else serial();
    double wall = now_us() - start;
    cpu = cpu_us() - cpu;
    if (failures || written[ballast / 2] != 1) {
        fprintf(stderr, "%d processes of %s failed\n", (int)failures, program);
        return 1;
    }
    printf("%.0f %.0f\n", cpu, wall);
    return 0;
}
