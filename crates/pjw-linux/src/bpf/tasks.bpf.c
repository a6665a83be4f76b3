// SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause)
//
// What the kernel knows of its tasks, one record each: a BPF task iterator. The kernel walks its tasks and calls scan()
// for each; what scan() writes is what read(2) returns. `make bpf` compiles it; src/bpf/record.rs reads the records.
//
// The kernel's GPL helpers ask for a GPL-compatible licence, so this file alone is offered under GPL-2.0 or BSD-2-Clause.
//
// No vmlinux.h: of each kernel structure only the fields that are read are declared here. Their places are corrected
// when the program is loaded (CO-RE, preserve_access_index), and fields that some kernels lack are asked for first.
// Kernels from 5.8 on. The structures that are not so marked have a fixed layout.

typedef unsigned char u8;
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
static long (*bpf_map_update_elem)(void *map, const void *key, const void *value, u64 flags) = (void *)2;
static long (*bpf_probe_read_kernel)(void *to, u64 size, const void *from) = (void *)113;
static long (*bpf_seq_write)(void *seq, const void *data, u64 size) = (void *)127;

// The kernel's structures.

struct upid {
	int nr;
} KERNEL;

struct pid {
	struct upid numbers[1];
} KERNEL;

struct signal_struct {
	struct pid *pids[4];
} KERNEL;

struct mm_struct {
	unsigned long start_stack;
} KERNEL;

struct kernfs_node {
	u64 id;
} KERNEL;

struct cgroup {
	struct kernfs_node *kn;
} KERNEL;

struct css_set {
	struct cgroup *dfl_cgrp;
} KERNEL;

typedef struct {
	u32 val;
} kuid_t;

struct cred {
	kuid_t uid, euid;
} KERNEL;

struct sched_entity {
	u64 sum_exec_runtime;
} KERNEL;

struct sched_info {
	unsigned long long run_delay;
} KERNEL;

struct thread_info {
	u32 cpu;
} KERNEL;

typedef struct cpumask {
	unsigned long bits[1];
} cpumask_t;

struct task_struct {
	struct thread_info thread_info;
	unsigned int __state;
	unsigned int flags;
	struct sched_entity se;
	cpumask_t cpus_mask;
	struct sched_info sched_info;
	struct mm_struct *mm;
	int exit_state;
	int pid, tgid;
	struct task_struct *real_parent;
	u64 start_boottime;
	const struct cred *real_cred;
	char comm[16];
	struct signal_struct *signal;
	struct css_set *cgroups;
} KERNEL;

// Before 5.14.
struct task_struct___long_state {
	volatile long state;
} KERNEL;

// Before 5.16, on some architectures.
struct task_struct___own_cpu {
	u32 cpu;
} KERNEL;

enum { PIDTYPE_PGID = 2, PIDTYPE_SID = 3 };
enum { PF_KTHREAD = 0x00200000 };

struct bpf_iter_meta {
	void *seq;
};

struct bpf_iter__task {
	struct bpf_iter_meta *meta;
	struct task_struct *task;
};

// What is agreed with user space.

enum { EVERYTHING = 0, WATCHED = 1, CHANGED = 2 };
enum { IS_KERNEL_THREAD = 1, HAS_WAIT = 2 };
enum { MASK_WORDS = 256 }; // at most 128 are used: 8,192 CPUs, the largest NR_CPUS there is
#define NO_SLOT 0xffffffffu

// Set before a pass; the counts are read after it.
struct pass {
	u64 mode, generation, mask_bytes;
	u64 reported, quiet, unwatched, kernel_threads;
};

struct watched {
	u32 slot;	   // what user space knows the process by
	u32 first; // the pass that first reported its tasks; all are reported in that one
	u32 seen;  // the last pass that met a task of it
};

// A task as it was when it was last reported. Task-local storage would do as well, but iterators have it from 5.12 on.
// The least recently met are forgotten when the map is full: the dead, or, if there are too many tasks alive, some that
// are then reported once more. Nothing has to be cleaned up by hand.
struct known {
	u64 start, run, mask, cgroup;
};

struct record {
	u32 length, slot; // a record of these two alone: the process is alive, and this task of it is quiet
	u32 tid, tgid, parent, session, group;
	u32 state, exit_state, flags, cpu, uid, euid, reserved;
	u64 start, run, wait, stack, cgroup;
	u8 comm[16];
	u64 mask[MASK_WORDS]; // as many words as this machine has
};

#define ALIVE_BYTES __builtin_offsetof(struct record, tid)
#define HEADER_BYTES __builtin_offsetof(struct record, mask)

// User space sets the sizes of the two large ones.
struct {
	MAP_UINT(type, 2); // BPF_MAP_TYPE_ARRAY
	MAP_UINT(max_entries, 1);
	MAP_TYPE(key, u32);
	MAP_TYPE(value, struct pass);
} PASS SEC(".maps");

struct {
	MAP_UINT(type, 2); // BPF_MAP_TYPE_ARRAY
	MAP_UINT(max_entries, 1);
	MAP_TYPE(key, u32);
	MAP_TYPE(value, struct record);
} RECORD SEC(".maps");

struct {
	MAP_UINT(type, 1); // BPF_MAP_TYPE_HASH
	MAP_UINT(map_flags, 1); // BPF_F_NO_PREALLOC
	MAP_UINT(max_entries, 1);
	MAP_TYPE(key, u32); // the process
	MAP_TYPE(value, struct watched);
} WATCHED_TGIDS SEC(".maps");

struct {
	MAP_UINT(type, 9); // BPF_MAP_TYPE_LRU_HASH
	MAP_UINT(max_entries, 1);
	MAP_TYPE(key, u32); // the thread; its start tells it from a later one of that number
	MAP_TYPE(value, struct known);
} KNOWN SEC(".maps");

static __attribute__((always_inline)) u32 state_of(struct task_struct *task)
{
	if (HAS(task->__state))
		return task->__state;
	return ((struct task_struct___long_state *)task)->state;
}

static __attribute__((always_inline)) u32 cpu_of(struct task_struct *task)
{
	struct task_struct___own_cpu *own = (void *)task;

	if (HAS(own->cpu))
		return own->cpu;
	return task->thread_info.cpu;
}

// The number that /proc shows in the first pid namespace; 0 if it is gone.
static __attribute__((always_inline)) u32 number_of(struct pid *pid)
{
	return pid ? pid->numbers[0].nr : 0;
}

// The verifier wants to see, just before a size is used, that it is one of `mask`. It always is.
static __attribute__((always_inline)) u64 bounded(u64 bytes)
{
	asm volatile("%0 &= 2047" : "+r"(bytes));
	return bytes;
}

static __attribute__((always_inline)) u64 digest(const u64 *words, u64 bytes)
{
	u64 sum = 0;

	for (u64 i = 0; i < MASK_WORDS && i * 8 < bytes; i++) {
		sum = (sum ^ words[i]) * 0x9e3779b97f4a7c15ull;
		sum ^= sum >> 32;
	}
	return sum;
}

static __attribute__((always_inline)) void describe(struct record *record, struct task_struct *task)
{
	record->tgid = task->tgid;
	record->parent = task->real_parent->tgid;
	record->session = number_of(task->signal->pids[PIDTYPE_SID]);
	record->group = number_of(task->signal->pids[PIDTYPE_PGID]);
	record->state = state_of(task);
	record->exit_state = task->exit_state;
	record->flags = task->flags & PF_KTHREAD ? IS_KERNEL_THREAD : 0;
	record->cpu = cpu_of(task);
	record->uid = task->real_cred->uid.val;
	record->euid = task->real_cred->euid.val;
	record->wait = 0;
	if (HAS(task->sched_info.run_delay)) {
		record->flags |= HAS_WAIT;
		record->wait = task->sched_info.run_delay;
	}
	record->stack = 0;
	// A kernel thread may have borrowed the memory of a process.
	if (task->mm && !(task->flags & PF_KTHREAD))
		record->stack = task->mm->start_stack;
	bpf_probe_read_kernel(record->comm, sizeof(record->comm), task->comm);
}

// Whether anything that counts has happened since the task was last reported.
static __attribute__((always_inline)) int is_quiet(const struct pass *pass, const struct watched *watched,
						   const struct known *before, const struct known *now)
{
	return pass->mode == CHANGED && watched && watched->first && watched->first != (u32)pass->generation &&
	       before && before->start == now->start && before->run == now->run && before->mask == now->mask &&
	       before->cgroup == now->cgroup;
}

static __attribute__((always_inline)) void remember(u32 tid, struct known *before, const struct known *now)
{
	if (before)
		*before = *now;
	else
		bpf_map_update_elem(&KNOWN, &tid, now, 0);
}

// What does not fit into the kernel's buffer is refused, and the kernel calls again for the same task with the next
// read. So nothing is counted or remembered before it is written.
SEC("iter/task")
int scan(struct bpf_iter__task *context)
{
	void *seq = context->meta->seq;
	struct task_struct *task = context->task;
	u32 zero = 0;

	if (!task)
		return 0;
	struct pass *pass = bpf_map_lookup_elem(&PASS, &zero);
	struct record *record = bpf_map_lookup_elem(&RECORD, &zero);
	if (!pass || !record)
		return 0;

	u32 tid = task->pid, tgid = task->tgid;
	struct watched *watched = bpf_map_lookup_elem(&WATCHED_TGIDS, &tgid);
	if (!watched && pass->mode != EVERYTHING) {
		pass->unwatched++;
		return 0;
	}
	if (!watched && task->flags & PF_KTHREAD) {
		pass->kernel_threads++;
		return 0;
	}

	bpf_probe_read_kernel(record->mask, bounded(pass->mask_bytes), &task->cpus_mask);
	record->tid = tid;
	record->slot = watched ? watched->slot : NO_SLOT;
	record->start = task->start_boottime;
	record->run = task->se.sum_exec_runtime;
	record->cgroup = 0;
	if (HAS(task->cgroups))
		record->cgroup = task->cgroups->dfl_cgrp->kn->id;

	struct known *before = 0;
	struct known now = {record->start, record->run, digest(record->mask, pass->mask_bytes), record->cgroup};
	if (pass->mode != EVERYTHING)
		before = bpf_map_lookup_elem(&KNOWN, &tid);

	if (is_quiet(pass, watched, before, &now)) {
		if (watched->seen != (u32)pass->generation) {
			record->length = ALIVE_BYTES;
			if (bpf_seq_write(seq, record, ALIVE_BYTES))
				return 0;
			watched->seen = pass->generation;
		}
		pass->quiet++;
		return 0;
	}

	describe(record, task);
	record->length = HEADER_BYTES + pass->mask_bytes;
	if (bpf_seq_write(seq, record, HEADER_BYTES + bounded(pass->mask_bytes)))
		return 0;
	pass->reported++;
	if (watched)
		watched->seen = pass->generation;
	if (watched && pass->mode != EVERYTHING) {
		if (!watched->first)
			watched->first = pass->generation;
		remember(tid, before, &now);
	}
	return 0;
}
