/* pjw_farm: a farm of workers that are forked from the calling process and share its memory.
 *
 * Link with -lpjw_spawn. The manual page is pjw_farm(3). A farm is used by one thread only: the one that started it.
 */
#ifndef PJW_FARM_H
#define PJW_FARM_H

#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

#ifdef __cplusplus
extern "C" {
#endif

/* A farm that runs. */
typedef struct pjw_farm pjw_farm_t;

/* Bytes to which a function of the program appends: the result of an item, or an item that is read. */
typedef struct pjw_farm_bytes pjw_farm_bytes_t;

/* One item, as a worker gets it. */
typedef struct pjw_farm_item {
    uint64_t number;   /* from 0 */
    const void *bytes; /* what the reader read; size 0 without a reader */
    size_t size;
    unsigned int worker; /* the index of the worker, from 0 */
} pjw_farm_item_t;

/* What became of an item. */
enum pjw_farm_outcome {
    PJW_FARM_DONE = 0,   /* it was computed: `bytes` has the result */
    PJW_FARM_FAILED = 1, /* work() returned `code`, which is not 0 */
    PJW_FARM_KILLED = 2, /* each of `attempts` workers died, the last one by the signal `code` */
    PJW_FARM_EXITED = 3  /* each of `attempts` workers died, the last one exited with the status `code` */
};

/* The result of one item. */
typedef struct pjw_farm_result {
    uint64_t number;
    int outcome; /* enum pjw_farm_outcome */
    int code;
    unsigned int attempts;
    const void *bytes; /* valid until the next call for this farm; size 0 for the master if there is a writer */
    size_t size;
} pjw_farm_result_t;

/* How far a farm is. */
typedef struct pjw_farm_progress {
    uint64_t total;     /* UINT64_MAX as long as the reader has not reached the end */
    uint64_t delivered; /* results that the master got, or that are ready for it */
    uint64_t failed;    /* those that are not PJW_FARM_DONE */
    uint64_t replaced;  /* processes that died and were replaced */
    unsigned int workers; /* that run now */
} pjw_farm_progress_t;

enum pjw_farm_flags {
    PJW_FARM_IN_ORDER = 1,     /* results come in the order of their numbers */
    PJW_FARM_ONE_PU_EACH = 2,  /* each worker has one CPU of the caller's mask: the first of each core in turn */
    PJW_FARM_ALLOW_THREADS = 4 /* the caller may have threads. The functions must not wait for a lock of another thread */
};

/* How a farm works. Set all bytes to 0 and `size` to sizeof first; 0 and NULL stand for the default of a field. */
typedef struct pjw_farm_options {
    size_t size;           /* sizeof(pjw_farm_options_t) */
    unsigned int workers;  /* 1 to 16384. Has no default */
    int flags;             /* enum pjw_farm_flags, combined by | */
    uint64_t items;        /* the number of items; 0 with read() */
    uint64_t chunk;        /* how many items a worker takes at once [1] */
    uint64_t window;       /* how far items may be ahead of the first undelivered one [4096, or 1048576 without order] */
    uint64_t ring_bytes;   /* shared memory for the results of each worker [262144] */
    uint64_t input_bytes;  /* shared memory for the items of the reader [16777216] */
    unsigned int attempts; /* deaths at an item after which it is given up [3] */
    const char *cpus;      /* lists of CPUs, as in "0;1;2-3": worker i has list i modulo their number */
    void *data;            /* is passed to each function */

    /* Computes an item in a worker, and appends the result. Returns 0, or a code of the program. Has no default. */
    int (*work)(void *data, const pjw_farm_item_t *item, pjw_farm_bytes_t *result);
    /* Reads the item `number` in the reader process, and appends its bytes. Returns 1, 0 if there is none, or a code
     * of the program below 0, which ends the farm. NULL: no reader. */
    int (*read)(void *data, uint64_t number, pjw_farm_bytes_t *item);
    /* Writes a result in the writer process. Returns 0, or a code of the program, which ends the farm. The result counts
     * as written then: what is in a buffer of the program is lost if the writer dies. NULL: no writer. */
    int (*write)(void *data, const pjw_farm_result_t *result);
    /* Are called by each worker before its first and after its last item. After that the worker calls _exit(2). */
    void (*worker_start)(void *data, unsigned int worker);
    void (*worker_end)(void *data, unsigned int worker);
    /* Forks the process: returns 0 in the new process, its id in the calling one, or -1 with errno. NULL: fork(2). */
    pid_t (*fork_process)(void *data);
    /* Is called by the writer after the last result: writes what write() holds back. Returns 0, or a code of the program,
     * which makes pjw_farm_next() fail after the last result. After that the writer calls _exit(2). NULL: nothing. */
    int (*writer_end)(void *data);
} pjw_farm_options_t;

/* Appends `size` bytes. Returns 0, or -1 with errno. */
int pjw_farm_append(pjw_farm_bytes_t *to, const void *bytes, size_t size);

/* Forks the workers now, and the reader and the writer. Returns NULL with errno if an option is wrong or a process can't
 * be forked; no process is left then. */
pjw_farm_t *pjw_farm_start(const pjw_farm_options_t *options);

/* Waits for the next result, for at most `timeout_ms` milliseconds, or without a limit if that is below 0. Returns 1 with
 * a result; 0 when all were delivered and all processes have ended; or -1 with errno: EAGAIN if no result came in time,
 * ENOMEM if no worker could be forked for 10 s, which the limits on processes cause too. With any errno but EAGAIN, the
 * farm can't go on and its processes were killed, or a process failed at its end after all were delivered. */
int pjw_farm_next(pjw_farm_t *farm, pjw_farm_result_t *result, int timeout_ms);

/* Writes how far the farm is. Returns 0, or -1 with errno. */
int pjw_farm_get_progress(const pjw_farm_t *farm, pjw_farm_progress_t *progress);

/* Writes the ids of at most `count` processes of workers that run now into `pids`. Returns how many run, or -1 with errno. */
int pjw_farm_workers(const pjw_farm_t *farm, pid_t *pids, unsigned int count);

/* Return the process id of the reader or the writer, 0 if the farm has none or it has ended, or -1 with errno. */
pid_t pjw_farm_reader(const pjw_farm_t *farm);
pid_t pjw_farm_writer(const pjw_farm_t *farm);

/* Kills the processes of the farm that still run, and frees it. NULL is allowed. */
void pjw_farm_end(pjw_farm_t *farm);

/* Returns the message about the last failure in the calling thread. */
const char *pjw_farm_error(void);

#ifdef __cplusplus
}
#endif
#endif
