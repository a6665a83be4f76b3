/* pjw_spawn: starts groups of processes, each on its own CPUs from its first instruction.
 *
 * Link with -lpjw_spawn. The manual page is pjw_spawn(3). The functions may be called from several threads at once, except
 * pspawn_context_destroy() while another thread uses the context, and pspawn_fork_here(), which needs a program of one thread.
 * The processes are children of the caller: wait for them with waitpid(2).
 */
#ifndef PJW_SPAWN_H
#define PJW_SPAWN_H

#include <sched.h> /* cpu_set_t; CPU_SET(3) and its relatives need _GNU_SOURCE before the first #include */
#include <sys/types.h>

#ifdef __cplusplus
extern "C" {
#endif

/* A program that is started many times, with the CPU of its processes. */
typedef struct pspawn_context {
    void *pspawn_private;
} pspawn_context_t;

/* How pspawn_v() and ipspawn() read their arguments and start the processes. Flags may be combined by |, which gives an int
 * in C++. */
enum pspawn_flags {
    PSPAWN_DEFAULT = 0,
    /* `argv` has one list for each process, one after the other. Each list ends with NULL. A process whose list is too
     * large has -E2BIG in `pids`, and the others are started. Without this flag, `argv` is one list, and every process
     * gets it. */
    PSPAWN_ARGV_EACH = 1,
    /* The same for `envp`. */
    PSPAWN_ENVP_EACH = 2,
    /* The program calls pspawn_fork_here(). It is started a few times, and the processes are forks of these. A single
     * process is started without a fork: the call returns 0 in it. */
    PSPAWN_FORK_LATE = 4
};

/* Makes a context for the program at `path`; a name without a slash is searched in PATH. `core` is the CPU on which its
 * processes run, or -1 for all CPUs of the calling thread. The processes get the environment that the caller has now.
 * Returns 0, or -1 with errno: then there is no context to destroy. */
int pspawn_context_create(pspawn_context_t *ctx, const char *path, int core);

/* Frees a context. Its processes live on. */
void pspawn_context_destroy(pspawn_context_t *ctx);

/* Starts one process. Returns its process id when it has begun the program, or -1 with errno. */
pid_t pspawn(pspawn_context_t *ctx, char *const argv[]);

/* Starts `nspawns` processes with the same arguments. Writes a process id or a negative errno into each of `pids`, which
 * may be NULL. Returns the number of processes that have begun the program, or -1 with errno if none has. If the call fails
 * before it tries to start a process, as for a wrong argument, nothing is written into `pids`. */
int pspawn_n(pid_t *pids, pspawn_context_t *ctx, int nspawns, char *const argv[]);

/* Starts `nspawns` processes of the program at `filename`, which is not searched in PATH. Process i runs on the CPUs
 * mask[i % clen], all of which the calling thread must be allowed to use; sets that no process uses are not read. With
 * clen 0, all run on the CPUs of the calling thread. envp NULL stands for the caller's environment. Returns when every
 * process has begun the program or has failed. The return value and what is written into `pids` are as for pspawn_n(). */
int pspawn_v(const char *filename, char *const *argv, char *const *envp, unsigned int nspawns, unsigned int clen,
             cpu_set_t *const *mask, int flags, pid_t *pids);

/* Starts `nspawns` processes of a program, and returns before they have begun. `mask` has one set for each process, or is
 * NULL for the CPUs of the calling thread. The other arguments are those of pspawn_v(). They may be changed or freed after
 * the call. Returns a file descriptor, which becomes readable when every process has begun the program or has failed, or -1
 * with errno. pspawn_collect() must be called with it. */
int ipspawn(const char *filename, char *const *argv, char *const *envp, unsigned int nspawns, cpu_set_t *const *mask,
            int flags);

/* Waits until every process of an ipspawn() has begun the program or has failed, closes the descriptor, and returns as
 * pspawn_v() does. `pids` has room for `nspawns` numbers, or is NULL. */
int pspawn_collect(int fd, pid_t *pids, unsigned int nspawns);

/* For a program that is started with PSPAWN_FORK_LATE, or by `pjwctl spawn --proxy late`: its processes begin at this call, and
 * have what it has done before: memory, open files, working directory. The call returns 1 in each process, and writes its
 * arguments to *argc and *argv, which may be NULL; its environment is that of the process. In a program that was started in
 * another way, the call returns 0 at once and writes nothing. Returns -1 with errno, EBUSY if the program has more than one
 * thread; the program goes on then, and the processes are started without a fork. */
int pspawn_fork_here(int *argc, char ***argv);

/* Returns what failed in the last call of the calling thread that returned -1 or a negative errno in `pids`: the step and
 * the error, such as "exec: No such file or directory". If several processes failed, it is about the first of them. The
 * text is empty if no call failed, and valid until the next call of the thread that fails. */
const char *pspawn_error(void);

#ifdef __cplusplus
}
#endif

#endif
