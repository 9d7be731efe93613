#!/usr/bin/env bash
# A base image without any registry: Debian's Python, by debootstrap, as root.
#
#   compose/make_base.sh [IMAGE]      default radixmesh-base:bookworm; then build with BASE=IMAGE
#
# SUITE and MIRROR choose another Debian (its python3 must be >= 3.11). CACHE names a folder that keeps the archive between runs;
# with IMAGE "none" that archive is all that is made, and no engine is needed.
set -euo pipefail
image=${1:-radixmesh-base:bookworm}
suite=${SUITE:-bookworm}
mirror=${MIRROR:-http://deb.debian.org/debian}
cache=${CACHE:-}
archive=$suite-base.tar

die() { echo "make_base.sh: $1" >&2; exit 1; }
[ "$(id -u)" = 0 ] || die "debootstrap needs root"
command -v debootstrap >/dev/null || die "install debootstrap first (apt-get install debootstrap)"

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
if [ -n "$cache" ] && [ -f "$cache/$archive" ]; then
    echo "base from $cache/$archive"
    [ "$image" = none ] || docker import "$cache/$archive" "$image" >/dev/null
    exit 0
fi
[ "$image" != none ] || [ -n "$cache" ] || die "say where the archive is to be kept: CACHE=FOLDER"
debootstrap --variant=minbase --include=python3,python3-venv,ca-certificates "$suite" "$work/root" "$mirror" >"$work/log" \
    || { tail -n 20 "$work/log" >&2; die "debootstrap failed"; }
# What only a Debian that is still being installed to needs. Licences (copyright files) stay.
rm -rf "$work/root"/var/cache/apt/* "$work/root"/var/lib/apt/lists/* "$work/root"/var/log/* "$work/root"/usr/share/{man,info,locale,lintian}
find "$work/root/usr/share/doc" -type f ! -name copyright -delete
find "$work/root/usr" -name __pycache__ -prune -exec rm -rf {} +
tar -C "$work/root" --numeric-owner -cf "$work/$archive" .
[ "$image" = none ] || docker import "$work/$archive" "$image" >/dev/null
if [ -n "$cache" ]; then
    # Whole or not at all, also when this is cut short between two file systems.
    mkdir -p "$cache" && mv "$work/$archive" "$cache/$archive.part" && mv "$cache/$archive.part" "$cache/$archive"
fi
