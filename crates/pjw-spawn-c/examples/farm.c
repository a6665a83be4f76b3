/* A farm of two workers, which compute the squares of 10 numbers. The master prints them in order.
 *
 * After an installation of pjw:
 *
 *     cc -O2 /usr/share/pjw/examples/farm.c -o farm -lpjw_spawn
 *     ./farm
 */
#include <inttypes.h>
#include <pjw_farm.h>
#include <stdio.h>
#include <string.h>

/* Runs in a worker. `data` is memory of the master, which all workers share. */
static int work(void *data, const pjw_farm_item_t *item, pjw_farm_bytes_t *result) {
    const uint64_t *numbers = data;
    uint64_t square = numbers[item->number] * numbers[item->number];
    return pjw_farm_append(result, &square, sizeof square);
}

int main(void) {
    uint64_t numbers[10];
    for (uint64_t n = 0; n < 10; n++) numbers[n] = n;

    pjw_farm_options_t options;
    memset(&options, 0, sizeof options);
    options.size = sizeof options;
    options.workers = 2;
    options.items = 10;
    options.flags = PJW_FARM_IN_ORDER;
    options.data = numbers;
    options.work = work;
    pjw_farm_t *farm = pjw_farm_start(&options);
    pjw_farm_result_t result;
    int more = farm ? 1 : -1;
    while (more == 1 && (more = pjw_farm_next(farm, &result, -1)) == 1) {
        uint64_t square = 0;
        if (result.outcome == PJW_FARM_DONE) memcpy(&square, result.bytes, sizeof square);
        printf("%" PRIu64 " %" PRIu64 "\n", result.number, square);
    }
    if (more < 0) fprintf(stderr, "farm: %s\n", pjw_farm_error());
    if (farm) pjw_farm_end(farm);
    return more < 0;
}
