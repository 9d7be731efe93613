#!/usr/bin/env bash
# Puts the wheels of the images into compose/wheels/, with the pip settings of this machine: the build itself then asks no index.
#
#   compose/fetch_wheels.sh [PIP]          default: pip of .venv if there is one, else pip3
#
# Meant for an image of the same Python version as that pip's (torch's wheel comes from whatever index pip is told of, e.g.
# PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu; PyPI's own holds CUDA libraries).
set -euo pipefail
cd "$(dirname "$0")"
pip=${1:-$([ -x ../.venv/bin/pip ] && echo ../.venv/bin/pip || echo pip3)}
requirements=(-r requirements/build.txt -r requirements/daemons.txt -r requirements/worker-cpu.txt)
stamp=$(cat requirements/{build,daemons,worker-cpu}.txt | sha256sum | cut -c 1-16)
[ -f "wheels/$stamp.fetched" ] && exit 0
rm -f wheels/*.whl wheels/*.fetched
"$pip" download --quiet --no-deps --only-binary :all: --dest wheels "${requirements[@]}"
touch "wheels/$stamp.fetched"
