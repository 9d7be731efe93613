"""locust: users that complete and stream, until they have done it NUM_REQUESTS times together."""

import os

import gevent
from locust import HttpUser, events, task

MODEL = os.environ["MODEL"]
NUM_REQUESTS = int(os.environ["NUM_REQUESTS"])


@events.init.add_listener
def end_in_time(environment, **_):
    """A run by the clock alone may end before anything was answered, on a machine that is busy."""

    def count(**_):
        if environment.stats.total.num_requests >= NUM_REQUESTS:
            gevent.spawn(environment.runner.quit)

    environment.events.request.add_listener(count)


class Reader(HttpUser):
    """One answer after the other."""

    @task
    def complete(self) -> None:
        body = {"model": MODEL, "prompt": "The Tyger", "max_tokens": 8}
        with self.client.post("/v1/completions", json=body, catch_response=True) as answer:
            if answer.status_code != 200 or not answer.json()["choices"]:
                answer.failure(answer.text)

    @task
    def stream(self) -> None:
        body = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 8, "stream": True}
        with self.client.post("/v1/chat/completions", json=body, stream=True, catch_response=True) as answer:
            lines = [line for line in answer.iter_lines() if line]
            if lines[-1] != b"data: [DONE]":
                answer.failure(str(lines[-1:]))
