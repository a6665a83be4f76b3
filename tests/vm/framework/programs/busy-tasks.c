/* Processes in one address space that compute all the time. Without an argument the program makes four more processes by
 * clone(2) with CLONE_VM, and sleeps itself. With the argument `alone` it makes none, and computes itself. */
#define _GNU_SOURCE
#include <sched.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/prctl.h>
#include <unistd.h>

static int compute(void *unused) {
    volatile unsigned long rounds = 0;
    (void)unused;
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    for (;;) rounds++;
    return 0;
}

int main(int argc, char **argv) {
    int count;
    (void)argv;
    if (argc > 1) return compute(NULL);
    for (count = 0; count < 4; count++) {
        char *stack = malloc(1 << 16);
        if (stack == NULL || clone(compute, stack + (1 << 16), CLONE_VM | SIGCHLD, NULL) < 0) return 1;
    }
    for (;;) pause();
}
