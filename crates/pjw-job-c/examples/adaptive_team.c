/* An OpenMP program that uses exactly the cores that its job has.
 *
 * The program computes how heat spreads along a rod, in phases. All threads of the team do a part of a phase and then wait for
 * each other at a barrier. So a team with more threads than cores is slow: each barrier waits for threads that wait for a core.
 * This program sets the size of the team before each parallel region, from the core map of its job. Copy what is marked.
 *
 *     cc -O2 -fopenmp /usr/share/pjw/examples/adaptive_team.c -o adaptive_team -lpjw_job
 *     pjwctl run --job team --cores 4 -- ./adaptive_team
 *     pjwctl assign team --cores 2
 *
 * These lines need an installation of pjw; docs/coremap.md has those for a source tree.
 *
 * Each 100 ms the program prints the time in seconds, the size of the team, and the number of phases since the start. With the
 * argument `fixed`, the team keeps its first size. With a number of phases as the last argument, the program ends after as many
 * phases and prints the heat at the middle of the rod, which does not depend on the teams.
 */
#include <omp.h>
#include <pjw_job.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { CELLS = 100 * 1000 + 1, PHASES_PER_REGION = 10 };

static double heat[2][CELLS];

/* Computes the heat of each cell after a short time: the mean of the cell and of its two neighbours. The threads of the team
 * divide the cells among them. They wait for each other at the end. */
static void do_phase(const double *before, double *after) {
#pragma omp for schedule(static)
    for (int cell = 1; cell < CELLS - 1; cell++) {
        after[cell] = (before[cell - 1] + before[cell] + before[cell + 1]) / 3;
    }
}

static void print_progress(double seconds, int threads, long phases) {
    printf("%.3f %d %ld\n", seconds, threads, phases);
    fflush(stdout);
}

int main(int argc, char **argv) {
    int is_fixed = argc > 1 && strcmp(argv[1], "fixed") == 0;
    long last_phase = argc > 1 + is_fixed ? atol(argv[1 + is_fixed]) : -1;
    heat[0][CELLS / 2] = heat[1][CELLS / 2] = 1e6;

    /* Copy this: open the job once, ... */
    pjw_job_t *job = pjw_job_open(NULL);
    pjw_cores_t cores;
    if (!job || pjw_job_cores(job, &cores) != 0) {
        fprintf(stderr, "can't read the cores of the job: %s\n", pjw_job_error());
        return 1;
    }

    double begin = omp_get_wtime(), next_report = 0;
    for (long phase = 0; phase != last_phase;) {
        /* ... read its cores before each parallel region, which makes no system call, ... */
        if (!is_fixed) pjw_job_cores(job, &cores);
        long end = phase + PHASES_PER_REGION;
        if (last_phase >= 0 && end > last_phase) end = last_phase;

        /* ... and make the team as large as they allow: leaving CPUs do not count. */
#pragma omp parallel num_threads(cores.threads)
        for (long at = phase; at < end; at++) do_phase(heat[at % 2], heat[(at + 1) % 2]);

        phase = end;
        double seconds = omp_get_wtime() - begin;
        if (seconds >= next_report) {
            print_progress(seconds, (int)cores.threads, phase);
            next_report = seconds + 0.1;
        }
    }
    printf("the middle has %.6f\n", heat[last_phase % 2][CELLS / 2]);
    pjw_job_close(job);
    return 0;
}
