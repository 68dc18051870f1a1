"""How idle CPU threads wait."""

import os


def sleep_when_idle() -> None:
    """Lets OpenMP threads that wait for one another sleep instead of spin; call it before torch is first imported.

    Spinning gains a little on an idle machine, and costs nearly everything where another program wants the same cores.
    What the user has set in the environment stays.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    os.environ.setdefault("GOMP_SPINCOUNT", "0")
