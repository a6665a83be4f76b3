#!/bin/bash
# The bare machine: a kernel, a static busybox, pjwd and pjwctl with their libraries, and the cases. It has no systemd, no disk
# and no network. It boots in seconds, once for all its cases. The results are written to a serial line.
#
# Usage: framework/bare.sh CASE.sh...        runs these cases; exit code 1 if any line is not ok
#        framework/bare.sh --shell           a shell in the machine
# Environment: PROGRAMS, the directory of pjwd and pjwctl [target/release]; VM, the directory of the machine
# [target/vm]; DEADLINE, the seconds for all cases [1800]; KERNEL, see kernel.sh.
set -euo pipefail
cd "$(dirname "$0")/../../.."
programs=${PROGRAMS:-${CARGO_TARGET_DIR:-target}/release}
vm=${VM:-target/vm}
deadline=${DEADLINE:-1800}
silence=120
framework=tests/vm/framework
results=$vm/results/bare${KERNEL:+-$KERNEL}
. "$framework/kernel.sh"
. "$framework/emulated"

# Copies a program and its shared libraries into the guest, to the same paths.
add_program() {
    local from=$1 to=$2 library
    mkdir -p "$(dirname "$to")" && cp "$from" "$to"
    ldd "$from" | awk '/=> \// { print $3 } $1 ~ /^\// { print $1 }' | while read -r library; do
        mkdir -p "$root$(dirname "$library")"
        cp -L "$library" "$root$library"
    done
}

# Makes the initramfs: busybox, pjwd, pjwctl, the static programs, the functions and the cases, in one archive.
build_initramfs() {
    local applet busybox
    root=$work/root
    busybox=$(command -v busybox) || die "no busybox: apt-get install busybox-static"
    ldd "$busybox" >/dev/null 2>&1 && die "$busybox is not static: apt-get install busybox-static"
    mkdir -p "$root"/{bin,dev,etc,proc,run,sys,tmp,cases}
    cp "$busybox" "$root/bin/busybox"
    for applet in $("$busybox" --list); do
        [ "$applet" = busybox ] || ln -s busybox "$root/bin/$applet"
    done
    for program in pjwd pjwctl; do
        [ -x "$programs/$program" ] || die "$programs/$program is missing: make build"
        add_program "$programs/$program" "$root/usr/bin/$program"
    done
    # The programs of the cases are linked statically. The guest has no compiler.
    for program in "$framework"/programs/*.c; do
        cc -O1 -static-pie -o "$root/usr/bin/$(basename "$program" .c)" "$program" ||
            die "cc can't link static programs: apt-get install gcc libc6-dev"
    done
    echo 'root:x:0:0:root:/:/bin/sh' >"$root/etc/passwd"
    echo 'root:x:0:' >"$root/etc/group"
    cp "$framework/bare-init" "$root/init" && cp "$framework/functions/common.sh" "$root/cases/functions" && chmod +x "$root/init"
    [ $# = 0 ] || cp "$@" "$root/cases/"
    (cd "$root" && find . | "$busybox" cpio -o -H newc 2>/dev/null) | gzip -1 >"$work/initramfs"
}

# set_machine WORD: sets `machine` to the command line of QEMU. WORD is passed to the init of the guest.
set_machine() {
    command -v qemu-system-x86_64 >/dev/null || die "no qemu-system-x86_64: apt-get install qemu-system-x86"
    machine=(
        qemu-system-x86_64
        -machine "q35,smbus=off,sata=off,usb=off,vmport=off,hpet=off" -accel tcg,thread=multi
        -cpu "$CPU" -smp 16,sockets=2,cores=4,threads=2 -m 1024
        -object memory-backend-ram,id=m0,size=512M -object memory-backend-ram,id=m1,size=512M
        -numa node,nodeid=0,cpus=0-7,memdev=m0 -numa node,nodeid=1,cpus=8-15,memdev=m1
        -numa dist,src=0,dst=1,val=21
        -nodefaults -no-user-config -display none -monitor none -no-reboot
        -kernel "$kernel/vmlinuz" -initrd "$work/initramfs"
        -append "$KERNEL_LINE pjw=$1"
    )
}

# `timeout` ends QEMU after the deadline. end_machine does when this script ends.
boot() {
    : >"$results/console.log" && : >"$results/lines"
    timeout --kill-after=5 "$deadline" "${machine[@]}" \
        -serial "file:$results/console.log" -serial "file:$results/lines" </dev/null &
    running=$!
    local since=$SECONDS
    while kill -0 $running 2>/dev/null; do
        if [ ! -s "$results/lines" ] && [ $((SECONDS - since)) -gt "$silence" ]; then
            end_machine
            return 1
        fi
        sleep 0.2
    done
    wait $running || say "the machine ended with status $? (124: after the deadline of $deadline s)"
    running=
    [ -s "$results/lines" ]
}

end_machine() {
    [ -n "$running" ] || return 0
    kill "$running" 2>/dev/null && wait "$running" || true
    running=
}

# Whether the kernel stopped at a breakpoint in its own code before any check failed. The kernel changes an instruction while CPUs
# run: it puts a breakpoint there, waits for all CPUs, and removes the breakpoint. It does so when the first cpuset is made, and
# where a BPF program is attached. An emulated CPU may still execute the translated breakpoint after its removal. A real CPU does not.
has_emulation_fault() {
    ! grep -qx 'end of cases' <(tr -d '\r' <"$results/lines") && ! grep -q '^not ok ' "$results/lines" &&
        grep -qE 'int3: 0000 \[#' "$results/console.log"
}

# An emulated kernel sometimes hangs before its first process, if the host is busy, or stops as described above. All cases begin
# again then. A kernel that stops for another reason does not reach the end of the cases, and check_results() reports this.
run_cases() {
    local try
    for try in 1 2 3; do
        if ! boot; then
            say "the guest wrote nothing (try $try of 3); its console ends with"
        elif [ "$try" -lt 3 ] && has_emulation_fault; then
            say "the emulated kernel stopped at a breakpoint in its own code (try $try of 3); its console ends with"
        else
            return 0
        fi
        tail -n 5 "$results/console.log" >&2
    done
    die "the guest does not boot; its console is $results/console.log"
}

# The run passes only if the end of the cases was reached and every line is ok.
check_results() {
    local lines passed failed
    lines=$(tr -d '\r' <"$results/lines")
    printf '%s\n' "$lines" | tee "$results/lines"
    passed=$(grep -c '^ok ' <<<"$lines" || true)
    failed=$(grep -c '^not ok ' <<<"$lines" || true)
    if ! grep -qx 'end of cases' <<<"$lines"; then
        tail -n 40 "$results/console.log" >&2
        echo 'not ok the bare machine reached the end of the cases' | tee -a "$results/lines"
        die "its console is $results/console.log"
    fi
    if [ "$failed" -gt 0 ]; then
        tail -n 60 "$results/console.log" >&2
        die "bare: $failed of $((passed + failed)) checks failed; the console is $results/console.log"
    fi
    [ "$passed" -gt 0 ] || die "no check ran"
}

mkdir -p "$results"
work=$(mktemp -d "$vm/bare-XXXXXX")
running=
trap 'end_machine; rm -rf "$work"' EXIT
trap 'exit 143' TERM INT

fetch_kernel
if [ "${1:-}" = --shell ]; then
    build_initramfs tests/vm/cases/bare/*.sh
    set_machine shell
    say "exit ends the machine"
    before=$(stty -g 2>/dev/null || true)
    [ -z "$before" ] || stty raw -echo
    "${machine[@]}" -chardev stdio,id=terminal,signal=off -serial chardev:terminal || true
    [ -z "$before" ] || stty "$before"
else
    build_initramfs "$@"
    set_machine cases
    run_cases
    check_results
fi
