# The guests' kernel: the distribution's own, for virtual machines; unpacked, never installed. Sourced by bare.sh
# and image.sh, which set `vm` (where the machines are kept).
#
# Leaves $vm/vmlinuz, and in $vm/modules what a machine with disks and ports needs that is not built in, numbered in
# the order of loading.

say() { printf 'vm: %s\n' "$*" >&2; }
die() { say "$*"; exit 1; }

# Disk, ports, and an interface that is not the loopback.
modules="virtio_pci virtio_blk virtio_console ext4 dummy"

# What the distribution's package of kernels for virtual machines stands for now.
kernel_package() {
    local meta
    for meta in linux-image-cloud-amd64 linux-image-virtual; do
        apt-cache depends "$meta" 2>/dev/null | awk '$1 == "Depends:" && $2 ~ /^linux-image-[0-9]/ { print $2 }' || true
    done | head -n 1
}

# Where the modules of a kernel are: in its own package (Debian), or beside it (Ubuntu).
modules_package() {
    local beside=${1/linux-image-/linux-modules-}
    ! apt-cache show "$beside" >/dev/null 2>&1 || echo "$beside"
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
    [ ! -s "$vm/vmlinuz" ] || [ "$(cat "$vm/modules/list" 2>/dev/null)" != "$modules" ] || return 0
    local package
    package=$(kernel_package)
    if [ -z "$package" ]; then
        say "apt knows no kernel package: updating its lists"
        if [ "$(id -u)" = 0 ]; then apt-get -qq update; else sudo apt-get -qq update; fi || true
        package=$(kernel_package)
    fi
    [ -n "$package" ] || die "no kernel package was found: run apt-get update as root"
    say "fetching $package"
    rm -rf "$vm/kernel" && mkdir -p "$vm/kernel"
    # _apt may not write here; the signature was checked with the lists.
    # shellcheck disable=SC2046 # no package is no word
    (cd "$vm/kernel" && apt-get -qq -o APT::Sandbox::User="$(id -un)" download "$package" $(modules_package "$package"))
    for package in "$vm/kernel/"*.deb; do dpkg-deb -x "$package" "$vm/kernel/root"; done
    copy_modules "$vm/kernel/root" "$vm/modules"
    cp "$vm/kernel/root/boot/"vmlinuz-* "$vm/vmlinuz.new"
    mv "$vm/vmlinuz.new" "$vm/vmlinuz"
    rm -rf "$vm/kernel"
}
