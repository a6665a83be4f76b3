# Fetches the kernel of the guests: the distribution's kernel for virtual machines. It is unpacked, and not installed. With
# KERNEL=backports it is the kernel that Debian's backports have for the same release. Like every Linux since 6.2 it keeps the masks
# that were requested. The kernel of Debian 12 does not. Sourced by bare.sh and image.sh, which set `vm`, the directory of the machines.
#
# Writes $kernel/vmlinuz, and to $kernel/modules the modules that are not built in but needed for disks and ports. Their names have
# numbers in the order of loading.

say() { printf 'vm: %s\n' "$*" >&2; }
die() { say "$*"; exit 1; }

mkdir -p "$vm${KERNEL:+/$KERNEL}"
kernel=$(realpath "$vm${KERNEL:+/$KERNEL}")
case ${KERNEL:-} in '' | backports) ;; *) die "KERNEL is backports, or nothing" ;; esac

# For the disk, the ports, and a dummy network interface.
modules="virtio_pci virtio_blk virtio_console ext4 dummy"

# ask_apt COMMAND...: runs apt-get or apt-cache on the archives that have this kernel. For backports it uses package lists of its
# own, because the host may not have them.
ask_apt() {
    local command=$1 at=$kernel/apt
    shift
    if [ -z "${KERNEL:-}" ]; then "$command" "$@"; return; fi
    "$command" -o Dir::Etc::SourceList="$at/list" -o Dir::Etc::SourceParts=/dev/null -o Dir::State::Lists="$at/lists" \
        -o Dir::Cache="$at/cache" -o APT::Sandbox::User="$(id -un)" "$@"
}

# look_up: fetches the package lists of backports, from the mirror that the host uses for its release.
look_up() {
    local at=$kernel/apt release
    mkdir -p "$at/lists/partial" "$at/cache/archives/partial"
    release=$(. /etc/os-release && echo "$VERSION_CODENAME")
    apt-get indextargets --format 'deb $(REPO_URI) $(RELEASE)-backports main' 'Identifier: Packages' 'Origin: Debian' |
        awk -v wanted="$release-backports" '$3 == wanted && !seen++' >"$at/list"
    [ -s "$at/list" ] || return
    ask_apt apt-get -qq update
}

# Prints the kernel package on which the distribution's package for virtual machines depends at present.
kernel_package() {
    local meta
    for meta in linux-image-cloud-amd64 linux-image-virtual; do
        ask_apt apt-cache depends "$meta" 2>/dev/null | awk '$1 == "Depends:" && $2 ~ /^linux-image-[0-9]/ { print $2 }' || true
    done | head -n 1
}

# Prints the package of the kernel's modules, if they are not in the kernel's package: Debian has one package, Ubuntu has two.
modules_package() {
    local beside=${1/linux-image-/linux-modules-}
    ! ask_apt apt-cache show "$beside" >/dev/null 2>&1 || echo "$beside"
}

# Copies a module, uncompressed: the busybox of the initrd may not support the compression.
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

# Debian's cloud kernel and Ubuntu's virtual kernel have everything built in that a machine without disks needs.
fetch_kernel() {
    [ ! -s "$kernel/vmlinuz" ] || [ "$(cat "$kernel/modules/list" 2>/dev/null)" != "$modules" ] || return 0
    local package at=$kernel/unpacked
    if [ -n "${KERNEL:-}" ]; then look_up || die "the archives of $KERNEL can't be read: is the host Debian, and online?"; fi
    package=$(kernel_package)
    if [ -z "$package" ] && [ -z "${KERNEL:-}" ]; then
        say "apt has no kernel package in its lists: updating them"
        if [ "$(id -u)" = 0 ]; then apt-get -qq update; else sudo apt-get -qq update; fi || true
        package=$(kernel_package)
    fi
    [ -n "$package" ] || die "no kernel package was found: run apt-get update as root"
    say "fetching $package"
    rm -rf "$at" && mkdir -p "$at"
    # The user _apt may not write here. The signature was checked with the lists.
    # shellcheck disable=SC2046 # an empty result is no word
    (cd "$at" && ask_apt apt-get -qq -o APT::Sandbox::User="$(id -un)" download "$package" $(modules_package "$package"))
    for package in "$at/"*.deb; do dpkg-deb -x "$package" "$at/root"; done
    copy_modules "$at/root" "$kernel/modules"
    cp "$at/root/boot/"vmlinuz-* "$kernel/vmlinuz.new"
    mv "$kernel/vmlinuz.new" "$kernel/vmlinuz"
    rm -rf "$at" "$kernel/apt"
}
