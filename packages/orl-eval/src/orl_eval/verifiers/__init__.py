"""Verifiers by their task: pure functions (prompt, response, reference) -> bool, shared with the trainer."""

from orl_core.arithmetic import verify as verify_arithmetic
from orl_core.arithmetic import verify_final as verify_arithmetic_final

__all__ = ["verify_arithmetic", "verify_arithmetic_final"]
