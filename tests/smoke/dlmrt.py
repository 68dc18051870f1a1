"""What dlmrt alone can do: solve problems with the model in the wheel, offline, from Python and on the command line."""

import json
import subprocess
import sys
from pathlib import Path

import dlmrt
from orl_core.arithmetic import problems, verify

engine = dlmrt.Engine.from_pretrained("embedded:base")
cases = problems("test", 10, 0)
solved = sum(verify(case.prompt, engine.generate(case.prompt).text, case.reference) for case in cases)
assert solved >= 8, f"embedded:base solved {solved} of {len(cases)} problems"

question = "Tom has 12 apples, buys 7 more and eats 5. How many apples does he have?"
command = [str(Path(sys.executable).with_name("dlmrt")), "generate", question, "--json"]
printed = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
assert "14" in printed["text"], printed
assert printed["tpf"] > 0
print(f"dlmrt works: {solved} of {len(cases)} problems solved")
