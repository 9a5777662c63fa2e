"""Make `import ver_ppo` and `import notebooks` work from wherever and however pytest is started."""

import signal
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from tensorboard.summary.writer import event_file_writer

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
pytest.register_assert_rewrite("tests.helpers")  # its assertions show their values, too

# A job in the background of a script ignores SIGINT, and a job under nohup SIGHUP. All processes
# that the tests start would ignore them, too
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)

# TensorBoard reads event files in the order of their names. Names from the same second differ in a
# counter at their end, and 10 comes before 9. So the counter starts at 1000
event_file_writer._global_uid = event_file_writer.AtomicCounter(1000)

# before any test imports torch, because it sets variables that torch reads at that moment. With
# torch's own values, two threads on a busy machine learn ten times more slowly
import ver_ppo


def pytest_addoption(parser):
    parser.addoption("--whole", action="store_true", help="notebooks train as long as for a reader")


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch):
    """Without `--device`, tests in this process use the CPU: their own tensors are there."""
    choose = ver_ppo.choose_device

    def choose_here(options):
        return choose(replace(options, device="cpu") if options.device == "auto" else options)

    monkeypatch.setattr(ver_ppo, "choose_device", choose_here)


@pytest.fixture(autouse=True)
def seeded():
    """Every test starts from the same torch generator; one thread is enough for tiny networks."""
    ver_ppo.torch.set_num_threads(1)
    ver_ppo.torch.manual_seed(0)
