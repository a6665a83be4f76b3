// SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause)
//
// switched() runs at each change of the running thread of a CPU. On a lent CPU it notes how long threads run that may be those
// of the owner, and reports the first of them to a ring buffer. `make bpf` compiles it. src/bpf/lent/mod.rs loads it and
// reads what it writes.
//
// A thread of the owner that was preempted by one at idle priority counts on while it waits: a weight of 3 (cpu.idle) gives the
// borrower a slice of some milliseconds now and then, and the owner wants the core in this time too.
//
// The threads of the owner are confined to its CPUs, new ones from their first instruction on. So a thread that the kernel
// may run on more CPUs than the owner has is one of another program. Numbers are compared, not sets: a program that is
// bound to as few other CPUs counts as the owner's, and never an owner's thread as another's.
//
// The licence and the declarations of kernel structures are as in ../tasks.bpf.c. For kernels from 5.8 on.

typedef unsigned int u32;
typedef unsigned long long u64;

#define SEC(name) __attribute__((section(name), used))
#define KERNEL __attribute__((preserve_access_index))
#define HAS(field) __builtin_preserve_field_info(field, 2)
#define MAP_UINT(name, value) int(*name)[value]
#define MAP_TYPE(name, type) type *name

char LICENSE[] SEC("license") = "Dual BSD/GPL";

// The helpers, by their numbers in include/uapi/linux/bpf.h.
static void *(*bpf_map_lookup_elem)(void *map, const void *key) = (void *)1;
static u64 (*bpf_ktime_get_ns)(void) = (void *)5;
static u32 (*bpf_get_smp_processor_id)(void) = (void *)8;
static long (*bpf_ringbuf_output)(void *ring, void *data, u64 size, u64 flags) = (void *)130;

// The kernel's structures.

struct task_group {
	struct task_group *parent;
	int idle; // since 5.15, not negative
} KERNEL;

struct task_struct {
	unsigned int __state; // since 5.14
	unsigned int flags;
	unsigned int policy;
	void *mm;
	int pid;
	int tgid;
	int nr_cpus_allowed;
	struct task_group *sched_task_group;
} KERNEL;

struct task_struct___before_5_14 {
	long state;
} KERNEL;

enum {
	PF_KTHREAD = 0x00200000,
	// A thread in which the kernel works for a process (io_uring). Its mask may have all CPUs, whatever that of the process is.
	PF_IO_WORKER = 0x00000010,
};
enum { SCHED_IDLE = 5 };
enum { MOST_LEVELS = 32 }; // a thread deeper in the tree of cgroups counts as one that is not at idle priority

// Structures shared with user space.

struct orders {
	u64 warden; // the daemon's process: its threads do not count; 0 during the check
};

// Written by this program only, at most once at a time on each CPU.
struct seen {
	u64 armed_at; // the arming to which the rest belongs
	u64 started; // since when a thread runs that counts, or waits for one at idle priority; 0 if none does
	u64 ran; // ns that such threads ran, or waited so, before `started`
	u64 reported; // whether the ring buffer has the CPU
	u64 knows_idle; // whether this kernel has cpu.idle
	u64 waits; // whether the thread of `started` waits for one at idle priority
};

struct {
	MAP_UINT(type, 2); // BPF_MAP_TYPE_ARRAY
	MAP_UINT(max_entries, 1);
	MAP_TYPE(key, u32);
	MAP_TYPE(value, struct orders);
} ORDERS SEC(".maps");

// A CPU, as user space sets it. The fields may be read in the middle of a change: a wrong number of CPUs then counts for one
// switch.
struct armed {
	u64 at; // when it was armed, as bpf_ktime_get_ns() counts; 0 if it is not lent
	u64 owner_cpus; // the number of CPUs of its owner; 0 if each thread counts that is not at idle priority
	u64 is_silent; // 1 if the CPU is only measured, and not reported
};

// For each CPU. User space sets the size.
struct {
	MAP_UINT(type, 2); // BPF_MAP_TYPE_ARRAY
	MAP_UINT(max_entries, 1);
	MAP_TYPE(key, u32);
	MAP_TYPE(value, struct armed);
} ARMED SEC(".maps");

struct {
	MAP_UINT(type, 6); // BPF_MAP_TYPE_PERCPU_ARRAY
	MAP_UINT(max_entries, 1);
	MAP_TYPE(key, u32);
	MAP_TYPE(value, struct seen);
} SEEN SEC(".maps");

// The numbers of CPUs on which such a thread ran first since they were armed.
struct {
	MAP_UINT(type, 27); // BPF_MAP_TYPE_RINGBUF
	MAP_UINT(max_entries, 65536);
} HEARD SEC(".maps");

// Whether a thread or a cgroup around it is at idle priority. The policy counts too: an owner that gives its own thread this
// policy does not hurry.
static __attribute__((always_inline)) int is_idle(struct task_struct *task)
{
	if (task->policy == SCHED_IDLE)
		return 1;
	if (!HAS(task->sched_task_group))
		return 0;
	struct task_group *group = task->sched_task_group;

	for (int i = 0; i < MOST_LEVELS; i++) {
		if (!group)
			return 0;
		if (HAS(group->idle) && group->idle > 0)
			return 1;
		group = group->parent;
	}
	return 0;
}

// Whether a thread may be confined to so many CPUs.
static __attribute__((always_inline)) int may_be_owners(struct task_struct *task, u64 owner_cpus)
{
	return !owner_cpus || task->flags & PF_IO_WORKER || (u32)task->nr_cpus_allowed <= owner_cpus;
}

// Whether a thread is one of a process that does not belong to the daemon, and may be one of the owner if it is not at idle
// priority. The idle tasks of the CPUs are kernel threads.
static __attribute__((always_inline)) int is_candidate(struct task_struct *task, u64 warden, u64 owner_cpus)
{
	return !(task->flags & PF_KTHREAD) && task->mm && (u32)task->tgid != warden && may_be_owners(task, owner_cpus);
}

// Whether a thread that is switched off could run on.
static __attribute__((always_inline)) int is_runnable(struct task_struct *task)
{
	if (HAS(task->__state))
		return task->__state == 0;
	return ((struct task_struct___before_5_14 *)task)->state == 0;
}

// TP_PROTO(bool preempt, struct task_struct *prev, struct task_struct *next, …)
SEC("tp_btf/sched_switch")
int switched(u64 *context)
{
	struct task_struct *prev = (void *)context[1], *next = (void *)context[2];
	u32 zero = 0, cpu = bpf_get_smp_processor_id();
	volatile struct armed *armed = bpf_map_lookup_elem(&ARMED, &cpu);

	if (!armed)
		return 0;
	u64 armed_at = armed->at, owner_cpus = armed->owner_cpus, is_silent = armed->is_silent;

	if (!armed_at)
		return 0;
	struct orders *orders = bpf_map_lookup_elem(&ORDERS, &zero);
	struct seen *seen = bpf_map_lookup_elem(&SEEN, &zero);
	if (!orders || !seen)
		return 0;

	u64 now = bpf_ktime_get_ns();

	if (seen->armed_at != armed_at) {
		seen->armed_at = armed_at;
		seen->ran = 0;
		seen->reported = 0;
		seen->waits = 0;
		seen->knows_idle = HAS(((struct task_group *)0)->idle);
		// Such a thread may have run since before the CPU was armed.
		seen->started = is_candidate(prev, orders->warden, owner_cpus) && !is_idle(prev) ? armed_at : 0;
	}
	int is_heard = seen->started != 0;
	int is_next_candidate = is_candidate(next, orders->warden, owner_cpus);
	// The walk through the cgroups is left out where its result does not matter.
	int is_next_idle = (is_next_candidate || seen->started) && is_idle(next);
	int next_counts = is_next_candidate && !is_next_idle;

	// The idle task of the CPU runs only if no thread waits, so the thread has left the CPU. A kernel thread in between changes
	// nothing.
	if (seen->started && !next_counts && next->pid &&
	    (seen->waits || (is_next_idle && (context[0] || is_runnable(prev))))) {
		seen->waits = 1;
	} else {
		if (seen->started && now > seen->started)
			seen->ran += now - seen->started;
		seen->started = next_counts ? now : 0;
		seen->waits = 0;
		is_heard |= next_counts;
	}
	// The record wakes up the reader.
	if (is_heard && !is_silent && !seen->reported && bpf_ringbuf_output(&HEARD, &cpu, sizeof(cpu), 0) == 0)
		seen->reported = 1;
	return 0;
}
