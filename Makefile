# The commands of the README. `make demo` and `make test` need Rust and nothing else: on Debian and Ubuntu they
# install what is missing.

SHELL := /bin/bash
export PATH := $(HOME)/.cargo/bin:$(PATH)

TARGET  := $(or $(CARGO_TARGET_DIR),target)
RELEASE := $(TARGET)/release

# Where `make install` puts things; DESTDIR is for those who build packages.
DESTDIR    ?=
PREFIX     ?= /usr
SYSCONFDIR ?= /etc
UNITDIR    ?= $(PREFIX)/lib/systemd/system
# Where Debian's Python looks for modules; for another Python: python3 -c 'import sysconfig; print(sysconfig.get_path("purelib"))'
PYTHONDIR  ?= $(PREFIX)/lib/python3/dist-packages
COMPLETIONS = $(DESTDIR)$(PREFIX)/share
LIB         = $(DESTDIR)$(PREFIX)/lib
HOOKS       = $(PREFIX)/share/pjw/hooks
SHARE       = $(DESTDIR)$(PREFIX)/share/pjw

CARGO_DENY_VERSION := 0.20.2

.PHONY: help demo demo-programs check lint test warm-vm test-vm bench bench-quick bpf build deps deps-bpf deps-vm python mpi languages peers deny built install package uninstall

help:
	@echo 'make demo      two competing jobs on this machine, without pjwd and with it'
	@echo 'make check     format, lints, unit tests, decisions, rules for the source tree, in three minutes: before each commit'
	@echo 'make lint      format, lints and the documentation of the crates'
	@echo 'make test      everything that can be tested on this machine'
	@echo 'make test-vm   pjwd on virtual machines of 16 CPUs and 2 NUMA nodes, beside systemd and real schedulers'
	@echo 'make bench     the figures of the README; results in target/bench (make peers mpi installs what they are compared with)'
	@echo 'make bench-quick  all benches for some seconds each, to see that they work'
	@echo 'make build     pjwd, pjwctl, libpjw_spawn.so and libpjw_job.so, optimised, in $(RELEASE)'
	@echo 'make bpf       the program in the kernel, from its source: needs clang and llvm, which nothing else does'
	@echo 'make install   what was built, with units, man pages and completions; PREFIX=$(PREFIX). Needs no cargo after make build'
	@echo 'make package   the same as a Debian package, in target/package'
	@echo 'make uninstall puts back what the daemon changed, and removes all of that except the configuration'

demo: demo-programs
	@$(RELEASE)/pjw-demo --out target/demo

demo-programs: deps
	cargo build --release --locked -p pjwd -p pjwctl -p pjw-benches --features pjwd/bpf

build: deps
	cargo build --release --locked -p pjwd -p pjwctl -p pjw-spawn-c -p pjw-job-c --features pjwd/bpf
	@# A C program loads a library by the name with the number.
	ln -sf libpjw_spawn.so $(RELEASE)/libpjw_spawn.so.0
	ln -sf libpjw_job.so $(RELEASE)/libpjw_job.so.0

# What finds most mistakes in the least time. One command builds all of it, with the features that `make test` has.
check: deps
	cargo fmt --all --check
	cargo clippy --workspace --all-targets --locked --features pjwd/bpf -- -D warnings
	cargo test --workspace --locked --features pjwd/bpf --lib --test decisions --test tidy

# Format, lints and documentation, without a test.
lint: deps
	cargo fmt --all --check
	cargo clippy --workspace --all-targets --locked --features pjwd/bpf -- -D warnings
	cargo clippy -p pjw-linux --all-targets --locked -- -D warnings
	RUSTDOCFLAGS='-D warnings' cargo doc --workspace --no-deps --locked

# With LINTS=elsewhere, the caller runs `make lint`: .ci/run does so beside the tests.
test: deps python mpi languages $(if $(filter elsewhere,$(LINTS)),,lint)
	PJW_TEST_PYTHON=$(CURDIR)/target/python/bin/python3 cargo test --workspace --locked --features pjwd/bpf
	@# With the features of the tests, so that nothing is compiled twice.
	cargo build --quiet --workspace --locked --features pjwd/bpf --lib --bins --tests
	PROGRAMS=$(TARGET)/debug tests/package/run
	@if cargo deny --version >/dev/null 2>&1; then $(MAKE) --no-print-directory deny; else \
	    echo 'skipped: licences and sources of the dependencies (make deny installs what that needs)'; fi

# What takes long before the first case: the disk and the snapshot of the Debian machine. A failure shows in `make test-vm`,
# which tries again.
warm-vm: deps-vm
	-tests/vm/run --warm

test-vm: package deps-vm
	PROGRAMS=$(RELEASE) tests/vm/run

# The benches run the real programs as children, which must be built first.
bench: deps
	cargo build --release --locked -p pjwd -p pjwctl --features pjwd/bpf
	cargo bench --locked -p pjw-benches --features pjwd/bpf --bench '*'

bench-quick: deps
	PJW_BENCH_QUICK=1 $(MAKE) --no-print-directory bench

# The program in the kernel is checked in, so that nobody needs clang to build the rest; a test says if it is older than
# its source.
BPF := crates/pjw-linux/src/bpf
bpf: deps-bpf
	$(call compile_bpf,$(BPF),tasks)
	$(call compile_bpf,$(BPF)/lent,lent)

# $(call compile_bpf,FOLDER,NAME): NAME.bpf.o and NAME.bpf.sum from NAME.bpf.c.
define compile_bpf
cd $(1) && $(CLANG) -O2 -g -Wall -Wextra -Werror -target bpfel -mcpu=v2 -fdebug-prefix-map="$$PWD"=. \
    -c $(2).bpf.c -o $(2).bpf.o
cd $(1) && $(LLVM_STRIP) -g $(2).bpf.o && sha256sum $(2).bpf.c $(2).bpf.o >$(2).bpf.sum
endef

CLANG      ?= clang
LLVM_STRIP ?= llvm-strip

# $(call install_missing,PACKAGES): nothing is asked of apt if they are all there. It looks twice, because apt removes
# an installed package that does not fit the new ones: a newer qemu-utils, when it installs an older qemu-system-x86.
define install_missing
	for attempt in first second; do missing=; for package in $(1); do \
	    dpkg-query -W -f='$${Status}' $$package 2>/dev/null | grep -q ' installed$$' || missing="$$missing $$package"; \
	done; \
	[ -n "$$missing" ] || exit 0; \
	if ! command -v apt-get >/dev/null; then \
	    echo "missing, and there is no apt-get here. Install what Debian calls:$$missing" >&2; exit 1; fi; \
	if [ "$$(id -u)" = 0 ]; then as_root=; \
	elif command -v sudo >/dev/null; then as_root=sudo; \
	else echo "missing, and neither root nor sudo is at hand. As root: apt-get install$$missing" >&2; exit 1; fi; \
	echo "installing$$missing"; \
	$$as_root apt-get -qq update || echo 'apt-get update failed; going on with the lists that are there' >&2; \
	$$as_root env DEBIAN_FRONTEND=noninteractive apt-get -qq -y -o DPkg::Lock::Timeout=300 --no-install-recommends install $$missing || exit; \
	done
endef

# hwloc 2.4 or later, a C compiler as the linker, and cargo with its usual components.
deps:
	@command -v cargo >/dev/null || { echo 'there is no cargo: install Rust as https://rustup.rs says' >&2; exit 1; }
	@pkg-config --atleast-version=2.4 hwloc 2>/dev/null && command -v cc >/dev/null && exit 0; \
	$(call install_missing,libhwloc-dev libudev-dev pkg-config gcc libc6-dev)
	@{ cargo clippy --version && cargo fmt --version; } >/dev/null 2>&1 || rustup component add clippy rustfmt

deps-bpf:
	@command -v $(CLANG) >/dev/null && command -v $(LLVM_STRIP) >/dev/null && exit 0; \
	$(call install_missing,clang llvm)

# The virtual machines are emulated by QEMU. One boots the distribution's kernel into a busybox, the other into a root
# of the distribution's packages, which apt fetches: see tests/vm/README.md.
deps-vm:
	@command -v qemu-system-x86_64 >/dev/null && command -v qemu-img >/dev/null && command -v mmdebstrap >/dev/null \
	    && command -v python3 >/dev/null && [ -x /sbin/mke2fs ] && [ -x /sbin/depmod ] \
	    && command -v busybox >/dev/null && ! ldd "$$(command -v busybox)" >/dev/null 2>&1 \
	    && { [ "$$(id -u)" = 0 ] || command -v newuidmap >/dev/null; } \
	    && { [ -s target/vm/vmlinuz ] || apt-cache show linux-image-cloud-amd64 linux-image-virtual 2>/dev/null | grep -q .; } && exit 0; \
	$(call install_missing,qemu-system-x86 qemu-utils mmdebstrap e2fsprogs kmod busybox-static python3 uidmap)

# Two tests speak to the daemon with a Varlink client that nobody here wrote. Without it they are skipped.
python:
	@target/python/bin/python3 -c 'import varlink' 2>/dev/null && exit 0; \
	python3 -c 'import ensurepip' 2>/dev/null || { $(call install_missing,python3-venv); }; \
	{ python3 -m venv target/python && target/python/bin/pip -q install varlink; } >/dev/null 2>&1 \
	    || echo "skipped: Python's varlink module can't be installed here; two tests will say so"

# Two tests show that MPI leaves an affinity jail by itself, and that the warden puts it back. Without it they are skipped.
mpi:
	@command -v mpirun.openmpi >/dev/null && command -v mpirun.mpich >/dev/null && exit 0; \
	( $(call install_missing,openmpi-bin mpich) ) \
	    || echo "skipped: Open MPI and MPICH can't be installed here; the tests of what is missing will say so"

# Tests run a Go and a Java program in a job. Without a compiler its tests are skipped.
languages:
	@command -v go >/dev/null || ( $(call install_missing,golang-go) ) \
	    || echo "skipped: Go can't be installed here; its tests will say so"
	@command -v javac >/dev/null || ( $(call install_missing,default-jdk-headless) ) \
	    || echo "skipped: a JDK can't be installed here; its test will say so"

# What the benches compare with, beside MPI; one that is missing is skipped, with the reason. Debian starts numad when it
# is installed, and it moves what runs on the machine: it is stopped again if it was not there before.
peers:
	@had_numad=; command -v numad >/dev/null && had_numad=1; \
	( $(call install_missing,cgroup-tools numad util-linux) ) \
	    || echo "skipped: cgrulesengd and numad can't be installed here; the benches will say so"; \
	[ -n "$$had_numad" ] || [ ! -d /run/systemd/system ] || ! command -v numad >/dev/null \
	    || if [ "$$(id -u)" = 0 ]; then systemctl disable --now numad; else sudo systemctl disable --now numad; fi

# Licences and sources of everything that is linked in; what is known of their flaws is told where the network allows.
deny:
	@cargo deny --version >/dev/null 2>&1 || cargo install --locked --version $(CARGO_DENY_VERSION) cargo-deny
	cargo deny --locked check licenses bans sources
	@cargo deny --locked check advisories || echo 'advisories are reported, not refused'

# Where there is no cargo that works, as for root by sudo, what another user built is installed. The cargo of rustup is there also
# without a toolchain.
built:
	@if ! [ -x $(RELEASE)/pjwd ] || ! [ -x $(RELEASE)/pjwctl ] || ! [ -e $(RELEASE)/libpjw_spawn.so ] || ! [ -e $(RELEASE)/libpjw_job.so ]; then \
	    echo "can't install: there are no programs in $(RELEASE), and no cargo here to build them. As the user that has Rust:" \
	        "make build; then repeat make install, with the same CARGO_TARGET_DIR if that is set" >&2; exit 1; fi; \
	newer=$$(find crates Cargo.toml Cargo.lock -type f -newer $(RELEASE)/pjwctl -print -quit); \
	[ -z "$$newer" ] || echo "$$newer is newer than $(RELEASE)/pjwctl, and there is no cargo here to build it again" >&2

install: $(if $(shell PATH="$(PATH)" cargo --version 2>/dev/null),build,built)
	install -Dm755 $(RELEASE)/pjwd $(DESTDIR)$(PREFIX)/bin/pjwd
	install -Dm755 $(RELEASE)/pjwctl $(DESTDIR)$(PREFIX)/bin/pjwctl
	install -Dm644 $(RELEASE)/libpjw_spawn.so $(LIB)/libpjw_spawn.so.0
	ln -sf libpjw_spawn.so.0 $(LIB)/libpjw_spawn.so
	install -Dm644 crates/pjw-spawn-c/include/pjw_spawn.h $(DESTDIR)$(PREFIX)/include/pjw_spawn.h
	install -Dm644 crates/pjw-spawn-c/include/pjw_farm.h $(DESTDIR)$(PREFIX)/include/pjw_farm.h
	install -Dm644 crates/pjw-spawn-c/include/pjw_tasks.h $(DESTDIR)$(PREFIX)/include/pjw_tasks.h
	install -Dm644 crates/pjw-spawn-c/man/pjw_spawn.3 $(COMPLETIONS)/man/man3/pjw_spawn.3
	install -Dm644 crates/pjw-spawn-c/man/pjw_farm.3 $(COMPLETIONS)/man/man3/pjw_farm.3
	install -Dm644 crates/pjw-spawn-c/man/pjw_tasks.3 $(COMPLETIONS)/man/man3/pjw_tasks.3
	install -Dm644 crates/pjw-spawn-c/examples/stencil.c $(SHARE)/examples/stencil.c
	install -Dm644 crates/pjw-spawn-c/examples/farm.c $(SHARE)/examples/farm.c
	install -Dm644 crates/pjw-job-c/examples/adaptive_team.c $(SHARE)/examples/adaptive_team.c
	install -Dm644 crates/pjw-job/examples/thread_pool/pool.rs $(SHARE)/examples/pool.rs
	install -Dm644 crates/pjw-job/examples/spin_lock/lock.rs $(SHARE)/examples/lock.rs
	install -Dm644 crates/pjw-spawn-c/python/pjw_farm/__init__.py $(DESTDIR)$(PYTHONDIR)/pjw_farm/__init__.py
	install -Dm644 $(RELEASE)/libpjw_job.so $(LIB)/libpjw_job.so.0
	ln -sf libpjw_job.so.0 $(LIB)/libpjw_job.so
	install -Dm644 crates/pjw-job-c/include/pjw_job.h $(DESTDIR)$(PREFIX)/include/pjw_job.h
	install -Dm644 crates/pjw-job-c/man/pjw_job.3 $(COMPLETIONS)/man/man3/pjw_job.3
	install -d $(COMPLETIONS)/man/man1 $(COMPLETIONS)/bash-completion/completions \
	    $(COMPLETIONS)/zsh/site-functions $(COMPLETIONS)/fish/vendor_completions.d
	$(RELEASE)/pjwctl man --dir $(COMPLETIONS)/man/man1
	$(RELEASE)/pjwctl completions bash >$(COMPLETIONS)/bash-completion/completions/pjwctl
	$(RELEASE)/pjwctl completions zsh >$(COMPLETIONS)/zsh/site-functions/_pjwctl
	$(RELEASE)/pjwctl completions fish >$(COMPLETIONS)/fish/vendor_completions.d/pjwctl.fish
	install -d $(DESTDIR)$(UNITDIR)
	for unit in pjwd.service pjwd.socket pjw.slice; do \
	    sed 's|/usr/bin/pjwd|$(PREFIX)/bin/pjwd|' systemd/$$unit >$(DESTDIR)$(UNITDIR)/$$unit || exit 1; done
	install -Dm644 systemd/pjw.sysusers $(DESTDIR)$(PREFIX)/lib/sysusers.d/pjw.conf
	install -Dm644 systemd/pjw.tmpfiles $(DESTDIR)$(PREFIX)/lib/tmpfiles.d/pjw.conf
	cd config/hooks && for file in */*; do \
	    mode=644; if [ -x $$file ]; then mode=755; fi; \
	    install -Dm$$mode $$file $(abspath $(DESTDIR))$(HOOKS)/$$file && \
	    sed -i 's|/usr/bin/pjwctl|$(PREFIX)/bin/pjwctl|; s|/usr/share/pjw/|$(PREFIX)/share/pjw/|' $(abspath $(DESTDIR))$(HOOKS)/$$file || exit 1; done
	install -Dm644 config/grafana/pjw.json $(SHARE)/grafana/pjw.json
	install -Dm644 config/prometheus/pjw-alerts.yaml $(SHARE)/prometheus/pjw-alerts.yaml
	@# A configuration that is there is somebody's work.
	[ -e $(DESTDIR)$(SYSCONFDIR)/pjw/pjwd.toml ] || install -Dm644 config/pjwd.toml $(DESTDIR)$(SYSCONFDIR)/pjw/pjwd.toml

package: build
	@systemd/debian/build $(RELEASE) target/package

# Every mask is put back first, on a machine that runs what is removed, in the words of the package.
# The hooks are to be taken out of the batch system's configuration first.
uninstall:
	@[ -n "$(DESTDIR)" ] || [ ! -x $(PREFIX)/bin/pjwd ] || if [ "$$(id -u)" = 0 ]; \
	    then PJWD=$(PREFIX)/bin/pjwd sh systemd/debian/prerm remove; else $(PREFIX)/bin/pjwd --release-all; fi
	rm -f $(DESTDIR)$(PREFIX)/bin/pjwd $(DESTDIR)$(PREFIX)/bin/pjwctl
	rm -f $(LIB)/libpjw_spawn.so $(LIB)/libpjw_spawn.so.0 $(DESTDIR)$(PREFIX)/include/pjw_spawn.h
	rm -f $(DESTDIR)$(PREFIX)/include/pjw_farm.h $(COMPLETIONS)/man/man3/pjw_spawn.3 $(COMPLETIONS)/man/man3/pjw_farm.3
	rm -f $(DESTDIR)$(PREFIX)/include/pjw_tasks.h $(COMPLETIONS)/man/man3/pjw_tasks.3
	rm -rf $(SHARE)/examples $(DESTDIR)$(PYTHONDIR)/pjw_farm
	rm -f $(LIB)/libpjw_job.so $(LIB)/libpjw_job.so.0 $(DESTDIR)$(PREFIX)/include/pjw_job.h
	rm -f $(COMPLETIONS)/man/man3/pjw_job.3
	rm -f $(COMPLETIONS)/man/man1/pjwctl.1 $(COMPLETIONS)/man/man1/pjwctl-*.1
	rm -f $(COMPLETIONS)/man/man5/pjwd.toml.5 $(COMPLETIONS)/man/man8/pjwd.8
	rm -f $(COMPLETIONS)/bash-completion/completions/pjwctl $(COMPLETIONS)/zsh/site-functions/_pjwctl
	rm -f $(COMPLETIONS)/fish/vendor_completions.d/pjwctl.fish
	rm -f $(DESTDIR)$(UNITDIR)/pjwd.service $(DESTDIR)$(UNITDIR)/pjwd.socket $(DESTDIR)$(UNITDIR)/pjw.slice
	rm -f $(DESTDIR)$(PREFIX)/lib/sysusers.d/pjw.conf $(DESTDIR)$(PREFIX)/lib/tmpfiles.d/pjw.conf
	rm -rf $(DESTDIR)$(HOOKS) $(SHARE)/grafana $(SHARE)/prometheus
	rmdir $(DESTDIR)$(PREFIX)/share/pjw 2>/dev/null || true
	@[ -n "$(DESTDIR)" ] || [ "$$(id -u)" != 0 ] || sh systemd/debian/postrm remove
