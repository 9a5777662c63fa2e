"""Environments that misbehave, for the tests. Importing registers them:
`tests.faulty_envs:Faulty-raise-v0` and so on."""

import itertools
import multiprocessing
import os
import random
import resource
import signal
import subprocess
import sys
import tempfile
import time
from array import array
from pathlib import Path

import gymnasium as gym
import numpy as np
import torch

from tests.envs import Count


def leak():
    """Take memory until the limit of this process, which is near."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(
        resource.RLIMIT_AS, (pages * resource.getpagesize() + 2**28, resource.RLIM_INFINITY)
    )
    hoard = []
    while True:
        hoard.append(bytearray(2**20))


def out_of_paint():
    """A simulator's own exception."""
    raise RuntimeError("the simulator is out of paint")


DEADLY = {  # what can happen instead of an answer
    "raise": out_of_paint,
    "exit": lambda: os._exit(7),
    "quit": lambda: sys.exit("the simulator is sold out"),
    "segfault": lambda: os.kill(os.getpid(), signal.SIGSEGV),
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "hang": lambda: time.sleep(3600),
    "leak": leak,
}
RUBBISH = {  # what an answer can be instead: (observation, reward) made of the right ones
    "observation": lambda observation, reward: (observation * np.nan, reward),
    "reward": lambda observation, reward: (observation, np.inf),
    "shape": lambda observation, reward: (observation[:1], reward),
    "keys": lambda observation, reward: ({"another": observation}, reward),
}


class Faulty(Count):
    """Misbehaves at its 90th step of life, the 10th of its 5th episode, in the way that `fault`
    names."""

    def __init__(self, fault, render_mode=None):
        super().__init__(limit=20)
        self.fault, self.life = fault, 0

    def step(self, action):
        self.life += 1
        observation, reward, *rest = super().step(action)
        if self.life == 90 and self.fault in DEADLY:
            DEADLY[self.fault]()
        if self.life == 90:
            observation, reward = RUBBISH[self.fault](observation, reward)
        return observation, reward, *rest


class Mayfly(Count):
    """Lives for one episode of three steps, with rewards 1, 2, 13, which ends as `ending` says. The
    reset after it fails in the way that `fault` names."""

    def __init__(self, ending, fault, render_mode=None):
        super().__init__(limit=3)
        self.ending = ending
        self.fault = fault
        self.steps = 0

    def reset(self, *, seed=None, options=None):
        if self.steps == self.limit:
            DEADLY[self.fault]()
        return super().reset(seed=seed)

    def step(self, action):
        observation, _, _, ended, info = super().step(action)
        reward = self.steps + 10 * ended
        terminated = ended and self.ending == "terminated"
        truncated = ended and self.ending == "truncated"
        return observation, reward, terminated, truncated, info


class Parent(Faulty):
    """Starts a child process with its second step, which it never ends: `close` says that it was
    called, and hangs. Misbehaves as Faulty."""

    def __init__(self, fault, options, render_mode=None):
        super().__init__(fault)
        self.folder = Path(options.runs_dir)

    def step(self, action):
        if self.life == 1:
            (self.folder / "output").touch()
            subprocess.Popen(["tail", "-f", str(self.folder / "output")])
        return super().step(action)

    def close(self):
        if self.life > 1:  # not the one that is only looked at
            with open(self.folder / "closed", "a") as file:
                file.write(self.fault[0])
            time.sleep(3600)


class Household(Count):
    """Uses multiprocessing, and has a program of its own running, which `close` ends politely: it
    keeps the seconds that this takes. With `leaves`, it does not end it."""

    def __init__(self, options, leaves=False, render_mode=None):
        super().__init__(limit=20)
        self.folder = Path(options.runs_dir)
        self.leaves = leaves
        self.program = None

    def step(self, action):
        if self.program is None:
            helper = multiprocessing.get_context("fork").Process(target=time.sleep, args=(0,))
            helper.start()
            helper.join()
            (self.folder / "output").touch()
            self.program = subprocess.Popen(["tail", "-f", str(self.folder / "output")])
        return super().step(action)

    def close(self):
        if self.program is not None and not self.leaves:
            began_at = time.monotonic()
            self.program.terminate()
            self.program.wait()
            with open(self.folder / "closed", "a") as file:
                file.write(f"{time.monotonic() - began_at}\n")


class Stumbler(Count):
    """Each step is worth 1. Every second episode raises at its second step, the others end with the
    sixth."""

    episodes = 0

    def __init__(self, render_mode=None):
        super().__init__(limit=6)

    def reset(self, *, seed=None, options=None):
        Stumbler.episodes += 1
        self.stumbles = Stumbler.episodes % 2
        return super().reset(seed=seed)

    def step(self, action):
        observation, _, *rest = super().step(action)
        if self.steps == 2 and self.stumbles:
            out_of_paint()
        return observation, 1.0, *rest


class Stuck(Count):
    """Hangs in its first step."""

    def step(self, action):
        time.sleep(3600)


class Endless(Count):
    """Its episodes never end."""

    def __init__(self, render_mode=None):
        super().__init__(limit=10**9)


class Meddler(Count):
    """Changes what belongs to its whole process, as it is made and in every step; and keeps what it
    finds there: its own state, not the trainer's."""

    def __init__(self, render_mode=None):
        super().__init__(limit=20)
        os.chdir(tempfile.mkdtemp(prefix="of-the-environment"))
        torch.set_grad_enabled(False)
        torch.set_default_dtype(torch.float64)
        torch.manual_seed(0)

    def step(self, action):
        assert os.path.basename(os.getcwd()).startswith("of-the-environment")
        assert torch.get_default_dtype() is torch.float64 and not torch.is_grad_enabled()
        torch.manual_seed(0)
        return super().step(action)


class Occupied(Count):
    """Can be made once at a time, as if it had a port."""

    def __init__(self, options, number, render_mode=None):
        super().__init__(limit=20)
        self.place = Path(options.runs_dir) / "port"
        try:
            self.place.mkdir()
        except FileExistsError:
            raise OSError("the port is in use") from None

    def close(self):
        self.place.rmdir()


class Broken(Count):
    """Cannot even be made."""

    def __init__(self, render_mode=None):
        raise RuntimeError("no licence")


class Late(Count):
    """Can be made, but the second one (of four on each rank) cannot be reset."""

    def __init__(self, number, render_mode=None):
        super().__init__()
        self.number = number

    def reset(self, *, seed=None, options=None):
        if self.number % 4 == 1:
            raise RuntimeError("no licence")
        return super().reset(seed=seed)


class Unusable(Count):
    """One step is an episode, and shows that nothing can be learned here."""

    metadata = {"render_modes": [], "metrics": ("arrived",)}

    def __init__(self, how, render_mode=None):
        super().__init__(limit=1)
        self.how = how

    def reset(self, *, seed=None, options=None):
        if self.how == "locked":
            raise RuntimeError("the door is locked")
        return super().reset(seed=seed)

    def step(self, action):
        observation, reward, *ends, _ = super().step(action)
        if self.how == "vector":
            reward = np.ones(3)
        if self.how == "nan":
            reward = np.nan
        info = {"arrived": np.ones(2) if self.how == "array" else 1.0}
        if self.how == "missing":
            info = {}
        return observation, reward, *ends, info


class Numbered(gym.Wrapper):
    """CartPole that takes 1 to 20 ms a step, dies and hangs at random, and keeps a book of every
    step it is asked for.

    A step's number is (seed of the episode, step in the episode); it stands in the observation too,
    as floats so small that no network sees them. The book of each life is a file in the folder
    $NUMBERED_BOOKS. Deaths and hangs come every $NUMBERED_DEATH_SEC and $NUMBERED_HANG_SEC seconds
    on average.
    """

    def __init__(self, render_mode=None):
        super().__init__(gym.make("CartPole-v1"))
        number = gym.spaces.Box(-np.inf, np.inf, (3,), np.float32)
        self.observation_space = gym.spaces.Dict(
            {"task": self.env.observation_space, "number": number}
        )
        self.book, self.random = None, random.Random()
        mean_sec = {name: float(os.environ[f"NUMBERED_{name}_SEC"]) for name in ("DEATH", "HANG")}
        self.until = {
            name: time.monotonic() + self.random.expovariate(1 / sec)
            for name, sec in mean_sec.items()
        }

    def reset(self, *, seed=None, options=None):
        observation, info = self.env.reset(seed=seed)
        self.seed, self.steps = seed, 0
        return self.numbered(observation), info

    def numbered(self, observation):
        number = np.array([self.seed >> 16, self.seed & 0xFFFF, self.steps], np.int32).view(
            np.float32
        )
        return {"task": observation, "number": number}

    def step(self, action):
        if self.book is None:
            path = Path(os.environ["NUMBERED_BOOKS"]) / f"{os.getpid()}-{time.time_ns()}-{id(self)}"
            self.book = open(path, "ab", buffering=0)
        self.book.write(array("I", [self.seed, self.steps]))
        time.sleep(0.001 * self.random.choice([1, 1, 2, 5, 20]))
        if time.monotonic() > self.until["DEATH"]:
            DEADLY[self.random.choice(["raise", "exit", "segfault", "kill"])]()
        if time.monotonic() > self.until["HANG"]:
            DEADLY["hang"]()
        self.steps += 1
        observation, *rest = self.env.step(action)
        return self.numbered(observation), *rest


def number_of(number_B3):
    """The numbers in a batch of observations, as tuples (seed, step)."""
    high, low, steps = np.ascontiguousarray(number_B3).view(np.int32).T.tolist()
    return [((a << 16) + b, step) for a, b, step in zip(high, low, steps)]


class Traced(Count):
    """Kills its process, once, at the k-th line of ver_ppo.py that it comes to after this
    environment is made; k is the run's --exp-name."""

    def __init__(self, options, render_mode=None):
        super().__init__()
        lines = itertools.count(1)
        k = int(options.exp_name)
        killed = Path(options.runs_dir) / "killed"

        def trace(frame, event, _):
            if not frame.f_code.co_filename.endswith("ver_ppo.py"):
                return None
            if event == "line" and next(lines) == k:
                killed.touch()
                os.kill(os.getpid(), signal.SIGKILL)
            return trace

        frame = sys._getframe()
        while (frame := frame.f_back) and not killed.exists():  # callers go on under the tracer
            frame.f_trace = trace
            sys.settrace(trace)


gym.register("Household-v0", f"{__name__}:Household", kwargs={"options": None})
gym.register("Traced-v0", f"{__name__}:Traced", kwargs={"options": None})
arguments = {"options": None, "number": 0}
gym.register("Occupied-v0", f"{__name__}:Occupied", kwargs=arguments)
gym.register("Late-v0", f"{__name__}:Late", kwargs={"number": 0})
for name in ("Broken", "Endless", "Meddler", "Numbered", "Stuck", "Stumbler", "Unusable"):
    gym.register(f"{name}-v0", f"{__name__}:{name}")
for fault in ("raise", "exit", "reward"):
    gym.register(
        f"Parent-{fault}-v0", f"{__name__}:Parent", kwargs={"fault": fault, "options": None}
    )
for ending, fault in itertools.product(("terminated", "truncated"), ("raise", "kill")):
    gym.register(
        f"Mayfly-{ending}-{fault}-v0",
        f"{__name__}:Mayfly",
        kwargs={"ending": ending, "fault": fault},
    )
for fault in (*DEADLY, *RUBBISH):
    gym.register(f"Faulty-{fault}-v0", f"{__name__}:Faulty", kwargs={"fault": fault})
