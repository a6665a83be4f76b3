#!/bin/bash
# Builds the disk of the Debian machine: the stable release of this host's apt, with systemd, Slurm, Grid Engine and the libraries
# that pjw needs. The disk is kept in $VM/debian until a file in image/ changes. Snapshots of an older disk are removed then.
#
# Usage: framework/image.sh          (called by tests/vm/run, while no machine uses the disk)
# Environment: VM, the directory of the machines [target/vm]; KERNEL, see kernel.sh.
# Writes $VM/debian/{disk.ext4,key}, and the initrd next to its kernel. Without root it needs newuidmap (Debian's package uidmap).
set -euo pipefail
cd "$(dirname "$0")/../../.."
vm=${VM:-target/vm}
here=tests/vm/framework
image=$here/image
disk=$vm/debian
. "$here/kernel.sh"

packages() { grep -v '^#' "$image/packages"; }
release() { . /etc/os-release && echo "$VERSION_CODENAME"; }
key_of() { { release; cat "$@"; } | sha256sum | cut -c1-16; }

# Prints the archives of the distribution that this host uses, with its mirrors, and without third-party archives.
archives() {
    local origin
    for origin in Debian Ubuntu; do
        apt-get indextargets --format 'deb $(REPO_URI) $(RELEASE) $(COMPONENT)' 'Identifier: Packages' "Origin: $origin"
    done | sort -u
}

# Builds the root directory with all downloaded packages. It is a file of its own, so a change of the configuration downloads nothing.
build_base() {
    local base=$disk/base.tar key
    key=$(key_of "$image/packages")
    [ "$(cat "$base.key" 2>/dev/null)" != "$key" ] || [ ! -s "$base" ] || return 0
    [ -n "$(archives)" ] || die "apt has no archive of Debian or Ubuntu: run apt-get update as root"
    say "installing $(packages | wc -l) packages of $(release) into a new root"
    rm -f "$base.key"
    archives >"$disk/archives.list"
    # The cell of Grid Engine is made by `configure`: mmdebstrap gives the node no name.
    mmdebstrap --quiet --format=tar --variant=minbase --include="$(packages | tr '\n' ',' | sed 's/,$//')" \
        --dpkgopt='path-exclude=/usr/share/doc/*' --dpkgopt='path-exclude=/usr/share/man/*' \
        --dpkgopt='path-exclude=/usr/share/locale/*' --aptopt='Apt::Install-Recommends "false"' \
        --essential-hook='echo gridengine-common shared/gridengineconfig boolean false |
            chroot "$1" debconf-set-selections' \
        --skip=cleanup/apt/lists "$(release)" "$base.new" "$disk/archives.list" >"$disk/mmdebstrap.log" 2>&1 \
        || { tail -n 20 "$disk/mmdebstrap.log" >&2; die "mmdebstrap failed; its output is in $disk/mmdebstrap.log"; }
    mv "$base.new" "$base"
    echo "$key" >"$base.key"
}

# Needs root or a user namespace with many users: the files of the disk belong to several users.
fill_disk() {
    local root=$disk/root
    rm -rf "$root" && mkdir -p "$root"
    tar -C "$root" --numeric-owner --exclude=./dev/\* -xf "$disk/base.tar"
    mkdir "$root/setup" && cp "$image"/* "$root/setup/"
    # Programs in the new root need some devices. No other part of this machine is visible to them, including its host name, which
    # Grid Engine uses. The mounts end with the command.
    touch "$root/dev/null" "$root/dev/urandom" "$root/dev/zero"
    unshare --mount --uts sh -c '
        hostname node1
        for device in null urandom zero; do mount --bind "/dev/$device" "$0/dev/$device" || exit 1; done
        exec chroot "$0" /usr/bin/env -i PATH=/usr/sbin:/usr/bin:/sbin:/bin LANG=C.UTF-8 /setup/configure
        ' "$root" >"$disk/configure.log" 2>&1 \
        || { tail -n 20 "$disk/configure.log" >&2; die "configuring the new root failed; see $disk/configure.log"; }
    rm -rf "$root/setup" "$root/var/lib/apt/lists" "$root/var/cache/apt"
    mkdir -p "$root/var/lib/apt/lists/partial" "$root/var/cache/apt/archives/partial"
    rm -f "$disk/disk.new"
    /sbin/mke2fs -q -t ext4 -O ^has_journal -E lazy_itable_init=1 -d "$root" "$disk/disk.new" 3G >/dev/null
    rm -rf "$root"
}

as_root() {
    if [ "$(id -u)" = 0 ]; then "$@"; else unshare --map-root-user --map-auto -- "$@"; fi
}

build_initrd() {
    local root=$kernel/initrd.root
    rm -rf "$root" && mkdir -p "$root"/{bin,dev,modules,root}
    cp "$(command -v busybox)" "$root/bin/busybox"
    cp "$kernel/modules"/*.ko "$root/modules/" 2>/dev/null || true
    cp "$image/init" "$root/init"
    (cd "$root" && find . | busybox cpio -o -H newc 2>/dev/null) | gzip -1 >"$kernel/initrd"
    rm -rf "$root"
}

wanted_key() { key_of "$here/image.sh" "$here/kernel.sh" "$image"/*; }

has_disk() { [ -s "$disk/disk.ext4" ] && [ "$(cat "$disk/key" 2>/dev/null)" = "$(wanted_key)" ]; }
is_fresh() { has_disk && [ -s "$kernel/vmlinuz" ] && [ -s "$kernel/initrd" ]; }

build() {
    local since=$SECONDS
    is_fresh && return
    if has_disk; then
        fetch_kernel
        build_initrd
        return
    fi
    command -v mmdebstrap >/dev/null || die "no mmdebstrap: make deps-vm"
    mkdir -p "$disk"
    rm -f "$disk/key"
    # A snapshot can be used only with the disk on which it was taken.
    rm -rf "$disk"/snapshot-*
    fetch_kernel
    build_base
    as_root "$0" fill_disk
    build_initrd
    mv "$disk/disk.new" "$disk/disk.ext4"
    wanted_key >"$disk/key"
    say "the disk is built: $((SECONDS - since)) s, $(du -m "$disk/disk.ext4" | cut -f1) MB"
}

"${1:-build}"
