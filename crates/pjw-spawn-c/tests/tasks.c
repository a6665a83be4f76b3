/* Ranks of one group check the functions of pjw_tasks.h. The same program runs in one address space and in several. */
#define _GNU_SOURCE
#include <pjw_tasks.h>

#include <stdio.h>
#include <sys/wait.h>

#define CHECK(condition)                                                                              \
    do {                                                                                              \
        if (!(condition)) {                                                                           \
            fprintf(stderr, "rank %d, line %d: %s (errno %d)\n", pjw_tasks_rank(), __LINE__, #condition, errno); \
            exit(1);                                                                                  \
        }                                                                                             \
    } while (0)

#define LIMIT_MS 60000

static int variable = 5;

static void name_of(char *name, const char *what, int rank) {
    snprintf(name, PJW_TASKS_NAME_MAX, "%s.%d", what, rank);
}

/* Each rank writes to the memory of the next one. */
static void exchange(int rank, int size) {
    char name[PJW_TASKS_NAME_MAX];
    size_t bytes = 0;
    int *own, *of_next;
    name_of(name, "ring", rank);
    own = pjw_tasks_alloc(name, 100 * sizeof *own);
    CHECK(own != NULL && own[0] == 0);
    name_of(name, "ring", (rank + 1) % size);
    of_next = pjw_tasks_find(name, &bytes, LIMIT_MS);
    CHECK(of_next != NULL && bytes == 100 * sizeof *own);
    of_next[99] = rank + 1;
    CHECK(pjw_tasks_barrier(LIMIT_MS) == 0);
    CHECK(own[99] == (rank + size - 1) % size + 1);
    CHECK(pjw_tasks_barrier(LIMIT_MS) == 0);
}

/* The address of a variable is good in all ranks, or there is an error that says why not. */
static void publish_variable(int rank, int size) {
    char name[PJW_TASKS_NAME_MAX];
    int other;
    name_of(name, "variable", rank);
    if (!pjw_tasks_shared()) {
        CHECK(pjw_tasks_publish(name, &variable, sizeof variable) == -1 && errno == ENOTSUP);
        return;
    }
    variable = 10 + rank;
    CHECK(pjw_tasks_publish(name, &variable, sizeof variable) == 0);
    for (other = 0; other < size; other++) {
        int *found;
        name_of(name, "variable", other);
        found = pjw_tasks_find(name, NULL, LIMIT_MS);
        CHECK(found != NULL && *found == 10 + other && (found == &variable) == (other == rank));
    }
    CHECK(pjw_tasks_barrier(LIMIT_MS) == 0);
}

#define BLOCKS 2000

/* Each rank has a heap of its own: all fill their blocks at the same time, and find them as they left them. Some of the blocks are of a size
 * for which malloc(3) calls mmap(2). */
static void keep_heaps(int rank) {
    static unsigned char *blocks[BLOCKS];
    size_t sizes[BLOCKS];
    int index, round;
    for (round = 0; round < 3; round++) {
        CHECK(pjw_tasks_barrier(LIMIT_MS) == 0);
        for (index = 0; index < BLOCKS; index++) {
            sizes[index] = index % 200 == 0 ? 200000 : 16 + (size_t)(index * 7 % 3000);
            blocks[index] = malloc(sizes[index]);
            CHECK(blocks[index] != NULL);
            memset(blocks[index], 16 * rank + round + 1, sizes[index]);
        }
        CHECK(pjw_tasks_barrier(LIMIT_MS) == 0);
        for (index = 0; index < BLOCKS; index++) {
            size_t at;
            for (at = 0; at < sizes[index]; at++) CHECK(blocks[index][at] == (unsigned char)(16 * rank + round + 1));
            free(blocks[index]);
        }
    }
}

static void make_mistakes(int rank) {
    char name[PJW_TASKS_NAME_MAX + 1];
    memset(name, 'x', sizeof name - 1);
    name[sizeof name - 1] = '\0';
    CHECK(pjw_tasks_alloc(name, 8) == NULL && errno == ENAMETOOLONG);
    CHECK(pjw_tasks_alloc("", 8) == NULL && errno == EINVAL);
    CHECK(pjw_tasks_find("nobody has this", NULL, 0) == NULL && errno == ETIMEDOUT);
    CHECK(pjw_tasks_find("nobody has this", NULL, 20) == NULL && errno == ETIMEDOUT);
    name_of(name, "twice", rank);
    CHECK(pjw_tasks_alloc(name, 8) != NULL);
    CHECK(pjw_tasks_alloc(name, 8) == NULL && errno == EEXIST);
    CHECK(pjw_tasks_barrier(LIMIT_MS) == 0);
}

/* One of all ranks gets a name that all want. */
static void compete(int rank, int size) {
    char name[PJW_TASKS_NAME_MAX];
    int *winners = NULL, round;
    if (rank == 0) winners = pjw_tasks_alloc("winners", 50 * sizeof *winners);
    if (winners == NULL) winners = pjw_tasks_find("winners", NULL, LIMIT_MS);
    CHECK(winners != NULL);
    for (round = 0; round < 50; round++) {
        snprintf(name, sizeof name, "race.%d", round);
        if (pjw_tasks_alloc(name, 1) != NULL) __atomic_add_fetch(&winners[round], 1, __ATOMIC_RELAXED);
        CHECK(pjw_tasks_barrier(LIMIT_MS) == 0);
        CHECK(winners[round] == 1);
    }
    (void)size;
}

/* A child made by fork, and a program that it executes, are not in the address space. */
static void check_child(const char *program, const char *part) {
    int status = 0;
    pid_t child = fork();
    CHECK(child >= 0);
    if (child == 0) {
        execl(program, program, part, NULL);
        _exit(99);
    }
    CHECK(waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

/* A barrier that one rank misses ends with an error, and the next one counts right. */
static void miss_a_barrier(int rank, int size) {
    char name[PJW_TASKS_NAME_MAX];
    int other;
    if (rank != 0) {
        CHECK(pjw_tasks_barrier(30) == -1 && errno == ETIMEDOUT);
        name_of(name, "missed", rank);
        CHECK(pjw_tasks_alloc(name, 1) != NULL);
    }
    for (other = 1; rank == 0 && other < size; other++) {
        name_of(name, "missed", other);
        CHECK(pjw_tasks_find(name, NULL, LIMIT_MS) != NULL);
    }
    CHECK(pjw_tasks_barrier(LIMIT_MS) == 0);
}

/* Publishes names until there is no room for one more. */
static void use_all_names(void) {
    char name[PJW_TASKS_NAME_MAX];
    int count, error = 0;
    for (count = 0; error == 0 && count <= PJW_TASKS_NAMES_; count++) {
        name_of(name, "one of many", count);
        if (pjw_tasks_publish(name, &count, sizeof count) != 0) error = errno;
    }
    CHECK(error == ENOSPC);
}

/* The last rank ends, and the others learn it from the barrier instead of waiting for ever. */
static void outlive(int rank, int size) {
    CHECK(pjw_tasks_barrier(LIMIT_MS) == 0);
    if (rank == size - 1) {
        if (pjw_tasks_shared()) use_all_names();
        exit(0);
    }
    CHECK(pjw_tasks_barrier(PJW_TASKS_FOREVER) == -1 && errno == EOWNERDEAD);
}

int main(int argc, char **argv) {
    int rank, size, number;
    CHECK(pjw_tasks_rank() == -1 && pjw_tasks_size() == 0 && !pjw_tasks_shared());
    CHECK(pjw_tasks_barrier(0) == -1 && errno == EINVAL);
    CHECK(pjw_tasks_find("x", NULL, 0) == NULL && errno == EINVAL);
    if (argc > 1 && strcmp(argv[1], "child") == 0) {
        /* It has the variables of its parent. It is no rank, so it does not wait for others. */
        int expected = getenv("PJW_TASKS") != NULL ? EBUSY : ENOENT;
        if (expected == ENOENT) unsetenv("PJW_GROUP");
        return pjw_tasks_init() == -1 && errno == expected && !pjw_tasks_shared() ? 0 : 1;
    }
    if (argc > 1 && strcmp(argv[1], "again") == 0) return pjw_tasks_init() == -1 && errno == EBUSY ? 0 : 1;
    if (argc > 1 && strcmp(argv[1], "first") == 0) {
        CHECK(pjw_tasks_init() == 0);
        check_child(argv[0], "again");
        CHECK(pjw_tasks_own_.space->attached == 1 && pjw_tasks_own_.pids[0] == (uint32_t)getpid());
        return 0;
    }
    CHECK(pjw_tasks_init() == 0 && pjw_tasks_init() == 0);
    rank = pjw_tasks_rank();
    size = pjw_tasks_size();
    CHECK(argc > 1 && pjw_tasks_shared() == (strcmp(argv[1], "shared") == 0));
    exchange(rank, size);
    publish_variable(rank, size);
    keep_heaps(rank);
    make_mistakes(rank);
    compete(rank, size);
    check_child(argv[0], "child");
    for (number = 0; number < 1000; number++) CHECK(pjw_tasks_barrier(LIMIT_MS) == 0);
    miss_a_barrier(rank, size);
    outlive(rank, size);
    return 0;
}
