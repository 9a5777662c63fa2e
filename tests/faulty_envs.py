"""Environments that fail, for the tests. Importing this module registers them:
`tests.faulty_envs:Faulty-raise-v0` and so on."""

import itertools
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import time
from array import array
from pathlib import Path

import gymnasium as gym
import numpy as np

from tests.envs import Count


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
}
RUBBISH = {  # a wrong answer (observation, reward), made of the right one
    "observation": lambda observation, reward: (observation * np.nan, reward),
    "reward": lambda observation, reward: (observation, np.inf),
    "shape": lambda observation, reward: (observation[:1], reward),
    "keys": lambda observation, reward: ({"another": observation}, reward),
}
FAULTS = [*DEADLY, *RUBBISH]


class Fragile(gym.Env):
    """Episodes of three steps, with a reward of 1 at the end. Environments with an odd number crash
    in every episode. `crash` says where: in its `first` step, in the `middle` one, in the `reset`
    after it, or `never`."""

    observation_space = gym.spaces.Box(0, 1, (3,), np.float32)
    action_space = gym.spaces.Discrete(1)

    def __init__(self, number, crash):
        self.crashes = crash if number % 2 else "never"
        self.count = 0

    def crash(self, where):
        if self.crashes == where:
            out_of_paint()

    def reset(self, *, seed=None, options=None):
        if self.count:  # not when it starts
            self.crash("reset")
        self.count = 0
        return np.eye(3, dtype=np.float32)[0], {}

    def step(self, action):
        self.crash(["first", "middle", "last"][self.count])
        self.count += 1
        ended = self.count == 3
        return np.eye(3, dtype=np.float32)[self.count % 3], float(ended), ended, False, {}


def misbehave(fault, observation, reward=0.0):
    """Do what `fault` names. Returns the wrong answer, if there is one."""
    if fault in DEADLY:
        DEADLY[fault]()
    return RUBBISH[fault](observation, reward)


class Faulty(Count):
    """Fails in its 90th step, which is the 10th of its 5th episode. `fault` says how."""

    def __init__(self, fault, render_mode=None):
        super().__init__(limit=20)
        self.fault = fault
        self.life = 0

    def step(self, action):
        self.life += 1
        observation, reward, *rest = super().step(action)
        if self.life == 90:
            observation, reward = misbehave(self.fault, observation, reward)
        return observation, reward, *rest


# the step at which an environment of Zoo fails; the episodes have 5 steps
PLACES = {"first": 6, "middle": 8, "reset": 10}


class Zoo(Count):
    """Environment `number` fails once, as FAULTS[number] says: in the first step of its second
    episode, in the middle of that episode, or in the reset after it. They do so one after the
    other, so that the lines that their workers print do not mix. Environments with larger numbers
    never fail. A file in --runs-dir is the sign that the environment has failed."""

    def __init__(self, options, number, place, render_mode=None):
        super().__init__(limit=5)
        self.place = place
        self.life = 0
        self.fault = FAULTS[number] if number < len(FAULTS) else None
        self.failed = Path(options.runs_dir) / f"{self.fault} has failed"

    def fails(self, place):
        """Whether to fail now. Says so to the next life of this environment."""
        fails = self.fault and place == self.place and self.life == PLACES[place]
        fails = fails and not self.failed.exists()
        if fails:
            time.sleep(0.2 * FAULTS.index(self.fault))
            self.failed.touch()
        return fails

    def reset(self, *, seed=None, options=None):
        observation, info = super().reset(seed=seed)
        if self.fails("reset"):
            observation, _ = misbehave(self.fault, observation)
        return observation, info

    def step(self, action):
        self.life += 1
        observation, reward, *rest = super().step(action)
        if self.fails("first") or self.fails("middle"):
            observation, reward = misbehave(self.fault, observation, reward)
        return observation, reward, *rest


class Household(Count):
    """Uses multiprocessing, and starts a program that runs until `close` ends it politely. `close`
    notes the program's exit code. If environment `number` has a fault in `faults`, it fails in
    its 20th step, and makes a file of that name in --runs-dir. Then the program is left behind,
    because `close` hangs. With "leave", it never fails, and `close` does nothing."""

    def __init__(self, options, number, faults=(), render_mode=None):
        super().__init__(limit=20)
        self.folder = Path(options.runs_dir)
        self.fault = faults[number] if number < len(faults) else None
        self.program = None
        self.life = 0

    def step(self, action):
        self.life += 1
        if self.program is None:
            helper = multiprocessing.get_context("fork").Process(target=time.sleep, args=(0,))
            helper.start()
            helper.join()
            (self.folder / "output").touch()
            self.program = subprocess.Popen(["tail", "-f", str(self.folder / "output")])
        if self.fault in DEADLY and self.life == 20:
            (self.folder / self.fault).touch()
            DEADLY[self.fault]()
        return super().step(action)

    def close(self):
        if self.fault in DEADLY and self.life >= 20:
            DEADLY["hang"]()
        if self.program is not None and self.fault != "leave":
            self.program.terminate()
            code = self.program.wait()
            with open(self.folder / "closed", "a") as file:
                file.write(f"{code}\n")


class Stumbler(Count):
    """Each step is worth 1. About every second episode raises in its second step; the other
    episodes end with the sixth."""

    def __init__(self, render_mode=None):
        super().__init__(limit=6)

    def reset(self, *, seed=None, options=None):
        self.stumbles = seed % 2
        return super().reset(seed=seed)

    def step(self, action):
        observation, _, *rest = super().step(action)
        if self.steps == 2 and self.stumbles:
            out_of_paint()
        return observation, 1.0, *rest


class Doomed(Count):
    """Fails in its first step. `fault` says how."""

    def __init__(self, fault, render_mode=None):
        super().__init__()
        self.fault = fault

    def step(self, action):
        DEADLY[self.fault]()


class Clinging(Count):
    """Works, but `close` hangs."""

    def close(self):
        DEADLY["hang"]()


class Endless(Count):
    """Its episodes never end."""

    def __init__(self, render_mode=None):
        super().__init__(limit=10**9)


class Broken(Count):
    """Cannot be made."""

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
    """Its only step ends the episode, with an answer that cannot be used."""

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

    A step's number is (environment, name of the episode, step in the episode). The number stands in
    the observation too, as floats so small that no network sees them. The book of each life is a
    file in the folder $NUMBERED_BOOKS, named after the environment and the time. Deaths and hangs
    come every $NUMBERED_DEATH_SEC and $NUMBERED_HANG_SEC seconds on average.
    """

    def __init__(self, number, render_mode=None):
        super().__init__(gym.make("CartPole-v1"))
        self.number = number
        bits = gym.spaces.Box(-np.inf, np.inf, (4,), np.float32)
        parts = {"task": self.env.observation_space, "number": bits}
        self.observation_space = gym.spaces.Dict(parts)
        self.book = None
        self.random = random.Random()
        self.until = {}
        for name in ("DEATH", "HANG"):
            mean_sec = float(os.environ[f"NUMBERED_{name}_SEC"])
            self.until[name] = time.monotonic() + self.random.expovariate(1 / mean_sec)

    def reset(self, *, seed=None, options=None):
        observation, info = self.env.reset(seed=seed)
        self.seed = self.random.getrandbits(31)  # names the episode
        self.steps = 0
        return self.numbered(observation), info

    def numbered(self, observation):
        """The observation with the number of the step that follows it."""
        number = self.number, self.seed >> 16, self.seed & 0xFFFF, self.steps
        return {"task": observation, "number": np.array(number, np.int32).view(np.float32)}

    def step(self, action):
        first = self.book is None
        if first:
            path = Path(os.environ["NUMBERED_BOOKS"]) / f"{self.number}-{time.time_ns()}"
            trial = multiprocessing.current_process().name == "trial 0"
            self.book = open(os.devnull if trial else path, "ab", buffering=0)
        self.book.write(array("I", [self.seed, self.steps]))
        time.sleep(0.001 * self.random.choice([1, 1, 2, 5, 20]))
        if time.monotonic() > self.until["DEATH"] and not first:
            DEADLY[self.random.choice(["raise", "exit", "segfault", "kill"])]()
        if time.monotonic() > self.until["HANG"] and not first:
            DEADLY["hang"]()
        self.steps += 1
        observation, *rest = self.env.step(action)
        return self.numbered(observation), *rest


def number_of(number_B4):
    """The numbers in a batch of observations, as tuples (environment, seed, step)."""
    columns = np.ascontiguousarray(number_B4).view(np.int32).T.tolist()
    return [(e, (high << 16) + low, step) for e, high, low, step in zip(*columns)]


class Traced(Count):
    """Kills its process once, at the k-th line of ver_ppo.py that follows the making of this
    environment. The run's --exp-name is a list with a k for each worker."""

    def __init__(self, options, number, render_mode=None):
        super().__init__()
        worker = number % options.num_workers
        lines = itertools.count(1)
        k = int(options.exp_name.split()[worker])
        killed = Path(options.runs_dir) / f"killed {worker}"

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


def register(name, kind, **arguments):
    """Register an environment of this module."""
    gym.register(f"{name}-v0", f"{__name__}:{kind.__name__}", kwargs=arguments)


for kind in (Broken, Clinging, Endless, Stumbler, Unusable):
    register(kind.__name__, kind)
for fault in FAULTS:
    register(f"Faulty-{fault}", Faulty, fault=fault)
for fault in DEADLY:
    register(f"Doomed-{fault}", Doomed, fault=fault)
for place in PLACES:
    register(f"Zoo-{place}", Zoo, place=place, options=None, number=0)
for where in ("never", "first", "middle", "reset"):
    register(f"Fragile-{where}", Fragile, crash=where, number=0)
for kind in (Household, Traced):
    register(kind.__name__, kind, options=None, number=0)
for kind in (Late, Numbered):
    register(kind.__name__, kind, number=0)
