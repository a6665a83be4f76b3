/* pjw_job: which cores the job of a program has, and how the program asks for fewer or more.
 *
 * Link with -lpjw_job. The manual page is pjw_job(3). The threads of a program can share one pjw_job_t. Without a daemon the
 * cores are those of the affinity mask of the calling thread.
 */
#ifndef PJW_JOB_H
#define PJW_JOB_H

#include <sched.h> /* cpu_set_t; CPU_COUNT_S(3) and its relatives need _GNU_SOURCE before the first #include */
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* The job of a program. */
typedef struct pjw_job pjw_job_t;

/* The cores of a job at one time. */
typedef struct pjw_cores {
    /* A number that differs after each change. 0 without a core map. */
    uint64_t epoch;
    /* The time at which the leaving CPUs are taken, in ns of CLOCK_MONOTONIC. If they are taken at different times, the
     * earliest of these times. 0 if none is leaving. */
    uint64_t leaving_at_ns;
    /* Whether pjwd publishes the cores. If not, the numbers are those of the affinity mask of the calling thread. */
    uint32_t has_core_map;
    /* The number of CPUs on which the job may run. */
    uint32_t cpus;
    /* The number of physical cores of these CPUs. */
    uint32_t cores;
    /* The number of CPUs among them that the job does not own: free ones, those that other jobs own and leave idle, and
     * housekeeping CPUs. */
    uint32_t borrowed;
    /* The number of CPUs among them that are about to be taken. */
    uint32_t leaving;
    /* The number of threads with which a program uses its cores to the full: the CPUs that stay, but at least 1. */
    uint32_t threads;
} pjw_cores_t;

/* The sets of CPUs of a job. */
enum pjw_cpus {
    /* The CPUs on which the job may run: its own and the borrowed ones. */
    PJW_CPUS_ALL = 0,
    /* The CPUs that the job owns. */
    PJW_CPUS_OWN = 1,
    /* The CPUs on which the job may run and that it does not own. */
    PJW_CPUS_BORROWED = 2,
    /* The CPUs that are about to be taken. */
    PJW_CPUS_LEAVING = 3,
    /* The own CPUs that another job uses now. */
    PJW_CPUS_LENT = 4
};

/* Opens a job. `directory` has the files of the job, or is NULL for the job of this process, which the variables
 * PJW_JOB_DIR, PJW_JOB and SLURM_JOB_ID name. There need not be one. Returns NULL with errno if memory is short. */
pjw_job_t *pjw_job_open(const char *directory);

/* Frees a job. NULL is allowed. */
void pjw_job_close(pjw_job_t *job);

/* Writes the cores that the job has now into *cores. Makes no system call if there is a core map. If pjwd does not complete
 * a write of the core map within 100 ms, the cores are those that this pjw_job_t read last. Returns 0, or -1 with errno. */
int pjw_job_cores(pjw_job_t *job, pjw_cores_t *cores);

/* Writes one of the sets of CPUs that the job has now into `set`, which has `size` bytes. Returns the number of CPUs in the
 * set, or -1 with errno: ERANGE if the set is too small for them. */
int pjw_job_cpus(pjw_job_t *job, enum pjw_cpus which, cpu_set_t *set, size_t size);

/* Whether the job has this CPU now: 1 or 0, or -1 with errno. Reads two words of memory if there is a core map. */
int pjw_job_has_cpu(pjw_job_t *job, int cpu);

/* Waits until the epoch differs from `epoch`, and writes the new cores into *cores. `timeout_ms` is the longest time in
 * milliseconds, or -1. Returns 1 after a change, 0 when the time has passed, or -1 with errno. No change is missed between
 * two calls that pass the epoch of the former. */
int pjw_job_wait(pjw_job_t *job, uint64_t epoch, int timeout_ms, pjw_cores_t *cores);

/* Asks for a number of cores: fewer than the job has, or more. 0 says that it needs none at present. -1 takes the number
 * back. Returns 0, or -1 with errno: ENOENT if the program is in no job, EACCES if its user does not own the job. */
int pjw_job_want(pjw_job_t *job, int cores);

/* Returns what failed in the last call of the calling thread that returned -1 or NULL. The text is valid until the thread's
 * next failure. */
const char *pjw_job_error(void);

#ifdef __cplusplus
}
#endif

#endif
