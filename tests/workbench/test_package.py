"""`import workbench as wb`, and the folders that could hide ours."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import workbench as wb
from models import hooked


def test_the_public_names() -> None:
    assert wb.load is hooked.load
    assert wb.generate is hooked.generate
    for name in wb.__all__:
        assert callable(getattr(wb, name))
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = wb.nonsense


def test_a_users_own_models_folder_is_named(tmp_path: Path) -> None:
    """Python puts the working directory first; a folder `models` there hides ours, and that is said in a sentence."""
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "__init__.py").touch()
    root = Path(wb.__file__).parent.parent
    code = f"import sys; sys.path.append({str(root)!r}); import workbench"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, timeout=60)
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert "is imported as 'models' and hides the workbench's own; rename it, or run from another folder" in last
