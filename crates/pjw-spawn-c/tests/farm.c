/* Checks each function of pjw_farm.h. Prints what is wrong and exits with 1. */
#include <errno.h>
#include <fcntl.h>
#include <pjw_farm.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define CHECK(condition)                                                                                               \
    do {                                                                                                               \
        if (!(condition)) {                                                                                            \
            fprintf(stderr, "line %d: %s; errno %d, %s\n", __LINE__, #condition, errno, pjw_farm_error());             \
            exit(1);                                                                                                   \
        }                                                                                                              \
    } while (0)

enum { ITEMS = 400 };

/* What the workers share with the master. */
struct data {
    int common[ITEMS];
    char directory[64];
    int output;
    struct io_pids *io_pids;
};

/* The process ids that the reader and the writer tell the master, in memory that they share with it. */
struct io_pids {
    pid_t reader;
    pid_t writer;
};

static pjw_farm_options_t options_of(struct data *data, int (*work)(void *, const pjw_farm_item_t *, pjw_farm_bytes_t *)) {
    pjw_farm_options_t options;
    memset(&options, 0, sizeof options);
    options.size = sizeof options;
    options.workers = 2;
    options.items = ITEMS;
    options.data = data;
    options.work = work;
    return options;
}

static int square(void *data, const pjw_farm_item_t *item, pjw_farm_bytes_t *result) {
    int value = ((struct data *)data)->common[item->number];
    value *= value;
    return pjw_farm_append(result, &value, sizeof value);
}

static void results_come_in_order(struct data *data) {
    pjw_farm_options_t options = options_of(data, square);
    options.flags = PJW_FARM_IN_ORDER | PJW_FARM_ONE_PU_EACH;
    options.chunk = 4;
    pjw_farm_t *farm = pjw_farm_start(&options);
    CHECK(farm);
    pid_t pids[2];
    CHECK(pjw_farm_workers(farm, pids, 2) == 2 && pids[0] > 0 && pids[1] > 0);
    CHECK(pjw_farm_reader(farm) == 0 && pjw_farm_writer(farm) == 0);
    for (int at = 0; at < ITEMS; at++) {
        pjw_farm_result_t result;
        CHECK(pjw_farm_next(farm, &result, -1) == 1);
        CHECK(result.number == (uint64_t)at && result.outcome == PJW_FARM_DONE && result.size == sizeof(int));
        int value;
        memcpy(&value, result.bytes, sizeof value);
        CHECK(value == data->common[at] * data->common[at]);
    }
    pjw_farm_result_t result;
    CHECK(pjw_farm_next(farm, &result, -1) == 0);
    pjw_farm_progress_t progress;
    CHECK(pjw_farm_get_progress(farm, &progress) == 0);
    CHECK(progress.total == ITEMS && progress.delivered == ITEMS && progress.failed == 0 && progress.workers == 0);
    pjw_farm_end(farm);
}

/* Item 3 fails, item 5 kills its worker, item 7 exits; the worker of item 9 dies once. */
static int wrong(void *data, const pjw_farm_item_t *item, pjw_farm_bytes_t *result) {
    char path[128];
    snprintf(path, sizeof path, "%s/once", ((struct data *)data)->directory);
    switch (item->number) {
    case 3:
        pjw_farm_append(result, "why", 3);
        return -7;
    case 5:
        raise(SIGKILL);
        break;
    case 7:
        _exit(4);
    case 9:
        if (open(path, O_CREAT | O_EXCL | O_WRONLY, 0600) >= 0)
            abort();
        break;
    }
    return 0;
}

static void each_outcome_is_reported(struct data *data) {
    pjw_farm_options_t options = options_of(data, wrong);
    options.items = 12;
    options.attempts = 2;
    pjw_farm_t *farm = pjw_farm_start(&options);
    CHECK(farm);
    pjw_farm_result_t result;
    int seen = 0, next;
    while ((next = pjw_farm_next(farm, &result, -1)) == 1) {
        CHECK(!(seen & 1 << result.number));
        seen |= 1 << result.number;
        switch (result.number) {
        case 3:
            CHECK(result.outcome == PJW_FARM_FAILED && result.code == -7);
            CHECK(result.size == 3 && !memcmp(result.bytes, "why", 3));
            break;
        case 5:
            CHECK(result.outcome == PJW_FARM_KILLED && result.code == SIGKILL && result.attempts == 2);
            break;
        case 7:
            CHECK(result.outcome == PJW_FARM_EXITED && result.code == 4 && result.attempts == 2);
            break;
        default:
            CHECK(result.outcome == PJW_FARM_DONE);
        }
    }
    CHECK(next == 0 && seen == (1 << 12) - 1);
    pjw_farm_progress_t progress;
    CHECK(pjw_farm_get_progress(farm, &progress) == 0 && progress.failed == 3 && progress.replaced >= 3);
    pjw_farm_end(farm);
}

static int read_number(void *data, uint64_t number, pjw_farm_bytes_t *item) {
    ((struct data *)data)->io_pids->reader = getpid();
    if (number == ITEMS)
        return 0;
    CHECK(pjw_farm_append(item, &number, sizeof number) == 0);
    return 1;
}

static int add_one(void *data, const pjw_farm_item_t *item, pjw_farm_bytes_t *result) {
    uint64_t number;
    (void)data;
    if (item->size != sizeof number)
        return 1;
    memcpy(&number, item->bytes, sizeof number);
    number++;
    return pjw_farm_append(result, &number, sizeof number);
}

static int write_number(void *data, const pjw_farm_result_t *result) {
    off_t at = (off_t)(result->number * sizeof(uint64_t));
    ((struct data *)data)->io_pids->writer = getpid();
    return pwrite(((struct data *)data)->output, result->bytes, result->size, at) == (ssize_t)result->size ? 0 : errno;
}

static void forks(void *data, unsigned int worker) {
    (void)data;
    (void)worker;
}

static pid_t fork_here(void *data) {
    (void)data;
    return fork();
}

static int end_of_writer(void *data) {
    char path[128];
    snprintf(path, sizeof path, "%s/ended", ((struct data *)data)->directory);
    return open(path, O_CREAT | O_EXCL | O_WRONLY, 0600) >= 0 ? 0 : errno;
}

static void a_reader_and_a_writer_do_input_and_output(struct data *data) {
    char path[128];
    snprintf(path, sizeof path, "%s/output", data->directory);
    data->output = open(path, O_CREAT | O_RDWR, 0600);
    CHECK(data->output >= 0);
    pjw_farm_options_t options = options_of(data, add_one);
    options.items = 0;
    options.read = read_number;
    options.write = write_number;
    options.worker_start = options.worker_end = forks;
    options.fork_process = fork_here;
    options.writer_end = end_of_writer;
    options.ring_bytes = options.input_bytes = 4096;
    pjw_farm_t *farm = pjw_farm_start(&options);
    CHECK(farm);
    pid_t reader = pjw_farm_reader(farm), writer = pjw_farm_writer(farm);
    CHECK(reader > 0 && writer > 0 && reader != writer);
    pjw_farm_result_t result;
    int count = 0, next;
    while ((next = pjw_farm_next(farm, &result, 60000)) == 1) {
        CHECK(result.outcome == PJW_FARM_DONE && result.size == 0);
        count++;
    }
    CHECK(next == 0 && count == ITEMS);
    CHECK(data->io_pids->reader == reader && data->io_pids->writer == writer);
    CHECK(pjw_farm_reader(farm) == 0 && pjw_farm_writer(farm) == 0);
    pjw_farm_end(farm);
    for (uint64_t at = 0; at < ITEMS; at++) {
        uint64_t number;
        CHECK(pread(data->output, &number, sizeof number, (off_t)(at * sizeof number)) == sizeof number);
        CHECK(number == at + 1);
    }
    snprintf(path, sizeof path, "%s/ended", data->directory);
    CHECK(access(path, F_OK) == 0);
}

static void a_writer_that_fails_at_its_end_is_reported(struct data *data) {
    pjw_farm_options_t options = options_of(data, square);
    options.items = 3;
    options.write = write_number;
    options.writer_end = end_of_writer; /* the file is there already */
    pjw_farm_t *farm = pjw_farm_start(&options);
    CHECK(farm);
    pjw_farm_result_t result;
    for (int at = 0; at < 3; at++)
        CHECK(pjw_farm_next(farm, &result, -1) == 1);
    CHECK(pjw_farm_next(farm, &result, -1) == -1 && errno == ECHILD);
    CHECK(strstr(pjw_farm_error(), "the writer ended with exit status"));
    pjw_farm_end(farm);
}

static void remove_files(const struct data *data) {
    static const char *names[] = {"once", "output", "ended"};
    for (size_t at = 0; at < sizeof names / sizeof *names; at++) {
        char path[128];
        snprintf(path, sizeof path, "%s/%s", data->directory, names[at]);
        unlink(path);
    }
    CHECK(rmdir(data->directory) == 0);
}

static int never(void *data, const pjw_farm_item_t *item, pjw_farm_bytes_t *result) {
    (void)data, (void)item, (void)result;
    for (;;)
        pause();
    return 0;
}

static void refused(pjw_farm_options_t options, int error, const char *text) {
    errno = 0;
    CHECK(!pjw_farm_start(&options));
    CHECK(errno == error);
    CHECK(strstr(pjw_farm_error(), text));
}

static void *wait_for_end_of_file(void *descriptor) {
    char byte;
    while (read(*(int *)descriptor, &byte, 1) == -1 && errno == EINTR)
        ;
    return NULL;
}

static void threads_are_refused_unless_they_are_allowed(struct data *data) {
    int ends[2];
    pthread_t thread;
    CHECK(pipe(ends) == 0);
    CHECK(pthread_create(&thread, NULL, wait_for_end_of_file, &ends[0]) == 0);
    pjw_farm_options_t options = options_of(data, square);
    refused(options, EBUSY, "2 threads");
    options.flags = PJW_FARM_ALLOW_THREADS;
    pjw_farm_t *farm = pjw_farm_start(&options);
    CHECK(farm);
    pjw_farm_result_t result;
    int count = 0, next;
    while ((next = pjw_farm_next(farm, &result, -1)) == 1) {
        CHECK(result.outcome == PJW_FARM_DONE);
        count++;
    }
    CHECK(next == 0 && count == ITEMS);
    pjw_farm_end(farm);
    close(ends[1]);
    CHECK(pthread_join(thread, NULL) == 0);
    close(ends[0]);
}

static void wrong_calls_are_refused(struct data *data) {
    pjw_farm_options_t good = options_of(data, never), bad;
    pjw_farm_result_t result;
    CHECK(!pjw_farm_start(NULL) && errno == EINVAL);
    refused((bad = good, bad.size = 8, bad), EINVAL, "sizeof(pjw_farm_options_t)");
    refused((bad = good, bad.work = NULL, bad), EINVAL, "work is NULL");
    refused((bad = good, bad.workers = 0, bad), EINVAL, "workers is 0");
    refused((bad = good, bad.flags = 64, bad), EINVAL, "unknown bit");
    refused((bad = good, bad.chunk = 5000, bad), EINVAL, "chunk is 5000");
    refused((bad = good, bad.ring_bytes = 1, bad), EINVAL, "ring_bytes is 1");
    refused((bad = good, bad.cpus = "0;x", bad), EINVAL, "cpus");
    refused((bad = good, bad.cpus = "8191", bad), EINVAL, "may run");
    refused((bad = good, bad.cpus = "0", bad.flags = PJW_FARM_ONE_PU_EACH, bad), EINVAL, "exclude");
    refused((bad = good, bad.read = read_number, bad), EINVAL, "items is not 0");
    CHECK(pjw_farm_next(NULL, &result, 0) == -1 && errno == EINVAL);
    CHECK(pjw_farm_get_progress(NULL, NULL) == -1 && errno == EINVAL);
    CHECK(pjw_farm_workers(NULL, NULL, 0) == -1 && errno == EINVAL);
    CHECK(pjw_farm_reader(NULL) == -1 && errno == EINVAL);
    CHECK(pjw_farm_writer(NULL) == -1 && errno == EINVAL);
    CHECK(pjw_farm_append(NULL, "a", 1) == -1 && errno == EINVAL);
    pjw_farm_end(NULL);
    pjw_farm_t *farm = pjw_farm_start(&good);
    CHECK(farm);
    CHECK(pjw_farm_next(farm, NULL, 0) == -1 && errno == EINVAL);
    CHECK(pjw_farm_next(farm, &result, 1) == -1 && errno == EAGAIN);
    pid_t pid;
    CHECK(pjw_farm_workers(farm, &pid, 1) == 2);
    pjw_farm_end(farm);
    CHECK(kill(pid, 0) == -1 && errno == ESRCH);
}

int main(void) {
    static struct data data;
    for (int at = 0; at < ITEMS; at++)
        data.common[at] = at - 100;
    data.io_pids = mmap(NULL, sizeof *data.io_pids, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    CHECK(data.io_pids != MAP_FAILED);
    strcpy(data.directory, "/tmp/pjw-farm-XXXXXX");
    CHECK(mkdtemp(data.directory));
    results_come_in_order(&data);
    each_outcome_is_reported(&data);
    a_reader_and_a_writer_do_input_and_output(&data);
    a_writer_that_fails_at_its_end_is_reported(&data);
    threads_are_refused_unless_they_are_allowed(&data);
    wrong_calls_are_refused(&data);
    remove_files(&data);
    return 0;
}
