/* Processes in one address space that map, use and unmap memory all the time, so that they wait for one another in the kernel.
 * The program makes eight more processes by clone(2) with CLONE_VM, and sleeps itself. */
#define _GNU_SOURCE
#include <sched.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <unistd.h>

#define TASKS 8
#define BYTES (1 << 18)

static int map(void *unused) {
    (void)unused;
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    for (;;) {
        size_t at;
        char *memory = mmap(NULL, BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (memory == MAP_FAILED) return 1;
        for (at = 0; at < BYTES; at += 4096) memory[at] = 1;
        munmap(memory, BYTES);
    }
}

int main(void) {
    int count;
    for (count = 0; count < TASKS; count++) {
        char *stack = malloc(1 << 16);
        if (stack == NULL || clone(map, stack + (1 << 16), CLONE_VM | SIGCHLD, NULL) < 0) return 1;
    }
    for (;;) pause();
}
