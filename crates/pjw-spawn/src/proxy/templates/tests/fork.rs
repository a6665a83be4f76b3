//! What an instance has of its own.

use std::sync::Arc;

use super::*;

use crate::proxy::Template;
use crate::{Arguments, ExitStatus};

const REPORT: &str = r#"
#define _GNU_SOURCE
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include <errno.h>
#include <sched.h>
#include <signal.h>
#include <fcntl.h>
#include <pthread.h>
#include <sys/auxv.h>
#include <sys/syscall.h>
#include <time.h>
extern char **environ;
static void file(const char *path) {
    char text[65536]; int fd = open(path, O_RDONLY); ssize_t n = read(fd, text, sizeof text); close(fd);
    printf("%s=", path);
    for (ssize_t i = 0; i < n; i++) putchar(text[i] ? (text[i] == '\n' ? ' ' : text[i]) : '|');
    printf("\n");
}
static char at_start[64] = "none";
__attribute__((constructor)) static void early(int argc, char **argv, char **envp) {
    snprintf(at_start, sizeof at_start, "%s/%s", argc > 1 ? argv[1] : "", getenv("OWN") ? getenv("OWN") : "");
}
static void handler(int s) { (void)s; }
static void *thread(void *x) { return (void *)(long)((pid_t)syscall(SYS_gettid) != getpid() && gettid() != getpid()); }
int main(int argc, char **argv) {
    printf("argc=%d\n", argc);
    for (int i = 0; i < argc; i++) printf("argv%d=%s\n", i, argv[i]);
    for (char **e = environ; *e; e++) printf("env=%s\n", *e);
    printf("constructor=%s\n", at_start);
    printf("name=%s\n", program_invocation_name);
    printf("ids=%d\n", getpid() == (pid_t)syscall(SYS_getpid) && gettid() == (pid_t)syscall(SYS_gettid) && getpid() == gettid());
    printf("ppid=%d\n", getppid());
    printf("auxv=%d\n", getauxval(AT_PAGESZ) == 4096 && getauxval(AT_ENTRY) != 0 && getauxval(AT_RANDOM) != 0);
    const unsigned char *r = (void *)getauxval(AT_RANDOM);
    printf("random="); for (int i = 0; i < 16; i++) printf("%02x", r[i]); printf("\n");
    pthread_mutexattr_t a; pthread_mutex_t m;
    pthread_mutexattr_init(&a); pthread_mutexattr_settype(&a, PTHREAD_MUTEX_ERRORCHECK); pthread_mutexattr_setrobust(&a, PTHREAD_MUTEX_ROBUST);
    pthread_mutex_init(&m, &a);
    printf("mutex=%d\n", pthread_mutex_lock(&m) == 0 && m.__data.__owner == (int)syscall(SYS_gettid) && pthread_mutex_unlock(&m) == 0);
    struct { void *head; size_t len; } robust; void *head; size_t len;
    syscall(SYS_get_robust_list, 0, &head, &len); (void)robust;
    printf("robust=%d\n", head != 0 && len == 24);
    signal(SIGUSR1, handler);
    printf("raise=%d\n", raise(SIGUSR1) == 0);
    pthread_t t; void *ok; pthread_create(&t, 0, thread, 0); pthread_join(t, &ok);
    printf("thread=%d\n", (int)(long)ok);
    struct timespec now; printf("vdso=%d\n", clock_gettime(CLOCK_MONOTONIC, &now) == 0);
    char *big = malloc(1 << 20); memset(big, 1, 1 << 20); free(big);
    printf("sbrk=%d\n", sbrk(4096) != (void *)-1);
    cpu_set_t cpus; sched_getaffinity(0, sizeof cpus, &cpus);
    printf("cpus="); for (int i = 0; i < 64; i++) if (CPU_ISSET(i, &cpus)) printf("%d.", i); printf("\n");
    int fds = 0; for (int i = 0; i < 1024; i++) if (fcntl(i, F_GETFD) >= 0) fds++;
    printf("fds=%d\n", fds);
    char cwd[4096]; printf("cwd=%s\n", getcwd(cwd, sizeof cwd));
    file("/proc/self/cmdline"); file("/proc/self/environ"); file("/proc/self/comm");
    fflush(stdout);
    if (argc > 2 && strcmp(argv[2], "kill") == 0) raise(SIGTERM);
    return argc > 2 ? atoi(argv[2]) : 0;
}
"#;

fn line<'a>(text: &'a str, name: &str) -> &'a str {
    text.lines()
        .find_map(|line| line.strip_prefix(name)?.strip_prefix('='))
        .unwrap_or_else(|| panic!("no {name} in {text}"))
}

#[test]
fn an_instance_is_as_if_it_was_executed() {
    let directory = tempfile::tempdir().unwrap();
    for (kind, flags) in KINDS {
        let program = compile(directory.path(), "report", REPORT, flags);
        let context = context(&program, &["A=1", "HOME=/x", "OWN=template"]);
        let own = |rank| {
            let mut own = instance(rank, &["called", "rank%r", "7"]);
            own.variables =
                vec![std::ffi::CString::new(format!("PLACE=at {}", "p".repeat(rank as usize))).unwrap()];
            own
        };
        let executed = std::process::Command::new(&program).output().unwrap();
        let executed = String::from_utf8(executed.stdout).unwrap();
        let descriptors = line(&executed, "fds");
        let mut template = Template::load_until_main(&context, &own(0)).unwrap();
        let mut randoms = std::collections::BTreeSet::new();
        // So long a variable is written into the memory of the template, and not copied by it.
        for rank in [0, 1, 2000, 12, 3] {
            let (text, exit, child) = run(&mut template, own(rank)).unwrap();
            assert_eq!(exit, ExitStatus::Code(7), "{kind}");
            assert_eq!(line(&text, "argc"), "3", "{kind}");
            assert_eq!(line(&text, "argv0"), "called");
            assert_eq!(line(&text, "argv1"), format!("rank{rank}"));
            let place = format!("PLACE=at {}", "p".repeat(rank as usize));
            let variables: Vec<&str> = text.lines().filter_map(|line| line.strip_prefix("env=")).collect();
            assert_eq!(variables, ["A=1", "HOME=/x", "OWN=template", &place], "{kind}");
            assert_eq!(line(&text, "constructor"), format!("rank{rank}/template"), "{kind}");
            assert_eq!(line(&text, "name"), "called", "{kind}");
            assert_eq!(line(&text, "ppid"), std::process::id().to_string());
            for fact in ["ids", "auxv", "mutex", "robust", "raise", "thread", "vdso", "sbrk"] {
                assert_eq!(line(&text, fact), "1", "{kind}: {fact}");
            }
            assert_eq!(line(&text, "/proc/self/cmdline"), format!("called|rank{rank}|7|"), "{kind}");
            assert_eq!(
                line(&text, "/proc/self/environ"),
                format!("A=1|HOME=/x|OWN=template|{place}|"),
                "{kind}"
            );
            assert_eq!(line(&text, "/proc/self/comm"), "report ");
            assert_eq!(line(&text, "fds"), descriptors, "{kind}");
            assert_eq!(line(&text, "cwd"), line(&executed, "cwd"), "{kind}");
            randoms.insert(line(&text, "random").to_owned());
            assert_ne!(child.pid, template.pid());
        }
        assert_eq!(randoms.len(), 5, "{kind}");
        let mut killed = own(4);
        killed.arguments = Arc::new(Arguments::parse(&["called", "rank%r", "kill"]).unwrap());
        let (_, exit, _) = run(&mut template, killed).unwrap();
        assert_eq!(exit, ExitStatus::Signal(libc::SIGTERM), "{kind}");
    }
}
