#!/usr/bin/env bash
# What `make cluster` needs beside Python packages: Prometheus's promtool, iproute2, Slurm and munge from Debian's
# packages, and names for the four nodes that the tests make of this machine. The tests write the configuration and start munged,
# slurmctld and four slurmd of their own, on ports of their own (tests/cluster/slurm.py); services of the machine are not
# started.
set -euo pipefail
fail() {
    echo "tools/install_slurm.sh: $1" >&2
    exit 1
}
[ "$(id -u)" = 0 ] || fail "needs root, for apt-get, /etc/hosts and slurmd; run it with sudo"
missing=()
for program in munged slurmctld slurmd sbatch ip; do
    command -v "$program" >/dev/null 2>&1 || missing+=("$program")
done
if [ ${#missing[@]} -gt 0 ]; then
    command -v apt-get >/dev/null 2>&1 || fail "no ${missing[*]} and no apt-get here; install Slurm, munge and iproute2"
    install() { RUNLEVEL=1 DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends slurm-wlm munge iproute2; }
    install >/dev/null 2>&1 || { apt-get update -qq && install; } || fail "apt-get install slurm-wlm munge iproute2 failed"
fi
if ! command -v promtool >/dev/null 2>&1; then # alone, without the service that its package starts
    cd "$(mktemp -d)"
    { apt-get download -qq prometheus >/dev/null 2>&1 || { apt-get update -qq && apt-get download -qq prometheus; }; } &&
        dpkg -x prometheus_*.deb . && install usr/bin/promtool /usr/local/bin/ || fail "apt-get download prometheus failed"
fi
for number in 0 1 2 3; do
    grep -qw "longtake-n$number" /etc/hosts || echo "127.0.0.1 longtake-n$number" >>/etc/hosts
done
