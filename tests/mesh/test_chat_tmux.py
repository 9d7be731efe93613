"""`radixmesh chat` as people meet it: keys typed into a terminal (tmux), the screen read, the mesh alive or dying."""

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import pytest_asyncio
from support.jobs import MODEL
from support.mesh import Mesh, running_mesh
from support.tmux import TmuxScreen

pytestmark = pytest.mark.asyncio(loop_scope="module")
SRC = Path(__file__).parents[2] / "src"
EXPECTED = {entry["name"]: entry["expected"] for entry in json.loads((MODEL / "recitations.json").read_text())}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def slow_mesh() -> AsyncIterator[Mesh]:
    """Simulated: a long answer would take half a minute."""
    async with running_mesh("simulated", worker={"simulated_base_us": 20_000}) as mesh:
        yield mesh


@asynccontextmanager
async def chatting(mesh: Mesh, folder: Path, *flags: str) -> AsyncIterator[TmuxScreen]:
    command = [sys.executable, "-m", "radixmesh.cli", "chat", "--router", ",".join(mesh.routers), *flags]
    environment = {
        "PYTHONPATH": str(SRC),
        "LANG": "C.UTF-8",
        "TERM": "screen-256color",
        "RADIXMESH_CHAT_HISTORY": str(folder / "state" / "history"),
    }
    async with TmuxScreen(command, environment) as screen:
        await screen.until_shown(">>>")
        yield screen


async def is_idle(mesh: Mesh) -> bool:
    load = (await mesh.scheduler_state()).load
    return (load.num_running, load.num_waiting) == (0, 0)


@pytest.mark.slow
async def test_a_conversation_with_commands_history_and_leaving(mesh: Mesh, tmp_path: Path) -> None:
    async with chatting(mesh, tmp_path, "--temperature", "0") as screen:
        assert "tiny-llama: /help for commands" in screen.text()
        screen.enter("Hello! My name is Ada.")
        await screen.until_shown("Hello, Ada! How can I help you?")
        # The second turn goes with the first: only so can the model know the name.
        screen.enter("What is my name?")
        text = await screen.until_shown("tokens cached]", count=2)
        assert "Your name is Ada." in text
        figures = [line for line in text.splitlines() if line.endswith("tokens cached]")]
        assert all("tokens/s, first after " in line for line in figures)
        # The first turn's pages are found again.
        assert "0 of " in figures[0] and "[" in figures[1]
        cached, prompt = (int(figures[1].split(" prompt")[0].split()[i]) for i in (-3, -1))
        assert 0 < cached < prompt
        assert "\x1b[2m[" in screen.colours(), "figures are dim"

        screen.enter(f"/save {tmp_path}/chat.json")
        await screen.until_shown(f"saved to {tmp_path}/chat.json")
        screen.enter(f"/save {tmp_path}/chat.json")
        await screen.until_shown("exists already")
        said = json.loads((tmp_path / "chat.json").read_text())
        assert [message["role"] for message in said] == ["user", "assistant", "user", "assistant"]
        assert said[3]["content"] == "Your name is Ada."

        screen.enter("/retry")
        await screen.until_shown("Your name is Ada.", count=2)
        screen.enter("/clear")
        screen.enter("/system Answer in French.")
        await screen.until_shown("system message: Answer in French.")
        screen.enter("What is the capital of France?")
        await screen.until_shown("La capitale de la France est Paris, évidemment. 🗼")
        screen.enter("/temperature warm")
        await screen.until_shown("'warm' is not a number")
        screen.enter("/wat")
        await screen.until_shown("there is no command /wat")
        screen.enter("/help")
        await screen.until_shown("ask the last question again")
        # Line editing: a typo is mended in the middle, an earlier line comes back.
        screen.enter("/clear")
        screen.enter("/system -")
        await screen.until_shown("no system message")
        screen.type("Say helo in Japanese.")
        screen.press(*["Left"] * len("o in Japanese."))
        screen.type("l")
        screen.press("Enter")
        await screen.until_shown("こんにちは！ (konnichiwa) 👋")
        screen.enter("/clear")
        await screen.until_shown("the conversation begins anew", count=3)
        screen.press("Up", "Up", "Enter")
        await screen.until_shown("こんにちは！ (konnichiwa) 👋", count=2)
        await screen.until(lambda text: text.endswith("\n>>>"), "the next prompt")
        screen.press("C-c")
        await screen.until_shown("Ctrl-D leaves", count=2)
        screen.press("C-d")
        assert await screen.exit_code() == 0
    # The next chat remembers what was typed, and nobody else may read it.
    history = tmp_path / "state" / "history"
    assert "Say hello in Japanese." in history.read_text() and history.stat().st_mode & 0o077 == 0
    async with chatting(mesh, tmp_path, "--temperature", "0") as screen:
        screen.press("Up", "Enter")
        await screen.until_shown("こんにちは！ (konnichiwa) 👋")
        screen.enter("/exit")
        assert await screen.exit_code() == 0


async def test_ctrl_c_ends_the_answer_and_not_the_program(slow_mesh: Mesh, tmp_path: Path) -> None:
    async with chatting(slow_mesh, tmp_path) as screen:
        screen.enter("Talk for long.")
        before = screen.text()
        await screen.until(lambda text: len(text) > len(before) + 60, "an answer begins")
        screen.type("typed meanwhile")
        assert not await is_idle(slow_mesh)
        screen.press("C-c")
        text = await screen.until_shown("[stopped, ")
        async with asyncio.timeout(20):
            while not await is_idle(slow_mesh):
                await asyncio.sleep(0.05)
        # Keys typed meanwhile did not show in the answer; they wait at the prompt.
        assert "typed meanwhile" not in text.split("[stopped")[0]
        await screen.until_shown(">>> typed meanwhile")
        screen.press("C-c")
        screen.enter("/tokens 5")
        screen.enter("Once more.")
        await screen.until_shown("[cut: no more tokens allowed, 5 tokens, ")
        # Straight behind the answer, before the next prompt shows or after it.
        screen.press("C-d")
        assert await screen.exit_code() == 0


async def test_ctrl_c_pressed_around_the_end_of_answers(slow_mesh: Mesh, tmp_path: Path) -> None:
    """However fast it is pressed, the program lives on and hears Ctrl-D."""
    async with chatting(slow_mesh, tmp_path, "--max-tokens", "5") as screen:
        for number in range(8):
            screen.enter(f"Once more, {number}.")
            await asyncio.sleep(0.05 * number)
            screen.press("C-c", "C-c")
        # Everything typed is taken in its order: at the second of these prompts nothing of the first lines is left.
        screen.enter("/tokens 77")
        await screen.until_shown("at most 77 tokens an answer")
        screen.press("C-d")
        assert await screen.exit_code() == 0


@pytest.mark.slow
async def test_the_chat_outlives_the_router_and_takes_a_pipe(mesh: Mesh, tmp_path: Path) -> None:
    async with chatting(mesh, tmp_path, "--temperature", "0") as screen:
        screen.enter("My name is Ada. Recite The Tyger.")
        await screen.until_shown("In the forests of the night;")
        assert mesh.cluster.kill("router")
        text = await screen.until_shown("tokens cached", timeout_s=40)
        assert "resumed 1x]" in text
        recited = text.split("Recite The Tyger.\n", 1)[1].rsplit("\n[", 1)[0]
        assert recited.strip() == EXPECTED["chat.tyger-for-ada"].strip()

    command = [sys.executable, "-m", "radixmesh.cli", "chat", "--temperature", "0", "--router", mesh.routers[0]]
    environment = {"PYTHONPATH": str(SRC), "LANG": "C.UTF-8", "HOME": str(tmp_path)}

    async def chat(lines: str, *flags: str) -> tuple[int | None, str, str]:
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(
            *command, *flags, env=environment, stdin=pipe, stdout=pipe, stderr=pipe
        )
        out, err = await process.communicate(lines.encode())
        return process.returncode, out.decode(), err.decode()

    answers = "Hello, Alan! How can I help you?\nYour name is Alan.\n"
    assert await chat("Hello! My name is Alan.\n\nWhat is my name?\n") == (0, answers, "")
    code, out, _ = await chat("/nothing\nWho are you?\n")
    assert (code, "language model" in out) == (1, False)
    code, out, _ = await chat("Who are you?\n", "--model", "gpt-0")
    assert (code, out) == (1, "radixmesh chat: there is no model 'gpt-0'; served: tiny-llama\n")
    assert not (tmp_path / ".local").exists(), "a pipe leaves no history"
    # Nobody listens there.
    command[-1] = "127.0.0.1:1"
    code, out, err = await chat("Who are you?\n")
    assert (code, out) == (1, "") and err.startswith("radixmesh chat: ") and "Traceback" not in err
