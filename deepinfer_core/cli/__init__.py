"""The command line: parse, call, print; no decisions, and no torch until a command computes."""
