/* Ranks that share memory in three ways: as threads of one process, as processes, or as tasks in one address space. Each part is
 * measured by the same code. The bench tasks starts it: ranks PART WAY COUNT ARGUMENT [PATH], where WAY is threads or ranks.
 * Rank 0 prints the result. */
#define _GNU_SOURCE
#include <pjw_tasks.h>

#include <linux/perf_event.h>
#include <pthread.h>
#include <sched.h>
#include <stdio.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/un.h>

#define MOST 64
#define SWITCHES 1000
#define LIMIT_MS 120000

struct board {
    double values[MOST];
    double others[MOST];
    double begins[MOST];
    volatile unsigned long turns[MOST][8];
    char halos[MOST][2][1 << 20];
};

static int count, has_threads;
static long argument;
static const char *path;
static pthread_barrier_t thread_barrier;

static void fail(const char *what) {
    perror(what);
    exit(1);
}

static void meet(void) {
    if (has_threads) {
        pthread_barrier_wait(&thread_barrier);
    } else if (pjw_tasks_barrier(LIMIT_MS) != 0) {
        fail("barrier");
    }
}

/* Memory of all ranks, without huge pages. */
static void *share(const char *name, int rank, size_t bytes, void **of_threads) {
    void *at;
    if (has_threads) {
        if (rank == 0) *of_threads = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        meet();
        at = *of_threads;
    } else {
        at = rank == 0 ? pjw_tasks_alloc(name, bytes) : pjw_tasks_find(name, NULL, LIMIT_MS);
    }
    if (at == NULL || at == MAP_FAILED) fail(name);
    madvise(at, bytes, MADV_NOHUGEPAGE);
    return at;
}

static double now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec + 1e-9 * (double)time.tv_nsec;
}

/* Memory of one rank, from the beginning of a page. It is no thread-local variable: the C library would clear it at the start of each thread.
 * malloc() would give threads memory of other offsets in a page than tasks and processes, whose heaps begin elsewhere. A copy of memory
 * takes longer if it stores 16 bytes ahead of where it loads, modulo 4096: AMD Zen 4 takes these loads for loads of the stored bytes. */
static char *buffer(size_t bytes) {
    char *at = aligned_alloc(4096, bytes);
    if (at == NULL) fail("aligned_alloc");
    return at;
}

static double sum(const double *values) {
    double total = 0;
    int rank;
    for (rank = 0; rank < count; rank++) total += values[rank];
    return total;
}

static double highest(const double *values) {
    double most = values[0];
    int rank;
    for (rank = 1; rank < count; rank++) most = values[rank] > most ? values[rank] : most;
    return most;
}

static double lowest(const double *values) {
    double least = values[0];
    int rank;
    for (rank = 1; rank < count; rank++) least = values[rank] < least ? values[rank] : least;
    return least;
}

static int has_one_address_space(void) {
    return has_threads || pjw_tasks_shared();
}

/* The page tables in KiB of `argument` MiB that all ranks have read and written. */
static void pages(struct board *b, char *m, int rank) {
    size_t at, bytes = (size_t)argument << 20;
    char line[256];
    double kib = 0;
    FILE *status;
    for (at = 0; at < bytes; at += 4096) __atomic_add_fetch(&m[at], 1, __ATOMIC_RELAXED);
    meet();
    status = fopen("/proc/self/status", "r");
    if (status == NULL) fail("status");
    while (fgets(line, sizeof line, status) != NULL) sscanf(line, "VmPTE: %lf", &kib);
    fclose(status);
    b->values[rank] = kib;
    meet();
    if (rank == 0) printf("%f\n", has_one_address_space() ? b->values[0] : sum(b->values));
}

/* The number of the counter, or -errno. A plain user may count in user mode only, if kernel.perf_event_paranoid is 2. */
static int open_counter(void) {
    struct perf_event_attr what;
    int counter;
    memset(&what, 0, sizeof what);
    what.size = sizeof what;
    what.type = PERF_TYPE_HW_CACHE;
    what.config = PERF_COUNT_HW_CACHE_DTLB | PERF_COUNT_HW_CACHE_OP_READ << 8 | PERF_COUNT_HW_CACHE_RESULT_MISS << 16;
    counter = (int)syscall(SYS_perf_event_open, &what, 0, -1, -1, 0ul);
    if (counter < 0 && (errno == EACCES || errno == EPERM)) {
        what.exclude_kernel = 1;
        what.exclude_hv = 1;
        counter = (int)syscall(SYS_perf_event_open, &what, 0, -1, -1, 0ul);
    }
    return counter < 0 ? -errno : counter;
}

static double counted(int counter) {
    uint64_t value = 0;
    return counter >= 0 && read(counter, &value, sizeof value) == sizeof value ? (double)value : 0;
}

static double switches(void) {
    struct rusage usage;
    getrusage(RUSAGE_THREAD, &usage);
    return (double)(usage.ru_nvcsw + usage.ru_nivcsw);
}

/* The time runs from the begin of the rank that begins first: without switches, each rank copies all at once.
 * Between two switches each rank copies `argument` bytes: microseconds of a switch beside the copy, and misses of the TLB, or -errno
 * if there is no counter for them. */
static void switch_ranks(struct board *b, int rank) {
    char *from = buffer(1 << 18), *to = buffer(1 << 18);
    int yields, round, counter = open_counter();
    double before, misses, time[2], total[2] = {0, 0}, missed = 0;
    memset(from, rank, 1 << 18);
    for (yields = 0; yields < 2; yields++) {
        meet();
        b->begins[rank] = now();
        before = switches();
        misses = counted(counter);
        for (round = 0; round < SWITCHES; round++) {
            memcpy(to, from, (size_t)argument);
            __asm__ volatile("" : : "r"(to) : "memory");
            if (yields) sched_yield();
        }
        b->values[rank] = now();
        b->others[rank] = switches() - before;
        misses = counted(counter) - misses;
        meet();
        time[yields] = highest(b->values) - lowest(b->begins);
        total[yields] = sum(b->others);
        meet();
        b->values[rank] = misses;
        meet();
        if (yields) missed = sum(b->values);
        meet();
    }
    free(from);
    free(to);
    if (rank == 0) printf("%f %f\n", 1e6 * (time[1] - time[0]) / (total[1] - total[0]), counter < 0 ? counter : missed / total[1]);
}

/* Microseconds of one mmap of 64 KiB, its first use and its munmap, while all ranks do that. */
static void map(struct board *b, int rank) {
    double begin;
    long round;
    meet();
    begin = now();
    for (round = 0; round < argument; round++) {
        char *at = mmap(NULL, 1 << 16, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        size_t page;
        if (at == MAP_FAILED) fail("mmap");
        for (page = 0; page < 1 << 16; page += 4096) at[page] = 1;
        munmap(at, 1 << 16);
    }
    b->values[rank] = 1e6 * (now() - begin) / (double)argument;
    meet();
    if (rank == 0) printf("%f\n", sum(b->values) / count);
}

#define EXCHANGES 20000

static void transfer(int socket, char *bytes, int is_sent) {
    size_t done = 0;
    while (done < (size_t)argument) {
        ssize_t part = is_sent ? send(socket, bytes + done, (size_t)argument - done, 0)
                               : recv(socket, bytes + done, (size_t)argument - done, 0);
        if (part <= 0) fail("socket");
        done += (size_t)part;
    }
}

static int connect_ranks(int rank) {
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    int own = socket(AF_UNIX, SOCK_STREAM, 0), other;
    strncpy(address.sun_path, path, sizeof address.sun_path - 1);
    if (rank == 0 && (bind(own, (struct sockaddr *)&address, sizeof address) != 0 || listen(own, 1) != 0)) fail(path);
    meet();
    if (rank == 0) {
        other = accept(own, NULL, NULL);
        close(own);
        own = other;
    } else if (connect(own, (struct sockaddr *)&address, sizeof address) != 0) {
        fail(path);
    }
    return own;
}

/* Microseconds of an exchange of `argument` bytes between two ranks: each writes its halo, and reads that of the other. */
static void exchange(struct board *b, int rank) {
    char *own = buffer(1 << 20), *received = buffer(1 << 20);
    int socket = path != NULL ? connect_ranks(rank) : -1, other = 1 - rank;
    unsigned long round;
    double begin;
    memset(b->halos[rank], 0, sizeof b->halos[rank]);
    meet();
    begin = now();
    for (round = 1; round <= EXCHANGES; round++) {
        memset(own, (int)round, (size_t)argument);
        if (socket >= 0) {
            transfer(socket, own, rank == 0);
            transfer(socket, rank == 0 ? received : own, rank != 0);
        } else {
            unsigned spins = 0;
            memcpy(b->halos[rank][round % 2], own, (size_t)argument);
            __atomic_store_n(&b->turns[rank][0], round, __ATOMIC_RELEASE);
            while (__atomic_load_n(&b->turns[other][0], __ATOMIC_ACQUIRE) < round) {
                if (++spins % 1000 == 0) sched_yield();
            }
            memcpy(received, b->halos[other][round % 2], (size_t)argument);
            if (received[argument - 1] != (char)round) fail("the halo of another step");
        }
    }
    b->values[rank] = 1e6 * (now() - begin) / EXCHANGES;
    meet();
    free(own);
    free(received);
    if (rank == 0) printf("%f\n", sum(b->values) / count);
}

static void act(const char *part, int rank) {
    static void *of_threads[2];
    struct board *b = share("board", rank, sizeof(struct board), &of_threads[0]);
    if (strcmp(part, "pages") == 0) {
        char *m = share("memory", rank, (size_t)argument << 20, &of_threads[1]);
        pages(b, m, rank);
    } else if (strcmp(part, "switch") == 0) {
        switch_ranks(b, rank);
    } else if (strcmp(part, "map") == 0) {
        map(b, rank);
    } else if (strcmp(part, "exchange") == 0) {
        exchange(b, rank);
    }
    meet();
}

static const char *part_of_threads;

static void *thread(void *rank) {
    if (strcmp(part_of_threads, "nothing") != 0) act(part_of_threads, (int)(intptr_t)rank);
    return NULL;
}

int main(int argc, char **argv) {
    pthread_t threads[MOST];
    int rank;
    if (argc > 1 && strcmp(argv[1], "nothing") == 0 && (argc < 3 || strcmp(argv[2], "threads") != 0)) return 0;
    if (argc < 5) return 2;
    count = atoi(argv[3]);
    argument = atol(argv[4]);
    path = argc > 5 ? argv[5] : NULL;
    has_threads = strcmp(argv[2], "threads") == 0;
    if (count < 1 || count > MOST) return 2;
    if (!has_threads) {
        if (pjw_tasks_init() != 0) fail("init");
        act(argv[1], pjw_tasks_rank());
        return 0;
    }
    part_of_threads = argv[1];
    pthread_barrier_init(&thread_barrier, NULL, (unsigned)count);
    for (rank = 0; rank < count; rank++) {
        if (pthread_create(&threads[rank], NULL, thread, (void *)(intptr_t)rank) != 0) fail("thread");
    }
    for (rank = 0; rank < count; rank++) pthread_join(threads[rank], NULL);
    return 0;
}
