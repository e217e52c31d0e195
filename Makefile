# Targets for contributors. `make` alone prints the list.

# The directory of upstream's nydus-image and nydusd: $LAZULI_NYDUS, else they are built.
NYDUS := $(or $(LAZULI_NYDUS),$(CURDIR)/target/nydus/bin)
NYDUS_VERSION := 2.2.0
ROOT := $(if $(filter 0,$(shell id -u)),,sudo -E env PATH=$(PATH))
BENCHES := hello update scale prefetch pull beside fs density pods build
FUZZ_SECONDS ?= 60
MINUTES ?= 2
# Scenarios in which the kubelet or the service's processes meet groups.
WITH_CGROUP_V2 := statistics,ephemeral-storage,user-namespace,worker-killed,both-killed,cgroup-drivers
# The commit that `package-test` upgrades from.
EARLIER := 6f5581c

.DEFAULT_GOAL := help
.PHONY: help build deb static demo demo-containerd demo-fleet p2p test package-test metrics-test \
	test-clients test-helm e2e-kubernetes e2e-cgroup-v2 test-kernels test-vm soak check deny compat \
	multimake bench $(addprefix bench-,$(BENCHES)) fuzz clean binary cri wire treelist
.SILENT: help

help: ## this list
	sed -n 's/^\([a-z0-9-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 17

build: ## the release binary, target/release/lazuli
	scripts/install-deps build
	$(MAKE) --no-print-directory binary

demo: ## start a real image before it has arrived, beside pulling it first (about 3 minutes)
	scripts/install-deps demo
	$(MAKE) --no-print-directory binary
	$(ROOT) scripts/demo

demo-containerd: ## the same through a containerd of its own, beside overlayfs (about 5 minutes)
	scripts/install-deps demo-containerd
	$(MAKE) --no-print-directory binary cri
	$(ROOT) scripts/demo-containerd

demo-fleet: ## one image on NODES=8 nodes, with and without Dragonfly (5 minutes, the first time 40)
	scripts/install-deps demo-fleet
	$(MAKE) --no-print-directory binary wire
	$(ROOT) env LAZULI_DRAGONFLY="$$(scripts/dragonfly)" scripts/demo-fleet $(NODES)

test: ## everything: units, format, kernel, end to end
	scripts/install-deps test
	scripts/test

deb: ## the Debian package, in target/deb
	scripts/install-deps deb
	DEB_RULES_REQUIRES_ROOT=no debian/rules binary
	debian/rules clean

static: ## programs for amd64 and arm64 that need no library, tried (20 minutes), in target/static
	scripts/install-deps static
	$(ROOT) tests/static/run $$($(ROOT) scripts/static)

package-test: deb ## package and DaemonSet on Debian systems (minutes, the first time more)
	scripts/install-deps package-test
	$(MAKE) --no-print-directory binary cri
	$(ROOT) tests/package/run "$$(ls -t target/deb/lazuli_*.deb | head -n 1)" \
		"$$(scripts/earlier-package $(EARLIER))" target/release/cri "$$(scripts/corpus redis busybox)"
	$(ROOT) tests/kubernetes/run target/release/lazuli

metrics-test: ## alerts, dashboard and metrics in a real Prometheus (a minute)
	scripts/install-deps metrics-test
	$(MAKE) --no-print-directory binary
	$(ROOT) tests/metrics/run target/release/lazuli

test-clients: ## docs/clients.md, with real clients (8 minutes, the first time 20); CLIENTS=nerdctl
	scripts/install-deps test-clients
	$(MAKE) --no-print-directory binary cri wire treelist
	$(ROOT) tests/clients/run target/release/lazuli $(CLIENTS)

test-helm: ## the Helm chart, rendered and linted (a minute, the first time 4)
	scripts/install-deps test-helm
	tests/helm/run "$$(scripts/helm)"

e2e-kubernetes: ## a cluster, with MINUTES=2 of pods (half an hour, the first time longer)
	scripts/install-deps e2e-kubernetes
	$(MAKE) --no-print-directory binary cri wire
	$(ROOT) tests/kubernetes/cluster/run --minutes $(MINUTES) \
		--table target/kubernetes/seen.md target/release/lazuli target/release \
		"$$(scripts/corpus busybox debian-slim redis redis-next python-slim python)"

e2e-cgroup-v2: ## some of that with cgroup v2, in qemu; KERNELS=6.12 (half an hour)
	scripts/install-deps e2e-kubernetes test-kernels
	$(MAKE) --no-print-directory binary cri wire
	corpus="$$(scripts/corpus busybox debian-slim redis redis-next)"; \
	for kernel in $(or $(KERNELS),6.12); do \
		$(ROOT) tests/kubernetes/cluster/guest $$kernel target/release/lazuli target/release \
			"$$corpus" --only $(WITH_CGROUP_V2) || exit 1; done

p2p: ## fleets, misses and outages of Dragonfly, to target/bench (30 minutes)
	scripts/install-deps demo-fleet
	$(MAKE) --no-print-directory binary wire
	for verb in "fleet --rounds 2" \
		"fleet --rounds 2 --cpus 0.2 --nodes 1,2,4,8 --ways lazuli,p2p \
			--json target/bench/fleet-cpus.json" \
		"misses --set recommended,default,seed,patient,hasty" outages model; do \
		$(ROOT) env LAZULI_DRAGONFLY="$$(scripts/dragonfly)" bench/lazuli-bench $$verb || exit 1; done

test-kernels: ## the drivers under Debian's kernels 5.10 to 7.3 in qemu; KERNELS="6.1 6.12"
	scripts/install-deps test-kernels
	$(ROOT) tests/kernels/run $(KERNELS)

test-vm: ## virtual machines on an image's disks, in qemu; KERNELS="6.1 6.12" (10 minutes)
	scripts/install-deps test-vm
	$(ROOT) tests/vm/run $(KERNELS)

soak: ## the long reliability tests: kills, damaged images, containerd (two hours)
	scripts/install-deps test
	scripts/soak

check: ## rustfmt, clippy and rustdoc, warnings are errors
	scripts/install-deps build
	cargo fmt --all --check
	cargo clippy --all-targets --locked -- -D warnings
	RUSTDOCFLAGS='-D warnings' cargo doc --no-deps --locked

deny: ## licences, sources and duplicates of dependencies, and advisories where their database is
	scripts/install-deps build
	scripts/deny

compat: ## images and signatures exchanged with upstream's tools (the first time builds them)
	scripts/install-deps compat
	$(MAKE) --no-print-directory binary $(NYDUS)/nydusd
	cargo build --locked -p lazuli-testkit --bins
	$(ROOT) tests/compat/run --nydus $(NYDUS)
	LAZULI_COSIGN="$$(scripts/cosign)" cargo test --locked -p lazuli --test it sign::cosign

bench: ## all benchmarks, and a page of the results (hours); one alone: bench-hello
	$(MAKE) --no-print-directory $(addprefix bench-,$(BENCHES))
	bench/lazuli-bench report --html target/bench/report.html \
		$(patsubst %,target/bench/%.json,hello update scale fs density build)

$(addprefix bench-,$(BENCHES)): bench-%:
	scripts/install-deps bench
	$(MAKE) --no-print-directory binary cri wire $(NYDUS)/nydusd
	$(ROOT) env LAZULI_NYDUS=$(NYDUS) CONTAINERD="$$(scripts/containerd)/containerd" \
		LAZULI_CONTENDERS="$$(scripts/contenders)" bench/lazuli-bench $*

multimake: ## a C file with every compiler of Debian, started lazily (the first time 20 minutes)
	scripts/install-deps multimake
	$(MAKE) --no-print-directory binary wire
	$(ROOT) examples/multimake/multimake

fuzz: ## every fuzz target for a minute; FUZZ_SECONDS=10
	scripts/install-deps fuzz
	scripts/fuzz $(FUZZ_SECONDS)

clean: ## remove what was built, also the corpus images
	cargo clean

binary:
	cargo build --release --locked -p lazuli

cri wire treelist:
	cargo build --release --locked -p lazuli-testkit --bin $@

$(CURDIR)/target/nydus/bin/nydusd:
	cargo install nydus-rs --version $(NYDUS_VERSION) --locked --root target/nydus
