# What one does with a checkout. `make` alone lists the targets.

CARGO ?= cargo
# How long each fuzz target runs in fuzz-smoke.
SECONDS ?= 60

# How long each device is soaked, and which one alone: `once`, `time`, `cache` or
# `zoned`, which are two.
SOAK_SECONDS ?= 300
DEVICE ?=

# Version of mdBook, which makes the manual's site.
MDBOOK ?= 0.5.4
MDBOOK_ROOT = $(CURDIR)/target/tools/mdbook-$(MDBOOK)

# Version of cargo-deb, which makes the Debian package.
CARGO_DEB ?= 3.8.0
CARGO_DEB_ROOT = $(CURDIR)/target/tools/cargo-deb-$(CARGO_DEB)

# Where fio's source is, for `make fio`; without it Debian's own is fetched.
FIO_SRC ?=

# Builds all tests with clippy's lints, and runs them while the commands run that it is given.
TESTS = FIO_SRC='$(FIO_SRC)' CARGO='$(CARGO)' ./.ci/tests

.PHONY: help deps build-deps release-deps build lab book run fio deb image reproducible package-test image-test release-check check test root format lint suites unit loom shuttle miri gate bench fuzz-smoke soak crash crash-encrypted postgres object-stores guest

help:
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' Makefile | expand -t 14

deps: ## install the Debian packages that are missing, and only those
	@./.ci/deps test

build-deps:
	@./.ci/deps build

release-deps:
	@./.ci/deps release

build: build-deps ## the program, as it is released
	$(CARGO) build --locked --release -p blockyard

run: build ## build the program and serve the default yard until Ctrl-C
	./target/release/blockyard serve

fio: build-deps ## the engine for stock fio, and a line to paste that uses it
	@engine=$$(FIO_SRC='$(FIO_SRC)' CARGO='$(CARGO)' ./.ci/fio release) && \
	echo "fio --name=t --ioengine=external:$$engine --thread --dev='null:///n0?size=10G'" \
		"--rw=randread --bs=4k --time_based --runtime=5 --gtod_reduce=1"

$(CARGO_DEB_ROOT)/bin/cargo-deb:
	CARGO_PROFILE_DEV_DEBUG=0 $(CARGO) install --locked --debug --root $(CARGO_DEB_ROOT) \
		--version $(CARGO_DEB) cargo-deb

deb: build-deps $(CARGO_DEB_ROOT)/bin/cargo-deb ## a package for this release of Debian, in target/debian (docs/packages.md)
	@FIO_SRC='$(FIO_SRC)' CARGO='$(CARGO)' ./.ci/shipped ./.ci/deb $(CARGO_DEB_ROOT)/bin/cargo-deb

image: build-deps ## an OCI image for this machine's architecture, in target/image (docs/packages.md)
	@CARGO='$(CARGO)' ./.ci/shipped ./.ci/image

# Two builds of everything that is optimised: the better part of an hour on two processors.
reproducible: build-deps $(CARGO_DEB_ROOT)/bin/cargo-deb ## build package and image twice, in other folders, and compare them
	@FIO_SRC='$(FIO_SRC)' CARGO='$(CARGO)' ./.ci/reproducible $(CARGO_DEB_ROOT)/bin/cargo-deb

# Not part of `make test`: it makes two clean systems from the archive, and boots one of them.
package-test: release-deps deb ## install, use, upgrade and remove the package in clean systems; needs root and network
	./tests/packages/deb target/debian/*.deb

# Not part of `make test`: it needs the release build, and podman.
image-test: release-deps image ## run the image with a read-only root and no rights, by podman; needs root
	./tests/packages/image target/image/*.tar

# By hand, because it takes an hour on two processors. The package and the image that it runs are those
# of the first of the two builds.
release-check: root release-deps reproducible ## before a release: build what is shipped twice, compare, install and run it
	./tests/packages/deb target/reproducible/one/target/debian/*.deb
	./tests/packages/image target/reproducible/one/target/image/*.tar

check: deps ## before a commit: formatting, lints, tidy, unit tests of what changed (BASE=commit)
	@./.ci/check

test: root format suites ## everything: formatting, lints, all tests, models, the gate

# Incremental compilation makes a whole build a sixth dearer, and saves only in later ones; so do line
# numbers in backtraces, and optimisation across the parts of a crate.
# `make object-stores` runs what is skipped: its stores take minutes to build.
suites unit check: export BLOCKYARD_TEST_SKIP ?= object-stores
suites: export CARGO_INCREMENTAL ?= 0
suites: export CARGO_PROFILE_DEV_DEBUG ?= 0
suites: export CARGO_PROFILE_DEV_LTO ?= off
suites: deps
	$(TESTS) '$(MAKE) -s shuttle' '$(MAKE) -s loom' '$(MAKE) -s gate'

# Tests mount file systems, attach loop devices, and change users.
root:
	@[ "$$(id -u)" -eq 0 ] || { echo "make test and make release-check need root: their tests mount" \
		"file systems and attach loop devices; run them as root, or run make check, which needs" \
		"no root" >&2; exit 1; }

format: deps
	$(CARGO) fmt --all --check

lint: deps
	$(CARGO) clippy --locked --workspace --all-targets -- -D warnings

# Lints, unit and contract tests, tidy, and the whole program against clients that others wrote.
unit: deps
	$(TESTS)

# Every interleaving of every primitive, within the bounds of its model.
loom: deps
	RUSTFLAGS="--cfg loom" $(CARGO) test --locked -p blockyard-sync --lib --target-dir target/loom

# Interleavings by chance of more threads than loom can explore; a failure prints its seed.
# What is drawn is the same each time; SHUTTLE_RANDOM_SEED=N draws something else.
shuttle: export SHUTTLE_RANDOM_SEED ?= 1
shuttle: deps
	RUSTFLAGS="--cfg shuttle" $(CARGO) test --locked -p blockyard-core -p blockyard-ram \
		--no-default-features --test atomic_zone_set_by_chance --test gate_by_chance \
		--test scheduler_by_chance --test store_by_chance --target-dir target/shuttle

# Undefined behaviour and data races in the pool of RAM disks; needs a nightly toolchain with Miri
# (`rustup component add --toolchain nightly miri rust-src`), so `make test` leaves it out.
miri: ## the pool of RAM disks under Miri
	MIRIFLAGS=-Zmiri-disable-isolation $(CARGO) +nightly miri test --locked -p blockyard-ram \
		--test store --target-dir target/miri

gate: deps ## instructions per I/O, counted, against those in crates/null/benches/instructions.txt
	$(CARGO) bench --locked -p blockyard-null -p blockyard-vhost --bench instructions --bench wrapped

lab: build ## build the measurements, blockyard-lab (docs/lab.md)
	$(CARGO) build --locked --release -p blockyard-lab

# The pages link to one another by their paths in the tree, so the book's source has the same paths.
book: build-deps ## the manual as a site with search: target/book/index.html
	@test -x $(MDBOOK_ROOT)/bin/mdbook || $(CARGO) install --locked --debug --root $(MDBOOK_ROOT) \
		--version $(MDBOOK) --no-default-features --features search mdbook
	rm -rf target/book target/book-src
	mkdir -p target/book-src
	cp -R README.md ARCHITECTURE.md STYLE.md CHANGELOG.md LICENSE docs target/book-src
	sed -e 's#](#](docs/#' -e 's#](docs/../#](#' docs/SUMMARY.md >target/book-src/SUMMARY.md
	$(MDBOOK_ROOT)/bin/mdbook build docs

bench: deps lab fio gate ## all measurements of docs/measuring.md, which takes about an hour
	$(CARGO) bench --locked -p blockyard-null --bench throughput
	./target/release/blockyard-lab all
	./target/release/blockyard-lab scale zone-locks --cores 48

fuzz-smoke: deps ## each fuzz target for SECONDS=60
	./fuzz/run $(SECONDS)

soak: ## submitters come and go under a scheduler that is switched, 5 minutes a device (DEVICE=cache: that one)
	BLOCKYARD_SOAK_SECONDS=$(SOAK_SECONDS) $(CARGO) test --locked -p blockyard-yard \
		--test scheduler_soak -- --nocapture --test-threads=1 $(DEVICE)

# Each prints what it did; a round that fails prints how to run it again. Three pools of each of 40
# kinds are cut five times each under the tests' own client, and ten more under fio, which verifies.
crash: deps crash-encrypted ## 200 kills of a server of volumes and of zones, 600 power cuts below it, 50 under fio, 20 replaced disks, errors, damage, rot
	BLOCKYARD_CRASH_ROUNDS=200 $(CARGO) test --locked -p blockyard --test crash -- --nocapture \
		kills damage
	BLOCKYARD_CRASH_ROUNDS=200 $(CARGO) test --locked -p blockyard-null --test on_media -- kill
	BLOCKYARD_CRASH_ROUNDS=10 $(CARGO) test --locked -p blockyard --test crash -- --nocapture \
		cuts::fio errors nbdkit
	BLOCKYARD_CRASH_ROUNDS=120 $(CARGO) test --locked -p blockyard --test crash -- --nocapture \
		cuts::nothing_durable cuts::a_
	BLOCKYARD_CRASH_ROUNDS=300 $(CARGO) test --locked -p blockyard --test crash -- --nocapture \
		rot
	BLOCKYARD_CRASH_ROUNDS=20 $(CARGO) test --locked -p blockyard --test crash -- --nocapture \
		replace

# As above, with an encrypted volume in each round: 200 kills under the tests' own client and 200 under
# fio, 50 power cuts under each, or fewer where a pool is one that is full and not encrypted.
crash-encrypted: deps ## 400 kills of a server of encrypted volumes, and 100 power cuts below it
	BLOCKYARD_CRASH_ENCRYPTED=1 BLOCKYARD_CRASH_ROUNDS=200 $(CARGO) test --locked -p blockyard \
		--test crash -- --nocapture kills
	BLOCKYARD_CRASH_ENCRYPTED=1 BLOCKYARD_CRASH_ROUNDS=10 $(CARGO) test --locked -p blockyard \
		--test crash -- --nocapture cuts::fio
	BLOCKYARD_CRASH_ENCRYPTED=1 BLOCKYARD_CRASH_ROUNDS=20 $(CARGO) test --locked -p blockyard \
		--test crash -- --nocapture cuts::nothing_durable_is_lost_when

postgres: deps ## PostgreSQL on a volume commits for 60 seconds, and all of it is killed
	BLOCKYARD_POSTGRES_SECONDS=60 $(CARGO) test --locked -p blockyard --test crash -- \
		--nocapture postgres --skip an_object_store

# MinIO and versitygw are built once, into a cache outside the tree (docs/object-store.md).
object-stores: export BLOCKYARD_TEST_SKIP =
object-stores: deps ## pools on MinIO and versitygw, through connections that break, with boto3 as the witness
	./.ci/object-stores
	$(CARGO) test --locked -p blockyard-object --test stores -- --nocapture --test-threads=2
	$(CARGO) test --locked -p blockyard --test interop -- --nocapture object_store:: object_faults::
	$(CARGO) test --locked -p blockyard --test crash -- --nocapture an_object_store

# Not part of `make test`: it needs network and 2 GB for the images of the guests, the first time some
# minutes to make them, and then 30 to 40 minutes where QEMU has no KVM.
guest: deps ## devices over NBD, NVMe/TCP, vhost-user-blk and ublk, in guests with Linux 6.1, 6.12 and 7.2
	$(CARGO) build --locked -p blockyard
	./tests/guest/guest build
	./tests/guest/file_systems target/debug/blockyard
	./tests/guest/vhost target/debug/blockyard
	./tests/guest/vhost_zoned target/debug/blockyard
	./tests/guest/ublk target/debug/blockyard
	./tests/guest/file target/debug/blockyard
	./tests/guest/nvme target/debug/blockyard
	./tests/guest/nvme_faults target/debug/blockyard
	./tests/guest/nvme_compare target/debug/blockyard
