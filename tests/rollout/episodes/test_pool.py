import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import CancelledError
from pathlib import Path

import psutil
import pytest

from mmrl.data.decode import read_header
from mmrl.errors import PluginError
from mmrl.rollout.episodes.failures import CallFailed, CallTally, EpisodeError
from mmrl.rollout.episodes.pool import EnvironmentPool
from mmrl.rollout.episodes.probe import environment_facts
from mmrl.rollout.episodes.scratch import Scratch
from mmrl.types import Message, Prompt, RawImage, Turn

pytestmark = pytest.mark.fresh_workers
PROMPT = Prompt("p1", (Message("user", "play"),))


def turn(text, index=0):
    return Turn(text, (), index, "stop", 10)


@pytest.fixture(scope="module")
def pool(game):
    """One worker for the tests that leave it alive."""
    os.environ["MY_API_KEY"] = "hunter2hunter2"
    with EnvironmentPool(game()) as found:
        yield found
    del os.environ["MY_API_KEY"]


@pytest.fixture
def session(pool):
    found = pool.open(PROMPT, 1)
    yield found
    found.close()


def said(session, text, index=0):
    return session.step(turn(text, index)).result(60)


def fault(session, text, index=0):
    with pytest.raises(CallFailed) as caught:
        said(session, text, index)
    return caught.value.cause


def test_an_episode_begins_goes_on_and_is_scored(session):
    assert session.opened.result(60).content == ()
    assert said(session, "hello").content == ("HELLO",)
    answer = said(session, "end", 1)
    assert (answer.content, answer.reward, answer.done, answer.role) == (("bye",), 1.0, True, "tool")
    assert session.score().result(60) == {"length": 8.0}


def test_a_call_that_raises_costs_its_episode_alone(pool, session):
    other = pool.open(PROMPT, 2)
    cause = fault(session, "raise_it")
    assert cause.startswith("raised KeyError: 'no \\x1b[31mcolour' at ") or "KeyError" in cause
    assert "\x1b" not in cause
    assert fault(session, "hello", 1) == cause  # it is over
    assert said(other, "hello").content == ("HELLO",)
    other.close()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("'text'", "answered step with str 'text'; expected an Observation"),
        ("None", "answered step with NoneType None; expected an Observation"),
        ("Observation(7)", "int 7; expected a text, an image"),
        ("Observation([['a']])", "a list within a list"),
        ("Observation('a', reward='1')", "str '1'; expected a finite number for reward"),
        ("Observation('a', reward=float('nan'))", "float nan; expected a finite number"),
        ("Observation('a', reward=10**400)", "expected a finite number for reward"),
        ("Observation('a', done=1)", "int 1; expected True or False for done"),
        ("Observation('a', role='system')", "'system'; expected role tool or user"),
        ("Observation('a', info={'x': {1, 2}})", "expected info that JSON can hold"),
        ("Observation('a', info={'x': 'y' * 70000})", "characters; expected info that JSON can hold"),
        ("Observation('a' * (2**20 + 1))", "expected at most 1048576 characters"),
        ("Observation(b'no image')", "bytes: These bytes are no image"),
        ("Observation(np.zeros((2, 2)))", "an array (2, 2) of float64; expected a uint8 array"),
        ("Observation(np.zeros((2, 2, 5), np.uint8))", "an array (2, 2, 5) of uint8"),
        ("Observation({'type': 'image', 'image': '/etc/passwd'})", "expected an image by value, or a data:image"),
        ("Observation({'type': 'image_url', 'image_url': {'url': 'http://x/y.png'}})", "expected an image by value"),
        ("Observation({'type': 'video'})", "expected a block such as"),
        ("Observation([np.zeros((1, 1), np.uint8)] * 65)", "65; expected at most 64 images"),
    ],
)
def test_an_answer_of_a_wrong_kind_is_a_fault_that_says_what_came(pool, given, message):
    session = pool.open(PROMPT, 1)
    assert message in fault(session, f"answer {given}")
    session.close()


@pytest.mark.parametrize("depth", [97, 100, 900])
def test_an_info_that_nests_too_deeply_is_left_out_and_costs_nothing(pool, depth):
    session = pool.open(PROMPT, 1)
    answer = said(session, f"answer Observation('a', info={{'x': json.loads('[' * {depth} + ']' * {depth})}})")
    assert answer.content == ("a",) and bool(answer.info) == (depth < 100)
    session.close()


@pytest.mark.parametrize("depth", [970, 980, 984, 988, 992, 2000])
def test_an_info_that_cannot_be_written_or_read_costs_its_episode_alone(pool, depth):
    session, other = pool.open(PROMPT, 1), pool.open(PROMPT, 2)
    nested = f"__import__('functools').reduce(lambda inner, _: [inner], range({depth}), [])"
    failure = session.step(turn(f"answer Observation('a', info={{'x': {nested}}})")).exception(60)
    assert failure is None or "expected info that JSON can hold" in str(failure)
    assert said(other, "hello").content == ("HELLO",)
    session.close()
    other.close()


def test_an_image_that_is_a_bomb_is_not_decoded(pool, tmp_path):
    from PIL import Image

    bomb = tmp_path / "bomb.png"
    Image.new("1", (10_000, 10_000)).save(bomb)
    assert bomb.stat().st_size < 200_000
    for given in (f"Path({str(bomb)!r}).read_bytes()", f"__import__('PIL.Image').Image.open({str(bomb)!r})"):
        session = pool.open(PROMPT, 1)
        assert "10000x10000" in fault(session, f"show {given}")
        session.close()


def test_images_come_as_files_whatever_they_were(pool, session):
    given = (
        "[np.full((2, 3), 7, np.uint8), np.full((2, 3, 3), 7, np.uint8), np.full((2, 3, 4), 255, np.uint8), 'and', "
        "__import__('PIL.Image').Image.new('RGB', (3, 2)), {'type': 'text', 'text': 'a block'}]"
    )
    content = said(session, f"show {given}").content
    headers = [read_header(RawImage(part, "x")) for part in content if isinstance(part, bytes)]
    assert [(header.width, header.height) for header in headers] == [(3, 2)] * 4
    assert [header.transparent for header in headers] == [False, False, True, False]
    assert [part for part in content if isinstance(part, str)] == ["and", "a block"]


def test_a_block_with_a_data_address_holds_its_image(pool, session):
    import base64
    import io

    from PIL import Image

    file = io.BytesIO()
    Image.new("RGB", (4, 5)).save(file, "JPEG")
    address = "data:image/jpeg;base64," + base64.b64encode(file.getvalue()).decode()
    for index, block in enumerate(
        [
            {"type": "image_url", "image_url": {"url": address}},
            {"type": "image", "image": address},
            {"type": "image", "data": address.partition(",")[2], "mimeType": "image/jpeg"},
        ]
    ):
        assert said(session, f"show {block!r}", index).content == (file.getvalue(),)


def test_hostile_text_comes_as_text(session):
    content = said(session, r"show 'a\ud800\x00\x1b[2J\n{}<|im_end|>'").content
    assert content == ("a\ufffd\x00\x1b[2J\n{}<|im_end|>",)


def test_what_an_environment_prints_goes_nowhere(session):
    assert said(session, "noise").content == ("quiet",)


def test_a_fork_does_not_answer_in_the_name_of_its_parent(session):
    assert said(session, "fork").content == ("the parent",)
    assert said(session, "hello", 1).content == ("HELLO",)


def test_secrets_are_not_in_a_worker(session):
    (text,) = said(session, "secrets").content
    assert "PATH" in text.split()
    assert "MY_API_KEY" not in text.split()
    assert text.endswith("no key")


def test_an_episode_writes_into_a_folder_of_its_own_that_goes_with_it(pool, session):
    (text,) = said(session, "write notes").content
    folder, home, temporary = map(Path, text.split())
    assert (folder / "notes").exists() and home.parent == temporary.parent == folder.parent
    other = pool.open(PROMPT, 1)
    assert said(other, "write notes").content[0].split()[0] != str(folder)
    other.close()
    session.close()
    said(last := pool.open(PROMPT, 1), "hello")
    last.close()
    assert not folder.exists() and home.exists()


def test_generators_depend_on_the_seed_and_the_turn_alone(pool):
    one, two, other = pool.open(PROMPT, 5), pool.open(PROMPT, 5), pool.open(PROMPT, 6)
    first = said(one, "dice").content
    said(two, "hello")
    assert said(two, "dice", 1).content == said(one, "dice", 1).content != first
    assert said(other, "dice").content != first
    for session in one, two, other:
        session.close()


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        ("hang", "did not answer within 1 s; its worker was killed"),
        ("crash", "ended its worker (exit code 3)"),
        ("show os.kill(os.getpid(), 35)", "ended its worker (signal 35)"),  # which has no name
    ],
)
def test_others_of_a_worker_that_is_lost_go_on_in_its_successor(game, text, cause):
    with EnvironmentPool(game(timeout_s=1)) as pool:
        lost, other = pool.open(PROMPT, 1), pool.open(PROMPT, 2)
        dice = said(other, "dice").content
        said(other, "hello", 1)
        assert fault(lost, text) == cause
        assert fault(lost, "hello", 1) == cause
        assert said(other, "dice", 0).content == dice
        assert other.score().result(60) == {"length": 13.0}
        assert pool.seconds > 0


def test_an_episode_that_is_played_again_otherwise_has_failed(game):
    with EnvironmentPool(game(timeout_s=1)) as pool:
        lost, moody, steady = pool.open(PROMPT, 1), pool.open(PROMPT, 2), pool.open(PROMPT, 3)
        said(moody, "moody")
        said(steady, "hello")
        fault(lost, "crash")
        assert "answered turn 0 differently" in fault(moody, "hello", 1)
        assert said(steady, "hello", 1).content == ("HELLO",)


def test_a_worker_leaves_nothing_behind(game):
    with EnvironmentPool(game()) as pool:
        session = pool.open(PROMPT, 1)
        said(session, "leave 981")
        folder = Path(said(session, "write x", 1).content[0].split()[1]).parent
        assert folder.exists()
    assert not folder.exists()
    deadline = time.monotonic() + 30
    while "sleep 981" in processes() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert "sleep 981" not in processes()


@pytest.mark.parametrize("how", ["stop", "hang"])
def test_what_a_tool_has_started_in_a_session_of_its_own_ends_with_the_worker(game, how):
    with EnvironmentPool(game(timeout_s=2)) as pool:
        session = pool.open(PROMPT, 1)
        pid = int(said(session, "part 600").content[0])
        assert psutil.pid_exists(pid)
        if how == "hang":
            assert "did not answer" in fault(session, "hang", 1)
    deadline = time.monotonic() + 30
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_failures_of_close_are_told_once(game):
    with EnvironmentPool(game()) as pool:
        for seed in (1, 2):
            session = pool.open(PROMPT, seed)
            said(session, "spoil")
            session.close()
        other = pool.open(PROMPT, 3)
        said(other, "hello")
        causes = [each.cause for each in pool.take_close_failures()]
        assert len(causes) == 2 and all("ValueError: not closed" in each for each in causes)
        assert pool.take_close_failures() == []


def test_a_folder_of_a_killed_process_is_removed_by_the_next_one(tmp_path, monkeypatch):
    source = "import os; from mmrl.rollout.episodes.scratch import Scratch; kept = Scratch(); os.kill(os.getpid(), 9)"
    subprocess.run([sys.executable, "-c", source], env={**os.environ, "TMPDIR": str(tmp_path)}, check=False)
    (left,) = tmp_path.iterdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    mine, foreign = Scratch(), tmp_path / "mmrl-environment-of-an-older-version"
    foreign.mkdir()
    other = Scratch()
    assert not left.exists() and mine.path.exists() and other.path.exists() and foreign.exists()
    mine.remove()
    mine.remove()
    other.remove()
    assert [*tmp_path.iterdir()] == [foreign]


def processes():
    return subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout


def test_closing_does_not_wait_for_a_call(game):
    with EnvironmentPool(game()) as pool:
        session = pool.open(PROMPT, 1)
        said(session, "hello")
        running, waiting = session.step(turn("hang", 1)), session.step(turn("hello", 2))
        time.sleep(0.2)
        start = time.monotonic()
    assert time.monotonic() - start < 30
    with pytest.raises(CallFailed):
        running.result(1)
    with pytest.raises(CancelledError):
        waiting.result(1)


def test_an_environment_that_cannot_be_prepared_is_an_error_and_no_failure(game):
    with EnvironmentPool(game("Broken")) as pool, pytest.raises(EpisodeError, match="raised RuntimeError: no board"):
        pool.open(PROMPT, 1).opened.result(60)
    with pytest.raises(PluginError, match="raised RuntimeError: no board"):
        environment_facts(game("Broken"))


def test_a_successor_that_does_not_start_costs_the_call_and_is_tried_again(game, tmp_path):
    """A full disk or a server that restarts is over at some time; an environment that never started is not."""
    mark = tmp_path / "no board"
    with EnvironmentPool(game("Fragile", marks=str(tmp_path))) as pool:
        assert "ended its worker" in fault(pool.open(PROMPT, 1), "crash")
        mark.touch()
        session = pool.open(PROMPT, 1)
        with pytest.raises(CallFailed, match=r"lost its worker, and another one did not start: .*no board now"):
            session.opened.result()
        assert "did not start" in fault(session, "hello")
        mark.unlink()
        assert said(pool.open(PROMPT, 1), "hello").content == ("HELLO",)
    mark.touch()
    with EnvironmentPool(game("Fragile", marks=str(tmp_path))) as pool:
        for _ in range(2):
            with pytest.raises(EpisodeError, match="no board now"):
                pool.open(PROMPT, 1).opened.result()


@pytest.mark.parametrize("name", ["tempfile.mkdtemp", "subprocess.Popen"])
def test_a_machine_without_room_for_a_worker_is_an_error_that_says_what_to_do(game, monkeypatch, name):
    def full(*arguments, **options):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(name, full)
    with EnvironmentPool(game()) as pool, pytest.raises(EpisodeError, match="No space left on device") as caught:
        pool.open(PROMPT, 1).opened.result()
    assert "set TMPDIR to another one" in caught.value.remedy
    with pytest.raises(EpisodeError, match="no worker can be started for environment"):
        environment_facts(game())


@pytest.mark.full
def test_facts_tell_of_tools_and_components(game):
    facts = environment_facts(game(timeout_s=3))
    assert (facts.components, facts.timeout_s) == (("length",), 3.0)
    (schema,) = facts.tools
    assert schema["function"]["name"] == "add"
    assert schema["function"]["parameters"]["properties"]["a"] == {"type": "integer", "description": "The first."}
    assert schema["function"]["parameters"]["required"] == ["a"]
    with pytest.raises(PluginError, match="tool 'turn' cannot be described to the policy"):
        environment_facts(game("Untyped"))


def test_failures_are_too_many_above_five_percent_of_all_that_a_step_may_call():
    tally = CallTally("game", possible=40)
    for _ in range(40):
        tally.call()
    tally.fail(CallFailed("hung"), "here")
    tally.fail(CallFailed("hung"), "here")  # 2 of 40 are 5 %
    with pytest.raises(EpisodeError, match="'game' failed in 3 of the step's 40 calls; the last time, it hung"):
        tally.fail(CallFailed("hung"), "here")
    assert tally.failed_fraction == 3 / 40
    early = CallTally("game", made=1, possible=59)
    for _ in range(3):
        early.fail(CallFailed("hung"), "here")  # 3 of 60 at most
    with pytest.raises(EpisodeError):
        early.fail(CallFailed("hung"), "here")
    early = CallTally("game", made=1, possible=159)
    for _ in range(2):
        early.fail(CallFailed("hung"), "here")
    early.made, early.possible = 40, 0  # the others have ended early
    early.finish()
    early.made = 39
    with pytest.raises(EpisodeError, match="failed in 2 of the step's 39 calls; the last time, it hung"):
        early.finish()
    CallTally("game").finish()
    CallTally("game", made=3).fail(CallFailed("hung"), "here")  # one alone among others
    with pytest.raises(EpisodeError):
        CallTally("game", made=1).fail(CallFailed("hung"), "here")


def test_a_reply_of_nonsense_costs_the_worker(game):
    with EnvironmentPool(game()) as pool:
        other = pool.open(PROMPT, 2)
        assert said(other, "hello").content == ("HELLO",)
        for index, (nonsense, cause) in enumerate(
            [
                ("nonsense", "ended its worker (something else wrote to its stream for replies)"),
                ('{"number": 7}', "answered a call that was not made"),
            ]
        ):
            session = pool.open(PROMPT, 1)
            session.opened.result(60)
            assert fault(session, f"scribble {nonsense}").startswith(cause)
            assert said(other, "hello", index + 1).content == ("HELLO",)
