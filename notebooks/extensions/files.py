"""Stand-ins for two functions of ver_ppo.py."""

import os
from io import BytesIO

import torch


def write_file(path, content):
    """Replace a file. After a power cut, the old one or the new one is there, whole. In a
    stranger's folder, a symbolic link leads nowhere. Raises OSError."""
    temporary = path.with_name(f"{path.name}.tmp")
    if path.parent.is_symlink():
        raise OSError(f"{path.parent} is a symbolic link")
    temporary.unlink(missing_ok=True)
    with open(temporary, "xb") as file:  # a new file
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def write_checkpoint(content, path):
    """Replace a file with a checkpoint. Raises OSError."""
    memory = BytesIO()  # torch.save to a file does not say why writing fails
    torch.save(content, memory)
    write_file(path, memory.getbuffer())
