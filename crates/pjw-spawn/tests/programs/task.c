/* A program for tasks: its first argument says what it does. */
#define _GNU_SOURCE
#include <dirent.h>
#include <elf.h>
#include <errno.h>
#include <link.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/auxv.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

static volatile int value = 42;
static __thread int of_thread = 7;

static void *thread(void *unused) {
    (void)unused;
    of_thread = 9;
    return calloc(1, 100000);
}

/* Uses the heap, a thread, its local variables and errno. */
static int live(void) {
    pthread_t id;
    void *result = NULL;
    int index;
    if (pthread_create(&id, NULL, thread, NULL) != 0 || pthread_join(id, &result) != 0 || result == NULL) return 1;
    if (of_thread != 7) return 2;
    for (index = 0; index < 1000; index++) {
        char *bytes = malloc(1000 + (size_t)index);
        if (bytes == NULL) return 3;
        memset(bytes, index, 1000);
        if (index % 2) free(bytes);
    }
    errno = 0;
    if (close(-1) != -1 || errno != EBADF) return 4;
    return 0;
}

static int call_brk(void) {
    void *before = (void *)syscall(SYS_brk, 0);
    if (sbrk(4096) != (void *)-1 || errno != ENOMEM) return 1;
    if ((void *)syscall(SYS_brk, (char *)before + (1 << 20)) != before) return 2;
    if ((void *)syscall(SYS_brk, (char *)before - (1 << 20)) != before) return 3;
    return live();
}

int main(int argc, char **argv);

/* Whether the code of main is in a segment of the program that the headers name: unwinding looks it up so. */
static int is_code_of_main(struct dl_phdr_info *program, size_t size, void *unused) {
    unsigned long at = (unsigned long)main - program->dlpi_addr;
    int index;
    (void)size;
    (void)unused;
    for (index = 0; index < program->dlpi_phnum; index++) {
        const ElfW(Phdr) *header = &program->dlpi_phdr[index];
        if (header->p_type == PT_LOAD && at - header->p_vaddr < header->p_memsz) return 1;
    }
    return 0;
}

/* Prints the auxiliary vector's random bytes, and checks the rest of what execve(2) would give. */
static int look(int argc, char **argv) {
    const unsigned char *random = (const unsigned char *)getauxval(AT_RANDOM);
    const Elf64_Phdr *headers = (const Elf64_Phdr *)getauxval(AT_PHDR);
    char name[32] = "";
    FILE *comm = fopen("/proc/self/comm", "r");
    int index, has_code = 0;
    if (argc < 2 || random == NULL || headers == NULL || getauxval(AT_BASE) != 0) return 1;
    if (getauxval(AT_PAGESZ) != (unsigned long)sysconf(_SC_PAGESIZE) || getauxval(AT_SYSINFO_EHDR) == 0) return 2;
    if (strcmp((const char *)getauxval(AT_EXECFN), argv[0]) != 0) return 3;
    if (comm == NULL || fscanf(comm, "%31s", name) != 1 || strcmp(name, "task") != 0) return 4;
    for (index = 0; index < (int)getauxval(AT_PHNUM); index++) {
        has_code |= headers[index].p_type == PT_LOAD && (headers[index].p_flags & PF_X) != 0;
        /* The C library would divide the mapping of the variables, and interrupt other tasks. */
        if (headers[index].p_type == PT_GNU_RELRO) return 5;
    }
    if (!has_code || dl_iterate_phdr(is_code_of_main, NULL) != 1) return 6;
    for (index = 0; index < 16; index++) printf("%02x", random[index]);
    printf(" %s %s\n", getenv("PJW_RANK"), getenv("OWN"));
    return 0;
}

/* Prints how many variables PJW_TASKS there are. */
static int count_variables(void) {
    int index, count = 0;
    for (index = 0; environ[index] != NULL; index++) count += strncmp(environ[index], "PJW_TASKS=", 10) == 0;
    printf("%d\n", count);
    return 0;
}

static int list_descriptors(void) {
    DIR *directory = opendir("/proc/self/fd");
    struct dirent *entry;
    if (directory == NULL) return 1;
    while ((entry = readdir(directory)) != NULL) {
        if (entry->d_name[0] != '.' && atoi(entry->d_name) != dirfd(directory)) printf("%s ", entry->d_name);
    }
    printf("\n");
    return 0;
}

static void handler(int number) {
    (void)number;
    value = 43;
}

/* What one process must not change for another. */
static int change(void) {
    if (chdir("/") != 0 || close(0) != 0 || setenv("PATH", "/", 1) != 0) return 1;
    signal(SIGUSR1, handler);
    value = 1;
    printf("changed\n");
    fflush(stdout);
    while (value != 43) usleep(1000);
    return 0;
}

static int is_unchanged(void) {
    char path[4096];
    struct sigaction action;
    if (getcwd(path, sizeof path) == NULL || strcmp(path, "/") == 0) return 1;
    if (sigaction(SIGUSR1, NULL, &action) != 0 || action.sa_handler != SIG_DFL) return 2;
    /* The runtime of Rust ignores it in the process that starts tasks. */
    if (sigaction(SIGPIPE, NULL, &action) != 0 || action.sa_handler != SIG_DFL) return 6;
    if (lseek(0, 0, SEEK_CUR) == -1 && errno == EBADF) return 3;
    if (strcmp(getenv("PATH"), "/") == 0) return 4;
    return value == 42 ? 0 : 5;
}

static int leave_memory(void) {
    char *bytes = mmap(NULL, 10 << 20, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (bytes == MAP_FAILED) return 1;
    memset(bytes, 1, 1 << 20);
    return live();
}

int main(int argc, char **argv) {
    const char *act = argc > 1 ? argv[1] : "";
    const char *word = argc > 2 ? argv[2] : "0";
    if (strcmp(act, "live") == 0) return live();
    if (strcmp(act, "brk") == 0) return call_brk();
    if (strcmp(act, "look") == 0) return look(argc, argv);
    if (strcmp(act, "variables") == 0) return count_variables();
    if (strcmp(act, "descriptors") == 0) return list_descriptors();
    if (strcmp(act, "change") == 0) return change();
    if (strcmp(act, "unchanged") == 0) return is_unchanged();
    if (strcmp(act, "leave") == 0) return leave_memory();
    if (strcmp(act, "exit") == 0) return atoi(word);
    if (strcmp(act, "exec") == 0) return execl("/bin/sh", "sh", "-c", "exit 5", NULL);
    if (strcmp(act, "segv") == 0) {
        struct rlimit none = {0, 0};
        setrlimit(RLIMIT_CORE, &none);
        *(volatile int *)NULL = 0;
    }
    if (strcmp(act, "offer") == 0) {
        printf("%p\n", (void *)&value);
        fflush(stdout);
        while (value == 42) usleep(1000);
        return value;
    }
    if (strcmp(act, "take") == 0) {
        volatile int *of_other = (volatile int *)strtoull(word, NULL, 16);
        if (of_other == &value || *of_other != 42) return 1;
        *of_other = 17;
        return value == 42 ? 0 : 2;
    }
    if (strcmp(act, "kill") == 0) {
        kill((pid_t)atoi(word), SIGKILL);
        for (;;) pause();
    }
    if (strcmp(act, "wait") == 0) {
        printf("waiting\n");
        fflush(stdout);
        for (;;) pause();
    }
    return 99;
}
