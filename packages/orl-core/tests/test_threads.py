"""Waiting threads sleep unless the user said otherwise."""

import os

import pytest

from orl_core.threads import sleep_when_idle


def test_idle_threads_sleep(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    monkeypatch.delenv("GOMP_SPINCOUNT", raising=False)
    sleep_when_idle()
    assert os.environ["OMP_WAIT_POLICY"] == "passive"
    assert os.environ["GOMP_SPINCOUNT"] == "0"


def test_what_the_user_set_stays(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("OMP_WAIT_POLICY", "active")
    sleep_when_idle()
    assert os.environ["OMP_WAIT_POLICY"] == "active"
