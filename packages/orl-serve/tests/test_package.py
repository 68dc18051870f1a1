import subprocess
import sys


def test_import_pulls_in_nothing_heavy():
    code = "import orl_serve, sys; print(sorted({'torch', 'transformers', 'dlmrt'} & sys.modules.keys()))"
    finished = subprocess.run([sys.executable, "-I", "-c", code], capture_output=True, text=True, check=True)
    assert finished.stdout.strip() == "[]"
