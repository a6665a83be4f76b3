/* The functions of pjw_spawn.h as a C program calls them. Prints what it expected and what it got, and exits with 1, if a
 * function does something else. Arguments: the path of this program. With the argument "child", it is an instance. */
#define _GNU_SOURCE
#include <errno.h>
#include <limits.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <poll.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include "pjw_spawn.h"

static int failures;

static void expect(int holds, const char *what) {
    if (!holds) {
        fprintf(stderr, "not true: %s (errno %d, %s)\n", what, errno, pspawn_error());
        failures++;
    }
}
#define EXPECT(condition) expect(condition, #condition)

static int exit_status(pid_t pid) {
    int status;
    return waitpid(pid, &status, 0) == pid && WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

/* An instance: its status says on which CPU it may run, or what its argument and its variable are. */
static int instance(char **argv) {
    cpu_set_t mask;
    sched_getaffinity(0, sizeof mask, &mask);
    if (strcmp(argv[2], "cpu") == 0) {
        for (int cpu = 0; cpu < 100; cpu++)
            if (CPU_ISSET(cpu, &mask)) return CPU_COUNT(&mask) == 1 ? cpu : 100 + CPU_COUNT(&mask);
        return 255;
    }
    if (strcmp(argv[2], "variable") == 0) return getenv("NUMBER") ? atoi(getenv("NUMBER")) : 254;
    return atoi(argv[2]);
}

static int first_cpu(void) {
    cpu_set_t mask;
    sched_getaffinity(0, sizeof mask, &mask);
    int cpu = 0;
    while (!CPU_ISSET(cpu, &mask)) cpu++;
    return cpu;
}

static int last_cpu(void) {
    cpu_set_t mask;
    sched_getaffinity(0, sizeof mask, &mask);
    int cpu = CPU_SETSIZE - 1;
    while (!CPU_ISSET(cpu, &mask)) cpu--;
    return cpu;
}

static void a_context_starts_processes_on_its_cpu(char *self) {
    pspawn_context_t ctx;
    char *arguments[] = {self, "child", "cpu", NULL};
    EXPECT(pspawn_context_create(&ctx, self, last_cpu()) == 0);
    pid_t pid = pspawn(&ctx, arguments);
    EXPECT(pid > 0);
    EXPECT(exit_status(pid) == last_cpu());

    pid_t pids[20];
    EXPECT(pspawn_n(pids, &ctx, 20, arguments) == 20);
    for (int i = 0; i < 20; i++) EXPECT(exit_status(pids[i]) == last_cpu());
    pspawn_context_destroy(&ctx);
}

static void a_vector_call_gives_each_process_its_mask_arguments_and_environment(char *self) {
    cpu_set_t first, last;
    CPU_ZERO(&first);
    CPU_SET(first_cpu(), &first);
    CPU_ZERO(&last);
    CPU_SET(last_cpu(), &last);
    cpu_set_t *masks[] = {&first, &last};
    char *on_cpus[] = {self, "child", "cpu", NULL};
    pid_t pids[4];
    EXPECT(pspawn_v(self, on_cpus, NULL, 4, 2, masks, PSPAWN_DEFAULT, pids) == 4);
    for (int i = 0; i < 4; i++) EXPECT(exit_status(pids[i]) == (i % 2 ? last_cpu() : first_cpu()));

    char *each[] = {self, "child", "7", NULL, self, "child", "8", NULL};
    EXPECT(pspawn_v(self, each, NULL, 2, 0, NULL, PSPAWN_ARGV_EACH, pids) == 2);
    EXPECT(exit_status(pids[0]) == 7 && exit_status(pids[1]) == 8);

    char *variable[] = {self, "child", "variable", NULL};
    char *environments[] = {"NUMBER=3", NULL, "NUMBER=4", NULL};
    EXPECT(pspawn_v(self, variable, environments, 2, 0, NULL, PSPAWN_ENVP_EACH, pids) == 2);
    EXPECT(exit_status(pids[0]) == 3 && exit_status(pids[1]) == 4);
    EXPECT(pspawn_v(self, variable, &environments[2], 2, 0, NULL, PSPAWN_DEFAULT, pids) == 2);
    EXPECT(exit_status(pids[0]) == 4 && exit_status(pids[1]) == 4);
    char *without_equals_sign[] = {"NUMBER", "NUMBER=5", NULL};
    EXPECT(pspawn_v(self, variable, without_equals_sign, 2, 0, NULL, PSPAWN_DEFAULT, pids) == 2);
    EXPECT(exit_status(pids[0]) == 5 && exit_status(pids[1]) == 5);
}

static void an_asynchronous_call_reports_its_end_by_a_descriptor(char *self) {
    cpu_set_t first;
    CPU_ZERO(&first);
    CPU_SET(first_cpu(), &first);
    cpu_set_t *masks[] = {&first, &first, &first};
    char *arguments[] = {self, "child", "cpu", NULL};
    int fd = ipspawn(self, arguments, NULL, 3, masks, PSPAWN_DEFAULT);
    EXPECT(fd >= 0);
    struct pollfd ready = {.fd = fd, .events = POLLIN};
    EXPECT(poll(&ready, 1, 60000) == 1);
    pid_t pids[3];
    EXPECT(pspawn_collect(fd, pids, 3) == 3);
    for (int i = 0; i < 3; i++) EXPECT(exit_status(pids[i]) == first_cpu());
    EXPECT(pspawn_collect(fd, pids, 3) == -1 && errno == EBADF);
}

/* Holds execve(2) in this process and in the processes and threads that it starts: a call waits until
 * let_one_process_execute() lets it go on. Returns a descriptor, or -1 if the kernel can't do this. */
static int hold_execve(void) {
    struct sock_filter filter[] = {
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_execve, 0, 1),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_USER_NOTIF),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
    };
    struct sock_fprog program = {.len = sizeof filter / sizeof *filter, .filter = filter};
    if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0) return -1;
    return syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, SECCOMP_FILTER_FLAG_NEW_LISTENER, &program);
}

/* Waits until a process calls execve(2), and lets this call go on. */
static void let_one_process_execute(int held) {
    struct seccomp_notif call = {0};
    EXPECT(ioctl(held, SECCOMP_IOCTL_NOTIF_RECV, &call) == 0);
    struct seccomp_notif_resp answer = {.id = call.id, .flags = SECCOMP_USER_NOTIF_FLAG_CONTINUE};
    EXPECT(ioctl(held, SECCOMP_IOCTL_NOTIF_SEND, &answer) == 0);
}

static void an_asynchronous_call_returns_while_no_process_can_begin(char *self) {
    /* The filter can't be removed, so another process has it. */
    pid_t tester = fork();
    if (tester == 0) {
        int held = hold_execve();
        if (held < 0) {
            fprintf(stderr, "skipped: execve(2) can't be held: %s\n", strerror(errno));
            _exit(0);
        }
        /* A call that waits for its processes would wait for ever. */
        alarm(60);
        char *arguments[] = {self, "child", "7", NULL};
        int fd = ipspawn(self, arguments, NULL, 2, NULL, PSPAWN_DEFAULT);
        EXPECT(fd >= 0);
        struct pollfd ready = {.fd = fd, .events = POLLIN};
        EXPECT(poll(&ready, 1, 0) == 0);
        let_one_process_execute(held);
        /* The second process can't execute the program yet. */
        EXPECT(poll(&ready, 1, 0) == 0);
        let_one_process_execute(held);
        pid_t pids[2];
        EXPECT(pspawn_collect(fd, pids, 2) == 2);
        for (int i = 0; i < 2; i++) EXPECT(exit_status(pids[i]) == 7);
        _exit(failures != 0);
    }
    EXPECT(exit_status(tester) == 0);
}

/* The program of the next test. Its start-up gives it a number, which its processes have without doing the same again. */
static int late_program(int argc, char **argv) {
    int number = getpid();
    int forked = pspawn_fork_here(&argc, &argv);
    if (forked < 0) return 253;
    if (!forked) return 252;
    if (getpid() == number || argc != 4 || strcmp(argv[1], "late") != 0) return 251;
    const char *own = getenv("NUMBER");
    if (!own || strcmp(own, argv[3]) != 0) return 250;
    return atoi(argv[2]);
}

static void a_late_fork_has_the_arguments_and_the_environment_of_its_process(char *self) {
    char *arguments[] = {self, "late", "11", "3", NULL, self, "late", "12", "4", NULL};
    char *environments[] = {"NUMBER=3", NULL, "NUMBER=4", NULL};
    pid_t pids[2];
    int flags = PSPAWN_ARGV_EACH | PSPAWN_ENVP_EACH;
    EXPECT(pspawn_v(self, arguments, environments, 2, 0, NULL, flags | PSPAWN_FORK_LATE, pids) == 2);
#ifdef __x86_64__
    EXPECT(exit_status(pids[0]) == 11 && exit_status(pids[1]) == 12);
#else
    EXPECT(exit_status(pids[0]) == 252 && exit_status(pids[1]) == 252);
#endif
    EXPECT(pspawn_v(self, arguments, environments, 2, 0, NULL, flags, pids) == 2);
    EXPECT(exit_status(pids[0]) == 252 && exit_status(pids[1]) == 252);
    EXPECT(pspawn_fork_here(NULL, NULL) == 0);
}

static void a_mistake_has_an_errno_and_a_text(char *self) {
    pspawn_context_t ctx;
    char *arguments[] = {self, "child", "0", NULL};
    char *none[] = {NULL};
    pid_t pids[2];
    EXPECT(pspawn_context_create(&ctx, "/nowhere/program", -1) == -1 && errno == ENOENT);
    EXPECT(strstr(pspawn_error(), "/nowhere/program") != NULL);
    EXPECT(pspawn_context_create(&ctx, "/tmp", -1) == -1 && errno == EACCES);
    EXPECT(pspawn_context_create(&ctx, self, 1000000) == -1 && errno == EINVAL);
    EXPECT(pspawn_context_create(NULL, self, -1) == -1 && errno == EINVAL);
    EXPECT(pspawn_v(self, arguments, NULL, 0, 0, NULL, PSPAWN_DEFAULT, pids) == -1 && errno == EINVAL);
    EXPECT(pspawn_v(self, none, NULL, 1, 0, NULL, PSPAWN_DEFAULT, pids) == -1 && errno == EINVAL);
    EXPECT(pspawn_v(self, NULL, NULL, 1, 0, NULL, PSPAWN_DEFAULT, pids) == -1 && errno == EINVAL);
    EXPECT(pspawn_v(self, arguments, NULL, 1, 0, NULL, 1024, pids) == -1 && errno == EINVAL);
    cpu_set_t nothing;
    CPU_ZERO(&nothing);
    cpu_set_t *masks[] = {&nothing};
    EXPECT(pspawn_v(self, arguments, NULL, 1, 1, masks, PSPAWN_DEFAULT, pids) == -1 && errno == EINVAL);
    EXPECT(pspawn_collect(-1, pids, 2) == -1 && errno == EBADF);
    EXPECT(waitpid(-1, NULL, WNOHANG) == -1 && errno == ECHILD);
}

/* The arrays are shorter than the number of processes: a call that the limits refuse does not read them. The limit of
 * addresses lets the allocation of memory for each process fail. */
static void a_number_that_the_limits_do_not_allow_is_refused_before_memory_is_allocated(char *self) {
    const rlim_t max_addresses = (rlim_t)4 << 30;
    struct rlimit before;
    EXPECT(getrlimit(RLIMIT_AS, &before) == 0);
    struct rlimit lower = before;
    if (lower.rlim_cur > max_addresses) lower.rlim_cur = max_addresses;
    EXPECT(setrlimit(RLIMIT_AS, &lower) == 0);

    pspawn_context_t ctx;
    char *arguments[] = {self, "child", "0", NULL};
    char *environment[] = {"NUMBER=3", NULL};
    EXPECT(pspawn_context_create(&ctx, self, -1) == 0);
    EXPECT(pspawn_n(NULL, &ctx, 2000000000, arguments) == -1 && errno == EAGAIN);
    EXPECT(strstr(pspawn_error(), "2000000000 were asked for") != NULL);
    pspawn_context_destroy(&ctx);

    cpu_set_t first;
    CPU_ZERO(&first);
    CPU_SET(first_cpu(), &first);
    cpu_set_t *masks[] = {&first};
    pid_t pids[1] = {12345};
    int each = PSPAWN_ARGV_EACH | PSPAWN_ENVP_EACH;
    EXPECT(pspawn_v(self, arguments, NULL, UINT_MAX, 0, NULL, PSPAWN_DEFAULT, pids) == -1 && errno == EAGAIN);
    EXPECT(strstr(pspawn_error(), "4294967295 were asked for") != NULL);
    EXPECT(pspawn_v(self, arguments, environment, UINT_MAX, 0, NULL, each, pids) == -1 && errno == EAGAIN);
    EXPECT(pspawn_v(self, arguments, NULL, UINT_MAX, UINT_MAX, masks, PSPAWN_DEFAULT, pids) == -1 && errno == EAGAIN);
    EXPECT(pids[0] == 12345);
    EXPECT(ipspawn(self, arguments, NULL, UINT_MAX, NULL, PSPAWN_DEFAULT) == -1 && errno == EAGAIN);
    EXPECT(ipspawn(self, arguments, NULL, UINT_MAX, masks, PSPAWN_DEFAULT) == -1 && errno == EAGAIN);
    EXPECT(setrlimit(RLIMIT_AS, &before) == 0);
}

static void a_set_that_no_process_uses_is_not_read(char *self) {
    cpu_set_t first;
    CPU_ZERO(&first);
    CPU_SET(first_cpu(), &first);
    cpu_set_t *masks[] = {&first, NULL};
    char *arguments[] = {self, "child", "cpu", NULL};
    pid_t pid;
    EXPECT(pspawn_v(self, arguments, NULL, 1, 2, masks, PSPAWN_DEFAULT, &pid) == 1);
    EXPECT(exit_status(pid) == first_cpu());
    EXPECT(pspawn_v(self, arguments, NULL, 2, 2, masks, PSPAWN_DEFAULT, NULL) == -1 && errno == EINVAL);
}

/* 4 MiB is more than execve(2) allows for one string, also with pages of 64 KiB. */
static void of_the_lists_of_each_process_only_a_too_large_one_fails(char *self) {
    static char large[4 << 20];
    memset(large, 'x', sizeof large - 1);
    char *each[] = {self, "child", "7", NULL, self, "child", large, NULL};
    char *variable[] = {self, "child", "variable", NULL};
    char *environments[] = {large, NULL, "NUMBER=4", NULL};
    pid_t pids[2];
    EXPECT(pspawn_v(self, each, NULL, 2, 0, NULL, PSPAWN_ARGV_EACH, pids) == 1);
    EXPECT(exit_status(pids[0]) == 7 && pids[1] == -E2BIG);
    EXPECT(pspawn_v(self, variable, environments, 2, 0, NULL, PSPAWN_ENVP_EACH, pids) == 1);
    EXPECT(pids[0] == -E2BIG && exit_status(pids[1]) == 4);
    EXPECT(pspawn_v(self, &each[4], NULL, 2, 0, NULL, PSPAWN_DEFAULT, pids) == -1 && errno == E2BIG);
}

int main(int argc, char **argv) {
    if (argc > 2 && strcmp(argv[1], "child") == 0) return instance(argv);
    if (argc > 2 && strcmp(argv[1], "late") == 0) return late_program(argc, argv);
    a_context_starts_processes_on_its_cpu(argv[0]);
    a_vector_call_gives_each_process_its_mask_arguments_and_environment(argv[0]);
    an_asynchronous_call_reports_its_end_by_a_descriptor(argv[0]);
    an_asynchronous_call_returns_while_no_process_can_begin(argv[0]);
    a_late_fork_has_the_arguments_and_the_environment_of_its_process(argv[0]);
    a_mistake_has_an_errno_and_a_text(argv[0]);
    a_number_that_the_limits_do_not_allow_is_refused_before_memory_is_allocated(argv[0]);
    a_set_that_no_process_uses_is_not_read(argv[0]);
    of_the_lists_of_each_process_only_a_too_large_one_fails(argv[0]);
    return failures != 0;
}
