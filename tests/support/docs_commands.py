"""Every shell command and snippet of README and docs/: the test that runs it, or why none does.

tests/contract/test_docs.py holds this list against the pages.
"""

from __future__ import annotations

from typing import NamedTuple


class NotHere(NamedTuple):
    """A command that no test runs as printed."""

    reason: str


_HERE = "tests/mesh/test_docs_commands.py"
_MESH = f"{_HERE}::test_commands_beside_a_running_mesh_do_what_pages_say"
_MORE = f"{_HERE}::test_further_snippets_run_as_printed"
_BY_HAND = f"{_HERE}::test_daemons_that_are_started_by_hand_answer"
_IDS = f"{_HERE}::test_packed_ids_are_read_and_written"
_LOADS = f"{_HERE}::test_loads_measure_the_mesh"
_FILES = f"{_HERE}::test_commands_that_need_no_mesh"
_CI = NotHere("CI runs it (.ci/run)")
_DOCKER = NotHere("needs a Docker engine; tests/compose runs the same files in one")
_GPU = NotHere("needs a GPU; tests/gpu has the worker, and flags are checked")
_OWN_MODEL = f"{_HERE}::test_a_folder_of_the_readers_is_served"
_MINUTES = NotHere("takes minutes to hours: make test-full runs these tests")
_PLACEHOLDERS = NotHere("a part of a command line; tests/mesh/test_secure_mesh.py starts daemons with these flags")
_FRAGMENT = NotHere("a fragment that is only compiled")
_LANGUAGE = "tests/mesh/test_language.py::test_the_page_runs_as_printed"
_ROLL = NotHere("takes minutes: tests/mesh/test_cluster_roll.py runs the verb on processes that do nothing")
_QUICK_HOPS = "tests/mesh/test_bench_hops.py::test_a_quick_run_prints_one_json_object_that_covers_every_hop"

COMMANDS: dict[str, str | NotHere] = {
    "make run": NotHere("serves until it is stopped; `radixmesh up` is started by tests/mesh/test_cluster.py"),
    "make test": _CI,
    "make install": _CI,
    "CLIENTS_OUTCOME=tests/clients/outcome.json make test-clients": NotHere(
        "takes minutes and some GB: it is the test itself, and tests/contract reads what it wrote"
    ),
    "make check": _CI,
    ".venv/bin/python -m pytest -q tests/unit tests/contract": _CI,
    ".venv/bin/python -m pytest -q tests/mesh/test_recitation.py": _CI,
    ".venv/bin/python -m pytest -q $(git grep -l daemons.router 'tests/unit/test_*' 'tests/hostile/test_*' "
    "'tests/contract/test_*')": _CI,
    ".venv/bin/python -m pytest -q tests/mesh/test_router_*.py": _CI,
    "radixmesh serve ./my-model": _OWN_MODEL,
    "radixmesh serve ./my-model --served-model-name mine,default --port 8080 --gpu cpu": _OWN_MODEL,
    "radixmesh serve ./my-model --gpu cuda": _GPU,
    "radixmesh up -f compose/gpu.yml": _GPU,
    "radixmesh worker --backend cuda --model /models/llama-3.2-3b --num-slots 512 --max-tokens-per-step 8192": _GPU,
    "radixmesh chat --temperature 0": _MESH,
    "curl -N localhost:8000/v1/completions -H content-type:application/json -d "
    '\'{"prompt": "The Tyger", "temperature": 0, "max_tokens": 64, "stream": true}\'': _MESH,
    "curl localhost:8000/v1/embeddings -H content-type:application/json -d "
    '\'{"input": ["The Tyger", "Lorelei"]}\'': _MESH,
    "radixmesh bench serve --dataset multi-turn --num-requests 24 --oracle": _LOADS,
    "radixmesh bench serve --dataset shared-prefix --prefix-len 512 --num-requests 64 --concurrency 16 "
    "--json out.json --plot out.svg": _LOADS,
    "radixmesh bench serve --target http://127.0.0.1:8000/v1 --input-len 512 --output-len 64 --num-requests 40 "
    "--request-rate 8": _LOADS,
    "radixmesh bench serve --target http://127.0.0.1:8000/v1 --dataset sharegpt --file chats.json --chat": _LOADS,
    "radixmesh bench one-batch --batch-size 1 4 --input-len 128 --output-len 8": _LOADS,
    "radixmesh bench offline-throughput --num-prompts 8 --input-len 64 --output-len 8": _LOADS,
    "radixmesh bench scheduler --workload mixed --policy lpm --running 64 --cache-tokens 63243 --speed 20 "
    "--json": _LOADS,
    "radixmesh tokenizer --listen 127.0.0.1:50061 --model compose/models/tiny-llama": _BY_HAND,
    "radixmesh detokenizer --listen 127.0.0.1:50062 --model compose/models/tiny-llama": _BY_HAND,
    "radixmesh worker --listen 127.0.0.1:50063 --model compose/models/tiny-llama --backend simulated": _BY_HAND,
    "python -m pdb -c continue -m radixmesh.cli scheduler --listen 127.0.0.1:50064 --workers 127.0.0.1:50063 "
    "--step-timeout-s 3600": _BY_HAND,
    "radixmesh router --listen 127.0.0.1:50065 --tokenizers 127.0.0.1:50061 --detokenizers 127.0.0.1:50062 "
    "--schedulers 127.0.0.1:50064": _BY_HAND,
    'radixmesh generate --router 127.0.0.1:50065 --max-tokens 32 "The Tyger"': _BY_HAND,
    "python -m radixmesh.daemons.runtime.telemetry.metrics_table docs/observability.md": _FILES,
    "compose/make_certificates.sh tls client alice": _FILES,
    'grpcurl -plaintext -d \'{"text": "The Tyger", "stop": {"maxTokens": 8}}\' localhost:50050 '
    "radixmesh.router.v1.RouterService/Generate": NotHere(
        "needs grpcurl; tests/clients has a client that knows reflection alone"
    ),
    "echo AQAAAEoAAAA3AQAA | base64 -d | od -An -v -w4 -t d4": _IDS,
    "python3 -c 'import base64, struct; print(base64.b64encode(struct.pack(\"<3i\", 1, 74, 311)).decode())'": _IDS,
    "docker compose -f compose/local.yml up --build": _DOCKER,
    "docker compose -f compose/local.yml -f compose/observe.yml up --build": _DOCKER,
    "sudo compose/make_base.sh radixmesh-base:bookworm": _DOCKER,
    "compose/fetch_wheels.sh": NotHere("downloads wheels; CI runs it (.ci/run)"),
    "RADIXMESH_BASE=radixmesh-base:bookworm RADIXMESH_BUILD_NETWORK=none docker compose -f compose/local.yml "
    "build": _DOCKER,
    "radixmesh roll -f compose/scale.yml": _ROLL,
    "radixmesh roll -f compose/scale.yml router": _ROLL,
    "compose/roll.sh compose/scale.yml": _DOCKER,
    "radixmesh up -f compose/local.yml": "tests/mesh/test_recitation.py",
    "python bench/hops.py": _QUICK_HOPS,
    "python bench/gpu/four.py --gpus 4 --minutes 25 --out four-gpus.json": NotHere(
        "needs GPUs; tests/unit/test_bench_gpu_four.py has its order of events"
    ),
    "python bench/observe.py --picture docs/dashboard.png --seconds 240 --scale router=2 --scale tokenizer=2 "
    "--scale detokenizer=2": NotHere(
        "needs Prometheus, Chromium and npm; tests/mesh/test_dashboard_live.py asks the queries"
    ),
    "python -m pytest tests/mesh/test_kills.py -m full -s": _MINUTES,
    "python -m pytest tests/mesh/test_double_kills.py -m full -s": _MINUTES,
    "python -m pytest tests/mesh/test_chaos.py -m full -s": _MINUTES,
    "radixmesh worker ... --tls-cert-file worker.pem --tls-key-file worker.key --tls-ca-file ca.pem "
    "--tls-client-ca-file ca.pem": _PLACEHOLDERS,
    "radixmesh router ... --tls-cert-file router.pem --tls-key-file router.key --tls-ca-file ca.pem "
    "--tls-client-ca-file router-clients.pem": _PLACEHOLDERS,
}

# "page language number": number of the snippet on its page, from 1.
SNIPPETS: dict[str, str | NotHere] = {
    "README.md python 1": _MESH,
    "README.md python 2": _MESH,
    "README.md js 1": _MESH,
    "docs/http.md python 1": _MORE,
    "docs/deploy.md yaml 1": NotHere("a part of a Kubernetes pod; no cluster here"),
    **{f"docs/language.md python {number}": _LANGUAGE for number in range(1, 6)},
    "docs/local-cluster.md python 1": NotHere("a fragment; tests/mesh/test_cluster.py makes these calls"),
    "docs/models.md python 1": _FRAGMENT,
    "docs/models.md python 2": _FRAGMENT,
    "clients/python/README.md python 1": _MORE,
    "clients/python/README.md python 2": _MORE,
    "clients/python/README.md python 3": NotHere("a fragment; tests/mesh/test_guided.py has its calls"),
    "clients/python/README.md python 4": NotHere("a fragment; tests/mesh/test_secure_mesh.py makes such a client"),
    "clients/node/README.md js 1": _MORE,
    "clients/node/README.md js 2": NotHere("a fragment; clients/node/test/options.test.js has its options"),
    "clients/node/README.md js 3": NotHere("a fragment; tests/mesh/test_secure_mesh.py runs the Node client with TLS"),
}
