#!/usr/bin/env bash
# The tests of numerics under other code paths of this CPU's libraries, side by side: part of what another vendor's machine
# would show. MKL_CBWR chooses the branch of MKL, ATEN_CPU_CAPABILITY that of torch's own loops: each of theirs is in one run.
# tests/cpu_paths.sh PYTHON [PYTEST-ARGUMENT...]
set -uo pipefail
cd "$(dirname "$0")/.."

python=$1
shift
paths=("MKL_CBWR=COMPATIBLE ATEN_CPU_CAPABILITY=default" "MKL_CBWR=AVX2 ATEN_CPU_CAPABILITY=avx2")
files=(tests/unit/test_{experts,deepseek,deepseek_determinism,model_families}.py
    tests/unit/test_cpu_{row_checks,determinism,embed,score}.py tests/contract/test_attention_contract.py)
# Not what takes long and shows no more than the rest: both runs are to take less than two minutes on two cores.
chosen='not greedy and not any_schedule and not sampled_output and not (test_deepseek.py and logits_equal)'
folder=$(mktemp -d)
trap 'kill $(jobs -p) 2>/dev/null; rm -rf "$folder"' EXIT

one() {
    local variables
    read -ra variables <<<"$1"
    env "${variables[@]}" OMP_NUM_THREADS=1 "$python" -m pytest -q -m 'not full' -k "$chosen" -p no:cacheprovider "${files[@]}" "${@:2}" >"$folder/$1" 2>&1
    echo $? >"$folder/$1.code"
}

for path in "${paths[@]}"; do one "$path" "$@" & done
wait
failed=0
for path in "${paths[@]}"; do
    echo "=== $path: $(tail -n 1 "$folder/$path")"
    [ "$(cat "$folder/$path.code")" = 0 ] || { cat "$folder/$path"; failed=1; }
done
exit $failed
