"""Make `import ver_ppo` and `import notebooks` work from wherever pytest is started."""

import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
pytest.register_assert_rewrite("tests.helpers")  # its assertions show their values, too


@pytest.fixture(autouse=True)
def seeded():
    """Every test starts from the same torch generator; one thread is enough for tiny networks."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
