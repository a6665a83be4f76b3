/* Heat on a plate: a stencil of five points. Each rank owns some rows of the plate, and reads the row above and the row below
 * its own where they are: in the memory of its neighbours. No row is copied or sent.
 *
 *   cc -O2 -static-pie -o stencil stencil.c
 *   pjwctl spawn -n 4 --share memory -- ./stencil 2048 200     four processes in one address space
 *   pjwctl spawn -n 4 -- ./stencil 2048 200                    four address spaces, and memory files between them
 *
 * Both print the same sum.
 */
#include <pjw_tasks.h>

#include <stdio.h>
#include <stdlib.h>
#include <time.h>

/* How long a rank waits for another one. */
#define LIMIT_MS 60000

/* The plate is a square: it has as many rows as columns. */
static int side, steps;

/* The part of a rank, as all others see it: two copies of its rows, of the last step and of the next one. */
struct part {
    int first_row, rows;
    double cells[];
};

static void fail(const char *what) {
    fprintf(stderr, "stencil: rank %d: %s: %s\n", pjw_tasks_rank(), what, strerror(errno));
    exit(1);
}

/* The first row of a rank. */
static int first_row(int rank) {
    return (int)((long)side * rank / pjw_tasks_size());
}

static double *row(struct part *part, int copy, int number) {
    return part->cells + ((size_t)copy * (size_t)part->rows + (size_t)(number - part->first_row)) * (size_t)side;
}

/* Memory of this rank, which the others find by the rank. */
static struct part *make_part(int rank) {
    int first = first_row(rank), rows = first_row(rank + 1) - first;
    size_t bytes = sizeof(struct part) + 2 * (size_t)rows * (size_t)side * sizeof(double);
    struct part *part;
    char name[32];
    snprintf(name, sizeof name, "stencil.%d", rank);
    part = pjw_tasks_alloc(name, bytes);
    if (part == NULL) fail("no memory");
    part->first_row = first;
    part->rows = rows;
    return part;
}

static struct part *part_of(int rank) {
    struct part *part;
    char name[32];
    snprintf(name, sizeof name, "stencil.%d", rank);
    part = pjw_tasks_find(name, NULL, LIMIT_MS);
    if (part == NULL) fail(name);
    return part;
}

static void meet(void) {
    if (pjw_tasks_barrier(LIMIT_MS) != 0) fail("barrier");
}

/* One step of the rows of this rank. The border of the plate keeps its values. */
static void step(struct part *above, struct part *own, struct part *below, int from, int to) {
    int last = own->first_row + own->rows - 1, number, column;
    for (number = own->first_row; number <= last; number++) {
        const double *up, *here = row(own, from, number), *down;
        double *next = row(own, to, number);
        if (number == 0 || number == side - 1) continue;
        up = number == own->first_row ? row(above, from, number - 1) : row(own, from, number - 1);
        down = number == last ? row(below, from, number + 1) : row(own, from, number + 1);
        for (column = 1; column < side - 1; column++) {
            next[column] = 0.25 * (up[column] + down[column] + here[column - 1] + here[column + 1]);
        }
    }
}

static double seconds(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec + 1e-9 * (double)time.tv_nsec;
}

int main(int argc, char **argv) {
    struct part *own, *above, *below;
    double begin, sum = 0;
    int rank, size, copy, done, number, column, other;
    side = argc > 1 ? atoi(argv[1]) : 1024;
    steps = argc > 2 ? atoi(argv[2]) : 100;
    if (pjw_tasks_init() != 0) fail("start it by pjwctl spawn");
    rank = pjw_tasks_rank();
    size = pjw_tasks_size();
    if (side < size || side < 3 || steps < 0) {
        fprintf(stderr, "usage: stencil [ROWS [STEPS]], with at least 3 rows, and one for each rank\n");
        return 2;
    }
    own = make_part(rank);
    /* The left border is hot in both copies. */
    for (copy = 0; copy < 2; copy++) {
        for (number = own->first_row; number < own->first_row + own->rows; number++) row(own, copy, number)[0] = 100;
    }
    meet();
    above = rank > 0 ? part_of(rank - 1) : NULL;
    below = rank + 1 < size ? part_of(rank + 1) : NULL;
    begin = seconds();
    for (done = 0; done < steps; done++) {
        step(above, own, below, done % 2, (done + 1) % 2);
        meet();
    }
    if (rank == 0) {
        double time = seconds() - begin;
        for (other = 0; other < size; other++) {
            struct part *part = part_of(other);
            for (number = part->first_row; number < part->first_row + part->rows; number++) {
                for (column = 0; column < side; column++) sum += row(part, steps % 2, number)[column];
            }
        }
        printf("sum %.6f\n", sum);
        fprintf(stderr, "%d ranks, %s: %.1f us for a step\n", size,
                pjw_tasks_shared() ? "one address space" : "memory files", steps > 0 ? 1e6 * time / steps : 0.0);
    }
    /* The memory of a rank is gone when the rank ends. */
    meet();
    return 0;
}
