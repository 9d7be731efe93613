"""compose/local.yml in a Docker engine: what is in the images, what the containers may do, and that each may die."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import Iterator

import grpc
import pytest
from openai import OpenAI
from support.containers import COMPOSE, Project
from support.engine import Engine
from support.jobs import Job, recitations
from support.mesh import BUGS

from radixmesh.client import AsyncClient
from radixmesh.common.v1 import common_pb2
from radixmesh.daemons.runtime.rpc.channel import open_channel
from radixmesh.router.v1 import router_pb2, router_pb2_grpc

SERVICES = ("tokenizer", "detokenizer", "worker", "scheduler", "router")
STATELESS = ("tokenizer", "detokenizer", "scheduler", "router")
DAEMONS_IMAGE, WORKER_IMAGE = "radixmesh/daemons:local", "radixmesh/worker:local"

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def project(images: Engine) -> Iterator[Project]:
    project = Project(engine=images, file=COMPOSE / "local.yml")
    try:
        started = time.monotonic()
        project.up()
        print(f"\nup: {time.monotonic() - started:.1f} s")
        yield project
    finally:
        project.down()


@pytest.fixture(scope="module")
def jobs() -> list[Job]:
    """Recitations whose every token is known; the longest first."""
    return sorted(recitations(with_sampled=False), key=lambda job: -len(job.answers[0].ids))


async def recite(project: Project, jobs: list[Job]) -> None:
    """All at once, each with the right answer."""
    async with AsyncClient([project.router], resume_timeout_s=120) as client, asyncio.timeout(150):
        answers = await asyncio.gather(*(job.run(client) for job in jobs))
    for job, answer in zip(jobs, answers, strict=True):
        assert answer == job.answers, job.name


def test_the_daemons_image_is_small_and_has_nothing_to_build_or_train_with(images: Engine) -> None:
    size = int(images.docker("image", "inspect", "-f", "{{.Size}}", DAEMONS_IMAGE))
    assert size <= 350e6
    names = ("torch", "pip", "setuptools", "huggingface_hub")
    probe = f"import importlib.util as u; print([name for name in {names} if u.find_spec(name)])"
    run = ("run", "--rm", "--network", "none", "--read-only")
    assert images.docker(*run, DAEMONS_IMAGE, "python", "-c", probe).strip() == "[]"
    assert "torch" in images.docker(*run, WORKER_IMAGE, "python", "-c", probe)


@pytest.mark.parametrize("image", [DAEMONS_IMAGE, WORKER_IMAGE])
def test_images_say_what_they_are_and_run_as_nobody(images: Engine, image: str) -> None:
    config = json.loads(images.docker("image", "inspect", "-f", "{{json .Config}}", image))
    assert config["User"] == "10001:10001"
    assert config["Healthcheck"]["Test"][:3] == ["CMD", "radixmesh", "health"]
    labels = {"title", "description", "licenses", "revision"}
    assert labels <= {name.removeprefix("org.opencontainers.image.") for name in config["Labels"]}
    assert not [word for word in config["Env"] if "PROXY" in word.upper() or "INDEX" in word.upper()]


def test_torch_lies_on_top_of_the_layers_that_both_images_share(images: Engine) -> None:
    layers = [
        json.loads(images.docker("image", "inspect", "-f", "{{json .RootFS.Layers}}", image))
        for image in (DAEMONS_IMAGE, WORKER_IMAGE)
    ]
    assert layers[1][: len(layers[0])] == layers[0]


def test_no_container_has_privileges_and_each_has_limits(project: Project) -> None:
    containers = project.containers()
    assert len(containers) == len(SERVICES)
    for container in containers:
        host = project.inspect(container)["HostConfig"]
        assert isinstance(host, dict)
        assert host["ReadonlyRootfs"] and not host["Privileged"] and host["CapDrop"] == ["ALL"]
        assert host["Memory"] > 0 and host["NanoCpus"] > 0
        script = (
            "grep -E '^(CapEff|CapBnd|NoNewPrivs|Uid):' /proc/1/status;"
            " touch /etc/x 2>&1 || true; touch /tmp/x && echo tmp"
        )
        said = project.engine.docker("exec", container, "sh", "-c", script).split()
        assert said[said.index("CapEff:") + 1] == said[said.index("CapBnd:") + 1] == "0" * 16, said
        assert said[said.index("NoNewPrivs:") + 1] == "1"
        assert set(said[said.index("Uid:") + 1 :][:4]) == {"10001"}
        assert "Read-only" in said and said[-1] == "tmp"


async def test_it_recites_over_grpc(project: Project, jobs: list[Job]) -> None:
    await recite(project, jobs)


def test_it_recites_to_the_openai_client(project: Project, jobs: list[Job]) -> None:
    client = OpenAI(base_url=project.openai_url, api_key="none")
    job = next(job for job in jobs if isinstance(job.prompt, str) and len(job.answers[0].ids) < 500)
    stream = client.completions.create(
        model=client.models.list().data[0].id, prompt=str(job.prompt), temperature=0, max_tokens=1024, stream=True
    )
    pieces = [chunk.choices[0].text for chunk in stream if chunk.choices]
    assert "".join(pieces) == job.answers[0].text
    assert len([piece for piece in pieces if piece]) > 3, "it was not streamed"
    chat = next(job for job in jobs if job.messages and len(job.answers[0].ids) < 500)
    answer = client.chat.completions.create(
        model="", messages=[dict(message) for message in chat.messages or ()], temperature=0, max_tokens=1024
    )  # type: ignore[call-overload]
    assert answer.choices[0].message.content == chat.answers[0].text


@pytest.mark.parametrize("service", SERVICES)
async def test_a_daemon_that_crashes_comes_back_and_no_stream_notices(
    project: Project, jobs: list[Job], service: str
) -> None:
    container = project.container(service)
    before = project.inspect(container)["RestartCount"]
    of_a_few_seconds = [job for job in jobs if len(job.answers[0].ids) < 600][:4]
    reciting = asyncio.create_task(recite(project, of_a_few_seconds))
    await asyncio.sleep(0.5)
    await asyncio.to_thread(project.kill_process, container)
    await reciting
    await asyncio.to_thread(project.wait_healthy, container)
    assert project.inspect(container)["RestartCount"] == int(str(before)) + 1
    await recite(project, jobs[-2:])


async def test_daemons_that_an_operator_kills_or_restarts_serve_again(project: Project, jobs: list[Job]) -> None:
    """`docker kill` counts as an operator's order: the engine leaves the container down until it is started."""
    for service in SERVICES:
        await asyncio.to_thread(project.engine.docker, "kill", project.container(service))
        reciting = asyncio.create_task(recite(project, jobs[-2:]))  # Waits for it.
        await asyncio.to_thread(project.compose, "up", "--detach", "--no-build", "--no-recreate", service)
        await reciting
    await asyncio.to_thread(project.compose, "restart", *SERVICES)
    for container in project.containers():
        await asyncio.to_thread(project.wait_healthy, container)
    await recite(project, jobs[-4:])


async def test_more_tokenizers_are_found_while_serving(project: Project, jobs: list[Job]) -> None:
    texts = [job for job in jobs[-6:] if job.prompt is None or isinstance(job.prompt, str)]
    stop = asyncio.Event()

    async def keep_reciting() -> int:
        rounds = 0
        while not stop.is_set():
            await recite(project, texts[:2])
            rounds += 1
        return rounds

    reciting = asyncio.create_task(keep_reciting())
    await asyncio.to_thread(project.up, "--no-recreate", "--scale", "tokenizer=3", "tokenizer")
    containers = project.containers("tokenizer")
    assert len(containers) == 3
    # The router asks them in turn as soon as it has found them: with the first gone, the two new ones answer.
    await asyncio.sleep(2.5)
    await asyncio.to_thread(project.engine.docker, "stop", containers[0])
    await recite(project, texts)
    stop.set()
    assert await reciting > 0
    found = {line["address"] for line in project.logs(project.container("router")) if line["event"] == "replica_found"}
    assert len([address for address in found if str(address).startswith("tokenizer:")]) >= 3, found
    project.up("--no-recreate", "--scale", "tokenizer=1", "tokenizer")
    await recite(project, texts[:2])


async def test_logs_are_json_and_name_the_request(project: Project) -> None:
    request_id = "asked-by-the-log-test"
    # Its deadline passes at the router: the Python client would look at its own clock and leave first.
    request = router_pb2.GenerateRequest(
        request_id=request_id,
        text="The Tyger",
        stop=common_pb2.StopParams(max_tokens=900, ignore_eos=True),
        deadline_ms=1000,
    )
    async with open_channel(project.router) as channel:
        with contextlib.suppress(grpc.aio.AioRpcError):
            async for _ in router_pb2_grpc.RouterServiceStub(channel).Generate(request):
                pass
    of_request = []
    for container in project.containers():
        lines = project.logs(container)
        assert lines, container
        for line in lines:
            assert {"ts", "level", "daemon", "instance", "logger", "event"} <= line.keys()
            assert line["event"] not in BUGS, json.dumps(line)
        of_request += [line for line in lines if line.get("request_id", line.get("request_id_")) == request_id]
    assert of_request


def test_down_is_quick_and_clean(project: Project) -> None:
    containers = project.containers()
    started = time.monotonic()
    project.compose("stop")
    codes = {container: project.state(container)["ExitCode"] for container in containers}
    project.down()
    seconds = time.monotonic() - started
    assert set(codes.values()) == {0}, codes
    assert seconds < 30, f"down took {seconds:.1f} s"
    assert project.compose("ps", "--all", "--quiet").split() == []
