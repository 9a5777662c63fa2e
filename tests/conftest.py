"""Make `import ver_ppo` and `import notebooks` work from wherever pytest is started."""

import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]


@pytest.fixture(autouse=True)
def seeded():
    """Every test starts from the same torch generator; one thread is enough for tiny networks."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
