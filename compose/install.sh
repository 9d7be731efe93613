#!/bin/sh
# Inside the image build: pip install, without dependencies (the requirement files name every package, pinned).
#
#   install.sh INDEX_URL|none ARGUMENT...    INTO (an environment, default /opt/radixmesh) or TARGET (a plain folder) say where
#
# Wheels under /wheels are all that is used if there is any; else the index is asked, and EXTRA_INDEX_URL where it is set.
set -eu
index=$1
shift
if [ "$index" = none ]; then
    set -- --no-index "$@"
elif ls /wheels/*.whl >/dev/null 2>&1; then
    set -- --no-index --find-links /wheels "$@"
else
    set -- --index-url "$index" ${EXTRA_INDEX_URL:+--extra-index-url "$EXTRA_INDEX_URL"} "$@"
fi
if [ -n "${TARGET:-}" ]; then
    exec /opt/pip/bin/pip install --no-deps --only-binary :all: --target "$TARGET" "$@"
fi
exec /opt/pip/bin/pip --python "${INTO:-/opt/radixmesh}/bin/python" install --no-deps --only-binary :all: "$@"
