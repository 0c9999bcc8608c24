#!/usr/bin/env bash
# Install the Ceph daemons that localstack/rgw/start.sh runs, from the distribution (Debian, Ubuntu). Root or sudo.
set -euo pipefail

binaries=(ceph ceph-mon ceph-osd curl monmaptool radosgw radosgw-admin)
missing() { for binary in "${binaries[@]}"; do command -v "$binary" >/dev/null || printf '%s ' "$binary"; done; }

if [ -z "$(missing)" ]; then
    echo "Ceph RGW is installed: $(radosgw --version)"
    exit 0
fi

as_root=()
if [ "$(id -u)" -ne 0 ]; then as_root=(sudo); fi
export DEBIAN_FRONTEND=noninteractive

# A mirror in the middle of its own update answers wrongly for a minute; lists that are a little old still install.
for pause in 5 15 30 0; do
    if "${as_root[@]}" apt-get -q update; then break; fi
    echo "apt-get update failed; next try in ${pause} s" >&2
    sleep "$pause"
done

# Without the recommended packages: the daemons are started by start.sh, not by systemd, and need no manager modules.
"${as_root[@]}" apt-get install -q -y --no-install-recommends radosgw ceph-osd ceph-mon ceph-common curl

if [ -n "$(missing)" ]; then
    echo "still missing after the installation: $(missing)" >&2
    exit 1
fi
echo "installed: $(radosgw --version)"
