/* Starts a program by bare vfork and exec, as often as it is asked to: vfork_delay PU,PU,... PROGRAM

   For each byte "-" at its standard input it starts PROGRAM, for each byte "m" with the mask of one PU after the other, which
   the process sets before exec. PROGRAM writes a record, whose second word of 64 bits is the time of its first act
   (CLOCK_MONOTONIC, ns). Each time from before vfork to there is written to standard output, as 8 bytes, in ns. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <sched.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

int main(int argc, char **argv) {
    int pus[1024], pu_count = 0, ends[2], status;
    uint64_t record[4];
    char kind;
    if (argc != 3 || pipe2(ends, O_CLOEXEC) != 0) return 2;
    for (char *pu = strtok(argv[1], ","); pu && pu_count < 1024; pu = strtok(0, ",")) pus[pu_count++] = atoi(pu);
    if (pu_count == 0) return 2;
    cpu_set_t *one = CPU_ALLOC(8192);
    size_t size = CPU_ALLOC_SIZE(8192);
    char *arguments[] = {argv[2], 0};
    for (int turn = 0; read(0, &kind, 1) == 1;) {
        struct timespec now;
        CPU_ZERO_S(size, one);
        CPU_SET_S(pus[turn % pu_count], size, one);
        turn += kind == 'm';
        clock_gettime(CLOCK_MONOTONIC, &now);
        pid_t pid = vfork();
        if (pid == 0) {
            if (kind == 'm' && sched_setaffinity(0, size, one) != 0) _exit(126);
            dup2(ends[1], 1);
            execve(argv[2], arguments, environ);
            _exit(127);
        }
        if (pid < 0 || waitpid(pid, &status, 0) != pid || status != 0) return 1;
        if (read(ends[0], record, sizeof record) != sizeof record) return 1;
        uint64_t delay = record[1] - (now.tv_sec * 1000000000ull + now.tv_nsec);
        if (write(1, &delay, sizeof delay) != sizeof delay) return 1;
    }
    return 0;
}
