"""`python -m orl_train`, which launchers such as `accelerate launch -m` need."""

from orl_train.cli import app

app()
