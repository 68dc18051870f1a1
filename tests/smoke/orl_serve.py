"""What orl-serve can do in this version: be imported and tell its version."""

import orl_serve

assert orl_serve.__version__
print("orl-serve works")
