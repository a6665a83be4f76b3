// SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause)
//
// Two programs. scan() is a BPF task iterator: the kernel calls it for each task, and its records are what read(2) on the
// iterator returns. asked() runs at the end of each sched_setaffinity(2) and writes its records to a ring buffer.
// `make bpf` compiles both. src/bpf/record.rs parses the records of scan(), and src/bpf/affinity_monitor.rs those of
// asked().
//
// The kernel's GPL helpers need a GPL-compatible licence. So this file alone has the licence GPL-2.0 or BSD-2-Clause.
//
// No vmlinux.h: of each kernel structure only the fields in use are declared here. Their offsets are relocated when the
// program is loaded (CO-RE, preserve_access_index), and the existence of fields that some kernels lack is checked first.
// For kernels from 5.8 on. Structures without this attribute have a fixed layout.

typedef unsigned char u8;
typedef unsigned int u32;
typedef unsigned long long u64;

#define SEC(name) __attribute__((section(name), used))
#define KERNEL __attribute__((preserve_access_index))
#define HAS(field) __builtin_preserve_field_info(field, 2)
#define SIZE_OF(field) __builtin_preserve_field_info(field, 1)
#define MAP_UINT(name, value) int(*name)[value]
#define MAP_TYPE(name, type) type *name

char LICENSE[] SEC("license") = "Dual BSD/GPL";

// The helpers, by their numbers in include/uapi/linux/bpf.h.
struct task_struct;
static void *(*bpf_map_lookup_elem)(void *map, const void *key) = (void *)1;
static u64 (*bpf_get_current_pid_tgid)(void) = (void *)14;
static long (*bpf_get_current_comm)(void *to, u32 size) = (void *)16;
static struct task_struct *(*bpf_get_current_task)(void) = (void *)35;
static long (*bpf_probe_read_kernel)(void *to, u64 size, const void *from) = (void *)113;
static u64 (*bpf_ktime_get_boot_ns)(void) = (void *)125;
static long (*bpf_seq_write)(void *seq, const void *data, u64 size) = (void *)127;
static long (*bpf_ringbuf_output)(void *ring, void *data, u64 size, u64 flags) = (void *)130;

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

struct completion;

struct kernfs_node {
	u64 id;
} KERNEL;

struct cgroup {
	struct kernfs_node *kn;
} KERNEL;

struct cgroup_subsys_state {
	u64 serial_nr;
} KERNEL;

enum { MOST_CONTROLLERS = 24 }; // Linux 6.18 has 16

struct css_set {
	struct cgroup_subsys_state *subsys[MOST_CONTROLLERS]; // as many as the kernel has controllers
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
	struct completion *vfork_done;
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

// Structures shared with user space.

enum { EVERYBODY = 0, WATCHED = 1 };
enum { IS_KERNEL_THREAD = 1, HAS_WAIT = 2, IN_VFORK = 4 };
enum { MASK_WORDS = 256 }; // at most 128 are used: 8,192 CPUs, the largest NR_CPUS there is

// Set before a pass; the counts are read after it.
struct pass {
	u64 mode, mask_bytes;
	u64 reported, unwatched;
	u64 keys[2]; // random, the same in each pass
};

struct record {
	u32 length, tid, tgid, parent, session, group;
	u32 state, exit_state, flags, cpu, uid, euid;
	u64 start, run, wait, stack, cgroup, place, space;
	u8 comm[16];
	u64 mask[MASK_WORDS]; // as many words as this machine has
};

#define HEADER_BYTES __builtin_offsetof(struct record, mask)

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

// User space sets its size.
struct {
	MAP_UINT(type, 1); // BPF_MAP_TYPE_HASH
	MAP_UINT(map_flags, 1); // BPF_F_NO_PREALLOC
	MAP_UINT(max_entries, 1);
	MAP_TYPE(key, u32); // the process
	MAP_TYPE(value, u32); // nothing
} WATCHED_TGIDS SEC(".maps");

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

// The process id in the initial pid namespace. 0 if the process has ended.
static __attribute__((always_inline)) u32 number_of(struct pid *pid)
{
	return pid ? pid->numbers[0].nr : 0;
}

// Shows the verifier, just before a size is used, that the size does not exceed `mask`. It never does.
static __attribute__((always_inline)) u64 bounded(u64 bytes)
{
	asm volatile("%0 &= 2047" : "+r"(bytes));
	return bytes;
}

// A number that changes when the task moves to another cgroup. Tasks in the same cgroups share a css_set. In v2 a cgroup
// has a unique number; in v1 the state of each controller has one. A hierarchy without controllers only changes the
// address of the css_set, and a later css_set may have the same address.
static __attribute__((always_inline)) u64 place_of(struct record *record, struct css_set *set)
{
	struct cgroup_subsys_state **states = &set->subsys[0];
	u64 place;

	// Through memory, because the verifier forbids arithmetic with an address.
	*(volatile u64 *)&record->place = (u64)set;
	place = *(volatile u64 *)&record->place * 0x9e3779b97f4a7c15 + record->cgroup;
#pragma unroll
	for (u32 i = 0; i < MOST_CONTROLLERS; i++) {
		if (i * sizeof(*states) >= SIZE_OF(set->subsys))
			break;
		place = place * 0x9e3779b97f4a7c15 + states[i]->serial_nr;
	}
	return place;
}

// A number of the address space: two tasks have the same number exactly if they have the same mm. Each step can be undone,
// so two addresses never give the same number. The keys keep the address from user space.
static __attribute__((always_inline)) u64 space_of(struct record *record, struct mm_struct *mm, struct pass *pass)
{
	u64 number;

	// Through memory, because the verifier forbids arithmetic with an address.
	*(volatile u64 *)&record->space = (u64)mm;
	number = *(volatile u64 *)&record->space + pass->keys[0];
#pragma unroll
	for (u32 i = 0; i < 2; i++) {
		number = (number ^ number >> 33) * 0xff51afd7ed558ccd;
		number = (number ^ number >> 33) * 0xc4ceb9fe1a85ec53;
		number = (number ^ number >> 33) + pass->keys[1];
	}
	return number;
}

static __attribute__((always_inline)) void describe(struct record *record, struct task_struct *task, struct pass *pass)
{
	record->tid = task->pid;
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
	record->start = task->start_boottime;
	record->run = task->se.sum_exec_runtime;
	record->wait = 0;
	if (HAS(task->sched_info.run_delay)) {
		record->flags |= HAS_WAIT;
		record->wait = task->sched_info.run_delay;
	}
	record->stack = 0;
	record->space = 0;
	// A kernel thread may have borrowed the memory of a process.
	if (task->mm && !(task->flags & PF_KTHREAD)) {
		record->stack = task->mm->start_stack;
		record->space = space_of(record, task->mm, pass);
		// The completion for which the parent waits, until the child executes a program or exits.
		if (task->vfork_done)
			record->flags |= IN_VFORK;
	}
	record->cgroup = 0;
	record->place = 0;
	if (HAS(task->cgroups)) {
		struct css_set *set = task->cgroups;

		record->cgroup = set->dfl_cgrp->kn->id;
		// Only for the first thread, which stands for the process.
		if (task->pid == task->tgid)
			record->place = place_of(record, set);
	}
	bpf_probe_read_kernel(record->comm, sizeof(record->comm), task->comm);
}

// If a record does not fit into the kernel's buffer, the write fails, and the kernel calls again for the same task at the
// next read. So a task is counted only after the write.
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

	// The first thread of every process in mode EVERYBODY, and all threads of watched processes.
	u32 tgid = task->tgid;
	int is_first = (u32)task->pid == tgid;
	if (!(pass->mode == EVERYBODY && is_first) && !bpf_map_lookup_elem(&WATCHED_TGIDS, &tgid)) {
		pass->unwatched++;
		return 0;
	}
	describe(record, task, pass);
	bpf_probe_read_kernel(record->mask, bounded(pass->mask_bytes), &task->cpus_mask);
	record->length = HEADER_BYTES + pass->mask_bytes;
	if (bpf_seq_write(seq, record, HEADER_BYTES + bounded(pass->mask_bytes)) == 0)
		pass->reported++;
	return 0;
}

// Affinity requests.

enum { EINVAL = 22 };
enum { BPF_RB_NO_WAKEUP = 1 };

// Set before the program is attached, and again after the check. `lost` counts records without room in the ring buffer.
struct listening {
	u64 warden; // the daemon's process: its calls are not reported, or during the check only its calls
	u64 check;
	u64 mask_bytes;
	u64 lost;
};

struct ask {
	u32 tid, tgid, parent;
	u32 whom; // the target as the caller named it, in the caller's pid namespace; 0 is the caller
	long long result;
	u64 at;
	u8 comm[16];
	u64 mask[MASK_WORDS]; // as many words as this machine has
};

#define ASK_HEADER_BYTES __builtin_offsetof(struct ask, mask)

struct {
	MAP_UINT(type, 2); // BPF_MAP_TYPE_ARRAY
	MAP_UINT(max_entries, 1);
	MAP_TYPE(key, u32);
	MAP_TYPE(value, struct listening);
} LISTENING SEC(".maps");

struct {
	MAP_UINT(type, 6); // BPF_MAP_TYPE_PERCPU_ARRAY
	MAP_UINT(max_entries, 1);
	MAP_TYPE(key, u32);
	MAP_TYPE(value, struct ask);
} ASK SEC(".maps");

struct {
	MAP_UINT(type, 27); // BPF_MAP_TYPE_RINGBUF
	MAP_UINT(max_entries, 65536);
} ASKS SEC(".maps");

// long sched_setaffinity(pid_t pid, const struct cpumask *in_mask): the context holds the arguments and the result. No
// reader is woken: the daemon drains the ring buffer in its scans. The kernel runs the program at most once at a time on
// a CPU, so one record per CPU suffices.
SEC("fexit/sched_setaffinity")
int asked(u64 *context)
{
	u64 ids = bpf_get_current_pid_tgid();
	long long result = context[2];
	struct task_struct *parent = 0;
	u32 zero = 0;

	// A call that failed for another reason than the cpuset is no affinity request.
	if (result != 0 && result != -EINVAL)
		return 0;
	struct listening *listening = bpf_map_lookup_elem(&LISTENING, &zero);
	struct ask *ask = bpf_map_lookup_elem(&ASK, &zero);
	if (!listening || !ask || (ids >> 32 == listening->warden) != (listening->check != 0))
		return 0;

	struct task_struct *task = bpf_get_current_task();
	ask->tid = ids;
	ask->tgid = ids >> 32;
	ask->parent = 0;
	bpf_probe_read_kernel(&parent, sizeof(parent), &task->real_parent);
	bpf_probe_read_kernel(&ask->parent, sizeof(ask->parent), &parent->tgid);
	ask->whom = context[0];
	ask->result = result;
	ask->at = bpf_ktime_get_boot_ns();
	bpf_get_current_comm(ask->comm, sizeof(ask->comm));
	bpf_probe_read_kernel(ask->mask, bounded(listening->mask_bytes), (void *)context[1]);
	if (bpf_ringbuf_output(&ASKS, ask, ASK_HEADER_BYTES + bounded(listening->mask_bytes), BPF_RB_NO_WAKEUP))
		__sync_fetch_and_add(&listening->lost, 1);
	return 0;
}
