# The guests' kernel: the distribution's own, for virtual machines; unpacked, never installed. With KERNEL=backports it is
# the one that Debian's backports have for the same release: it remembers the masks that users asked for, as Linux does
# since 6.2, and Debian 12's own does not. Sourced by bare.sh and image.sh, which set `vm` (where the machines are kept).
#
# Leaves $kernel/vmlinuz, and in $kernel/modules what a machine with disks and ports needs that is not built in, numbered
# in the order of loading.

say() { printf 'vm: %s\n' "$*" >&2; }
die() { say "$*"; exit 1; }

mkdir -p "$vm${KERNEL:+/$KERNEL}"
kernel=$(realpath "$vm${KERNEL:+/$KERNEL}")
case ${KERNEL:-} in '' | backports) ;; *) die "KERNEL is backports, or nothing" ;; esac

# Disk, ports, and an interface that is not the loopback.
modules="virtio_pci virtio_blk virtio_console ext4 dummy"

# ask_apt COMMAND...: apt-get or apt-cache, of the archives that have this kernel. Backports are none of the host's: lists of
# their own say what is there.
ask_apt() {
    local command=$1 at=$kernel/apt
    shift
    if [ -z "${KERNEL:-}" ]; then "$command" "$@"; return; fi
    "$command" -o Dir::Etc::SourceList="$at/list" -o Dir::Etc::SourceParts=/dev/null -o Dir::State::Lists="$at/lists" \
        -o Dir::Cache="$at/cache" -o APT::Sandbox::User="$(id -un)" "$@"
}

# look_up: their lists, from the mirror that the host takes its release from.
look_up() {
    local at=$kernel/apt release
    mkdir -p "$at/lists/partial" "$at/cache/archives/partial"
    release=$(. /etc/os-release && echo "$VERSION_CODENAME")
    apt-get indextargets --format 'deb $(REPO_URI) $(RELEASE)-backports main' 'Identifier: Packages' 'Origin: Debian' |
        awk -v wanted="$release-backports" '$3 == wanted && !seen++' >"$at/list"
    [ -s "$at/list" ] || return
    ask_apt apt-get -qq update
}

# What the distribution's package of kernels for virtual machines stands for now.
kernel_package() {
    local meta
    for meta in linux-image-cloud-amd64 linux-image-virtual; do
        ask_apt apt-cache depends "$meta" 2>/dev/null | awk '$1 == "Depends:" && $2 ~ /^linux-image-[0-9]/ { print $2 }' || true
    done | head -n 1
}

# Where the modules of a kernel are: in its own package (Debian), or beside it (Ubuntu).
modules_package() {
    local beside=${1/linux-image-/linux-modules-}
    ! ask_apt apt-cache show "$beside" >/dev/null 2>&1 || echo "$beside"
}

# $1, unpacked for the boot: busybox may not know how the distribution packs its modules.
copy_module() {
    case $1 in
        *.xz) xz -dc "$1" >"$2" ;;
        *.zst) zstd -qdc "$1" >"$2" ;;
        *) cp "$1" "$2" ;;
    esac
}

copy_modules() {
    local root=$1 to=$2 version module path number=10
    version=$(ls "$root/lib/modules")
    /sbin/depmod -b "$root" "$version"
    rm -rf "$to" && mkdir -p "$to"
    for module in $modules; do
        /sbin/modprobe -d "$root" -S "$version" --show-depends "$module" | awk '$1 == "insmod" { print $2 }'
    done | awk '!seen[$0]++' | while read -r path; do
        module=${path##*/}
        copy_module "$path" "$to/$number-${module%%.ko*}.ko"
        number=$((number + 1))
    done
    echo "$modules" >"$to/list"
}

# Debian's cloud kernel and Ubuntu's virtual one have everything built in that a machine without disks needs.
fetch_kernel() {
    [ ! -s "$kernel/vmlinuz" ] || [ "$(cat "$kernel/modules/list" 2>/dev/null)" != "$modules" ] || return 0
    local package at=$kernel/unpacked
    if [ -n "${KERNEL:-}" ]; then look_up || die "the archives of $KERNEL can't be read: is the host Debian, and online?"; fi
    package=$(kernel_package)
    if [ -z "$package" ] && [ -z "${KERNEL:-}" ]; then
        say "apt knows no kernel package: updating its lists"
        if [ "$(id -u)" = 0 ]; then apt-get -qq update; else sudo apt-get -qq update; fi || true
        package=$(kernel_package)
    fi
    [ -n "$package" ] || die "no kernel package was found: run apt-get update as root"
    say "fetching $package"
    rm -rf "$at" && mkdir -p "$at"
    # _apt may not write here; the signature was checked with the lists.
    # shellcheck disable=SC2046 # no package is no word
    (cd "$at" && ask_apt apt-get -qq -o APT::Sandbox::User="$(id -un)" download "$package" $(modules_package "$package"))
    for package in "$at/"*.deb; do dpkg-deb -x "$package" "$at/root"; done
    copy_modules "$at/root" "$kernel/modules"
    cp "$at/root/boot/"vmlinuz-* "$kernel/vmlinuz.new"
    mv "$kernel/vmlinuz.new" "$kernel/vmlinuz"
    rm -rf "$at" "$kernel/apt"
}
