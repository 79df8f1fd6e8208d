#!/usr/bin/env bash
# What some tests need beside Python packages: OpenSSH's server and client, for the tests of `longtake launch`, which
# start servers of their own on ports of their own (the machine's own service is not started), and Chromium, for those of
# `longtake ui`. What cannot be installed has its tests skipped, and they say so.
set -euo pipefail
missing=()
[ -x /usr/sbin/sshd ] || command -v sshd >/dev/null 2>&1 || missing+=(openssh-server)
command -v ssh >/dev/null 2>&1 && command -v ssh-keygen >/dev/null 2>&1 || missing+=(openssh-client)
command -v chromium >/dev/null 2>&1 || command -v google-chrome >/dev/null 2>&1 || missing+=(chromium)
[ ${#missing[@]} -gt 0 ] || exit 0

skip() {
    echo "tools/install_test_tools.sh: ${missing[*]} not installed ($1); tests that start an SSH server or open a browser are skipped" >&2
    exit 0
}
command -v apt-get >/dev/null 2>&1 || skip "no apt-get here"
[ "$(id -u)" = 0 ] || skip "needs root: sudo apt-get install ${missing[*]}"
install() { RUNLEVEL=1 DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends "${missing[@]}"; }
install >/dev/null 2>&1 || { apt-get update -qq >/dev/null 2>&1 && install >/dev/null 2>&1; } || skip "apt-get failed"
