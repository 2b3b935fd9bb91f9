"""The environment `mcp`: servers that are started from the config's command, and nothing else."""

from __future__ import annotations

import asyncio
import copy
import io
import json
import os
import signal
import sys
import time
from pathlib import Path

import psutil
import pytest
from PIL import Image

from mmrl.config.plugin_specs import EnvironmentSpec
from mmrl.errors import ConfigError
from mmrl.rollout.episodes.failures import CallFailed
from mmrl.rollout.episodes.observations import ReceivedObservation
from mmrl.rollout.episodes.process import EnvironmentProcess
from mmrl.testing import check_environment
from mmrl.types import Call, Message, Observation, Prompt, Turn
from mmrl_environments.mcp import MCP

SERVER = '''\
import base64, io, json, os, sys
from mcp.server import MCPServer
from mcp.types import ImageContent
from PIL import Image

server = MCPServer("tests")

@server.tool()
def add(a: int, b: int) -> str:
    """Add two numbers."""
    return str(a + b)

@server.tool()
def look() -> ImageContent:
    """Look at a picture."""
    file = io.BytesIO()
    Image.new("RGB", (6, 4), "red").save(file, "PNG")
    return ImageContent(type="image", data=base64.b64encode(file.getvalue()).decode(), mime_type="image/png")

@server.tool()
def names(count: int) -> list[str]:
    """List names."""
    return [f"{number}.txt" for number in range(count)]

@server.tool()
def surroundings() -> str:
    """Tell where the server runs."""
    return json.dumps({"environ": dict(os.environ), "folder": os.getcwd(), "pid": os.getpid(), "argv": sys.argv})

@server.tool()
def fail() -> str:
    """Fail."""
    raise ValueError("no luck")

@server.tool()
def die() -> str:
    """End the server."""
    os._exit(3)

server.run("stdio")
'''
PLAIN = """\
import json, os, signal, sys, time

def reply(**fields):
    print(json.dumps({"jsonrpc": "2.0", "id": asked["id"], **fields}), flush=True)

if "stubborn" in sys.argv:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
for line in sys.stdin:
    asked = json.loads(line)
    method, given = asked["method"], asked.get("params", {})
    if "id" not in asked:
        continue
    if method == "initialize":
        server = {"capabilities": {"tools": {}}, "serverInfo": {"name": "plain", "version": "1"}}
        reply(result={"protocolVersion": given["protocolVersion"], **server})
    elif method == "tools/list":
        tools = [{"name": name, "inputSchema": {"type": "object"}} for name in ("where", "wrong", "hang", "die")]
        reply(result={"tools": tools})
    elif method != "tools/call":
        reply(error={"code": -32601, "message": "unknown"})
    elif given["name"] == "where":
        found = {"pid": os.getpid(), "home": os.environ["HOME"], "folder": os.getcwd()}
        reply(result={"content": [{"type": "text", "text": json.dumps(found)}]})
    elif given["name"] == "wrong":
        reply(error={"code": given["arguments"]["code"], "message": "no luck" * 1000})
    elif given["name"] == "die":
        os._exit(3)
    else:
        time.sleep(600)
if "stubborn" in sys.argv:
    time.sleep(600)
"""
"""Speaks the protocol itself: it starts in no time, and answers with any error."""
WHERE = Call("where", {})
PROMPT = Prompt("p", (Message("user", "?"),))


@pytest.fixture
def command(tmp_path) -> list[str]:
    (tmp_path / "server.py").write_text(SERVER)
    return [sys.executable, str(tmp_path / "server.py")]


@pytest.fixture
def plain(tmp_path) -> list[str]:
    (tmp_path / "plain.py").write_text(PLAIN)
    return [sys.executable, "-I", "-S", str(tmp_path / "plain.py")]


@pytest.fixture
def begin():
    """Makes prepared environments, whose servers end with the test."""
    made = []

    def begin(command, **options) -> MCP:
        mcp = MCP(MCP.Config(command=command, **options))
        mcp.prepare()
        made.append(mcp)
        return mcp

    yield begin
    for mcp in made:
        mcp.close()
        for server in mcp._shared:
            server.stop()


def play(mcp: MCP, *turns: list[Call]) -> list[Observation]:
    async def all_turns() -> list[Observation]:
        await mcp.reset(PROMPT, 0)
        return [await mcp.step(Turn("", tuple(calls), 0, "stop", 100)) for calls in turns]

    return asyncio.run(all_turns())


def test_a_public_server_runs_offline(begin):
    """mcp-server-time of the package index."""
    mcp = begin([sys.executable, "-m", "mcp_server_time", "--local-timezone", "UTC"])
    assert {tool["function"]["name"] for tool in mcp.tools()} == {"get_current_time", "convert_time"}
    given = {"source_timezone": "Asia/Tokyo", "time": "16:30", "target_timezone": "Asia/Kolkata"}
    (found,) = play(mcp, [Call("convert_time", given)])
    (text,) = found.content
    assert json.loads(text)["target"]["datetime"].endswith("T13:00:00+05:30") and not found.done
    (wrong,) = play(mcp, [Call("convert_time", given | {"time": "noon"})])
    assert "Invalid time" in wrong.content[0]


@pytest.mark.full
def test_tools_answer_with_texts_and_images(begin, command):
    mcp = begin(command, tools=["add", "look", "fail", "names"])
    schema = mcp.tools()[0]["function"]
    assert schema["name"] == "add" and schema["description"] == "Add two numbers."
    assert schema["parameters"]["properties"]["a"]["type"] == "integer"
    found, listed, failed, misfit, unknown, done = play(
        mcp,
        [Call("add", {"a": 2, "b": 3}), Call("look", {})],
        [Call("names", {"count": 3})],
        [Call("fail", {})],
        [Call("add", {"a": "\ud800", "b": []}), Call("add", None)],
        [Call("die", {})],
        [],
    )
    text, image = found.content
    assert text == "5" and Image.open(io.BytesIO(image)).size == (6, 4)
    assert listed.content == ["0.txt\n", "1.txt\n", "2.txt"]
    assert failed.content == ["Error executing tool fail"] and failed.info == {"is_error": True} and not failed.done
    assert all("add" in part for part in misfit.content) and len(misfit.content) == 2
    assert unknown.content == ["There is no tool 'die'. Tools: add, look, fail, names."] and done.done


def test_a_server_sees_no_secret_no_shell_and_works_in_an_empty_folder(begin, command, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "canary-of-a-token")
    monkeypatch.setenv("DB_PASSWORD", "canary-of-a-password")
    monkeypatch.chdir(tmp_path)
    words = [command[0], "server.py", "$(touch mark)", "; touch mark", "`touch mark`", "*"]
    mcp = begin(words, env={"GREETING": "hello"})
    (found,) = play(mcp, [Call("surroundings", {})])
    seen = json.loads(found.content[0])
    assert seen["argv"] == [str(tmp_path / "server.py"), *words[2:]]
    assert seen["environ"]["GREETING"] == "hello" and "canary" not in found.content[0]
    assert Path(seen["folder"]) not in (tmp_path, Path.home(), Path("/")) and "mmrl-mcp-" in seen["folder"]
    assert not (tmp_path / "mark").exists()
    mcp._shared[0].stop()
    assert not Path(seen["folder"]).exists()


def test_a_server_is_the_workers_or_an_episodes(begin, plain):
    def servers(**options) -> list[int]:
        base, pids = begin(plain, **options), []
        for _ in range(2):
            episode = copy.copy(base)
            pids += [json.loads(found.content[0])["pid"] for found in play(episode, [WHERE], [WHERE])]
            episode.close()
        return pids

    assert len(set(servers())) == 1
    one, same, other, again = servers(per="episode")
    assert one == same != other == again


async def ask(mcp: MCP, *calls: Call) -> list:
    return list((await mcp.step(Turn("", calls, 0, "stop", 100))).content)


@pytest.mark.parametrize("end", [pytest.param("hang", marks=pytest.mark.full), "die", "killed"])
def test_a_call_of_another_episode_starts_a_server_that_has_ended(begin, plain, end):
    base = begin(plain, call_timeout_s=0.3)

    async def both() -> None:
        one, other = copy.copy(base), copy.copy(base)
        for each in (one, other):
            await each.reset(PROMPT, 0)
        (first,) = map(json.loads, await ask(other, WHERE))
        if end == "killed":
            os.kill(first["pid"], signal.SIGKILL)
            await asyncio.to_thread(ended, first["pid"])
        else:
            with pytest.raises(
                RuntimeError, match=r"did not answer within 0\.3 s" if end == "hang" else "has ended in"
            ):
                await ask(one, Call(end, {}))
        (second,) = map(json.loads, await ask(other, WHERE))
        assert second["pid"] != first["pid"]
        assert json.loads((await ask(other, WHERE))[0])["pid"] == second["pid"]
        await asyncio.to_thread(ended, first["pid"])

    asyncio.run(both())


def ended(pid: int) -> None:
    """Wait until the process is gone."""
    deadline = time.monotonic() + 10
    while psutil.pid_exists(pid):
        assert time.monotonic() < deadline, f"{pid} is still there"
        time.sleep(0.02)


@pytest.mark.parametrize("code", [-32603, -32602, -32000, 7])
def test_any_error_of_a_call_is_read_as_text_and_costs_nothing(begin, plain, code):
    mcp = begin(plain)
    (found, wrong, again) = play(mcp, [WHERE], [Call("wrong", {"code": code})], [WHERE])
    assert wrong.content[0].startswith("wrong: no luck") and len(wrong.content[0]) < 2020 and not wrong.done
    assert found.content == again.content


def test_a_program_by_a_path_is_of_the_working_folder(begin, plain, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "server.sh").write_text(f"#!/bin/sh\nexec {' '.join(plain)}\n")
    (tmp_path / "server.sh").chmod(0o755)
    assert "pid" in play(begin(["./server.sh"]), [WHERE])[0].content[0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"call_timeout_s": 60}, "call_timeout_s is 60, but the environment is given up after 60 s"),
        ({"per": "episode", "start_timeout_s": 90}, "start_timeout_s is 90, but"),
    ],
)
def test_a_limit_that_the_environments_own_would_cut_is_refused(begin, plain, options, message):
    with pytest.raises(ConfigError, match=message):
        begin(plain, **options)


@pytest.mark.full
def test_a_server_ends_with_its_worker_and_works_in_its_scratch_at_the_users_home(plain):
    options = {"name": "mcp", "command": [*plain, "stubborn"], "call_timeout_s": 0.3}
    process = EnvironmentProcess(EnvironmentSpec.model_validate(options))
    try:
        turn = Turn("", (WHERE,), 0, "stop", 100)
        process.await_start()
        for session in (1, 2):
            process.call("open", session, PROMPT, 7)
        (first,) = map(json.loads, ReceivedObservation.of(process.call("step", 1, turn)).content)
        with pytest.raises(CallFailed, match=r"did not answer within 0\.3 s"):
            process.call("step", 1, Turn("", (Call("hang", {}),), 1, "stop", 100))
        (second,) = map(json.loads, ReceivedObservation.of(process.call("step", 2, turn)).content)
        assert first["pid"] != second["pid"] and first["home"] == second["home"] == os.environ["HOME"]
        assert all("mmrl-environment-" in each["folder"] for each in (first, second))
        process.kill()
        for each in (first, second):
            ended(each["pid"])
    finally:
        process.stop()
    assert not Path(second["folder"]).exists()


@pytest.mark.full
def test_a_server_that_does_not_start_is_a_config_error_that_shows_what_it_said(begin, tmp_path):
    (tmp_path / "broken.py").write_text("raise RuntimeError('no licence')")
    (tmp_path / "silent.py").write_text("import time; time.sleep(60)")
    with pytest.raises(ConfigError, match="no licence") as caught:
        begin([sys.executable, str(tmp_path / "broken.py")])
    assert "broken.py" in caught.value.where and "terminal" in caught.value.remedy
    with pytest.raises(ConfigError, match="has not told its tools within 1 s"):
        begin([sys.executable, str(tmp_path / "silent.py")], start_timeout_s=1)
    with pytest.raises(ConfigError, match="there is no program 'no-such-program'"):
        begin(["no-such-program"])
    children = psutil.Process(os.getpid()).children(recursive=True)
    assert not [child for child in children if "silent.py" in " ".join(child.cmdline())]


@pytest.mark.full
def test_a_tool_that_the_server_lacks_is_named(begin, command):
    with pytest.raises(ConfigError, match="the server has no tool fly") as caught:
        begin(command, tools=["add", "fly"])
    assert caught.value.possible == "add, die, fail, look, names, surroundings"


@pytest.mark.full
def test_it_keeps_the_rules_of_environments(begin, command):
    said = begin(command, tools=["add", "look"], repeatable=True)
    assert said.repeatable and not begin(command, tools=["add", "look"]).repeatable
    check_environment(said)
