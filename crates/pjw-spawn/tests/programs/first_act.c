/* A program without libc. Its first act is to read its own CPU mask; then its CPU and the time. It writes them to
 * standard output in one record, and ends. With an argument "wait" it waits for a signal before it ends.
 *
 * cc -O1 -nostdlib -static -ffreestanding -fno-stack-protector -o first_act first_act.c
 */
#include <stdint.h>

#define MASK_WORDS 128

#if defined(__x86_64__)
enum { GETAFFINITY = 204, GETCPU = 309, CLOCK_GETTIME = 228, GETPID = 39, WRITE = 1, PAUSE_SELECT = 270, EXIT = 231 };
static long call(long number, long a, long b, long c, long d, long e, long f) {
    long result;
    register long r10 __asm__("r10") = d;
    register long r8 __asm__("r8") = e;
    register long r9 __asm__("r9") = f;
    __asm__ volatile("syscall"
                     : "=a"(result)
                     : "a"(number), "D"(a), "S"(b), "d"(c), "r"(r10), "r"(r8), "r"(r9)
                     : "rcx", "r11", "memory");
    return result;
}
__asm__(".globl _start\n_start:\n mov %rsp, %rdi\n and $-16, %rsp\n call begin\n");
#elif defined(__aarch64__)
enum { GETAFFINITY = 123, GETCPU = 168, CLOCK_GETTIME = 113, GETPID = 172, WRITE = 64, PAUSE_SELECT = 72, EXIT = 94 };
static long call(long number, long a, long b, long c, long d, long e, long f) {
    register long x8 __asm__("x8") = number;
    register long x0 __asm__("x0") = a;
    register long x1 __asm__("x1") = b;
    register long x2 __asm__("x2") = c;
    register long x3 __asm__("x3") = d;
    register long x4 __asm__("x4") = e;
    register long x5 __asm__("x5") = f;
    __asm__ volatile("svc 0" : "+r"(x0) : "r"(x8), "r"(x1), "r"(x2), "r"(x3), "r"(x4), "r"(x5) : "memory");
    return x0;
}
__asm__(".globl _start\n_start:\n mov x0, sp\n bl begin\n");
#else
#error "the system calls of this architecture are not listed"
#endif

struct record {
    uint32_t pid;
    uint32_t cpu;
    uint64_t nanoseconds; /* CLOCK_MONOTONIC */
    uint64_t mask[2];     /* the first 128 PUs */
};

__attribute__((used, noreturn)) static void begin(long *stack) {
    uint64_t mask[MASK_WORDS];
    struct record record;
    int64_t now[2];
    uint32_t cpu = 0;
    for (int word = 0; word < MASK_WORDS; word++)
        ((volatile uint64_t *)mask)[word] = 0;
    call(GETAFFINITY, 0, sizeof mask, (long)mask, 0, 0, 0);
    call(GETCPU, (long)&cpu, 0, 0, 0, 0, 0);
    call(CLOCK_GETTIME, 1, (long)now, 0, 0, 0, 0);
    record.pid = call(GETPID, 0, 0, 0, 0, 0, 0);
    record.cpu = cpu;
    record.nanoseconds = now[0] * 1000000000 + now[1];
    record.mask[0] = mask[0];
    record.mask[1] = mask[1];
    call(WRITE, 1, (long)&record, sizeof record, 0, 0, 0);
    if (stack[0] > 1)
        call(PAUSE_SELECT, 0, 0, 0, 0, 0, 0);
    call(EXIT, 0, 0, 0, 0, 0, 0);
    __builtin_unreachable();
}
