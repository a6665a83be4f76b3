//! The texts below the help of `pjwctl assign` and `pjwctl release`.

/// The examples and remarks below the help of `pjwctl assign`.
pub(super) const ASSIGN: &str = "Examples:\n  \
    pjwctl assign mytest --cores 4 --pid 4711      four cores for process 4711 and its descendants\n  \
    pjwctl assign mytest --cores 6                 the same job, resized\n  \
    pjwctl assign io --cpus 0-1 --session 4200     exactly these CPUs for a session\n\n\
    Prints the job and its CPUs. If not enough cores are free, the job is refused, waits or shares cores, \
    depending on on_exhausted in pjwd's configuration. A waiting job has no CPUs yet. \
    A job created without processes keeps its cores until it is released, or has had no process for \
    reservation_timeout (24h unless configured). A job created with processes ends with the last of them. \
    A change of the cpuset that takes the kernel more than 100 ms is completed after the reply. Until then masks keep \
    the job on its cores, except in an isolated partition, and pjwctl show JOB says that it is kept by affinity. The \
    log of pjwd says that the change was not complete, and later that it was made.";

/// The remarks below the help of `pjwctl release`.
pub(super) const RELEASE: &str = "\
    A change of the cpuset that takes the kernel more than 100 ms is completed after the reply. Until then the \
    processes may still be in the cpuset, on the cores that the job had. Other jobs can have these cores already. The \
    log of pjwd says that the change was not complete, and later that it was made. With --all, pjwd waits up to 5 s \
    for these changes.";
