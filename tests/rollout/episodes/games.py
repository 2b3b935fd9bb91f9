"""An environment that does what the policy's text tells it, and what its options say."""

GAME = '''
import asyncio, json, os, random, subprocess, sys, time
from pathlib import Path

import numpy as np

from mmrl.interfaces import Environment, tool
from mmrl.interfaces import PluginConfig
from mmrl.types import Observation


class Game(Environment):
    """Answers each command with itself, in upper case."""

    timeout_s = 20.0
    components = ("length",)

    class Config(PluginConfig):
        first: str = ""
        """The first observation."""
        marks: str = ""
        """A folder for notes that outlive a worker."""
        naps: bool = False
        """True to take up to 50 ms for each call."""

    def prepare(self):
        self.prepared = os.getcwd()

    @tool
    def add(self, a: int, b: int = 1) -> int:
        """Add two numbers.

        Args:
            a: The first.
            b: The second.
        """
        return a + b

    def reset(self, prompt, seed):
        self.prompt, self.seed, self.said = prompt, seed, []
        self.nap()
        if self.config.first == "random":
            return Observation(str(random.random()))
        if self.config.first == "other each time":
            return Observation(str(time.time()))
        return Observation(eval(self.config.first)) if self.config.first else None

    async def step(self, turn):
        self.nap()
        self.said.append(turn.text)
        verb, _, rest = turn.text.partition(" ")
        found = getattr(self, verb, lambda rest: Observation(turn.text.upper()))(rest)
        return await found if asyncio.iscoroutine(found) else found

    def score(self):
        self.nap()
        return {"length": sum(map(len, self.said))}

    def nap(self):
        if self.config.naps:
            time.sleep(int.from_bytes(os.urandom(1), "big") / 5100)

    # What a turn may ask for.

    def hang(self, rest):
        time.sleep(600)

    def crash(self, rest):
        os._exit(3)

    def crash_once(self, rest):
        mark = Path(self.config.marks) / f"crash-{self.prompt.id}"
        if not mark.exists():
            mark.touch()
            os._exit(3)
        return Observation("crashed before")

    def sleep(self, rest):
        time.sleep(float(rest))
        return Observation("slept")

    def raise_it(self, rest):
        raise KeyError("no \\x1b[31mcolour")

    def show(self, rest):
        return Observation(eval(rest))

    def answer(self, rest):
        return eval(rest)

    def noise(self, rest):
        print("noise"); sys.stderr.write("noise"); os.write(1, b"noise\\n")
        subprocess.run(["sh", "-c", "echo noise; echo noise >&2"])
        return Observation("quiet")

    def scribble(self, rest):
        for number in range(3, 12):
            try:
                os.write(number, rest.encode() + b"\\n")
            except OSError:
                pass
        return Observation("scribbled")

    def fork(self, rest):
        if os.fork() == 0:
            return Observation("the child")
        time.sleep(0.2)
        return Observation("the parent")

    def leave(self, rest):
        subprocess.Popen(["sleep", rest])
        return Observation("left")

    def part(self, rest):
        return Observation(str(subprocess.Popen(["sleep", rest], start_new_session=True).pid))

    def spoil(self, rest):
        self.spoiled = True
        return Observation("spoiled")

    def close(self):
        if getattr(self, "spoiled", False):
            raise ValueError("not closed")

    def secrets(self, rest):
        return Observation(" ".join(sorted(os.environ)) + " " + os.environ.get("MY_API_KEY", "no key"))

    def write(self, rest):
        Path(rest).write_text("x")
        (Path.home() / rest).write_text("x")
        return Observation(f"{os.getcwd()} {Path.home()} {os.environ['TMPDIR']}")

    def dice(self, rest):
        return Observation(f"{random.random()} {np.random.rand()}")

    def moody(self, rest):
        return Observation(str(os.getpid()))

    def pay(self, rest):
        return Observation("paid", reward=float(rest))

    def end(self, rest):
        return Observation("bye", reward=1.0, done=True)


class Fragile(Game):
    """Cannot be prepared while there is a mark."""

    def prepare(self):
        if (Path(self.config.marks) / "no board").exists():
            raise RuntimeError("no board now")


class Broken(Game):
    """Cannot be prepared."""

    def prepare(self):
        raise RuntimeError("no board")


class Untyped(Game):
    """Has a tool that nobody can call."""

    def tools(self):
        def turn(degrees):
            """Turn."""
        return [turn]
'''
