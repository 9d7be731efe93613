"""The shipped dashboard against Grafana's own schema, and against the metrics that the daemons serve."""

import copy
import itertools
import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.cog.plugins import register_default_plugins
from grafana_foundation_sdk.models import dashboard as schema

from radixmesh.daemons.runtime.telemetry.metrics import Metrics

COMPOSE = Path(__file__).parents[2] / "compose"
OBSERVE = COMPOSE / "observe"
DASHBOARD = json.loads((OBSERVE / "grafana" / "dashboards" / "radixmesh.json").read_text())
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
EXPRS = [(panel["title"], target["expr"]) for panel in PANELS for target in panel["targets"]]
METRICS = {info.name: info for info in Metrics().infos if not info.replaced_by}
DAEMONS = {"router", "tokenizer", "detokenizer", "scheduler", "worker"}


def lost_in_schema(tree):
    """Paths of what Grafana's model of a dashboard does not keep as it is: keys it does not know, values it changes."""
    register_default_plugins()
    kept = json.loads(JSONEncoder().encode(schema.Dashboard.from_json(copy.deepcopy(tree))))

    def compare(mine, theirs, path):
        if isinstance(mine, dict) and isinstance(theirs, dict):
            for key, value in mine.items():
                yield from compare(value, theirs[key], f"{path}.{key}") if key in theirs else [f"{path}.{key}"]
        elif isinstance(mine, list) and isinstance(theirs, list) and len(mine) == len(theirs):
            for number, (one, other) in enumerate(zip(mine, theirs, strict=True)):
                yield from compare(one, other, f"{path}[{number}]")
        elif mine != theirs:
            yield path

    return list(compare(tree, kept, ""))


def test_every_key_is_one_that_grafana_knows():
    assert lost_in_schema(DASHBOARD) == []


@pytest.mark.parametrize(
    "spoil",
    [
        lambda tree: tree.update(colour="red"),
        lambda tree: tree["panels"][0]["options"].update(graphmode="area"),
        lambda tree: tree["panels"][0]["targets"][0].update(query="up"),
        lambda tree: tree["panels"][9]["fieldConfig"]["defaults"]["custom"].update(filling=1),
        lambda tree: tree["templating"]["list"][1].update(multiple=True),
    ],
)
def test_a_misspelt_key_anywhere_would_be_found(spoil):
    tree = copy.deepcopy(DASHBOARD)
    spoil(tree)
    assert len(lost_in_schema(tree)) == 1


def test_panels_lie_on_the_grid_side_by_side():
    boxes = [panel["gridPos"] for panel in DASHBOARD["panels"]]
    cells = [
        (x, y)
        for box in boxes
        for x, y in itertools.product(range(box["x"], box["x"] + box["w"]), range(box["y"], box["y"] + box["h"]))
    ]
    assert len(cells) == len(set(cells)) and max(x for x, _ in cells) < 24
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(ids) == len(set(ids))
    for panel in PANELS:
        refs = [target["refId"] for target in panel["targets"]]
        assert len(refs) == len(set(refs)) and panel["description"], panel["title"]


def test_queries_name_metrics_and_labels_that_daemons_serve():
    for title, expr in EXPRS:
        selectors = re.findall(r"\b(radixmesh_\w+|up)\{([^}]*)\}", expr)
        assert len(selectors) == len(re.findall(r"\b(?:radixmesh_\w+|up)\b", expr)) > 0, f"{title}: {expr}"
        for name, matchers in selectors:
            if name == "up":
                continue
            base = re.sub(r"_(bucket|sum|count)$", "", name)
            info = METRICS.get(base) or METRICS.get(name)
            assert info is not None, f"{title}: no daemon serves {name}"
            assert (info.kind == "histogram") == (base != name), f"{title}: {name} is a {info.kind}"
            labels = {"job", "instance", *info.labels}
            used = set(re.findall(r"(\w+)=~?\"", matchers))
            assert used <= labels, f"{title}: {name} has no label {used - labels}"
            by = {label for group in re.findall(r"by \(([^)]*)\)", expr) for label in group.split(", ")} - {"le"}
            assert by <= labels, f"{title}: {name} has no label {by - labels}"
            jobs = re.findall(r'job="(\w+)"', matchers)
            assert set(jobs) <= set(info.daemons), f"{title}: {jobs} does not serve {name}"
            # A count that two daemons keep, each for itself, would be counted twice without a job.
            if "job" not in used and not {"job"} & by:
                assert len(info.daemons) == 1, f"{title}: {name} is served by {info.daemons}"
            if name.endswith("_total") and not title.endswith("since start"):
                assert f"rate({name}{{" in expr, f"{title}: {name} only rises"
            assert "instance" in used, f"{title}: {name} ignores the choice of instances"


def test_what_an_operator_asks_for_is_there():
    asked = {
        "output_tokens_total", "time_to_first_token_seconds", "inter_token_latency_seconds", "kv_usage_ratio",
        "device_busy_seconds_total", "cached_tokens_total", "requests_queued", "pages", "hop_seconds",
    }  # fmt: skip
    text = " ".join(expr for _, expr in EXPRS)
    assert {name for name in asked if f"radixmesh_{name}" not in text} == set()
    assert [variable["name"] for variable in DASHBOARD["templating"]["list"]] == ["datasource", "daemon", "instance"]


def test_prometheus_scrapes_every_daemon_by_the_name_and_port_that_compose_gives_it():
    config = yaml.safe_load((OBSERVE / "prometheus.yml").read_text())
    for job in config["scrape_configs"]:
        (discovery,) = job["dns_sd_configs"]
        assert discovery["names"][0] == job["job_name"] and discovery["type"] == "A"
    assert {job["job_name"] for job in config["scrape_configs"]} == DAEMONS
    looked_up = {name for job in config["scrape_configs"] for name in job["dns_sd_configs"][0]["names"]}
    (port,) = {job["dns_sd_configs"][0]["port"] for job in config["scrape_configs"]}
    for path in COMPOSE.glob("*.yml"):
        if path.name.startswith("observe"):
            continue
        for name, service in yaml.safe_load(path.read_text())["services"].items():
            if name == "front":  # Carries connections; it has no metrics of its own.
                continue
            aliases = {name, *((service.get("networks") or {}).get("default") or {}).get("aliases", [])}
            assert aliases & looked_up, f"{path.name}: nobody scrapes {name}"
            assert service["environment"]["RADIXMESH_METRICS_LISTEN"] == f"0.0.0.0:{port}", f"{path.name}: {name}"
            assert not any(str(port) in str(published) for published in service.get("ports", [])), path.name


def test_the_overlay_mounts_what_exists_and_its_parts_agree():
    overlay = yaml.safe_load((COMPOSE / "observe.yml").read_text())
    services = overlay["services"]
    mounts = [volume for service in services.values() for volume in service.get("volumes", [])]
    for mount in mounts:
        source = mount.split(":")[0]
        assert (COMPOSE / source).exists() if source.startswith(".") else source in overlay["volumes"], mount
    sources = yaml.safe_load((OBSERVE / "grafana" / "provisioning" / "datasources" / "radixmesh.yml").read_text())
    by_uid = {source["uid"]: source for source in sources["datasources"]}
    default = next(variable for variable in DASHBOARD["templating"]["list"] if variable["name"] == "datasource")
    chosen = by_uid[default["current"]["value"]]
    assert chosen["type"] == default["query"] and chosen["name"] == default["current"]["text"]
    for source in by_uid.values():
        host = re.fullmatch(r"http://([\w-]+):\d+", source["url"])
        assert host is not None and host[1] in services, source["url"]
    (provider,) = yaml.safe_load((OBSERVE / "grafana" / "provisioning" / "dashboards" / "radixmesh.yml").read_text())[
        "providers"
    ]
    assert f"./observe/grafana/dashboards:{provider['options']['path']}:ro" in services["grafana"]["volumes"]
    collector = yaml.safe_load((OBSERVE / "otel-collector.yml").read_text())
    for pipeline in collector["service"]["pipelines"].values():
        for kind in ("receivers", "processors", "exporters"):
            assert set(pipeline[kind]) <= set(collector[kind])
    assert {str(exporter["endpoint"]).split(":")[0] for exporter in collector["exporters"].values()} <= set(services)
    for daemon in DAEMONS:
        host, _, port = services[daemon]["environment"]["RADIXMESH_OTLP_ENDPOINT"].rpartition("//")[2].partition(":")
        listens = {end["endpoint"].partition(":")[2] for end in collector["receivers"]["otlp"]["protocols"].values()}
        assert host in services and port in listens


@pytest.mark.skipif(shutil.which("promtool") is None, reason="no promtool on PATH (Debian: apt-get install prometheus)")
def test_prometheus_itself_accepts_the_scrape_configuration():
    run = subprocess.run(
        ["promtool", "check", "config", str(OBSERVE / "prometheus.yml")], capture_output=True, text=True, timeout=30
    )
    assert run.returncode == 0, run.stdout + run.stderr
