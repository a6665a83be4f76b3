/* Calls each function of pjw_job.h. The argument is the directory of a job with the CPUs 0-1 of its own, CPU 2 borrowed and
 * leaving, and the epoch 7. Another thread of the test changes it to epoch 8 with CPU 0 only once the file `want` says 1. */
#define _GNU_SOURCE
#include <errno.h>
#include <pjw_job.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define EXPECT(condition)                                                                               \
    do {                                                                                                \
        if (!(condition)) {                                                                             \
            fprintf(stderr, "%s:%d: %s: %s (%s)\n", __FILE__, __LINE__, #condition, pjw_job_error(),    \
                    strerror(errno));                                                                   \
            return 1;                                                                                   \
        }                                                                                               \
    } while (0)

static int without_a_map(void) {
    pjw_job_t *job = pjw_job_open("/nonexistent");
    pjw_cores_t cores;
    cpu_set_t mask, set;
    EXPECT(job && pjw_job_cores(job, &cores) == 0);
    EXPECT(sched_getaffinity(0, sizeof mask, &mask) == 0);
    EXPECT(!cores.has_core_map && cores.epoch == 0 && cores.cpus == (unsigned)CPU_COUNT(&mask));
    EXPECT(cores.threads == cores.cpus && cores.cores >= 1 && cores.borrowed == 0);
    EXPECT(pjw_job_cpus(job, PJW_CPUS_ALL, &set, sizeof set) == CPU_COUNT(&mask) && CPU_EQUAL(&mask, &set));
    EXPECT(pjw_job_wait(job, 0, 1, &cores) == 0);
    EXPECT(pjw_job_want(job, 1) == -1 && errno == ENOENT && strstr(pjw_job_error(), "PJW_JOB_DIR"));
    pjw_job_close(job);
    return 0;
}

static int with_a_map(const char *directory) {
    pjw_job_t *job = pjw_job_open(directory);
    pjw_cores_t cores;
    cpu_set_t set;
    EXPECT(job && pjw_job_cores(job, &cores) == 0);
    EXPECT(cores.has_core_map && cores.epoch == 7 && cores.cpus == 3 && cores.cores == 3);
    EXPECT(cores.borrowed == 1 && cores.leaving == 1 && cores.threads == 2 && cores.leaving_at_ns == 99);
    EXPECT(pjw_job_cpus(job, PJW_CPUS_OWN, &set, sizeof set) == 2 && CPU_ISSET(0, &set) && !CPU_ISSET(2, &set));
    EXPECT(pjw_job_cpus(job, PJW_CPUS_BORROWED, &set, sizeof set) == 1 && CPU_ISSET(2, &set));
    EXPECT(pjw_job_cpus(job, PJW_CPUS_LEAVING, &set, sizeof set) == 1);
    EXPECT(pjw_job_cpus(job, PJW_CPUS_LENT, &set, sizeof set) == 0);
    EXPECT(pjw_job_cpus(job, PJW_CPUS_ALL, &set, 0) == -1 && errno == ERANGE);
    EXPECT(pjw_job_has_cpu(job, 2) == 1 && pjw_job_has_cpu(job, 3) == 0);
    EXPECT(pjw_job_wait(job, 7, 1, &cores) == 0);
    EXPECT(pjw_job_want(job, -1) == 0 && pjw_job_want(job, 1) == 0);
    EXPECT(pjw_job_wait(job, 7, -1, &cores) == 1);
    EXPECT(cores.epoch == 8 && cores.cpus == 1 && cores.leaving == 0 && pjw_job_has_cpu(job, 1) == 0);
    pjw_job_close(job);
    return 0;
}

static int wrong_arguments(void) {
    pjw_job_t *job = pjw_job_open("/nonexistent");
    pjw_cores_t cores;
    cpu_set_t set;
    EXPECT(pjw_job_cores(NULL, &cores) == -1 && errno == EINVAL);
    EXPECT(pjw_job_cores(job, NULL) == -1 && errno == EINVAL);
    EXPECT(pjw_job_cpus(job, (enum pjw_cpus)9, &set, sizeof set) == -1 && errno == EINVAL);
    EXPECT(pjw_job_cpus(job, PJW_CPUS_ALL, NULL, sizeof set) == -1 && errno == EINVAL);
    EXPECT(pjw_job_has_cpu(job, -1) == -1 && errno == EINVAL);
    EXPECT(pjw_job_wait(job, 0, 1, NULL) == -1 && errno == EINVAL);
    EXPECT(pjw_job_want(job, -2) == -1 && errno == EINVAL && strstr(pjw_job_error(), "-2"));
    EXPECT(pjw_job_want(NULL, 1) == -1 && errno == EINVAL);
    pjw_job_close(job);
    pjw_job_close(NULL);
    return 0;
}

int main(int argc, char **argv) {
    if (argc > 1 && with_a_map(argv[1])) return 1;
    return without_a_map() || wrong_arguments();
}
